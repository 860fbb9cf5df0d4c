"""A Lightning callback, for modules and configurations that take callbacks by name."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L

from radixtrain.hf.share import share_prefixes, sharing_report
from radixtrain.plugins.from_pretrained import LoadedModel


class SharePrefixesCallback(L.Callback):
    """Shares the Hugging Face model in a module before a strategy wraps it; prints what was shared after training.

    options: of `share_prefixes`, whose errors it raises. A module that makes its model in `configure_model` must call
        that function itself.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        share_prefixes(pl_module, **self.options)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            sys.stderr.write(f"{LoadedModel('model', report=vars(sharing_report(pl_module)))}\n")
