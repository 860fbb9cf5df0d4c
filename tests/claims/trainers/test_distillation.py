"""Distillation under `share_prefixes`, teacher and student both shared: from logits and from hidden states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_harness import compare
from trainer_loop import Batch, Loop, Metrics, Step, padded_batches

from radixtrain import share_prefixes, sharing_report


def divergence(teacher: Any) -> Step:
    """KL(teacher || student) over the whole vocabulary at every token, the prompt's too."""

    def step(student: Any, batch: Batch) -> Metrics:
        inputs = without_labels(batch)
        wanted = teacher(**inputs, use_cache=False).logits.log_softmax(-1)
        found = student(**inputs).logits.log_softmax(-1)
        terms = nn.functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        return {"loss": mean_over(terms, batch["attention_mask"])}

    return step


def masked_by_a_product(teacher: Any) -> Step:
    """Soft labels, and what stands at padding is multiplied by zero: it gets a gradient, of zeros."""

    def step(student: Any, batch: Batch) -> Metrics:
        inputs, mask = without_labels(batch), batch["attention_mask"]
        wanted = teacher(**inputs, use_cache=False).logits.softmax(-1)
        terms = -(wanted * student(**inputs).logits.log_softmax(-1)).sum(-1)
        return {"loss": (terms * mask).sum() / mask.sum()}

    return step


def of_hidden_states(teacher: Any) -> Step:
    """Labels, and the states of every layer: those of the embeddings too, and those after the last norm."""

    def step(student: Any, batch: Batch) -> Metrics:
        wanted = teacher(**without_labels(batch), output_hidden_states=True, use_cache=False).hidden_states
        output = student(**batch, output_hidden_states=True)
        pairs = zip(output.hidden_states, wanted, strict=True)
        layers = [mean_over((one - other).square().mean(-1), batch["attention_mask"]) for one, other in pairs]
        assert len(layers) == student.config.num_hidden_layers + 1
        return {
            "loss": output.loss + torch.stack(layers).mean(),
            "label loss": output.loss,
            **{f"layer {index}": term for index, term in enumerate(layers)},
        }

    return step


def without_labels(batch: Batch) -> Batch:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def mean_over(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """The mean of the values that the mask keeps; the others are taken out, not multiplied by zero."""
    return values_BL[mask_BL.bool()].mean()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("loss", [divergence, masked_by_a_product, of_hidden_states])
def test_distillation(tiny_qwen3, table, loss, side):
    def build(share: Callable[[Any], Any]) -> Loop:
        student, teacher = share(tiny_qwen3()), share(tiny_qwen3(seed=1)).eval().requires_grad_(False)
        return Loop(student, padded_batches(side), loss(teacher))

    found = compare(build)
    assert found.r > 2
    table(f"distillation, {loss.__name__.replace('_', ' ')}, {side}", found)


def test_hidden_states_are_those_of_every_row(tiny_qwen3):
    """All layers, at every place that the mask keeps."""
    model, (batch,) = tiny_qwen3().train(), padded_batches("both", steps=1)
    plain = model(**without_labels(batch), output_hidden_states=True).hidden_states
    shared = share_prefixes(model)(**without_labels(batch), output_hidden_states=True).hidden_states
    assert sharing_report(model).num_shared == 1
    kept = batch["attention_mask"].bool()
    for one, other in zip(shared, plain, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one[kept], other[kept], rtol=1e-5, atol=1e-5)


def test_a_teacher_that_wants_a_cache_is_left_alone(tiny_qwen3):
    """Outside training a configuration that asks for a cache gets one, which only an ordinary call returns."""
    teacher, (batch,) = share_prefixes(tiny_qwen3().eval()), padded_batches(steps=1)
    with torch.no_grad():
        cached = teacher(**without_labels(batch))
        assert cached.past_key_values is not None and sharing_report(teacher).num_shared == 0
        (reason,) = sharing_report(teacher).not_shared
        assert "pass use_cache=False" in reason
        shared = teacher(**without_labels(batch), use_cache=False)
    assert sharing_report(teacher).num_shared == 1
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(shared.logits[kept], cached.logits[kept], rtol=1e-5, atol=1e-5)
