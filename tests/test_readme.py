"""The README's picture, snippets and figures are right, and what the pages name exists: paths, make verbs, commands."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from radixtrain.__main__ import main
from radixtrain.commands import COMMANDS
from radixtrain.verification.oracle import float64_arithmetic
from tests.pages import ROOT, blocks_in, read
from tests.support import FULL

PAGES = [
    "AGENTS.md",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/any-trainer.md",
    "docs/benchmarks.md",
    "docs/configuration.md",
    "docs/data-formats.md",
    "docs/exactness.md",
    "docs/how-it-works.md",
]
FOLDERS = ["radixtrain", "kernels", "collators", "configs", "docs", "tests", "recipes", r"\.ci"]
FOLDER_PATH = re.compile(rf"(?<![\w/.@~-])(?:{'|'.join(FOLDERS)})/[\w./-]*")
TOP_FILE = re.compile(r"(?<![\w/.-])(?:[A-Z]{3,}(?:\.md)?|Makefile|pyproject\.toml|constraints\.txt)(?![\w/.-])")


def code_of(text: str) -> list[str]:
    """The lines of fenced blocks without their comments, and the inline code outside them."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in fenced for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", prose)


def links_of(text: str) -> list[str]:
    """The targets of links and pictures in the repository, without anchors."""
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
    return {
        word for piece in code_of(text) for word in re.findall(rf"(?:^|&& |python ){command} +([a-z][\w-]*)", piece)
    }


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", read("Makefile"), re.MULTILINE))


def commands_of(text: str) -> set[str]:
    """The commands named in code after `python -m radixtrain`, and in the README's table of them."""
    table = re.search(r"^\| `python -m radixtrain` .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [row.split("|")[1] for row in table[1].splitlines()] if table else []
    return words_after("-m radixtrain", text) | {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def test_the_reader_of_pages_reads() -> None:
    text = (
        "see `configs/a.yaml`, [b](docs/b.md#c), `LICENSE`\n```\nmake fit  # make sure\npython -m radixtrain fit\n```\n"
    )
    assert paths_of(text) == {"configs/a.yaml", "LICENSE"} and links_of(text) == ["docs/b.md"]
    assert words_after("make", text) == {"fit"} and words_after("-m radixtrain", text) == {"fit"}


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_make_targets_exist(page: str) -> None:
    text = read(page)
    missing = [name for name in paths_of(text) if not (ROOT / name).exists()]
    missing += [name for name in links_of(text) if not (ROOT / page).parent.joinpath(name).exists()]
    assert not missing
    verbs = words_after("make", text)
    assert verbs <= make_targets()
    assert page not in ("README.md", "CONTRIBUTING.md") or {"fit", "test"} <= verbs


def test_workflows_run_make_verbs() -> None:
    workflows = [yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    steps = [step.get("run", "") for flow in workflows for job in flow["jobs"].values() for step in job["steps"]]
    verbs = {verb for step in steps for verb in re.findall(r"^make (\S+)", step, re.MULTILINE)}
    assert {"check", "docs", "test", "test-full", "test-versions"} <= verbs <= make_targets()


def test_pages_name_commands() -> None:
    assert commands_of(read("README.md")) == set(COMMANDS)
    assert all(commands_of(read(page)) <= set(COMMANDS) for page in PAGES)


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md"])
def test_the_requirements_are_those_of_pip(page: str) -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    oldest = dict(need.split(">=") for need in project["dependencies"])
    numbers = project["requires-python"].removeprefix(">="), oldest["torch"], oldest["transformers"]
    assert "Linux, Python {}, torch {}, transformers {}, or newer".format(*numbers) in " ".join(read(page).split())


def test_readme_is_read_in_a_minute() -> None:
    assert len(read("README.md").splitlines()) <= 130


class TestPicture:
    PICTURES = ("docs/sharing-narrow.svg", "docs/sharing.svg")

    def test_comes_first_and_is_small(self) -> None:
        assert tuple(re.findall(r'src(?:set)?="([^"]+)"', read("README.md"))) == self.PICTURES
        assert all((ROOT / picture).stat().st_size < 200_000 for picture in self.PICTURES)

    def test_the_script_draws_the_same_bytes(self, tmp_path: Path) -> None:
        subprocess.run([sys.executable, "docs/draw_sharing.py", "--folder", str(tmp_path)], cwd=ROOT, check=True)
        for picture in self.PICTURES:
            assert (tmp_path / Path(picture).name).read_bytes() == (ROOT / picture).read_bytes()

    @pytest.mark.parametrize("picture", PICTURES)
    def test_counts_are_those_of_the_drawn_tokens(self, picture: str) -> None:
        """By the groups that are drawn: each token of the rows is one box, and each unique token is another."""
        drawing = ElementTree.parse(ROOT / picture)
        classes = [group.get("class") for group in drawing.iter("{http://www.w3.org/2000/svg}g")]
        copies = classes.count("copy")
        unique, rest = divmod(sum(name == "answer" or str(name).startswith("level") for name in classes), 2)
        assert rest == 0 and copies > unique > 0
        tokens = unique + copies
        total = f"T = {tokens} tokens become U = {unique}: r = T / U = {tokens / unique:.1f}"
        assert any(total in (text.text or "") for text in drawing.iter("{http://www.w3.org/2000/svg}text"))
        assert f"{tokens} tokens, of which {copies} are copies, become a tree of {unique}" in read("README.md")


class TestSnippets:
    def test_the_program_trains_as_without_its_line(self, shop: Path, tmp_path: Path) -> None:
        _, program = blocks_in(read("README.md"))
        places = {"Qwen/Qwen3-0.6B": f"{shop}/model", "runs/mood": f"{tmp_path}", "float32": "float64"}
        for printed, place in places.items():
            program = program.replace(printed, place)
        shared: dict[str, Any] = {}
        ordinary: dict[str, Any] = {}
        lines = "share_prefixes(trainer.model)\nlog_sharing(trainer)  # r, beside the loss\n"
        with float64_arithmetic():
            exec(program, shared)
            exec(program.replace(lines, ""), ordinary)
        assert lines in program and shared["trainer"].state.log_history[0]["r"] > 3
        assert losses_of(shared["trainer"]) == pytest.approx(losses_of(ordinary["trainer"]), rel=1e-12)


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_step_gets_about_r_times_as_fast() -> None:
    rows = re.findall(r"\| ([\d.]+) \| \**([\d.]+)x\** \|", read("README.md"))
    shares = [float(speed) / float(ratio) for ratio, speed in rows]
    assert len(rows) == 3 and min(shares) > 0.6 and max(shares) < 1.2


class TestOwnData:
    """The README's command, with the config that it names, has nothing of the demo in it."""

    def command(self) -> list[str]:
        (found,) = self.commands("fit")
        return found

    def commands(self, names: str) -> list[list[str]]:
        found = re.findall(rf"^python -m radixtrain ((?:{names}) (?:.*\\\n)*.*)$", read("README.md"), re.MULTILINE)
        return [shlex.split(line.replace("\\\n", " ")) for line in found]

    def test_as_printed(self, printed_by: Callable[..., str]) -> None:
        printed = printed_by(*self.command(), "--print_config")
        config = yaml.safe_load(printed)
        assert "demo" not in printed
        assert config["model"]["learning_rate"] == 2e-5 and "The learning rate is 2e-5" in read("README.md")
        assert f"`{config['output_dir']}`" in read("README.md")

    def others(self, **values: str) -> list[list[str]]:
        """`predict` and `export`, with other words in place of some."""
        return [[values.get(word, word) for word in words] for words in self.commands("predict|export")]

    @FULL
    def test_as_run(self, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        values = {"Qwen/Qwen3-0.6B": str(shop / "model"), "chats.jsonl": str(shop / "train.jsonl")}
        arguments = [values.pop(word, word) for word in self.command()]
        assert not values, "the command names another model or file"
        out = tmp_path / "out"
        monkeypatch.chdir(ROOT)
        short = (f"--output_dir={out}", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false")
        assert main([*arguments, *short]) == 0
        (written,) = out.rglob("fit.yaml")
        text = written.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["model"]["learning_rate"] == 2e-5 and "runs/" not in text
        assert (out / "model" / "model.safetensors").is_file()
        rows = shop / "validation.jsonl"
        places = {"runs/my_run/model": f"{out}/model", "runs/my_run": f"{out}", "new.jsonl": f"{rows}"}
        predict, export = self.others(**places, exported=f"{tmp_path}/exported")
        assert main([*predict, f"--output_dir={tmp_path}", "--evaluate_generation.max_new_tokens=4"]) == 0
        answers = (tmp_path / "predictions.jsonl").read_text("utf-8").splitlines()
        assert len(answers) == len(rows.read_text("utf-8").splitlines())
        assert main(export) == 0 and (tmp_path / "exported" / "model.safetensors").is_file()
