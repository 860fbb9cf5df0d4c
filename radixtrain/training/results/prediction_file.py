"""`predictions.jsonl`: what `predict` writes, a line for each sequence."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import lightning as L

from radixtrain.checkpoints.atomic import sync_folder
from radixtrain.collators.steps import Step
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.training.results.run_progress import print_line
from radixtrain.training.speed import Speed

NOT_FINITE = re.compile(r"(?<![\w\"])(NaN|-?Infinity)(?![\w\"])")


class PredictionWriter(L.Callback):
    """Writes `predictions.jsonl`: one line for each sequence, with its scores or its answer, in the order of the file.

    {"row": "test.jsonl:1", "tokens": [3, 17], "logprobs": [-0.12, -0.03]}
    {"row": "test.jsonl:1", "answer": "Shelf two.", "num_tokens": 4, "logprob": -0.31, "finish_reason": "stop"}

    The file appears when it is complete and on the disk; nothing is left of one that is not. Then it prints where it
    is, r, and sequences and tokens per second.
    """

    def __init__(self, output_dir: Path):
        self.path = output_dir / "predictions.jsonl"
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self.num_sequences = 0
        self.speed = Speed()

    def on_predict_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.speed.start()
        if not ranks().is_first:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_text("", encoding="utf-8")

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if not ranks().is_first:
            return
        with self.partial.open("a", encoding="utf-8") as file:
            file.writelines(f"{_as_json(record)}\n" for record in outputs)
        self.num_sequences += len(outputs)
        if isinstance(batch, Step):
            self.speed.add(batch)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if ranks().is_first:
            self.partial.unlink(missing_ok=True)

    def on_predict_end(self, trainer: L.Trainer, module: Any) -> None:
        if not ranks().is_first:
            return
        with self.partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.partial, self.path)
        sync_folder(self.path.parent)
        print_line("predictions", f"{self.path} ({self.num_sequences} sequences)")
        if module.hparams.generate:
            print_line("r", str(module.answers.speed))
        if self.speed.seconds:
            effective, computed = self.speed.rates
            per_second = f"{self.num_sequences / self.speed.seconds:,.1f} sequences/s"
            rates = f"{per_second}, {effective:,.0f} tokens/s effective, {computed:,.0f} computed"
            print_line("r", f"{self.speed.r:.2f} tokens per computed token; {rates}, {self.speed.seconds:.0f} s")


def _as_json(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        name = next(name for name, value in record.items() if NOT_FINITE.search(json.dumps(value)))
        raise UserError(
            f"predict: {name} of {record['row']} is not finite, which JSON cannot hold; 16 bits may overflow, so try "
            f"model.dtype: float32"
        ) from None
