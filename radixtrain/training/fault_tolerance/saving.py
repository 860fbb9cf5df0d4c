"""When a run writes a checkpoint: on a schedule, at the end of every epoch, on request, and when it ends.

Checkpoints are written between optimizer steps, after the validation of the step if there is one. Requests to
save or to stop, by a signal, are handled there too, and after every batch of a validation.

With several ranks, all write the same checkpoint at the same step: each calls what is here in the same order.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from radixtrain.checkpoints.resolve import point, prune
from radixtrain.distributed import ranks
from radixtrain.errors import Stopped, only_warns
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFinite, check_weights_finite
from radixtrain.training.fault_tolerance.run_state import Position
from radixtrain.training.fault_tolerance.signals import Requests

logger = logging.getLogger(__name__)


class SaveCheckpoints:
    """Writes `step=N/` folders and the link `last`, and ends the run when `requests` says so.

    folder: of the checkpoints.
    requests: of signals.
    every_steps: optimizer steps between two checkpoints; None for no such schedule.
    every_minutes: minutes between two checkpoints; None: not by time.
    total_limit: checkpoints that are kept; the one in `keep` does not count.
    is_enabled: False writes none at all.
    """

    def __init__(
        self,
        folder: Path,
        requests: Requests,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        total_limit: int = 2,
        is_enabled: bool = True,
    ):
        self.folder, self.requests = folder, requests
        self.every_steps, self.total_limit = every_steps, total_limit
        self.every_seconds = None if every_minutes is None else 60 * every_minutes
        self.is_enabled = is_enabled
        self.last: Path | None = None
        """The newest checkpoint that this run wrote, or resumed from if it is in the same folder."""
        self.keep: Path | None = None
        """A checkpoint that is never removed: the best one."""
        self.on_saved: list[Callable[[Path], None]] = []
        """Functions that every rank calls with the path of each complete checkpoint."""
        self._resumed_from: Path | None = None
        self._saved_at: Position | None = None
        self._saved_when = time.monotonic()
        self._asked = self._is_writing = self._has_started = False

    def ask(self) -> None:
        """Request a checkpoint before the next step, or at the end of the run."""
        self._asked = True

    def begin(self, ckpt_path: str | None) -> None:
        """Note the checkpoint that the run resumes from; called even if nothing is left to train."""
        if not ckpt_path:
            return
        self._resumed_from = Path(ckpt_path)
        resumed = self._resumed_from.resolve()
        if resumed.parent == self.folder.resolve():
            self.last = self.folder / resumed.name

    def started(self, module: Any) -> None:
        """Note what is saved already."""
        self._has_started, self._saved_when = True, time.monotonic()
        self._saved_at = module.position if module.position.num_batches else None

    def between_steps(self, trainer: Any, module: Any) -> None:
        """Stop or save if it is requested, or due."""
        self._handle_requests(trainer, module)
        if self._asked or self._is_due(module.position):
            self.save(trainer, module)

    def in_validation(self, trainer: Any, module: object) -> None:
        """Stop if it is requested: the validation runs again when the run resumes."""
        self._handle_requests(trainer, module, validation_pending=True)

    def failed(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Save the last good step, unless the error came from saving or in the middle of an optimizer step.

        A signal while answers are generated ends here too. Several ranks save only after an error that all of
        them have found: after any other, some may be waiting for a rank that has ended.
        """
        if self._is_writing or module.is_stepping or not self._has_started:
            return
        if ranks().size > 1 and not isinstance(exception, NonFinite):
            return
        try:
            self.save(trainer, module, validation_pending=bool(trainer.validating))
            if isinstance(exception, NonFinite) and self.last:
                logger.warning("the last good step is saved; resume it with --ckpt_path %s", self.last)
        except Exception as error:  # so that the error that ends the run is reported instead
            logger.warning("the last good step could not be saved: %s", error)

    def _handle_requests(self, trainer: Any, module: Any, validation_pending: bool = False) -> None:
        """Do what signals request. Raises Stopped."""
        stop, save = self.requests.poll()
        if stop is not None:
            self.save(trainer, module, validation_pending)
            raise Stopped(self._stop_message(stop.name, module.position), stop.code)
        if save and not validation_pending:
            self.requests.save = False
            self.save(trainer, module)

    def _stop_message(self, name: str, position: Position) -> str:
        done = f"stopped by {name} after step {position.num_steps}"
        if not position.num_batches:
            return f"stopped by {name} before the first step: nothing to save"
        if self._saved_at is None or self._saved_at.num_batches != position.num_batches:
            return f"{done}: nothing was saved, since trainer.enable_checkpointing is false"
        return f"{done}, which is saved; resume with --ckpt_path {self.last or self._resumed_from}"

    def _is_due(self, position: Position) -> bool:
        since = position.num_batches - (self._saved_at.num_batches if self._saved_at else 0)
        if since <= 0:
            return False
        return (self.every_steps is not None and since >= self.every_steps) or self._is_due_by_time()

    def _is_due_by_time(self) -> bool:
        """Judge by the clock of rank 0."""
        if self.every_seconds is None:
            return False
        here = ranks()
        return here.any(here.is_first and time.monotonic() - self._saved_when >= self.every_seconds)

    def save(self, trainer: Any, module: Any, validation_pending: bool = False) -> None:
        """Save, unless this position is saved already."""
        position = replace(module.position, validation_pending=validation_pending)
        self._asked = False
        if not self.is_enabled or not position.num_batches or position == self._saved_at:
            return
        check_weights_finite(module, f"the checkpoint of step {position.num_steps} was not written")
        path = self.folder / f"step={position.num_steps}"
        if not self.folder.parent.is_dir():  # or it would be created again, next to the run that was moved
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder.parent))
        before, module.position = module.position, position
        self._is_writing = True  # also after an error, which ends the run, so that `failed` does not write again
        try:
            trainer.save_checkpoint(path)
        finally:
            module.position = before
        self._is_writing = False
        self.last, self._saved_at, self._saved_when = path, position, time.monotonic()
        ranks().broadcast_from_rank0(lambda: self._point(path))
        for listener in self.on_saved:
            listener(path)
        ranks().broadcast_from_rank0(lambda: prune(self.folder, self.total_limit, self.keep))

    def _point(self, path: Path) -> None:
        """Point the link `last` at it. Without the link, the newest whole checkpoint counts as the last one."""
        with only_warns(f"{self.folder / 'last'} cannot be written"):
            point(self.folder, "last", path)
