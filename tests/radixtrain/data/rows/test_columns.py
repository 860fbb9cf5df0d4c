"""What the columns of a row mean, format by format."""

import os
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data.files.sources import Source
from radixtrain.data.formats import Row, read_rows
from radixtrain.data.rows.columns import standard_row
from radixtrain.errors import DataError

RAW = (
    Path(os.environ.get("RADIXTRAIN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data" / "sft")).parent
    / "raw"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


CHAT = [user("q"), assistant("a")]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

READ: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    # a row, its standard columns, the columns that are not used
    ({"messages": CHAT, "id": 1, "source": ""}, {"messages": CHAT}, ("id",)),
    ({"conversations": SHAREGPT}, {"messages": CHAT}, ()),
    ({"conversations": CHAT}, {"messages": CHAT}, ()),
    ({"messages": SHAREGPT}, {"messages": CHAT}, ()),
    ({"conversation": CHAT, "category": "x"}, {"messages": CHAT}, ("category",)),
    ({"dialog": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, {"messages": CHAT}, ()),
    ({"conversations": SHAREGPT, "system": "s"}, {"messages": [system("s"), *CHAT]}, ()),
    (
        {"conversations": [{"from": "system", "value": "s"}, *SHAREGPT], "system": " s"},
        {"messages": [system("s"), *CHAT]},
        (),
    ),
    ({"messages": CHAT, "system_prompt": ""}, {"messages": CHAT}, ()),
    ({"messages": CHAT, "text": "rendered"}, {"messages": CHAT}, ("text",)),
    ({"messages": CHAT, "prompt": "q", "prompt_id": "7"}, {"messages": CHAT}, ("prompt", "prompt_id")),
    ({"messages": CHAT, "prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": CHAT}, ("prompt", "completion")),
    ({"messages": CHAT, "question": "q", "answer": "b"}, {"messages": CHAT}, ("question", "answer")),
    (
        {"messages": CHAT, "tools": "[]", "chat_template_kwargs": {}},
        {"messages": CHAT, "tools": "[]", "chat_template_kwargs": {}},
        (),
    ),
    ({"messages": CHAT, "chat_template_kwargs": '{"a": 1}'}, {"messages": CHAT, "chat_template_kwargs": {"a": 1}}, ()),
    ({"messages": CHAT, "functions": [{"name": "f"}]}, {"messages": CHAT, "tools": [{"name": "f"}]}, ()),
    ({"prompt": "q", "completion": "a", "n": 0}, {"prompt": "q", "completion": "a"}, ("n",)),
    (
        {"prompt": CHAT[:1], "completion": CHAT[1:], "system": "s"},
        {"prompt": [system("s"), CHAT[0]], "completion": CHAT[1:]},
        (),
    ),
    ({"instruction": "i", "output": "a"}, {"messages": [user("i"), assistant("a")]}, ()),
    ({"instruction": "i", "input": "c", "output": "a"}, {"messages": [user("i\nc"), assistant("a")]}, ()),
    (
        {"instruction": "i", "input": " ", "output": "a", "system": "s"},
        {"messages": [system("s"), user("i"), assistant("a")]},
        (),
    ),
    (
        {"instruction": "i", "output": "a", "text": "Below is i\n\na"},
        {"messages": [user("i"), assistant("a")]},
        ("text",),
    ),
    (
        {"instruction": "q", "output": "a", "history": [["x", "y"]]},
        {"messages": [user("x"), assistant("y"), *CHAT]},
        (),
    ),
    ({"system_prompt": "s", "question": "q", "response": "a", "id": "x"}, {"messages": [system("s"), *CHAT]}, ("id",)),
    *(
        ({question: "q", answer: "a"}, {"messages": CHAT}, ())
        for question, answer in [
            ("question", "answer"),
            ("query", "response"),
            ("prompt", "response"),
            ("input", "output"),
            ("user", "assistant"),
            ("problem", "solution"),
            ("instruction", "response"),
        ]
    ),
    ({"text": "t", "id": 1}, {"text": "t"}, ("id",)),
    (
        {"input_ids": [1], "labels": [1], "text": "t", "loss_weights": [1.0]},
        {"input_ids": [1], "labels": [1], "loss_weights": [1.0]},
        ("text",),
    ),
]


@pytest.mark.parametrize(("fields", "standard", "unused"), READ, ids=[" ".join(case[0]) for case in READ])
def test_what_a_row_means(fields: dict[str, Any], standard: dict[str, Any], unused: tuple[str, ...]) -> None:
    row = standard_row(Row({**fields, "nothing": None}, "a:1", ("before",)))
    assert row == Row(standard, "a:1", ("before", *unused))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"body": "b", "reply": "r", "id": 1}, "no format has the columns body, reply, id; expected messages, prompt + "),
    ({"body": "b", "reply": "r"}, "or data.columns: {user: body, assistant: reply}"),
    ({"messages": CHAT, "conversations": SHAREGPT}, "messages and conversations beside each other: write data.columns"),
    (
        {"messages": CHAT, "prompt": "other"},
        "prompt beside messages, and it is no part of it: write data.columns: {mess",
    ),
    ({"conversations": SHAREGPT, "completion": [assistant("b")]}, "completion beside conversations, and it is no part"),
    (
        {"conversations": [{"from": "system", "value": "t"}, *SHAREGPT], "system": "s"},
        "system: differs from the system",
    ),
    ({"messages": CHAT, "system": ["s"]}, "system: expected text, found ['s']"),
    ({"messages": CHAT, "system": "s", "system_prompt": "t"}, "system and system_prompt differ: write data.columns"),
    ({"question": "q", "answer": "a", "response": "b"}, "the columns can be read as "),
    ({"question": "q", "answer": "a", "context": "c"}, "write data.columns: {instruction: question, input: context, "),
    ({"question": "q", "answer": "a", "text": "other"}, "text beside question, and it is not that: write data.columns"),
    ({"question": "q", "answer": " "}, "answer: the answer is empty"),
    ({"question": "q", "answer": 1}, "answer: expected text, found 1"),
    ({"instruction": "q", "output": "a", "history": ["x"]}, "history: expected a list of [question, answer]"),
    ({"text": "t", "label": 0}, "label beside text: nobody would learn it; to answer with it, write data.columns"),
    ({"text": "t", "category": "c"}, "category beside text: nobody would learn it"),
    ({"text": "t", "system": "s"}, "system: 's' beside plain text, which has no system turn"),
    ({"prompt": "q", "completion": [assistant("a")]}, "prompt and completion: expected both as text or both as lists"),
    ({"prompt": "q", "completion": " "}, "completion: it is empty"),
    ({"messages": CHAT, "chat_template_kwargs": "{"}, "chat_template_kwargs: not valid JSON: Expecting property name"),
    ({"prompt": "q", "completion": "a", "label": False}, "label: says whether the completion is a good one, and all"),
    ({"prompt": "q"}, "no format has the columns prompt"),
    (
        {"messages": CHAT, "image": "x.png"},
        "image: only text is read; to leave it out, write data.columns: {image: nul",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=lambda case: str(case)[:50])
def test_what_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as raised:
        standard_row(Row(fields, "a:1"))
    assert str(raised.value).startswith("a:1: ") and reason in raised.value.reason
    assert "\n" not in str(raised.value)


def test_rows_that_need_no_answer() -> None:
    def read(**fields: Any) -> dict[str, Any]:
        return standard_row(Row(fields, "a:1"), answered=False).fields

    assert read(prompt="q") == {"prompt": "q"}
    assert read(prompt=[user("q")]) == {"messages": [user("q")]}
    assert read(question="q") == read(user="q") == {"messages": [user("q")]}
    assert read(instruction="q", input="c") == {"messages": [user("q\nc")]}
    with pytest.raises(DataError):
        standard_row(Row({"question": "q"}, "a:1"))


def test_what_is_standard_stays_so() -> None:
    for fields, _, _ in READ:
        row = standard_row(Row(fields, "a:1"))
        again = standard_row(Row(row.fields, "a:1"))
        assert again.fields == row.fields and not again.unused


@pytest.mark.data
@pytest.mark.skipif(not RAW.is_dir(), reason=f"no raw data sets in {RAW}; RADIXTRAIN_DATA names the folder beside them")
def test_the_raw_files() -> None:
    [banking] = {
        standard_row(row).unused
        for row in read_rows(
            Source(str(RAW / "banking77" / "train.csv"), columns={"user": "text", "assistant": "category"})
        )
    }
    assert banking == ()
    first = standard_row(
        next(read_rows(Source(str(RAW / "banking77" / "train.csv"), columns={"user": "text", "assistant": "category"})))
    )
    assert first.fields == {"messages": [user("I am still waiting on my card?"), assistant("card_arrival")]}
    with pytest.raises(DataError, match=r"train\.csv:2: category beside text: nobody would learn it"):
        standard_row(next(read_rows(RAW / "banking77" / "train.csv")))
    rows = [standard_row(row) for row in read_rows(RAW / "gsm8k" / "train.jsonl")]
    mapping = {"user": "question", "assistant": "answer"}
    mapped = [standard_row(row) for row in read_rows(Source(str(RAW / "gsm8k" / "train.jsonl"), columns=mapping))]
    assert rows == mapped and len(rows) > 7000
    plain = next(
        read_rows(Source(str(RAW / "gsm8k" / "train.jsonl"), columns={"prompt": "question", "completion": "answer"}))
    )
    assert set(standard_row(plain).fields) == {"prompt", "completion"}


TOKENS = {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({**TOKENS, "loss_mask": [0, 1, 1]}, "loss_mask: is not read; name it mask (1 for a token that bears loss)"),
        ({**TOKENS, "prompt_mask": [1, 0, 0]}, "prompt_mask: is not read; write mask"),
        ({**TOKENS, "position_ids": [0, 1, 0]}, "position_ids: is not read: a row is one sequence"),
        ({"text": "q", "completion": "a"}, "completion beside text: nobody would learn it"),
        ({"text": "q", "summary": "a"}, "summary beside text: nobody would learn it"),
        ({"messages": [*CHAT, user("r")], "answer": "b"}, "ends with a question, and answer beside it would not be"),
        ({"prompt": "q", "completion": "a", "label": 0}, "label: says whether the completion is a good one"),
        ({"prompt": "q", "completion": "a", "label": "False"}, "label: says whether the completion is a good one"),
    ],
)
def test_what_would_be_lost_in_silence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as raised:
        standard_row(Row(fields, "a.jsonl:1"))
    assert reason in str(raised.value)


def test_a_question_without_an_answer_beside_it(tmp_path: Path) -> None:
    chat = [*CHAT, user("r")]
    assert standard_row(Row({"messages": chat, "topic": "x"}, "a:1")).unused == ("topic",)
    assert standard_row(Row({"messages": chat, "answer": "b"}, "a:1"), answered=False).fields == {"messages": chat}


def test_labels_and_masks_come_with_mapped_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": [1, 2], "labels": [-100, 2], "id": 7}', encoding="utf-8")
    (row,) = read_rows(Source(str(path), columns={"input_ids": "tokens"}))
    assert row.fields == {"input_ids": [1, 2], "labels": [-100, 2]} and row.unused == ("id",)
