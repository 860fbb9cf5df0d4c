"""What the command line refuses to load, and what it loads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from radixtrain.errors import UserError
from radixtrain.hf.config import end_tokens
from radixtrain.training.fault_tolerance.failures import explain
from radixtrain.training.module import RadixModule
from radixtrain.training.start.loading import (
    auto_class,
    check_draws,
    layer_period,
    load_model,
    load_trainable,
    random_trainable,
)
from tests.support import FULL, cases
from tests.support.models import tiny_config, tiny_model, tiny_qwen3

IDS = torch.tensor([[1, 2, 3]])


def settings(path: Any, **changes: Any) -> Any:
    return RadixModule(str(path), **changes).hparams


ROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}}
LOADED = [
    # the class that wrote a checkpoint, its sizes, and the settings with which that class computes
    ("GptOssForCausalLM", {}, {}),  # sinks, for which transformers has no sdpa
    ("Qwen3MoeForCausalLM", {}, {"dtype": "float64"}),  # torch's grouped product takes none
    # `AutoModelForCausalLM` would leave the tower for images out, and `fit` would save the model so.
    ("Qwen3_5ForConditionalGeneration", {}, {}),
    ("Qwen3_5ForCausalLM", {}, {}),
    ("Qwen2_5_VLForConditionalGeneration", ROPE, {}),  # no entry of it
]


@pytest.mark.parametrize(("wrote", "sizes", "given"), cases(LOADED, LOADED[:3]))
def test_a_checkpoint_is_loaded_by_the_class_that_wrote_it(tmp_path, wrote, sizes, given):
    tiny_model(wrote, **sizes).save_pretrained(tmp_path)
    model = load_trainable(settings(tmp_path, **given))
    model(input_ids=IDS).logits.sum().backward()
    assert type(model).__name__ == wrote and model.lm_head.weight.grad.isfinite().all()
    assert model.lm_head.weight.grad.dtype == getattr(torch, given.get("dtype", "float32"))


ROUTED, ADDED = {"output_router_logits": True}, r"adds a router loss \(output_router_logits=True\)"
REFUSED = [
    ("MixtralForCausalLM", ROUTED, {"dedup": True}, ADDED),
    ("MixtralForCausalLM", ROUTED, {"dedup": False}, ADDED),
]


@pytest.mark.parametrize(("wrote", "sizes", "given", "said"), REFUSED)
def test_what_is_not_loaded(tmp_path, wrote, sizes, given, said):
    tiny_model(wrote, **sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        load_trainable(settings(tmp_path, **given))


def test_a_dropout_of_the_checkpoint(tmp_path):
    """All of it at once. What LoRA adds is refused by its key: commands/test_refusals.py."""
    tiny_model("Starcoder2ForCausalLM", residual_dropout=0.1, embedding_dropout=0.2).save_pretrained(tmp_path)
    model, names = load_trainable(settings(tmp_path)), ["embedding_dropout", "residual_dropout"]
    with pytest.raises(
        UserError, match=rf"embedding_dropout=0\.2, .*residual_dropout=0\.1: .*: \[{', '.join(names)}\]"
    ):
        check_draws(model, settings(tmp_path))
    check_draws(model, settings(tmp_path, allow_dropout=names))
    check_draws(model, settings(tmp_path, dedup=False))


def test_float16_weights_need_a_loss_scale(tmp_path):
    """With `dtype: auto` the first step made them NaN."""
    tiny_qwen3().half().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.dtype 'auto': the checkpoint is float16, which needs a loss scale"):
        load_trainable(settings(tmp_path, dtype="auto"))
    assert load_trainable(settings(tmp_path)).dtype == torch.float32


def test_a_checkpoint_that_does_not_name_its_class(tmp_path):
    """As those that were converted by hand."""
    tiny_config(Qwen3Config, {}).save_pretrained(tmp_path)
    assert auto_class(str(tmp_path)) is AutoModelForCausalLM


class TestDamagedCheckpoints:
    """What transformers fills with random numbers, passes over, or refuses without a name."""

    @staticmethod
    def saved(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
        """A checkpoint whose weights were changed on disk."""
        tiny_qwen3(**config).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (lambda weights: weights.pop("lm_head.weight"),
             r"the checkpoint has no lm_head\.weight, and Qwen3ForCausalLM would be"),
            (lambda weights: weights.update({f"student.{name}": weights.pop(name) for name in list(weights)}),
             r"and \d+ more\).*; it has student\.lm_head\.weight, which Qwen3"),
            (lambda weights: weights.update({"model.norm.weight": torch.ones(15)}),
             r"model\.norm\.weight is \[15\] in the checkpoint and \[32\] in Qwen3ForC"),
            (lambda weights: weights["model.norm.weight"].fill_(float("inf")),
             r"model\.model_name_or_path .*: the weight model\.norm\.weight holds numbers"),
        ],
        ids=["missing", "other names", "another shape", "not finite"],
    )  # fmt: skip
    def test_weights_that_would_not_be_those_of_the_checkpoint(self, tmp_path, change, error):
        self.saved(tmp_path, change, tie_word_embeddings=False)
        with pytest.raises(UserError, match=error):
            load_trainable(settings(tmp_path))

    def test_a_weight_that_is_not_read_is_said(self, tmp_path, caplog):
        self.saved(tmp_path, lambda weights: weights.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
        load_model(str(tmp_path), "float32", "sdpa")
        assert "Qwen3ForCausalLM has no place for model.layers.2.mlp.up_proj.weight of the checkpoint" in caplog.text

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
    def test_a_damaged_json_file_is_named(self, tmp_path, file):
        self.saved(tmp_path, lambda weights: None)
        for content in (b'{"a": ', b"", b"[1]", b"\xff\xfe", b"[" * 100_000):
            (tmp_path / file).write_bytes(content)
            with pytest.raises(UserError, match=re.escape(f"{tmp_path / file}: expected a JSON object, ")):
                load_model(str(tmp_path), "float32", "sdpa")
            end_tokens(str(tmp_path))  # asked before

    @FULL
    def test_a_value_that_makes_no_model(self, tmp_path):
        """Each ends in another kind of error inside of transformers."""
        self.saved(tmp_path, lambda weights: None)
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        for key, value in (
            ("hidden_size", "abc"),
            ("hidden_size", -1),
            ("num_attention_heads", 0),
            ("hidden_act", "x"),
        ):
            (tmp_path / "config.json").write_text(json.dumps({**config, key: value}), encoding="utf-8")
            with pytest.raises(UserError, match=r"^model\.model_name_or_path .* cannot be loaded: .+$"):
                load_model(str(tmp_path), "float32", "sdpa")


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


@pytest.mark.parametrize("device", [CPU, META])
def test_adapters_are_what_is_trained(tmp_path: Path, device: torch.device) -> None:
    """The random state stays, and nothing is allocated on the meta device."""
    pytest.importorskip("peft", reason="pip install peft")
    config = tiny_config(Qwen3Config, {"num_hidden_layers": 4})
    settings, before = settings_of(tmp_path, config, use_peft=True, lora_r=4, dtype="bfloat16"), torch.get_rng_state()
    model = random_trainable(settings, 2, device)
    assert torch.equal(torch.get_rng_state(), before) and model.dtype == torch.bfloat16
    assert {parameter.device for parameter in model.parameters()} == {device}
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)


def test_an_error_of_the_machine_is_not_one_of_the_model(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("can't start new thread")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError) as raised:
        load_model(str(shop / "model"), "float32", "sdpa")
    assert raised.value is error
    assert (explain(error, None) or "").startswith("the machine ran out of memory")
