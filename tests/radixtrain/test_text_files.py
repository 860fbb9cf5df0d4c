"""Small files of text that a user or a model names."""

import os
from pathlib import Path

import pytest

from radixtrain.data.tokens.tokenization import load_tokenizer, read_template
from radixtrain.errors import UserError
from radixtrain.hf.config import read_config
from radixtrain.text_files import MOST_BYTES


def test_what_has_no_end(tmp_path: Path) -> None:
    """And waits for nobody: the pipe has no writer."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    endless = {"/dev/zero": "a device", tmp_path / "pipe": "a pipe", tmp_path: "a folder", tmp_path / "huge": "at most"}
    for path, said in endless.items():
        with pytest.raises(UserError, match=f"^chat_template_path: cannot read .*{said}.*; expected a Jinja file"):
            read_template(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_pipe_in_the_folder_of_a_model(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for load in (read_config, load_tokenizer):
        with pytest.raises(UserError, match=f"{name}: not a file but a device, a pipe or a socket"):
            load(str(tmp_path))
