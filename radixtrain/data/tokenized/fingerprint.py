"""A key for tokenised rows, made of everything that they depend on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from radixtrain.checkpoints.tensors import FileDigest
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.rendering.template import writes_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parents[1]


def fingerprint(encoder: ChatEncoder, source: dict[str, Any], files: Mapping[str, FileDigest]) -> str:
    """Name the samples that `encoder` makes of these files.

    source: what else they depend on: its path, columns, split, policies.
    files: by their paths, which are part of `where`.

    The order of keys counts: templates print the values of `chat_template_kwargs` in theirs.
    """
    options = {field.name: getattr(encoder, field.name) for field in fields(encoder) if field.name != "tokenizer"}
    key = {
        "encoder": type(encoder).__name__,
        "options": options,
        "tokenizer": _digest_of_tokenizer(encoder.tokenizer),
        "versions": _versions(),
        "source": source,
        "files": {path: file.xxh3_128 for path, file in files.items()},
    }
    if encoder.template_date is None and writes_date(encoder.tokenizer):
        key["date"] = date.today().isoformat()
    return xxhash.xxh3_128_hexdigest(json.dumps(key, default=repr).encode())


def _digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest all files that the tokenizer saves, including its chat template."""
    digest = xxhash.xxh3_128(type(tokenizer).__name__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> dict[str, str]:
    """Name the versions of the libraries that render and tokenise, and of this folder's own sources."""
    import tokenizers
    import transformers

    digest = xxhash.xxh3_128()
    for path in sorted(HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "sources": digest.hexdigest(),
    }
