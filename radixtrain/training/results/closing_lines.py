"""The lines that a run ends with: what it reached, how fast it was, why it ended, and the folders it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from radixtrain.distributed import ranks
from radixtrain.training.results.reached import Exported, Reached
from radixtrain.training.speed import Speed

__all__ = ["advice", "best_of_callbacks", "results", "say", "say_all"]

WIDTH = 12  # of the names

CUT_COST = 0.2  # share of computed tokens that a cut may add before the closing lines advise against it


def say(name: str, text: object, width: int = WIDTH) -> None:
    """A line on stdout. width: of its name. Of several ranks, the first one speaks."""
    if ranks().is_first:
        Console(soft_wrap=True, highlight=False, markup=False).print(f"{name:<{width}} {text}")


def say_all(lines: Mapping[str, str]) -> None:
    """Lines with their texts in one column, without those that have no text."""
    told = {name: text for name, text in lines.items() if text}
    width = max([WIDTH, *map(len, told)])
    for name, text in told.items():
        say(name, text, width)


def results(reached: Reached, exported: Exported, speed: Speed) -> dict[str, str]:
    """What the run reached, by name. Nothing if no step was taken.

    exported: the weights whose validation counts. speed: of this process.
    """
    if reached.first_loss is None:
        return {}
    entries = {
        "loss": f"{reached.first_loss:.4f} -> {reached.last_step['loss']:.4f} in {reached.step:,} steps",
        **_validation(exported),
    }
    if not speed.seconds:
        return entries
    effective, computed = speed.num_tokens / speed.seconds, speed.num_computed_tokens / speed.seconds
    seconds = f"{speed.seconds:.0f} s of training"
    if reached.seconds > speed.seconds:
        seconds += f" since the run went on, {reached.seconds:.0f} s in all"
    on = f" on {ranks().size} ranks" if ranks().size > 1 else ""
    rates = f"{effective:,.0f} effective, {computed:,.0f} computed{on}, {seconds}"
    return {**entries, "r": _sharing(speed), "tokens/s": rates}


def advice(speed: Speed) -> str:
    """Nothing, unless `data.max_tokens` cuts steps and costs more than `CUT_COST`."""
    per_step = speed.num_micro_batches / max(1, speed.num_steps)
    if speed.best_r is None or per_step <= 1 or speed.best_r < (1 + CUT_COST) * speed.r:
        return ""
    return (
        f"data.max_tokens cuts a step into {per_step:.1f} micro-batches on average, which repeat what they share: if "
        f"memory allows, a larger one raises r up to {speed.best_r:.2f}"
    )


def best_of_callbacks(trainer: Any) -> str:
    """The checkpoints with the best value of a metric, of callbacks of the user that watch one."""
    watching = [each for each in trainer.checkpoint_callbacks if getattr(each, "monitor", None)]
    found = [each for each in watching if each.best_model_path and Path(each.best_model_path).exists()]
    return ", ".join(f"{each.best_model_path} ({each.monitor} {each.best_model_score:.4f})" for each in found)


def _validation(exported: Exported) -> dict[str, str]:
    """What the exported weights were worth; if they had no validation, the step of the one before is said."""
    validation = exported.validation
    if validation is None:
        return {}
    place = "" if validation.step == exported.step else f" at step {validation.step:,}, the last validation"
    if exported.kind == "best":
        place = f" at step {validation.step:,}, whose weights are exported"
    by_place = sorted(validation.metrics, key=lambda name: (name != "eval_loss", name))
    return {name: f"{validation.metrics[name]:.4f}{place}" for name in by_place}


def _sharing(speed: Speed) -> str:
    """r, and what the cut into micro-batches leaves of what it could be."""
    text = f"{speed.r:.2f} tokens per computed token"
    return f"{text}, {speed.best_r:.2f} at best (each step one micro-batch)" if speed.best_r else text
