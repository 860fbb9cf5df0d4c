"""Ways to run an optimizer step, for every test that generates them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import Tensor

from radixtrain import RadixCollator
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.hf import attention_interface
from radixtrain.hf.backbone import recompute
from radixtrain.training.module import RadixModule
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.runs import RunLayout
from radixtrain.verification.oracle import radix_batch
from tests.support.models import tiny_qwen3

MODELS = {
    "tied": {},
    "untied, biased": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4},
    "LoRA": {},
}
LOSSES = ["own, micro-batches", "fused, micro-batches", "own, one batch"]


@dataclass(frozen=True)
class Way:
    """A way to run the optimizer step.

    loss: the model's own loss on one batch; its own loss on micro-batches; or the fused loss of `fit` on micro-batches.
    max_tokens: unique tokens in a micro-batch.
    activation_checkpointing: the share of the layers that recompute.
    """

    loss: str
    max_tokens: int
    min_shared_tokens: int
    pad_to_multiple_of: int | None
    activation_checkpointing: float

    def terms(self, model: Any, features: Any) -> Iterator[Tensor]:
        """The terms of the step's loss."""
        if self.loss == "own, one batch":
            yield from radix_batch(model, RadixCollator(**self._sizes)(features))
            return
        step = self.step(features)
        for batch in step.micro_batches:
            if self._fused:
                yield _module(model).loss_sum(batch) / step.num_labels
            else:
                yield model(**batch, num_items_in_batch=step.num_labels).loss

    def step(self, features: Any) -> Step:
        """The step, cut and collated."""
        return StepCollator(max_tokens=self.max_tokens, merge_labels=self._fused, **self._sizes)(features)

    @property
    def _fused(self) -> bool:
        return self.loss.startswith("fused")

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"min_shared_tokens": self.min_shared_tokens, "pad_to_multiple_of": self.pad_to_multiple_of}


def build(kind: str, seed: int = 0) -> Any:
    """A model to train, of a kind of MODELS."""
    model = tiny_qwen3(seed, **MODELS[kind]).train()
    if kind != "LoRA":
        return model
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))


def ways(**given: Any) -> st.SearchStrategy[Way]:
    """A strategy of ways; keyword arguments replace what is drawn."""
    drawn = {
        "loss": st.sampled_from(LOSSES),
        "max_tokens": st.integers(8, 16),
        "min_shared_tokens": st.integers(1, 5),
        "pad_to_multiple_of": st.sampled_from([None, 4]),
        "activation_checkpointing": st.sampled_from([0.0, 0.5, 1.0]),
    }
    return st.builds(Way, **{**drawn, **given})


def set_checkpointing(model: Any, share: float) -> None:
    """Of a model or one that PEFT wraps."""
    if share:
        recompute(model, share)
    else:
        getattr(model, "get_base_model", lambda: model)().gradient_checkpointing_disable()


@contextmanager
def with_runs(table: Callable[[TreeLayout], RunLayout]) -> Iterator[None]:
    """Inside, recurrent layers that fork have the runs of this table of a batch."""
    with pytest.MonkeyPatch.context() as patch:
        real = attention_interface.tree_runs
        made = lambda layout, forks: table(layout) if forks else real(layout, forks)  # noqa: E731
        patch.setattr(attention_interface, "tree_runs", made)
        yield


def _module(model: Any) -> RadixModule:
    module = RadixModule("unused")
    module.model = model
    return module
