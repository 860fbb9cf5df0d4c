"""`validate`, `test`, `predict` and generated answers on two ranks give what one process gives, in its order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL, cases
from tests.support.processes import FLOAT64, Launched
from tests.support.runs import BAR, metrics, rows_in

# Of 21 rows, and of five prompts, the last step has a single one: a rank has none.
BATCHES = {"data__batch_size": 4, "data__max_tokens": 300, "data__max_length": 300}


@pytest.fixture
def finished(launch: Callable[..., Launched], tmp_path: Path) -> Callable[..., str]:
    """As `train`, for the other commands: what rank 0 prints."""

    def run(name: str, **options: Any) -> str:
        unset = {"data__train_file": None, "trainer__max_steps": None}
        launched = launch(name, **{**FLOAT64, **unset, **BATCHES, **options})
        assert launched.wait() == [0] * len(launched.runs), launched.said()
        assert not [each.printed() for each in launched.runs[1:] if each.printed()]
        return launched.runs[0].printed()

    return run


def figures(printed: str) -> dict[str, float]:
    """The metrics, a line each."""
    rows = [line.split() for line in printed.splitlines()]
    return {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[0].endswith("_loss")}


@FULL
@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_mean_over_all_labels(finished, rows, command):
    files = {"data__validation_file" if command == "validate" else "data__test_file": rows}
    one = figures(finished("one", command=command, **files))
    two = figures(finished("two", ranks=2, strategy="ddp", command=command, **files))
    split = figures(finished("split", ranks=2, strategy="ddp", sp_size=2, command=command, **files))
    assert one.keys() == two.keys() == split.keys() and len(one) == 1
    assert two == pytest.approx(one, rel=BAR)
    assert split == pytest.approx(one, rel=BAR)


WAYS = [("ddp", "true"), ("ddp", "false"), ("fsdp2", "true")]


@pytest.mark.parametrize(("strategy", "dedup"), cases(WAYS, WAYS[:1]))
def test_log_probabilities(finished, rows, tmp_path, strategy, dedup):
    """`sp_size` splits none: each rank has its own."""
    files = {"data__predict_file": rows, "command": "predict", "dedup": dedup}
    finished("one", **files)
    finished("two", ranks=2, strategy=strategy, sp_size=2, **files)
    one, two = (rows_in(tmp_path / name / "predictions.jsonl") for name in ("one", "two"))
    assert [each["row"] for each in one] == [f"{rows}:{number}" for number in range(1, 22)]
    assert [(each["row"], each["tokens"]) for each in two] == [(each["row"], each["tokens"]) for each in one]
    for here, there in zip(two, one, strict=True):
        assert here["logprobs"] == pytest.approx(there["logprobs"], rel=BAR, abs=BAR)
    assert not [*(tmp_path / "two").glob(".*[!s]")]


def test_answers(finished, shop, tmp_path):
    """Greedy ones, of prompts that the ranks share out."""
    files = {
        **{"data__predict_file": shop / "validation.jsonl", "model__generate": "true", "command": "predict"},
        "evaluate_generation__max_new_tokens": 16,
    }
    *_, line = finished("one", **files).splitlines()
    assert line.startswith("r  ") and "tokens of prompts per computed token" in line and "answers/s" in line
    finished("two", ranks=2, strategy="ddp", **files)
    one, two = (rows_in(tmp_path / name / "predictions.jsonl") for name in ("one", "two"))
    assert [each["row"] for each in one] == [f"{shop / 'validation.jsonl'}:{number}" for number in range(1, 6)]
    assert max(each["num_tokens"] for each in one) <= 16
    for here, there in zip(two, one, strict=True):
        assert here.pop("logprob") == pytest.approx(there.pop("logprob"), rel=BAR)
        assert here == there


@FULL
@pytest.mark.parametrize(("ranks", "strategy", "sp_size"), [(2, "ddp", 1), (2, "ddp", 2), (4, "fsdp2", 1)])
def test_validations_of_a_run(train, shop, ranks, strategy, sp_size):
    """The loss and the metric of generated answers are those of all; a rank of four has no row of some steps."""
    flags = {
        **{**FLOAT64, "data__train_file": shop / "train.jsonl", "data__validation_file": shop / "validation.jsonl"},
        **{"trainer__max_steps": 2, "trainer__val_check_interval": 2, **BATCHES},
    }
    generates = {"evaluate_generation__metric": "exact_match", "evaluate_generation__max_new_tokens": 8}
    names, flags = ("loss", "eval_loss", "eval_exact_match"), flags | (generates if strategy == "ddp" else {})
    one, several = train("one", **flags), train("ranks", ranks=ranks, strategy=strategy, sp_size=sp_size, **flags)
    assert metrics(several, *names) == pytest.approx(metrics(one, *names), rel=BAR)
    assert len({name for name, _ in metrics(one, *names)}) == (3 if strategy == "ddp" else 2)
