"""`share_prefixes` around whole models: classes, adapters, wrappers, copies, and what users do to a model besides.

Loss and gradients are those of the untouched model, in float64; a call that cannot be shared runs untouched.
"""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from radixtrain import RadixCollator, restore_model, share_prefixes, sharing_report
from radixtrain.collators.misuse_guard import end_watch
from radixtrain.collators.steps import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.verification.oracle import float64_throughout, gradients_of
from tests.support.batches import padded
from tests.support.models import tiny_model, with_adapters
from tests.support.steps import assert_same_gradient, same
from tests.support.trainers import padded_with_labels

ROWS = [[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4], [7, 8, 9, 5], [7, 8, 9, 5, 6]]  # 20 tokens, 9 unique
FEATURES = [{"input_ids": row, "labels": row} for row in ROWS]
BATCH, LABELLED = padded(ROWS, "right"), padded_with_labels(ROWS, ROWS, "right", pad=0)
MASK = BATCH["attention_mask"]


def own_loss(model: Any) -> Tensor:
    return model(**LABELLED).loss


ENCODERS = """BertForSequenceClassification BertForMaskedLM ModernBertModel EuroBertForSequenceClassification
    LayoutLMForTokenClassification SplinterModel FNetForSequenceClassification NomicBertModel"""


class Wrapper(nn.Module):
    def __init__(self, *models: nn.Module):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, **inputs: Any) -> Any:
        return self.models[0](**inputs)


def functional_loss(model: Any) -> Tensor:
    return functional_call(model, dict(model.named_parameters()), (), LABELLED).loss


def of_directions(model: Any) -> Tensor:
    """Padding is masked afterwards: 0 / 0 would be NaN, and NaN * 0 too."""
    hidden = model.model(**BATCH).last_hidden_state
    return (hidden / hidden.norm(dim=-1, keepdim=True) * MASK[..., None]).sum(1).sin().sum()


# What is made of a model, its loss, and how often the backbone runs.
PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor], int]] = {
    "a bare backbone": (lambda model: model.model, lambda model: model(**BATCH)[0][MASK == 1].sin().sum(), 1),
    "in wrappers": (lambda model: Wrapper(Wrapper(model), nn.Linear(2, 2)), own_loss, 1),
    "the whole model in a checkpoint": (nn.Module.train, partial(checkpoint, own_loss, use_reentrant=False), 2),
    "functional_call": (nn.Module.train, functional_loss, 1),
    "directions": (nn.Module.train, of_directions, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_loss_and_gradient(tiny_qwen3, name):
    """Losses that read padding end in an error: tests/claims/padded/test_calls.py."""
    make, loss_of, num_calls = PROGRAMS[name]
    report = assert_same_gradient(make(tiny_qwen3()), loss_of)
    counts = report.num_shared, report.num_places, report.num_tokens, report.num_unique_tokens
    assert counts == (num_calls, 24 * num_calls, 20 * num_calls, 9 * num_calls) and report.plan_seconds > 0


class TestClasses:
    """Score heads and classes of tokens: tests/claims/padded/test_families.py."""

    @pytest.mark.parametrize("model_class", ENCODERS.split())
    def test_an_encoder_shares_nothing(self, model_class):
        """LayoutLM and Splinter do not say of their attention that it is not causal, and trained as if it were."""
        ids = torch.tensor([[7, 8, 9, 1], [7, 8, 9, 2]])
        try:
            model = share_prefixes(tiny_model(model_class))
        except UserError as error:
            assert "does not say that its attention is causal" in str(error)
            return
        model(input_ids=ids)
        (reason,) = sharing_report(model).not_shared
        assert re.search("is not causal|computes a token from others|a mask of other tokens", reason)

    def test_a_span_over_whole_rows_is_refused(self):
        with pytest.raises(UserError, match="Qwen3ForQuestionAnswering chooses a span among all places of a row"):
            share_prefixes(tiny_model("Qwen3ForQuestionAnswering"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow_dropout": "lora_dropout"}, "must be a list of names, got 'lora_dropout'"),
        ({"allow_dropout": None}, "must be a list of names, got None"),
        *(
            ({"min_ratio": value}, f"min_ratio must be a number from 0 on, got {value!r}")
            for value in (True, "2", -1, float("nan"))
        ),
        *(
            ({"min_shared_tokens": value}, f"min_shared_tokens must be a whole number from 1 on, got {value!r}")
            for value in ("auto", True, 0)
        ),
        ({"attention": "ring"}, "attention must be auto, cascade, path, expand, reference, tree; got 'ring'"),
        ({"kernel": "cutlass"}, "kernel must be auto, torch, flash_attn, .*, eager; got 'cutlass'"),
        ({"kernel": "flash_attn"}, "kernel='flash_attn' cannot be used: needs CUDA"),
    ],
)
def test_options_that_cannot_be_meant(tiny_qwen3, options, message):
    """The model is as it was."""
    model = tiny_qwen3()
    with pytest.raises(UserError, match=message):
        share_prefixes(model, **options)
    assert model.config._attn_implementation == "sdpa" and not model.model._forward_hooks


def test_a_batch_that_a_model_cannot_take(tiny_qwen3):
    """Never another attention: not even without the watch for models that are not shared."""
    batch = RadixCollator()(FEATURES)
    end_watch()
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        tiny_qwen3()(**batch)
    with pytest.raises(UserError, match="has no plan: give an ordinary model its input_ids"):
        share_prefixes(tiny_qwen3())(**PaddedCollator()(FEATURES))


def test_a_name_in_place_of_a_model():
    with pytest.raises(TypeError, match="expected a model, got str: load it first"):
        share_prefixes("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("count", [0, 2])
def test_a_wrapper_of_no_model_or_several(tiny_qwen3, count):
    with pytest.raises(TypeError, match=f"Wrapper has {count}: "):
        share_prefixes(Wrapper(*(tiny_qwen3() for _ in range(count))))


class TestBothKindsOfBatches:
    def test_one_set_of_hooks(self, tiny_qwen3):
        """However often the model is shared; and the ordinary batch again after `restore_model`."""
        model = tiny_qwen3()
        with float64_throughout(model):
            expected = gradients_of(model, lambda: [own_loss(model)])
            share_prefixes(share_prefixes(model))
            same(expected, gradients_of(model, lambda: [own_loss(model)]))
            same(expected, gradients_of(model, lambda: [model(**RadixCollator()(FEATURES)).loss]))
        assert sharing_report(model).num_shared == 2
        assert len(backbone_of(model)._forward_hooks) == 1
        restore_model(model)
        assert model.config._attn_implementation == "sdpa"
        assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
        assert torch.equal(model(**BATCH).logits, tiny_qwen3()(**BATCH).logits)
        with pytest.raises(UserError):
            sharing_report(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy(tiny_qwen3, duplicate):
    """Shares as the model does, its head too, and counts by itself."""
    model = share_prefixes(tiny_qwen3())
    own_loss(model)
    twin = duplicate(model)
    losses = []
    for each in (twin, model):
        with float64_throughout(each):
            losses.append(own_loss(each))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    reports = [sharing_report(each) for each in (model, twin)]
    assert reports[0] is not reports[1] and reports[0].num_shared == 2
    assert reports[1].num_head_rows == 10 * reports[1].num_shared > 0


class TestHeadsThatAreReplaced:
    @pytest.mark.parametrize(
        ("adapters", "products"),
        [({"modules_to_save": ["lm_head"]}, 1), ({"target_modules": ["q_proj", "lm_head"]}, 3)],
    )
    def test_by_peft(self, tiny_qwen3, adapters, products):
        """It copies a head with our hooks on it, and both sets run, or puts a layer around it; all can be removed."""
        model = share_prefixes(tiny_qwen3(tie_word_embeddings=False))
        wrapped = with_adapters(model, **{"target_modules": ["q_proj"], "init_lora_weights": False, **adapters})
        report = assert_same_gradient(wrapped, own_loss)
        assert (report.num_shared, report.num_head_rows) == (1, 10 * products)
        merged = wrapped.merge_and_unload().requires_grad_(True)
        assert_same_gradient(copy.deepcopy(merged), own_loss)
        restore_model(merged)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in merged.modules())

    def test_a_resized_vocabulary(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3())
        model.resize_token_embeddings(model.config.vocab_size + 8)
        report = assert_same_gradient(model, own_loss, share=lambda model: model)
        assert report.num_head_rows == 10 * 2, "both calls were shared"


def test_what_hooks_of_the_user_see(tiny_qwen3):
    """What they see in an untouched model: `[B, L]` and `[B, L, D]`. Those that come later: guards/test_code.py."""
    model, seen = tiny_qwen3(), []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["input_ids"]).shape)

    for module in (model.model, model.lm_head):
        module.register_forward_pre_hook(before, with_kwargs=True)
    model.model.register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state.shape))
    share_prefixes(model)(**BATCH)
    assert seen == [(4, 6), (4, 6, 32), (4, 6, 32)]
    assert sharing_report(model).num_shared == 1


@pytest.mark.parametrize("place", ["layer", "head", "after the head"])
def test_after_an_error_in_the_middle(tiny_qwen3, place):
    model = share_prefixes(tiny_qwen3())
    expected = own_loss(model)
    module = model.model.layers[1] if place == "layer" else model.lm_head

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    register = module.register_forward_hook if place == "after the head" else module.register_forward_pre_hook
    handle = register(fail)
    with pytest.raises(KeyboardInterrupt):
        own_loss(model)
    handle.remove()
    assert model.lm_head(torch.zeros(2, 3, 32)).shape == (2, 3, 50)
    assert torch.equal(own_loss(model), expected)
