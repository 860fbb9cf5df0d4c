"""What answers are worth, and what is wrong with a metric, in one line."""

import re

import pytest

from radixtrain.errors import UserError
from radixtrain.training.answers.evaluate_generation import load_metric


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
