"""`report` and `inspect`: they read rows, a tokenizer and the shape of a model, and need no trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from rich.console import Console

from radixtrain.checkpoints.atomic import check_replaceable
from radixtrain.data.step_data import StepData
from radixtrain.errors import UserError
from radixtrain.explain.micro_batch import show_micro_batch
from radixtrain.explain.prediction import NotPredictedError, RunSetup, without_messages
from radixtrain.explain.report import make_report, print_report, write_page
from radixtrain.explain.row import show_row
from radixtrain.hf.config import read_config
from radixtrain.hf.share import share_prefixes
from radixtrain.screen import printable, quiet, screen, without_passwords
from radixtrain.settings.commands import Inspect, Report
from radixtrain.settings.sections import ModelSettings, TrainerSettings
from radixtrain.training.devices.launcher_env import one_device
from radixtrain.training.fault_tolerance.failures import explain
from radixtrain.training.fault_tolerance.run_folder import check_output_dir, locked
from radixtrain.training.optimizer import optimizer_of
from radixtrain.training.start.loading import check_trainable, layer_period, random_trainable

# The dtype that a model is converted to, by `trainer.precision`.
WEIGHTS = {"32-true": None, "bf16-mixed": None, "bf16-true": torch.bfloat16, "64-true": torch.float64}


def run(settings: Report | Inspect, words: Sequence[str]) -> None:
    """Run one of the two."""
    quiet(speaks=True)
    data = StepData(settings.data)
    try:
        if isinstance(settings, Report):
            _report(settings, data, [without_passwords(word) for word in words[1:]])
        else:
            asked = {key: getattr(settings, key) for key in ("step", "micro_batch", "row", "full")}
            inspect(data, screen(), **asked)
    except Exception as error:
        if message := explain(error, None):
            raise UserError(message) from error
        raise


def inspect(
    data: StepData,
    console: Console,
    step: int = 0,
    micro_batch: int = 0,
    row: int | str | None = None,
    full: bool = False,
) -> None:
    """Print a micro-batch of the first epoch, or one row if given. Reads the tokenizer, not the weights."""
    shown = show_micro_batch(data, step, micro_batch, full) if row is None else show_row(data, row, full)
    for part in shown:
        console.print(part, highlight=False)


def _report(settings: Report, data: StepData, typed: list[str]) -> None:
    """Report what the data share and what that saves on this machine, as `report.html` and in the terminal."""
    folder = check_output_dir(settings.output_dir)
    with locked(folder, "report"):
        path = folder / "report.html"
        check_replaceable(path)
        data.setup("report")
        setup, refused = run_setup(settings.model, settings.trainer), ""
        try:
            with without_messages():
                check_trainable(settings.model, setup.num_layers, data.longest())
        except UserError as error:
            refused = str(error)
        report = make_report(data, setup, typed, settings.max_seconds, refused)
        print_report(report)
        write_page(report, path)
        print(f"\n{printable(path)}")  # noqa: T201


def run_setup(settings: ModelSettings, trainer: TrainerSettings) -> RunSetup:
    """Describe how `fit` would train the model. Raises UserError for a device or precision that is missing here."""
    config, device = read_config(settings.model_name_or_path), device_of(trainer)
    is_mixed, dtype = trainer.precision == "bf16-mixed", WEIGHTS[trainer.precision]
    share = Fraction(str(float(settings.activation_checkpointing)))  # 3/4: three of every four layers

    # Like Lightning's bf16-mixed.
    mixed = partial(torch.autocast, device.type, dtype=torch.bfloat16, cache_enabled=False)

    def build(num_layers: int, device: torch.device) -> Any:
        try:
            with without_messages():
                model = random_trainable(settings, num_layers, device)
        except UserError as error:  # of fewer layers than `fit` trains
            raise NotPredictedError(str(error)) from error
        return model if dtype is None else model.to(dtype)

    return RunSetup(
        build=build,
        optimizer=lambda built: optimizer_of(built, settings),
        forward=mixed if is_mixed else nullcontext,
        device=device,
        num_layers=config.get_text_config().num_hidden_layers,
        period=math.lcm(layer_period(config), share.denominator),
        share=partial(
            share_prefixes,
            attention=settings.attention,
            kernel=settings.kernel,
            allow_dropout=tuple(settings.allow_dropout or ()),
        ),
    )


def device_of(trainer: TrainerSettings) -> torch.device:
    """Return the device of a run on one device. Raises UserError if this machine does not have it."""
    devices, wanted = one_device(trainer, "report")["devices"], trainer.accelerator
    number, has_cuda = devices[0] if isinstance(devices, list) else 0, torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda or number >= torch.cuda.device_count():
        raise UserError(f"trainer.accelerator {wanted}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", number)
