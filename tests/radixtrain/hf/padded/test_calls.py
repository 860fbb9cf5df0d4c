"""Calls that are not shared: each runs as the untouched model does, to the bit, and is counted under its reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from radixtrain import share_prefixes, sharing_report
from radixtrain.hf.backbone import CACHE
from radixtrain.hf.sharing_report import SharingReport
from tests.support import cases
from tests.support.models import tiny_model, with_adapters
from tests.support.models import tiny_qwen3 as qwen3
from tests.support.steps import assert_same_gradient

IDS = torch.tensor([[7, 8, 9, 1, 2], [7, 8, 9, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK}
LEFT = {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}
PACKED = {"input_ids": torch.tensor([[7, 8, 7, 8]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def gpt2() -> Any:
    return tiny_model("GPT2LMHeadModel")


def replica() -> Any:
    model = qwen3()
    model.model._is_replica = True
    return model


def assert_untouched(make: Callable[[], Any], call: Callable[[Any], Any], reason: str | None) -> SharingReport:
    """The same bits as the untouched model, and one call counted under the reason."""
    untouched, shared = make(), share_prefixes(make())
    expected, found = (list(filter(torch.is_tensor, tree_leaves(call(model)))) for model in (untouched, shared))
    assert len(expected) == len(found) > 0
    assert all(map(torch.equal, expected, found))
    report = sharing_report(shared)
    assert report.num_shared == 0
    assert reason is None or set(report.not_shared) == {reason}, report
    return report


FROM_CONFIGURATION = (
    "a cache is wanted; call model.train(), pass use_cache=False, or set model.config.use_cache = False"
)
# Of Gemma 4's small checkpoints: from the third layer on keys are those of earlier layers, and masks are cut to the
# rows whose logits are kept.
SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
}
CALLS: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "embeddings": (
        "inputs_embeds are given, and tokens are compared by their ids",
        qwen3,
        {"inputs_embeds": torch.ones(2, 5, 32), "attention_mask": MASK},
    ),
    "three axes": ("input_ids have 3 dimensions, not 2", lambda: gpt2().transformer, {"input_ids": IDS[None]}),
    "a cache is wanted": ("a cache is wanted (use_cache=True)", qwen3, {**BATCH, "use_cache": True}),
    "a cache, by configuration in evaluation mode": (FROM_CONFIGURATION, lambda: qwen3().eval(), BATCH),
    "a mask of four axes": (
        "attention_mask is not [B, L]",
        qwen3,
        {"input_ids": IDS, "attention_mask": torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)},
    ),
    "a longer mask": ("attention_mask is not [B, L]", qwen3, {"input_ids": IDS, "attention_mask": torch.ones(2, 7)}),
    "one position": ("position_ids are not [B, L]", qwen3, {**BATCH, "position_ids": torch.tensor([[3]])}),
    "positions between tokens": (
        "position_ids are not whole numbers",
        qwen3,
        {**BATCH, "position_ids": torch.arange(5)[None] / 2},
    ),
    "attention weights": (
        "output_attentions",
        lambda: qwen3(attn_implementation="eager"),
        {**BATCH, "output_attentions": True},
    ),
    "attention weights, by configuration": (
        "output_attentions",
        lambda: qwen3(attn_implementation="eager", output_attentions=True),
        BATCH,
    ),
    "states in a tuple": (
        "hidden states or router logits in a tuple; pass return_dict=True",
        lambda: qwen3().model,
        {**BATCH, "output_hidden_states": True, "return_dict": False, "use_cache": False},
    ),
    "segments": ("token_type_ids is given", gpt2, {**BATCH, "token_type_ids": IDS * 0}),
    "images without a tower": (
        "pixel_values is given",
        qwen3,
        {**BATCH, "pixel_values": torch.ones(1, 3, 4, 4)},
    ),
    "a video": (
        "pixel_values_videos is given",
        lambda: tiny_model("LlavaForConditionalGeneration", vision_feature_layer=-1, image_token_id=40),
        {**BATCH, "pixel_values_videos": torch.zeros(2, 3, 28, 28)},
    ),
    "a replica": ("torch.nn.DataParallel runs copies of the model", replica, BATCH),
    "a cache by another name": ("kept_states is given", qwen3, {**BATCH, "kept_states": ((torch.ones(2, 2),),)}),
    "an input that is not known": ("speaker_ids is given", qwen3, {**BATCH, "speaker_ids": torch.ones(2)}),
    "all hidden": ("attention_mask hides every token", qwen3, {"input_ids": IDS, "attention_mask": MASK * 0}),
    "a hole": (
        "attention_mask has a hole",
        qwen3,
        {"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])},
    ),
    "packed rows": (
        "position_ids jump within a row",
        qwen3,
        {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "use_cache": False},
    ),
    "packed, not from 0": (
        "position_ids jump within a row",
        qwen3,
        {"input_ids": IDS[:1], "position_ids": torch.tensor([[2, 3, 4, 0, 1]]), "use_cache": False},
    ),
    "packed, with a cache": (
        "a row has several sequences, which transformers separates only with use_cache=False",
        qwen3,
        PACKED,
    ),
    "packed, and not separated": (
        "a row has several sequences, and this model does not separate them",
        lambda: tiny_model("BioGptForCausalLM"),
        {**PACKED, "use_cache": False},
    ),
    "negative positions": (
        "position_ids are negative",
        qwen3,
        {**BATCH, "position_ids": torch.arange(-2, 3)[None]},
    ),
    "left padding": ("left padding without position_ids, and learned positions (wpe)", gpt2, LEFT),
    "frequencies": (
        "dynamic rotary embeddings change their frequencies after 4 tokens",
        lambda: qwen3(max_position_embeddings=5, rope_parameters=DYNAMIC),
        {"input_ids": IDS, "position_ids": torch.arange(1, 6)[None]},
    ),
    "chunks": (
        "attention within chunks of 4 tokens, and longer rows",
        lambda: tiny_model("Llama4ForCausalLM"),
        BATCH,
    ),
    "not causal, by argument": (
        "is_causal is given, which layers hand on to their attention",
        qwen3,
        {"input_ids": IDS, "is_causal": False},
    ),
    "a soft-cap, by argument": (
        "softcap is given, which layers hand on to their attention",
        lambda: qwen3(attn_implementation="eager"),
        {**BATCH, "softcap": 1.0},
    ),
    "rows that a backbone drops": (
        "logits_to_keep is given, by which a Gemma4TextModel drops rows itself",
        lambda: tiny_model("Gemma4ForCausalLM", **SHARED_KEYS).model,
        {"input_ids": IDS, "logits_to_keep": 1, "use_cache": False},
    ),
    "a function of GPT-2's own": (
        None,  # its trial fails
        lambda: tiny_model("GPT2LMHeadModel", attn_implementation="eager", reorder_and_upcast_attn=True),
        BATCH,
    ),
    "nothing in common": (
        "less than min_ratio = 1.1 to save",
        qwen3,
        {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_left_alone(name):
    reason, make, inputs = CALLS[name]
    assert_untouched(make, lambda model: model(**inputs), reason)


def test_the_empty_batch_fails_as_ever():
    untouched, shared = qwen3(), share_prefixes(qwen3())
    errors = []
    for model in (untouched, shared):
        with pytest.raises(RuntimeError) as caught:
            model(input_ids=IDS[:0])
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and set(sharing_report(shared).not_shared) == {"the batch is empty"}


class TestCaches:
    @pytest.mark.parametrize("name", CACHE)
    @pytest.mark.parametrize("train", [False, True])
    def test_given_by_its_present_and_its_old_name(self, name, train):
        """A second call attends to the first if this transformers takes the name, and is not shared if it does not."""

        def call(model: Any) -> Any:
            given = DynamicCache(config=model.config)
            with torch.set_grad_enabled(train):
                first = model.train(train)(input_ids=IDS[:, :3], use_cache=True, **{name: given})
                return first.logits, model(input_ids=IDS[:, 3:], use_cache=True, **{name: given}).logits

        assert_untouched(qwen3, call, "a cache is given")

    def test_by_configuration_without_gradients(self):
        assert_untouched(qwen3, torch.no_grad()(lambda model: model(**BATCH)), FROM_CONFIGURATION)


class TestState:
    def test_frequencies_that_a_longer_call_left(self):
        """Hugging Face keeps them at a batch of exactly the limit, and takes them back at a shorter one."""

        def call(model: Any) -> list[Tensor]:
            short, long = torch.arange(1, 6)[None], torch.arange(1, 13)[None]
            found = [model(ids, use_cache=False).logits for ids in (six, long, six, short, six)]
            assert torch.equal(found[0], found[4]) and not torch.equal(found[0], found[2])
            return found

        six = torch.cat([IDS, IDS[:, :1]], dim=1)
        report = assert_untouched(lambda: qwen3(max_position_embeddings=6, rope_parameters=DYNAMIC), call, None)
        assert report.not_shared["dynamic rotary embeddings change their frequencies after 5 tokens"] == 4

    def test_transforms(self):
        """`torch.func` has its own rules for autograd functions."""

        def call(model: Any) -> list[Tensor]:
            def loss(weights: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(model, weights, (IDS,), {"use_cache": False}).logits.square().mean()

            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            return list(torch.func.grad(loss)(weights).values())

        def make() -> Any:
            return qwen3(attn_implementation="eager", tie_word_embeddings=False)

        assert_untouched(make, call, "torch.func or forward-mode differentiation runs")

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_recorded(self):
        """What is shared depends on the tokens of one call, and the program that is recorded gets others."""

        def call(model: Any) -> list[Tensor]:
            model.eval().requires_grad_(False)
            with torch.no_grad():
                logits_of = lambda ids: model(ids, use_cache=False).logits  # noqa: E731
                recorded = torch.jit.trace(logits_of, (IDS,), check_trace=False)
                return [recorded(IDS), recorded(IDS.flip(1))]

        assert_untouched(qwen3, call, "torch.export or torch.jit.trace records the call, for other tokens too")

    def test_adapters_by_row(self):
        """PEFT gives every layer of a call the names of the adapters, one for each row."""

        def make() -> Any:
            model = qwen3(tie_word_embeddings=False)
            model = with_adapters(model, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
            model.add_adapter("other", model.peft_config["default"])
            return model.eval()

        def call(model: Any) -> Tensor:
            return model(**BATCH, use_cache=False, adapter_names=["other", "__base__"]).logits

        report = assert_untouched(make, torch.no_grad()(call), None)
        assert "`adapter_names` should be the same as the number of inputs" in str(report)


class TestShared:
    """What a call may have beside ids. What its outputs may be: tests/claims/padded."""

    @pytest.mark.parametrize(
        "inputs",
        [
            {"token_type_ids": IDS * 0},
            {"past_key_values": None, "inputs_embeds": None},
        ],
    )
    def test_beside_ids(self, inputs):
        model = share_prefixes(qwen3())
        model(**BATCH, **inputs)
        report = sharing_report(model)
        assert (report.num_shared, dict(report.not_shared)) == (1, {})

    @pytest.mark.parametrize("keep", [0, 1, 3])
    @pytest.mark.parametrize("window", [3, 64])
    @pytest.mark.parametrize(
        "model_class", cases(["Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"], quick=["Gemma4ForCausalLM"])
    )
    def test_masks_and_rows_that_are_cut_inside(self, model_class, window, keep):
        model = tiny_model(model_class, **SHARED_KEYS, sliding_window=window)
        ids = torch.tensor([[7, 8, 9, 1, 2], [7, 8, 9, 3, 4], [7, 8, 5, 3, 4]])
        report = assert_same_gradient(
            model, lambda model: model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits.square().mean()
        )
        assert (report.num_shared, dict(report.not_shared)) == (1, {})
