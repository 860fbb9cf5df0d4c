"""What a step logs: its metrics in training, and its part of the mean loss in an evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixtrain.collators.steps import Step
from radixtrain.distributed import ranks

__all__ = ["log_mean_loss", "log_step"]


def log_step(module: Any, step: Step, values: dict[str, Any]) -> None:
    """The values, how much the step shared and how fast it was, of all ranks. They stay in `module.last_step`, too.

    module: a `RadixModule`. values: loss, grad_norm and learning_rate of the step.
    """
    step = replace(step, num_computed_tokens=ranks().total(step.num_computed_tokens)[0])
    effective, computed = module.speed.add(step)
    sharing = {"r": step.num_tokens / step.num_computed_tokens}
    if step.num_unique_tokens:
        sharing["best_r"] = step.num_tokens / step.num_unique_tokens
    rates = {"tokens_per_second": effective, "computed_tokens_per_second": computed}
    module.last_step = {**values, **sharing, **rates}
    module.log_dict(module.last_step, prog_bar=True, batch_size=1)


def log_mean_loss(module: Any, name: str, step: Step) -> None:
    """Lightning's mean over steps, weighted by their labelled tokens: the mean over tokens, alike on all ranks.

    module: a `RadixModule`. name: eval_loss or test_loss.

    A loss that is not finite is the guard's: it raises, or leaves the step out.
    """
    loss: Any = sum(module.loss_sum(batch) for batch in step.micro_batches)
    mean = ranks().sum(loss) / step.num_labels
    if module.guard.accepts(name, mean, step.where, is_fit=module.trainer.state.fn == "fit"):
        module.log(name, mean, on_epoch=True, on_step=False, prog_bar=True, batch_size=step.num_labels)
