"""A run goes on from any place between two steps, whatever limits it has and whenever it validates, in a tiny model.

The oracle is the run that nobody interrupts: the same batches, counters, validations and weights from there on. By
default from every second place, with RADIXTRAIN_TRIES=1 from each.
"""

import copy
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from torch.utils.data import Dataset

from radixtrain.data.steps import StepLoader, StepSampler
from radixtrain.errors import UserError
from radixtrain.training.survival.position import (
    Position,
    check_not_beyond,
    run_pending_validation,
    settle_loops,
)

EPOCH = 7  # steps: 20 rows, 3 at a time

pytestmark = pytest.mark.filterwarnings("ignore")


class Rows(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor([float(index) for index in indices])


@dataclass
class Seen:
    """What a run did, and a checkpoint of every place between two steps, and of every validation."""

    steps: list[tuple] = field(default_factory=list)
    validations: list[int] = field(default_factory=list)
    checkpoints: dict[tuple[int, bool], dict] = field(default_factory=dict)


class Model(L.LightningModule):
    """As `RadixModule` keeps its position, without anything else."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Linear(1, 1)
        self.seen, self.position = seen, Position(0, 0)
        self.is_resumed = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)

    def on_train_start(self) -> None:
        if self.is_resumed:
            settle_loops(self.trainer)
            self._validate_if_pending()

    def on_fit_end(self) -> None:
        self._validate_if_pending()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.save()

    def on_train_end(self) -> None:
        self.save()

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight(batch[:, None]).sum())
        optimizer.step()
        loop = self.trainer.fit_loop.epoch_loop
        counters = (
            self.current_epoch,
            index,
            self.global_step,
            loop._batches_that_stepped,
            loop.batch_progress.is_last_batch,
        )
        self.seen.steps.append((*counters, *batch.tolist()))
        self.position = Position(self.position.num_batches + 1, self.global_step)

    def validation_step(self, batch: Any, index: int) -> None:
        if not self.trainer.sanity_checking and self.position.num_batches:
            self.save(is_pending=True)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.validations.append(self.position.num_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.position, self.is_resumed = Position.of(checkpoint), True
        checkpoint["loops"]["fit_loop"] = self.position.loops(checkpoint["epoch_length"])

    def save(self, is_pending: bool = False) -> None:
        key = (self.position.num_batches, is_pending)
        if key[0] and key not in self.seen.checkpoints:
            made = copy.deepcopy(self.trainer._checkpoint_connector.dump_checkpoint(False))
            made["radixtrain"] = {"position": self.position.validated(not is_pending).as_dict()}
            self.seen.checkpoints[key] = {**made, "epoch_length": self.trainer.num_training_batches}

    def _validate_if_pending(self) -> None:
        if self.position.validation_pending:
            run_pending_validation(self)


class InMemory(CheckpointIO):
    def __init__(self, checkpoint: dict):
        self.checkpoint = checkpoint

    def load_checkpoint(self, *_: Any, **__: Any) -> dict:
        return copy.deepcopy(self.checkpoint)

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...
    def remove_checkpoint(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    yield
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)


def trained(settings: dict[str, Any], checkpoint: dict | None = None) -> tuple[Seen, Model, L.Trainer]:
    torch.manual_seed(0)
    model = Model(Seen())
    options = {name: value for name, value in settings.items() if name != "validates"}
    silent = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    plugins = [] if checkpoint is None else [InMemory(checkpoint)]
    trainer = L.Trainer(accelerator="cpu", plugins=plugins, **silent, **options)
    loaders = [StepLoader(Rows(), StepSampler(20, 3, True, 0)) for _ in range(2)]
    validation = loaders[1] if settings.get("validates") else None
    trainer.fit(model, loaders[0], validation, ckpt_path=None if checkpoint is None else "in memory")
    return model.seen, model, trainer


LIMITS = [
    {"max_epochs": 3},
    {"max_steps": 17},
    {"max_epochs": 3, "max_steps": 17},
    {"max_epochs": -1, "max_steps": 2 * EPOCH},
    {"max_epochs": 3, "limit_train_batches": 5},
    {"max_steps": 17, "limit_train_batches": 5},
    {"max_epochs": 4, "limit_train_batches": 0.5},
    {"max_epochs": 3, "overfit_batches": 4},
]
VALIDATIONS = [
    {},
    {"validates": True},
    {"validates": True, "val_check_interval": 3},
    {"validates": True, "check_val_every_n_epoch": 2},
    {"validates": True, "val_check_interval": 4, "check_val_every_n_epoch": None},
]


CASES = [*product(LIMITS, VALIDATIONS[:2]), *product((LIMITS[0], LIMITS[2], LIMITS[5]), VALIDATIONS[2:])]


@pytest.mark.parametrize(("limit", "validation"), CASES, ids=str)
def test_a_run_goes_on_from_everywhere(limit, validation):
    settings = {**limit, **validation}
    whole, model, trainer = trained(settings)
    assert len(whole.steps) == model.position.num_batches > 8
    some = 1 if "RADIXTRAIN_TRIES" in os.environ else 2
    for (place, is_pending), checkpoint in list(whole.checkpoints.items())[::some]:
        seen, resumed, again = trained(settings, checkpoint)
        assert seen.steps == whole.steps[place:], (place, is_pending)
        later = [each for each in whole.validations if each > place or (is_pending and each == place)]
        assert seen.validations == later, (place, is_pending)
        assert again.global_step == trainer.global_step
        assert torch.equal(resumed.weight.weight, model.weight.weight)


def test_a_run_that_was_cut_short_by_max_steps_goes_on_inside_its_epoch():
    whole, _, _ = trained({"max_epochs": 2})
    short, _, _ = trained({"max_epochs": 2, "max_steps": 4})
    seen, _, _ = trained({"max_epochs": 2}, short.checkpoints[4, False])
    assert seen.steps == whole.steps[4:]


def test_older_checkpoints_count_optimizer_steps():
    assert Position.of({"global_step": 5}) == Position(5, 5)
    saved = Position(7, 5, validation_pending=True)
    assert Position.of({"global_step": 5, "radixtrain": {"position": saved.as_dict()}}) == saved


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
