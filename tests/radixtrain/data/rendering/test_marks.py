"""Words in a chat's messages that show where a template puts their text."""

from typing import Any

import pytest

from radixtrain.data.rendering.marks import Marks, Rendering

MARKS = Marks("")


@pytest.mark.parametrize(
    ("role", "content", "marked"),
    [
        ("user", "hello", "he[7]llo"),
        ("user", " \n h", " \n [7]h"),
        ("user", "", "[7]"),
        ("user", " \n", " \n[7]"),
        ("tool", "<tool_response>ok</tool_response>", "<tool_response>o[7]k</tool_response>"),
        ("assistant", "<think>a</think>yo\n", "<think>a</think>yo[7]\n"),
        ("assistant", "", "[7]"),
    ],
)
def test_where_a_mark_is_put(role: str, content: str, marked: str) -> None:
    message = {"role": role, "content": content, "name": "n"}
    assert MARKS.into(message, 7) == {**message, "content": marked.replace("[7]", MARKS.word(7))}
    assert message["content"] == content


def test_a_call_is_marked_in_its_last_name() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}, "type": "function"}, {"name": "g", "arguments": {}}]

    def names(count: int) -> list[Any]:
        marked = MARKS.into({"role": "assistant", "content": "x", "tool_calls": calls[:count]}, 0)
        assert marked["content"] == "x"
        return [call.get("function", call)["name"] for call in marked["tool_calls"]]

    assert names(1) == ["f" + MARKS.word(0)]
    assert names(2) == ["f", "g" + MARKS.word(0)]
    assert [call.get("function", call)["name"] for call in calls] == ["f", "g"]


def test_marks_are_read_and_removed() -> None:
    first, second, eleventh = MARKS.word(0), MARKS.word(1), MARKS.word(11)
    assert MARKS.read(f"ab{first}c{eleventh}{second}d{first}") == Rendering("abcd", {0: [2, 4], 11: [3], 1: [3]})
    assert MARKS.read("ab") == Rendering("ab", {})


def test_no_mark_occurs_in_the_text() -> None:
    text = f"{MARKS.word(0)} {Marks(MARKS.word(0)).word(0)} Zqqq"
    marks = Marks(text)
    assert marks.word(0) not in text
    assert marks.read(text + marks.word(0)) == Rendering(text, {0: [len(text)]})
