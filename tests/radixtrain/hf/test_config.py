"""A model's configuration files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from radixtrain.errors import UserError
from radixtrain.hf.config import MODEL_JSON, check_json_files, read_config


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: cannot read the model's config\.json: "):
        read_config(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1,\n "b" 2}', "line 2 column 6: Expecting ':' delimiter"),
        (b"", "the file is not JSON"),
        (b"[]", "found a list"),
        (b"null", "found a NoneType"),
        (b"\xff", "the file is not UTF-8"),
        (b'{"a":' * 100_000, "the file is nested too deep"),
    ],
)
def test_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (read_config, lambda folder: check_json_files(folder, MODEL_JSON)):
        with pytest.raises(UserError, match=re.escape(f"{path}: expected a JSON object, {reason}; copy or download")):
            read(str(tmp_path))


def test_what_is_whole_absent_or_a_hub_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}', encoding="utf-8")
    check_json_files(str(tmp_path), MODEL_JSON)
    check_json_files("someone/some-model", MODEL_JSON)
