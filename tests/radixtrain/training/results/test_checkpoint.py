"""The folder that a model is written to: replaced as a whole, and only if that loses nothing else. Checkpoints last."""

import csv
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.checkpoints import replacing
from radixtrain.checkpoints.folder import read_checkpoint, write_checkpoint
from radixtrain.errors import UserError
from radixtrain.training.module import RadixModule
from radixtrain.training.results.checkpoint import check_model_folder, load_weights, save_hf_folder, trained_names
from radixtrain.training.survival.folder_lock import locked_model

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "before_the_moves"
ROUNDING = 1e-5  # relative; another CPU sums in another order. With Adam's step count off by one it is 2e-3


@pytest.fixture
def parts(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model"), AutoTokenizer.from_pretrained(shop / "model")


def test_a_previous_model_is_replaced(parts, tmp_path):
    for _ in range(2):
        save_hf_folder(*parts, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_files_are_never_lost(parts, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"holds what is no model \(thesis\.tex\)"):
        save_hf_folder(*parts, tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("name", ["results.json", "notes.txt", "thesis.md", "run1.safetensors"])
def test_files_of_ones_own_beside_a_model_are_never_lost(parts, tmp_path, name):
    save_hf_folder(*parts, tmp_path / "model")
    (tmp_path / "model" / name).write_text("years")
    with pytest.raises(UserError, match="holds what is no model"):
        save_hf_folder(*parts, tmp_path / "model")
    assert (tmp_path / "model" / name).read_text() == "years"


def test_what_is_read_is_not_replaced(shop):
    with pytest.raises(UserError, match="is read from there"):
        check_model_folder(shop / "model", [shop / "model"])


def test_a_run_killed_between_the_renames_loses_nothing(parts, tmp_path):
    save_hf_folder(*parts, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.replaced")
    with pytest.raises(ZeroDivisionError):
        save_hf_folder(parts[0], Failing(), tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_fit_does_not_overwrite_its_own_base(arguments, shop, tmp_path, parts, capsys):
    save_hf_folder(*parts, tmp_path / "out" / "model")
    base = tmp_path / "out" / "model"
    assert main(arguments(model__model_name_or_path=base, overwrite="true")) == 1
    assert "is read from there; choose another" in capsys.readouterr().err


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_a_kill_while_it_is_replaced_leaves_a_whole_model(parts, tmp_path, monkeypatch, is_exchanged):
    """At each rename and at each file that is deleted afterwards."""
    if not is_exchanged:
        monkeypatch.setattr(replacing, "_exchange", lambda one, other: False)
    model, tokenizer = parts
    for number in range(99):
        save_hf_folder(model, tokenizer, tmp_path / "model")
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                torch.nn.init.zeros_(model.model.norm.weight)
                die_at_change(number)
                save_hf_folder(model, Silent(), tmp_path / "model")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check_model_folder(tmp_path / "model")
        norm = load_file(tmp_path / "model" / "model.safetensors")["model.norm.weight"]
        assert norm.eq(0).all() or norm.ne(0).all()
        assert (tmp_path / "model" / "tokenizer.json").exists() == bool(norm.ne(0).all())
        if code == 0:
            break
    assert number > 10 and norm.eq(0).all() and [path.name for path in tmp_path.iterdir()] == ["model"]


def die_at_change(number):
    """Ends this process, without any cleaning up, before its change number `number` of a folder."""
    left = [number]

    def count(event, arguments):
        left[0] -= event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "ctypes.dlopen")
        if left[0] < 0:
            os._exit(9)

    sys.addaudithook(count)


class Silent:
    """A tokenizer that writes nothing, which tells the new folder from the old one."""

    def save_pretrained(self, folder):
        pass


class Failing:
    def save_pretrained(self, folder):
        raise ZeroDivisionError


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """The folder of a run that the code wrote before its modules moved, as the working directory."""
    monkeypatch.chdir(shutil.copytree(GOLDEN, tmp_path / "old"))
    return Path()


def test_an_old_run_is_resumed(old_run):
    """From its own configuration, to the losses and gradients that the old code has after resuming."""
    assert main(["fit", "--config=config.yaml", "--ckpt_path=step=5.ckpt", "--output_dir=resumed"]) == 0
    with (old_run / "resumed" / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    resumed = np.array([[float(row[name]) for name in ("step", "loss", "grad_norm")] for row in rows])
    expected = np.loadtxt(old_run / "losses.txt")
    assert (resumed[:, 0] == expected[:, 0]).all() and len(expected) == 7
    np.testing.assert_allclose(resumed[:, 1:], expected[:, 1:], rtol=ROUNDING)


def test_an_old_checkpoint_is_exported(old_run):
    assert main(["export", "--ckpt_path=step=5.ckpt", "--output_dir=exported"]) == 0
    exported = load_file(old_run / "exported" / "model.safetensors")
    saved = torch.load(old_run / "step=5.ckpt", weights_only=True)["state_dict"]
    assert [name for name in exported if not torch.equal(exported[name], saved[f"model.{name}"])] == []
    assert exported.keys() >= {name.removeprefix("model.") for name in saved} - {"lm_head.weight"}


def exported(path, folder):
    assert main(["export", f"--ckpt_path={path}", f"--output_dir={folder}"]) == 0
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("text", ["out/checkpoints/step=5", "out/checkpoints/last", "out/checkpoints", "out"])
def test_a_checkpoint_folder_is_exported(old_run, text):
    write_checkpoint(old_run / "out" / "checkpoints" / "step=5", read_checkpoint(old_run / "step=5.ckpt"))
    new, old = exported(text, old_run / "new"), exported("step=5.ckpt", old_run / "old")
    assert new.keys() == old.keys() and all(torch.equal(new[name], old[name]) for name in new)


def test_a_damaged_one_is_not_exported(old_run, capsys):
    write_checkpoint(old_run / "x", read_checkpoint(old_run / "step=5.ckpt"))
    (old_run / "x" / "model.safetensors").write_bytes(b"")
    assert main(["export", "--ckpt_path=x", "--output_dir=new"]) == 1
    assert "error: ckpt_path x: model.safetensors is damaged: it has 0 bytes" in capsys.readouterr().err
    assert not (old_run / "new").exists()


def test_a_model_that_is_being_written_is_not_replaced(old_run, capsys):
    with locked_model(Path("new"), "fit"):
        assert main(["export", "--ckpt_path=step=5.ckpt", "--output_dir=new"]) == 1
    assert "error: new is in use by" in capsys.readouterr().err


class TestOnlyAdapters:
    """With LoRA a checkpoint holds what is trained; everything else is the base model's."""

    @pytest.fixture
    def module(self, shop):
        module = RadixModule(str(shop / "model"), use_peft=True, lora_r=2)
        module.configure_model()
        for weight in module.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        return module

    @pytest.fixture
    def checkpoint(self, module):
        names = trained_names(module)
        weights = {name: weight for name, weight in module.state_dict().items() if name in names}
        assert 0 < len(weights) < len(module.state_dict()) and all(".lora_" in name for name in weights)
        return {
            "state_dict": weights,
            "hyper_parameters": dict(module.hparams),
            "radixtrain": {"partial": True},
            "global_step": 3,
        }

    def test_they_are_exported_over_the_base(self, module, checkpoint, tmp_path, shop):
        write_checkpoint(tmp_path / "step=3", checkpoint)
        new = exported(tmp_path / "step=3", tmp_path / "new")
        save_hf_folder(module.model, AutoTokenizer.from_pretrained(shop / "model"), tmp_path / "expected")
        expected, base = (
            load_file(tmp_path / "expected" / "model.safetensors"),
            load_file(shop / "model" / "model.safetensors"),
        )
        assert new.keys() == expected.keys() and all(torch.equal(new[name], expected[name]) for name in new)
        assert any(not torch.equal(new[name], base[name]) for name in base)

    @pytest.mark.parametrize("change", ["one is missing", "one too many", "another shape", "said to be whole"])
    def test_anything_else_is_refused(self, module, checkpoint, change):
        weights = checkpoint["state_dict"]
        name = next(iter(weights))
        if change == "one is missing":
            del weights[name]
        elif change == "one too many":
            name = next(each for each in module.state_dict() if ".lora_" not in each)
            weights[name] = module.state_dict()[name]
        elif change == "another shape":
            weights[name] = torch.zeros(1)
        else:
            name = next(each for each in module.state_dict() if ".lora_" not in each)
            checkpoint["radixtrain"] = {"partial": False}
        before = {each: weight.clone() for each, weight in module.state_dict().items()}
        with pytest.raises(UserError, match="of another model than the configuration's") as caught:
            load_weights(module, checkpoint)
        assert name in str(caught.value)
        assert all(torch.equal(weight, before[each]) for each, weight in module.state_dict().items())
