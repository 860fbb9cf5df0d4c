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
from radixtrain.generation import prefill, prompt_cache
from radixtrain.generation.cache import Node
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
Mutation = Callable[[Patch], object]


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


def instead(owner: Any, name: str, wrong: Callable[..., Any]) -> Mutation:
    """Plant a function that is called with the right one, and its arguments."""
    right = getattr(owner, name)

    def replaced(*arguments: Any, **options: Any) -> Any:
        return wrong(right, *arguments, **options)

    return lambda patch: patch.setattr(owner, name, replaced)


def in_attention(change: Callable[[dict[str, Any]], None]) -> Mutation:
    """change: of the options of attention, to prompts and to what follows them."""

    def wrong(right: Any, *arguments: Any, **options: Any) -> Any:
        change(options)
        return right(*arguments, **options)

    mutations = [
        instead(module, name, wrong)
        for module, name in ((prefill, "continued_attention"), (prompt_cache, "decoding_attention"))
    ]
    return lambda patch: [mutate(patch) for mutate in mutations]


def in_shared(change: Callable[[Sequence[Any]], Sequence[Any]], of_prompts: bool) -> Mutation:
    """change: of what is shared, in calls of prompts or of decoding, whose last argument it is."""

    def wrong(right: Any, *arguments: Any, **options: Any) -> Any:
        return right(*arguments[:-1], change(arguments[-1]), **options)

    place = (prefill, "continued_attention") if of_prompts else (prompt_cache, "decoding_attention")
    return instead(*place, wrong)


def mix_up_two_readers(shared: Sequence[Any]) -> Sequence[Any]:
    """What the first is for, the second gets."""
    if len(shared) < 2:
        return shared
    first, second, *others = shared
    return [replace(first, readers=second.readers), replace(second, readers=first.readers), *others]


def show_a_hidden_key(right: Any, *arguments: Any) -> Tensor:
    mask: Tensor = right(*arguments).clone()
    hidden = (mask == -torch.inf).nonzero()
    if len(hidden):
        mask[tuple(hidden[-1])] = 0
    return mask


def hide_a_key(right: Any, *arguments: Any) -> Tensor:
    mask: Tensor = right(*arguments).clone()
    mask[..., -2:-1] = -torch.inf
    return mask


def split_at_the_wrong_end(right: Any, node: Node, length: int) -> Node:
    """The upper node gets the last rows instead of the first ones."""
    node.rows = KeyValues([layer.roll(length, 1) for layer in node.rows.layers])
    return right(node, length)  # type: ignore[no-any-return]


def count_prompts_from_the_stored_end(right: Any, call: PromptCall, *arguments: Any) -> None:
    """Positions of a prompt begin at 0 after what is stored."""
    right(call, *arguments)
    call.depths = (call.depths - max(call.num_stored)).clamp(min=0)


def move_new_tokens(right: Any, *arguments: Any) -> Any:
    call = right(*arguments)
    call.depths = call.depths + 1
    return call


def of_the_row_after(right: Any, paths: Iterable[Sequence[Node]], *arguments: Any) -> Any:
    first, *others = paths
    return right([*others, first], *arguments)


def window_off_by(by: int) -> Mutation:
    def wrong(right: Any, cache: PromptCache, window: int | None) -> Any:
        if window is None:
            return right(cache, window)
        cache._tails[window + by] = cache._tails[window]
        return right(cache, window + by)

    return instead(PromptCache, "_mask", wrong)


def copy_too_short_windows(right: Any, tails: Any, device: Any, longest: int) -> Tails:
    return right(tails, device, longest - 1)  # type: ignore[no-any-return]


def shorten_the_window(options: dict[str, Any]) -> None:
    if options.get("window") is not None:
        options["window"] -= 1


def forget_sinks(options: dict[str, Any]) -> None:
    options["sinks"] = None


QWEN3: dict[str, Mutation] = {
    "a shared run is left out": in_shared(lambda shared: shared[1:], False),
    "a shared run is counted twice": in_shared(lambda shared: [*shared, *shared[:1]], False),
    "a shared run of prompts is left out": in_shared(lambda shared: shared[1:], True),
    "a shared run of prompts is counted twice": in_shared(lambda shared: [*shared, *shared[:1]], True),
    "two readers are mixed up": in_shared(mix_up_two_readers, False),
    "owners of rows are mixed up": instead(prefill, "readers_of", of_the_row_after),
    "a mask shows a hidden key": instead(PromptCache, "_mask", show_a_hidden_key),
    "a mask hides a key": instead(PromptCache, "_mask", hide_a_key),
    "a new token gets the position after its own": instead(PromptCache, "begin", move_new_tokens),
    "positions of a prompt begin after what is stored": instead(
        PromptCall, "__init__", count_prompts_from_the_stored_end
    ),
    "a split is at the wrong end": instead(Node, "split", split_at_the_wrong_end),
    "beams are not reordered": instead(PromptCache, "reorder_cache", lambda *_: None),
    "readers see another row": instead(prompt_cache, "readers_of", of_the_row_after),
}
MISTRAL: dict[str, Mutation] = {
    "a window is one shorter": window_off_by(-1),
    "a window is one longer": window_off_by(1),
    "a window of prompts is one shorter": in_attention(shorten_the_window),
    "copied windows are too short": instead(Tails, "of", copy_too_short_windows),
}
GPT_OSS: dict[str, Mutation] = {"sinks are forgotten": in_attention(forget_sinks)}
MUTATIONS = QWEN3 | MISTRAL | GPT_OSS


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation(mutation: str, monkeypatch: Patch) -> None:
    name = "Qwen3" if mutation in QWEN3 else "Mistral" if mutation in MISTRAL else "gpt-oss"
    MUTATIONS[mutation](monkeypatch)
    assert not is_faithful(name)
