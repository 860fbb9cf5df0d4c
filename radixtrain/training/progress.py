"""The progress line of `fit`: what a person wants to see while it runs, on one line."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

__all__ = ["ProgressLine"]

SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "learning_rate": ("lr", "{:.1e}"),
    "grad_norm": ("grad_norm", "{:.2f}"),
    "packing_ratio": ("packing_ratio", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "computed_tokens_per_second": ("computed/s", "{:,.0f}"),
    "eval_loss": ("eval_loss", "{:.4f}"),
}


class ProgressLine(TQDMProgressBar):
    """Lightning's bar with short names and readable numbers. The loggers get the full names and all digits."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        return {short: form.format(metrics[name]) for name, (short, form) in SHOWN.items() if name in metrics}
