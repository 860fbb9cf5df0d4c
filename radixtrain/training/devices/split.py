"""`sp_size: auto`: how many ranks compute each micro-batch of a run together, and why.

The same steps come out for every number, so a run may go on with another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from radixtrain.collators.prefix_sampler import batches_of
from radixtrain.data.division import Division, divide, sp_sizes
from radixtrain.distributed import ranks
from radixtrain.errors import bytes_text
from radixtrain.hf.backbone import pretrained_model_of

if TYPE_CHECKING:
    from radixtrain.data.datamodule import SFTData

MOST_STEPS = 16
# A split has to be predicted at this part of data parallel's time at most: eight measured ones of two ranks on a CPU
# were within 0.07 of what is predicted (recipes/benchmarks/2026-11-24-split.md).
CLEARLY = 0.95


class Chosen(NamedTuple):
    """told: a line for the first screen, with figures that `report` gives too; empty for a single process."""

    sp_size: int
    told: str


def choose_sp_size(trainer: Any, module: Any, data: SFTData) -> Chosen:
    """What is predicted to be fastest for the steps of the first epoch. Every rank gets the same answer.

    trainer, module, data: of `fit`, with the rows and the model. Groups of ranks do not cross machines.
    """
    return ranks().broadcast_from_rank0(lambda: _chosen(trainer, module, data)) if ranks().size > 1 else Chosen(1, "")


def fastest(divisions: Sequence[Division]) -> Chosen:
    """divisions: data parallel first, then those with larger groups."""
    parallel, *splits = divisions
    best = min(splits, key=lambda each: each.seconds, default=None)
    if best is None:
        return Chosen(1, "none (auto): no number of these ranks divides the heads of queries")
    part = best.seconds / parallel.seconds
    is_split = part <= CLEARLY
    begins = f"sp_size {best.sp_size} (auto)" if is_split else f"none (auto): sp_size {best.sp_size}"
    return Chosen(
        best.sp_size if is_split else 1,
        f"{begins} has {best.num_rows:,.0f} rows in a step on the busiest rank, which sends "
        f"{bytes_text(round(best.sent_bytes))} in each layer; data parallel has {parallel.num_rows:,.0f} rows. "
        f"Predicted at {part:.2f} of its time; {CLEARLY:.2f} or less is split",
    )


def _chosen(trainer: Any, module: Any, data: SFTData) -> Chosen:
    settings = data.hparams
    if not settings.dedup:
        return Chosen(1, "none (auto): dedup: false has no unique rows")
    if module.hparams.verify_first_batch:
        return Chosen(1, "none (auto): model.verify_first_batch compares on one rank")
    cost = module.step_cost(trainer.strategy.root_device)
    if cost is None:
        return Chosen(1, "none (auto): what a layer costs is not known for this attention or device")
    if cost.mixer_share:
        return Chosen(1, "none (auto): recurrent layers would compute all rows on every rank")
    corpus = data.conversations["train"]
    batches = batches_of(data.train_order(), settings.batch_size, MOST_STEPS)
    steps = [[sample.input_ids for index in batch for sample in corpus[index]] for batch in batches]
    element_bytes = 2 if "16" in str(trainer.precision) else pretrained_model_of(module.model).dtype.itemsize
    sizes = sp_sizes(ranks().size // trainer.num_nodes, cost.num_heads)
    return fastest([divide(steps, ranks().size, size, settings.max_tokens, cost, element_bytes) for size in sizes])
