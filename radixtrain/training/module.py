"""`RadixModule`: a Hugging Face causal language model under Lightning, one optimizer step per DataLoader item."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.hf.calibration import calibrate
from radixtrain.hf.head import has_plain_head, hidden_rows, logits_rows
from radixtrain.hf.prepare import pretrained_model_of
from radixtrain.loss import linear_cross_entropy, logits_cross_entropy, logits_logprobs, prediction_logprobs
from radixtrain.training.checkpoint import check_weights
from radixtrain.training.loading import load_trainable
from radixtrain.tree.cost_model import Rates, StepCost
from radixtrain.tree.layout import sequences_of
from radixtrain.verification.oracle import Features
from radixtrain.verification.report import EquivalenceReport
from radixtrain.verification.step import verify_step

__all__ = ["RadixModule"]

logger = logging.getLogger(__name__)

TARGET_KEYS = (
    "shift_labels", "labels", "prediction_rows", "loss_weights", "radix_prediction_rows", "radix_loss_weights",
    "radix_label_indices",
)  # fmt: skip


class RadixModule(L.LightningModule):
    """Supervised fine-tuning with AdamW, warm-up and a schedule, normalised by the labelled tokens of the whole step.

    Head and loss are fused if the head is one matrix. Any other head (layers before the matrix, scaled or capped
    logits, an adapter) computes its own logits, [P, vocabulary] of the P predictions of a micro-batch: then memory for
    these is bounded by `data.max_tokens` only. A line in the log says which it is.

    Args:
        model_name_or_path: a Hugging Face folder or hub name.
        dtype: of the weights and the computation; `auto` takes the checkpoint's. For mixed precision leave float32 and
            set `trainer.precision`.
        attention: how attention uses the tree: auto, cascade, path, expand or reference.
        kernel: which attention kernel: auto, torch, flash_attn, flash_attn_3 or eager.
        attn_implementation: Hugging Face attention of the ordinary arm, with `dedup: false`.
        allow_dropout: dropout modules to accept by name although a shared token then draws one mask, not one per copy.
        learning_rate: peak, of AdamW.
        lr_scheduler_type: what the learning rate does after the warm-up, of transformers' `get_scheduler`.
        warmup_steps: optimizer steps of linear warm-up; below 1, a share of all steps.
        weight_decay: on matrices; norms and biases have none.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: added to the root of the second moment.
        max_grad_norm: gradients are scaled down to this norm; 0 turns it off.
        activation_checkpointing: recompute activations in the backward pass: less memory, a third more time.
        use_peft: train LoRA adapters and leave the weights.
        lora_r: rank of the adapters.
        lora_alpha: their scale, times `1 / lora_r`.
        lora_dropout: must be 0 with dedup unless `allow_dropout` names it.
        lora_target_modules: names of the layers that get one; `all-linear` for every one but the head. The head can be
            named if it is not tied to the embedding.
        dedup: False for the ordinary baseline: stock attention on padded batches.
        verify_first_batch: before training, compare the gradient of the first optimizer step with ordinary Hugging
            Face's, and stop where they differ; see the command `verify`.
    """

    hparams: Any  # Lightning's own type knows no attribute

    def __init__(
        self,
        model_name_or_path: str,
        dtype: Literal["auto", "float32", "bfloat16", "float64"] = "float32",
        attention: Literal["auto", "cascade", "path", "expand", "reference"] = "auto",
        kernel: Literal["auto", "torch", "flash_attn", "flash_attn_3", "eager"] = "auto",
        attn_implementation: str = "sdpa",
        allow_dropout: list[str] | None = None,
        learning_rate: float = 2e-5,
        lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"] = "cosine",
        warmup_steps: float = 0.0,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
        activation_checkpointing: bool = False,
        use_peft: bool = False,
        lora_r: int = 16,
        lora_alpha: int = 32,
        lora_dropout: float = 0.0,
        lora_target_modules: list[str] | str = "all-linear",
        dedup: bool = True,
        verify_first_batch: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.model: nn.Module | None = None
        self.plain_head: bool | None = None
        self.speed = _Speed()
        self.rates: Rates | None = None
        for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm"):
            if self.hparams[name] < 0:
                raise UserError(f"model.{name} must not be negative, got {self.hparams[name]}")

    def configure_model(self) -> None:
        """Load and prepare the model, and look at its head, once, before a checkpoint is restored into it."""
        if self.model is None:
            self.model = load_trainable(self.hparams)
            self.plain_head = has_plain_head(self.model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The rates too: a run that is resumed on another machine chooses as it did before."""
        checkpoint["radixtrain_rates"] = None if self.rates is None else asdict(self.rates)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_weights(self, checkpoint["state_dict"])
        rates = checkpoint.get("radixtrain_rates")
        self.rates = None if rates is None else Rates(**rates)

    def configure_optimizers(self) -> Any:
        hparams = self.hparams
        optimizer = torch.optim.AdamW(
            _parameter_groups(self, hparams.weight_decay),
            lr=hparams.learning_rate,
            betas=(hparams.adam_beta1, hparams.adam_beta2),
            eps=hparams.adam_epsilon,
        )
        num_steps = _num_steps(self.trainer)
        warmup = hparams.warmup_steps
        num_warmup = round(warmup * num_steps) if warmup < 1 else int(warmup)
        scheduler = get_scheduler(hparams.lr_scheduler_type, optimizer, num_warmup, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, step: dict[str, Any], index: int) -> None:
        """One optimizer step over its micro-batches."""
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for batch in step["micro_batches"]:
            share = self.loss_sum(batch) / step["num_labels"]
            self.manual_backward(share)
            loss += share.detach()
        grad_norm = self._clip()
        _check_finite(loss, grad_norm, step["rows"], self.global_step)
        optimizer.step()
        learning_rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        self._log_step(step, {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate})

    def validation_step(self, step: dict[str, Any], index: int) -> None:
        self._log_mean_loss("eval_loss", step)

    def test_step(self, step: dict[str, Any], index: int) -> None:
        self._log_mean_loss("test_loss", step)

    def predict_step(self, step: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """Per sequence: where it came from, its labelled tokens, and the log-probability of each."""
        records: list[dict[str, Any]] = [{"row": row, "tokens": [], "logprobs": []} for row in step["rows"]]
        for batch, members in zip(step["micro_batches"], step["members"], strict=True):
            targets = _Targets.of(batch)
            logprobs = self._logprobs(batch, targets)
            for sequence, label, logprob in _in_order(batch, targets.labels, logprobs):
                records[members[sequence]]["tokens"].append(label)
                records[members[sequence]]["logprobs"].append(logprob)
        return records

    def loss_sum(self, batch: dict[str, Any]) -> Tensor:
        """Cross-entropy summed over the labelled original tokens of a micro-batch; a float32 scalar."""
        targets = _Targets.of(batch)
        rows, head = self._predicting(batch)
        if head is None:
            return logits_cross_entropy(rows, targets.labels, targets.rows, targets.weights)
        return linear_cross_entropy(rows, head.weight, targets.labels, targets.rows, targets.weights, head.bias)

    def on_train_start(self) -> None:
        if self.hparams.verify_first_batch:
            self._verify_first_batch()
        self.speed.start()

    def on_train_epoch_start(self) -> None:
        self.speed.start()  # validation between the epochs is not training

    def step_cost(self) -> StepCost | None:
        """What `data.min_shared_tokens: auto` chooses by: calibrated once, before the first batch is collated.

        None, and every branch is taken, for `attention: reference` and on a device that is neither a CPU nor CUDA.
        """
        if self.model is None or self.hparams.attention == "reference" or self.device.type not in ("cpu", "cuda"):
            return None
        dtype = torch.bfloat16 if str(self.trainer.precision).startswith("bf16") else None
        hparams = self.hparams
        try:
            cost = calibrate(
                self.model, attention=hparams.attention, kernel=hparams.kernel, dtype=dtype, rates=self.rates
            )
        except ValueError as error:
            raise UserError(f"model.kernel: {error}") from None
        self.rates = cost.rates
        return cost

    def verify(self, features: Features, collator: StepCollator) -> EquivalenceReport:
        """Whether an optimizer step of these sequences has the gradient that ordinary Hugging Face gives it.

        features: the sequences of the step; see `SFTData.features_of_step`. collator: what cuts them in training.
        """
        assert self.model is not None
        return verify_step(
            self.model, self.loss_sum, features, collator,
            attention=self.hparams.attention, kernel=self.hparams.kernel, precision=str(self.trainer.precision),
        )  # fmt: skip

    def _verify_first_batch(self) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "features_of_step"):
            raise UserError("model.verify_first_batch needs SFTData: it compares with sequences that are not collated")
        collator = data.step_collator(module=self)
        report = self.verify(data.features_of_step(0), collator)
        if not report.passed:
            raise UserError(f"model.verify_first_batch: {report.reason}. Nothing was trained")
        logger.info("first batch verified:\n%s", report)

    def _logprobs(self, batch: dict[str, Any], targets: _Targets) -> Tensor:
        """(P,). The log-probability of every prediction of a micro-batch."""
        rows, head = self._predicting(batch)
        if head is None:
            return logits_logprobs(rows, targets.labels, targets.rows)
        return prediction_logprobs(rows, head.weight, targets.labels, targets.rows, head.bias)

    def _predicting(self, batch: dict[str, Any]) -> tuple[Tensor, nn.Linear | None]:
        """Hidden rows that predict, (R, D), and the head that is to be fused; or their logits, (R, V), and None."""
        assert self.model is not None
        if self.plain_head is None:  # a model that `configure_model` did not load
            self.plain_head = has_plain_head(self.model)
        inputs = {name: value for name, value in batch.items() if name not in TARGET_KEYS}
        if self.plain_head:
            return hidden_rows(self.model, inputs), pretrained_model_of(self.model).get_output_embeddings()
        return logits_rows(self.model, inputs), None

    def _clip(self) -> Tensor:
        limit = self.hparams.max_grad_norm or float("inf")
        return nn.utils.clip_grad_norm_([p for p in self.parameters() if p.grad is not None], limit)

    def _log_step(self, step: dict[str, Any], values: dict[str, Any]) -> None:
        effective, computed = self.speed.add(step["num_tokens"], step["num_computed_tokens"])
        ratio = step["num_tokens"] / step["num_computed_tokens"]
        rates = {"packing_ratio": ratio, "tokens_per_second": effective, "computed_tokens_per_second": computed}
        self.log_dict({**values, **rates}, prog_bar=True, batch_size=1)

    def _log_mean_loss(self, name: str, step: dict[str, Any]) -> None:
        """Lightning's mean over steps, weighted by their labelled tokens: the mean over tokens."""
        loss = sum(self.loss_sum(batch) for batch in step["micro_batches"])
        mean = loss / step["num_labels"]
        self.log(name, mean, on_epoch=True, on_step=False, prog_bar=True, batch_size=step["num_labels"])


class _Targets:
    """What the predicting rows predict: labels (P), rows (P), weights (P), as `linear_cross_entropy` takes them."""

    def __init__(self, labels: Tensor, rows: Tensor, weights: Tensor):
        self.labels, self.rows, self.weights = labels, rows, weights

    @classmethod
    def of(cls, batch: dict[str, Any]) -> _Targets:
        labels = batch["shift_labels"][0]
        if "radix_predictor_indices" not in batch:
            return cls(labels, batch["prediction_rows"], batch["loss_weights"])
        if "radix_prediction_rows" in batch:
            return cls(labels, batch["radix_prediction_rows"], batch["radix_loss_weights"])
        bears_loss = labels >= 0  # one hidden row a prediction; the filler that keeps P apart from U weighs nothing
        rows = torch.arange(len(labels), device=labels.device)
        return cls(labels.clamp(min=0), rows, bears_loss.float())


class _Speed:
    """Tokens per second of the last step and of the whole run: effective ones (T) and computed ones (rows)."""

    def __init__(self) -> None:
        self.num_tokens = self.num_computed_tokens = 0
        self.seconds = self.last = 0.0

    def start(self) -> None:
        self.last = time.perf_counter()

    def add(self, num_tokens: int, num_computed_tokens: int) -> tuple[float, float]:
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        self.seconds += elapsed
        self.num_tokens += num_tokens
        self.num_computed_tokens += num_computed_tokens
        return num_tokens / elapsed, num_computed_tokens / elapsed


def _in_order(batch: dict[str, Any], labels: Tensor, logprobs: Tensor) -> list[tuple[int, int, float]]:
    """(sequence of the micro-batch, label, log-probability) of every labelled token, in the order of the tokens."""
    if "radix_label_indices" in batch:
        kept = batch["shift_labels"][0] >= 0
        tokens = batch["radix_label_indices"]
        sequences = sequences_of(tokens, batch["radix_cu_seqlens"])
    else:
        kept = torch.ones_like(labels, dtype=torch.bool)
        tokens = batch["predictor_indices"]
        sequences = tokens // batch["input_ids"].shape[1]
    order = tokens[kept].argsort(stable=True)
    columns = (column[kept][order].tolist() for column in (sequences, labels, logprobs))
    return list(zip(*columns, strict=True))


def _check_finite(loss: Tensor, grad_norm: Tensor, rows: list[str], step: int) -> None:
    """Stop before the optimizer step, with the rows that did it. The one place a step waits for the device."""
    if torch.isfinite(torch.stack([loss, grad_norm.to(loss.dtype)])).all():
        return
    shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    raise UserError(
        f"loss {loss.item()} and grad_norm {grad_norm.item()} at step {step} are not both finite; the weights were "
        f"not changed. Rows of this step: {shown}"
    )


def _num_steps(trainer: L.Trainer) -> int:
    """Optimizer steps of the whole run.

    Not `trainer.estimated_stepping_batches` where the data module knows: that sets up the loader before a checkpoint is
    restored, after which Lightning (2.6.6) does not give it its state back, and a resumed run repeats data.
    """
    per_epoch = getattr(getattr(trainer, "datamodule", None), "steps_per_epoch", None)
    if per_epoch is None:
        return int(trainer.estimated_stepping_batches)
    if trainer.max_epochs in (None, -1):
        return trainer.max_steps
    limit = trainer.limit_train_batches
    per_epoch = min(per_epoch, limit) if isinstance(limit, int) else int(per_epoch * limit)
    num_steps = per_epoch * int(trainer.max_epochs or 0)
    return num_steps if trainer.max_steps == -1 else min(num_steps, trainer.max_steps)


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
