"""A model cut to a few layers, with random weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3Config

from radixtrain.training.start.skeleton import layer_period, random_trainable

CPU, META = torch.device("cpu"), torch.device("meta")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SETTINGS = {
    "dtype": "auto",
    "attn_implementation": "sdpa",
    "activation_checkpointing": False,
    "use_peft": False,
}


def settings_of(folder: Path, config: Any, **changes: Any) -> Any:
    """Of a folder that holds a configuration and no weights."""
    config.save_pretrained(folder)
    return SimpleNamespace(model_name_or_path=str(folder), **{**SETTINGS, **changes})


def test_the_first_layers_of_the_configuration(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, Qwen3Config(num_hidden_layers=12, **SIZES, **HEADS))
    models = {number: random_trainable(settings, number, CPU) for number in (1, 3, 12)}
    assert {number: len(model.model.layers) for number, model in models.items()} == {1: 1, 3: 3, 12: 12}
    assert models[3].training and models[3].model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
    assert next(models[3].parameters()).dtype == torch.float32
    models[3](input_ids=torch.arange(6)[None]).logits.sum().backward()


def test_no_gpu_is_started_for_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """On a machine with several, whose generators torch would keep, and warn of it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": pytest.fail(f"{device} is started"))
    settings = settings_of(tmp_path, Qwen3Config(num_hidden_layers=2, **SIZES, **HEADS))
    for device in (CPU, META):
        random_trainable(settings, 1, device)
    assert not [each for each in recwarn if "CUDA reports" in str(each.message)]


def test_layers_of_several_kinds(tmp_path: Path) -> None:
    config = Gemma3TextConfig(num_hidden_layers=13, sliding_window=4, **SIZES, **HEADS)
    assert layer_period(config) == 6
    model = random_trainable(settings_of(tmp_path, config), 6, CPU)
    kinds = [layer.attention_type if hasattr(layer, "attention_type") else "" for layer in model.model.layers]
    assert len(kinds) == 6 and model.config.layer_types == config.layer_types[:6]


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        (["full_attention"] * 5, 1),
        (["sliding_attention", "full_attention"] * 3, 2),
        (["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], 3),
        (["full_attention"] + ["sliding_attention"] * 19, 20),
    ],
)
def test_period(kinds: list[str], period: int) -> None:
    assert layer_period(Qwen3Config(num_hidden_layers=len(kinds), layer_types=kinds)) == period


def test_nothing_is_allocated_on_the_meta_device_and_the_random_state_stays(tmp_path: Path) -> None:
    config = Qwen3Config(num_hidden_layers=4, **{**SIZES, "hidden_size": 8192, "intermediate_size": 32768}, **HEADS)
    before = torch.get_rng_state()
    model = random_trainable(settings_of(tmp_path, config, dtype="bfloat16"), 4, META)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert next(model.parameters()).dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device", [CPU, META])
def test_adapters_are_what_is_trained(tmp_path: Path, device: torch.device) -> None:
    pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    lora = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
    lora |= {"use_dora": False, "use_rslora": False}
    settings = settings_of(tmp_path, Qwen3Config(num_hidden_layers=4, **SIZES, **HEADS), **lora)
    trained = [n for n, p in random_trainable(settings, 2, device).named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
