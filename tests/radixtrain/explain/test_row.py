"""One row through every stage, and a row that is refused as far as it got."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError
from radixtrain.explain.row import find_row, sample_locations, shared_rows, show_row


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


def test_tokens_have_their_ids_labels_and_weights(data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    row = {"input_ids": [40, 41, 42, 43], "labels": [-100, -100, 42, 50], "loss_weights": [1, 1, 1, 0.5]}
    line = next(line for line in shown(data_of(row), 1).splitlines() if line.split()[:2] == ["0", "40"])
    cells = line.split()
    assert cells[:-1] == ["0", "40", "D", "1", "41", "E", "2", "42", "⟦F⟧", "3", "43"]
    assert cells[-1] == "⟦G⟧→50×0.5"


@pytest.mark.parametrize(
    ("row", "stages", "refused"),
    [
        ('{"prompt": "a"', ['{"prompt": "a"'], "not valid JSON: Expecting ',' delimiter"),
        ('{"prompt": "a", "completion": "b\udcff"}', ["b\\xff"], "not valid UTF-8: byte 0xff"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "narrator", "content": "x"}]},
            ["Hi"],
            "unknown role",
        ),
        ({"text": "a", "label": "spam"}, ["spam"], "label beside text"),
        ({"text": "a"}, ["taken as: text", "rendered: plain text", "tokens: "], ""),
        ({"input_ids": [5, -6, 99999], "labels": [-100, 7, 8]}, ["⟦<-6>⟧→7"], "token id -6 at position 1 is outside"),
        ({"prompt": "a", "completion": "b" * 60}, ["⟦" + "b" * 60], "tokens exceed max_length 40"),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, ["tokens: 2, 0 with loss"], "no token bears loss"),
    ],
)
def test_a_row_that_is_refused_is_shown_as_far_as_it_got(
    data_of: Callable[..., SFTData],
    shown: Callable[..., str],
    row: dict[str, Any] | str,
    stages: list[str],
    refused: str,
) -> None:
    text = " ".join(shown(data_of(pair("Here."), row, max_length=40), 2).split())
    places = [text.index(stage) for stage in stages]
    assert places == sorted(places)
    assert ("refused: " in text) == bool(refused) == ("computed, in the first epoch" not in text)
    assert refused in text


def test_a_good_row_among_bad_ones(data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    """Its step cannot be made, unless the bad ones are skipped."""
    rows = (pair("Here."), {"text": 5})
    assert "unknown, since the steps cannot be made: " in shown(data_of(*rows), 1)
    assert "step 0 of 1, micro-batch 0 of 1, sequence 0 of 1" in shown(data_of(*rows, on_bad_row="skip"), 1)


def test_one_sample_for_each_turn(data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    turns = [{"role": role, "content": f"{role} {n}"} for n in (1, 2) for role in ("user", "assistant")]
    text = shown(data_of({"messages": turns}), 1)
    for title in ("rendered 1 of 2: a turn", "rendered 2 of 2: a turn", "tokens 1 of 2: ", "tokens 2 of 2: "):
        assert title in text
    assert text.count("  step 0 of 1, micro-batch 0 of 1") == 2


def test_what_the_columns_mean_and_what_nothing_reads(
    data_of: Callable[..., SFTData], shown: Callable[..., str]
) -> None:
    text = shown(data_of({"instruction": "Name it.", "input": "x", "output": "y", "source": "web"}), 1)
    assert "taken as: messages\n" in text
    assert '{"role": "user", "content": "Name it.\\nx"}' in text
    assert "not read: source" in text


def test_a_row_that_is_dropped_or_cut(data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    rows = (pair("x"), pair("x" * 60))
    dropped = shown(data_of(*rows, max_length=30, excess_length_strategy="drop"), 2)
    assert "dropped for their length: 1 of 1 samples" in dropped and "computed" not in dropped
    cut = shown(data_of(*rows, max_length=30, excess_length_strategy="truncate"), 2)
    assert "cut to max_length, 30 tokens: 1 of 1 samples" in cut and "computed" in cut


def test_a_row_taken_for_validation(data_of: Callable[..., SFTData], shown: Callable[..., str]) -> None:
    data = data_of(*(pair(str(n)) for n in range(4)), val_size=2)
    texts = [shown(data, row) for row in range(1, 5)]
    assert sum("not trained: data.val_size took the row for validation" in text for text in texts) == 2


def test_rows_are_found_by_number_and_by_name(data_of: Callable[..., SFTData], tmp_path: Path) -> None:
    data = data_of(pair("a"), "", "{", pair("b"))
    where = f"{tmp_path}/chats.jsonl:4"
    assert [find_row(data, row).where for row in (3, "3", "chats.jsonl:4", where)] == [where] * 4
    assert find_row(data, 2).content.where.endswith("chats.jsonl:3")


def test_a_row_of_another_file(data_of: Callable[..., SFTData], shop: Path, shown: Callable[..., str]) -> None:
    data = data_of(pair("a"), validation_file=str(shop / "validation.jsonl"))
    text = shown(data, "validation.jsonl:2")
    assert "validation.jsonl:2: row 2 of data.validation_file" in text and "computed" not in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (0, "row: data.train_file has the rows 1 to 2, got 0"),
        (3, "row: data.train_file has the rows 1 to 2, got 3"),
        (
            "chats.jsonl:9",
            "row: no row 'chats.jsonl:9' in the files of the configuration; expected a number or file:line",
        ),
        ("ats.jsonl:1", "row: no row 'ats.jsonl:1'"),
    ],
)
def test_no_such_row(data_of: Callable[..., SFTData], row: int | str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_row(data_of(pair("a"), pair("b")), row)


def test_what_a_sample_shares_adds_up_to_its_tokens(data_of: Callable[..., SFTData]) -> None:
    data = data_of(*(pair(answer) for answer in ("a b", "a c", "d", "a b")), shuffle_dataset=False)
    data.setup("inspect")
    for conversation in data.conversations["train"]:
        [(part, sequence)] = sample_locations(data, conversation[0].where)
        firsts, lasts, others = zip(*shared_rows(part, sequence), strict=True)
        rows = [row for first, last in zip(firsts, lasts, strict=True) for row in range(first, last + 1)]
        assert part.batch["input_ids"][0][rows].tolist() == conversation[0].input_ids.tolist()
        assert sorted(map(len, others), reverse=True) == [*map(len, others)]


def test_it_is_printed_stage_by_stage(data_of: Callable[..., SFTData]) -> None:
    """What is known of a row is on the screen before the other rows are read."""
    data = data_of(pair("a"))
    stages, seen = show_row(data, 1), []
    while "train" not in data.conversations:
        seen.append(next(stages))
    assert str(seen[-2]) == "\ncomputed, in the first epoch"
