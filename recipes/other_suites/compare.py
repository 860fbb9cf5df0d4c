"""Compare two files of `recording.py`: which tests have different outcomes, and how far apart the logged numbers are.

    python recipes/other_suites/compare.py untouched.jsonl shared.jsonl

A difference is relative for numbers above 1, else absolute. Exits with 1 if a test that passed untouched does not pass
shared, or if a number is missing.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

TIMINGS = re.compile("runtime|per_second|flos|time|mem")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("untouched", type=Path)
    parser.add_argument("shared", type=Path)
    parser.add_argument(
        "--list", type=float, default=math.inf, metavar="BAR", help="name the tests that differ by more"
    )
    options = parser.parse_args()
    before, after = read(options.untouched), read(options.shared)
    print_outcomes(before, after)
    missing = print_differences(before, after, options.list)
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


def print_differences(before: dict[str, Any], after: dict[str, Any], bar: float) -> list[str]:
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
        largest = 0.0
        for (kind, logs), (_, other) in zip(entries, others, strict=True):
            for key in logs:
                if TIMINGS.search(key):
                    continue
                count[kind] += 1
                difference = distance(logs[key], other[key])
                largest = max(largest, difference)
                group = key if key in ("loss", "grad_norm") else "others"
                worst[kind][group] = max(worst[kind].get(group, (0.0, "")), (difference, f"{key} of {name}"))
        if largest > bar:
            print(f"  {largest:.1e} {name}")
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
