"""What `split_turns` costs on some chats: each of them whole, and as one sample for each of the assistant's turns.

whole    system user answer user answer user answer                1 sample
split    system user answer
         system user answer user answer
         system user answer user answer user answer                3 samples, the same computation where the history
                                                                   is kept; a branch for each answer where it is not
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from radixtrain.collators.batching import cut_step
from radixtrain.data.rendering.history import rewrites_history
from radixtrain.report.contents import SplitCost

if TYPE_CHECKING:
    from radixtrain.data.chat import ChatEncoder
    from radixtrain.data.sample import Sample

__all__ = ["split_cost"]


def split_cost(encoder: ChatEncoder, rows: Iterable[Any], batch_size: int = 1) -> SplitCost | None:
    """Both ways to train the same conversations. None if no conversation has two answers to split.

    encoder: its `split_turns` and `max_length` do not matter.
    rows: from `read_rows` or `open_rows`, as many as may be encoded twice. Rows that cannot be used in either way, or
        give a single sample in both, are left out.
    batch_size: conversations in a step, in the order of the rows. Unique tokens are counted for each step, as if it
        were one micro-batch.
    """
    if not encoder.assistant_only_loss:
        return None
    rows = list(rows)
    whole, split = (_encoded(encoder, rows, split_turns) for split_turns in (False, True))
    chosen = [n for n, samples in enumerate(split) if len(samples) > 1 and whole[n]]
    if not chosen:
        return None
    steps = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
    return SplitCost(
        num_conversations=len(chosen),
        num_samples=sum(len(split[n]) for n in chosen),
        whole_tokens=_sum_of_steps(_num_tokens, whole, steps),
        whole_unique=_sum_of_steps(_num_unique_tokens, whole, steps),
        split_tokens=_sum_of_steps(_num_tokens, split, steps),
        split_unique=_sum_of_steps(_num_unique_tokens, split, steps),
        rewrites_history=any(rewrites_history(encoder, rows[n]) for n in chosen),
    )


def _encoded(encoder: ChatEncoder, rows: list[Any], split_turns: bool) -> list[list[Sample]]:
    """The samples of each row, none if it cannot be used."""
    arm = replace(encoder, split_turns=split_turns, max_length=None)
    return arm.encode_all(rows, on_error=lambda error: None)


def _sum_of_steps(
    count: Callable[[list[Sample]], int], conversations: list[list[Sample]], steps: list[list[int]]
) -> int:
    return sum(count([sample for n in step for sample in conversations[n]]) for step in steps)


def _num_tokens(samples: list[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def _num_unique_tokens(samples: list[Sample]) -> int:
    return cut_step([sample.input_ids for sample in samples], max_tokens=None).num_unique_tokens
