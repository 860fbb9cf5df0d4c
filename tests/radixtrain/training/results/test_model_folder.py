"""The folder that a model is written to: replaced as a whole, and only if that loses nothing else. And its card."""

import re
import shutil

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.training.results.model_folder import (
    CARD,
    MARK,
    OF_PROCESSOR,
    card_and_settings,
    save_hf_folder,
)
from tests.support.models import tiny_model

OURS = {CARD: MARK}


@pytest.fixture
def parts(shop):
    return AutoModelForCausalLM.from_pretrained(shop / "model"), AutoTokenizer.from_pretrained(shop / "model")


def test_a_previous_model_is_replaced_and_files_of_ones_own_are_never_lost(parts, tmp_path):
    for _ in range(2):
        save_hf_folder(*parts, tmp_path / "model", OURS)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "precious").mkdir()
    shutil.copytree(tmp_path / "model", tmp_path / "downloaded")
    (tmp_path / "downloaded" / CARD).unlink()
    with pytest.raises(UserError, match=r"holds files that are not a model \(no README.md of radixtrain\)"):
        save_hf_folder(*parts, tmp_path / "downloaded", OURS)
    for folder, name in (
        *(("model", name) for name in ("results.json", "notes.txt", "thesis.md", "run1.safetensors", CARD)),
        ("precious", "thesis.tex"),
    ):
        path = tmp_path / folder / name
        path.write_text("years")
        with pytest.raises(UserError, match=rf"holds files that are not a model \({re.escape(name)}\)"):
            save_hf_folder(*parts, tmp_path / folder, OURS)
        assert path.read_text() == "years"
        path.unlink()


def test_a_model_that_sees_images_gets_the_files_of_its_processor(parts, tmp_path):
    base = tmp_path / "base"
    parts[1].save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    tokenizer = AutoTokenizer.from_pretrained(base)
    for model, files in (
        (tiny_model("LlavaForConditionalGeneration"), {"preprocessor_config.json"}),
        (parts[0], set()),
    ):
        for _ in range(2):
            save_hf_folder(model, tokenizer, tmp_path / type(model).__name__, OURS)
        written = {path.name for path in (tmp_path / type(model).__name__).iterdir()}
        assert written & set(OF_PROCESSOR) == files


def test_fit_does_not_overwrite_its_own_base(arguments, shop, tmp_path, parts, capsys):
    save_hf_folder(*parts, tmp_path / "out" / "model", OURS)
    base = tmp_path / "out" / "model"
    assert main(arguments(model__model_name_or_path=base, overwrite="true")) == 1
    assert "out/model is inside of output_dir" in capsys.readouterr().err
    assert main(arguments(model__model_name_or_path=base, output_dir=tmp_path / "out", ckpt_path="auto")) == 1
    assert "holds another run (model/)" in capsys.readouterr().err


CONFIG = {
    "model": {"model_name_or_path": "Qwen/Qwen3-0.6B", "learning_rate": 1e-5, "use_peft": True, "lora_r": 8},
    "data": {"train_file": [{"path": "org/chats", "weight": 2}, "my folder/rows.jsonl"], "batch_size": 32},
}


def test_the_front_matter_is_hugging_faces(tmp_path):
    card = card_and_settings(CONFIG, {"loss": "2.0 -> 1.0"}, {"rows": "3 rows"})[CARD]
    data = ModelCard(card).data
    assert (data.base_model, data.datasets) == ("Qwen/Qwen3-0.6B", ["org/chats"])
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["radixtrain", "sft", "lora"]
    for text in ("| loss | 2.0 -> 1.0 |", "| files | chats, rows.jsonl |"):
        assert text in card


def test_a_folder_of_this_machine_is_not_named():
    config = {
        "model": {"model_name_or_path": "/a/secret place/base"},
        "data": {"train_file": "/a/secret place/x.jsonl"},
    }
    card = card_and_settings(config, {}, {})[CARD]
    assert "secret place" not in card and ModelCard(card).data.base_model is None
    assert "# base, fine-tuned on x.jsonl\n" in card
