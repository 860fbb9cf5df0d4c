"""What a benchmark has found so far, in two files that are whole at any second.

The JSON file holds all that was found; the Markdown page beside it (`bars.py`) says the same for people. Both are
written anew after every result, into a second file that then takes the place of the first: a run that is killed leaves
what it had found. No torch here, so that the process that watches a benchmark starts at once.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.bars import Result, page

__all__ = ["ENDED", "RUNNING", "Results"]

RUNNING, ENDED = "running", "ended"


@dataclass(kw_only=True)
class Results:
    """What was found and left out.

    path: None, or the JSON file; the page has its name, with `.md`.
    header: date, commit, hardware and versions.
    results: part, case and measures. left_out: what was not measured, and why.
    parts: those that have begun, `running` or `ended`.
    """

    path: Path | None = None
    header: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no gradient is wrong."""
        return all(measures.get("passed", True) for _, _, measures in self.results)

    def page(self) -> str:
        return page(self.header, self.results, self.left_out)

    def write(self) -> None:
        if self.path is not None:
            names = ("header", "parts", "results", "left_out")
            _replace(self.path, json.dumps({name: getattr(self, name) for name in names}, indent=1))
            _replace(self.path.with_suffix(".md"), self.page())

    def read(self) -> None:
        """Take over what the file holds, if there is one."""
        if self.path is not None and self.path.exists():
            contents = json.loads(self.path.read_text(encoding="utf-8"))
            self.header, self.parts, self.left_out = (contents[name] for name in ("header", "parts", "left_out"))
            self.results = [(part, case, measures) for part, case, measures in contents["results"]]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
