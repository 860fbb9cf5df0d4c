"""A file of chats, tokenised into a cache of its test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data.cache import Tokenized, tokenized
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Source
from radixtrain.settings.sections import DataSettings
from tests.support.batches import CHATML, byte_tokenizer

OF_THE_CACHE = ("on_bad_row", "dataset_num_proc", "cache_dir")


@pytest.fixture
def encoder() -> Callable[..., ChatEncoder]:
    return lambda template=CHATML, **options: ChatEncoder(byte_tokenizer(template), **options)


@pytest.fixture
def tokenize(tmp_path: Path, encoder: Callable[..., ChatEncoder]) -> Callable[..., Tokenized]:
    """Tokenises a file into a cache of this test. Options of the encoder and of tokenising go by their names."""

    def run(path: Path, columns: dict[str, str] | None = None, **options: Any) -> Tokenized:
        ours = {name: options.pop(name) for name in list(options) if name in OF_THE_CACHE}
        settings = DataSettings(**{"cache_dir": str(tmp_path / "cache"), **ours})
        return tokenized(Source(str(path), columns=columns), encoder(**options), settings)

    return run
