"""`evaluate_generation` through the real command line: its table, a training that is not touched; and its metrics."""

import csv
import random
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration, _cell, load_metric
from tests.support import FULL
from tests.support.runs import logged, names, rows_in

GREEDY = {"evaluate_generation__metric": "exact_match", "evaluate_generation__max_new_tokens": 16}


@pytest.fixture
def run(arguments, shop):
    """Runs a command with validation rows and returns its exit code."""
    defaults = {"data__validation_file": shop / "validation.jsonl", "data__min_shared_tokens": 1}

    def run(command="fit", **flags):
        return main(arguments(command, **{**defaults, **flags}))

    return run


def table(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_cell_is_no_formula():
    """The first `'` can be taken away again: no two texts become the same cell."""
    texts = ["=1+1", "+a", "-a", "@a", "\t=1", "\r=1", "'a", "''"]
    assert [_cell(text) for text in texts] == [f"'{text}" for text in texts]
    assert [_cell(each) for each in ("a=1", "-3", "+4.5", "", 1.5, "1 = 1")] == ["a=1", "-3", "+4.5", "", 1.5, "1 = 1"]


def test_a_run_that_learns_the_answers(run, shop, tmp_path, capsys):
    """The metric of the log is the mean of the table, the rows are those of the file, the answers become right."""
    out = tmp_path / "out"
    rows = [row["messages"] for row in rows_in(shop / "train.jsonl")]
    flags = {"data__validation_file": shop / "train.jsonl", "evaluate_generation__num_samples": 6}
    assert run(trainer__max_epochs=12, trainer__val_check_interval=30, **flags, **GREEDY) == 0
    scores = logged(out, "eval_exact_match")
    assert names(out / "answers") == ["step=30.csv", "step=60.csv"]
    for step, score in zip((30, 60), scores.values(), strict=True):
        judged = table(out / "answers" / f"step={step}.csv")
        assert score == pytest.approx(sum(float(row["score"]) for row in judged) / len(judged))
        assert len(judged) == 6 == len({row["row"] for row in judged})
        for row in judged:
            messages = rows[int(row["row"].rpartition(":")[2]) - 1]
            assert row["target"].strip() == messages[-1]["content"] and messages[1]["content"] in row["prompt"]
            assert row["prompt"].endswith("<|im_start|>assistant\n")
            assert float(row["score"]) == (row["answer"].strip() == row["target"].strip())
    assert list(scores.values())[-1] > 0.5
    captured = capsys.readouterr()
    assert "answers      6 of at most 16 tokens after each validation, judged by exact_match" in captured.out
    assert re.search(r"^eval_loss +\d\.\d+\neval_exact_match \d\.\d{4}\n", captured.out, re.MULTILINE)


def test_training_is_bit_equal_to_one_without(run, tmp_path):
    """After three steps, with draws, and with an evaluation after each. Without it nothing is answered."""
    flags = {"trainer__max_steps": 3, "trainer__val_check_interval": 1, "data__dataloader_num_workers": 1}
    sampled = {**GREEDY, "evaluate_generation__do_sample": True, "evaluate_generation__temperature": 2.0}
    states = {}
    for name, options in (("without", {}), ("with", sampled)):
        assert run(output_dir=tmp_path / name, **flags, **options) == 0
        states[name] = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
    without, evaluated = (load_file(tmp_path / name / "model" / "model.safetensors") for name in states)
    assert without.keys() == evaluated.keys() and len(names(tmp_path / "with" / "answers")) == 3
    assert EvaluateGeneration().logged is None and not (tmp_path / "without" / "answers").exists()
    assert [name for name in without if not torch.equal(without[name], evaluated[name])] == []
    assert states["without"] == states["with"]
    assert logged(tmp_path / "with", "loss") == logged(tmp_path / "without", "loss")


@FULL
def test_checkpoints_and_early_stopping_see_the_metric_of_the_same_validation(run, tmp_path):
    """The first validation that is not better stops the run, and its checkpoint is not the best."""
    judge = {"evaluate_generation__metric": "contains", "evaluate_generation__max_new_tokens": 12}
    assert run(save_best="eval_contains", early_stopping=1, trainer__max_epochs=20, **judge) == 0
    scores = logged(tmp_path / "out", "eval_contains")
    values = list(scores.values())
    assert len(values) < 20 and values[-1] <= max(values[:-1])
    best = (values.index(max(values)) + 1) * 5
    assert (tmp_path / "out" / "checkpoints" / "best").readlink().name == f"step={best}"


def test_validate(run, shop, tmp_path, capsys):
    """On a part of the rows."""
    assert run("validate", **GREEDY, data__train_file=None, evaluate_generation__num_samples=3) == 0
    assert "eval_exact_match" in capsys.readouterr().out
    assert names(tmp_path / "out" / "answers") == ["validate.csv"]
    assert len(table(tmp_path / "out" / "answers" / "validate.csv")) == 3


@FULL
def test_rows_without_an_answer(run, tmp_path, capsys, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "shelf one"}\n{"prompt": "shelf", "completion": " one"}\n', encoding="utf-8")
    flags = {"data__validation_file": path, "trainer__max_steps": 5, **GREEDY}
    with caplog.at_level("WARNING", logger="radixtrain"):
        assert run(**flags) == 0
    assert "leaves out 1 validation rows have no answer after a prompt, or one" in caplog.text
    assert f"the first is {path}:1" in caplog.text
    assert run(**flags, output_dir=tmp_path / "other", data__completion_only_loss="false") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: evaluate_generation: no row can be judged: 2 validation rows have no answer")
    assert not (tmp_path / "other").exists()


def rows(count):
    return [{"row": f"a:{n + 1}", "prompt": "?"} for n in range(count)]


@pytest.mark.parametrize(
    ("name", "pattern", "answer", "target", "score"),
    [
        ("exact_match", None, "\n Shelf one. ", "Shelf one.\n", 1),
        ("exact_match", None, "shelf one.", "Shelf one.", 0),
        ("contains", None, "It is on shelf one, I think", " shelf one\n", 1),
        ("contains", None, "shelf", "shelf one", 0),
        ("regex", r"#### (\d+)", "so 6 * 7\n#### 42", "hence\n#### 42", 1),
        ("regex", r"#### (\d+)", "#### 43", "#### 42", 0),
        ("regex", r"#### (\d+)", "forty-two", "#### 42", 0),
        ("regex", r"\d+", "about 42", "42", 1),
        ("regex", r"(?i)shelf (\w+)( please)?", "SHELF one please", "shelf one", 1),
    ],
)
def test_a_score(name, pattern, answer, target, score):
    metric = load_metric(name, pattern)
    assert metric.name == name and metric([answer], [target], rows(1)) == [score]


def test_a_pattern_that_finds_nothing_in_a_target():
    with pytest.raises(UserError, match=r"pattern: finds nothing in 2 of 3 targets, first in that of a:2$"):
        load_metric("regex", r"\d")(["1", "2", "3"], ["1", "two", "three"], rows(3))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`write(source)`: a module `shelf_metrics` of the user."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "shelf_metrics", raising=False)
    return lambda source: (tmp_path / "shelf_metrics.py").write_text(source, encoding="utf-8")


def test_a_function_of_the_user(module):
    score = "len(answer) / len(target + row['prompt'])"
    pairs = "for answer, target, row in zip(answers, targets, rows)"
    module(f"def length(answers, targets, rows):\n    return [{score} {pairs}]")
    metric = load_metric("shelf_metrics.length")
    assert metric.name == "length" and metric(["abc", ""], ["12", "1"], rows(2)) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"f failed at .*shelf_metrics\.py:2: ZeroDivisionError: division by zero$"),
        ("return None", "f must return a list with a finite number for each of 2 answers, found NoneType None$"),
        ("return 0.5", "f must return a list with a finite number for each of 2 answers, found float 0.5$"),
        ("return [1.0]", r"f must return a list with a finite number for each of 2 answers, found list \[1.0\]"),
        ("return [1.0, float('nan')]", "f must return a list .* of 2 answers, found list"),
        ("return ['good', 'bad']", r"f must return a list .* of 2 answers, found list \['good', 'bad'\]$"),
    ],
)
def test_a_function_that_fails(module, body, message):
    module(f"def f(answers, targets, rows):\n    {body}\n")
    with pytest.raises(UserError, match=f"^evaluate_generation.metric: {message}"):
        load_metric("shelf_metrics.f")(["a", "b"], ["a", "b"], rows(2))


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("exact_macht", None, "evaluate_generation.metric: no metric 'exact_macht', did you mean exact_match?"),
        ("bleu", None, "no metric 'bleu'; expected one of exact_match, contains, regex, or a function of yours by"),
        ("regex", None, "evaluate_generation.pattern is missing: the metric regex compares what it finds"),
        ("regex", "(", "pattern: '(' is not a regular expression: missing ), unterminated subpattern at position 0"),
        ("contains", "a", "evaluate_generation.pattern is read only by the metric regex, not by contains"),
        (
            "nowhere.f",
            None,
            "nowhere.f cannot be imported: no module 'nowhere'; run `python -m radixtrain` in the folder",
        ),
        ("shelf_metrics.g", None, "evaluate_generation.metric: no function 'g' in shelf_metrics"),
        ("shelf_metrics.loss", None, "eval_loss is logged already; give shelf_metrics.loss another name"),
    ],
)
def test_a_metric_that_is_none(module, name, pattern, message):
    module("def loss(answers, targets, rows): ...")
    with pytest.raises(UserError, match=re.escape(message)):
        load_metric(name, pattern)


def test_a_module_that_raises(module):
    module("raise OSError('no network')")
    with pytest.raises(UserError, match=r"shelf_metrics\.f cannot be imported: OSError: no network"):
        load_metric("shelf_metrics.f")
