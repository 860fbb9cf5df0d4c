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
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl

from radixtrain.timing import peak_bytes

__all__ = ["OTHER_ORDER", "Clock", "compare", "reversed_rows"]

OTHER_ORDER = "other order"
SIGNALS = {"loss": 2**-20, "grad_norm": 2**-7}
"""Of each step, in the log of the trainer, and the difference, relative above 1, that is only its own rounding: a loss
is a float32 of a few units, the norm of bfloat16 gradients a bfloat16."""
WARM_UP = 3  # steps whose time does not count


@dataclass
class Clock(TrainerCallback):
    """Seconds of each optimizer step, from the first forward pass of its micro-batches on.

    deadline: by `time.perf_counter`; the training stops at the first step that ends after it, but not in the warm-up.
    most: steps after which it stops.
    """

    device: torch.device
    deadline: float = float("inf")
    most: int | None = None
    seconds: list[float] = field(default_factory=list)
    began: float = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self._now()

    def on_step_end(self, _: Any, __: Any, control: TrainerControl, **___: Any) -> None:
        now = self._now()
        self.seconds.append(now - self.began)
        steps = len(self.seconds)
        if steps == self.most or (now > self.deadline and steps > WARM_UP):
            control.should_training_stop = True

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


def compare(
    run: Run, who: str, tokens: int, arms: Mapping[str, Callable[[], Trainer]], seconds: float | None = None
) -> None:
    """Train each arm. The first one stops when its share of the time is up; the others take as many steps.

    tokens: of a step, without padding. seconds: for all arms; by default what the part has left.
    Losses are compared with those of the first arm, and the difference with that of `other order`, its noise.
    """
    share = (run.seconds_left if seconds is None else seconds) / len(arms)
    deadline, most = time.perf_counter() + share, None
    ordinary, trained, measures = next(iter(arms)), dict[str, Trained](), dict[str, dict[str, Any]]()
    for name, make in arms.items():
        if not run.has_time(f"{who}, {name}"):
            return
        try:
            trained[name] = _train(make, Clock(run.device, deadline, most))
        except Exception as error:  # of a trainer, or of too little memory; the others are still to be measured
            run.leave_out(f"{who}, {name}", f"{type(error).__name__}: {error}")
            continue
        deadline, most = float("inf"), len(trained[name].seconds)
        run.found("trainers", f"{who}, {name}", **_measures(tokens, trained[name], trained.get(ordinary)))
        measures[name] = run.results[-1][2]
        if ordinary in trained and OTHER_ORDER in trained:
            for each in [each for each in trained if each not in (ordinary, OTHER_ORDER)]:
                measures[each]["over_noise"] = _over_noise(*(trained[one] for one in (each, ordinary, OTHER_ORDER)))
            run.write()


def _train(make: Callable[[], Trainer], clock: Clock) -> Trained:
    gc.collect()  # a trainer holds itself, and with it the model and optimizer of the last arm
    trainer = make()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    peak = peak_bytes(trainer.train, clock.device)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained({name: [float(entry[name]) for entry in log] for name in SIGNALS}, clock.seconds, peak)


def _measures(tokens: int, found: Trained, ordinary: Trained | None) -> dict[str, Any]:
    """ordinary: None if it could not be trained: then there is nothing beside it."""
    seconds = _median(found.seconds)
    measures: dict[str, Any] = {"tokens_per_second": tokens / seconds, "step_seconds": seconds}
    if ordinary is not None:
        measures["speed_up"] = _median(ordinary.seconds) / seconds
    measures |= {"peak_gigabytes": found.peak / 1e9, "steps": len(found.seconds)}
    measures |= {"first_loss": found.log["loss"][0], "last_loss": found.log["loss"][-1]}
    if ordinary is not None and ordinary is not found:
        measures |= {f"{signal}_off_by": off for signal, off in found.off_by(ordinary).items()}
    return measures


def _median(seconds: Sequence[float]) -> float:
    """Without those of the warm-up."""
    return statistics.median(seconds[WARM_UP:] or seconds)


def _over_noise(found: Trained, ordinary: Trained, other_order: Trained) -> float:
    """How far its losses and norms are from the ordinary ones, over how far those of another order are."""
    off, noise = found.off_by(ordinary), other_order.off_by(ordinary)
    rounding = {signal: own * max(1.0, *map(abs, ordinary.log[signal])) for signal, own in SIGNALS.items()}
    return max(off[signal] / max(noise[signal], rounding[signal]) for signal in SIGNALS)


def reversed_rows(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A collator of the same rows in the other order."""

    def of_reversed(rows: Sequence[Any]) -> Any:
        return collate(list(rows)[::-1])

    return of_reversed
