"""Callbacks for the trainers of Hugging Face and TRL: `r` in their logs, and what was shared when training ends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from radixtrain.hf.share import other_models, share_prefixes, sharing_report
from radixtrain.plugins.from_pretrained import LoadedModel
from radixtrain.screen import printable

if TYPE_CHECKING:
    from transformers import TrainingArguments


def log_sharing(trainer: Any) -> None:
    """Make a trainer log `r` beside its loss, to every tracker that it has, and print what was shared at the end.

    trainer: a `transformers.Trainer` or one of TRL's, with a model from `share_prefixes`.

    `r` is tokens per unique token of the model's calls in the training steps since the loss was last logged, without
    evaluations; each of several processes has its own. The last line covers all calls, as `sharing_report` does.

    Raises UserError for any other model.

    >>> trainer = Trainer(model, train_dataset=rows, data_collator=RadixCollator())
    >>> trainer.model = share_prefixes(trainer.model)
    >>> log_sharing(trainer)  # before trainer.train()
    """
    unshared = sharing_report(trainer).unshared_models
    callbacks = trainer.callback_handler.callbacks
    own = next((each for each in callbacks if isinstance(each, SharingCallback)), None)
    if own is None:
        others = {name: model for name, model in other_models(trainer).items() if name not in unshared}
        own = SharingCallback({"model": trainer.model, **others})
    else:
        callbacks.remove(own)
    callbacks.insert(0, own)  # first, so that callbacks that write logs see what it adds


class SharingCallback(TrainerCallback):
    """Adds `r` to the logs of a trainer, for the callbacks after it, and prints what was shared when training ends.

    models: shared models by name. The logged `r` is that of the first.
    """

    def __init__(self, models: dict[str, nn.Module] | None = None) -> None:
        self.models = models or {}
        self.before = self.in_steps = (0, 0)  # tokens, unique tokens

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.before = self._counted()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        columns = zip(self.in_steps, self._counted(), self.before, strict=True)
        num_tokens, num_unique_tokens = (total + now - before for total, now, before in columns)
        self.in_steps = num_tokens, num_unique_tokens

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        num_tokens, num_unique_tokens = self.in_steps
        if "loss" in logs and num_unique_tokens:
            for written in (logs, *state.log_history[-1:]):
                written["r"] = num_tokens / num_unique_tokens
            self.in_steps = (0, 0)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            lines = (LoadedModel(name, report=vars(sharing_report(model))) for name, model in self.models.items())
            sys.stderr.writelines(f"{printable(line)}\n" for line in lines)

    def _counted(self) -> tuple[int, int]:
        report = sharing_report(next(iter(self.models.values())))
        return report.num_tokens, report.num_unique_tokens


class SharePrefixesCallback(SharingCallback):
    """Shares the model of the trainer that it is passed to. `log_sharing(trainer)` moves it before the trackers.

    options: of `share_prefixes`, whose errors it raises.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Share the model before the trainer wraps it for several devices."""
        self.models["model"] = share_prefixes(model, **self.options)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: object = None,
        **kwargs: object,
    ) -> None:
        """Share the model for a callback that was added later, by `add_callback`."""
        if not self.models:
            self.on_init_end(args, state, control, model)
