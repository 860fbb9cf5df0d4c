"""The tests are tested: each mistake below makes generation differ from the ordinary model, and is seen.

One scenario, in float64: nested prompts on one cache, a second call that splits nodes of the first, a third whose
prompts are answers, continued. Without a mistake every logit is that of `model.generate` within 1e-12.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain import RadixCache
from radixtrain.attention import continued_attention, decoding_attention
from radixtrain.generation import prefill
from radixtrain.generation.cache import Node, readers_of
from radixtrain.generation.prefill import KeyValues, PromptCall
from radixtrain.generation.prompt_cache import PromptCache, Tails
from radixtrain.verification.oracle import float64_throughout
from tests.support import cases
from tests.support.batches import answers_of, by_generate, generated, with_pieces_of, worst_logit
from tests.support.models import CORE

pytestmark = pytest.mark.usefixtures("without_the_trial")

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
Patch = pytest.MonkeyPatch


def worst(name: str) -> float:
    """The largest error of a logit in the scenario, or in its beginning, if that is wrong."""
    model = next(family for family in CORE if family.name == name).build().eval()
    cache, error, prompts = RadixCache(), 0.0, FIRST
    options = {"max_new_tokens": 6, "eos_token_id": None}
    with float64_throughout(model):
        for turn, cells in enumerate((2, 6, 6)):  # all is shared, then less
            with with_pieces_of(cells, max_rows=30):
                found = generated(model, prompts, cache=cache, **options)
            error = float(np.max([error, worst_logit(found, by_generate(model, prompts, **options))]))
            if not error <= BAR:
                break
            answers = zip(prompts, answers_of(found.sequences, prompts), strict=True)
            prompts = [*SECOND, *([*prompt, *answer, 3] for prompt, answer in answers if turn)]
        beams = {**options, "num_beams": 3, "output_logits": False}
        with with_pieces_of(6):
            found = generated(model, FIRST[:3], **beams)
        expected = by_generate(model, FIRST[:3], **beams)
        beams_agree = answers_of(found.sequences, FIRST[:3]) == [each.sequences[0, -6:].tolist() for each in expected]
    return error if beams_agree else np.inf


def is_faithful(name: str) -> bool:
    """Whether the scenario runs to its end, and is right."""
    try:
        return worst(name) <= BAR
    except (AssertionError, IndexError, RuntimeError, ValueError):  # a mistake may also break a shape or an invariant
        return False


@pytest.mark.parametrize("name", cases(["Mistral", "Qwen3", "gpt-oss"], ["Mistral"]))
def test_without_a_mutation(name: str) -> None:
    assert worst(name) <= BAR


def change_attention(patch: Patch, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """change: of arguments and options of every call; returns other arguments, or None."""
    places = {
        "radixtrain.generation.prompt_cache.decoding_attention": decoding_attention,
        "radixtrain.generation.prefill.continued_attention": continued_attention,
    }
    for place, function in places.items():

        def wrong(*arguments: Any, function: Any = function, **options: Any) -> Tensor:
            changed = change(arguments, options)
            return function(*(arguments if changed is None else changed), **options)  # type: ignore[no-any-return]

        patch.setattr(place, wrong)


def change_shared(change: Callable[[Sequence[Any]], Sequence[Any]], of_prompts: bool) -> Callable[[Patch], None]:
    """change: of what is shared, in calls of prompts or of decoding."""

    def changed(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if ("depths" in options) is not of_prompts:
            return None
        place = 4 if of_prompts else 3
        return (*arguments[:place], change(arguments[place]), *arguments[place + 1 :])

    return lambda patch: change_attention(patch, changed)


def mix_up_two_readers(shared: Sequence[Any]) -> Sequence[Any]:
    """What the first is for, the second gets."""
    if len(shared) < 2:
        return shared
    first, second, *others = shared
    return [replace(first, readers=second.readers), replace(second, readers=first.readers), *others]


def change_masks(patch: Patch, change: Callable[[Tensor], None]) -> None:
    mask_of = PromptCache._mask

    def wrong(self: PromptCache, window: int | None) -> Tensor:
        mask = mask_of(self, window).clone()
        change(mask)
        return mask

    patch.setattr(PromptCache, "_mask", wrong)


def show_a_hidden_key(mask: Tensor) -> None:
    hidden = (mask == -torch.inf).nonzero()
    if len(hidden):
        mask[tuple(hidden[-1])] = 0


def hide_a_key(mask: Tensor) -> None:
    mask[..., -2:-1] = -torch.inf


def split_at_the_wrong_end(patch: Patch) -> None:
    """The upper node gets the last rows instead of the first ones."""
    split = Node.split

    def wrong(self: Node, length: int) -> Node:
        self.rows = KeyValues([layer.roll(length, 1) for layer in self.rows.layers])
        return split(self, length)

    patch.setattr(Node, "split", wrong)


def count_prompts_from_the_stored_end(patch: Patch) -> None:
    """Positions of a prompt begin at 0 after what is stored."""
    begin = PromptCall.__init__

    def wrong(self: PromptCall, *arguments: Any) -> None:
        begin(self, *arguments)
        self.depths = (self.depths - max(self.num_stored)).clamp(min=0)

    patch.setattr(PromptCall, "__init__", wrong)


def move_new_tokens(patch: Patch) -> None:
    begin = PromptCache.begin

    def wrong(self: PromptCache, *arguments: Any) -> Any:
        call = begin(self, *arguments)
        call.depths = call.depths + 1
        return call

    patch.setattr(PromptCache, "begin", wrong)


def forget_to_reorder(patch: Patch) -> None:
    patch.setattr(PromptCache, "reorder_cache", lambda self, indices: None)


def mix_owners(patch: Patch) -> None:
    """Each row continues what the one after it continues."""

    def wrong(paths: Iterable[Sequence[Node]]) -> dict[Node, list[int]]:
        first, *others = paths
        return readers_of([*others, first])

    patch.setattr(prefill, "readers_of", wrong)


def window_off_by(by: int) -> Callable[[Patch], None]:
    opened = PromptCache._mask

    def wrong(self: PromptCache, window: int | None) -> Tensor:
        if window is not None:
            self._tails[window + by] = self._tails[window]
            window += by
        return opened(self, window)

    return lambda patch: patch.setattr(PromptCache, "_mask", wrong)


def copy_too_short_windows(patch: Patch) -> None:
    of = Tails.of

    def wrong(tails: Any, device: Any, longest: int | None) -> Tails:
        return of(tails, device, None if longest is None else longest - 1)

    patch.setattr(Tails, "of", wrong)


def window_of_prompts_off_by(by: int) -> Callable[[Patch], None]:
    def change(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if options.get("window") is not None:
            options["window"] += by

    return lambda patch: change_attention(patch, change)


def forget_sinks(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    options["sinks"] = None


def shift_readers(patch: Patch) -> None:
    """Each row reads what the one before it reads."""
    share = PromptCache._share

    def wrong(self: PromptCache, device: torch.device) -> None:
        own = self._paths
        self._paths = [*own[-1:], *own[:-1]]
        share(self, device)
        self._paths = own

    patch.setattr(PromptCache, "_share", wrong)


MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a shared run is left out": ("Qwen3", change_shared(lambda shared: shared[1:], False)),
    "a shared run is counted twice": ("Qwen3", change_shared(lambda shared: [*shared, *shared[:1]], False)),
    "a shared run of prompts is left out": ("Qwen3", change_shared(lambda shared: shared[1:], True)),
    "a shared run of prompts is counted twice": ("Qwen3", change_shared(lambda shared: [*shared, *shared[:1]], True)),
    "two readers are mixed up": ("Qwen3", change_shared(mix_up_two_readers, False)),
    "owners of rows are mixed up": ("Qwen3", mix_owners),
    "a mask shows a hidden key": ("Qwen3", lambda patch: change_masks(patch, show_a_hidden_key)),
    "a mask hides a key": ("Qwen3", lambda patch: change_masks(patch, hide_a_key)),
    "a new token gets the position after its own": ("Qwen3", move_new_tokens),
    "positions of a prompt begin after what is stored": ("Qwen3", count_prompts_from_the_stored_end),
    "a split is at the wrong end": ("Qwen3", split_at_the_wrong_end),
    "beams are not reordered": ("Qwen3", forget_to_reorder),
    "readers see another row": ("Qwen3", shift_readers),
    "a window is one shorter": ("Mistral", window_off_by(-1)),
    "a window is one longer": ("Mistral", window_off_by(1)),
    "a window of prompts is one shorter": ("Mistral", window_of_prompts_off_by(-1)),
    "copied windows are too short": ("Mistral", copy_too_short_windows),
    "sinks are forgotten": ("gpt-oss", lambda patch: change_attention(patch, forget_sinks)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation(mutation: str, monkeypatch: Patch) -> None:
    name, mutate = MUTATIONS[mutation]
    mutate(monkeypatch)
    assert not is_faithful(name)
