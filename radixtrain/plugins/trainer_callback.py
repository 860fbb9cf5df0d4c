"""A callback of Hugging Face's Trainer, for scripts and programs that take callbacks by name."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import TrainerCallback

from radixtrain.hf.prepare import share_prefixes, sharing_report
from radixtrain.plugins.from_pretrained import LoadedModel
from radixtrain.screen import printable


class SharePrefixesCallback(TrainerCallback):
    """Shares the model of a trainer that is made with it, and prints what was shared when training ends.

    options: of `share_prefixes`, whose errors it raises.
    models: those that are shared, by name.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.models: dict[str, nn.Module] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before the trainer wraps it for several devices."""
        self.models["model"] = share_prefixes(model, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """For a callback that came later, by `add_callback`."""
        if not self.models:
            self.on_init_end(args, state, control, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            lines = (LoadedModel(name, report=vars(sharing_report(model))) for name, model in self.models.items())
            sys.stderr.writelines(f"{printable(line)}\n" for line in lines)
