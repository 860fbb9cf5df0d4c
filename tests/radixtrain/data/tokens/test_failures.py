"""A tokenizer whose library breaks off: the row or the file is named, and nothing passes as no Exception."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.failures import TokenizerFailed, failures_of
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import DataError, UserError

ENDLESS = "((a+)+)+c"  # Oniguruma gives up on a long row of the letter a, and the library panics
NO_CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.fixture
def model(shop: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop / "model", tmp_path / "model"))


def change(model: Path, **parts: Any) -> None:
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **parts}), encoding="utf-8")


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_panic_names_its_row(model: Path, tmp_path: Path, num_proc: int) -> None:
    """In this process and in one of its own, whose errors are pickled."""
    change(model, pre_tokenizer=split(ENDLESS))
    rows = [{"prompt": "b", "completion": "b"}, {"prompt": "b", "completion": "a" * 3000}]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = SFTData(str(tmp_path / "train.jsonl"), model_name_or_path=str(model), dataset_num_proc=num_proc)
    with pytest.raises(DataError) as caught:
        data.setup("fit")
    assert caught.value.where == f"{tmp_path / 'train.jsonl'}:2"
    assert f"the tokenizer of {model} (tokenizer.json) failed: " in caught.value.reason


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"pre_tokenizer": split("(a")}, "Oniguruma error: "),
        ({"normalizer": NO_CHARSMAP}, "Precompiled: "),
    ],
)
def test_a_tokenizer_that_cannot_be_made(model: Path, parts: dict[str, Any], reason: str) -> None:
    change(model, **parts)
    with pytest.raises(TokenizerFailed, match=re.escape(f"the tokenizer of {model} (tokenizer.json) failed: {reason}")):
        load_tokenizer(str(model))


@pytest.mark.parametrize("content", [b'{"a": ', b"[1]", b"\xff\xfe"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_is_named(model: Path, file: str, content: bytes) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{model / file}: expected a JSON object, ")):
        load_tokenizer(str(model))


def test_other_errors_pass() -> None:
    for error in (KeyboardInterrupt, ValueError("x"), UserError("x")):
        with pytest.raises(error if isinstance(error, type) else type(error)), failures_of("x"):
            raise error
