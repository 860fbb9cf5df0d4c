"""The repository's text files, and the fenced blocks of its pages."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    """A file by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks_in(text: str, language: str = "python") -> list[str]:
    """The code of each fenced block of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
