"""The tests are tested: each mistake below makes generation differ from the ordinary model, and is seen.

One scenario, in float64: nested prompts on one cache, a second call that splits nodes of the first, a third whose
prompts are answers, continued; and beams. Without a mistake every logit is that of `model.generate` within 1e-12.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import RadixCache
from radixtrain.generation import prefill, prompt_cache
from radixtrain.generation.cache import Node
from radixtrain.generation.prefill import KeyValues, PromptCall
from radixtrain.generation.prompt_cache import PromptCache, Tails
from radixtrain.verification.oracle import float64_throughout
from tests.claims.mistakes import SEEN, plant, returning
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
Mistake = tuple[Any, str, Callable[..., Any]]


def check(name: str) -> None:
    """AssertionError, or the error of a broken shape or invariant, unless every call of the scenario is right."""
    model = next(family for family in CORE if family.name == name).build().eval()
    cache, prompts = RadixCache(), FIRST
    options = {"max_new_tokens": 6, "eos_token_id": None}
    with float64_throughout(model):
        for turn, cells in enumerate((2, 6, 6)):  # all is shared, then less
            with with_pieces_of(cells, max_rows=30):
                found = generated(model, prompts, cache=cache, **options)
            assert worst_logit(found, by_generate(model, prompts, **options)) <= BAR
            answers = zip(prompts, answers_of(found.sequences, prompts), strict=True)
            prompts = [*SECOND, *([*prompt, *answer, 3] for prompt, answer in answers if turn)]
        beams = {**options, "num_beams": 3, "output_logits": False}
        with with_pieces_of(6):
            found = generated(model, FIRST[:3], **beams)
        expected = by_generate(model, FIRST[:3], **beams)
        assert answers_of(found.sequences, FIRST[:3]) == [each.sequences[0, -6:].tolist() for each in expected]


@pytest.mark.parametrize("name", cases(["Mistral", "Qwen3", "gpt-oss"], ["Mistral"]))
def test_without_a_mutation(name: str) -> None:
    check(name)


# Mistakes. Each is called with the real function and its arguments.


def with_option(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Attention gets another value of an option."""
    return lambda real, *args, **options: real(*args, **{**options, name: change(options[name])})


def of_shared(change: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[..., Any]:
    """Attention gets something else as what is shared, which is its last argument."""
    return lambda real, *args, **options: real(*args[:-1], change(args[-1]), **options)


def without_the_first(shared: Sequence[Any]) -> Sequence[Any]:
    return shared[1:]


def the_first_twice(shared: Sequence[Any]) -> Sequence[Any]:
    return [*shared, *shared[:1]]


def mix_up_two_readers(shared: Sequence[Any]) -> Sequence[Any]:
    """What the first is for, the second gets."""
    if len(shared) < 2:
        return shared
    first, second, *others = shared
    return [replace(first, readers=second.readers), replace(second, readers=first.readers), *others]


def show_a_hidden_key(real: Any, *args: Any) -> Tensor:
    mask: Tensor = real(*args).clone()
    hidden = (mask == -torch.inf).nonzero()
    if len(hidden):
        mask[tuple(hidden[-1])] = 0
    return mask


def hide_a_key(real: Any, *args: Any) -> Tensor:
    mask: Tensor = real(*args).clone()
    mask[..., -2:-1] = -torch.inf
    return mask


def split_at_the_wrong_end(real: Any, node: Node, length: int) -> Node:
    """The upper node gets the last rows instead of the first ones."""
    node.rows = KeyValues([layer.roll(length, 1) for layer in node.rows.layers])
    return real(node, length)  # type: ignore[no-any-return]


def count_prompts_from_the_stored_end(real: Any, call: PromptCall, *args: Any) -> None:
    """Positions of a prompt begin at 0 after what is stored."""
    real(call, *args)
    call.depths = (call.depths - max(call.num_stored)).clamp(min=0)


def move_new_tokens(real: Any, *args: Any) -> Any:
    call = real(*args)
    call.depths = call.depths + 1
    return call


def of_the_row_after(real: Any, paths: Iterable[Sequence[Node]], *args: Any) -> Any:
    first, *others = paths
    return real([*others, first], *args)


def window_off_by(by: int) -> Callable[..., Any]:
    def wrong(real: Any, cache: PromptCache, window: int | None) -> Any:
        if window is None:
            return real(cache, window)
        cache._tails[window + by] = cache._tails[window]
        return real(cache, window + by)

    return wrong


def copy_too_short_windows(real: Any, tails: Any, device: Any, longest: int) -> Tails:
    return real(tails, device, longest - 1)  # type: ignore[no-any-return]


OF_PROMPTS, OF_ROWS = (prefill, "continued_attention"), (prompt_cache, "decoding_attention")
MUTATIONS: dict[str, dict[str, Mistake]] = {
    "Qwen3": {
        "a shared run is left out": (*OF_ROWS, of_shared(without_the_first)),
        "a shared run is counted twice": (*OF_ROWS, of_shared(the_first_twice)),
        "a shared run of prompts is left out": (*OF_PROMPTS, of_shared(without_the_first)),
        "a shared run of prompts is counted twice": (*OF_PROMPTS, of_shared(the_first_twice)),
        "two readers are mixed up": (*OF_ROWS, of_shared(mix_up_two_readers)),
        "owners of rows are mixed up": (prefill, "readers_of", of_the_row_after),
        "a mask shows a hidden key": (PromptCache, "_mask", show_a_hidden_key),
        "a mask hides a key": (PromptCache, "_mask", hide_a_key),
        "a new token gets the position after its own": (PromptCache, "begin", move_new_tokens),
        "positions of a prompt begin after what is stored": (PromptCall, "__init__", count_prompts_from_the_stored_end),
        "a split is at the wrong end": (Node, "split", split_at_the_wrong_end),
        "beams are not reordered": (PromptCache, "reorder_cache", returning(None)),
        "readers see another row": (prompt_cache, "readers_of", of_the_row_after),
    },
    "Mistral": {
        "a window is one shorter": (PromptCache, "_mask", window_off_by(-1)),
        "a window is one longer": (PromptCache, "_mask", window_off_by(1)),
        "a window of prompts is one shorter": (
            *OF_PROMPTS,
            with_option("window", lambda window: window and window - 1),
        ),
        "copied windows are too short": (Tails, "of", copy_too_short_windows),
    },
    "gpt-oss": {"sinks are forgotten": (*OF_ROWS, with_option("sinks", returning(None)))},
}
SHOWN_BY = {mutation: name for name, mistakes in MUTATIONS.items() for mutation in mistakes}


@pytest.mark.parametrize("mutation", SHOWN_BY)
def test_a_mutation(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *MUTATIONS[SHOWN_BY[mutation]][mutation])
    with pytest.raises((*SEEN, IndexError)):
        check(SHOWN_BY[mutation])
