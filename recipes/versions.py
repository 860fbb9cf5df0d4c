"""Write docs/versions.md: run the tests of batches, collators, families and recurrent layers with each transformers.

    python recipes/versions.py

Each version gets its own environment in build/versions with its requirements; all other packages come from this one.
"""

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

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
VERSIONS = ["==5.2.0", "==5.6.*", "==5.10.*", "==5.12.*", "==5.16.*", "==5.20.*", ""]  # and the newest
TESTS = """tests/collators tests/claims/padded tests/claims/equivalence tests/claims/recurrent tests/claims/generation
    tests/radixtrain/hf tests/radixtrain/generation tests/radixtrain/verification tests/radixtrain/plugins"""
RUNS = [
    ["-m", "not full and not gpu", *TESTS.split()],
    ["-m", "full", "tests/claims/equivalence/test_families.py", "-k", "test_equal_or_refused"],
]
INTRO = """# Versions of transformers

`share_prefixes`, `radixtrain run`, `prepare_model`, the collators, `generate` and `verify_equivalence` support
transformers 5.2.0 and newer. If an older version cannot do something exactly, radixtrain refuses it by name before
training. The commands of `'.[fit]'` are tested only with the newest version. `make test-versions` wrote this page"""
HAS_NO = "has no"
PATTERNS = [  # of the reason of a skip
    r"(?P<name>.+?): (?P<what>refused: .+)",
    r"(?P<name>.+?): transformers \S+ (?P<what>fails by itself): .+",
    rf"transformers \S+ (?P<what>{HAS_NO}) (?P<name>\w+)",
]


def main() -> None:
    rows, found = [], defaultdict(list)
    for wanted in VERSIONS:
        python = environment(wanted)
        show = "import torch, transformers; print(transformers.__version__, torch.__version__)"
        version, torch = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.split()
        cases = [case for number, args in enumerate(RUNS) for case in run(python, args, f"{version}-{number}.xml")]
        counts = Counter(kind for kind, _ in cases)
        lacking = {split(why) for kind, why in cases if kind == "skipped"}
        num_classes = sum(what == HAS_NO for what, _ in lacking)
        cells = (version, f"{counts['passed']:,}", counts["skipped"], counts["failed"], num_classes)
        rows.append(cells)
        print(*cells, sep=" | ", flush=True)
        for each in lacking:
            found[each].append(version)
    intro = f"{INTRO} on {date.today()}, torch {torch.partition('+')[0]}, CPU."
    PAGE.write_text(page(intro, rows, found), encoding="utf-8")
    sys.exit(any(failed for _, _, _, failed, _ in rows))


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


def environment(wanted: str) -> Path:
    """The interpreter of an environment with this transformers. wanted: a specifier of pip; empty for the newest."""
    folder = ROOT / "build" / "versions" / (wanted.strip("=*.") or "newest")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--upgrade", f"transformers{wanted}"]
    subprocess.run(install, check=True, capture_output=True)  # it warns that others here ask for a newer one
    return python


def run(python: Path, args: list[str], report: str) -> list[tuple[str, str]]:
    """Of each test: passed, skipped or failed, and why."""
    path = ROOT / "build" / "versions" / report
    options = ["-q", "-n", "auto", "--dist", "worksteal", "--continue-on-collection-errors", f"--junit-xml={path}"]
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env = {"RADIXTRAIN_TRIES": "5", **os.environ, **own}
    done = subprocess.run([python, "-m", "pytest", *options, *args], cwd=ROOT, env=env)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with exit code {done.returncode}")
    return [outcome(case) for case in ElementTree.parse(path).iter("testcase")]


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            return name, element.get("message", "")
    return "passed", ""


def split(reason: str) -> tuple[str, str]:
    """What a skipped test lacks, and the family or class that it is about; empty if it is about none."""
    match = next(filter(None, (re.fullmatch(pattern, reason, re.DOTALL) for pattern in PATTERNS)), None)
    return (match["what"], match["name"]) if match else (reason, "")


if __name__ == "__main__":
    main()
