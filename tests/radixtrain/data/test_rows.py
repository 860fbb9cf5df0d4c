"""Rows of every format: what is read and learned from each, or why it is refused.

What is learned is written as text, in which [ ] enclose what bears loss and | ends a turn.
"""
# ruff: noqa: E501 (the tables)

import json
import os
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from tiers import FULL

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder, UnlabelledEncoder
from radixtrain.data.columns import standard_row
from radixtrain.data.files.sources import Row, Source, as_sources, read_rows
from radixtrain.data.messages import LOGS
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
RAW = Path(os.environ.get("RADIXTRAIN_DATA", ROOT.parent / "shared" / "data" / "sft")).parent / "raw"
TEMPLATE = """\
{%- for tool in tools or [] %}{{- '{' + tool.name + '}' }}{% endfor %}
{%- for m in messages %}
    {%- set text %}
        {{- '(' + m.reasoning_content + ')' if m.reasoning_content }}{{- m.content if m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- (call.function or call).name + (call.function or call).arguments|tojson }}
        {%- endfor %}{{- '|' }}
    {%- endset %}
    {{- m.role + ': ' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- text }}{% endgeneration %}{% else %}{{- text }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}{%- if brief is defined %}{{- brief }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(TEMPLATE, special=("|",), eos="|")


def turn(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def user(content: Any) -> dict[str, Any]:
    return turn("user", content)


def assistant(content: Any, **keys: Any) -> dict[str, Any]:
    return turn("assistant", content, **keys)


def called(arguments: str) -> dict[str, Any]:
    return assistant("", tool_calls=[{"name": "f", "arguments": arguments}])


def shown(tokenizer: Any, sample: TokenRow) -> str:
    pieces, learned = [], False
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        if (label != -100) != learned:
            learned = not learned
            pieces.append("[" if learned else "]")
        pieces.append(tokenizer.decode([token]))
    return "".join(pieces) + ("]" if learned else "")


Q, A = user("q"), assistant("a")
CHAT = [Q, A]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALL = {"name": "f", "arguments": {"x": 1}}
QA = "user: q|assistant: [a|]"
CALLED = {"request": {"messages": [Q], "tools": [{"name": "f"}]}, "response": {"choices": [{"message": A}]}}

READ: list[tuple[dict[str, Any], str, list[str]]] = [
    # a row, what is learned from it, the columns that are not used
    ({"messages": CHAT, "id": 1, "source": ""}, QA, ["id"]),
    ({"messages": [Q, {**A, "refusal": "r", "audio": None, "annotations": []}]}, QA, ["messages.refusal"]),
    ({"conversations": SHAREGPT}, QA, []),
    ({"conversations": CHAT}, QA, []),
    ({"messages": SHAREGPT}, QA, []),
    ({"conversation": CHAT, "category": "x"}, QA, ["category"]),
    ({"dialog": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, QA, []),
    ({"conversations": SHAREGPT, "system": "s"}, f"system: s|{QA}", []),
    ({"conversations": [{"from": "system", "value": "s"}, *SHAREGPT], "system": " s"}, f"system: s|{QA}", []),
    ({"messages": CHAT, "system_prompt": ""}, QA, []),
    ({"messages": CHAT, "text": "rendered"}, QA, ["text"]),
    ({"messages": CHAT, "prompt": "q", "prompt_id": "7"}, QA, ["prompt", "prompt_id"]),
    ({"messages": CHAT, "prompt": CHAT[:1], "completion": CHAT[1:]}, QA, ["prompt", "completion"]),
    ({"messages": CHAT, "question": "q", "answer": "b"}, QA, ["question", "answer"]),
    ({"messages": [*CHAT, user("r")], "topic": "x"}, f"{QA}user: r|", ["topic"]),
    ({"messages": CHAT, "tools": "[]", "chat_template_kwargs": {}}, QA, []),
    ({"messages": CHAT, "tools": [{"name": "f"}], "prompt": None}, "{f}" + QA, []),
    ({"messages": CHAT, "tools": '[{"name": "f"}]'}, "{f}" + QA, []),
    ({"messages": CHAT, "functions": [{"name": "f"}]}, "{f}" + QA, []),
    ({"messages": CHAT, "chat_template_kwargs": '{"brief": "!"}'}, f"{QA}!", []),
    ({"prompt": "q", "completion": "a", "n": 0}, "q[a|]", ["n"]),
    ({"prompt": CHAT[:1], "completion": CHAT[1:], "system": "s"}, f"system: s|{QA}", []),
    ({**CALLED, "status_code": 200}, "{f}" + QA, ["status_code"]),
    ({"instruction": "i", "output": "a"}, "user: i|assistant: [a|]", []),
    ({"instruction": "i", "input": "c", "output": "a"}, "user: i\nc|assistant: [a|]", []),
    ({"instruction": "q", "input": " ", "output": "a", "system": "s"}, f"system: s|{QA}", []),
    ({"instruction": "i", "output": "a", "text": "Below is i\n\na"}, "user: i|assistant: [a|]", ["text"]),
    ({"instruction": "q", "output": "a", "history": [["x", "y"]]}, f"user: x|assistant: [y|]{QA}", []),
    ({"system_prompt": "s", "question": "q", "response": "a", "id": "x"}, f"system: s|{QA}", ["id"]),
    ({"question": "q", "answer": "a"}, QA, []),
    ({"query": "q", "response": "a"}, QA, []),
    ({"prompt": "q", "response": "a"}, QA, []),
    ({"input": "q", "output": "a"}, QA, []),
    ({"user": "q", "assistant": "a"}, QA, []),
    ({"problem": "q", "solution": "a"}, QA, []),
    ({"instruction": "q", "response": "a"}, QA, []),
    ({"text": "t", "id": 1}, "[t|]", ["id"]),
    # what nothing reads, and what repeats a part of the row
    (
        {"messages": CHAT, "metadata": {"ok": False}, "tags": ["a"], "is_good": False, "n": 0.5},
        QA,
        ["metadata", "tags", "is_good", "n"],
    ),
    ({"messages": CHAT, "label": None, "rejected": "", "score": None}, QA, []),
    ({"messages": CHAT, "label": "a", "text": "t", "conversations": SHAREGPT}, QA, ["label", "text", "conversations"]),
    ({"messages": CHAT, "prompt": "x", "completion": "y"}, QA, ["prompt", "completion"]),
    (
        {"messages": [Q, assistant("a", id="m1", model="g", created=1.5, usage={"cached_tokens": 0})]},
        QA,
        ["messages.id", "messages.model", "messages.created", "messages.usage"],
    ),
    ({"messages": [{**Q, "toxic": False, "loss": 1}, A]}, QA, ["messages.toxic", "messages.loss"]),
    ({"messages": [Q, assistant([{"type": "text", "text": "a", "index": 0, "cache_control": {"type": "x"}}])]}, QA, []),
    (
        {"messages": [Q, assistant("", tool_calls=[{"name": "f", "arguments": {}, "parsed_arguments": {"a": 1}}])]},
        "user: q|assistant: [f{}|]",
        [],
    ),
    ({"input_ids": [81, 82], "token_type_ids": [0, 0], "id": 1}, "[QR]", ["id"]),
    # other tools' forms
    ({"system": "s", "conversation": [{"human": "q", "assistant": "a"}]}, f"system: s|{QA}", []),
    ({"conversation": [{"input": "q", "output": "a"}]}, QA, []),
    ({"conversations": [{"user": "q", "assistant": "a"}]}, QA, []),
    ({"messages": [turn("system", "s", tools=[{"name": "f"}]), *CHAT]}, "{f}system: s|" + QA, []),
    ({"messages": CHAT, "tools": "null", "chat_template_kwargs": "null"}, QA, []),
    ({"messages": [Q, turn("model", "a")]}, QA, []),
    ({"input_ids": [*b"abc"]}, "[abc]", []),
    ({"input_ids": [*b"abc"], "labels": [-100, 98, -100], "text": "t"}, "a[b]c", ["text"]),
    ({"input_ids": [*b"abc"], "completion_mask": [0, 0, 1]}, "ab[c]", []),
    ({"input_ids": [*b"abc"], "assistant_masks": [0, 1, 0]}, "a[b]c", []),
    ({"input_ids": [*b"abc"], "mask": [0, 1, 1], "completion_mask": [0, 0, 1]}, "ab[c]", []),
    ({"input_ids": [*b"abc"], "mask": "unread", "labels": [*b"abc"]}, "[abc]", []),
    ({"input_ids": [*b"abc"], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}, "a[b]c", []),
    ({"input_ids": [*b"abc"], "labels": [-100, -100, 99], "completion_mask": [0, 1, 0]}, "ab[c]", []),
    ({"input_ids": [*b"abcde"], "attention_mask": [1, 1, 1, 0, 0], "loss_weights": [1.0] * 5}, "[abc]", []),
    ({"input_ids": [*b"abcde"], "attention_mask": [0, 0, 1, 1, 1]}, "[cde]", []),
    ({"input_ids": [*b"abcde"], "attention_mask": [0, 1, 1, 1, 0], "labels": [*b"abcde"]}, "[bcd]", []),
]


def test_what_a_row_means(tokenizer: Any) -> None:
    for fields, text, unused in READ:
        before, report = repr(fields), EncodeReport()
        given = Row({**fields, "nothing": None}, "a.jsonl:1", {"before": 1})
        [[sample]] = ChatEncoder(tokenizer, split_turns=False).encode_all([given], report=report)
        assert (shown(tokenizer, sample), sample.where) == (text, "a.jsonl:1"), fields
        assert report.unused_columns == dict.fromkeys(["before", *unused], 1), fields
        assert repr(fields) == before, "rows may be read again"


TURNS: list[tuple[dict[str, Any], str]] = [
    # a turn of a chat, between a question and an answer, and how it is rendered
    ({"from": "human", "value": "x"}, "user: x|"),
    ({"from": "human", "value": "x", "content": ""}, "user: x|"),
    ({"from": "human", "value": "x", "content": "x"}, "user: x|"),
    ({"from": "human", "value": "x", "weight": 0}, "user: x|"),
    ({"from": "bard", "value": "x"}, "assistant: [x|]"),
    ({"from": "chatgpt", "value": "x", "reasoning_content": "r"}, "assistant: [(r)x|]"),
    ({"from": "observation", "value": "4"}, "tool: 4|"),
    ({"role": "function", "name": "f", "content": "4"}, "tool: 4|"),
    ({"role": "developer", "content": "x"}, "developer: x|"),
    ({"role": "human", "content": "x"}, "user: x|"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "name": None}, "user: ab|"),
    ({"role": "assistant", "content": "x", "weight": 1}, "assistant: [x|]"),
    ({"role": "assistant", "content": "", "reasoning_content": "r"}, "assistant: [(r)|]"),
    ({"role": "assistant", "content": "x", "tool_calls": []}, "assistant: [x|]"),
    ({"role": "assistant", "content": "x", "tool_calls": [CALL]}, 'assistant: [xf{"x": 1}|]'),
    ({"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}, 'assistant: [f{"x": 1}|]'),
    ({"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}}, 'assistant: [f{"x": 1}|]'),
    (
        {"role": "assistant", "tool_calls": [{"id": "1", "type": None, "function": {**CALL, "arguments": '{"x": 1}'}}]},
        'assistant: [f{"x": 1}|]',
    ),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, "assistant: [f{}|]"),
]


def test_what_a_turn_means(tokenizer: Any) -> None:
    for message, text in TURNS:
        before = repr(message)
        [sample] = ChatEncoder(tokenizer, split_turns=False).encode(Row({"messages": [Q, message, A]}, "a.jsonl:1"))
        assert shown(tokenizer, sample) == f"user: q|{text}assistant: [a|]", message
        assert repr(message) == before, "rows may be read again"


def test_a_turn_with_weight_0_is_rendered(tokenizer: Any) -> None:
    for content, weight in (("x", 0), ("", 0.0)):
        given = Row({"messages": [Q, assistant(content, weight=weight), A]}, "a.jsonl:1")
        [sample] = ChatEncoder(tokenizer).encode(given)
        assert shown(tokenizer, sample) == f"user: q|assistant: {content}|assistant: [a|]"


EMPTY = "is empty: nothing is learned from it but to stop; leave the row out (data.on_bad_row: skip)"
PRINTED = (
    "not valid JSON: Expecting property name enclosed in double quotes at column {}; "
    "this is how Python prints a list: write it with json.dumps"
)
HALF = r"text holds \ud800, half of a surrogate pair; write both halves or \ufffd"
NO_FORMAT = (
    "expected messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids"
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    # a row, and the reason or how it begins
    (
        {},
        f"no format has the columns (none); {NO_FORMAT}, or their names in data.columns, such as {{user: QUESTION, assistant: ANSWER}}{LOGS}",
    ),
    ({"prompt": "q"}, f"no format has the columns prompt; {NO_FORMAT}"),
    ({"id": 1, "messages": None}, f"no format has the columns id, messages (null); {NO_FORMAT}"),
    (
        {"request": {"messages": [Q]}, "response": {"content": [{"type": "tool_use"}]}},
        f"no format has the columns request, response; {NO_FORMAT}",
    ),
    (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        f"no format has the columns prompt, chosen, rejected; {NO_FORMAT}, or their names in data.columns, such as {{user: QUESTION, assistant: ANSWER}}; preference data is for a trainer such as TRL's DPOTrainer, with share_prefixes",
    ),
    *(
        (
            {**fields, name: value},
            f"{name}: {repr(value)[:40]}: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {{{name}: null}}",
        )
        for fields, name, value in (
            ({"messages": CHAT}, "label", False),
            ({"conversations": SHAREGPT}, "kto_tag", "false"),
            ({"messages": CHAT}, "train", True),
            ({"prompt": "q", "completion": "False"}, "label", False),
            ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "reward", -0.5),
            ({"prompt": "q", "response": "4"}, "score", 4),
            ({"messages": CHAT}, "rejected", [Q, A]),
            ({"input_ids": [81, 82]}, "loss_mask", [0, 1]),
            (CALLED, "rating", 1),
            ({"text": "t"}, "is_correct", 0),
            ({"messages": [*CHAT, user("r")]}, "answer", "b"),
        )
    ),
    ({"messages": CHAT, "label": 0, "reward": 1}, "label: 0, reward: 1: nothing reads this"),
    ({"conversations": [{"from": "system", "value": "t"}, *SHAREGPT], "system": "s"}, "system: differs from the sys"),
    ({"messages": CHAT, "system": ["s"]}, "system: expected text, found ['s']"),
    ({"messages": CHAT, "system": "s", "system_prompt": "t"}, "system and system_prompt differ: write data.columns"),
    (
        {"question": "q", "answer": "a", "response": "b"},
        "the columns can be read as question + answer and question + response; write data.columns: {user: question, assistant: answer}",
    ),
    (
        {"question": "q", "answer": "a", "context": "c"},
        "context beside question and answer: to put it after the question, make it text and write data.columns: {instruction: question, input: context, output: answer}; to leave it out, write data.columns: {user: question, assistant: answer}",
    ),
    ({"question": "q", "answer": " "}, f"answer: the answer {EMPTY}"),
    ({"question": "q", "answer": 1}, "answer: expected text, found 1"),
    ({"instruction": "q", "output": "a", "history": ["x"]}, "history: expected a list of [question, answer]"),
    ({**CALLED, "response": {"choices": [{"finish_reason": "length", "message": A}]}}, "response.choices: finish_reas"),
    ({"text": "t", "label": 0}, "label beside text would not be learned; to answer with it, write it as text"),
    ({"text": "t", "category": "c"}, "category beside text would not be learned"),
    ({"text": "q", "completion": "a"}, "completion beside text would not be learned"),
    ({"text": "q", "summary": "a"}, "summary beside text would not be learned"),
    ({"text": "t", "system": "s"}, "system: 's' beside plain text, which has no system turn"),
    ({"text": 7}, "text: expected text, found int"),
    ({"text": ""}, "no token bears loss: of 1 tokens none after the first has a label other than -100"),
    ({"text": "\ud800"}, HALF),
    ({"prompt": "q", "completion": CHAT[1:]}, "prompt and completion: expected both as text or both as lists"),
    ({"prompt": "q", "completion": " "}, f"completion: it {EMPTY}"),
    ({"prompt": "q", "completion": "a", "system": "s"}, "system: 's' beside plain text, which has no system turn"),
    ({"prompt": CHAT[:1], "completion": []}, "completion: expected a non-empty list of {role, content}, found a list"),
    ({"prompt": CHAT[:1], "completion": [Q]}, "expected at least one assistant turn to learn from; found the roles"),
    ({"messages": CHAT, "image": "x.png"}, "image: only text is read; to leave it out, write data.columns: {image:"),
    ({"messages": CHAT, "chat_template_kwargs": "{"}, "chat_template_kwargs: not valid JSON: Expecting property name"),
    ({"messages": CHAT, "chat_template_kwargs": 1}, "chat_template_kwargs: expected an object, found 1"),
    (
        {"messages": CHAT, "chat_template_kwargs": {"tokenize": True, "chat_template": "x"}},
        "chat_template_kwargs: chat_template, tokenize cannot be set; expected variables of the template",
    ),
    (
        {"messages": CHAT, "chat_template_kwargs": {"breif": 1}},
        "chat_template_kwargs: the chat template reads no variable 'breif', did you mean brief?",
    ),
    ({"messages": CHAT, "tools": "["}, "tools: not valid JSON: Expecting value at column 2"),
    ({"messages": CHAT, "tools": {"f": 1}}, "tools: expected a list of function descriptions, found"),
    # chats
    ({"messages": []}, "messages: expected a non-empty list of {role, content}, found a list of 0"),
    ({"conversations": []}, "conversations: expected a non-empty list of {role, content}, found a list of 0"),
    ({"messages": "hi"}, "messages: expected a non-empty list of {role, content}, found 'hi'"),
    ({"messages": "[{'role': 'user'}]"}, f"messages: {PRINTED.format(3)}"),
    ({"messages": [Q]}, "expected at least one assistant turn to learn from; found the roles user"),
    ({"conversations": [{"from": "human", "value": "q"}]}, "expected at least one assistant turn to learn from; found"),
    ({"messages": [A]}, "turn 1 is the assistant's, with no prompt before it; begin with another turn"),
    ({"messages": [Q, assistant("a", weight=0)]}, "every assistant turn has weight: 0"),
    ({"messages": [user("\ud800"), A]}, HALF),
    # tokens
    ({"input_ids": "x"}, "input_ids: expected a list of integers, found str"),
    ({"input_ids": [1, 2.0]}, "input_ids: expected integers, found '2.0' at position 1"),
    ({"input_ids": [1, True]}, "input_ids: expected integers, found 'True' at position 1"),
    ({"input_ids": [1, 2**63]}, "input_ids: expected integers, found '9223372036854775808' at position 1"),
    ({"input_ids": [1, 258]}, "token id 258 at position 1 is outside the vocabulary (0..256)"),
    ({"input_ids": [-1, 1]}, "token id -1 at position 0 is outside the vocabulary (0..256)"),
    ({"input_ids": [1, 2], "labels": [-100, -1]}, "label -1 at position 1 is neither -100 nor in the vocabulary"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries, input_ids has 2"),
    ({"input_ids": [1, 2], "labels": [1, -100]}, "no token bears loss: of 2 tokens none after the first has a label"),
    ({"input_ids": []}, "no token bears loss: of 0 tokens"),
    ({"input_ids": [1, 2], "weights": [1, 1], "loss_weights": [1, 1]}, "loss_weights and weights are two names of one"),
    ({"input_ids": [1, 2], "weights": 1}, "weights: expected a list of numbers of float32, found int"),
    *(
        ({"input_ids": [1, 2], "weights": weights}, f"weights: expected numbers of float32, found {found}")
        for weights, found in (
            ([1, "a"], "'a' at position 1"),
            ([True, 1], "'True' at position 0"),
            ([1, float("nan")], "'nan' at position 1"),
            ([1, -1e39], "'-1e+39' at position 1"),
        )
    ),
    ({"input_ids": [1], "attention_mask": [0]}, "no token bears loss"),
]
TURNS_REFUSED: list[tuple[Any, str]] = [
    # the second turn of a chat, and the reason, without the turn, or how it begins
    ("hi", ": expected {role, content}, found 'hi'"),
    (None, ": expected {role, content}, found null"),
    ({"from": "narrator", "value": "x"}, ": unknown role 'narrator'; expected one of system, developer, user,"),
    ({"content": "x"}, ": unknown role None; expected one of system, developer, user"),
    ({"role": ["user"]}, ": unknown role ['user']; expected one of system, developer"),
    ({"from": "human", "value": "q", "content": "r"}, ": has content and value, which differ"),
    (user(None), " (role 'user'): content: expected text, found null; only an assistant turn with tool_calls may go"),
    (assistant(None), " (role 'assistant'): content: expected text, found null; only an assistant turn with"),
    ({"role": "user", "text": "x"}, " (role 'user'): content: expected text, found null"),
    (user({"a": 1}), " (role 'user'): content: expected text, found an object with the keys a"),
    (user(7), " (role 'user'): content: expected text, found 7"),
    (
        assistant([{"type": "audio"}]),
        " (role 'assistant'): content: only parts {type: text, text} are read, found 'audio'; only text is read",
    ),
    (
        assistant([{"type": "tool_use"}]),
        f" (role 'assistant'): content: only parts {{type: text, text}} are read, found 'tool_use'{LOGS}",
    ),
    (
        user([{"type": "image_url", "image_url": "a.png"}]),
        " (role 'user'): content: only parts {type: text, text} are read, found 'image_url'; only text is read: for images use share_prefixes in a trainer",
    ),
    (
        assistant([{"type": "text", "text": "x", "loss": False}]),
        " (role 'assistant'): content: loss: False of a part is not read; remove it, or the part",
    ),
    *(
        (assistant([{"type": "text", "text": "x", key: value}]), f" (role 'assistant'): content: {key}: {value!r} of a")
        for key, value in (("train", "no"), ("meta", {"loss": 0}), ("loss_mask", [0]), ("thinking", "deep"))
    ),
    *(
        (
            {"role": "assistant", "tool_calls": [call]},
            f" (role 'assistant'): tool_calls: call 1 of the tool 'f': {key}: {value!r} of a call is not read",
        )
        for key, value in (
            ("args", {"x": 1}),
            ("parameters", {"x": 1}),
            ("input", '{"x": 1}'),
            ("weight", 0),
            ("train", "false"),
            ("meta", {"train": False}),
            ("thought", "deep"),
        )
        for call in ({"name": "f", key: value}, {"function": {"name": "f", key: value}, "id": "1", "index": 0})
    ),
    (user([{"image": "a"}]), " (role 'user'): content: only parts {type: text, text} are read, found {'image': 'a'};"),
    *(
        (assistant(blank), f" (role 'assistant'): the answer {EMPTY}, or give the turn weight: 0")
        for blank in ("", " \n")
    ),
    (assistant("x", weight=0.5), " (role 'assistant'): weight: expected 0 (no loss on the turn) or 1, found 0.5"),
    ({**Q, "weight": 1}, " (role 'user'): weight: 1 requests loss on the turn; only assistant turns bear loss"),
    ({**Q, "tool_calls": [CALL]}, " (role 'user'): has tool_calls; only an assistant turn calls tools"),
    (assistant("x", thinking=["r"]), " (role 'assistant'): thinking: expected text, found a list of 1"),
    (assistant("", tool_calls="f()"), " (role 'assistant'): tool_calls: expected a list of objects, found 'f()'"),
    (assistant("", tool_calls=[CALL], function_call=CALL), " (role 'assistant'): has tool_calls and function_call;"),
    (
        assistant("", tool_calls=[{"function": {"arguments": {}}}]),
        " (role 'assistant'): tool_calls: call 1: expected the",
    ),
    ({"from": "function_call", "value": "f(1)"}, " (role 'function_call'): expected the JSON of a call, found 'f(1)'"),
    ({"from": "function_call", "value": "{'name': 'f'}"}, f" (role 'function_call'): {PRINTED.format(2)}"),
    (called("{"), " (role 'assistant'): tool_calls: call 1 of the tool 'f': arguments: not valid JSON"),
    (called("[1]"), " (role 'assistant'): tool_calls: call 1 of the tool 'f': arguments: expected an object"),
    (called('{"a": 1, "a": 2}'), " (role 'assistant'): tool_calls: call 1 of the tool 'f': arguments: key 'a' occurs"),
]


def test_what_is_refused(tokenizer: Any) -> None:
    turns = [({"messages": [Q, message, A]}, f"messages: turn 2{reason}") for message, reason in TURNS_REFUSED]
    for fields, reason in [*REFUSED, *turns]:
        with pytest.raises(DataError) as raised:
            ChatEncoder(tokenizer).encode(Row(fields, "a.jsonl:1"))
        assert str(raised.value).startswith(f"a.jsonl:1: {reason}"), fields
        assert "\n" not in str(raised.value)


KEYS: list[tuple[str, Any, str, str]] = [
    # a key of the first answer of two; the setting that reads it, if there is one; what is learned then
    *((key, value, "messages.weight", "assistant: b|user: q|assistant: [a|]") for key, value in (("train", False), ("loss", 0.0), ("loss_mask", 0), ("is_good", False))),
    ("edited", True, "messages.weight", "[b|]"),
    ("thought", "deep", "messages.reasoning_content", "[(deep)b|]"),
    ("thinking_blocks", [{"type": "thinking", "thinking": "deep", "signature": "x"}], "messages.reasoning_content", "[(deep)b|]"),
    *((key, value, "", "[b|]") for key, value in (
        ("train_detail", [{"train": False}]), ("note", "what it would have said instead"), ("loss", "off"),
        ("provider_specific_fields", {"reasoning_content": "deep"}), ("extra", {"train": False}), ("extra", {"x": {"y": ["z"]}}))),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "reads", "learned"), KEYS)
def test_a_turn_that_says_more(key: str, value: Any, reads: str, learned: str, tokenizer: Any, tmp_path: Path) -> None:
    """Refused; read, or left out, by the settings that the error names."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [Q, assistant("b", **{key: value}), Q, A]}), encoding="utf-8")

    def read(**columns: Any) -> list[str]:
        [source] = as_sources(str(path), columns)
        [samples] = ChatEncoder(tokenizer).encode_all(read_rows(source))
        return [shown(tokenizer, sample) for sample in samples]

    with pytest.raises(DataError, match=rf"a\.jsonl:1: turn 2 \(role 'assistant'\): {key}: ") as raised:
        read()
    said = str(raised.value)
    assert said.endswith(f"data.columns: {{messages.{key}: null}} leaves it out")
    assert read(**{f"messages.{key}": None})[0] == "user: q|assistant: [b|]"
    if reads:
        assert f"data.columns: {{{reads}: messages.{key}}} reads it" in said
        assert learned in "".join(read(**{reads: f"messages.{key}"}))


def test_a_list_in_any_turn_is_refused_and_rows_without_an_answer_may_say_anything(tokenizer: Any) -> None:
    row = Row({"messages": [{**Q, "attachments": ["a.pdf"]}, assistant("a", loss=0)], "label": 0}, "a.jsonl:1")
    assert len(UnlabelledEncoder(tokenizer).encode(row)) == 1
    with pytest.raises(DataError, match=r"turn 1 \(role 'user'\): attachments: .* is not read, so it would be lost"):
        ChatEncoder(tokenizer).encode(row._replace(fields={"messages": row.fields["messages"]}))


@FULL
@pytest.mark.data
@pytest.mark.skipif(not RAW.is_dir(), reason=f"no raw data sets in {RAW}: RADIXTRAIN_DATA names the folder beside them")
def test_the_raw_files() -> None:
    banking, gsm8k = RAW / "banking77" / "train.csv", RAW / "gsm8k" / "train.jsonl"
    mapped = read_rows(Source(str(banking), columns={"user": "text", "assistant": "category"}))
    first, *others = map(standard_row, mapped)
    assert first.fields == {"messages": [user("I am still waiting on my card?"), assistant("card_arrival")]}
    assert not any(row.unread for row in [first, *others])
    with pytest.raises(DataError, match=r"train\.csv:2: category beside text would not be learned"):
        standard_row(next(read_rows(banking)))
    rows = [standard_row(row) for row in read_rows(gsm8k)]
    mapping = {"user": "question", "assistant": "answer"}
    assert rows == [standard_row(row) for row in read_rows(Source(str(gsm8k), columns=mapping))] and len(rows) > 7000
