"""docs/inspect.md: its outputs are what the command prints, its keys those of `Inspect`.

RADIXTRAIN_WRITE_TABLE=1 writes them.
"""

import os
import re
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from radixtrain.commands.explain import inspect
from radixtrain.commands.help import all_keys
from radixtrain.data.datamodule import SFTData
from radixtrain.settings.commands import Inspect, RunSettings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "inspect.md"
WRITING = bool(os.environ.get("RADIXTRAIN_WRITE_TABLE"))
ROWS = re.compile(r"^```json\n(.*?)^```", re.MULTILINE | re.DOTALL)


def rows_of(page: str) -> list[str]:
    """The lines of chats.jsonl: on the page a row takes several."""
    return [" ".join(row.split("\n")) for block in ROWS.findall(page) for row in re.split(r"\n(?=\{)", block.strip())]


@pytest.mark.parametrize(("block", "row"), [("inspect", None), ("row", "chats.jsonl:3")])
def test_an_output(block: str, row: str | None, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    Path("chats.jsonl").write_text("".join(f"{line}\n" for line in rows_of(page)), encoding="utf-8")
    console = Console(width=80, file=StringIO())
    settings = {"model_name_or_path": str(shop / "model"), "cache_dir": "cache", "dataset_num_proc": 1}
    inspect(SFTData("chats.jsonl", **settings), console, row=row)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    found = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    compare(page, rf"(?<=^```text {block}\n)(.*?)(?=^```$)", found)


def test_the_keys() -> None:
    own = {field.name for field in fields(Inspect)} - {field.name for field in fields(RunSettings)}
    keys = [key for key in all_keys("inspect") if key.name in own]
    lines = [f"| `{key.name}` | `{key.default}` | {key.help} |" for key in keys]
    table = "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *lines])
    compare(
        PAGE.read_text(encoding="utf-8"),
        r"(?<=^<!-- inspect: begin -->\n)(.*?)(?=^<!-- inspect: end -->$)",
        f"{table}\n",
    )


def compare(page: str, pattern: str, found: str) -> None:
    said = re.compile(pattern, re.MULTILINE | re.DOTALL)
    if WRITING:
        PAGE.write_text(said.sub(lambda _: found, page, count=1), encoding="utf-8")
        return
    match = said.search(page)
    assert match is not None and match[1] == found, f"RADIXTRAIN_WRITE_TABLE=1 writes the outputs of {PAGE.name}"
