"""The files of a model name no code, no other weights and no file outside of the model's folder."""

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixtrain.__main__ import main
from radixtrain.commands.preflight import defaults_of_model
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.hf.config import read_config
from radixtrain.training.start.loading import load_model
from tests.support.runs import errors_in

KERNEL = "someone/kernel@rev"
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"_attn_implementation": KERNEL}, "_attn_implementation is 'someone/kernel@rev', which is code"),
    ("config.json", {"attn_implementation": f"{KERNEL}:forward"}, "attn_implementation"),
    ("config.json", {"_attn_implementation": {"": KERNEL}}, "_attn_implementation"),
    ("config.json", {"_attn_implementation_internal": KERNEL}, "_attn_implementation_internal"),
    ("config.json", {"_experts_implementation": KERNEL}, "_experts_implementation"),
    ("config.json", {"text_config": {"_attn_implementation": KERNEL}}, "text_config._attn_implementation"),
    ("config.json", {"vision_config": {"use_pretrained_backbone": True}}, "vision_config.use_pretrained_backbone"),
    ("config.json", {"vision_config": {"backbone": "someone/model"}}, "vision_config.backbone"),
    ("config.json", {"vision_config": {"architecture": "local-dir:/tmp"}}, "vision_config.architecture"),
    ("config.json", {"transformers_weights": "../other.safetensors"}, "transformers_weights"),
    ("config.json", {"quantization_config": {"index_file": "OUTSIDE"}}, "quantization_config.index_file"),
    ("model.safetensors.index.json", {"weight_map": {"a": "../model/x.safetensors"}}, "weight_map.a"),
    ("model.safetensors.index.json", {"weight_map": {"a": "/x.safetensors"}}, "weight_map.a"),
    ("tokenizer_config.json", {"vocab_file": "OUTSIDE"}, "vocab_file"),
    ("tokenizer_config.json", {"init_kwargs": {"tokenizer_file": "../secret"}}, "init_kwargs.tokenizer_file"),
]


@pytest.fixture
def change(shop: Path, tmp_path: Path) -> Callable[[str, dict[str, Any]], str]:
    """A model whose file has these settings too; returns its folder."""
    folder = tmp_path / "model"
    shutil.copytree(shop / "model", folder)
    (tmp_path / "secret").write_text("TEXT OF THE USER")

    def change(name: str, settings: dict[str, Any]) -> str:
        text = json.dumps(settings).replace("OUTSIDE", str(tmp_path / "secret"))
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**before, **json.loads(text)}))
        return str(folder)

    return change


@pytest.mark.parametrize(("name", "settings", "key"), NAMED)
def test_what_a_file_names(
    name: str, settings: dict[str, Any], key: str, change: Callable[[str, dict[str, Any]], str]
) -> None:
    folder = change(name, settings)
    loaders: Sequence[Callable[[str], Any]] = (read_config, lambda path: load_model(path, "float32", "sdpa"))
    for load in (load_tokenizer,) if name.startswith("tokenizer") else loaders:
        with pytest.raises(UserError, match=f"{name}: {key}"):
            load(folder)


def test_names_that_lead_nowhere_are_as_common_as_harmless(change: Callable[[str, dict[str, Any]], str]) -> None:
    """`save_pretrained` once wrote where its files were. The attention is the one that the user asks for."""
    folder = change("config.json", {"_attn_implementation": "eager", "_name_or_path": "/tmp"})
    change("tokenizer_config.json", {"name_or_path": "/tmp", "special_tokens_map_file": "/nowhere/gone.json"})
    load_tokenizer(folder)
    assert load_model(folder, "float32", "sdpa").config._attn_implementation == "sdpa"


def test_code_of_the_hub_in_a_configuration_or_a_checkpoint(shop: Path) -> None:
    with pytest.raises(UserError, match="attn_implementation 'someone/kernel@rev': which is code of the hub"):
        load_model(str(shop / "model"), "float32", KERNEL)


OF_A_RUN: list[tuple[str, str]] = [
    (yaml.safe_dump({"data": {"columns": "SECRET"}}), "data.columns must be mapping or null; got .*; restore the file"),
    (
        yaml.safe_dump({"data": {"max_length": "SECRET"}}),
        "data.max_length must be an integer or null; got .*; restore the file",
    ),
    (
        yaml.safe_dump({"data": {}, "seed_everything": "SECRET"}),
        "seed_everything must be an integer; got .*; restore the file",
    ),
    ("a: &a [x, x]\ndata: {chat_template_kwargs: {a: *a}}", "radixtrain.yaml:1: `&` and `\\*` are not read"),
]


@pytest.mark.parametrize(("text", "said"), OF_A_RUN)
def test_the_settings_beside_a_model(
    text: str,
    said: str,
    change: Callable[[str, dict[str, Any]], str],
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(change("config.json", {}))
    (folder / "radixtrain.yaml").write_text(text.replace("SECRET", str(tmp_path / "secret")))
    (tmp_path / "x.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    started = time.process_time()
    flags = {"data__predict_file": tmp_path / "x.jsonl", "data__train_file": None, "trainer__max_epochs": None}
    assert main(arguments("predict", model__model_name_or_path=folder, **flags)) in (1, 2)
    [line] = errors_in(capsys.readouterr().err)
    assert re.search(said, line), line
    assert "TEXT OF" not in line and time.process_time() - started < 20


def test_a_chat_template_is_that_of_the_folder(change: Callable[[str, dict[str, Any]], str], tmp_path: Path) -> None:
    """It was saved with the tokenizer; the settings may name a file that is somebody else's by now."""
    folder = Path(change("config.json", {}))
    data = {"chat_template_path": str(tmp_path / "secret"), "split_turns": False, "train_file": "/etc/passwd"}
    (folder / "radixtrain.yaml").write_text(yaml.safe_dump({"data": data}))
    assert defaults_of_model(str(folder)) == {"data.split_turns": False}
