"""The page of chat templates: ids, labels and counts are as when it was written, and the comparison is no echo."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tiers import FULL

trl = pytest.importorskip("trl", reason="its chat templates are compared: pip install trl")
import templates  # noqa: E402  after trl, which it needs

MADE = json.loads(templates.TABLE.read_text("utf-8"))
ROWS = templates.chats()
NAMES = pytest.mark.parametrize("name", MADE["templates"])
SAMPLE = "deepseekv3 diffusion_gemma gptoss phi3 qwen3_5_nothink"


@pytest.fixture(autouse=True)
def day() -> Iterator[None]:
    with templates.frozen():
        yield


def known(name: str) -> Any:
    if trl.__version__ != MADE["trl"]:
        pytest.skip(f"the page is of TRL {MADE['trl']}: `python recipes/templates.py` writes that of {trl.__version__}")
    if name not in templates.templates():
        pytest.skip(f"{name}: needs its tokenizer in runs/real")
    return MADE["templates"][name]


@pytest.mark.parametrize("name", SAMPLE.split())
def test_the_first_chats_of_some(name: str) -> None:
    expected = known(f"TRL {name}")
    found = templates.measured(f"TRL {name}", ROWS[: templates.NUM_FIRST])
    assert found["first"] == expected["first"], found["outcomes"]


@FULL
@NAMES
def test_every_chat(name: str) -> None:
    expected = known(name)
    assert templates.measured(name, ROWS) == expected


def test_nothing_is_wrong_and_the_page_is_of_this_table() -> None:
    kinds = {what for found in MADE["templates"].values() for what in found["outcomes"]}
    assert not [what for what in kinds if what.startswith(("wrong", "refused: none found"))]
    if trl.__version__ == MADE["trl"]:
        assert templates.PAGE.read_text("utf-8") == "\n".join(templates.lines(MADE["templates"])) + "\n"


def test_a_wrong_sample_is_told() -> None:
    """Loss on the prompt, and a turn without its end."""
    tokenizer, [row] = templates.templates()["TRL qwen2_5"](), templates.chats(1)
    reference = templates.Reference(tokenizer, row)
    turn = reference.turns()[0]

    def sample() -> Any:
        return templates.ChatEncoder(tokenizer).encode(templates.Row(row, "a:1"))[0]

    right = sample()
    assert reference.of_turn(turn, right) == templates.SAME_IDS
    right.labels[3] = right.input_ids[3]
    assert reference.of_turn(turn, right) == "wrong: other prompt"
    short = sample()
    short.input_ids, short.labels = short.input_ids[:-1], short.labels[:-1]
    assert reference.of_turn(turn, short) == "wrong: other text"
