"""The weights of a checkpoint, whole or only adapters, of this version or an earlier one, in a module and exported."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_checkpoint, write_checkpoint
from radixtrain.errors import UserError
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_folder import save_hf_folder
from radixtrain.training.survival.folder_lock import locked_model
from radixtrain.training.survival.weights import load_weights, trained_names

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "before_the_moves"
ROUNDING = 1e-5  # relative; another CPU sums in another order. With Adam's step count off by one it is 2e-3


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
