"""What a run has reached so far, over all processes that took part in it. Part of every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from radixtrain.training.results.best import Validation
from radixtrain.training.results.curves import LogPart

__all__ = ["Exported", "Reached"]


@dataclass
class Reached:
    """step: optimizer steps. first_loss: of the first step; None before it. last_step: the metrics of the last one.
    validation: the last one; None before it. parts: where the metrics are. seconds: of training.
    """

    step: int = 0
    first_loss: float | None = None
    last_step: dict[str, float] = field(default_factory=dict)
    validation: Validation | None = None
    parts: list[LogPart] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self, output_dir: Path) -> dict[str, Any]:
        """With folders inside of the run's as paths from there, so that a run can be moved."""
        home = output_dir.absolute()
        paths = [Path(folder) for folder, _ in self.parts]
        inside = [str(path.relative_to(home) if path.is_relative_to(home) else path) for path in paths]
        parts = [[folder, part.first_step] for folder, part in zip(inside, self.parts, strict=True)]
        return {**asdict(self), "parts": parts}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Reached:
        """What `as_dict` gave."""
        validation = state["validation"] and Validation(**state["validation"])
        return cls(**{**state, "validation": validation, "parts": [LogPart(*part) for part in state["parts"]]})

    def of_folder(self, *homes: Path) -> None:
        """After `of`: its paths are from the first of these folders in which they exist."""
        for index, (folder, step) in enumerate(self.parts):
            places = [home.absolute() / folder for home in homes]
            place = next((place for place in places if place.is_dir()), places[0])
            self.parts[index] = LogPart(str(place), step)


class Exported(NamedTuple):
    """The weights in `model/`. kind: "best" or "last". step: optimizer steps that they took. validation: the last one
    until then; None if there was none.
    """

    kind: str
    step: int
    validation: Validation | None

    def __str__(self) -> str:
        if self.kind == "last" or self.validation is None:
            return f"the last weights, of step {self.step:,}"
        return f"the best weights, of step {self.step:,}"
