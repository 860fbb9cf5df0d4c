"""Code that comes with a model is not run, whoever sits at the terminal and whatever is answered there."""

import ast
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

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path for name in ("radixtrain", "collators", "kernels") for path in (ROOT / name).rglob("*.py")]
LOADS = {"from_pretrained", "from_config", "load_dataset", "get_class_from_dynamic_module"}
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
        assert "brings code of its own (auto_map), which radixtrain does not run" in str(refused.value)


@pytest.mark.usefixtures("answers_yes")
@pytest.mark.parametrize("command", ["fit", "predict", "report"])
def test_a_command_says_it_in_one_line(
    command: str, evil: Path, tmp_path: Path, arguments: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"predict": {"data__predict_file": evil.parent / "x.jsonl"}}.get(command, {})
    (evil.parent / "x.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert main(arguments(command, model__model_name_or_path=evil, **files)) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "trust_remote_code=True and hand it to radixtrain.prepare_model" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("answers_yes")
def test_a_model_that_transformers_knows_is_its_own(evil: Path, tmp_path: Path) -> None:
    """Many folders name code of their own beside a kind that transformers has: then that one is taken."""
    _change(evil / "config.json", model_type="qwen3")
    assert type(load_model(str(evil), "float32", "sdpa")).__module__.startswith("transformers.models.qwen3")
    assert not (tmp_path / "ran").exists()


def calls_of(source: str) -> Iterator[ast.Call]:
    """Calls that load something by name, and those that could run what is in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield node


def without_false(source: str) -> list[str]:
    """Calls that load a model, a tokenizer or data and do not say `trust_remote_code=False`."""
    loads = (call for call in calls_of(source) if ast.unparse(call.func).rpartition(".")[2] in LOADS)
    said = {"trust_remote_code": "False"}
    return [
        ast.unparse(call)
        for call in loads
        if not said.items() <= {word.arg: ast.unparse(word.value) for word in call.keywords}.items()
    ]


def unpickling(source: str) -> list[str]:
    """Calls that run what is in a file, or may."""
    found = []
    for call in calls_of(source):
        name = ast.unparse(call.func)
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        is_torch = name == "torch.load" and words.get("weights_only") != "True"
        pickles = name.partition(".")[0] in ("pickle", "joblib", "dill", "cloudpickle", "marshal", "shelve")
        if is_torch or pickles or words.get("allow_pickle") == "True" or name in ("eval", "exec", "yaml.load"):
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not without_false(source)
    assert not unpickling(source)


def test_the_checks() -> None:
    assert not without_false("AutoModel.from_pretrained(x, trust_remote_code=False)\nmodel._from_config(x)")
    for call in ("A.from_pretrained(x)", "load_dataset(x, trust_remote_code=True)", "A.from_config(x, **{})"):
        assert without_false(f"def f():\n    return {call}")
    assert not unpickling("torch.load(x, weights_only=True)\nmodel.eval()\nnp.load(x)")
    for call in ("torch.load(x)", "pickle.loads(x)", "joblib.load(x)", "np.load(x, allow_pickle=True)", "eval(x)"):
        assert unpickling(f"def f():\n    return {call}")
