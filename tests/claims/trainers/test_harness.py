"""The harness sees what is wrong: a model that shares with a fault, or that does not share, fails the comparison.

And its bar is fair: two ordinary runs with different attention kernels stay within it too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from preference_bars import BETA, differences
from torch import Tensor, nn
from trainer_harness import Build, Run, compare, count_calls, differences_of, run, settings
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of, with_rows
from radixtrain.hf.padded.rows import PaddedRows


@pytest.fixture
def build(model, tokenizer, preferences, tmp_path) -> Build:
    """An SFTTrainer, the cheapest."""
    rows = preferences.rename_column("chosen", "completion").remove_columns("rejected")
    arguments = SFTConfig(**settings(tmp_path, max_steps=2))
    return lambda share: SFTTrainer(share(model()), arguments, train_dataset=rows, processing_class=tokenizer)


def with_fault(fault: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """`share_prefixes`, and then this change of the hidden states (B, L, D) that the backbone returns."""

    def hook(backbone: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return with_rows(output, fault(output[0]))

    def share(model: Any) -> Any:
        share_prefixes(model)
        backbone_of(model).register_forward_hook(hook, with_kwargs=True)
        return model

    return share


def scaled_gradient(hidden: Tensor) -> Tensor:
    """The values are right; the gradient is too large by a hundred-thousandth."""
    return hidden + (hidden - hidden.detach()) * 1e-5


def lost_gradient(hidden: Tensor) -> Tensor:
    """The values are right; the last row of the batch gets no gradient."""
    kept = hidden.clone()
    kept[-1] = kept[-1].detach()
    return kept


FAULTS = {
    "the hidden states of the next place": (lambda hidden: hidden.roll(-1, 1), "loss, entry 0"),
    "a few roundings in one place": (lambda hidden: hidden * 1.0001, "entropy|loss"),
    "a gradient too large": (scaled_gradient, "grad_norm, entry 0"),
    "a gradient lost": (lost_gradient, "grad_norm, entry 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_hidden_states_is_found(build, name):
    fault, found_in = FAULTS[name]
    with pytest.raises(AssertionError, match=found_in):
        compare(build, share=with_fault(fault))


def test_a_gather_that_is_off_by_one_row_is_found(build, monkeypatch):
    """The mistake that the library itself could make: a place reads its neighbour's unique row."""
    places = PaddedRows.places

    def off_by_one(self: PaddedRows, plan: Any) -> Any:
        found = places(self, plan)
        return np.where(found == plan.num_rows, found, np.minimum(found + 1, plan.num_rows - 1))

    monkeypatch.setattr(PaddedRows, "places", off_by_one)
    with pytest.raises(AssertionError, match="loss, entry 0"):
        compare(build)


def test_a_model_that_does_not_share_is_found(build):
    with pytest.raises(AssertionError, match="calls=0"):
        compare(build, share=lambda model: share_prefixes(model, min_ratio=1000))
    with pytest.raises(UserError, match="call share_prefixes"):
        compare(build, share=lambda model: model)


def test_less_sharing_than_the_data_have_is_found(build):
    """A branch point that saves only a few tokens gets no branch: exact, but U is not what it could be."""
    with pytest.raises(AssertionError, match="num_unique"):
        compare(build, share=lambda model: share_prefixes(model, min_shared_tokens=1000, min_ratio=1.0))


def test_two_ordinary_runs_differ_as_much(model, tokenizer, preferences, tmp_path, print_after):
    """`eager` and `sdpa` attention of Hugging Face itself: what rounding does without any sharing."""

    def build(share: Any) -> DPOTrainer:
        arguments = DPOConfig(**settings(tmp_path, beta=BETA))
        return DPOTrainer(share(model(0)), share(model(1)), arguments, None, preferences, processing_class=tokenizer)

    def eager(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model

    worst = differences_of(run(build, lambda m: m, False), run(build, eager, False), differences())
    assert worst["loss"] > 0, "they differ; `differences_of` has checked the bars"
    found = "   ".join(f"{name} {worst[name]:.1e}" for name in ("loss", "grad_norm", "gradient"))
    print_after("trainers under share_prefixes", f"ordinary runs, eager and sdpa: {found}")


def test_a_missing_or_different_number_is_found():
    def entry(**numbers: float) -> Run:
        return Run([numbers], [])

    with pytest.raises(AssertionError, match="only one of the runs"):
        differences_of(entry(loss=1.0), entry(loss=1.0, kl=0.0), {})
    for one, other in ((1.0, 1.00001), (0.0, 1e-9), (1.0, float("nan")), (float("inf"), 1.0)):
        with pytest.raises(AssertionError, match="loss, entry 0"):
            differences_of(entry(loss=one), entry(loss=other), {})
    with pytest.raises(AssertionError, match="of 10"):
        differences_of(entry(margin=0.0), entry(margin=4e-5), {"margin": lambda _: 10.0})


def test_tokens_are_counted_by_their_prefixes(model):
    """Two rows share two tokens, the third begins like them after its padding."""
    import torch

    counts: list[Any] = []
    tiny = count_calls(model(), counts)
    ids = torch.tensor([[7, 8, 9, 0], [7, 8, 5, 6], [0, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]])
    tiny(input_ids=ids, attention_mask=mask, use_cache=False)
    tiny(input_ids=torch.tensor([[7, 8, 7, 8, 9]]), position_ids=torch.tensor([[0, 1, 0, 1, 2]]), use_cache=False)
    tiny(input_ids=ids, attention_mask=mask, use_cache=True)
    assert (counts[0].calls, counts[0].num_tokens, counts[0].num_unique) == (2, 10 + 5, 5 + 3)
