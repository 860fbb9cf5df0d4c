"""What generation returns, beside what `model.generate` returns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from radixtrain.generation.generated import Generated, GenerationStats

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

    def test_are_those_of_transformers(self, tiny_qwen3: Any) -> None:
        model = tiny_qwen3(num_hidden_layers=1, eos_token_id=None).eval()
        prompts = [[7, 8, 9, 10], [6, 5], [11, 12, 13]]
        longest, options = max(map(len, prompts)), {"max_new_tokens": 8, "pad_token_id": 0}
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        eos = model.generate(ids, attention_mask=ids.ne(0).long(), **options)[0, longest + 2].item()  # ends one early
        expected = model.generate(ids, attention_mask=ids.ne(0).long(), eos_token_id=eos, **options)
        answers = []
        for row in expected[:, longest:].tolist():
            answers.append(row[: row.index(eos) + 1] if eos in row else row)
        assert len({*map(len, answers)}) > 1
        found = generated(prompt_ids=prompts, token_ids=answers, num_return_sequences=1)
        assert torch.equal(found.sequences(0), expected)

    def test_nothing(self) -> None:
        empty = generated(prompt_ids=[], token_ids=[], texts=[], logprobs=[], finish_reasons=[])
        assert len(empty) == 0
        assert empty.sequences(0).shape == (0, 0)
        assert str(empty).startswith("0 answers to 0 prompts: ")


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
