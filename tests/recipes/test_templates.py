"""The table of templates: what is trained with each is that of transformers, and as when the table was made."""

import json
from typing import Any

import pytest
import templates
from tiers import FULL

TABLE = json.loads(templates.TABLE.read_text("utf-8"))
ROWS = templates.chats()


@pytest.mark.parametrize("name", TABLE)
def test_the_first_chats(name: str) -> None:
    if name not in templates.templates():
        pytest.skip(f"{name}: needs its tokenizer in runs/real")
    with templates.frozen():
        found = templates.measured(name, ROWS[: templates.NUM_FIRST])
    for mode, known in TABLE[name].items():
        assert found[mode]["first"] == known["first"], (mode, found[mode]["outcomes"])


@FULL
@pytest.mark.parametrize("name", TABLE)
def test_every_chat(name: str) -> None:
    if name not in templates.templates():
        pytest.skip(f"{name}: needs its tokenizer in runs/real")
    with templates.frozen():
        assert templates.measured(name, ROWS) == TABLE[name]


def test_a_wrong_sample_is_told() -> None:
    """The reference is no echo: loss on the prompt, another prompt and a lost word are found."""
    tokenizer = templates.templates()["TRL qwen3"]()
    [row] = templates.chats(1)
    encoder = templates.ChatEncoder(tokenizer)
    sample: Any = encoder.encode(templates.Row(row, "a:1"))[0]
    reference = templates.Reference(tokenizer, row)
    turn = reference.turns()[0]
    assert reference.wrong_turn(turn, sample) == ""
    sample.labels[3] = sample.input_ids[3]
    assert reference.wrong_turn(turn, sample) == "other prompt"
    sample.labels[:] = sample.input_ids
    assert reference.wrong_chat(sample, None) == "loss on other words"
