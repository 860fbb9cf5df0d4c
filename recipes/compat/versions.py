"""Run tests with other versions of packages than those of constraints.txt.

    python recipes/compat/versions.py                    with each transformers, and write benchmarks/versions.md
    python recipes/compat/versions.py --short ==5.2.0    fewer tests with 5.2.0, which are only printed
    python recipes/compat/versions.py --newest           with pip's newest packages: families, images, trainers, fit
    python recipes/compat/versions.py --newest --quick   a part of that, in three minutes

Each gets its own environment in build/versions with its requirements; all other packages come from this one.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "recipes" / "benchmarks" / "versions.md"
VERSIONS = ["==5.2.0", "==5.6.*", "==5.10.*", "==5.12.*", "==5.16.*", "==5.20.*", ""]  # and the newest
TESTS = """tests/collators tests/claims/padded tests/claims/equivalence tests/claims/recurrent tests/claims/generation
    tests/radixtrain/hf tests/radixtrain/generation tests/radixtrain/verification tests/radixtrain/plugins"""
SHORT_TESTS = """tests/radixtrain/hf/test_recurrent.py tests/radixtrain/hf/padded tests/claims/recurrent
    tests/claims/padded/test_images.py tests/claims/padded/test_calls.py tests/claims/equivalence/test_families.py"""
QUICK = ["-m", "not full and not gpu"]
FAMILIES = ["tests/claims/equivalence/test_families.py", "-k", "test_equal_or_refused"]
INTRO = "# Tests beside older versions of transformers\n\n`make test-versions` wrote these tables"
HAS_NO = "has no"
PATTERNS = [  # of the reason of a skip
    r"(?P<name>.+?): (?P<what>refused: .+)",
    r"(?P<name>.+?): transformers \S+ (?P<what>fails by itself): .+",
    rf"transformers \S+ (?P<what>{HAS_NO}) (?P<name>\w+)",
]
NEWEST = ["transformers", "tokenizers", "trl", "peft", "accelerate", "lightning", "datasets", "pydantic"]
PARTS = {  # what runs with pip's newest packages -> the arguments of pytest
    "families": FAMILIES,
    "image families": ["tests/claims/equivalence/test_image_rows.py", "-k", "test_the_gradient_is_the_ordinary_one"],
    "trainers": [*QUICK, "tests/claims/test_drop_in.py", "tests/claims/trainers"],
    "fit": [*QUICK, "tests/radixtrain/training/test_fit.py"],
}
QUICK_PARTS = {"families": [*QUICK, *FAMILIES], "drop-in": [*QUICK, "tests/claims/test_drop_in.py"]}


def main(arguments: list[str]) -> None:
    if "--newest" in arguments:
        newest(QUICK_PARTS if "--quick" in arguments else PARTS)
    elif "--short" in arguments:
        each_version([each for each in arguments if each != "--short"], [[*QUICK, *SHORT_TESTS.split()]])
    else:
        intro, rows, found = each_version(VERSIONS, [[*QUICK, *TESTS.split()], ["-m", "full", *FAMILIES]])
        PAGE.write_text(page(intro, rows, found), encoding="utf-8")
        sys.exit(any(failed for _, _, _, failed, _ in rows))


def newest(parts: Mapping[str, list[str]]) -> None:
    """Print counts for pip's newest packages, what is refused with them, and what fails; then the exit code is 1."""
    python = environment("newest", NEWEST)
    show = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    print(subprocess.check_output([python, "-c", show, *NEWEST, "torch"], text=True).strip())
    print("torch is the one of .venv: newer builds for the CPU are not among pip's", flush=True)
    num_failed = 0
    for part, args in parts.items():
        found = run(python, args, f"newest-{part.replace(' ', '-')}.xml")
        counts = Counter(kind for kind, _ in map(outcome, found))
        print(f"{part}: {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed")
        refused = defaultdict(list)
        for said, name in filter(None, map(refusal, found)):
            refused[said].append(name)
        for said, names in sorted(refused.items()):
            print(f"  {said}: {', '.join(names)}")
        for case in found:
            kind, why = outcome(case)
            if kind != "passed":
                print(f"  {kind}: {case.get('name')}: {why.partition(chr(10))[0][:200]}", flush=True)
        num_failed += counts["failed"]
    sys.exit(bool(num_failed))


def refusal(case: ElementTree.Element) -> tuple[str, str] | None:
    """Why a family is refused, and its name; None for any other test."""
    for entry in case.iter("property"):
        if entry.get("name") == "family":
            _, group, name, said = json.loads(entry.get("value", ""))
            return (said, f"{name} ({group})") if said.startswith("refused") else None
    return None


def each_version(wanted_versions: list[str], runs: list[list[str]]) -> tuple[str, list[tuple[Any, ...]], Any]:
    """What the page says, its rows printed. wanted_versions: specifiers of pip; an empty one is the newest."""
    rows, found = [], defaultdict(list)
    for wanted in wanted_versions:
        python = environment(wanted.strip("=*.") or "newest", [f"transformers{wanted}"])
        show = "import torch, transformers; print(transformers.__version__, torch.__version__)"
        version, torch = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.split()
        ran = (case for number, args in enumerate(runs) for case in run(python, args, f"{version}-{number}.xml"))
        cases = list(map(outcome, ran))
        counts = Counter(kind for kind, _ in cases)
        lacking = {split(why) for kind, why in cases if kind == "skipped"}
        num_classes = sum(what == HAS_NO for what, _ in lacking)
        cells = (version, f"{counts['passed']:,}", counts["skipped"], counts["failed"], num_classes)
        rows.append(cells)
        print(*cells, sep=" | ", flush=True)
        for _, why in (case for case in cases if case[0] == "failed"):
            print(f"  failed: {why[:200]!r}", flush=True)
        for each in lacking:
            found[each].append(version)
    return f"{INTRO} on {date.today()}, torch {torch.partition('+')[0]}, CPU.", rows, found


def page(intro: str, rows: list[tuple[Any, ...]], found: Mapping[tuple[str, str], list[str]]) -> str:
    """The whole page. rows: of the first table. found: what is lacking, of which family, and in which versions."""
    by_versions: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (what, name), versions in found.items():
        if what != HAS_NO:  # names are no use: these classes cannot be loaded there
            by_versions[what, ", ".join(versions)].append(name)
    lacking = [
        (f"{what}: {', '.join(sorted(names, key=str.lower))}".removesuffix(": "), versions)
        for (what, versions), names in sorted(by_versions.items())
    ]
    first = table(["transformers", "passed", "skipped or refused", "failed", "missing classes"], rows)
    return "\n\n".join([intro, first, table(["refused or missing", "transformers"], lacking)]) + "\n"


def table(head: list[str], rows: list[tuple[Any, ...]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def environment(name: str, wanted: list[str]) -> Path:
    """The interpreter of an environment with these packages. wanted: for pip."""
    folder = ROOT / "build" / "versions" / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--upgrade", *wanted]
    done = subprocess.run(install, capture_output=True, text=True)  # it warns that others here ask for a newer one
    if done.returncode:
        sys.exit(f"pip cannot install {' '.join(wanted)}: {done.stderr.strip()[-500:]}")
    return python


def run(python: Path, args: list[str], report: str) -> list[ElementTree.Element]:
    """What pytest reports of each test."""
    path = ROOT / "build" / "versions" / report
    options = ["-q", "-n", "auto", "--dist", "worksteal", "--continue-on-collection-errors", f"--junit-xml={path}"]
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env = {"RADIXTRAIN_TRIES": "5", **os.environ, **own}
    done = subprocess.run([python, "-m", "pytest", *options, *args], cwd=ROOT, env=env, stdout=sys.stderr)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with exit code {done.returncode}")
    return list(ElementTree.parse(path).iter("testcase"))


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Whether a test passed, was skipped or failed, and why."""
    for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            return name, element.get("message", "")
    return "passed", ""


def split(reason: str) -> tuple[str, str]:
    """What a skipped test lacks, and the family or class that it is about; empty if it is about none."""
    match = next(filter(None, (re.fullmatch(pattern, reason, re.DOTALL) for pattern in PATTERNS)), None)
    return (match["what"], match["name"]) if match else (reason, "")


if __name__ == "__main__":
    main(sys.argv[1:])
