"""The demo with a tiny Qwen3.5: `fit` learns, the folder loads and generates. Its template: `test_demo.py`."""

import csv
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import qwen3_5 as recipe
import torch
import yaml
from tiers import FULL

from radixtrain.verification.oracle import float64_arithmetic

pytestmark = FULL

ROOT = Path(__file__).resolve().parents[2]
TEXT, MULTIMODAL = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"


@pytest.fixture(scope="module", params=[TEXT, MULTIMODAL])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in miniature, with the model of either kind."""
    folder = tmp_path_factory.mktemp("qwen3_5") / request.param
    model = partial(recipe.tiny_qwen3_5, hidden=64, multimodal=request.param == MULTIMODAL)
    recipe.write_demo(folder, rows=32, validation_rows=8, make_tokenizer=recipe.tiny_tokenizer, make_model=model)
    return folder


def radixtrain(command: str, folder: Path, **flags: Any) -> int:
    """The exit code. Keyword arguments become flags, `__` a dot."""
    from radixtrain.__main__ import main

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


def test_fit_leaves_a_folder_that_loads_and_generates(folder: Path) -> None:
    """The tower for images stays in a checkpoint that has one; as a text model the folder loads without it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

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
    with float64_arithmetic():
        models = [loader.from_pretrained(trained, dtype=torch.float64) for loader in loaders]
        generated = [model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist() for model in models]
    assert len(generated[0][0]) > inputs["input_ids"].shape[1] and generated[0] == generated[-1]


def test_the_script_writes_what_the_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ["qwen3_5.py", f"--output_dir={tmp_path / 'demo'}", "--rows=60", "--validation_rows=6", "--multimodal"]
    monkeypatch.setattr(sys, "argv", words)
    recipe.main()
    assert f"model: {MULTIMODAL}, " in capsys.readouterr().out
    config = yaml.safe_load((ROOT / "configs" / "qwen3_5.yaml").read_text(encoding="utf-8"))
    named = [config["model"]["model_name_or_path"], config["data"]["train_file"], config["data"]["validation_file"]]
    assert sorted(named) == sorted(f"runs/qwen3_5/{path.name}" for path in (tmp_path / "demo").iterdir())
