"""docs/generation.md: its examples run, and what it says is refused is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.generation.generate import REFUSED
from radixtrain.hf.backbone import CACHE
from tests.pages import blocks_in, read

PAGE = read("docs/generation.md")
BLOCKS = blocks_in(PAGE)


@pytest.fixture
def examples(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Runs all blocks of the page one after the other, with a tiny model, and returns their names."""
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        load = auto.from_pretrained
        monkeypatch.setattr(auto, "from_pretrained", lambda name, load=load, **options: load(shop / "model", **options))

    def run() -> dict[str, Any]:
        names: dict[str, Any] = {}
        for block in BLOCKS:
            exec(compile(block, "docs/generation.md", "exec"), names)
        return names

    return run


def test_the_examples_run_and_do_what_is_said(examples, capsys):
    found = examples()
    assert len(found["found"]) == 3
    assert len(found["scores"]) == len(found["best"]) == 3
    cached = [int(number) for number in re.findall(r"^(\d+) of \d+ tokens were", capsys.readouterr().out, re.MULTILINE)]
    assert cached[0] == 0 < cached[1]
    assert found["cache"].num_tokens >= found["batch"]["input_ids"].shape[1]


def test_what_the_page_says_is_refused_is():
    table = PAGE.split("## What is refused")[1].split("## How it works")[0]
    named = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert {*REFUSED, "past_key_values", "inputs_embeds", "position_ids", "pixel_values"} == named
    assert "past_key_values" in CACHE
