"""After each validation the model answers prompts of validation rows, and a metric judges the answers."""

from __future__ import annotations

import csv
import importlib
import logging
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.data.datamodule import SFTData
from radixtrain.data.prompts import Prompt, Prompts
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, did_you_mean, first_line, only_warns
from radixtrain.settings.commands import AnswerSettings
from radixtrain.training.answers.answering import answer_prompts, check_answering

logger = logging.getLogger(__name__)

METRIC = "evaluate_generation.metric"
OWN_METRICS = ("exact_match", "contains", "regex")
LOGGED = ("loss",)  # names that have an `eval_` metric already

Rows = Sequence[Mapping[str, str]]
Judge = Callable[[list[str], list[str], Rows], Any]
"""Takes answers, targets and rows, and returns a number for each. A row has `row`, its `file:line`, and `prompt`."""
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
NUM_TRIED = 2  # rows that are answered before the first step, to fail early


@dataclass(frozen=True)
class Metric:
    """A metric of answers. name: in the log, after `eval_`. judge: answers, targets and rows to a number per answer."""

    name: str
    judge: Judge

    def __call__(self, answers: list[str], targets: list[str], rows: Rows) -> list[float]:
        """Score each answer. Raises UserError, in one line, if a user's function fails or does not return numbers."""
        try:
            scores = self.judge(answers, targets, rows)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise anything
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}:{last.lineno}: {type(error).__name__}: {first_line(error)}"
            raise UserError(f"{METRIC}: {self.name} failed at {place}") from error
        with suppress(TypeError, ValueError):
            numbers = [float(score) for score in scores]
            if len(numbers) == len(answers) and all(map(math.isfinite, numbers)):
                return numbers
        expected = f"a list with a finite number for each of {len(answers)} answers"
        found = f"{type(scores).__name__} {scores!r}"[:100]
        raise UserError(f"{METRIC}: {self.name} must return {expected}, found {found}")


def load_metric(name: str, pattern: str | None = None) -> Metric:
    """Load a metric by its name, or a function by its path `package.module.function`.

    exact_match: 1 if answer and target are equal but for blanks at their ends.
    contains: 1 if the target, without blanks at its ends, is a part of the answer.
    regex: 1 if `pattern` finds the same in both: its first group, or without groups the whole match.

    Raises UserError for an unknown name, a function that cannot be imported, and a pattern that is missing, is not
    valid or is not read.
    """
    if name == "regex":
        return Metric(name, _regex(pattern))
    if pattern is not None:
        raise UserError(f"evaluate_generation.pattern is read only by the metric regex, not by {name}")
    if name in OWN_METRICS:
        return Metric(name, {"exact_match": _exact_match, "contains": _contains}[name])
    if "." not in name:
        functions = "or a function of yours by its path, module.function"
        expected = f"; expected one of {', '.join(OWN_METRICS)}, {functions}"
        raise UserError(f"{METRIC}: no metric {name!r}{did_you_mean(name, OWN_METRICS, expected)}")
    return _of_user(name)


def _exact_match(answers: list[str], targets: list[str], rows: Rows) -> list[bool]:
    return [answer.strip() == target.strip() for answer, target in zip(answers, targets, strict=True)]


def _contains(answers: list[str], targets: list[str], rows: Rows) -> list[bool]:
    return [target.strip() in answer for answer, target in zip(answers, targets, strict=True)]


def _regex(pattern: str | None) -> Judge:
    if pattern is None:
        raise UserError("evaluate_generation.pattern is missing: the metric regex compares what it finds")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"evaluate_generation.pattern: {pattern!r} is not a regular expression: {error}") from None

    def judge(answers: list[str], targets: list[str], rows: Rows) -> list[bool]:
        expected = [_found(compiled, target) for target in targets]
        if None in expected:
            first = rows[expected.index(None)]["row"]
            count = f"{expected.count(None)} of {len(expected)} targets"
            raise UserError(f"evaluate_generation.pattern: finds nothing in {count}, first in that of {first}")
        return [_found(compiled, answer) == each for answer, each in zip(answers, expected, strict=True)]

    return judge


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match if match is None else match[min(1, pattern.groups)]


def _of_user(path: str) -> Metric:
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        place = "run `python -m radixtrain` in the folder that holds it, or name that folder in PYTHONPATH"
        raise UserError(f"{METRIC}: {path} cannot be imported: no module {error.name!r}; {place}") from None
    except Exception as error:  # a module may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{METRIC}: {path} cannot be imported: {reason}") from error
    if not callable(function):
        raise UserError(f"{METRIC}: no function {name!r} in {module_name}")
    if name in LOGGED:
        raise UserError(f"{METRIC}: eval_{name} is logged already; give {path} another name")
    return Metric(name, function)


class Judged(NamedTuple):
    """A row of the table of answers.

    row: file and line. prompt: all that the model read, with special tokens. answer, target: without them.
    score: by the metric. finish_reason: `stop`, or `length` for an answer that `max_new_tokens` cut.
    """

    row: str
    prompt: str
    answer: str
    target: str
    score: float
    finish_reason: str


class EvaluateGeneration:
    """Judges a model by its answers to validation rows, cut before their last answer, after each validation.

    The metric is logged as `eval_` and its name, before checkpoints and early stopping look at it. The answers are
    written into `answers/` of the output folder. Training is not affected by the generation: no random generator
    is touched.
    """

    def __init__(self, **settings: Any):
        """Take fields of `AnswerSettings`, which raises UserError for any other."""
        self.options = options = AnswerSettings(**settings)
        self.metric = None if options.metric is None else load_metric(options.metric, options.pattern)
        self.prompts: Prompts | None = None
        self.interruptible: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while answers are generated; the command line lets a signal end it."""

    @property
    def logged(self) -> str | None:
        """Return the name of the metric in the log; None if nothing is generated."""
        return None if self.metric is None else f"eval_{self.metric.name}"

    def line(self) -> str:
        """Describe the evaluation for the overview of the run. Empty if nothing is generated."""
        if self.metric is None or self.prompts is None:
            return ""
        longest, name = f"of at most {self.options.max_new_tokens:,} tokens", self.metric.name
        return f"{len(self.prompts):,} {longest} after each validation, judged by {name}, in answers/"

    def prepare(self, module: Any, data: SFTData) -> None:
        """Choose the rows, and check what would fail. Needs the model and the data; nothing is generated.

        Raises UserError if no row has an answer after a prompt, the pattern finds nothing in a target, or the model or
        an option of the generation is not supported.
        """
        if self.metric is None:
            return
        self.prompts = data.validation_prompts(self.options.num_samples)
        self._check_prompts(self.prompts)
        prompts, tokenizer = self.prompts.prompts, data.tokenizer()
        check_answering(module.model, tokenizer, prompts, self.options)
        if self.metric.name == "regex":
            targets = _targets(prompts, tokenizer)
            self.metric(targets, targets, _rows(prompts, tokenizer))

    def try_answers(self, runner: Any) -> None:
        """Answer two rows, in one token, and judge them: what fails in this model or metric fails before a step."""
        if self.metric is not None:
            options = replace(self.options, max_new_tokens=1)
            assert self.prompts is not None, "prepare comes first"
            self._judged(runner, self.prompts.prompts[:NUM_TRIED], options)

    def measured(self, runner: Any) -> dict[str, float]:
        """Answer, write, and return the metric by its name in the log; nothing if no answers are judged."""
        if self.prompts is None or self.logged is None:
            return {}
        judged = self._judged(runner, self.prompts.prompts, self.options)
        ranks().broadcast_from_rank0(lambda: self._write(runner, judged))
        return {self.logged: sum(row.score for row in judged) / len(judged)}

    def _write(self, runner: Any, judged: Sequence[Judged]) -> None:
        """Write the answers to a file, replacing an earlier one."""
        name = f"step={runner.global_step}" if runner.state.fn == "fit" else "validate"
        path = runner.output_dir / "answers" / f"{name}.csv"
        with only_warns(f"the answers in {path.parent} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([Judged._fields, *(map(_cell, row) for row in judged)])

    def _judged(self, runner: Any, prompts: Sequence[Prompt], options: AnswerSettings) -> list[Judged]:
        """Generate the answers in the precision of the run, and judge them."""
        metric, tokenizer = self.metric, runner.datamodule.tokenizer()
        assert metric is not None
        with self.interruptible(), runner.precision_plugin.forward_context():
            answers = answer_prompts(runner.module.model, prompts, tokenizer, options).answers
        rows, targets = _rows(prompts, tokenizer), _targets(prompts, tokenizer)
        with isolate_rng():  # a metric of the user may draw random numbers
            scores = ranks().broadcast_from_rank0(lambda: metric([answer.text for answer in answers], targets, rows))
        return [
            Judged(row["row"], row["prompt"], answer.text, target, score, answer.finish_reason)
            for row, answer, target, score in zip(rows, answers, targets, scores, strict=True)
        ]

    def _check_prompts(self, found: Prompts) -> None:
        why = "rows have no answer after a prompt, or one that data.max_length may have cut"
        left_out = f"{found.num_left_out:,} validation {why}, the first is {found.first_left_out}"
        if not len(found):
            hint = "chats need data.assistant_only_loss: true, prompts with completions data.completion_only_loss: true"
            raise UserError(f"evaluate_generation: no row can be judged: {left_out}; {hint}")
        if found.num_left_out:
            logger.warning("evaluate_generation leaves out %s", left_out)
        longest, most = max(len(prompt.target_ids) for prompt in found.prompts), self.options.max_new_tokens
        if longest > most:
            logger.warning("evaluate_generation.max_new_tokens %s is less than the longest target, %s", most, longest)


def _rows(prompts: Sequence[Prompt], tokenizer: Any) -> list[dict[str, str]]:
    """Return the fields of each row that a metric receives besides answer and target."""
    texts = tokenizer.batch_decode([prompt.token_ids for prompt in prompts])
    return [{"row": prompt.where, "prompt": text} for prompt, text in zip(prompts, texts, strict=True)]


def _cell(value: Any) -> Any:
    """Put `'` before what a spreadsheet would run as a formula, and before another `'`, so that it can be undone."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "'"))
    return f"'{value}" if is_formula and not NUMBER.fullmatch(value) else value


def _targets(prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    texts: list[str] = tokenizer.batch_decode([prompt.target_ids for prompt in prompts], skip_special_tokens=True)
    return texts
