"""Losses, gradients and weights that are not finite: what stops a run, what is left out, and who is named."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from radixtrain.__main__ import main
from radixtrain.training.fault_tolerance.nonfinite_guard import (
    NonFinite,
    NonFiniteGuard,
    check_weights_finite,
    nonfinite_weight,
)
from radixtrain.training.module import RadixModule
from tests.support import FULL, cases
from tests.support.runs import assert_equal

NAN, ONE = torch.tensor(float("nan")), torch.tensor(1.0)
WHERE = [f"a.jsonl:{line}" for line in range(1, 11)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
EMBEDDING = "model.embed_tokens.weight"


def spoilt(value: float = float("nan")) -> nn.Linear:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.bias[1] = value
    return layer


INF = torch.tensor(float("inf"))
UNCHANGED, CAP = "the weights were not changed", "0 steps were left out before, as many as model.max_skipped_steps"
STOPPED = [
    *(("raise", nn.Linear(1, 1), numbers, UNCHANGED) for numbers in ((NAN, ONE), (ONE, NAN), (ONE, INF))),
    ("skip", spoilt(), (NAN, NAN), "the weight bias has not been finite since the step before"),  # nor later ones
    ("skip", nn.Linear(1, 1), (NAN, ONE), CAP),
]


class TestGuard:
    @pytest.mark.parametrize(("on_nonfinite", "module", "numbers", "reason"), STOPPED)
    def test_what_stops_a_run_names_the_step_and_its_rows(
        self, on_nonfinite: Any, module: nn.Module, numbers: tuple[Tensor, Tensor], reason: str
    ) -> None:
        with pytest.raises(NonFinite, match=rf"of step 5 .*{reason}.* Rows of .*: a\.jsonl:1,.* and 2 more$"):
            NonFiniteGuard(on_nonfinite, 0).allows(module, *numbers, WHERE, 4)

    def test_an_evaluated_step_stops_but_for_skip_in_a_validation_of_fit(self, caplog: Any) -> None:
        for on_nonfinite, is_fit in (("raise", True), ("raise", False), ("skip", False)):
            with pytest.raises(NonFinite, match=r"eval_loss nan is not finite; .*a\.jsonl:1, "):
                NonFiniteGuard(on_nonfinite, 10).accepts("eval_loss", NAN, WHERE, is_fit)
        guard = NonFiniteGuard("skip", 0)
        assert not guard.accepts("eval_loss", NAN, WHERE, is_fit=True)
        assert "these rows are left out of it" in caplog.text and guard.num_skipped == 0


class TestWeights:
    def test_the_first_one_is_named(self) -> None:
        for value, dtype in product((float("nan"), float("inf"), float("-inf")), DTYPES):
            model = nn.Sequential(nn.Linear(3, 3), spoilt(value), spoilt(value)).to(dtype)
            assert nonfinite_weight(model) == "1.bias"
            with pytest.raises(NonFinite, match=r"here: the weight 1\.bias holds numbers that are not finite"):
                check_weights_finite(model, "here")

    def test_what_has_no_such_numbers(self) -> None:
        model = nn.Sequential(nn.Linear(3, 0), nn.Linear(2, 2).to(torch.bfloat16))
        model.register_parameter("quantized", nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False))
        model.register_parameter("eight_bits", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)))
        model.register_buffer("mask", torch.tensor(float("-inf")))
        assert nonfinite_weight(model) is None
        assert nonfinite_weight(nn.Module()) is None
        model.eight_bits = nn.Parameter(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))
        assert nonfinite_weight(model) == "eight_bits"


@pytest.fixture
def nan_model(shop: Path, tmp_path: Path) -> Path:
    """A model folder, one number of which is NaN."""
    folder = shutil.copytree(shop / "model", tmp_path / "nan_model")
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING][3, 1] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class TestCommands:
    @pytest.mark.parametrize(
        ("command", "file"),
        cases(
            [("fit", "train"), ("validate", "validation"), ("test", "test"), ("predict", "predict")], [("fit", "train")]
        ),
    )
    def test_weights_are_looked_at_first(
        self, arguments: Any, shop: Path, nan_model: Path, tmp_path: Path, capsys: Any, command: str, file: str
    ) -> None:
        flags = {"model__model_name_or_path": nan_model, f"data__{file}_file": shop / "validation.jsonl"}
        assert main(arguments(command, **flags)) == 1
        captured = capsys.readouterr()
        assert captured.err.splitlines()[-1].endswith(f"{EMBEDDING} holds numbers that are not finite")
        assert "nan" not in captured.out.replace(str(nan_model), "")
        assert not (tmp_path / "out" / "predictions.jsonl").exists() and not (tmp_path / "out" / "model").exists()

    @FULL
    def test_a_last_step_that_spoils_the_weights_writes_nothing(
        self, arguments: Any, tmp_path: Path, capsys: Any
    ) -> None:
        assert main(arguments(model__learning_rate=1e30, model__weight_decay=1e20, trainer__max_steps=1)) == 1
        assert f"the weight model.{EMBEDDING} holds numbers" in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "out" / "model").exists()
        assert not list((tmp_path / "out").glob("checkpoints/step=*"))


def spoil_steps(monkeypatch: pytest.MonkeyPatch, spoilt: set[int]) -> list[tuple[Any, Any]]:
    """The losses of these steps, counted from 0, are NaN. Filled by a run: what a step found and left, of each."""
    seen: list[tuple[Any, Any]] = []
    loss_sum: Callable[..., Tensor] = RadixModule.loss_sum
    take_step: Callable[..., Any] = RadixModule.take_step

    def state(module: Any, optimizer: Any, scheduler: Any) -> Any:
        return copy.deepcopy((module.state_dict(), optimizer.state_dict(), scheduler.state_dict(), module.global_step))

    def step(module: Any, batch: Any, optimizer: Any, scheduler: Any, *given: Any) -> Any:
        before = state(module, optimizer, scheduler)
        metrics = take_step(module, batch, optimizer, scheduler, *given)
        seen.append((before, state(module, optimizer, scheduler)))
        return metrics

    monkeypatch.setattr(RadixModule, "take_step", step)
    monkeypatch.setattr(RadixModule, "loss_sum", lambda *x: loss_sum(*x) * (NAN if len(seen) in spoilt else 1.0))
    return seen


class TestSkip:
    def test_a_skipped_step_changes_nothing(
        self, arguments: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """Neither weights nor optimizer nor schedule; the first step, and one in the middle."""
        monkeypatch.setattr(logging.getLogger("radixtrain"), "level", logging.INFO)
        seen = spoil_steps(monkeypatch, {0, 3})
        assert main(arguments(model__on_nonfinite="skip", model__max_skipped_steps=4, trainer__max_epochs=1)) == 0
        for number, (before, after) in enumerate(seen):
            with nullcontext() if number in (0, 3) else pytest.raises(AssertionError):
                assert_equal(before, after, f"step {number}")
        assert [after[3] for _, after in seen] == [0, 1, 2, 2, 3], "optimizer steps"
        said = [line for line in caplog.messages if "the step is left out" in line]
        assert [line.partition("left out, ")[2][:14] for line in said] == ["1 of at most 4", "2 of at most 4"]
        assert (tmp_path / "out" / "model" / "config.json").exists()
