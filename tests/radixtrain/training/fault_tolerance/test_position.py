"""Where a run is, and whether that is beyond its end. That it goes on from there: `tests/claims/fault_tolerance`."""

import lightning as L
import pytest

from radixtrain.errors import UserError
from radixtrain.training.fault_tolerance.position import Position, check_not_beyond

EPOCH = 7  # steps


@pytest.mark.parametrize(
    ("position", "limits", "message"),
    [
        (Position(8, 8), {"max_steps": 7}, "8 steps were begun, and trainer.max_steps is 7"),
        (Position(8, 8), {"max_epochs": 1}, "2 epochs were begun, and trainer.max_epochs is 1"),
        (Position(7, 7), {"max_epochs": 1, "max_steps": 7}, None),
        (Position(9, 7), {"max_epochs": -1, "max_steps": 7}, None),
    ],
)
def test_beyond_the_end(position, limits, message):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **limits)
    if message is None:
        check_not_beyond(trainer, position, EPOCH)
    else:
        with pytest.raises(UserError, match=message):
            check_not_beyond(trainer, position, EPOCH)
