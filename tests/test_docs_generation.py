"""docs/generation.md: its examples run, its options are those of the code, and so are its numbers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.generation.generate import LANE_SLOTS, MAX_LANES
from radixtrain.generation.options import INSTEAD, REFUSED, USED
from radixtrain.generation.passes import PIECE_CELLS

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "generation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def examples(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Runs all blocks of the page one after the other, with a tiny model, and returns their names."""
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        load = auto.from_pretrained
        monkeypatch.setattr(auto, "from_pretrained", lambda name, load=load: load(shop / "model"))

    def run() -> dict[str, Any]:
        names: dict[str, Any] = {}
        for block in BLOCKS:
            exec(compile(block, "docs/generation.md", "exec"), names)
        return names

    return run


def test_the_examples_run_and_do_what_is_said(examples, capsys):
    found = examples()
    assert len(found["found"]) == 3 and found["found"].stats.r > 1
    assert len(found["samples"]) == 3 * 4
    assert len(found["scores"]) == len(found["best"]) == 3
    cached = [int(number) for number in re.findall(r"^(\d+) of \d+ tokens were", capsys.readouterr().out, re.MULTILINE)]
    assert cached[0] == 0 < cached[1]
    assert found["cache"].num_tokens > found["reply"].stats.num_prompt_tokens


def test_every_supported_option_is_on_the_page():
    table = PAGE.split("<!-- options: begin -->")[1].split("<!-- options: end -->")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert named == USED
    for name in ("stopping_criteria", "seed", "logits_processor"):
        assert f"`{name}=`" in table


def test_what_the_page_says_is_refused_is():
    table = PAGE.split("**Refused**")[1].split("## How it works")[0]
    options = [line for line in table.splitlines() if line.startswith("| ") and "models" not in line]
    named = {name for line in options for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert len(named) >= 10 and named <= {*REFUSED, *INSTEAD}


def test_numbers_of_the_page():
    assert f"as many as fit {LANE_SLOTS:,} stored tokens, at most {MAX_LANES}" in PAGE
    assert f"fewer than {PIECE_CELLS}\n" in PAGE
