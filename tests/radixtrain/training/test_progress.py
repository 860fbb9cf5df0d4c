"""A bar on a terminal, lines elsewhere, and notices that do not glue onto a bar."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from radixtrain.__main__ import main
from radixtrain.errors import Stopped
from radixtrain.screen import NoticeHandler
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.progress import ProgressLines
from tests.support.processes import lose_screen
from tests.support.runs import summary

METRICS = {
    **{"grad_norm": 1.321, "learning_rate": 2e-5, "loss": torch.tensor(1.23456), "r": 7.93, "best_r": 9.0},
    **{"tokens_per_second": 12345.6, "computed_tokens_per_second": 1556.0},
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("radixtrain.training.progress.time.perf_counter", lambda: now.seconds)
    return now


class TestLines:
    def run(self, clock, steps, seconds):
        lines = ProgressLines()
        lines.start(0)
        for step in steps:
            clock.seconds = 100 + seconds * step
            lines.took_step(step, 1500, METRICS, is_logged=step % 10 == 0)

    @pytest.mark.parametrize(
        ("step", "seconds", "shown"),
        [
            (120, 0.5, "step 120/1500  loss 1.2346  r 7.9  tokens/s 12,346  lr 2.0e-05  grad_norm 1.32  eta 11:30\n"),
            (1, 3.0, "step 1/1500  loss 1.2346  r 7.9  tokens/s 12,346  lr 2.0e-05  grad_norm 1.32  eta 1:14:57\n"),
        ],
    )
    def test_a_line(self, clock, capsys, step, seconds, shown):
        self.run(clock, [step], seconds)
        assert capsys.readouterr().err == shown

    def test_a_fast_run_has_a_line_a_second(self, clock, capsys):
        self.run(clock, range(1, 1501), 0.01)
        shown = capsys.readouterr().err
        assert len(shown.splitlines()) <= 17 and len(shown) < 2000
        assert shown.splitlines()[-1].startswith("step 1500/1500") and "eta" not in shown.splitlines()[-1]

    def test_a_validation(self, capsys):
        for lines in (ProgressLines(), ProgressLines(is_shown=False)):
            lines.validated(5, {"eval_loss": 1.5, "eval_exact_match": 0.25})
        assert capsys.readouterr().err == "step 5  eval_loss 1.5000  eval_exact_match 0.2500\n"

    def test_other_stages_are_counted(self, clock, capsys):
        lines = ProgressLines()
        for index in range(25):
            clock.seconds += 0.3
            lines.count("predict", index + 1, 25)
        assert capsys.readouterr().err.splitlines() == [f"predict {n}/25" for n in (1, 5, 9, 13, 17, 21, 25)]


def shown_on(stream):
    return [line for line in re.split(r"[\r\n]+", stream.getvalue()) if line.strip()]


def test_the_bar_shows_losses_at_70_columns(monkeypatch):
    """And no metric in part."""
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    bar = ProgressLines(is_bar=True)
    bar.start(1199)
    bar.took_step(1200, 1500, METRICS, is_logged=False)
    bar.close()
    assert re.search(r"\| step 1200/1500  eta 00:00  loss 1.2346  r 7.9$", shown_on(stream)[-1])
    assert stream.getvalue().endswith("\n")


def test_the_bar_of_a_run(arguments, shop, monkeypatch):
    """Its total is that of the run, also with max_steps and after a resume, and what ends the run has its own line."""
    monkeypatch.setenv("COLUMNS", "300")
    rows = {"data__validation_file": shop / "validation.jsonl"}
    line = arguments(trainer__enable_progress_bar=None, trainer__max_epochs=3, **rows)
    monkeypatch.setattr(SaveCheckpoints, "_handle_requests", stop_after(6))
    for more, code, steps in (
        ([], 130, [f"step {step}/15" for step in range(1, 7)]),
        (["--ckpt_path=last", "--trainer.max_steps=8"], 0, ["step 7/8", "step 8/8"]),
    ):
        monkeypatch.setattr(sys, "stderr", stream := Terminal())
        assert main([*line, *more]) == code
        bars = [each.partition("| ")[2] for each in shown_on(stream) if each.startswith("|")]
        found = [" ".join(each.split()[:2]) for each in bars if each.startswith("step")]
        assert list(dict.fromkeys(found)) == steps
        assert more or any(each.startswith("validate 1/") for each in bars)
        assert more or "step 5  eval_loss" in stream.getvalue()
        assert all("eta" in each or each.startswith("step 8/8") for each in bars if each.startswith("step"))
        if code:
            assert shown_on(stream)[-1] == "stopped"
        monkeypatch.setattr(SaveCheckpoints, "_handle_requests", lambda *_, **__: None)


def stop_after(step):
    """Stop a run as Ctrl-C does."""

    def handle(self, trainer, module, validation_pending=False):
        if trainer.global_step == step:
            self.save(trainer, module)
            raise Stopped("stopped", 130)

    return handle


def test_a_notice_stands_above_the_bar(monkeypatch):
    """The bar is wiped, the notice has a line of its own, and the bar comes back under it."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = NoticeHandler()
    with tqdm(total=10, file=stream, desc="Epoch", mininterval=0) as bar:
        bar.update(3)
        handler.emit(logging.makeLogRecord({"msg": "a notice"}))
    lines = re.split(r"[\r\n]+", stream.getvalue())
    assert "a notice" in lines
    assert lines[lines.index("a notice") + 1].startswith("Epoch")


def test_a_run_goes_on_without_its_screen(start, arguments, tmp_path):
    """As a reader of the pipe ends, or the disk of the log is full. The summary says so."""
    run = start(arguments(), before=lose_screen)
    assert run.wait() == 0
    assert summary(tmp_path / "out")["screen"] == "stdout: Broken pipe"
    assert (tmp_path / "out" / "model" / "config.json").is_file() and len(list(tmp_path.glob("out/logs/*"))) == 1
