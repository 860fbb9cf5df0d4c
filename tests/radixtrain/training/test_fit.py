"""`fit` through the real command line, in process: what it writes, what it equals, how it resumes and stops."""

import csv
import json
import re
import signal
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.tree.cost_model import Rates


def losses(folder: Path, version: int = 0, column: str = "loss") -> dict[int, float]:
    """Per step, from the CSV logger."""
    with (folder / "logs" / f"version_{version}" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row[column]}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_bit_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_fit_learns_and_leaves_a_hugging_face_folder(arguments, shop, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(data__validation_file=shop / "validation.jsonl", trainer__max_epochs=6)) == 0
    curve = losses(out)
    assert len(curve) == 30
    assert curve[29] < 0.5 * curve[0]
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.config._attn_implementation == "sdpa"
    assert AutoTokenizer.from_pretrained(out / "model").chat_template
    closing = capsys.readouterr().out
    for word in ("loss", "eval_loss", "tokens per computed token", "effective", out / "model", out / "checkpoints"):
        assert str(word) in closing
    assert not list(out.glob(".*partial"))


def test_every_step_logs_what_a_person_watches(arguments, tmp_path):
    assert main(arguments(trainer__max_steps=2)) == 0
    speeds = ("tokens_per_second", "computed_tokens_per_second")
    for column in ("loss", "grad_norm", "learning_rate", "r", "best_r", *speeds):
        assert len(losses(tmp_path / "out", column=column)) == 2
    assert losses(tmp_path / "out", column="best_r")[0] >= losses(tmp_path / "out", column="r")[0] > 1.5


def test_a_run_shorter_than_the_log_interval_has_metrics(arguments, tmp_path):
    assert main(arguments(trainer__max_steps=2, trainer__log_every_n_steps=10)) == 0
    assert list(losses(tmp_path / "out")) == [0, 1]


def test_the_ordinary_arm_has_the_same_losses(arguments, tmp_path):
    for name, dedup in (("on", "true"), ("off", "false")):
        assert main(arguments(output_dir=tmp_path / name, dedup=dedup, trainer__max_epochs=4)) == 0
    on, off = losses(tmp_path / "on"), losses(tmp_path / "off")
    assert len(on) == 20
    assert max(abs(on[step] - off[step]) for step in on) < 2e-5
    assert losses(tmp_path / "off", column="r")[0] <= 1.0


@pytest.mark.parametrize("dedup", ["true", "false"])
def test_the_cut_into_micro_batches_changes_nothing(arguments, tmp_path, capsys, dedup):
    sizes = {"one": 4096, "many": 120}
    for name, max_tokens in sizes.items():
        flags = {"data__max_tokens": max_tokens, "data__max_length": 120, "data__batch_size": 10}
        assert main(arguments(output_dir=tmp_path / name, dedup=dedup, **flags)) == 0
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert max(abs(one[step] - many[step]) for step in one) < 5e-6
    if dedup == "true":
        r, best = ({name: losses(tmp_path / name, column=column)[0] for name in sizes} for column in ("r", "best_r"))
        assert best["one"] == best["many"] >= r["one"] > 1.2 * r["many"]
        assert "data.max_tokens cuts a step into" in capsys.readouterr().out


def test_workers_change_nothing(arguments, tmp_path):
    for name, workers in (("none", 0), ("two", 2)):
        assert main(arguments(output_dir=tmp_path / name, data__dataloader_num_workers=workers)) == 0
    assert_bit_equal(weights(tmp_path / "none"), weights(tmp_path / "two"))


def test_workers_end_with_the_run(arguments, tmp_path):
    """Not whenever Python finds the circle that holds their loader, which then waits 5 s for each of them."""
    others = set(active_children())
    assert main(arguments(data__dataloader_num_workers=2)) == 0
    assert set(active_children()) <= others


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_a_resumed_run_is_the_same_run(arguments, tmp_path, step, workers):
    """Five steps an epoch: inside the first, near its end, at its end, inside the second."""
    flags = {
        "trainer__max_epochs": 2,
        "data__dataloader_num_workers": workers,
        "trainer__callbacks": "lightning.pytorch.callbacks.ModelCheckpoint",
        "trainer__callbacks.every_n_train_steps": 1,
        "trainer__callbacks.save_top_k": -1,
        "trainer__callbacks.filename": "{step}",
        "trainer__callbacks.dirpath": tmp_path / "saved",
    }
    assert main(arguments(output_dir=tmp_path / "whole", **flags)) == 0
    saved = tmp_path / "saved" / f"step={step}.ckpt"
    assert main(arguments(output_dir=tmp_path / "resumed", ckpt_path=saved, trainer__max_epochs=2)) == 0
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert sorted(resumed) == list(range(step, 10))
    assert all(resumed[later] == whole[later] for later in resumed)
    assert_bit_equal(weights(tmp_path / "whole"), weights(tmp_path / "resumed"))


def test_lora_trains_adapters_and_exports_merged_weights(arguments, shop, tmp_path, capsys):
    pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    assert main(arguments(model__use_peft="true", model__lora_r=4)) == 0
    before, after = load_file(shop / "model" / "model.safetensors"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert (tmp_path / "out" / "model" / "adapter" / "adapter_model.safetensors").is_file()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    checkpoint = tmp_path / "out" / "checkpoints" / "last"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output_dir={tmp_path / 'exported'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"model        {tmp_path / 'exported'}"
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_bit_equal(exported, after)


def test_activation_checkpointing_changes_nothing(arguments, tmp_path):
    for name, value in (("off", "false"), ("on", "true")):
        assert main(arguments(output_dir=tmp_path / name, model__activation_checkpointing=value)) == 0
    off, on = losses(tmp_path / "off"), losses(tmp_path / "on")
    assert max(abs(off[step] - on[step]) for step in off) < 1e-6


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_precision_that_converts_the_batches(arguments, shop, tmp_path, precision):
    flags = {"trainer__precision": precision, "trainer__max_steps": 2, "data__predict_file": shop / "validation.jsonl"}
    assert main(arguments(**flags)) == 0
    assert len(losses(tmp_path / "out")) == 2
    assert main(arguments("predict", **flags)) == 0
    assert len((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()) == 5


def test_mixed_precision_is_as_good_as_the_ordinary_arms(arguments, tmp_path):
    """Its distance to the float32 losses is at most twice the ordinary arm's, and one rounding of bfloat16."""
    arms = {"truth": ("true", "32-true"), "radix": ("true", "bf16-mixed"), "ordinary": ("false", "bf16-mixed")}
    curve = {}
    for name, (dedup, precision) in arms.items():
        flags = {"dedup": dedup, "trainer__precision": precision, "trainer__max_steps": 3}
        assert main(arguments(output_dir=tmp_path / name, **flags)) == 0
        curve[name] = losses(tmp_path / name)
    for step, truth in curve["truth"].items():
        ordinary, radix = (abs(curve[name][step] - truth) for name in ("ordinary", "radix"))
        assert radix <= 2 * ordinary + 2**-8 * truth


def test_max_steps_alone_means_that_many_steps(arguments, tmp_path):
    assert main(arguments(trainer__max_epochs=None, trainer__max_steps=12)) == 0
    assert len(losses(tmp_path / "out")) == 12


def test_a_fast_dev_run_leaves_no_model_and_no_checkpoint(arguments, tmp_path):
    assert main(arguments(trainer__fast_dev_run="true")) == 0
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "checkpoints").exists()


def test_a_checkpoint_of_other_data_is_refused(arguments, tmp_path, capsys):
    assert main(arguments(trainer__max_steps=3)) == 0
    saved = tmp_path / "out" / "checkpoints" / "last"
    assert main(arguments(output_dir=tmp_path / "other", ckpt_path=saved, data__batch_size=5)) == 1
    assert "belongs to other steps: batch_size was 4 and is 5" in capsys.readouterr().err


def test_a_resume_beyond_the_last_epoch_is_one_line(arguments, tmp_path, capsys):
    assert main(arguments(trainer__max_epochs=3)) == 0
    last = tmp_path / "out" / "checkpoints" / "last"
    assert main(arguments(ckpt_path=last, trainer__max_epochs=1)) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == "error: ckpt_path: 3 epochs were begun, and trainer.max_epochs is 1; raise it to go on"


def test_sigterm_saves_and_exits_143_and_the_run_goes_on(arguments, start, tmp_path):
    """What is resumed from the checkpoint has the losses of a run that nobody interrupted."""
    flags = {"model__lr_scheduler_type": "constant", "model__learning_rate": 1e-3, "trainer__max_epochs": -1}
    endless = arguments(output_dir=tmp_path / "out", data__dataloader_num_workers=1, trainer__max_steps=10**6, **flags)
    run = start(endless)
    first_epoch = tmp_path / "out" / "checkpoints" / "last"
    deadline = time.monotonic() + 120
    while not first_epoch.exists() and run.is_running and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send(signal.SIGTERM)
    assert run.wait(60) == 143, run.said()
    assert re.match(r"stopped by SIGTERM after step \d+, which is saved; go on with", run.error())
    step = read_checkpoint(first_epoch)["global_step"]
    assert step > 0
    short = {**flags, "trainer__max_steps": step + 7}
    assert main(arguments(output_dir=tmp_path / "whole", **short)) == 0
    assert main(arguments(output_dir=tmp_path / "resumed", ckpt_path=first_epoch, **short)) == 0
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert sorted(resumed) == list(range(step, step + 7))
    assert {later: whole[later] for later in resumed} == resumed


@pytest.mark.usefixtures("wandb_offline")
def test_weights_and_biases_offline(arguments, tmp_path):
    """By its short name: the metrics are written as a file too, and the configuration where it always is."""
    assert main(arguments(trainer__max_steps=2, trainer__logger="wandb")) == 0
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
    version = tmp_path / "out" / "logs" / "version_0"
    assert (version / "metrics.csv").is_file()
    assert yaml.safe_load((version / "config.yaml").read_text())["trainer"]["logger"] == "wandb"


def test_a_loss_that_is_not_finite_stops_before_the_step(arguments, shop, tmp_path, capsys, caplog):
    assert main(arguments(model__learning_rate=1e30, model__max_grad_norm=0)) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"go on from it with --ckpt_path {tmp_path / 'out' / 'checkpoints' / 'step=1'}" in caplog.text
    assert message.startswith("error: loss")
    assert "are not both finite; the weights were not changed" in message
    assert f"{shop / 'train.jsonl'}:" in message
    assert not (tmp_path / "out" / "model").exists()


def test_predict_writes_log_probabilities_in_the_order_of_the_file(arguments, shop, tmp_path):
    records = {}
    for name, dedup in (("on", "true"), ("off", "false")):
        flags = {"data__predict_file": shop / "validation.jsonl", "dedup": dedup, "data__train_file": None}
        assert main(arguments("predict", output_dir=tmp_path / name, **flags)) == 0
        lines = (tmp_path / name / "predictions.jsonl").read_text().splitlines()
        records[name] = [json.loads(line) for line in lines]
    assert [record["row"] for record in records["on"]] == [
        f"{shop / 'validation.jsonl'}:{line}" for line in range(1, 6)
    ]
    for on, off in zip(records["on"], records["off"], strict=True):
        assert on["tokens"] == off["tokens"]
        assert on["logprobs"] == pytest.approx(off["logprobs"], abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    assert "Shelf" in tokenizer.decode(records["on"][0]["tokens"])


@pytest.fixture
def never_calibrated(tmp_path, monkeypatch):
    """A machine without a calibration, in this process and in its files; the folder where one would be kept."""
    monkeypatch.setattr("radixtrain.hf.calibration._MEASURED", {})
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "cold"))
    return tmp_path / "cold"


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_machine_that_was_never_calibrated(arguments, shop, never_calibrated, command):
    """Lightning builds some loaders in inference mode, in which nothing can be differentiated."""
    files = {f"data__{name}_file": shop / "validation.jsonl" for name in ("validation", "test", "predict")}
    assert main(arguments(command, **files, trainer__max_steps=1 if command == "fit" else None)) == 0
    assert len(list(never_calibrated.glob("rates-*.json"))) <= 1


def test_a_run_that_is_resumed_on_another_machine_chooses_as_before(arguments, tmp_path, never_calibrated, monkeypatch):
    rates = Rates(call=1e-3, rectangle=0, pair=0, element=0, flop=1e-12)
    monkeypatch.setattr("radixtrain.hf.calibration.measured_rates", lambda layer: (rates, 0.0))
    assert main(arguments(trainer__max_steps=2)) == 0
    saved = tmp_path / "out" / "checkpoints" / "step=2"
    assert read_checkpoint(saved)["radixtrain_rates"]["call"] == 1e-3
    monkeypatch.setattr("radixtrain.hf.calibration._MEASURED", {})
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr("radixtrain.hf.calibration.measured_rates", lambda layer: pytest.fail("measured again"))
    assert main(arguments(output_dir=tmp_path / "resumed", ckpt_path=saved, trainer__max_steps=3)) == 0


def test_a_deterministic_run_does_not_depend_on_a_calibration(arguments, tmp_path, never_calibrated, monkeypatch):
    """Two machines would choose otherwise; without the setting their losses differ in the last digits."""
    found = {}
    slow = Rates(call=1.0, rectangle=1.0, pair=1e-3, element=1e-3, flop=1e-12)
    fast = Rates(call=1e-9, rectangle=1e-9, pair=1e-9, element=1e-9, flop=1.0)
    for deterministic in ("true", "false"):
        for name, rates in (("slow", slow), ("fast", fast)):
            monkeypatch.setattr("radixtrain.hf.calibration._MEASURED", {})
            monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / f"{name}_{deterministic}"))
            monkeypatch.setattr("radixtrain.hf.calibration.measured_rates", lambda layer, rates=rates: (rates, 0.0))
            out = tmp_path / f"out_{name}_{deterministic}"
            try:
                assert main(arguments(output_dir=out, trainer__deterministic=deterministic)) == 0
            finally:
                torch.use_deterministic_algorithms(False)
            found[name, deterministic] = losses(out)
    assert found["slow", "true"] == found["fast", "true"]
    assert found["slow", "false"] != found["fast", "false"]


@pytest.mark.parametrize(("command", "split"), [("validate", "validation"), ("test", "test")])
def test_validation_is_the_mean_over_tokens(arguments, shop, capsys, command, split):
    """The same however it is batched."""
    shown = set()
    for batch_size in (1, 5):
        flags = {
            f"data__{split}_file": shop / "validation.jsonl",
            "data__train_file": None,
            "data__batch_size": batch_size,
        }
        assert main(arguments(command, **flags)) == 0
        printed = capsys.readouterr().out
        shown.add(next(word for word in printed.split() if word.replace(".", "").isdigit() and "." in word)[:7])
    assert len(shown) == 1
