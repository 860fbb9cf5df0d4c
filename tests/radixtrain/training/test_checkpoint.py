"""The folder that a model is written to: replaced as a whole, and only if that loses nothing else."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.training.checkpoint import check_model_folder, save_hf_folder


@pytest.fixture
def parts(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model"), AutoTokenizer.from_pretrained(shop / "model")


def test_a_model_of_before_is_replaced(parts, tmp_path):
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
    assert main(arguments(model__model_name_or_path=base)) == 1
    assert "is read from there; choose another" in capsys.readouterr().err


class Failing:
    def save_pretrained(self, folder):
        raise ZeroDivisionError
