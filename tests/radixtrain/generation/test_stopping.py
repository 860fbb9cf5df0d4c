"""When answers end: where `model.generate` ends each prompt by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import stopping_criteria as transformers_stopping

from radixtrain.errors import UserError
from radixtrain.generation.options import resolve_config
from radixtrain.generation.stopping import LENGTH, STOP, Stopper


@pytest.fixture(scope="module")
def model(tiny_qwen3: Any) -> Any:
    return tiny_qwen3(vocab_size=400, eos_token_id=[3, 4]).eval()


def stopper(model: Any, tokenizer: Any = None, criteria: Any = None, **options: Any) -> Stopper:
    return Stopper(model, resolve_config(model, None, **options), tokenizer, criteria)


def finished(found: Stopper, rows: list[list[int]], num_new: Any = 1, max_new: Any = 99, padding: int = 3) -> list[int]:
    """What is said of rows that end in their newest token."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, padding)
    lengths = np.array([len(row) for row in rows])
    tokens = np.array([row[-1] for row in rows])
    counts = (np.broadcast_to(each, len(rows)) for each in (num_new, max_new))
    verdicts = found.finished(tokens, ids if found.reads_token_ids else None, lengths, *counts)
    assert verdicts.dtype == np.int8
    return verdicts.tolist()


class TestEndTokens:
    def test_any_of_a_list(self, model: Any) -> None:
        assert finished(stopper(model), [[7, 3], [3, 7], [9, 9, 4], [5]]) == [STOP, 0, STOP, 0]

    @pytest.mark.parametrize(("eos", "expected"), [(9, [0, STOP]), ([3], [STOP, 0]), (None, [0, 0])])
    def test_of_the_call(self, model: Any, eos: Any, expected: list[int]) -> None:
        assert finished(stopper(model, eos_token_id=eos), [[7, 3], [7, 9]]) == expected


class TestLengths:
    def test_each_row_has_its_own(self, model: Any) -> None:
        found = finished(stopper(model), [[7], [7], [7], [3]], [1, 2, 5, 5], [2, 2, 5, 5])
        assert found == [0, LENGTH, LENGTH, STOP]  # an end token in the last place is an end


class TestTime:
    def test_max_time_ends_all_for_their_length(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [100.0]
        monkeypatch.setattr(transformers_stopping.time, "time", lambda: clock[0])
        found = stopper(model, max_time=2.0)
        clock[0] += 2.0
        assert finished(found, [[7], [3]]) == [0, STOP]
        clock[0] += 0.1
        assert finished(found, [[7], [3]]) == [LENGTH, STOP]
        assert finished(stopper(model, max_time=2.0), [[7]]) == [0]  # its time begins with it
        assert finished(stopper(model, criteria=[MaxTimeCriteria(1.0, 0.0)], max_time=2.0), [[7]]) == [LENGTH]


class TestStopStrings:
    @pytest.mark.parametrize("stops", ["one", ["two.", "x"], ["shelf t"], [" on shelf one, tools on"], ["."]])
    def test_rows_of_all_lengths_in_one_call(self, model: Any, tokenizer: Any, stops: Any) -> None:
        """As transformers' criterion says of each row by itself."""
        texts = ["Fruit is on shelf one, tools on shelf two.", "two.", "one", "The hammer is on shelf two"]
        rows = [ids[:end] for ids in tokenizer(texts)["input_ids"] for end in range(1, len(ids) + 1)]
        alone = StopStringCriteria(tokenizer, stops)
        expected = [STOP if alone(torch.tensor([row]), None).item() else 0 for row in rows]
        found = stopper(model, tokenizer, stop_strings=stops, eos_token_id=None)
        padding = tokenizer(texts[1])["input_ids"][-1]  # would end a row if it were read
        assert finished(found, rows, padding=padding) == expected
        assert STOP in expected
        assert 0 in expected

    @pytest.mark.parametrize(
        ("strings", "with_tokenizer", "message"),
        [
            ("one", False, "stop_strings need the model's tokenizer: pass tokenizer="),
            ("", True, "stop_strings: expected texts that are not empty, got ''"),
            (["a", 3], True, r"stop_strings: expected texts that are not empty, got \['a', 3\]"),
        ],
    )
    def test_what_cannot_be_matched(
        self, model: Any, tokenizer: Any, strings: Any, with_tokenizer: bool, message: str
    ) -> None:
        with pytest.raises(UserError, match=message):
            stopper(model, tokenizer if with_tokenizer else None, stop_strings=strings)


class Twice(StoppingCriteria):
    """Ends a row that begins and ends with the same token, and keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert scores is None  # what transformers gives without output_scores
        self.seen += [tuple(row) for row in input_ids.tolist()]
        return input_ids[:, 0] == input_ids[:, -1]


class TestTheUsersCriterion:
    def test_sees_rows_without_padding(self, model: Any) -> None:
        criterion = Twice()
        rows = [[7, 8, 7], [8, 7], [9, 9], [5, 6, 7, 5], [6, 5]]
        found = stopper(model, criteria=StoppingCriteriaList([criterion]))
        assert finished(found, rows) == [STOP, 0, STOP, STOP, 0]
        assert sorted(criterion.seen) == sorted(map(tuple, rows))

    @pytest.mark.parametrize("criteria", [Twice(), "twice", [5]])
    def test_of_the_wrong_kind(self, model: Any, criteria: Any) -> None:
        with pytest.raises(UserError, match="stopping_criteria: expected a StoppingCriteriaList"):
            stopper(model, criteria=criteria)

    def test_lengths_are_options(self, model: Any) -> None:
        with pytest.raises(UserError, match="MaxLengthCriteria is not supported; set max_new_tokens or max_length"):
            stopper(model, criteria=[MaxLengthCriteria(5)])
