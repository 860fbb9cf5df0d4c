"""The tests are tested: each mistake below makes generation differ from the ordinary model, and is seen.

One scenario, in float64: nested prompts on one cache, more of them than lanes, ends at different times, a second call
that splits nodes of the first, a third that continues answers, and free slots poisoned with NaN in between. Without a
mistake every logit is within 1e-12 of an ordinary forward pass over the finished text.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from answers import answered, texts_of, with_pieces_of, worst_errors
from families import CORE
from tiers import cases
from torch import Tensor

import radixtrain.generation.scheduler
from radixtrain import RadixCache
from radixtrain.attention import cached_attention
from radixtrain.generation.cache import Node
from radixtrain.generation.passes import Pass, PromptPlan, SharedRows, decoding_pass
from radixtrain.generation.scheduler import RunningBatch
from radixtrain.generation.store import KeyValueStore
from radixtrain.tree.cached_layout import Continuations, Paths, shared_runs
from radixtrain.verification.oracle import float64_throughout

pytestmark = pytest.mark.usefixtures("without_the_probe")

BAR = 1e-12
FIRST = [
    [7, 8, 9, 10, 11, 12, 1, 2],
    [7, 8, 9, 10, 11, 12, 1, 4],
    [7, 8, 9, 10, 5],
    [7, 8, 9, 6, 6, 6],
    [30, 31, 32],
    [5],
]
SECOND = [[7, 8, 9, 10, 11, 3], [7, 8, 2], [30, 31, 33, 34], [7, 8, 9, 6, 6, 6, 1, 1], [7, 8, 9, 10, 11, 12, 1, 2, 9]]
UNLIKE = [[1, 2], [1, 3, 3, 3, 3], [2, 7, 8], [2, 7, 8, 9]]
ENDS = list(range(16, 40, 3))
Patch = pytest.MonkeyPatch
Runs = list[tuple[list[int], np.ndarray]]


def worst(name: str) -> float:
    """The largest error of a logit in the scenario, or in its beginning, if that is wrong."""
    model = next(family for family in CORE if family.name == name).build().eval()
    cache, errors = RadixCache(), list[float]()
    with float64_throughout(model), with_pieces_of(2):
        prompts, batch_size = FIRST, 4
        for _ in range(3):
            options = {"cache": cache, "batch_size": batch_size, "max_new_tokens": 6, "eos_token_id": ENDS}
            found = answered(model, prompts, do_sample=False, **options)
            errors += worst_errors(model, found)
            if not max(errors) <= BAR:
                break
            poison(cache)
            continued = [[*prompt, *answer, 3] for prompt, answer in texts_of(found.generated)]
            prompts, batch_size = (SECOND, 4) if prompts is FIRST else ([*continued, *FIRST, *SECOND, *UNLIKE], 6)
    return float(np.max(errors))  # nan if one is


def poison(cache: RadixCache) -> None:
    """NaN in every slot that is free."""
    free = cache.pool.allocate(cache.pool.num_free)
    for stored in cache.store.calls:
        for rows in stored:
            rows[torch.from_numpy(free[free < len(rows)])] = torch.nan
    cache.pool.release(free)


def is_faithful(name: str) -> bool:
    """Whether the scenario runs to its end, and is right."""
    try:
        return worst(name) <= BAR
    except (AssertionError, IndexError, RuntimeError, ValueError):  # a mistake may also break a shape or an invariant
        return False


@pytest.mark.parametrize("name", cases(["Mistral", "Qwen3", "gpt-oss"], ["Mistral"]))
def test_without_a_mutation(name: str) -> None:
    assert worst(name) <= BAR


def change_runs(patch: Patch, owner: Any, name: str, change: Callable[[Runs], Runs]) -> None:
    """Only in calls of one method."""
    method = getattr(owner, name)

    def wrong(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr("radixtrain.tree.cached_layout.shared_runs", lambda nodes: change(shared_runs(nodes)))
            return method(*arguments)

    patch.setattr(owner, name, staticmethod(wrong) if owner is SharedRows else wrong)


def mix_up_two_readers(patch: Patch) -> None:
    """The runs of two sequences are read by each other."""
    of = SharedRows.of
    patch.setattr(SharedRows, "of", staticmethod(lambda requests, device: of([*requests[1:], requests[0]], device)))


def change_decoding(patch: Patch, change: Callable[[Pass], Pass]) -> None:
    scheduler = radixtrain.generation.scheduler
    patch.setattr(scheduler, "decoding_pass", lambda *arguments: change(decoding_pass(*arguments)))


def change_masks(patch: Patch, change: Callable[[Tensor, Tensor], None]) -> None:
    """change: of the mask of all lanes, (n, longest), and how many slots of each are filled, (n,)."""

    def changed(step: Pass) -> Pass:
        lanes = step.layout.lanes
        assert lanes is not None
        mask = lanes.mask.clone()
        change(mask, (mask == 0).sum(1))
        step.layout.lanes = replace(lanes, mask=mask)
        return step

    change_decoding(patch, changed)


def show_a_slot_too_many(patch: Patch) -> None:
    """The mask of every lane is one slot longer."""

    def change(mask: Tensor, filled: Tensor) -> None:
        for row, length in enumerate(filled.tolist()):
            mask[row, length : length + 1] = 0

    change_masks(patch, change)


def hide_the_first_slot(patch: Patch) -> None:
    def change(mask: Tensor, filled: Tensor) -> None:
        mask[filled > 1, 0] = -torch.inf

    change_masks(patch, change)


def count_prompts_from_the_cached_end(patch: Patch) -> None:
    """Positions of a prompt begin at 0 after what is cached."""
    pass_of = PromptPlan.pass_of

    def wrong(self: PromptPlan, *arguments: Any) -> Pass:
        step, start = pass_of(self, *arguments), int(self.ends.num_stored.max())
        return replace(step, position_ids=(step.position_ids - start).clamp(min=0))

    patch.setattr(PromptPlan, "pass_of", wrong)


def swap_lanes_that_move(patch: Patch) -> None:
    """Of two lanes that move at once each goes into the gap of the other."""
    move = RunningBatch._move

    def swapped(self: RunningBatch, movers: Any, gaps: Any, ends: Any) -> None:
        move(self, movers[::-1], gaps, np.full_like(ends, ends.max(initial=0)))

    patch.setattr(RunningBatch, "_move", swapped)


def keep_stale_runs(patch: Patch) -> None:
    """What was shared is not found anew after a sequence has left: the lanes read what those before them read."""
    leave, of = RunningBatch._leave, SharedRows.of

    def stale(self: RunningBatch, first: int) -> None:
        before = [replace(request) for request in self.requests]
        leave(self, first)
        if 0 < len(self) < len(before):
            self.shared = of(before[: len(self)], self.newest.device)

    patch.setattr(RunningBatch, "_leave", stale)


def split_at_the_wrong_end(patch: Patch) -> None:
    """The upper node gets the last slots instead of the first ones."""
    split = Node.split

    def wrong(self: Node, length: int) -> Node:
        self.slots = np.roll(self.slots, length)
        return split(self, length)

    patch.setattr(Node, "split", wrong)


def keep_the_last_token(patch: Patch) -> None:
    """A finished sequence goes into the cache with its last token, which was never computed."""
    keep = RunningBatch._keep

    def wrong(self: RunningBatch, request: Any, lane: int) -> None:
        self.used[lane] += 1
        request.token_ids.append(0)
        keep(self, request, lane)
        request.token_ids.pop()
        self.used[lane] -= 1

    patch.setattr(RunningBatch, "_keep", wrong)


OF_QWEN3: dict[str, Callable[[Patch], None]] = {
    "a shared run is left out": lambda patch: change_runs(patch, SharedRows, "of", lambda runs: runs[1:]),
    "a shared run is counted twice": lambda patch: change_runs(
        patch, SharedRows, "of", lambda runs: [*runs, *runs[:1]]
    ),
    "a shared run of prompts is left out": lambda patch: change_runs(
        patch, Continuations, "_shared", lambda runs: runs[1:]
    ),
    "a shared run of prompts is counted twice": lambda patch: change_runs(
        patch, Continuations, "_shared", lambda runs: [*runs, *runs[:1]]
    ),
    "two readers are mixed up": mix_up_two_readers,
    "a mask shows a slot too many": show_a_slot_too_many,
    "a mask hides the first slot": hide_the_first_slot,
    "a new token gets the position after its own": lambda patch: change_decoding(
        patch, lambda step: replace(step, position_ids=step.position_ids + 1)
    ),
    "positions of a prompt begin after what is cached": count_prompts_from_the_cached_end,
    "lanes do not move": lambda patch: patch.setattr(RunningBatch, "_move", lambda self, *arguments: None),
    "lanes that move are swapped": swap_lanes_that_move,
    "runs are stale": keep_stale_runs,
    "lanes are not made zero": lambda patch: patch.setattr(KeyValueStore, "zero", lambda self, slots: None),
    "a split is at the wrong end": split_at_the_wrong_end,
    "the last token is kept": keep_the_last_token,
}


@pytest.mark.parametrize("mutation", OF_QWEN3)
def test_a_mutation(mutation: str, monkeypatch: Patch) -> None:
    OF_QWEN3[mutation](monkeypatch)
    assert not is_faithful("Qwen3")


def change_attention(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    """change: of the options of every call."""

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        change(options)
        return cached_attention(*arguments, **options)

    patch.setattr("radixtrain.hf.attention_interface.cached_attention", wrong)


def window_off_by(by: int) -> Callable[[Patch], None]:
    def change(options: dict[str, Any]) -> None:
        if options.get("window") is not None:
            options["window"] += by

    return lambda patch: change_attention(patch, change)


def copy_too_short_windows(patch: Patch) -> None:
    within = Paths.within
    patch.setattr(Paths, "within", lambda self, window: within(self, window - 1))


ATTENTION: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a window is one shorter": ("Mistral", window_off_by(-1)),
    "a window is one longer": ("Mistral", window_off_by(1)),
    "copied windows are too short": ("Mistral", copy_too_short_windows),
    "sinks are forgotten": ("gpt-oss", lambda patch: change_attention(patch, lambda options: options.pop("sinks"))),
}


@pytest.mark.parametrize("mutation", ATTENTION)
def test_a_mutation_of_attention(mutation: str, monkeypatch: Patch) -> None:
    name, mutate = ATTENTION[mutation]
    mutate(monkeypatch)
    assert not is_faithful(name)
