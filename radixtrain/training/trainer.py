"""Lightning's trainer with `verify`: does this model have ordinary Hugging Face's gradient on these data?"""

from __future__ import annotations

from typing import Any

import lightning as L

from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError
from radixtrain.training.checkpoint import check_weights, read_checkpoint
from radixtrain.training.module import RadixModule
from radixtrain.verification.report import EquivalenceReport

__all__ = ["Trainer"]


class Trainer(L.Trainer):
    """Lightning's trainer with one more method, `verify`."""

    def verify(
        self,
        model: RadixModule,
        datamodule: SFTData,
        num_steps: int = 1,
        num_sequences: int | None = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Compare the gradient of the first optimizer steps with that of ordinary Hugging Face, tensor by tensor.

        Args:
            num_steps: optimizer steps to compare, each from its own rows; the weights do not change.
            num_sequences: only the first ones of each step. Forward and backward run three times in float64 and twice
                in every other precision, which is slow for a large model on a CPU.
            ckpt_path: a `.ckpt` of the run, whose weights are used.

        Raises:
            UserError: a gradient or the loss is further from the truth than rounding explains.
        """
        for name, number in (("num_steps", num_steps), ("num_sequences", num_sequences)):
            if number is not None and number < 1:
                raise UserError(f"{name} must be at least 1, got {number}")
        self._place(model, ckpt_path)
        model.trainer = self
        datamodule.step_cost = model.step_cost
        collator = datamodule.step_collator()
        available = datamodule.steps_per_epoch
        failed: list[tuple[int, EquivalenceReport]] = []
        for index in range(min(num_steps, available)):
            features = datamodule.features_of_step(index)[:num_sequences]
            report = model.verify(features, collator)
            print(f"step {index}: {_size_of(features)}\n{report}\n", flush=True)  # noqa: T201
            failed += [] if report.passed else [(index, report)]
        if failed:
            index, report = failed[0]
            raise UserError(f"verify: step {index}: {report.reason}")
        print(f"verified: {min(num_steps, available)} of {available} steps of an epoch")  # noqa: T201

    def _place(self, model: RadixModule, ckpt_path: str | None) -> None:
        """Load the weights of the checkpoint; convert and move the model as a run does."""
        if ckpt_path is not None:
            weights = read_checkpoint(ckpt_path)["state_dict"]
            check_weights(model, weights)
            model.load_state_dict(weights)
        self.precision_plugin.convert_module(model)
        model.to(self.strategy.root_device)


def _size_of(features: Any) -> str:
    num_tokens = sum(len(feature["input_ids"]) for feature in features)
    return f"{len(features)} sequences, {num_tokens:,} tokens"
