"""What README.md and CONTRIBUTING.md name exists: paths, make targets, commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md"]
FOLDERS = ["radixtrain", "kernels", "collators", "configs", "tests", "recipes", r"\.ci"]
FOLDER_PATH = re.compile(rf"(?<![\w/.@~-])(?:{'|'.join(FOLDERS)})/[\w./-]*")
TOP_FILE = re.compile(r"(?<![\w/.-])(?:[A-Z]{3,}(?:\.md)?|Makefile|pyproject\.toml|constraints\.txt)(?![\w/.-])")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_of(text: str) -> list[str]:
    """The lines of fenced blocks without their comments, and the inline code outside them."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in fenced for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", prose)


def links_of(text: str) -> list[str]:
    """The targets of links and pictures that are no addresses, without anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    plain = [(first or second).partition("#")[0] for first, second in targets]
    return [target for target in plain if target and "://" not in target and not target.startswith("mailto:")]


def paths_of(text: str) -> set[str]:
    """Repository paths: under one of the top folders anywhere in code, or a top-level file named in code."""
    code = code_of(text)
    found = {match.rstrip(".") for piece in code for match in FOLDER_PATH.findall(piece)}
    return found | {piece for piece in code if TOP_FILE.fullmatch(piece)}


def words_after(command: str, text: str) -> set[str]:
    """The words that follow `command` in code."""
    return {word for piece in code_of(text) for word in re.findall(rf"(?<![\w-]){command} +([a-z][\w-]*)", piece)}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", read("Makefile"), re.MULTILINE))


COMMANDS = sorted(
    {word for page in PAGES if (ROOT / page).exists() for word in words_after("-m radixtrain", read(page))}
)


def test_the_reader_of_pages_reads() -> None:
    text = (
        "see `configs/a.yaml`, [b](docs/b.md#c), `LICENSE`\n```\nmake fit  # make sure\npython -m radixtrain fit\n```\n"
    )
    assert paths_of(text) == {"configs/a.yaml", "LICENSE"} and links_of(text) == ["docs/b.md"]
    assert words_after("make", text) == {"fit"} and words_after("-m radixtrain", text) == {"fit"}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    text = read(page)
    assert paths_of(text), f"{page} names no path at all"
    missing = [name for name in [*paths_of(text), *links_of(text)] if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    named = words_after("make", read(page))
    assert named, f"{page} names no make target"
    assert named <= make_targets()


def test_readme_names_commands() -> None:
    assert "fit" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    asked = [sys.executable, "-m", "radixtrain", command, "--help"]
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
