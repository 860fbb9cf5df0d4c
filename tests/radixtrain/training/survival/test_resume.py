"""What a run that goes on takes from its checkpoint: settings are applied and said, or refused; nothing is ignored."""

import csv
import json
import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_checkpoint

WHOLE = 10  # steps: 20 rows, 4 at a time, 2 epochs
DROPOUT = {"model__use_peft": "true", "model__lora_dropout": 0.5, "model__allow_dropout": "[lora_dropout]"}


@pytest.fixture
def ran(arguments: Any, tmp_path: Path) -> Any:
    """`ran("name", flag=...)`: trains into that folder, and gives it back."""

    def run(name: str, **flags: Any) -> Path:
        assert main(arguments(output_dir=tmp_path / name, **flags)) == 0
        return tmp_path / name

    return run


@pytest.fixture
def refused(arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """`refused(flag=...)`: the one line that a run ends with instead of training. It leaves nothing, also no logs."""

    def run(**flags: Any) -> str:
        capsys.readouterr()
        assert main(arguments(**{"output_dir": tmp_path / "refused", **flags})) == 1
        assert not (tmp_path / "refused").exists()
        return capsys.readouterr().err.splitlines()[-1]

    return run


def column(folder: Path, name: str = "loss") -> dict[int, float]:
    """Per step, over all parts of the run."""
    found: dict[int, float] = {}
    for path in sorted((folder / "logs").glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime_ns):
        with path.open() as file:
            found |= {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
    return found


def assert_same_model(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def at(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step={step}"


EVERY = {"save_every_steps": 1, "save_total_limit": 99}
STOPS = [
    {"trainer__max_steps": 3},
    {"trainer__max_steps": 5},
    {"trainer__max_steps": 8},
    {"trainer__max_epochs": 1},
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_run_with_another_end_goes_on(ran, stop, workers):
    """With a constant learning rate, that it had fewer steps leaves no trace."""
    flags = {"model__lr_scheduler_type": "constant", "data__dataloader_num_workers": workers}
    whole = ran("whole", **flags)
    short = ran("short", **flags, **stop)
    assert len(column(short)) < WHOLE
    ran("short", ckpt_path="last", **flags)
    assert column(short) == column(whole)
    assert_same_model(short, whole)


def test_a_run_that_max_time_has_stopped_goes_on(ran, arguments, tmp_path, monkeypatch, capsys):
    """Each start has the whole time again."""
    whole = ran("whole")
    asked = count()
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, stage="train": 0.0 if next(asked) < 5 else 4000.0)
    short = ran("short", trainer__max_time="00:01:00:00")
    assert 0 < len(column(short)) < WHOLE
    assert "max_time" in capsys.readouterr().out
    monkeypatch.undo()
    ran("short", ckpt_path="last", trainer__max_time="00:01:00:00")
    assert column(short) == column(whole)
    assert_same_model(short, whole)


@pytest.mark.parametrize("due", [False, True])
def test_max_time_adds_no_validation(ran, monkeypatch, due):
    """One that is due at the step where the time is up takes place. An epoch has five steps."""
    asked = count()
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, stage="train": 0.0 if next(asked) < 4 else 4000.0)
    flags = {"data__val_size": 4, "trainer__val_check_interval": 2, "save_best": "eval_loss"}
    every = {"data__batch_size": 2, "trainer__val_check_interval": 4} if due else {"trainer__val_check_interval": 3}
    run = ran("run", trainer__max_time="00:01:00:00", **{**flags, **every})
    losses, validations = column(run), column(run, "eval_loss")
    assert max(losses) == 3  # the fourth step was the last one
    assert set(validations) == ({3} if due else {2})


def test_a_start_without_a_step_names_the_checkpoint_that_it_went_on_from(ran, capsys):
    """It has written none, and none is lost."""
    exact = {"trainer__deterministic": "true"}
    folder = ran("short", trainer__max_steps=3, **exact)
    capsys.readouterr()
    ran("short", ckpt_path="last", trainer__max_time="00:00:00:00", **exact)
    said = capsys.readouterr().out
    assert "stopped by trainer.max_time at step 3 of 10; go on with --ckpt_path last" in said
    assert str(at(folder, 3)) in said


@pytest.mark.parametrize("limit", [{"trainer__limit_train_batches": 3}, {"trainer__overfit_batches": 2}], ids=str)
def test_epochs_that_are_cut_short(ran, limit):
    flags = {**limit, "trainer__max_epochs": 3}
    whole = ran("whole", **flags, **EVERY)
    losses = column(whole)
    for step in (1, 2, 3, 4) if "trainer__limit_train_batches" in limit else (2, 3):
        resumed = ran(f"from_{step}", ckpt_path=at(whole, step), **flags)
        assert column(resumed) == {place: loss for place, loss in losses.items() if place >= step}
        assert_same_model(resumed, whole)


def test_overfitting_repeats_the_same_steps(ran):
    """The first epoch and the second have the same rows: with a learning rate of 0, the same losses."""
    losses = column(ran("out", trainer__overfit_batches=2, trainer__max_epochs=2, model__learning_rate=0))
    assert losses[0] == losses[2] != losses[1] == losses[3]


@pytest.mark.parametrize("step", [2, 5, 7])
def test_dropout_draws_what_it_would_have_drawn(ran, step):
    pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    whole = ran("whole", **DROPOUT, **EVERY)
    resumed = ran("resumed", **DROPOUT, ckpt_path=at(whole, step))
    assert column(resumed) == {place: loss for place, loss in column(whole).items() if place >= step}
    assert_same_model(resumed, whole)


def test_new_hyperparameters_are_applied_and_said(ran, caplog):
    """As if the run had had them from there on: the losses are not those of the old settings any more."""
    flags = {"model__lr_scheduler_type": "constant"}
    old = ran("old", **flags, **EVERY)
    caplog.clear()
    new = {"model__learning_rate": 1e-3, "model__adam_beta1": 0.5, "model__weight_decay": 0.1, "data__max_tokens": 999}
    resumed = ran("resumed", ckpt_path=at(old, 4), data__max_length=512, **{**flags, **new})
    said = next(record.getMessage() for record in caplog.records if "other settings" in record.getMessage())
    for name in new:
        assert f"{name.replace('__', '.')} was " in said, name
    assert list(column(resumed, "learning_rate").values()) == pytest.approx([1e-3] * 6)
    state = read_checkpoint(at(resumed, 10))
    group = state["optimizer_states"][0]["param_groups"][0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-3, (0.5, 0.999), 0.1)
    assert state["hyper_parameters"]["learning_rate"] == 1e-3
    assert column(resumed)[4] == column(old)[4] and column(resumed)[6] != column(old)[6]


def test_the_same_settings_are_said_to_be_none(ran, caplog):
    old = ran("old", **EVERY)
    caplog.clear()
    ran("resumed", ckpt_path=at(old, 4), **EVERY)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("radixtrain")]
    assert not [text for text in messages if "other settings" in text]
    assert [text for text in messages if text.startswith("goes on after step 4, with a learning rate of")]


def test_what_the_run_does_besides_its_steps_is_said(ran, caplog):
    """Settings that are left out, too: the run would no longer keep the best weights, and would not end early."""
    flags = {"data__val_size": 4, "trainer__max_steps": 3}
    judged = {"save_best": "eval_loss", "early_stopping": 9, "trainer__val_check_interval": 2}
    answers = {"evaluate_generation__metric": "contains", "evaluate_generation__max_new_tokens": 2}
    old = ran("old", **flags, **judged, **answers)
    caplog.clear()
    ran("resumed", ckpt_path=at(old, 3), **{**flags, "trainer__max_steps": 4})
    said = next(record.getMessage() for record in caplog.records if "other settings" in record.getMessage())
    assert "save_best was eval_loss and is null; early_stopping was 9 and is null" in said
    assert "trainer.val_check_interval was 2 and is null" in said
    assert "evaluate_generation.metric was contains and is null" in said
    assert "evaluate_generation.max_new_tokens was 2 and is 256" in said


@pytest.mark.parametrize(
    "changed", [{"data__batch_size": 5}, {"trainer__max_steps": 2}, {"trainer__limit_train_batches": 4}], ids=str
)
@pytest.mark.parametrize("logger", ["csv", "none"])
def test_a_refused_resume_leaves_the_folder_as_it_was(ran, refused, changed, logger, tmp_path):
    run = ran("run", trainer__max_steps=3, trainer__logger=logger)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "ckpt_path: " in refused(ckpt_path="last", output_dir=run, trainer__logger=logger, **changed)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert [path for path in run.rglob("*") if path.is_dir() and not any(path.iterdir())] == []


def test_a_run_that_is_extended_takes_no_step_at_learning_rate_zero(ran, caplog):
    run = ran("out", trainer__max_epochs=1, model__lr_scheduler_type="linear")
    ran("out", trainer__max_epochs=2, model__lr_scheduler_type="linear", ckpt_path="last")
    rates = column(run, "learning_rate")
    assert len(rates) == 10 and min(rates.values()) > 0
    assert rates[5] == pytest.approx(1e-2 * 5 / 10)
    assert "the run had 5 steps and has 10" in caplog.text


def test_nothing_left_to_do_is_said(ran, capsys):
    run = ran("out")
    before = column(run)
    capsys.readouterr()
    ran("out", ckpt_path="last")
    assert "nothing left to do" in capsys.readouterr().out
    assert column(run) == before


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model__lora_alpha": 8}, "model.lora_alpha was 32 and is 8, which would be another model"),
        ({"model__lora_r": 8}, "model.lora_r was 4 and is 8"),
        ({"model__use_peft": "false"}, "model.use_peft was true and is false"),
        ({"data__batch_size": 5}, "batch_size was 4 and is 5"),
        ({"seed_everything": 7}, "seed was 42 and is 7"),
        ({"trainer__limit_train_batches": 3}, "an epoch of the run had 5 steps and has 3 here"),
    ],
    ids=str,
)
def test_what_would_be_another_run_is_refused(ran, refused, changed, told):
    pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    flags = {"model__use_peft": "true", "model__lora_r": 4}
    old = ran("old", trainer__max_steps=3, **flags)
    assert told in refused(ckpt_path=old, **{**flags, **changed})


def test_other_labels_of_the_same_tokens_are_refused(ran, refused, shop):
    old = ran("old", trainer__max_steps=3)
    assert "the checkpoint belongs to other steps: digest" in refused(ckpt_path=old, data__assistant_only_loss="false")


def test_another_configuration_of_the_model_is_refused(ran, refused, shop, tmp_path):
    """The weights have the same names and shapes; the head would compute something else."""
    old = ran("old", trainer__max_steps=3)
    changed = AutoModelForCausalLM.from_pretrained(shop / "model")
    changed.config.rms_norm_eps = 1e-2
    for path in (shop / "model").iterdir():
        (tmp_path / "changed").mkdir(exist_ok=True)
        (tmp_path / "changed" / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    message = refused(ckpt_path=old, model__model_name_or_path=tmp_path / "changed")
    assert "a model with another configuration: rms_norm_eps was 1e-06 and is 0.01" in message


def test_adapters_go_on_only_beside_their_own_weights(ran, refused, shop, tmp_path):
    pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    flags = {"model__use_peft": "true", "model__lora_r": 4}
    old = ran("old", trainer__max_steps=3, **flags)
    state = read_checkpoint(at(old, 3))
    assert state["radixtrain"]["partial"] and all("lora_" in name for name in state["state_dict"])
    other = AutoModelForCausalLM.from_pretrained(shop / "model")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    for path in (shop / "model").iterdir():
        if not (tmp_path / "other" / path.name).exists():
            (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    message = refused(ckpt_path=old, model__model_name_or_path=tmp_path / "other", **flags)
    assert "are not those of the run; give the model that it started from" in message
    ran("resumed", ckpt_path=old, **flags)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="radixtrain")
