"""The arrangement of `kernels/` and `collators/`: folders at the top, linked into the package, no packages themselves.

With an `__init__.py` in `kernels/`, `python -m radixtrain` from the repository's root would hide the Hugging Face
package `kernels` and break transformers; without the sdist rule of pyproject.toml, a wheel would lack both folders.
"""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import radixtrain
from radixtrain.versions import FIT, OLDEST, OLDEST_OPTIONAL, TESTED
from tests.pages import ROOT, read

LINKED = ["kernels", "collators"]


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_is_linked_and_no_package(name: str) -> None:
    """In the root, which is first on the path then, the bare name finds none of our files."""
    assert list((ROOT / name).glob("*.py")), f"{name}/ holds no modules"
    assert not list((ROOT / name).rglob("__init__.py"))
    link = ROOT / "radixtrain" / name
    assert link.is_symlink(), f"{link} is not a link; on Windows git needs core.symlinks=true"
    assert link.readlink() == Path("..", name) and link.resolve() == ROOT / name
    code = f"import importlib.util, json; s = importlib.util.find_spec({name!r}); print(json.dumps(s and s.origin))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    origin = json.loads(found.stdout)
    assert origin is None or Path(origin).parent.resolve() != ROOT / name


def test_tables_of_packages_name_files_that_exist() -> None:
    """The map of a room is its docstring."""
    named = {
        (package.parent.name, name): package.parent / name
        for package in (ROOT / "radixtrain").rglob("__init__.py")
        for name in re.findall(r"`([a-z_]+\.py)`", package.read_text(encoding="utf-8"))
    }
    assert len(named) >= 10 and not [key for key, path in named.items() if not path.is_file()]


def test_version_is_written_once() -> None:
    declared = re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)
    assert declared and declared[1] == radixtrain.__version__


def requirements(*extras: str) -> list[str]:
    """What radixtrain needs, or an extra of it: `numpy>=2`, `pydantic>=2.7`."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    return [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]


def test_constraints_pin_what_the_project_names() -> None:
    pins = re.findall(r"^([\w.-]+)==\S+$", read("constraints.txt"), re.MULTILINE)
    names = {re.match(r"[\w-]+", each)[0] for each in requirements("fit", "dev")} - {"radixtrain"}
    assert "torch" in names and "pytest" in names
    assert names <= set(pins)


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    """After which a refusal, and `doctor`, say that a newer one is installed."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    assert {name: pins[name] for name in TESTED} == TESTED


def test_the_oldest_versions_are_those_of_the_project() -> None:
    """What `check_versions` and `doctor` ask for is what pip does."""
    bounds = {each.lower() for each in requirements("fit", "flash", "flash4", "peft", "qlora")}
    assert bounds == {f"{name}>={oldest}" for name, oldest in (OLDEST | FIT | OLDEST_OPTIONAL).items()}


def test_no_hint_installs_an_unpublished_name() -> None:
    """Anybody could take it. In a clone it is `.`; what a message names is a package, whatever radixtrain came from."""
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.md", "*.yaml", "*.ipynb"], cwd=ROOT, capture_output=True)
    dated = re.compile(r"recipes/(benchmarks/\d{4}-|LOG)|CHANGELOG|tests/test_packaging")
    paths = [ROOT / name for name in tracked.stdout.decode().split() if not dated.match(name)]
    assert len(paths) > 500
    assert not [path for path in paths if re.search(r"pip install [^`\n]*\bradixtrain\b", path.read_text("utf-8"))]


@pytest.mark.full
def test_wheel_built_through_the_sdist_holds_everything(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="pip install -e '.[dev]'")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    suffixes = (".py", "py.typed", ".html", ".css", ".js", ".pth")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(suffixes)}
    assert shipped == expected_files()


def expected_files() -> set[str]:
    """The package's own files, and those of the linked folders under `radixtrain/`, and what Python reads first."""
    own = {path for path in (ROOT / "radixtrain").rglob("*.py") if not set(path.parts[-2:-1]) & set(LINKED)}
    linked = {Path("radixtrain", path.relative_to(ROOT)) for name in LINKED for path in (ROOT / name).rglob("*.py")}
    page = {f"radixtrain/explain/assets/page.{suffix}" for suffix in ("html", "css")}
    named = {"radixtrain/py.typed", "radixtrain-run.pth", *page}
    return {str(path.relative_to(ROOT)) for path in own} | {str(path) for path in linked} | named
