"""One row through every stage, and a row that is refused as far as it got."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

from radixtrain.data.datamodule import SFTData
from radixtrain.explain.row import find_row, show_row


@pytest.fixture
def data_of(shop: Path, tmp_path: Path) -> Callable[..., SFTData]:
    """An `SFTData` of rows that are written to chats.jsonl, as objects or as lines."""

    def build(*rows: dict[str, Any] | str, **options: Any) -> SFTData:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "chats.jsonl").write_bytes(
            "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        )
        settings = {"batch_size": 4, "dataset_num_proc": 1, "cache_dir": str(tmp_path / "cache"), **options}
        return SFTData(str(tmp_path / "chats.jsonl"), model_name_or_path=str(shop / "model"), **settings)

    return build


@pytest.fixture
def shown(printed: Callable[..., str]) -> Callable[..., str]:
    """What is printed of a row."""
    return lambda data, row, full=False: printed(Group(*show_row(data, row, full)), width=200)


def pair(answer: str) -> dict[str, str]:
    return {"prompt": "Where are the nails?\n", "completion": answer}


TURNS = [{"role": role, "content": f"{role} {n}"} for n in (1, 2) for role in ("user", "assistant")]
BAD_ROLE = {"messages": [{"role": "user", "content": "Hi"}, {"role": "narrator", "content": "x"}]}
COMPUTED = "computed, in the first epoch"
Case = tuple[list[Any], dict[str, Any], list[str], list[str]]

# The rows, of which the last is shown; settings; what is shown, in this order; and what is not.
SHOWN: dict[str, Case] = {
    "no JSON": (['{"prompt": "a"'], {}, ['{"prompt": "a"', "refused: ", "not valid JSON: Expecting ',"], [COMPUTED]),
    "no UTF-8": (['{"prompt": "a\udcff"}'], {}, ["a\\xff", "refused: ", "not valid UTF-8: byte 0xff"], [COMPUTED]),
    "a role": ([BAD_ROLE], {}, ["Hi", "refused: ", "unknown role"], [COMPUTED]),
    "text": ([{"text": "a"}], {}, ["taken as: text", "plain text: ", COMPUTED], ["refused"]),
    "an id": (
        [{"input_ids": [5, -6, 99999], "labels": [-100, 7, 8]}],
        {},
        ["2 of which learn another token", "⟦<-6><99999>⟧", "refused: ", "token id -6 at position 1 is outside"],
        [COMPUTED],
    ),
    "too long": (
        [{"prompt": "a", "completion": "b" * 60}],
        {"max_length": 40},
        ["⟦" + "b" * 60, "refused: ", "tokens exceed max_length 40"],
        [COMPUTED],
    ),
    "a good row after a bad one": ([{"text": 5}, pair("x")], {}, [COMPUTED, "unknown, since the steps cannot be"], []),
    "the bad one is skipped": (
        [{"text": 5}, pair("x")],
        {"on_bad_row": "skip"},
        [COMPUTED, "step 0 of 1, micro-batch 0 of 1, sequence 0 of 1"],
        [],
    ),
    "a sample for each turn": (
        [{"messages": TURNS}],
        {},
        [
            "a turn of the assistant 1 of 2: ",
            "a turn of the assistant 2 of 2: ",
            "step 0",
            "step 0",
        ],
        [],
    ),
    "what the columns mean": (
        [{"instruction": "Name it.", "input": "x", "output": "y", "source": "web"}],
        {},
        ["taken as: messages", '{"role": "user", "content": "Name it.\\nx"}', "not read: source"],
        [],
    ),
    "dropped": (
        [pair("x"), pair("x" * 60)],
        {"max_length": 30, "excess_length_strategy": "drop"},
        ["1 of 1 samples over max_length 30, with excess_length_strategy: drop"],
        [COMPUTED],
    ),
    "cut": (
        [pair("x" * 60)],
        {"max_length": 30, "excess_length_strategy": "truncate"},
        ["1 of 1 samples over max_length 30, with excess_length_strategy: truncate", COMPUTED],
        [],
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_row_is_shown_as_far_as_it_got(name: str, data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    rows, options, parts, absent = SHOWN[name]
    text, place = " ".join(shown(data_of(*rows, **options), len(rows)).split()), 0
    for part in parts:
        place = text.index(part, place) + 1
    assert not [part for part in absent if part in text]


def test_a_row_taken_for_validation(data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    data = data_of(*(pair(str(n)) for n in range(4)), val_size=2)
    texts = [shown(data, row) for row in range(1, 5)]
    assert sum("not trained: data.val_size took the row for validation" in text for text in texts) == 2


def test_rows_are_found_by_number_and_by_name(
    data_of: Callable[..., SFTData], tmp_path: Path, shop: Path, shown: Callable[..., str]
) -> None:
    data = data_of(pair("a"), "", "{", pair("b"), validation_file=str(shop / "validation.jsonl"))
    where = f"{tmp_path}/chats.jsonl:4"
    assert [find_row(data, row).content.where for row in (3, "3", "chats.jsonl:4", where)] == [where] * 4
    assert find_row(data, 2).content.where.endswith("chats.jsonl:3")
    text = shown(data, "validation.jsonl:2")
    assert "validation.jsonl:2: row 2 of data.validation_file" in text and "computed" not in text


def test_it_is_printed_stage_by_stage(data_of: Callable[..., SFTData]) -> None:
    """What is known of a row is on the screen before the other rows are read."""
    data = data_of(pair("a"))
    stages, seen = show_row(data, 1), []
    while "train" not in data.conversations:
        seen.append(next(stages))
    assert str(seen[-2]) == "\ncomputed, in the first epoch"
