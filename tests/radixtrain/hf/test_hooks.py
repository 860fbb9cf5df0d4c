"""What a prepared model does with a radix batch that was changed on the way, and what it cannot return."""

import copy
import gc

import pytest
import torch

from radixtrain import RadixCollator, generate, prepare_model, share_prefixes, sharing_report
from radixtrain.errors import UserError

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [N, N, N, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [N] * 3 + [3]},
]


@pytest.fixture
def model(tiny_qwen3):
    return prepare_model(tiny_qwen3())


def changed(**changes):
    """A batch of 6 unique tokens; an entry that is None is left out."""
    batch = {**RadixCollator()(FEATURES), **changes}
    return {name: value for name, value in batch.items() if value is not None}


class TestInputs:
    def test_a_batch_that_lost_its_positions(self, model):
        """Then Hugging Face counts them by row: a gradient 0.87 off, and no error."""
        with pytest.raises(UserError, match=r"needs its position_ids \[1, 6\], got None: without them a token after"):
            model(**changed(position_ids=None))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"position_ids": torch.arange(4)[None]}, r"needs its position_ids \[1, 6\], got \(1, 4\)"),
            ({"input_ids": torch.tensor([[1, 2, 3]])}, r"needs input_ids \[1, 6\], got \(1, 3\)"),
        ],
    )
    def test_entries_of_another_batch(self, model, changes, message):
        with pytest.raises(UserError, match=message):
            model(**changed(**changes))

    @pytest.mark.parametrize("name", ["attention_mask", "past_key_values"])
    def test_what_cannot_be_used_with_a_radix_batch(self, model, name):
        with pytest.raises(UserError, match=f"a radix batch came with {name}; "):
            model(**changed(**{name: torch.ones(1, 6, dtype=torch.int64)}))

    def test_inputs_by_position(self, model):
        """A backbone that is called with ids and mask as positional arguments."""
        batch = changed()
        ids, positions = batch.pop("input_ids"), batch.pop("position_ids")
        named = model.model(ids, position_ids=positions, **batch).last_hidden_state
        assert torch.equal(model.model(ids, None, positions, **batch).last_hidden_state, named)


class TestOutputs:
    @pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
    def test_what_would_come_back_by_unique_token(self, model, name):
        with pytest.raises(UserError, match=f"{name} would hold unique tokens, not those of each sequence"):
            model(**changed(), **{name: True})

    def test_the_same_by_configuration(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3(output_hidden_states=True))
        with pytest.raises(UserError, match="output_hidden_states would hold unique tokens"):
            model(**changed())

    def test_an_ordinary_batch_still_returns_them(self, model):
        assert len(model(input_ids=torch.tensor([[7, 8]]), output_hidden_states=True).hidden_states) == 3

    @pytest.mark.parametrize("logits_to_keep", [1, torch.tensor([0, 1])], ids=["last", "indices"])
    def test_logits_to_keep(self, model, logits_to_keep):
        with pytest.raises(UserError, match="logits_to_keep cannot be used with a radix batch"):
            model(**changed(), logits_to_keep=logits_to_keep)


class TestAroundTheHooks:
    """A radix batch that does not pass the hooked module ran on plain causal attention: gradients 1.2 to 2.1 off."""

    MESSAGE = "receives a radix batch that did not pass the backbone which prepare_model prepared"

    def inputs(self):
        return {name: value for name, value in changed().items() if name not in ("labels", "shift_labels")}

    def test_another_model_of_the_same_configuration(self, model):
        """After the watch for models that are not prepared has ended, only the shapes are left."""
        inputs = self.inputs()
        model(**changed())
        with pytest.raises(RuntimeError, match="size of tensor"):
            type(model)(model.config).model(**inputs)

    def test_a_backbone_that_is_prepared_twice(self, model):
        with pytest.raises(UserError, match="Qwen3Model is prepared already, alone or inside another model"):
            prepare_model(model.model)


class TestCopies:
    def test_a_copy_of_a_part_does_not_copy_the_model(self, model):
        """It held a second model in memory."""
        gc.collect()
        before = sum(isinstance(each, type(model)) for each in gc.get_objects())
        copied = copy.deepcopy(model.model)
        assert copied and sum(isinstance(each, type(model)) for each in gc.get_objects()) == before

    def test_a_copy_of_the_model_has_its_own_hooks(self, model):
        copied = copy.deepcopy(model)
        (hook,) = copied.model._forward_pre_hooks.values()
        assert hook.__self__.model is copied
        assert torch.equal(copied(**changed()).loss, model(**changed()).loss)


def test_generation_is_not_counted_as_an_ordinary_batch(tiny_qwen3):
    """Neither with `share_prefixes`, whose report is about training."""
    model = share_prefixes(tiny_qwen3())
    before = str(sharing_report(model))
    generate(model, [[7, 8, 9, 1, 2], [7, 8, 9, 3]], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert str(sharing_report(model)) == before
