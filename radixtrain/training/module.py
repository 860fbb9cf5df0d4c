"""`RadixModule`: a Hugging Face causal language model as a LightningModule, one optimizer step per DataLoader item."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from radixtrain.checkpoints.tensors import whole
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.data.prompts import Prompt
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.share import options_of, share_prefixes
from radixtrain.hf.sharing_report import warn_of_rounding
from radixtrain.settings.sections import ModelSettings
from radixtrain.training.answers.answering import check_answering
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFiniteGuard, check_weights_finite
from radixtrain.training.fault_tolerance.run_state import Position, seed_per_rank
from radixtrain.training.optimizer import num_steps_of_run, optimizer_of, schedule
from radixtrain.training.progress import Speed
from radixtrain.training.start.loading import check_draws, check_length, load_trainable
from radixtrain.verification.equivalence import EquivalenceReport, verify_step
from radixtrain.verification.oracle import Features

if TYPE_CHECKING:
    from radixtrain.training.answers.predictions import PredictedAnswers

logger = logging.getLogger(__name__)


class RadixModule(L.LightningModule):
    """Supervised fine-tuning with warm-up and a schedule. The loss is a mean over the labelled tokens of a step.

    Head and loss are fused if the head is one matrix. Any other head (layers before the matrix, scaled or capped
    logits, an adapter) computes its own logits, [P, vocabulary] of the P predictions of a micro-batch: then only
    `data.max_tokens` bounds the memory for these, and a line in the log says so.
    """

    hparams: Any  # Lightning's own type has no attributes

    def __init__(self, model_name_or_path: str, **settings: Any):
        """Take fields of `ModelSettings`, which raises UserError for any other."""
        super().__init__()
        self.save_hyperparameters(vars(ModelSettings(model_name_or_path, **settings)))
        self.automatic_optimization = False
        self.model: nn.Module | None = None
        self.plain_head: bool | None = None
        self.speed = Speed()
        self.steps_per_epoch: int | None = None
        self.position = Position(0, 0)
        self.is_stepping = False
        """Whether the weights are being changed; a checkpoint saved then would be in the middle of a step."""
        self.generators_before_step: dict[str, Any] | None = None
        self.wandb_run = ""
        """The run at Weights & Biases. A checkpoint keeps it, and a resumed run continues it."""
        self.base_digest: str | None = None
        self.last_step: dict[str, Any] = {}
        """The metrics of the last step, as they were logged: reading a tensor among them waits for the device."""
        self.guard = NonFiniteGuard(self.hparams.on_nonfinite, self.hparams.max_skipped_steps)

    @cached_property
    def answers(self) -> PredictedAnswers:
        """Return the answers of `predict`."""
        from radixtrain.training.answers.predictions import PredictedAnswers  # here, since a run that trains has none

        return PredictedAnswers()

    def configure_model(self) -> None:
        """Load and share the model, and examine its head, once, before a checkpoint is restored into it."""
        if self.model is None:
            self.model = load_trainable(self.hparams)
            self.plain_head = has_plain_head(self.model)

    def check_draws(self) -> None:
        """Raise UserError for a dropout that the first step would refuse. Call it after `configure_model`."""
        assert self.model is not None
        check_draws(self.model, self.hparams)

    def check_length(self, longest: int) -> None:
        """Raise UserError for sequences of more tokens than the model takes. Call it after `configure_model`."""
        assert self.model is not None
        check_length(self.model, self.hparams, longest)

    def split_rows(self) -> None:
        """Let the ranks of a group compute each micro-batch together, if there are groups; see `form_groups`.

        Call it in each rank, after `configure_model`. Raises UserError if a group does not divide the query heads.
        """
        if ranks().sp_size > 1:
            assert self.model is not None
            options = options_of(self.model)
            assert options is not None
            share_prefixes(self.model, **options, sp_group=ranks().sp_group)

    def setup(self, stage: str) -> None:
        """Take the steps per epoch of an `SFTData`, once its data are read."""
        trainer: Any = self.trainer
        if isinstance(trainer, L.Trainer) and trainer.world_size > 1:
            raise UserError(
                "RadixModule trains on one device under Lightning's trainer; on several use `radixtrain fit`"
            )
        data = trainer.datamodule
        self.steps_per_epoch = None
        if isinstance(data, SFTData) and stage == "fit":
            if getattr(trainer, "overfit_batches", 0):
                raise UserError("overfit_batches: SFTData draws other rows in each epoch; give it a file of a few rows")
            steps, limit = data.steps_per_epoch, getattr(trainer, "limit_train_batches", 1.0)  # of Lightning's trainer
            self.steps_per_epoch = min(steps, limit) if isinstance(limit, int) else int(steps * limit)
        if stage == "predict" and self.hparams.generate:
            check_answering(self.model, data.tokenizer(), data.first_prompt(), self.answers.options)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.hparams)
        warn_of_rounding(optimizer)
        scheduler = schedule(optimizer, self.hparams, num_steps_of_run(self.trainer, self.steps_per_epoch))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, step: Step, index: int) -> None:
        """Take one optimizer step under Lightning's trainer, which logs its metrics."""
        optimizer: Any = self.optimizers()

        def accumulate(batch: dict[str, Any], divisor: float, is_last: bool) -> Tensor:
            share = self.loss_sum(batch) / divisor
            self.manual_backward(share)
            return share.detach()

        if metrics := self.take_step(step, optimizer, self.lr_schedulers(), accumulate):
            self.log_dict(metrics, prog_bar=True, batch_size=1)

    def take_step(
        self, step: Step, optimizer: Any, scheduler: Any, accumulate: Callable[[dict[str, Any], float, bool], Tensor]
    ) -> dict[str, Any]:
        """Take one optimizer step over its micro-batches: those of this rank, whose gradients all ranks average.

        accumulate: computes the loss of a micro-batch, divided by a number, adds its gradient, and returns it detached;
            its last argument says whether this is the last micro-batch of the step, after which the gradients are means
            over the ranks.

        Returns the metrics of the step; none if it was left out, since its loss or gradient is not finite.
        """
        optimizer.zero_grad()
        loss, size, metrics = torch.zeros((), device=self.device), ranks().size, dict[str, Any]()
        for number, batch in enumerate(step.micro_batches, start=1):
            loss += accumulate(batch, step.num_labels / size, number == len(step.micro_batches))
        loss, grad_norm = ranks().sum(loss) / size, self._clip()
        position = self.position
        if self.guard.allows(self, loss, grad_norm, step.where, position.num_steps):
            self.is_stepping = True
            optimizer.step()
            learning_rate = optimizer.param_groups[0]["lr"]
            scheduler.step()
            metrics = self._metrics(step, {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate})
        self.position = Position(position.num_batches + 1, position.num_steps + bool(metrics))
        self.is_stepping, self.generators_before_step = False, None
        return metrics

    def validation_step(self, step: Step, index: int) -> None:
        self._log_mean_loss("eval_loss", step)

    def test_step(self, step: Step, index: int) -> None:
        self._log_mean_loss("test_loss", step)

    def predict_step(self, step: Step | list[Prompt], index: int) -> list[dict[str, Any]]:
        """Return the file row, or None, and the log-probabilities of each sequence, or the answer to each prompt."""
        from radixtrain.training.answers.predictions import scored_records

        assert self.model is not None
        if not isinstance(step, Step):
            trainer: Any = self.trainer
            return self.answers.records(self.model, step, trainer.datamodule.tokenizer())
        return scored_records(self.model, step, self._has_plain_head())

    def loss_sum(self, batch: dict[str, Any]) -> Tensor:
        """Sum the cross-entropy over the labelled original tokens of a micro-batch; a float32 scalar."""
        assert self.model is not None
        return forward_rows(self.model, batch, self._has_plain_head()).loss_sum()

    def on_train_start(self) -> None:
        check_weights_finite(self, "fit cannot start")
        if self.hparams.verify_first_batch:
            self._verify_first_batch()
        seed_per_rank()
        self.speed.start()

    def on_validation_start(self) -> None:
        check_weights_finite(self, "the weights cannot be evaluated")

    on_test_start = on_validation_start

    def on_predict_start(self) -> None:
        check_weights_finite(self, "predict cannot start")

    def on_train_end(self) -> None:
        check_weights_finite(self, "the last step of the run damaged the weights")

    def on_train_epoch_start(self) -> None:
        self.speed.start()  # validation between epochs does not count as training

    on_validation_end = on_train_epoch_start  # nor does one inside an epoch

    def verify(self, features: Features, collator: StepCollator) -> EquivalenceReport:
        """Check whether an optimizer step of these sequences has the gradient of ordinary Hugging Face.

        features: the sequences of the step; see `SFTData.features_of_step`.
        collator: the one that cuts them in training.
        """
        assert self.model is not None
        return verify_step(
            self.model,
            self.loss_sum,
            features,
            collator,
            attention=self.hparams.attention,
            kernel=self.hparams.kernel,
            precision=str(self.trainer.precision),
        )

    def _verify_first_batch(self) -> None:
        """Raise UserError if the first step, of all ranks, differs from ordinary Hugging Face. Rank 0 compares."""
        trainer: Any = self.trainer
        data = trainer.datamodule
        if not isinstance(data, SFTData):
            raise UserError("model.verify_first_batch needs SFTData: it compares with sequences that are not collated")
        collator = data.step_collator()  # of the whole step
        report = ranks().broadcast_from_rank0(
            lambda: self.verify(data.features_of_step(0), collator), long_timeout=True
        )
        if not report.passed:
            raise UserError(f"model.verify_first_batch: {report.reason}. Nothing was trained")
        logger.info("first batch verified:\n%s", report)

    def _metrics(self, step: Step, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics with how much the step shared and how fast it was, of all ranks."""
        step = replace(step, num_computed_tokens=ranks().total(step.num_computed_tokens)[0])
        metrics["tokens_per_second"], metrics["computed_tokens_per_second"] = self.speed.add(step)
        metrics["r"] = step.num_ordinary_tokens / step.num_computed_tokens
        if step.num_unique_tokens:
            metrics["best_r"] = step.num_ordinary_tokens / step.num_unique_tokens
        self.last_step = metrics
        return metrics

    def evaluated(self, name: str, step: Step) -> Tensor | None:
        """Return the loss of a step, summed over its labelled tokens on all ranks.

        The guard raises for a loss that is not finite, or leaves the step out: None. name: of the loss.
        """
        loss: Any = sum(map(self.loss_sum, step.micro_batches))
        total = ranks().sum(loss)
        is_fit = self.trainer.state.fn == "fit"
        return total if self.guard.accepts(name, total / step.num_labels, step.where, is_fit) else None

    def _log_mean_loss(self, name: str, step: Step) -> None:
        """Log Lightning's mean over steps, weighted by labelled tokens: the mean over tokens, the same on all ranks."""
        total = self.evaluated(name, step)
        if total is not None:
            mean = total / step.num_labels
            self.log(name, mean, on_epoch=True, on_step=False, prog_bar=True, batch_size=step.num_labels)

    def _has_plain_head(self) -> bool:
        assert self.model is not None
        if self.plain_head is None:  # a model that `configure_model` did not load
            self.plain_head = has_plain_head(self.model)
        return self.plain_head

    def _clip(self) -> Tensor:
        limit = self.hparams.max_grad_norm or float("inf")
        norm = whole(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))
        nn.utils.clip_grads_with_norm_(self.parameters(), limit, norm)
        return norm
