"""Loss, gradients and predictions of `RadixModule` are Hugging Face's own, whatever the head of the model computes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoModelForCausalLM

from radixtrain import position_wise
from radixtrain.__main__ import main
from radixtrain.collators.steps import StepCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError
from radixtrain.training.module import RadixModule
from radixtrain.verification.equivalence import verify_step
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import cases
from tests.support.batches import FEATURES
from tests.support.models import tiny_model
from tests.support.runs import logged

SIZES = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "ModernBertDecoderForCausalLM": {},
    "BertLMHeadModel": DECODER,
    "RobertaForCausalLM": DECODER,
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "GraniteForCausalLM": {"logits_scaling": 3.0},
    "Cohere2ForCausalLM": {"logit_scale": 0.25},
    "Qwen3ForCausalLM": {"tie_word_embeddings": False},
    "an adapter on the head": {"tie_word_embeddings": False},
}
# The positions of a RoBERTa start after its padding index, which sharing refuses.
ARMS = [(name, dedup) for name in FAMILIES for dedup in (False, True) if not (dedup and name.startswith("Roberta"))]
QUICK = [
    *(("BertLMHeadModel", True), ("BertLMHeadModel", False), ("Gemma2ForCausalLM", True), ("Qwen3ForCausalLM", True)),
    *(("an adapter on the head", True), ("an adapter on the head", False)),
]
LAYERS_OF_HEAD = {
    "ModernBertDecoderForCausalLM": {"lm_head.dense.weight", "lm_head.norm.weight", "decoder.bias"},
    "BertLMHeadModel": {
        f"cls.predictions.transform.{x}.{y}" for x in ("dense", "LayerNorm") for y in ("weight", "bias")
    },
    "an adapter on the head": {f"base_model.model.lm_head.lora_{x}.default.weight" for x in "AB"},
}
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj", "lm_head"]}
NUM_LABELS = 9  # of FEATURES


def saved(name: str, folder: Path, **changes: Any) -> Path:
    kind = "Qwen3ForCausalLM" if "adapter" in name else name
    tiny_model(kind, **{**SIZES, **FAMILIES[name], **changes}).save_pretrained(folder)
    return folder


def loaded(name: str, folder: Path, **settings: Any) -> RadixModule:
    """A module as the command line configures it; `eager`, since `sdpa` has no soft-cap for Gemma 2."""
    if "adapter" in name:
        pytest.importorskip("peft", reason="pip install peft")
        settings |= LORA
    module = RadixModule(str(saved(name, folder)), attn_implementation="eager", **settings)
    module.configure_model()
    return module


@float64_arithmetic()
@pytest.mark.parametrize(("name", "dedup"), cases(ARMS, QUICK))
def test_loss_and_predictions(name: str, dedup: bool, tmp_path: Path) -> None:
    """In micro-batches of a few sequences; the loss also as Hugging Face's own loss function has it."""
    module = loaded(name, tmp_path, dedup=dedup, dtype="float64").eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    if "adapter" in name:  # weights that matter, beside which PEFT's own model is called
        for weight in (each for each in module.parameters() if each.requires_grad):
            torch.nn.init.normal_(weight, std=0.3)
        model = module.model
    expected, own = [], 0.0
    for feature in FEATURES:
        with torch.no_grad():
            output = model(**{key: torch.tensor([ids]) for key, ids in feature.items()})
        targets = [(place, label) for place, label in enumerate(feature["labels"]) if place and label != -100]
        logprobs = output.logits[0].log_softmax(-1)
        expected.append([logprobs[place - 1, label].item() for place, label in targets])
        own += output.loss.item() * len(targets)
    step = StepCollator(dedup=dedup, max_tokens=8)(FEATURES)
    assert len(step.micro_batches) > 1 and step.num_labels == NUM_LABELS
    with torch.no_grad():
        loss = sum(module.loss_sum(batch).item() for batch in step.micro_batches)
    assert loss == pytest.approx(-sum(map(sum, expected)), rel=1e-12)
    assert loss == pytest.approx(own, rel=1e-12)
    step = StepCollator(dedup=dedup, max_tokens=8, merge_labels=False)(FEATURES)
    with torch.no_grad():
        records = module.predict_step(replace(step, where=tuple("abc")), 0)
    for record, feature, logprobs in zip(records, FEATURES, expected, strict=True):
        assert record["tokens"] == [label for label in feature["labels"][1:] if label != -100]
        assert record["logprobs"] == pytest.approx(logprobs, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "activation_checkpointing"),
    cases(
        [(name, on) for name, dedup in ARMS for on in (False, True) if dedup and name != "Qwen3ForCausalLM"],
        [("BertLMHeadModel", False), ("Gemma2ForCausalLM", True), ("an adapter on the head", False)],
    ),
)
def test_gradients(name: str, activation_checkpointing: bool, tmp_path: Path) -> None:
    """Every parameter, the head's own layers among them, against Hugging Face on each sequence in float64."""
    module = loaded(name, tmp_path, activation_checkpointing=activation_checkpointing)
    report = verify_step(module.model, module.loss_sum, FEATURES, StepCollator(max_tokens=8))
    assert report.passed, str(report)
    assert max(tensor.radix for tensor in report["float64"].alive) <= 1e-12
    assert LAYERS_OF_HEAD.get(name, set()) <= {tensor.name for tensor in report["float64"].alive}


def test_a_plain_head_stays_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_the_trial: None) -> None:
    """Neither arm of a Qwen3 calls its head, in training, validation and `predict`."""
    for dedup in (True, False):
        module = loaded("Qwen3ForCausalLM", tmp_path, dedup=dedup)
        called = position_wise(lambda hidden: pytest.fail("the head was called"))
        monkeypatch.setattr(module.model.lm_head, "forward", called)
        assert module.plain_head is True
        for batch in StepCollator(dedup=dedup)(FEATURES).micro_batches:
            module.loss_sum(batch).backward()
        step = StepCollator(dedup=dedup, merge_labels=False)(FEATURES)
        module.predict_step(replace(step, where=tuple("abc")), 0)


@pytest.mark.parametrize("dedup", [False, True])
def test_a_micro_batch_without_labels(dedup: bool, tmp_path: Path) -> None:
    """A sequence in which nothing is labelled has a micro-batch of its own if it is long."""
    module = loaded("BertLMHeadModel", tmp_path, dedup=dedup)
    features = [{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}]
    loss = module.loss_sum(StepCollator(dedup=dedup)(features).micro_batches[0])
    loss.backward()
    assert loss.item() == 0 and not any(p.grad.any() for p in module.parameters() if p.grad is not None)
    step = StepCollator(dedup=dedup, merge_labels=False)(features)
    assert module.predict_step(replace(step, where=("a",)), 0) == [{"row": "a", "tokens": [], "logprobs": []}]


def test_a_model_that_was_not_loaded_here_is_measured_when_it_is_used(tmp_path: Path) -> None:
    module = RadixModule("unused")
    module.model = tiny_model("GraniteForCausalLM", **SIZES, **FAMILIES["GraniteForCausalLM"])
    module.loss_sum(StepCollator(dedup=False)(FEATURES).micro_batches[0])
    assert module.plain_head is False


class TestUnderTheTrainerOfAUser:
    """A script of one's own: Lightning's trainer, `RadixModule` and `SFTData`, without our command line."""

    @staticmethod
    def parts(shop: Path, folder: Path, **settings: Any) -> tuple[L.Trainer, RadixModule, SFTData]:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=CSVLogger(folder, name="logs"),
            callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
            **quiet,
        )
        model = str(shop / "model")
        sizes = {"batch_size": 4, "max_tokens": 4096, "dataloader_num_workers": 0}
        data = SFTData(str(shop / "train.jsonl"), model_name_or_path=model, **sizes)
        return trainer, RadixModule(model, learning_rate=1e-2, **settings), data

    def test_it_is_the_run_of_the_command_line(self, shop: Path, tmp_path: Path, arguments: Any) -> None:
        """In every digit: the schedule knows the steps of an epoch, and the data know what recurrent layers cost."""
        trainer, module, data = self.parts(shop, tmp_path / "script")
        trainer.fit(module, datamodule=data)
        assert module.steps_per_epoch == data.steps_per_epoch == 5
        assert main(arguments()) == 0
        of_script = {step + 1: loss for step, loss in logged(tmp_path / "script").items()}  # Lightning counts from 0
        assert of_script == logged(tmp_path / "out")

    def test_it_resumes_inside_an_epoch(self, shop: Path, tmp_path: Path) -> None:
        trainer, module, data = self.parts(shop, tmp_path / "whole")
        trainer.fit(module, datamodule=data)
        trainer, module, data = self.parts(shop, tmp_path / "resumed")
        trainer.fit(module, datamodule=data, ckpt_path=tmp_path / "whole" / "step=7.ckpt")
        whole, resumed = logged(tmp_path / "whole"), logged(tmp_path / "resumed")
        assert resumed == {step: whole[step] for step in (7, 8, 9)}

    def test_epochs_that_the_trainer_limits(self, shop: Path, tmp_path: Path) -> None:
        """The schedule is that of the steps that are taken."""
        trainer, module, data = self.parts(shop, tmp_path / "limited")
        trainer.limit_train_batches = 0.6
        trainer.fit(module, datamodule=data)
        rates = logged(tmp_path / "limited", "learning_rate")
        cosine = [1e-2 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
        assert module.steps_per_epoch == 3 and list(rates.values()) == pytest.approx(cosine)
        trainer, module, data = self.parts(shop, tmp_path / "same rows")
        trainer.overfit_batches = 2
        with pytest.raises(UserError, match="overfit_batches: SFTData draws other rows in each epoch"):
            trainer.fit(module, datamodule=data)
