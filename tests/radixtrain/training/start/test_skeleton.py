"""A model cut to a few layers, with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from transformers import Gemma3TextConfig, Qwen3Config

from radixtrain.training.module import RadixModule
from radixtrain.training.start.skeleton import layer_period, random_trainable

CPU, META = torch.device("cpu"), torch.device("meta")


def settings_of(folder: Path, config: Any, **changes: Any) -> Any:
    """Of a folder that holds a configuration and no weights."""
    config.save_pretrained(folder)
    return RadixModule(str(folder), **changes).hparams


def test_the_first_layers_of_the_configuration(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, tiny_config(Qwen3Config, {"num_hidden_layers": 12}), dtype="auto")
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
    settings = settings_of(tmp_path, tiny_config(Qwen3Config, {}))
    for device in (CPU, META):
        random_trainable(settings, 1, device)
    assert not [each for each in recwarn if "CUDA reports" in str(each.message)]


def test_layers_of_several_kinds(tmp_path: Path) -> None:
    sliding = ["sliding_attention"]
    for kinds, period in (
        (["full_attention"] * 5, 1),
        (["sliding_attention", "full_attention"] * 3, 2),
        (["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], 3),
        (["full_attention"] + sliding * 19, 20),
    ):
        assert layer_period(Qwen3Config(num_hidden_layers=len(kinds), layer_types=kinds)) == period
    kinds = (sliding * 5 + ["full_attention"]) * 2
    config = tiny_config(Gemma3TextConfig, {"num_hidden_layers": 12, "layer_types": kinds})
    assert layer_period(config) == 6
    model = random_trainable(settings_of(tmp_path, config), 6, CPU)
    assert len(model.model.layers) == 6 and model.config.layer_types == kinds[:6]


def test_nothing_is_allocated_on_the_meta_device_and_the_random_state_stays(tmp_path: Path) -> None:
    config = Qwen3Config(num_hidden_layers=4, hidden_size=8192, intermediate_size=32768)
    before = torch.get_rng_state()
    model = random_trainable(settings_of(tmp_path, config, dtype="bfloat16"), 4, META)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert next(model.parameters()).dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device", [CPU, META])
def test_adapters_are_what_is_trained(tmp_path: Path, device: torch.device) -> None:
    pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    settings = settings_of(tmp_path, tiny_config(Qwen3Config, {"num_hidden_layers": 4}), use_peft=True, lora_r=4)
    trained = [n for n, p in random_trainable(settings, 2, device).named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
