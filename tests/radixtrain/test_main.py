"""What a user types, and what comes back when it is wrong: one line, the right exit code, nothing written."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import radixtrain
from radixtrain.__main__ import main
from radixtrain.commands import COMMANDS, Command
from radixtrain.commands.lightning import RadixCLI
from radixtrain.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "Where is the pear?"}, {"role": "assistant", "content": "Shelf one."}]}
ROBOT = {"messages": [{"role": "robot", "content": "x"}]}


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


class TestBadInput:
    @pytest.fixture
    def fails(self, arguments, tmp_path, capsys):
        def run(code, **flags):
            assert main(arguments(**flags)) == code
            captured = capsys.readouterr()
            errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1
            assert "Traceback" not in captured.err
            assert not (tmp_path / "out").exists()
            return errors[0].removeprefix("error: ")

        return run

    def test_missing_file(self, fails, tmp_path):
        assert fails(1, data__train_file=tmp_path / "none.jsonl") == f"no such file: {tmp_path / 'none.jsonl'}"

    def test_empty_file(self, fails, tmp_path):
        assert "no rows in" in fails(1, data__train_file=write(tmp_path / "empty.jsonl"))

    def test_malformed_line(self, fails, tmp_path):
        path = write(tmp_path / "rows.jsonl", GOOD, '{"messages": [')
        assert fails(1, data__train_file=path).startswith(f"{path}:2: not valid JSON")

    def test_unknown_role(self, fails, tmp_path):
        path = write(tmp_path / "rows.jsonl", GOOD, GOOD, ROBOT)
        assert fails(1, data__train_file=path).startswith(f"{path}:3: messages: turn 1: unknown role 'robot'")

    def test_row_without_a_loss_bearing_token(self, fails, tmp_path):
        path = write(tmp_path / "rows.jsonl", {"input_ids": [1, 2], "labels": [-100, -100]})
        assert fails(1, data__train_file=path).startswith(f"{path}:1: no token bears loss")

    def test_token_outside_the_vocabulary(self, fails, tmp_path):
        path = write(tmp_path / "rows.jsonl", {"input_ids": [1, 2, 70000]})
        assert f"{path}:1: token id 70000 at position 2 is outside the vocabulary" in fails(1, data__train_file=path)

    def test_over_long_row(self, fails, shop):
        message = fails(1, data__max_length=20)
        assert message.startswith(f"{shop / 'train.jsonl'}:1: ")
        assert "74 tokens exceed max_length 20, and so do 19 more" in message
        assert "raise max_length or set excess_length_strategy: drop | truncate" in message

    def test_unknown_key(self, fails):
        assert fails(2, model__lerning_rate=1) == "no key model.lerning_rate, did you mean model.learning_rate?"

    def test_unfinished_key(self, fails):
        """argparse would take it for the only key that begins so."""
        assert fails(2, data__max_token=1) == "no key data.max_token, did you mean data.max_tokens?"

    def test_unknown_key_of_a_file(self, fails, tmp_path):
        config = write(tmp_path / "my.yaml", "model:", "  learning_rte: 1")
        assert fails(2, config=config) == "no key model.learning_rte, did you mean model.learning_rate?"

    def test_wrong_type(self, fails):
        assert fails(2, model__learning_rate="abc") == "model.learning_rate must be a number; got abc"

    def test_unknown_attention(self, fails):
        message = "model.attention must be one of auto, cascade, path, expand, reference; got ring"
        assert fails(2, model__attention="ring") == message

    def test_misspelt_value(self, fails):
        assert fails(2, model__attention="cascde").endswith("; got cascde, did you mean cascade?")

    def test_short_name_of_a_logger(self, fails):
        assert fails(2, trainer__logger="wandbb") == "trainer.logger: no 'wandbb', did you mean wandb?"

    def test_attention_that_cannot_be_had(self, fails):
        assert fails(1, model__kernel="flash_attn").startswith("kernel='flash_attn' cannot be used: needs CUDA")

    def test_unknown_hugging_face_attention(self, fails):
        message = fails(1, dedup="false", model__attn_implementation="sdpaa")
        assert message.startswith("model.model_name_or_path")
        assert "sdpaa" in message

    def test_missing_model(self, fails, tmp_path):
        message = f"model.model_name_or_path: no such folder: {tmp_path / 'nowhere'}"
        assert fails(1, model__model_name_or_path=tmp_path / "nowhere") == message

    def test_weights_are_looked_for_before_the_rows_are_read(self, fails, shop, tmp_path):
        folder = shutil.copytree(shop / "model", tmp_path / "model")
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        flags = {"model__model_name_or_path": folder, "data__train_file": tmp_path / "none.jsonl"}
        assert fails(1, **flags).startswith(f"{path}: the weights are incomplete, ")
        path.unlink()
        assert "no weights (model.safetensors or model.safetensors.index.json)" in fails(1, **flags)

    def test_misspelt_monitor(self, fails):
        callback = {"class_path": "EarlyStopping", "init_args": {"monitor": "eval_los"}}
        message = "trainer.callbacks: EarlyStopping: monitor: no metric 'eval_los', did you mean eval_loss?"
        assert fails(1, trainer__callbacks=json.dumps([callback])) == message

    def test_missing_config(self, fails):
        assert "nope.yaml" in fails(2, config="nope.yaml")

    def test_no_training_file(self, fails):
        assert fails(1, data__train_file=None) == "data.train_file is missing: name the file to train on"

    def test_sequences_that_fit_no_micro_batch(self, fails):
        assert fails(1, data__max_tokens=100).startswith("data.max_length 4096 exceeds data.max_tokens 100")

    def test_several_machines_without_a_launcher(self, fails):
        message = "trainer.num_nodes 2: start the command on each machine with torchrun, or with srun"
        assert fails(1, trainer__num_nodes=2).startswith(message)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"trainer__accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches: a step is cut by"),
            ({"trainer__barebones": "true"}, "trainer.barebones: a run logs its steps and saves them; leave it out"),
            ({"trainer__gradient_clip_val": 1.0}, "trainer.gradient_clip_val: set model.max_grad_norm instead"),
            ({"trainer__precision": "16-mixed"}, "trainer.precision 16-mixed: float16 needs a loss scale"),
            ({"trainer__accelerator": "cuda"}, "trainer: "),
            ({"model__learning_rate": -1}, "model.learning_rate must not be negative, got -1"),
            ({"model__learning_rate": ".inf"}, "model.learning_rate must be a finite number, got inf"),
            ({"model__adam_beta1": 2}, "model.adam_beta1 must be at least 0 and below 1, got 2"),
            ({"seed_everything": -1}, "seed_everything must be from 0 to 4294967295, got -1"),
            ({"data__dataloader_num_workers": -1}, "data.dataloader_num_workers must be at least 0, got -1"),
            ({"ckpt_path": "nope.ckpt"}, "ckpt_path: no such checkpoint: nope.ckpt"),
            ({"model__use_peft": "true", "model__lora_r": 0}, "model.lora_r must be at least 1, got 0"),
            (
                {"model__use_peft": "true", "model__lora_target_modules": "[nope]"},
                "model.lora_target_modules: no layer has a name of ['nope']; linear layers are down_proj, ",
            ),
            (
                {"model__use_peft": "true", "model__lora_target_modules": "[lm_head]"},
                "model.lora_target_modules: lm_head shares its weight with model.embed_tokens",
            ),
        ],
    )
    def test_settings_that_cannot_be_met(self, fails, flags, message):
        assert fails(1, **flags).startswith(message)

    def test_a_resume_from_what_is_no_checkpoint(self, fails, tmp_path):
        """Said before the data are read."""
        (tmp_path / "x.ckpt").write_text("PK, but no zip file")
        message = fails(1, ckpt_path=tmp_path / "x.ckpt", data__train_file=tmp_path / "none.jsonl")
        assert message.startswith(f"ckpt_path {tmp_path / 'x.ckpt'}: not a checkpoint of radixtrain")

    def test_a_trainer_that_lightning_refuses(self, fails):
        assert "strategy" in fails(1, trainer__strategy="nonsense")

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"trainer__devices": 0}, "trainer: `Trainer(devices='0')` value is not a valid input"),
            ({"trainer__devices": -1}, "trainer: `devices` selected with `CPUAccelerator"),
            ({"trainer__precision": "transformer-engine"}, "trainer: Requirement 'transformer_engine"),
        ],
    )
    def test_whatever_lightning_raises_for_it(self, fails, flags, message):
        assert fails(1, trainer__accelerator="cpu", **flags).startswith(message)

    def test_an_error_of_our_own_is_not_blamed_on_the_trainer(self, arguments, monkeypatch):
        def broken(*args):
            raise ValueError("a bug")

        monkeypatch.setattr(RadixCLI, "instantiate_trainer", broken)
        with pytest.raises(ValueError, match=r"^a bug$") as raised:
            main(arguments())
        assert not isinstance(raised.value, UserError)

    def test_a_class_of_another_package(self, fails, tmp_path, monkeypatch):
        (tmp_path / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
        monkeypatch.syspath_prepend(tmp_path)
        config = tmp_path / "evil.yaml"
        config.write_text("trainer:\n  callbacks:\n  - class_path: evil.Callback\n")
        nested = '[{"class_path": "evil.Callback"}]'
        for flags in ({"config": config}, {"trainer__callbacks": "evil.Callback"}, {"trainer__callbacks": nested}):
            assert "'evil.Callback' is not imported: a configuration may name only classes of" in fails(2, **flags)
        assert not (tmp_path / "evil.ran").exists()


class TestBadRowsCanBeSkipped:
    def test_they_are_reported_and_the_rest_is_trained_on(self, arguments, shop, tmp_path, caplog):
        lines = (shop / "train.jsonl").read_text().splitlines()
        path = write(tmp_path / "rows.jsonl", *lines[:4], ROBOT, *lines[4:8], "{")
        assert main(arguments(data__train_file=path, data__on_bad_row="skip", trainer__max_epochs=1)) == 0
        text = caplog.text
        assert f"skipped {path}:5: messages: turn 1: unknown role" in text
        assert f"skipped {path}:10: not valid JSON" in text
        assert (tmp_path / "out" / "model").exists()


class TestUsage:
    def test_without_a_command(self, capsys):
        assert main([]) == 2
        assert "usage: python -m radixtrain" in capsys.readouterr().out

    def test_help(self, capsys):
        assert main(["--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == "  fit        fine-tune: python -m radixtrain fit --config configs/sft.yaml"
        assert [line.split()[0] for line in lines[2 : 2 + len(COMMANDS)]] == list(COMMANDS)

    def test_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"radixtrain {radixtrain.__version__}\n"

    @pytest.mark.parametrize(
        ("typed", "meant"),
        [("fti", ", did you mean fit?"), ("--verify", ", did you mean verify?"), ("--config", ";")],
    )
    def test_unknown_command(self, capsys, typed, meant):
        assert main([typed]) == 2
        commands = ", ".join(COMMANDS)
        assert capsys.readouterr().err == f"error: no command {typed!r}{meant} commands: {commands}\n"

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help(self, name, capsys):
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: radixtrain {name} ")

    def test_a_row_of_the_table_is_all_that_a_command_needs(self, monkeypatch, capsys):
        """A module with `run(argv)`, which gets the command's name and its arguments."""
        ran = []
        module = SimpleNamespace(run=lambda argv: ran.append(argv))
        monkeypatch.setitem(sys.modules, "radixtrain.commands.inspect", module)
        monkeypatch.setitem(COMMANDS, "inspect", Command("inspect", "inspect", "one batch"))
        assert main(["inspect", "--step", "3"]) == 0
        assert ran == [["inspect", "--step", "3"]]
        main(["--help"])
        assert "  inspect    one batch\n" in capsys.readouterr().out

    def test_export_of_nothing(self, capsys, tmp_path):
        assert main(["export", f"--ckpt_path={tmp_path / 'x.ckpt'}", f"--output_dir={tmp_path / 'y'}"]) == 1
        assert "no such checkpoint" in capsys.readouterr().err

    def test_export_of_the_last_of_no_run(self, capsys, tmp_path):
        assert main(["export", "--ckpt_path=last", f"--output_dir={tmp_path / 'y'}"]) == 1
        assert "ckpt_path last: of which run? write RUN/checkpoints/last" in capsys.readouterr().err

    def test_export_of_something_else(self, capsys, tmp_path):
        (tmp_path / "x.ckpt").write_text("not a checkpoint")
        assert main(["export", f"--ckpt_path={tmp_path / 'x.ckpt'}", f"--output_dir={tmp_path / 'y'}"]) == 1
        assert "not a checkpoint of radixtrain" in capsys.readouterr().err
        assert not (tmp_path / "y").exists()

    def test_in_a_process_of_its_own(self, arguments, tmp_path):
        command = [sys.executable, "-m", "radixtrain", *arguments(data__train_file=tmp_path / "none.jsonl")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"error: no such file: {tmp_path / 'none.jsonl'}"
        assert "Traceback" not in done.stderr
