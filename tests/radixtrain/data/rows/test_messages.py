"""Messages of every style, in one form."""

from typing import Any

import pytest

from radixtrain.data.rows.messages import check_messages
from radixtrain.errors import DataError

CALL = {"name": "f", "arguments": {"x": 1}}
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"from": "human", "value": "x"}, {"role": "user", "content": "x"}),
    (
        {"from": "chatgpt", "value": "x", "reasoning_content": "r"},
        {"role": "assistant", "content": "x", "reasoning_content": "r"},
    ),
    ({"from": "bard", "value": "x"}, {"role": "assistant", "content": "x"}),
    ({"from": "observation", "value": "4"}, {"role": "tool", "content": "4"}),
    ({"role": "function", "name": "f", "content": "4"}, {"role": "tool", "name": "f", "content": "4"}),
    ({"role": "developer", "content": "x"}, {"role": "developer", "content": "x"}),
    ({"role": "human", "content": "x"}, {"role": "user", "content": "x"}),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, {"role": "user", "content": "ab"}),
    ({"role": "assistant", "content": "x", "weight": 1}, {"role": "assistant", "content": "x"}),
    ({"role": "assistant", "content": "x", "weight": 0}, {"role": "assistant", "content": "x", "weight": 0}),
    ({"role": "assistant", "content": "", "weight": 0.0}, {"role": "assistant", "content": "", "weight": 0}),
    ({"from": "human", "value": "x", "weight": 0}, {"role": "user", "content": "x"}),
    (
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
    ),
    (
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "1", "type": None, "function": {**CALL, "arguments": '{"x": 1}'}}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]},
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ),
    ({"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
]


@pytest.mark.parametrize(("message", "expected"), READ, ids=[str(case[0])[:60] for case in READ])
def test_what_a_message_means(message: dict[str, Any], expected: dict[str, Any]) -> None:
    given = {**message, "nothing": None}
    before = repr(given)
    assert check_messages([given], "a:1") == [expected]
    assert repr(given) == before  # rows may be read again


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"from": "narrator", "value": "x"}, "turn 1: unknown role 'narrator'; expected one of system, developer, user, "),
    ({"role": "user", "text": "x"}, "turn 1 (role 'user'): content: expected text, found null"),
    ({"role": "assistant", "content": "x", "weight": 0.5}, "weight: expected 0 (no loss on the turn) or 1, found 0.5"),
    (
        {"role": "user", "content": "x", "weight": 1},
        "weight: 1 asks for loss on the turn; only assistant turns bear loss",
    ),
    ({"role": "assistant", "content": [{"type": "audio"}]}, "only parts {type: text, text} are read, found 'audio'"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]},
        "found 'image_url'; images, audio and video are not supported, and multimodal models are trained on rows of "
        "text: remove the part, or the row (data.on_bad_row: skip)",
    ),
    ({"role": "user", "content": [{"image": "a.png"}]}, "found {'image': 'a.png'}; images, audio and video are not "),
    ({"from": "function_call", "value": "f(1)"}, "expected the JSON of a call, found 'f(1)'"),
    ({"from": "function_call", "value": "{'name': 'f'}"}, "this is how Python prints a list: write it with json.dumps"),
    (
        {"role": "assistant", "function_call": {"arguments": "{}"}},
        "tool_calls: call 1: expected the name of a function",
    ),
    (
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
        "call 1 of the tool 'f': arguments: not valid",
    ),
    (
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]},
        "key 'a' occurs more than once",
    ),
]


@pytest.mark.parametrize(("message", "reason"), REFUSED, ids=[case[1][:50] for case in REFUSED])
def test_what_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as raised:
        check_messages([message], "a:1")
    assert str(raised.value).startswith("a:1: messages: turn 1") and reason in str(raised.value)


def test_messages_as_json() -> None:
    assert check_messages('[{"role": "user", "content": "x"}]', "a:1") == [{"role": "user", "content": "x"}]
    with pytest.raises(
        DataError, match=r"^a:1: dialog: expected a non-empty list of \{role, content\}, found 'hello'$"
    ):
        check_messages("hello", "a:1", "dialog")
    with pytest.raises(DataError, match=r"^a:1: dialog: not valid JSON: .*this is how Python prints a list"):
        check_messages("[{'role': 'user'}]", "a:1", "dialog")


@pytest.mark.parametrize("key", ["train", "trainable", "loss"])
def test_other_names_of_weight_are_refused_if_they_say_no(key: str) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: False}]
    with pytest.raises(DataError, match=rf"turn 2 .*{key}: False is not read; write weight: 0"):
        check_messages(turns, "a.jsonl:1")
    check_messages([{**turn, key: True} for turn in turns], "a.jsonl:1")


def test_content_and_value_of_one_turn() -> None:
    answer = {"from": "gpt", "value": "a"}
    assert check_messages([{"from": "human", "value": "q", "content": ""}, answer], "a:1")[0]["content"] == "q"
    assert check_messages([{"from": "human", "value": "q", "content": "q"}, answer], "a:1")[0]["content"] == "q"
    with pytest.raises(DataError, match="turn 1: has content and value, which differ"):
        check_messages([{"from": "human", "value": "q", "content": "r"}, answer], "a:1")


def test_calls_under_two_names() -> None:
    call = {"name": "f", "arguments": "{}"}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": call}], "function_call": call}
    with pytest.raises(DataError, match=r"turn 2 .*has tool_calls and function_call; remove one"):
        check_messages([{"role": "user", "content": "q"}, turn], "a:1")
