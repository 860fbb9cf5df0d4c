"""`summary.json`: what a run reached, for programs, and for those commands that evaluate its weights later."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.checkpoints.manifest import Manifest
from radixtrain.distributed import ranks
from radixtrain.training.results.best import Best, Validation
from radixtrain.training.results.ending import Ending
from radixtrain.training.results.model_card import versions
from radixtrain.training.results.reached import Exported, Reached
from radixtrain.training.speed import Speed

__all__ = ["SUMMARY", "weights_text", "write_summary"]

SUMMARY = "summary.json"


def write_summary(
    output_dir: Path,
    reached: Reached,
    speed: Speed,
    ending: Ending | None = None,
    best: Best | None = None,
    last: Path | None = None,
    exported: Exported | None = None,
) -> None:
    """Write `summary.json`, whole or not at all. Its paths are relative to its folder if they are inside.

    speed: of this process. ending: None while the run goes on, and if it was killed. last: the newest checkpoint.
    exported: None until `model/` is written.
    """
    record = {
        "ended": ending and {"reason": ending.reason, "text": ending.text, "complete": ending.is_complete},
        "steps": reached.step,
        "loss": {"first": reached.first_loss, "last": reached.last_step.get("loss")},
        "validation": _validation(reached.validation),
        "best": _best(best, output_dir),
        "last": last and _inside(last, output_dir),
        "exported": exported and _exported(exported),
        "seconds": round(reached.seconds, 3),
        "ranks": ranks().size,
        **_speed(speed),
        "logs": [{"path": _inside(Path(folder), output_dir), "first_step": step} for folder, step in reached.parts],
        "versions": versions(),
    }
    text = json.dumps(_finite(record), indent=2, allow_nan=False)
    with writing_file(output_dir / SUMMARY) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


def weights_text(model_name_or_path: str, ckpt_path: str | None) -> str:
    """Which weights `validate`, `test` or `predict` evaluates: the path; the step, if a run of ours wrote them."""
    if ckpt_path is not None:
        path = Path(ckpt_path)
        return f"{path} (step {Manifest.read(path).step:,})" if path.is_dir() else str(path)
    exported = _exported_as(Path(model_name_or_path))
    if not exported:
        return model_name_or_path
    return f"{model_name_or_path} (the {exported['weights']} weights of the run, of step {exported['step']:,})"


def _exported_as(folder: Path) -> dict[str, Any]:
    """What the summary beside a model folder says of it; nothing if there is no summary, or if it is damaged."""
    try:
        record = json.loads((folder.parent / SUMMARY).read_text(encoding="utf-8"))
        return record["exported"] if record["exported"]["path"] == folder.name else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _validation(validation: Validation | None) -> dict[str, Any] | None:
    return None if validation is None else {"step": validation.step, **validation.metrics}


def _best(best: Best | None, output_dir: Path) -> dict[str, Any] | None:
    if best is None or best.found is None or best.path is None:
        return None
    place = {"step": best.found.step, "path": _inside(best.path, output_dir)}
    return {"metric": best.monitor, "value": best.value, **place}


def _exported(exported: Exported) -> dict[str, Any]:
    place = {"path": "model", "weights": exported.kind, "step": exported.step}
    return {**place, "validation": _validation(exported.validation)}


def _speed(speed: Speed) -> dict[str, Any]:
    seconds, tokens, computed = speed.seconds, speed.num_tokens, speed.num_computed_tokens
    return {
        "r": speed.r if computed else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "computed_tokens_per_second": computed / seconds if seconds else None,
    }


def _inside(path: Path, folder: Path) -> str:
    path, folder = path.absolute(), folder.absolute()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
