"""In float64 the gradient by radix is the ordinary one, over generated tries and every way to run a step.

The oracle is Hugging Face's own model on each sequence alone. Each try runs all four strategies; the bar is a relative
L2 error of 1e-12 for every parameter tensor and for the loss. RADIXTRAIN_TRIES sets how many tries are drawn.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.attention import STRATEGIES
from radixtrain.collators.steps import StepCollator
from radixtrain.equivalence import compare_gradients
from radixtrain.equivalence_report import Rung
from radixtrain.oracle import float64_throughout, float64_truth, gradients_of, radix_batch
from radixtrain.testing import labelled_features
from radixtrain.training.module import RadixModule

TRIES = int(os.environ.get("RADIXTRAIN_TRIES", "50"))
BAR = 1e-12


@dataclass(frozen=True)
class Way:
    """A way to run the optimizer step.

    loss: the model's own loss on one batch; its own loss on micro-batches; or the fused loss of `fit` on micro-batches.
    max_tokens: unique tokens in a micro-batch.
    """

    loss: str
    max_tokens: int
    min_shared_tokens: int
    pad_to_multiple_of: int | None
    activation_checkpointing: bool

    def terms(self, model: Any, features: Any) -> Iterator[Tensor]:
        """The terms of the step's loss."""
        sizes = {"min_shared_tokens": self.min_shared_tokens, "pad_to_multiple_of": self.pad_to_multiple_of}
        if self.loss == "own, one batch":
            yield from radix_batch(model, RadixCollator(**sizes)(features))
            return
        fused = self.loss == "fused, micro-batches"
        step = StepCollator(max_tokens=self.max_tokens, merge_labels=fused, **sizes)(features)
        for batch in step["micro_batches"]:
            if fused:
                yield _module(model).loss_sum(batch) / step["num_labels"]
            else:
                yield model(**batch, num_items_in_batch=step["num_labels"]).loss


WAYS = st.builds(
    Way,
    loss=st.sampled_from(["own, one batch", "own, micro-batches", "fused, micro-batches"]),
    max_tokens=st.integers(40, 80),
    min_shared_tokens=st.integers(1, 5),
    pad_to_multiple_of=st.sampled_from([None, 4]),
    activation_checkpointing=st.booleans(),
)
MODELS = {
    "tied": {},
    "untied, biased": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4},
    "LoRA": {},
}


@pytest.mark.parametrize("kind", MODELS)
def test_generated_tries(tiny_qwen3: Callable[..., Any], kind: str, print_behind: Callable[[str, str], None]) -> None:
    model = tiny_qwen3(**MODELS[kind]).train()
    if kind == "LoRA":
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    worst = dict.fromkeys(STRATEGIES, 0.0)
    count = 0

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=labelled_features(), way=WAYS)
    def one_try(features: Any, way: Way) -> None:
        nonlocal count
        count += 1
        for attention, rung in climb(model, features, way):
            worst[attention] = max(worst[attention], rung.worst.radix)
            assert not rung.dead, f"a try that proves nothing of {rung.dead[0].name}"
            assert rung.worst.radix <= BAR and rung.loss_error <= BAR, f"{attention}, {way}: {rung.worst}"

    one_try()
    figures = ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())
    print_behind("float64: worst relative L2 error of a gradient tensor", f"{kind}: {count} tries: {figures}")


def climb(model: Any, features: Any, way: Way) -> Iterator[tuple[str, Rung]]:
    """The float64 rung of every strategy, against one truth."""
    truth = float64_truth(restore_model(model), features)
    _set_checkpointing(model, way.activation_checkpointing)
    try:
        for attention in STRATEGIES:
            with float64_throughout(model):
                prepare_model(model, attention=attention)
                radix = gradients_of(model, lambda: way.terms(model, features))
            yield attention, compare_gradients("float64", truth, truth, radix)
    finally:
        _set_checkpointing(restore_model(model), False)


@pytest.mark.slow
def test_under_torch_compile(tiny_qwen3: Callable[..., Any]) -> None:
    """The whole prepared model, compiled."""
    torch._dynamo.reset()
    model = tiny_qwen3(num_hidden_layers=1)
    features = [{"input_ids": [7, 8, 9, 1, 2]}, {"input_ids": [7, 8, 9, 3]}, {"input_ids": [7, 8, 5, 6, 4, 4]}]
    truth = float64_truth(model, features)
    batch = RadixCollator()(features)
    plain = gradients_of(prepare_model(model), lambda: radix_batch(model, batch))
    compiled = torch.compile(model, dynamic=True)
    fast = gradients_of(model, lambda: radix_batch(compiled, batch))
    rung = compare_gradients("float32", truth, plain, fast)
    assert rung.passed, rung.worst


def test_a_try_can_fail(tiny_qwen3: Callable[..., Any]) -> None:
    """The bar is where it says: a ten-billionth more of one gradient is seen."""
    model = tiny_qwen3()
    features = [{"input_ids": [1, 0, 1, 1, 0, 0, 1, 0]}, {"input_ids": [1, 0, 1, 1, 3, 2]}]
    truth = float64_truth(model, features)
    name = "model.layers.0.self_attn.k_proj.weight"
    off = type(truth)(truth.loss, {**truth.tensors, name: truth.tensors[name] * (1 + 1e-10)})
    rung = compare_gradients("float64", truth, truth, off)
    assert [tensor.name for tensor in rung.failed] == [name]


def _module(model: Any) -> RadixModule:
    module = RadixModule("unused")
    module.model = model
    return module


def _set_checkpointing(model: Any, wanted: bool) -> None:
    base = getattr(model, "get_base_model", lambda: model)()
    if wanted:
        base.activation_checkpointing_enable({"use_reentrant": False})
    else:
        base.activation_checkpointing_disable()
