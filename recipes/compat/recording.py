"""A pytest plugin for third-party tests: replaces the hub by local stand-ins, records what each test logged, compares.

    python recipes/compat/stand_ins.py build/trl build/stand_ins
    export PYTHONPATH=recipes/compat HF_HUB_OFFLINE=1
    run="python -m pytest -p recording --stand-ins build/stand_ins --arithmetic float32"
    $run --record untouched.jsonl build/trl/tests/test_dpo_trainer.py
    RADIXTRAIN=1 $run --record shared.jsonl build/trl/tests/test_dpo_trainer.py
    python recipes/compat/recording.py untouched.jsonl shared.jsonl

Each line of a record is a test: its outcome, the numbers that trainers logged, and how many calls of the models ran on
unique tokens, or why not. Every test starts from the same seed. Without `--arithmetic` the tests are unchanged; with
it, every step is logged, every model is loaded in that dtype, and mixed precision is off. Many tests of TRL train at a
rate of 0.1, where the rounding of any two runs grows tenfold a step; `--learning-rate 1e-4` shows what it grew from.
Differences are relative for numbers above 1, else absolute.
"""

import argparse
import functools
import json
import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

TIMINGS = re.compile("runtime|per_second|flos|time|mem")
Logged = list[tuple[str, dict[str, float]]]
logged: Logged = []
reports: list[Any] = []
refused: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stand-ins", type=Path, help="the folder that stand_ins.py wrote")
    parser.addoption("--record", type=Path, required=True, help="the file to write")
    parser.addoption("--arithmetic", choices=["float32", "float64"], help="of all models and trainers")
    parser.addoption("--learning-rate", type=float, help="of all trainers: one at which rounding does not grow")
    parser.addoption("--attention", help="attn_implementation of all models: another rounding")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the suite's own conftest.py, which may import transformers."""
    options = early_config.known_args_namespace
    options.record.write_text("")
    if options.stand_ins is not None:
        os.environ["HF_HUB_CACHE"] = str((options.stand_ins / "hub").resolve())
        serve_rows((options.stand_ins / "datasets").resolve())
    watch_trainers()
    if options.arithmetic:
        compute_in(options.arithmetic, options.attention, options.learning_rate)
    if os.environ.get("RADIXTRAIN"):
        watch_sharing()
        share_in_trainers()


def serve_rows(folder: Path) -> None:
    """Let `load_dataset` find what is saved in `folder`; all else as before."""
    import datasets

    ordinary = datasets.load_dataset

    @functools.wraps(ordinary)
    def load_dataset(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        saved = folder / path / (name or "default")
        if not saved.exists():
            return ordinary(path, name, *args, **kwargs)
        rows = datasets.load_from_disk(saved)
        streaming, split = kwargs.get("streaming"), kwargs.get("split")
        if split is not None:
            part, _, end = split.rstrip("]").partition("[:")
            rows = rows[part].select(range(int(end))) if end else rows[part]
        if not streaming:
            return rows
        if split is not None:
            return rows.to_iterable_dataset()
        return datasets.IterableDatasetDict({part: each.to_iterable_dataset() for part, each in rows.items()})

    datasets.load_dataset = load_dataset


def watch_trainers() -> None:
    """Keep the numbers that a trainer logs."""
    from transformers import Trainer

    ordinary = Trainer.log

    @functools.wraps(ordinary)
    def log(self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.append((type(self).__name__, {name: x for name, x in logs.items() if isinstance(x, int | float)}))
        ordinary(self, logs, *args, **kwargs)

    Trainer.log = log


def compute_in(arithmetic: str, attention: str | None, learning_rate: float | None) -> None:
    """Load every model in this dtype and with this attention; train at this rate, and log every step."""
    import torch
    from transformers import PreTrainedModel, TrainingArguments

    prepare = TrainingArguments.__post_init__
    ordinary = PreTrainedModel.from_pretrained.__func__
    own: dict[str, Any] = {"dtype": getattr(torch, arithmetic)}
    if attention is not None:
        own["attn_implementation"] = attention
    if arithmetic == "float64":
        own["experts_implementation"] = "eager"  # torch's grouped one takes no float64

    @functools.wraps(ordinary)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("torch_dtype", None)
        return ordinary(cls, *args, **{**kwargs, **own})

    def post_init(self: Any) -> None:
        self.logging_steps, self.bf16, self.fp16 = 1, False, False
        self.learning_rate = learning_rate or self.learning_rate
        prepare(self)

    PreTrainedModel.from_pretrained, TrainingArguments.__post_init__ = classmethod(from_pretrained), post_init


def watch_sharing() -> None:
    """Keep the reports of all models, copies too, and the reasons of those that are not shared at all."""
    from radixtrain.hf.sharing_report import SharingReport
    from radixtrain.plugins.from_pretrained import LoadedModel

    make, load = SharingReport.__init__, LoadedModel.__init__

    def keep_report(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        reports.append(self)

    def keep_reason(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        refused.extend([self.reason] if self.reason else [])

    SharingReport.__init__ = keep_report  # type: ignore[method-assign]
    LoadedModel.__init__ = keep_reason  # type: ignore[method-assign]


def share_in_trainers() -> None:
    """Share the model that a trainer gets also if it was not loaded but made from a configuration."""
    from transformers import PreTrainedModel, Trainer

    from radixtrain.hf.share import options_of
    from radixtrain.plugins.from_pretrained import _share, read_options

    ordinary, options = Trainer.__init__, read_options()

    @functools.wraps(ordinary)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        ordinary(self, *args, **kwargs)
        if isinstance(self.model, PreTrainedModel) and options_of(self.model) is None:
            _share(self.model, type(self.model).__name__, options)

    Trainer.__init__ = init


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    for kept in (logged, reports, refused):
        kept.clear()


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """The seed of every test, and its arithmetic."""
    from transformers import set_seed

    from radixtrain.verification.oracle import float64_arithmetic

    set_seed(0)
    with float64_arithmetic() if request.config.getoption("arithmetic") == "float64" else nullcontext():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Write a line when a test has run, or when it was skipped or failed before."""
    report = (yield).get_result()  # type: ignore[misc]
    if call.when == "teardown" or (call.when == "setup" and report.outcome == "passed"):
        return
    why = ""
    if call.excinfo is not None:
        why = f"{call.excinfo.typename}: {call.excinfo.value}"[:600]
    calls = sum((each.not_shared for each in reports), Counter())
    line = {
        "test": item.nodeid,
        "outcome": report.outcome,
        "why": why,
        "seconds": round(call.duration, 2),
        "logged": logged,
        "shared": sum(each.num_shared for each in reports),
        "tokens": sum(each.num_tokens for each in reports),
        "unique_tokens": sum(each.num_unique_tokens for each in reports),
        "not_shared": calls,
        "refused": refused,
    }
    with item.config.getoption("record").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Compare two files. Exits with 1 if a test passed only untouched, or if a number is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("untouched", type=Path)
    parser.add_argument("shared", type=Path)
    options = parser.parse_args()
    before, after = read(options.untouched), read(options.shared)
    print_outcomes(before, after)
    missing = print_differences(before, after)
    print_calls(after)
    broken = [name for name, test in before.items() if passed(test) and not passed(after[name])]
    for name in broken:
        print(f"only shared: {name}: {after[name]['why']}")
    for name in missing:
        print(f"other entries: {name}")
    sys.exit(bool(broken or missing))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The tests of a file, by name."""
    return {line["test"]: line for line in map(json.loads, path.read_text().splitlines())}


def passed(test: dict[str, Any]) -> bool:
    return bool(test["outcome"] == "passed")


def print_outcomes(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    for name, tests in (("untouched", before), ("shared", after)):
        print(f"{name}: {len(tests)} tests, {dict(Counter(test['outcome'] for test in tests.values()))}")


def print_differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each class of trainers; returns the tests whose entries have other names."""
    count: Counter[str] = Counter()
    worst: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    missing, trainings = [], Counter[str]()
    for name, test in before.items():
        if test["outcome"] != after[name]["outcome"]:
            continue
        entries, others = test["logged"], after[name]["logged"]
        if [(kind, logs.keys()) for kind, logs in entries] != [(kind, logs.keys()) for kind, logs in others]:
            missing.append(name)
            continue
        trainings.update({kind for kind, _ in entries})
        for (kind, logs), (_, other) in zip(entries, others, strict=True):
            for key in logs:
                if TIMINGS.search(key):
                    continue
                count[kind] += 1
                difference = distance(logs[key], other[key])
                group = key if key in ("loss", "grad_norm") else "others"
                worst[kind][group] = max(worst[kind].get(group, (0.0, "")), (difference, f"{key} of {name}"))
    for kind in sorted(count):
        print(
            f"{kind}: {trainings[kind]} tests, {count[kind]:,} numbers, worst "
            + ", ".join(f"{group} {value:.1e}" for group, (value, _) in sorted(worst[kind].items()))
        )
    return missing


def distance(one: float, other: float) -> float:
    """Relative above 1; 0 for the same number, infinity if only one of them is finite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other) / max(1.0, abs(one))
    return difference if math.isfinite(difference) else math.inf


def print_calls(after: dict[str, Any]) -> None:
    tests = after.values()
    tokens, unique = (sum(test[key] for test in tests) for key in ("tokens", "unique_tokens"))
    print(f"calls shared: {sum(test['shared'] for test in tests):,}, r = {tokens / max(1, unique):.2f}")
    for key, what in (("not_shared", "calls"), ("refused", "models")):
        for reason, number in sum((Counter(test[key]) for test in tests), Counter[str]()).most_common():
            print(f"{number:6} {what} not shared: {reason}")


if __name__ == "__main__":
    main()
