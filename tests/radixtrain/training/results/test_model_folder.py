"""The folder that a model is written to: replaced as a whole, and only if that loses nothing else."""

import re

import pytest
import torch
from killed_in_a_fork import kills_at_file_operations
from safetensors.torch import load_file
from tiers import FULL
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.checkpoints import atomic
from radixtrain.errors import UserError
from radixtrain.training.results.model_folder import check_model_folder, save_hf_folder


@pytest.fixture
def parts(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model"), AutoTokenizer.from_pretrained(shop / "model")


def test_a_previous_model_is_replaced_and_files_of_ones_own_are_never_lost(parts, tmp_path):
    for _ in range(2):
        save_hf_folder(*parts, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "precious").mkdir()
    for folder, name in (
        *(("model", name) for name in ("results.json", "notes.txt", "thesis.md", "run1.safetensors")),
        ("precious", "thesis.tex"),
    ):
        path = tmp_path / folder / name
        path.write_text("years")
        with pytest.raises(UserError, match=rf"holds what is no model \({re.escape(name)}\)"):
            save_hf_folder(*parts, tmp_path / folder)
        assert path.read_text() == "years"
        path.unlink()


def test_fit_does_not_overwrite_its_own_base(arguments, shop, tmp_path, parts, capsys):
    save_hf_folder(*parts, tmp_path / "out" / "model")
    base = tmp_path / "out" / "model"
    assert main(arguments(model__model_name_or_path=base, overwrite="true")) == 1
    assert "is read from there; choose another" in capsys.readouterr().err


@pytest.mark.parametrize("is_exchanged", [pytest.param(True, marks=FULL), False])
def test_a_kill_while_it_is_replaced_leaves_a_whole_model(parts, tmp_path, monkeypatch, is_exchanged):
    """At each rename and at each file that is deleted afterwards."""
    if not is_exchanged:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    model, tokenizer = parts

    def replace():
        torch.nn.init.zeros_(model.model.norm.weight)
        save_hf_folder(model, Silent(), tmp_path / "model")

    save_hf_folder(model, tokenizer, tmp_path / "model")
    changes = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "ctypes.dlopen")
    for _ in kills_at_file_operations(replace, changes):
        check_model_folder(tmp_path / "model")
        norm = load_file(tmp_path / "model" / "model.safetensors")["model.norm.weight"]
        assert norm.eq(0).all() or norm.ne(0).all()
        assert (tmp_path / "model" / "tokenizer.json").exists() == bool(norm.ne(0).all())
        save_hf_folder(model, tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Silent:
    """A tokenizer that writes nothing, which tells the new folder from the old one."""

    def save_pretrained(self, folder):
        pass
