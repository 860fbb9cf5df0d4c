"""The loop of generation: which prompts are computed together, and what an error in the middle leaves behind.

Rows of each forward pass are counted: those of prompts, then one for every active sequence. `max_length` counts the
prompt, so a longer prompt has a shorter answer. That answers do not depend on any of this is shown in
`tests/claims/generation`.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import failing, greedy_by_the_model, is_idle, with_pieces_of
from tiers import cases

from radixtrain import RadixCache, generate

OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
APART = [[10 * n + place for place in range(6)] for n in range(4)]
FAMILY = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8], [1, 2, 3, 9, 9, 9, 9, 9], [20, 21, 22], [30]]
PAIRS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [11, 12, 13, 14, 5], [11, 12, 13, 14, 6]]
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3().double().eval()


def rows_of_passes(model: Any, prompts: list[list[int]], **options: Any) -> list[int]:
    rows: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        generate(model, prompts, **{**OPTIONS, **options})
    finally:
        handle.remove()
    return rows


@pytest.mark.usefixtures("hooks_that_may_stay")
class TestWhoIsComputedWhen:
    def test_a_lane_is_filled_again_in_sorted_order(self, model: Any) -> None:
        """Two lanes. The first and the last prompt have two tokens to come, the others four."""
        prompts = [APART[0], APART[1][:4], APART[2][:4], APART[3]]
        assert rows_of_passes(model, prompts, max_length=8, batch_size=2) == [6 + 4, 2, 4, 2, 2, 6, 2]
        assert rows_of_passes(model, prompts[::-1], max_length=8, batch_size=2) == [6 + 4, 2, 4, 2, 2, 6, 2]

    def test_a_few_free_lanes_wait_for_more(self, model: Any) -> None:
        """A quarter of them has to be free."""
        prompts = [[0, 0, 0], *([n] for n in range(1, 8)), [8, 0, 0], [9, 0, 0]]
        assert rows_of_passes(model, prompts, max_length=5, batch_size=8) == [3 + 7, 8, 7, 7, 6, 2]

    def test_prompts_that_are_too_many_for_one_pass_join_in_the_next(self, model: Any) -> None:
        """Without waiting for a free lane: every step reads the kept rows of all."""
        with with_pieces_of(512, max_rows=12):
            assert rows_of_passes(model, APART, max_new_tokens=4) == [12, 2, 12, 4, 4, 2]
            assert rows_of_passes(model, [[*range(30)], [40]], max_new_tokens=2) == [30, 1, 1, 1], "a prompt is not cut"
            shared = [[1, 2, 3, 4, 5, 6, last] for last in range(6)]
            assert rows_of_passes(model, shared, max_new_tokens=1) == [6 + 6], "only new rows count"

    def test_a_budget_for_some_at_once(self, model: Any) -> None:
        """Each pair keeps four tokens; the second waits until the first has left."""
        with with_pieces_of(3):
            assert rows_of_passes(model, PAIRS, max_new_tokens=3) == [12, 4, 4]
            cache = RadixCache(max_tokens=7)
            assert rows_of_passes(model, PAIRS, max_new_tokens=3, cache=cache) == [6, 2, 2, 6, 2, 2]
        assert is_idle(cache)

    @pytest.mark.parametrize(("batch_size", "widest"), [(None, 256), (270, 270)])
    def test_how_many_lanes(self, model: Any, batch_size: int | None, widest: int) -> None:
        prompts = [[n % 50, n // 50] for n in range(300)]
        assert rows_of_passes(model, prompts, max_new_tokens=2, batch_size=batch_size)[1] == widest

    def test_long_answers_take_room(self, model: Any) -> None:
        """65,536 slots, of which an answer is expected to take 1,024 at most; these end after two tokens or a few."""
        prompts = [[n, 7] for n in range(50)] * 2
        options = {"eos_token_id": list(range(1, 50)), "min_new_tokens": 2, "max_new_tokens": 100_000}
        assert rows_of_passes(model, prompts, **options)[1] == 65_536 // (2 + 1024)


FAILURES = [*(("processor", n) for n in (1, 2, 3, 5)), *(("layer", n) for n in (1, 2, 4)), ("copy", 1)]


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize(("where", "at"), cases(FAILURES, [("processor", 3), ("layer", 1), ("copy", 1)]))
def test_after_an_error_the_cache_is_usable(model: Any, where: str, at: int) -> None:
    """In the first pass, while sequences are decoded, when others join, and when one has ended."""
    cache = RadixCache()
    with with_pieces_of(3):
        generate(model, FAMILY[:2], max_new_tokens=2, cache=cache, **OPTIONS)
        with failing(model, where, at) as options, pytest.raises(KeyboardInterrupt):
            generate(model, [*APART[:2], *FAMILY], max_new_tokens=4, batch_size=2, cache=cache, **OPTIONS, **options)
        assert is_idle(cache)
        found = generate(model, FAMILY, max_new_tokens=3, cache=cache, **OPTIONS)
    assert found.token_ids == greedy_by_the_model(model, FAMILY, 3)
    assert is_idle(cache)


@pytest.mark.parametrize("max_new_tokens", [1, 4])
def test_a_row_without_any_probability(model: Any, max_new_tokens: int) -> None:
    def nothing(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(float("-inf"))

    cache, sampled = RadixCache(), {"do_sample": True, "seed": 0, "max_new_tokens": max_new_tokens}
    with pytest.raises(ValueError, match=r"no token can be drawn, .* check logits_processor, bad_words_ids"):
        generate(model, APART, cache=cache, logits_processor=[nothing], **sampled)
    assert is_idle(cache)


LONG = [[7, 8, 9, 10, last] for last in range(1, 6)] + [[3], [3, 4, 5, 6, 7, 8, 9, 10, 11]]


class TestLongAnswers:
    """Longer than the lanes were made for."""

    @pytest.fixture(autouse=True)
    def short_lanes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules["radixtrain.generation.generate"], "FIRST_ANSWER", 2)

    @pytest.mark.parametrize(("batch_size", "cached"), [(None, False), (3, True)])
    def test_lanes_grow(self, model: Any, batch_size: int | None, cached: bool) -> None:
        cache = RadixCache() if cached else None
        options = {"do_sample": False, "eos_token_id": None, "batch_size": batch_size}
        answers = generate(model, LONG, max_new_tokens=40, cache=cache, **options)
        assert answers.token_ids == greedy_by_the_model(model, LONG, 40)
        assert cache is None or is_idle(cache)

    def test_nothing_is_lost_if_there_is_no_memory(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = RadixCache()
        generate(model, LONG, max_new_tokens=2, do_sample=False, cache=cache)

        def full(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(type(cache.store), "copy", full)
            with pytest.raises(MemoryError):
                generate(model, LONG, max_new_tokens=20, do_sample=False, eos_token_id=None, cache=cache)
        assert is_idle(cache)

    def test_a_generous_limit_costs_nothing_beforehand(self, model: Any) -> None:
        cache = RadixCache()
        options = {"do_sample": True, "seed": 1, "eos_token_id": list(range(1, 50, 2)), "cache": cache}
        answers = generate(model, [[3, 5]] * 64, max_new_tokens=10**8, **options)
        assert set(answers.finish_reasons) == {"stop"}
        assert cache.pool.capacity < 65_536
