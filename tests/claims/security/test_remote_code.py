"""Code that comes with a model is not run, whoever sits at the terminal and whatever is answered there."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.hf.config import read_config
from radixtrain.training.start.loading import auto_class, load_model
from tests.support import cases
from tests.support.runs import errors_in

CODE = """
open({ran!r}, "w").close()
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
class Evil(PretrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
class EvilModel(Qwen3ForCausalLM):
    config_class = Evil
"""


@pytest.fixture
def evil(shop: Path, tmp_path: Path) -> Path:
    """A model of a kind that transformers does not know, with code that says in `ran` that it was run."""
    folder = tmp_path / "evil"
    shutil.copytree(shop / "model", folder)
    (folder / "evil.py").write_text(CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
    _change(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil", **_auto("EvilModel")})
    tokenizer = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
    _change(folder / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="EvilTokenizer")
    return folder


def _auto(name: str) -> dict[str, str]:
    return {f"AutoModel{kind}": f"evil.{name}" for kind in ("", "ForCausalLM", "ForImageTextToText")}


def _change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}), encoding="utf-8")


@pytest.fixture
def answers_yes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal, on which somebody says y to every question."""
    terminal, stdin = os.openpty()
    os.write(terminal, b"y\n" * 20)
    with os.fdopen(stdin, encoding="utf-8") as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        yield
    os.close(terminal)


@pytest.mark.usefixtures("answers_yes")
@pytest.mark.parametrize(
    "load",
    [read_config, load_tokenizer, auto_class, lambda path: load_model(path, "float32", "sdpa")],
    ids=["config", "tokenizer", "class", "model"],
)
def test_it_is_not_run(load: Callable[[str], Any], evil: Path, tmp_path: Path) -> None:
    with pytest.raises((UserError, ValueError)) as refused:
        load(str(evil))
    assert not (tmp_path / "ran").exists(), refused.value
    if load is not auto_class:  # which is asked by those that say it
        assert "comes with its own code (auto_map), which radixtrain does not run" in str(refused.value)


@pytest.mark.usefixtures("answers_yes")
@pytest.mark.parametrize("command", cases(["fit", "predict", "report"], ["fit"]))
def test_a_command_says_it_in_one_line(
    command: str, evil: Path, tmp_path: Path, arguments: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"predict": {"data__predict_file": evil.parent / "x.jsonl"}}.get(command, {})
    (evil.parent / "x.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert main(arguments(command, model__model_name_or_path=evil, **files)) == 1
    [line] = errors_in(capsys.readouterr().err)
    assert "trust_remote_code=True and pass it to radixtrain.share_prefixes" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("answers_yes")
def test_a_model_that_transformers_knows_is_its_own(evil: Path, tmp_path: Path) -> None:
    """Many folders name code of their own beside a kind that transformers has: then that one is taken."""
    _change(evil / "config.json", model_type="qwen3")
    assert type(load_model(str(evil), "float32", "sdpa")).__module__.startswith("transformers.models.qwen3")
    assert not (tmp_path / "ran").exists()
