"""What the command line refuses to load, and what it loads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiers import FULL, cases
from tiny_models import tiny_config, tiny_model, tiny_qwen3
from transformers import AutoModelForCausalLM, Qwen3Config

from radixtrain.errors import UserError
from radixtrain.training.module import RadixModule
from radixtrain.training.start.loading import auto_class, load_model, load_trainable

IDS = torch.tensor([[1, 2, 3]])


def settings(path: Any, **changes: Any) -> Any:
    return RadixModule(str(path), **changes).hparams


@pytest.mark.parametrize("dedup", [True, False])
def test_a_router_loss_is_refused(tmp_path, dedup):
    tiny_model("MixtralForCausalLM", output_router_logits=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adds a router loss \(output_router_logits: true in its config\.json\)"):
        load_trainable(settings(tmp_path, dedup=dedup))


def test_sinks_need_eager_beside_the_tree(tmp_path):
    tiny_model("GptOssForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"its class has no sdpa attention; set model\.attn_implementation: eager"):
        load_model(str(tmp_path), "float32", "sdpa")
    model = load_trainable(settings(tmp_path, attn_implementation="eager"))
    assert model.config._attn_implementation == "radix_eager"
    assert model(input_ids=IDS).logits.isfinite().all()


def test_float16_weights_need_a_loss_scale(tmp_path):
    """With `dtype: auto` the first step made them NaN."""
    tiny_qwen3().half().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.dtype 'auto': the checkpoint is float16, which needs a loss scale"):
        load_trainable(settings(tmp_path, dtype="auto"))
    assert load_trainable(settings(tmp_path)).dtype == torch.float32


@pytest.mark.parametrize(
    "wrote",
    cases(
        ["Qwen2_5_VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"],
        ["Qwen3_5ForConditionalGeneration"],
    ),
)
def test_a_checkpoint_is_loaded_by_the_class_that_wrote_it(tmp_path, wrote):
    """`AutoModelForCausalLM` would leave the tower for images of Qwen3.5 out, and `fit` would save the model so.

    Qwen2.5-VL is no entry of it.
    """
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    text = {"text_config": rope} if wrote.startswith("Qwen2") else {}
    tiny_model(wrote, **text).save_pretrained(tmp_path)
    model = load_trainable(settings(tmp_path))
    assert type(model).__name__ == wrote and model(input_ids=IDS).logits.isfinite().all()


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

    @pytest.mark.parametrize("name", cases(["model.layers.1.mlp.up_proj.weight", "lm_head.weight"], ["lm_head.weight"]))
    def test_a_weight_is_missing(self, tmp_path, name):
        self.saved(tmp_path, lambda weights: weights.pop(name), tie_word_embeddings=False)
        with pytest.raises(UserError, match=rf"the checkpoint has no {re.escape(name)}, and Qwen3ForCausalLM would be"):
            load_model(str(tmp_path), "float32", "sdpa")

    def test_all_are_missing_under_other_names(self, tmp_path):
        def rename(weights):
            renamed = {f"student.{name}": weights.pop(name) for name in list(weights)}
            weights.update(renamed)

        self.saved(tmp_path, rename, tie_word_embeddings=False)
        with pytest.raises(UserError, match=r"and \d+ more\).*; it has student\.lm_head\.weight, which Qwen3"):
            load_model(str(tmp_path), "float32", "sdpa")

    def test_a_head_that_is_tied_is_not_missing(self, tmp_path):
        self.saved(tmp_path, lambda weights: None)
        assert load_model(str(tmp_path), "float32", "sdpa").lm_head.weight.isfinite().all()

    def test_a_weight_of_another_shape(self, tmp_path):
        self.saved(tmp_path, lambda weights: weights.update({"model.norm.weight": torch.ones(15)}))
        with pytest.raises(UserError, match=r"model\.norm\.weight is \[15\] in the checkpoint and \[32\] in Qwen3ForC"):
            load_model(str(tmp_path), "float32", "sdpa")

    def test_a_weight_that_is_not_read_is_said(self, tmp_path, caplog):
        self.saved(tmp_path, lambda weights: weights.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
        load_model(str(tmp_path), "float32", "sdpa")
        assert "Qwen3ForCausalLM has no place for model.layers.2.mlp.up_proj.weight of the checkpoint" in caplog.text

    def test_a_weight_that_is_not_finite(self, tmp_path):
        self.saved(tmp_path, lambda weights: weights["model.norm.weight"].fill_(float("inf")))
        with pytest.raises(
            UserError, match=r"model\.model_name_or_path .*: the weight model\.norm\.weight holds numbers"
        ):
            load_trainable(settings(tmp_path))

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
    def test_a_damaged_json_file_is_named(self, tmp_path, file):
        self.saved(tmp_path, lambda weights: None)
        for content in (b'{"a": ', b"", b"[1]", b"\xff\xfe", b"[" * 100_000):
            (tmp_path / file).write_bytes(content)
            with pytest.raises(UserError, match=re.escape(f"{tmp_path / file}: expected a JSON object, ")):
                load_model(str(tmp_path), "float32", "sdpa")

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
