"""The demo with a tiny Qwen3.5: its template is the stock one, `fit` learns, the folder loads and generates."""

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from radixtrain import RadixCollator, verify_equivalence
from radixtrain.__main__ import main
from radixtrain.testing import FREE_FORKS
from radixtrain.training.module import RadixModule
from radixtrain.tree.run_layout import RunLayout

ROOT = Path(__file__).resolve().parents[2]
TEXT, MULTIMODAL = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    """`recipes/qwen3_5.py` as a module, with its folder on the path as when it runs as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "recipes")
        yield importlib.import_module("qwen3_5")


@pytest.fixture(scope="module")
def tokenizer(recipe: ModuleType) -> Any:
    return recipe.tiny_tokenizer(["a", "b"], 300)


@pytest.fixture(scope="module", params=[TEXT, MULTIMODAL])
def folder(request: pytest.FixtureRequest, recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in miniature, with the model of either kind."""
    folder = tmp_path_factory.mktemp("qwen3_5") / request.param
    model = partial(recipe.tiny_qwen3_5, hidden=64, multimodal=request.param == MULTIMODAL)
    recipe.write_demo(folder, rows=32, validation_rows=8, make_tokenizer=recipe.tiny_tokenizer, make_model=model)
    return folder


def radixtrain(command: str, folder: Path, **flags: Any) -> int:
    """The exit code. Keyword arguments become flags, `__` a dot."""
    given = {
        "config": ROOT / "configs" / "qwen3_5.yaml",
        "output_dir": folder / "out",
        "model__model_name_or_path": folder / "model",
        "data__train_file": folder / "train.jsonl",
        "data__validation_file": folder / "validation.jsonl",
        "data__batch_size": 8,
        "data__dataloader_num_workers": 0,
        "trainer__max_epochs": 1,
        "trainer__log_every_n_steps": 1,
        "trainer__enable_progress_bar": False,
        **flags,
    }
    return main([command, *(f"--{name.replace('__', '.')}={value}" for name, value in given.items())])


def test_the_config_names_what_is_written(folder: Path) -> None:
    config = yaml.safe_load((ROOT / "configs" / "qwen3_5.yaml").read_text(encoding="utf-8"))
    named = [config["model"]["model_name_or_path"], config["data"]["train_file"], config["data"]["validation_file"]]
    written = [path.name for path in folder.iterdir() if path.name != "out"]
    assert sorted(named) == sorted(f"runs/qwen3_5/{name}" for name in written)


def test_fit_leaves_a_folder_that_loads_and_generates(folder: Path) -> None:
    """The tower for images stays in a checkpoint that has one; as a text model the folder loads without it."""
    assert radixtrain("fit", folder, model__learning_rate=1e-2) == 0
    with (folder / "out" / "logs" / "version_0" / "metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    trained = folder / "out" / "model"
    assert json.loads((trained / "config.json").read_text())["architectures"] == [folder.name]
    loaders = [AutoModelForCausalLM, *([AutoModelForImageTextToText] if folder.name == MULTIMODAL else [])]
    tokenizer = AutoTokenizer.from_pretrained(trained)
    question = [{"role": "user", "content": "Where is my lamp?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    generated = [
        loader.from_pretrained(trained).generate(**inputs, max_new_tokens=4, do_sample=False).tolist()
        for loader in loaders
    ]
    assert len(generated[0][0]) > inputs["input_ids"].shape[1] and generated[0] == generated[-1]


def test_adapters_in_the_recurrent_layers(folder: Path) -> None:
    """Checkpointed, every tensor in float64, with a fork at every branch."""
    targets = ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]
    settings = {"use_peft": True, "lora_target_modules": targets, "activation_checkpointing": True}
    module = RadixModule(str(folder / "model"), **settings)
    module.configure_model()
    assert module.model is not None
    tokens = torch.randint(20, 300, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[*tokens[:cut], 7, 9, n] for cut in (40, 70) for n in range(11, 14)]
    collator = RadixCollator(run_cost=FREE_FORKS)
    features = [{"input_ids": row, "labels": row} for row in rows]
    assert RunLayout.from_batch(collator(features)).num_forks > 1
    report = verify_equivalence(module.model, features, collator=collator, precisions=["float64"])
    assert report.passed, report


def test_rows_with_images_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [{"type": "image", "image": "lamp.png"}, {"type": "text", "text": "What is this?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A lamp."}]
    (tmp_path / "images.jsonl").write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    assert radixtrain("fit", folder, output_dir=tmp_path / "out", data__train_file=tmp_path / "images.jsonl") == 1
    error = capsys.readouterr().err
    assert "images.jsonl:1: messages: turn 1 (role 'user')" in error and "images, audio and video are not" in error
    assert not (tmp_path / "out").exists()


def turn(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


CHATS = {
    "one turn": [turn("system", "s "), turn("user", "u"), turn("assistant", "a")],
    "two turns": [turn("user", "u"), turn("assistant", "a"), turn("user", " u"), turn("assistant", "b")],
    "open": [turn("system", "s"), turn("user", "u")],
    "thinking now": [turn("user", "u"), turn("assistant", "<think>\nhm\n</think>\n\na")],
    "thinking before": [turn("user", "u"), turn("assistant", "<think>\nhm\n</think>\n\na"), turn("user", "v")],
    "thinking apart": [turn("user", "u"), turn("assistant", "a", reasoning_content="\nhm\n")],
    "two answers": [turn("user", "u"), turn("assistant", "\na"), turn("assistant", "b")],
}


@pytest.mark.parametrize("generation", [{}, {"add_generation_prompt": True}, {"enable_thinking": True}])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_template_renders_as_the_stock_one(tokenizer: Any, chat: list[dict[str, str]], generation: dict) -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL carries the stock template: pip install -e '.[dev]'")
    stock = (Path(spec.origin).parent / "chat_templates" / "qwen3_5_nothink.jinja").read_text(encoding="utf-8")
    options = {"tokenize": False, "add_generation_prompt": "enable_thinking" in generation, **generation}
    ours = tokenizer.apply_chat_template(chat, **options)
    assert ours == tokenizer.apply_chat_template(chat, chat_template=stock, **options)


def test_runs_as_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: ModuleType, capsys: Any) -> None:
    words = ["qwen3_5.py", f"--output_dir={tmp_path / 'demo'}", "--rows=60", "--validation_rows=6", "--multimodal"]
    monkeypatch.setattr(sys, "argv", words)
    recipe.main()
    assert f"model: {MULTIMODAL}, " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"model", "train.jsonl", "validation.jsonl"}
