"""What generation returns, beside what `model.generate` returns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from radixtrain.generation.generate import Generated, GenerationStats

STATS = GenerationStats(
    num_prompt_tokens=1200, num_cached_tokens=300, num_computed_tokens=150, num_new_tokens=12, seconds=0.5
)


def generated(**changes: Any) -> Generated:
    fields: dict[str, Any] = {
        "prompt_ids": [[5, 6, 7], [8]],
        "token_ids": [[1, 2], [1], [3, 4, 9], []],
        "texts": ["one  two\n", "one", "x" * 70, ""],
        "logprobs": [[-0.5, -0.25], [-1.0], [-1.0, -2.0, -3.0], []],
        "finish_reasons": ["stop", "stop", "length", "length"],
        "num_return_sequences": 2,
        "stats": STATS,
    }
    return Generated(**{**fields, **changes})


class TestStats:
    def test_ratios(self) -> None:
        assert STATS.r == 8.0
        assert STATS.hit_rate == 0.25

    def test_nothing_computed(self) -> None:
        assert GenerationStats(10, 10, 0, 1, 0.1).r == math.inf
        empty = GenerationStats(0, 0, 0, 0, 0.0)
        assert math.isnan(empty.r)
        assert math.isnan(empty.hit_rate)
        assert "0 new tokens in 0.00 s" in str(empty)

    def test_says_what_was_computed(self) -> None:
        assert str(STATS) == (
            "1,200 prompt tokens, 150 computed (r 8.00), 300 from the cache; 12 new tokens in 0.50 s, 24 a second"
        )


class TestSequences:
    def test_prompts_are_padded_on_the_left_and_answers_on_the_right(self) -> None:
        assert generated().sequences(0).tolist() == [
            [5, 6, 7, 1, 2, 0],
            [5, 6, 7, 1, 0, 0],
            [0, 0, 8, 3, 4, 9],
            [0, 0, 8, 0, 0, 0],
        ]
        assert generated().sequences(0).dtype == torch.int64


class TestTable:
    def test_the_first_answers(self) -> None:
        assert len(generated()) == 4
        assert str(generated()).splitlines()[1:] == [
            "prompt  tokens  end     logprob  answer",
            "     0       2  stop      -0.75  one two",
            "     0       1  stop      -1.00  one",
            f"     1       3  length    -6.00  {'x' * 56} ...",
            "     1       0  length     0.00  ",
        ]

    def test_token_ids_without_a_tokenizer(self) -> None:
        shown = str(generated(texts=None, token_ids=[[1, 2], [1], [*range(20)], []]))
        assert "  1 2\n" in shown
        assert "0 1 2 3 4 5 6 7 8 9 10 11 ..." in shown

    @pytest.mark.parametrize(("count", "last"), [(10, "   9 "), (12, "... and 2 more")])
    def test_ten_at_most(self, count: int, last: str) -> None:
        lists: dict[str, Any] = {name: [[5]] * count for name in ("prompt_ids", "token_ids")}
        lists |= {"texts": ["a"] * count, "logprobs": [[-1.0]] * count, "finish_reasons": ["stop"] * count}
        lines = str(generated(**lists, num_return_sequences=1)).splitlines()
        assert len(lines) == 2 + min(count, 10) + (count > 10)
        assert last in lines[-1]
