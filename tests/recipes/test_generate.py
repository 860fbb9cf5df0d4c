"""recipes/generate.py on a shop in miniature, and what it prints against Hugging Face's own model."""

import re
import runpy
import sys
from pathlib import Path

from tiers import FULL

from radixtrain.data.files.sources import read_rows
from radixtrain.verification.oracle import float64_arithmetic

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "generate.py"
THINKING = {"enable_thinking": False}


@FULL
def test_prints_what_the_model_says(shop, monkeypatch, capsys):
    """In float64, so that two tokens nearly as likely are told apart. Every use shares."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = (f"--model={shop / 'model'}", f"--file={shop / 'validation.jsonl'}")
    monkeypatch.setattr(sys, "argv", [RECIPE.name, *files, "--max_new_tokens=4"])
    loaded, from_pretrained = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda path: loaded.append(from_pretrained(path).double()) or loaded[0]
    )
    with float64_arithmetic():
        runpy.run_path(str(RECIPE), run_name="__main__")
        printed = capsys.readouterr().out
        tokenizer, (model,) = AutoTokenizer.from_pretrained(shop / "model"), loaded
        chats = [row.fields["messages"] for row in read_rows(shop / "validation.jsonl")]
        lines = [line for line in printed.splitlines() if line.startswith(("answer: ", "sample: "))]
        for chat, line in zip(chats, lines[: len(chats)], strict=True):
            prompt = tokenizer.apply_chat_template(
                chat[:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt", **THINKING
            )
            answer = model.generate(**prompt, max_new_tokens=4)[0, prompt["input_ids"].shape[1] :]
            assert line == f"answer: {tokenizer.decode(answer, skip_special_tokens=True)!r}"
    assert len(lines) == len(chats) + 2 * 4, "an answer to each, and 4 samples of 2"
    assert_shares(printed)


def assert_shares(printed: str) -> None:
    num_tokens, num_computed = re.findall(r"num_tokens=(\d+), .*num_computed=(\d+)", printed)[0]
    assert int(num_tokens) > 2 * int(num_computed)
    assert re.search(r"\d choices for each prompt: [\d.]+% are right", printed)
    (first, cached), (second, cached_then) = (
        map(int, turn) for turn in re.findall(r"turn of (\d+) tokens, (\d+) of them cached", printed)
    )
    assert cached == 0 and second > first and cached_then > 0.8 * first


def test_a_reader_sees_it_on_one_screen():
    text = RECIPE.read_text(encoding="utf-8")
    assert "python recipes/generate.py" in text and len(text.splitlines()) <= 72
