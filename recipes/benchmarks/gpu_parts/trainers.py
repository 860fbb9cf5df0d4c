"""Trainers of other people, beside the same trainers with radixtrain: tokens a second, memory, and losses side by side.

All arms of a comparison train the same model on the same batches. The first arm is the ordinary one; `other order` is
the same with the rows of each batch reversed, and shows how far rounding alone takes the losses apart.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_parts.run import Run
from transformers import PrinterCallback, Trainer, TrainerCallback

from radixtrain.timing import peak_bytes

__all__ = ["OTHER_ORDER", "compare", "reversed_rows"]

OTHER_ORDER = "other order"
SIGNALS = {"loss": 2**-20, "grad_norm": 2**-7}
"""Of each step, in the log of the trainer, and the difference, relative above 1, that is only its own rounding: a loss
is a float32 of a few units, the norm of bfloat16 gradients a bfloat16."""
WARM_UP = 3  # steps whose time does not count


@dataclass
class Clock(TrainerCallback):
    """Seconds of each optimizer step, from the first forward pass of its micro-batches on."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    began: float = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self.began)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass
class Trained:
    """What a training has left. log: of each signal, a number for each step. peak: bytes beyond the weights."""

    log: dict[str, list[float]]
    seconds: list[float]
    peak: int

    def off_by(self, other: "Trained") -> dict[str, float]:
        """The largest difference of each signal in any step."""
        pairs = {name: zip(self.log[name], other.log[name], strict=True) for name in SIGNALS}
        return {name: max(abs(one - two) for one, two in each) for name, each in pairs.items()}


def compare(run: Run, who: str, tokens: int, arms: Mapping[str, Callable[[], Trainer]]) -> None:
    """Train each arm. tokens: of a step, without padding. The arms after `other order` are compared with its noise."""
    trained: dict[str, Trained] = {}
    for name, make in arms.items():
        if not run.has_time(f"{who}, {name}"):
            return
        try:
            trained[name] = _train(run, make)
        except Exception as error:  # of a trainer, or of too little memory; the others are still to be measured
            run.leave_out(f"{who}, {name}", f"{type(error).__name__}: {error}")
            continue
        run.found("trainers", f"{who}, {name}", **_measures(name, tokens, trained))


def _train(run: Run, make: Callable[[], Trainer]) -> Trained:
    gc.collect()  # a trainer holds itself, and with it the model and optimizer of the last arm
    trainer, clock = make(), Clock(run.device)
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    peak = peak_bytes(trainer.train, run.device)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained({name: [float(entry[name]) for entry in log] for name in SIGNALS}, clock.seconds, peak)


def _measures(name: str, tokens: int, trained: Mapping[str, Trained]) -> dict[str, Any]:
    ordinary, found = next(iter(trained.values())), trained[name]
    seconds, beside = (statistics.median(each.seconds[WARM_UP:] or each.seconds) for each in (found, ordinary))
    measures = {"tokens_per_second": tokens / seconds, "step_seconds": seconds, "speed_up": beside / seconds}
    measures |= {"peak_gigabytes": found.peak / 1e9}
    measures |= {"first_loss": found.log["loss"][0], "last_loss": found.log["loss"][-1]}
    if found is ordinary:
        return measures
    off = found.off_by(ordinary)
    measures |= {f"{signal}_off_by": each for signal, each in off.items()}
    if name != OTHER_ORDER and OTHER_ORDER in trained:
        noise = trained[OTHER_ORDER].off_by(ordinary)
        rounding = {signal: own * max(1.0, *map(abs, ordinary.log[signal])) for signal, own in SIGNALS.items()}
        measures["over_noise"] = max(off[signal] / max(noise[signal], rounding[signal]) for signal in SIGNALS)
    return measures


def reversed_rows(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A collator of the same rows in the other order."""

    def of_reversed(rows: Sequence[Any]) -> Any:
        return collate(list(rows)[::-1])

    return of_reversed
