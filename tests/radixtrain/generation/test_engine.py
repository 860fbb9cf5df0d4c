"""The loop of generation: who is computed when, in which lane, and what is left afterwards.

Of `engine.py` and `active.py`. Answers are beside those of one prompt alone, by ordinary forward passes in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.generation import passes, prefill
from radixtrain.generation.active import Active
from radixtrain.generation.cache import CacheFull, RadixCache
from radixtrain.generation.engine import Engine, Limits
from radixtrain.generation.options import resolve_config
from radixtrain.generation.passes import worth_keeping
from radixtrain.generation.prefill import Prefill
from radixtrain.generation.requests import Request
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.stopping import Stopper
from radixtrain.generation.store import KeyValueStore
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.cached_pass import on_stored_rows

Ids = list[int]
FAMILY = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8], [1, 2, 3, 9, 9, 9, 9, 9], [20, 21, 22], [30]]
APART = [[10 * n + i for i in range(6)] for n in range(4)]


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3().double().eval()


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three (query, key) pairs are worth a product, so that short beginnings are kept."""
    monkeypatch.setattr(passes, "PIECE_CELLS", 3)


def lcp_of(prompts: Sequence[Ids]) -> np.ndarray:
    """Tokens that each of the sorted prompts shares with the one before it."""
    pairs = zip([[], *prompts], prompts, strict=False)
    return np.array(
        [
            next((n for n, ab in enumerate(zip(*pair, strict=False)) if ab[0] != ab[1]), min(map(len, pair)))
            for pair in pairs
        ]
    )


def requests(prompts: Sequence[Ids], max_new: Sequence[int], draws: Any = None) -> list[Request]:
    """Of prompts that are sorted."""
    lcp = lcp_of(prompts)
    kept = worth_keeping(lcp).tolist()
    return [
        Request(n, np.array(prompt), most, np.zeros(0) if draws is None else draws(n, most), n, int(lcp[n]), kept[n])
        for n, (prompt, most) in enumerate(zip(prompts, max_new, strict=True))
    ]


def limits(prompts: Sequence[Ids], max_new: Sequence[int], num_lanes: int = 8, longest_tail: int = 8) -> Limits:
    return Limits(num_lanes, longest_tail, longest_tail + max(max_new))


@dataclass
class Run:
    """requests: finished. batches: for each pass of decoding, the indices of its answers. prefill: of the run."""

    requests: list[Request]
    prefill: Prefill
    batches: list[Ids] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)


def run(
    model: Any,
    prompts: Sequence[Ids],
    max_new: Sequence[int],
    cache: RadixCache | None = None,
    keeps_answers: bool = False,
    lanes: dict[str, int] | None = None,
    processor: Any = None,
    seed: int | None = None,
    **options: Any,
) -> Run:
    """Finish prompts, and look after every step at what `check` looks at."""
    cache, parts = RadixCache() if cache is None else cache, parts_of(model)
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 99, **options}
    config = resolve_config(model, None, **settings)
    chooser = TokenChooser(model, config, processor and [processor], seed)
    found = requests(prompts, max_new, chooser.draws if chooser.samples else None)
    with on_stored_rows(model, parts, "auto", 64), pytest.MonkeyPatch.context() as patch:
        each = Engine(
            Prefill(parts, cache),
            chooser,
            Stopper(model, config),
            limits(prompts, max_new, **lanes or {}),
            keeps_answers,
        )
        watched = Run(found, each.prefill)
        watch(patch, watched, cache)
        each.run(found)
    return watched


def watch(patch: pytest.MonkeyPatch, watched: Run, cache: RadixCache) -> None:
    advance = Active.advance

    def advance_and_check(active: Any) -> None:
        watched.batches.append([request.index for request in active.requests])
        watched.num_cached.append(cache.num_tokens)
        advance(active)
        check(active)

    patch.setattr(Active, "advance", advance_and_check)


def check(active: Any) -> None:
    """What is in the lanes agrees with the active requests, and everything else in them is hidden and zero."""
    n, (first, step, number) = len(active), (active.lanes.first, active.lanes.step, active.lanes.number)
    texts = [[*request.prompt.tolist(), *request.token_ids] for request in active.requests]
    assert active.newest.tolist() == [text[-1] for text in texts]
    assert [row[: len(text)] for row, text in zip(active.token_ids.tolist(), texts, strict=False)] == texts
    used = active.used[:n].tolist()
    assert used == [len(text) - 1 - len(request.path) for text, request in zip(texts, active.requests, strict=True)]
    is_seen = active.mask == 0
    assert is_seen[:n].sum(1).tolist() == used and all(
        row[:count].all() for row, count in zip(is_seen, used, strict=False)
    )
    for key, value in active.prefill.store.calls:
        for rows in (key, value):
            lanes = rows[first : first + step * number].abs().sum((1, 2)).unflatten(0, (number, step)) > 0
            filled = torch.arange(step) < torch.tensor(used + [0] * (number - n))[:, None]
            assert torch.equal(lanes, filled), "stale rows: a mask hides them only if they are finite"


_ALONE: dict[tuple[int, ...], list[tuple[int, float]]] = {}


def alone(model: Any, prompt: Ids, most: int) -> tuple[Ids, list[float]]:
    """Greedy tokens and their log-probabilities, each by a forward pass over the whole text."""
    steps = _ALONE.setdefault(tuple(prompt), [])
    with torch.no_grad():
        while len(steps) < most:
            ids = torch.tensor([[*prompt, *(token for token, _ in steps)]])
            logprobs = model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
            steps.append((int(logprobs.argmax()), float(logprobs.max())))
    return [token for token, _ in steps[:most]], [logprob for _, logprob in steps[:most]]


def assert_as_alone(model: Any, found: Sequence[Request]) -> None:
    for request in found:
        tokens, logprobs = alone(model, request.prompt.tolist(), request.max_new)
        assert request.token_ids == tokens and request.finish_reason == "length"
        assert request.logprobs == pytest.approx(logprobs, abs=1e-12)


def is_free(cache: RadixCache) -> bool:
    """Nothing is locked or reserved, and every slot is free or in the tree."""
    in_tree = cache.pool.capacity - cache.pool.num_free
    return (cache.root.locks, cache.num_reserved) == (0, 0) and in_tree == cache.num_tokens


class TestAdmission:
    @pytest.mark.parametrize("num_lanes", [1, 2, 3, 8])
    @pytest.mark.parametrize("longest_tail", [1, 3, 8])
    def test_any_number_of_lanes(self, model: Any, num_lanes: int, longest_tail: int) -> None:
        cache, lanes = RadixCache(), {"num_lanes": num_lanes, "longest_tail": longest_tail}
        found = run(model, FAMILY, [3, 5, 2, 4, 5], cache, lanes=lanes)
        assert_as_alone(model, found.requests)
        assert max(map(len, found.batches)) == min(num_lanes, len(FAMILY)) and is_free(cache)

    def test_lanes_are_filled_again_in_sorted_order(self, model: Any) -> None:
        found = run(model, APART, [2, 4, 4, 2], lanes={"num_lanes": 2})
        assert found.batches == [[0, 1], [1, 2], [1, 2], [2, 3]]

    def test_a_few_free_lanes_wait_for_more(self, model: Any) -> None:
        """A quarter of them has to be free."""
        prompts, max_new = [[n] for n in range(10)], [2, *[4] * 7, 2, 2]
        found = run(model, prompts, max_new, lanes={"num_lanes": 8})
        assert found.batches == [[*range(8)], *[[7, *range(1, 7)]] * 2, [8, 9]]

    def test_others_join_before_anyone_has_left(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of one pass have few rows, and every step reads the kept rows of all."""
        monkeypatch.setattr(prefill, "MAX_ROWS", 12)
        found = run(model, APART, [4] * 4, lanes={"longest_tail": 2})
        assert found.batches == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [2, 3]]
        assert_as_alone(model, found.requests)

    def test_one_token_each(self, model: Any) -> None:
        """All leave when they join."""
        found = run(model, FAMILY, [1] * 5, lanes={"num_lanes": 2})
        assert found.batches == []
        assert_as_alone(model, found.requests)

    def test_a_budget_for_some_at_once(self, model: Any) -> None:
        """Each keeps four of its six tokens; the others wait until one has left."""
        cache = RadixCache(max_tokens=8)
        found = run(model, APART, [3, 2, 3, 3], cache, lanes={"longest_tail": 2})
        assert_as_alone(model, found.requests)
        assert found.batches == [[0, 1], [0, 2], [2, 3], [3]] and is_free(cache)

    def test_a_budget_that_is_too_small_for_one(self, model: Any) -> None:
        cache = RadixCache(max_tokens=3)
        with pytest.raises(CacheFull, match=r"max_tokens=3 has room for 3 more tokens .* and 4 are needed"):
            run(model, APART, [3] * 4, cache, lanes={"longest_tail": 2})
        assert is_free(cache) and cache.num_tokens == 0

    def test_too_small_for_a_later_one(self, model: Any) -> None:
        """The first ones are finished before it is found out."""
        cache = RadixCache(max_tokens=4)
        with pytest.raises(CacheFull):
            run(model, [APART[0], [*APART[1], 7]], [2, 2], cache, lanes={"longest_tail": 2})
        assert is_free(cache)

    def test_what_no_later_prompt_begins_with_is_forgotten(self, model: Any) -> None:
        found = run(model, [*FAMILY[:3], *APART[1:]], [2] * 6, lanes={"num_lanes": 1, "longest_tail": 1})
        assert_as_alone(model, found.requests)
        assert found.num_cached == [6, 4, 7, 5, 5, 5], "only its own tokens, without the last"
        assert found.prefill.counts.cached == 4 + 3, "the next one goes on with what they share"


class TestLeaving:
    def test_the_last_ones_move_into_the_gaps(self, model: Any) -> None:
        found = run(model, APART, [2, 5, 3, 5])
        assert found.batches == [[0, 1, 2, 3], [3, 1, 2], [3, 1], [3, 1]]
        assert_as_alone(model, found.requests)

    def test_several_at_once(self, model: Any) -> None:
        found = run(model, [[n] for n in range(7)], [2, 3, 2, 3, 2, 3, 3])
        assert found.batches == [[*range(7)], [5, 1, 6, 3]]
        assert_as_alone(model, found.requests)

    @pytest.mark.parametrize("max_new", [[2, 4, 4], [2, 2, 4], [4, 2, 2], [4, 4, 2]], ids=str)
    def test_lanes_of_different_lengths(self, model: Any, max_new: Ids) -> None:
        """A short one moves to where a long one was, and the other way round. `check` finds what stays behind."""
        for prompts in ([[1, 2, 3, 4, 5, 6], [7, 8], [9]], [[1], [7, 8], [9, 1, 2, 3, 4, 5]]):
            assert_as_alone(model, run(model, prompts, max_new).requests)

    def test_an_end_token(self, model: Any) -> None:
        """Kept in the answer; whoever has it stops, and the others go on."""
        end = alone(model, APART[1], 1)[0][0]
        found = run(model, APART, [4] * 4, eos_token_id=end).requests
        assert (found[1].token_ids, found[1].finish_reason) == ([end], "stop")
        for request in found:
            tokens, _ = alone(model, request.prompt.tolist(), 4)
            length = tokens.index(end) + 1 if end in tokens else 4
            assert request.token_ids == tokens[:length]
            assert request.finish_reason == ("stop" if end in tokens else "length")

    def test_samples_do_not_depend_on_the_lanes(self, model: Any) -> None:
        prompts = [FAMILY[0], FAMILY[0], *FAMILY[1:]]
        sampled = {"do_sample": True, "top_k": None, "temperature": 2.0, "seed": 5}
        answers = [
            [request.token_ids for request in run(model, prompts, [5] * 6, lanes={"num_lanes": n}, **sampled).requests]
            for n in (1, 2, 6)
        ]
        assert answers[0] == answers[1] == answers[2] and answers[0][0] != answers[0][1]


class TestKeepsAnswers:
    def test_prompts_and_answers_are_in_the_cache(self, model: Any) -> None:
        cache = RadixCache()
        found = run(model, FAMILY, [3, 5, 2, 4, 5], cache, keeps_answers=True, lanes={"num_lanes": 2})
        assert_as_alone(model, found.requests)
        assert is_free(cache)
        for request in found.requests:
            text = [*request.prompt.tolist(), *request.token_ids]
            assert len(cache.match_prefix(text).slots) == len(text) - 1, "the last token was never computed"
        texts = [[*request.prompt.tolist(), *request.token_ids] for request in found.requests]
        assert cache.num_tokens == len({tuple(text[:n]) for text in texts for n in range(1, len(text))}), "each once"

    def test_a_conversation_goes_on(self, model: Any) -> None:
        cache = RadixCache()
        first = run(model, FAMILY, [4] * 5, cache, keeps_answers=True).requests
        turns = [[*request.prompt.tolist(), *request.token_ids, 40, 41] for request in first]
        second = run(model, turns, [3] * 5, cache, keeps_answers=True)
        assert_as_alone(model, second.requests)
        assert second.prefill.counts.computed == 3 * 5, "the last token of the answer, and what is new"

    def test_equal_answers_are_kept_once(self, model: Any) -> None:
        cache = RadixCache()
        run(model, [FAMILY[0]] * 3, [4] * 3, cache, keeps_answers=True)
        assert cache.num_tokens == 7 + 3 and is_free(cache)

    def test_a_budget_without_room_for_answers(self, model: Any) -> None:
        """They are left out, and the call succeeds."""
        cache = RadixCache(max_tokens=9)
        found = run(model, APART, [6] * 4, cache, keeps_answers=True, lanes={"longest_tail": 2})
        assert_as_alone(model, found.requests)
        assert is_free(cache) and cache.num_tokens <= 9

    def test_without_it_the_cache_keeps_no_answer(self, model: Any) -> None:
        cache = RadixCache()
        found = run(model, APART, [3] * 4, cache).requests
        assert [len(cache.match_prefix([*r.prompt, *r.token_ids]).slots) for r in found] == [0] * 4


class TestErrors:
    """Nothing stays locked or reserved, the lanes are given back, and the cache is usable."""

    def assert_usable(self, model: Any, cache: RadixCache) -> None:
        assert is_free(cache)
        assert_as_alone(model, run(model, FAMILY, [3] * 5, cache, keeps_answers=True).requests)
        assert is_free(cache)

    @pytest.mark.parametrize("keeps_answers", [False, True])
    @pytest.mark.parametrize("step", [1, 2, 3, 5])
    def test_a_processor_that_raises(self, model: Any, keeps_answers: bool, step: int) -> None:
        """In the first call for the first prompts, while they decode, and when others join."""
        cache, widths = RadixCache(), []

        def processor(token_ids: Tensor, scores: Tensor) -> Tensor:
            widths.append(token_ids.shape)
            if len(widths) == step:
                raise ZeroDivisionError
            return scores

        with pytest.raises(ZeroDivisionError):
            run(model, APART, [2, 4, 4, 2], cache, keeps_answers, {"num_lanes": 2, "longest_tail": 3}, processor)
        self.assert_usable(model, cache)

    @pytest.mark.parametrize("number", [1, 2, 4])
    def test_a_pass_that_is_interrupted(self, model: Any, number: int) -> None:
        cache, calls = RadixCache(), []

        def interrupt(*arguments: Any) -> None:
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                run(model, APART, [2, 4, 4, 2], cache, True, {"num_lanes": 2, "longest_tail": 3})
        finally:
            handle.remove()
        self.assert_usable(model, cache)

    def test_a_copy_that_fails(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Out of memory, as the first answer is kept."""
        cache = RadixCache()
        with monkeypatch.context() as patch, pytest.raises(MemoryError):

            def fail(*arguments: Any) -> None:
                raise MemoryError

            patch.setattr(KeyValueStore, "copy", fail)
            run(model, APART, [2, 4, 4, 2], cache, True)
        self.assert_usable(model, cache)

    def test_a_row_without_any_probability(self, model: Any) -> None:
        cache = RadixCache()
        with pytest.raises(ValueError, match="no token can be drawn"):
            run(
                *(model, APART, [3] * 4, cache),
                processor=lambda token_ids, scores: scores.fill_(float("-inf")),
                do_sample=True,
                seed=0,
            )
        self.assert_usable(model, cache)
