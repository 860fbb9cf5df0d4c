"""In float64 the gradient by radix is the ordinary one, over generated tries and every way to run a step.

The oracle is Hugging Face's own model on one sequence at a time. Each try runs all four strategies; the bar is a
relative L2 error of 1e-12 for every parameter tensor and for the loss. RADIXTRAIN_TRIES sets how many tries are drawn.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.attention import EVERYWHERE
from radixtrain.testing import labelled_features
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of, radix_batch
from radixtrain.verification.report import Rung

TRIES = int(os.environ.get("RADIXTRAIN_TRIES", "50"))
BAR = 1e-12


MODELS = {
    "tied": {},
    "untied, biased": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4},
    "LoRA": {},
}


@pytest.mark.parametrize("kind", MODELS)
def test_generated_tries(
    tiny_qwen3: Callable[..., Any],
    ways: Callable[..., Any],
    set_checkpointing: Callable[[Any, bool], None],
    kind: str,
    print_after: Callable[[str, str], None],
) -> None:
    model = tiny_qwen3(**MODELS[kind]).train()
    if kind == "LoRA":
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    worst = dict.fromkeys(EVERYWHERE, 0.0)
    cuts: list[int] = []

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=labelled_features(), way=ways())
    def one_try(features: Any, way: Any) -> None:
        cuts.append(1 if way.loss == "own, one batch" else len(way.step(features).micro_batches))
        set_checkpointing(model, way.activation_checkpointing)
        for attention, rung in climb(model, features, way):
            worst[attention] = max(worst[attention], rung.worst.radix)
            assert not rung.dead, f"a try that proves nothing of {rung.dead[0].name}"
            assert rung.worst.radix <= BAR and rung.loss_error <= BAR, f"{attention}, {way}: {rung.worst}"

    one_try()
    split = sum(count > 1 for count in cuts)
    assert split > len(cuts) / 4, f"{split} of {len(cuts)} steps were cut"
    figures = ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())
    print_after(
        "float64: worst relative L2 error of a gradient tensor",
        f"{kind}: {len(cuts)} tries, {split} cut into micro-batches: {figures}",
    )


def climb(model: Any, features: Any, way: Any) -> Iterator[tuple[str, Rung]]:
    """The float64 rung of every strategy, against one truth."""
    truth = float64_truth(restore_model(model), features)
    for attention in EVERYWHERE:
        with float64_throughout(model):
            prepare_model(model, attention=attention)
            radix = gradients_of(model, lambda: way.terms(model, features))
        yield attention, compare_gradients("float64", truth, truth, radix)


@pytest.mark.full
def test_under_torch_compile(tiny_qwen3: Callable[..., Any]) -> None:
    """The whole prepared model, compiled."""
    torch._dynamo.reset()
    model = tiny_qwen3(num_hidden_layers=1)
    features = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3], [7, 8, 5, 6, 4, 4])]
    truth = float64_truth(model, features)
    batch = RadixCollator()(features)
    plain = gradients_of(prepare_model(model), lambda: radix_batch(model, batch))
    compiled = torch.compile(model, dynamic=True)
    fast = gradients_of(model, lambda: radix_batch(compiled, batch))
    rung = compare_gradients("float32", truth, plain, fast)
    assert rung.passed, rung.worst


def test_a_try_can_fail(tiny_qwen3: Callable[..., Any]) -> None:
    """The bar is not too high: a ten-billionth more of one gradient is seen."""
    model = tiny_qwen3()
    features = [{"input_ids": [1, 0, 1, 1, 0, 0, 1, 0]}, {"input_ids": [1, 0, 1, 1, 3, 2]}]
    truth = float64_truth(model, features)
    name = "model.layers.0.self_attn.k_proj.weight"
    off = type(truth)(truth.loss, {**truth.tensors, name: truth.tensors[name] * (1 + 1e-10)})
    rung = compare_gradients("float64", truth, truth, off)
    assert [tensor.name for tensor in rung.failed] == [name]
