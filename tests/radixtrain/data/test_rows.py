"""Rows of every format: what is read and learned from each, or why it is refused.

What is learned is written as text, in which [ ] enclose what bears loss and | ends a turn.
"""
# ruff: noqa: E501 (the tables)

import json
import os
from pathlib import Path
from typing import Any

import pytest

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError
from tests.support.batches import byte_tokenizer

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


def shown(tokenizer: Any, sample: TokenRow) -> str:
    pieces, learned = [], False
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        if (label != -100) != learned:
            learned = not learned
            pieces.append("[" if learned else "]")
        pieces.append(tokenizer.decode([token]))
    return "".join(pieces) + ("]" if learned else "")


Q, A = user("q"), assistant("a")
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SHORT = {"CHAT": [Q, A], "SHAREGPT": SHAREGPT, "ASKED": Q, "ANSWERED": A}
"""What the tables write for messages that stand in many rows."""


def cases(table: str) -> list[tuple[Any, str]]:
    """A case in each line: a row or a turn as JSON, an arrow, and what becomes of it. ¶ is a line feed."""
    for short, messages in SHORT.items():
        table = table.replace(short, json.dumps(messages))
    pairs = (line.split(" -> ") for line in table.strip().splitlines() if not line.startswith("#"))
    return [(json.loads(given), becomes.replace("¶", "\n")) for given, becomes in pairs]


READ = r"""
# a row, what is learned from it, and the columns that nothing reads
{"messages": CHAT, "id": 1, "source": ""} -> user: q|assistant: [a|] unread: id
{"messages": [ASKED, {"role": "assistant", "content": "a", "refusal": "r", "audio": null, "annotations": []}]} -> user: q|assistant: [a|] unread: messages.refusal
{"conversations": SHAREGPT} -> user: q|assistant: [a|]
{"conversations": CHAT} -> user: q|assistant: [a|]
{"messages": SHAREGPT} -> user: q|assistant: [a|]
{"conversation": CHAT, "category": "x"} -> user: q|assistant: [a|] unread: category
{"dialog": "[{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]"} -> user: q|assistant: [a|]
{"conversations": SHAREGPT, "system": "s"} -> system: s|user: q|assistant: [a|]
{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": " s"} -> system: s|user: q|assistant: [a|]
{"messages": CHAT, "system_prompt": ""} -> user: q|assistant: [a|]
{"messages": CHAT, "text": "rendered"} -> user: q|assistant: [a|] unread: text
{"messages": CHAT, "prompt": "q", "prompt_id": "7"} -> user: q|assistant: [a|] unread: prompt, prompt_id
{"messages": CHAT, "prompt": [ASKED], "completion": [ANSWERED]} -> user: q|assistant: [a|] unread: prompt, completion
{"messages": CHAT, "question": "q", "answer": "b"} -> user: q|assistant: [a|] unread: question, answer
{"messages": [ASKED, ANSWERED, {"role": "user", "content": "r"}], "topic": "x"} -> user: q|assistant: [a|]user: r| unread: topic
{"messages": CHAT, "tools": "[]", "chat_template_kwargs": {}} -> user: q|assistant: [a|]
{"messages": CHAT, "tools": [{"name": "f"}], "prompt": null} -> {f}user: q|assistant: [a|]
{"messages": CHAT, "tools": "[{\"name\": \"f\"}]"} -> {f}user: q|assistant: [a|]
{"messages": CHAT, "functions": [{"name": "f"}]} -> {f}user: q|assistant: [a|]
{"messages": CHAT, "chat_template_kwargs": "{\"brief\": \"!\"}"} -> user: q|assistant: [a|]!
{"prompt": "q", "completion": "a", "n": 0} -> q[a|] unread: n
{"prompt": [ASKED], "completion": [ANSWERED], "system": "s"} -> system: s|user: q|assistant: [a|]
{"instruction": "i", "output": "a"} -> user: i|assistant: [a|]
{"instruction": "i", "input": "c", "output": "a"} -> user: i¶c|assistant: [a|]
{"instruction": "q", "input": " ", "output": "a", "system": "s"} -> system: s|user: q|assistant: [a|]
{"instruction": "i", "output": "a", "text": "Below is i\n\na"} -> user: i|assistant: [a|] unread: text
{"system_prompt": "s", "question": "q", "response": "a", "id": "x"} -> system: s|user: q|assistant: [a|] unread: id
{"question": "q", "answer": "a"} -> user: q|assistant: [a|]
{"query": "q", "response": "a"} -> user: q|assistant: [a|]
{"prompt": "q", "response": "a"} -> user: q|assistant: [a|]
{"input": "q", "output": "a"} -> user: q|assistant: [a|]
{"user": "q", "assistant": "a"} -> user: q|assistant: [a|]
{"problem": "q", "solution": "a"} -> user: q|assistant: [a|]
{"instruction": "q", "response": "a"} -> user: q|assistant: [a|]
{"text": "t", "id": 1} -> [t|] unread: id
{"messages": CHAT, "label": null, "rejected": "", "score": null} -> user: q|assistant: [a|]
{"messages": CHAT, "label": "a", "text": "t", "conversations": SHAREGPT} -> user: q|assistant: [a|] unread: label, text, conversations
{"messages": CHAT, "prompt": "x", "completion": "y"} -> user: q|assistant: [a|] unread: prompt, completion
{"messages": [ASKED, {"role": "assistant", "content": "a", "id": "m1", "model": "g", "created": 1.5, "usage": {"cached_tokens": 0}}]} -> user: q|assistant: [a|] unread: messages.id, messages.model, messages.created, messages.usage
{"messages": [{"role": "user", "content": "q", "toxic": false, "loss": 1}, ANSWERED]} -> user: q|assistant: [a|] unread: messages.toxic, messages.loss
{"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a", "index": 0, "cache_control": {"type": "x"}}]}]} -> user: q|assistant: [a|]
{"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}, "parsed_arguments": {"a": 1}}]}]} -> user: q|assistant: [f{}|]
{"input_ids": [81, 82], "token_type_ids": [0, 0], "id": 1} -> [QR] unread: id
{"messages": [{"role": "system", "content": "s", "tools": [{"name": "f"}]}, ASKED, ANSWERED]} -> {f}system: s|user: q|assistant: [a|]
{"messages": CHAT, "tools": "null", "chat_template_kwargs": "null"} -> user: q|assistant: [a|]
{"messages": [ASKED, {"role": "model", "content": "a"}]} -> user: q|assistant: [a|]
{"input_ids": [97, 98, 99]} -> [abc]
{"input_ids": [97, 98, 99], "labels": [-100, 98, -100], "text": "t"} -> a[b]c unread: text
{"input_ids": [97, 98, 99], "completion_mask": [0, 0, 1]} -> ab[c]
{"input_ids": [97, 98, 99], "assistant_masks": [0, 1, 0]} -> a[b]c
{"input_ids": [97, 98, 99], "mask": [0, 1, 1], "completion_mask": [0, 0, 1]} -> ab[c]
{"input_ids": [97, 98, 99], "mask": "unread", "labels": [97, 98, 99]} -> [abc]
{"input_ids": [97, 98, 99], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]} -> a[b]c
{"input_ids": [97, 98, 99], "labels": [-100, -100, 99], "completion_mask": [0, 1, 0]} -> ab[c]
{"input_ids": [97, 98, 99], "attention_mask": [1, 1, 1], "loss_weights": [1.0, 1.0, 1.0]} -> [abc]
"""


def test_what_a_row_means(tokenizer: Any) -> None:
    for fields, becomes in cases(READ):
        text, _, unread = becomes.partition(" unread: ")
        before, report = repr(fields), EncodeReport()
        given = Row({**fields, "nothing": None}, "a.jsonl:1", {"before": "x"})
        [[sample]] = ChatEncoder(tokenizer, split_turns=False).encode_all([given], report=report)
        assert (shown(tokenizer, sample), sample.where) == (text, "a.jsonl:1"), fields
        assert report.unused_columns == dict.fromkeys(["before", *filter(None, unread.split(", "))], 1), fields
        assert repr(fields) == before, "rows may be read again"


TURNS = r"""
# a turn of a chat, between a question and an answer, and how it is rendered
{"from": "human", "value": "x"} -> user: x|
{"from": "human", "value": "x", "content": ""} -> user: x|
{"from": "human", "value": "x", "content": "x"} -> user: x|
{"from": "human", "value": "x", "weight": 0} -> user: x|
{"from": "bard", "value": "x"} -> assistant: [x|]
{"from": "chatgpt", "value": "x", "reasoning_content": "r"} -> assistant: [(r)x|]
{"from": "observation", "value": "4"} -> tool: 4|
{"role": "function", "name": "f", "content": "4"} -> tool: 4|
{"role": "developer", "content": "x"} -> developer: x|
{"role": "human", "content": "x"} -> user: x|
{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "name": null} -> user: ab|
{"role": "assistant", "content": "x", "weight": 1} -> assistant: [x|]
{"role": "assistant", "content": "", "reasoning_content": "r"} -> assistant: [(r)|]
{"role": "assistant", "content": "x", "tool_calls": []} -> assistant: [x|]
{"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]} -> assistant: [xf{"x": 1}|]
{"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"} -> assistant: [f{"x": 1}|]
{"role": "assistant", "function_call": {"name": "f", "arguments": "{\"x\": 1}"}} -> assistant: [f{"x": 1}|]
{"role": "assistant", "tool_calls": [{"id": "1", "type": null, "function": {"name": "f", "arguments": "{\"x\": 1}"}}]} -> assistant: [f{"x": 1}|]
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]} -> assistant: [f{}|]
"""


def test_what_a_turn_means(tokenizer: Any) -> None:
    for message, text in cases(TURNS):
        before = repr(message)
        [sample] = ChatEncoder(tokenizer, split_turns=False).encode(Row({"messages": [Q, message, A]}, "a.jsonl:1"))
        assert shown(tokenizer, sample) == f"user: q|{text}assistant: [a|]", message
        assert repr(message) == before, "rows may be read again"


def test_a_turn_with_weight_0_is_rendered(tokenizer: Any) -> None:
    for content, weight in (("x", 0), ("", 0.0)):
        given = Row({"messages": [Q, assistant(content, weight=weight), A]}, "a.jsonl:1")
        [sample] = ChatEncoder(tokenizer).encode(given)
        assert shown(tokenizer, sample) == f"user: q|assistant: {content}|assistant: [a|]"


REFUSED = r"""
# a row, and how the reason begins
{} -> no format has the columns (none); expected messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids, or their names in data.columns, such as {user: QUESTION, assistant: ANSWER}; docs/data-formats.md#logs-of-model-calls says how to convert a log of model calls
{"prompt": "q"} -> no format has the columns prompt; expected messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids
{"id": 1, "messages": null} -> no format has the columns id, messages (null); expected messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids
{"request": {"messages": [ASKED]}, "response": {"choices": [{"message": ANSWERED}]}} -> no format has the columns request, response; expected messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids
{"prompt": "q", "chosen": "a", "rejected": "b"} -> no format has the columns prompt, chosen, rejected; expected messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids, or their names in data.columns, such as {user: QUESTION, assistant: ANSWER}; chosen and rejected: preference data, for a trainer such as TRL's DPOTrainer
{"messages": CHAT, "label": false} -> label: False: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {label: null}
{"conversations": SHAREGPT, "kto_tag": "false"} -> kto_tag: 'false': nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {kto_tag: null}
{"prompt": "q", "completion": "False", "label": false} -> label: False: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {label: null}
{"prompt": [ASKED], "completion": [ANSWERED], "reward": -0.5} -> reward: -0.5: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {reward: null}
{"prompt": "q", "response": "4", "score": 4} -> score: 4: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {score: null}
{"input_ids": [81, 82], "loss_mask": [0, 1]} -> loss_mask: [0, 1]: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {loss_mask: null}
{"text": "t", "is_correct": 0} -> is_correct: 0: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {is_correct: null}
{"messages": [ASKED, ANSWERED, {"role": "user", "content": "r"}], "answer": "b"} -> answer: 'b': nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {answer: null}
{"messages": CHAT, "label": 0, "reward": 1} -> label: 0, reward: 1: nothing reads this
{"conversations": [{"from": "system", "value": "t"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"} -> system: differs from the sys
{"messages": CHAT, "system": ["s"]} -> system: expected text, found ['s']
{"messages": CHAT, "system": "s", "system_prompt": "t"} -> system and system_prompt differ: write data.columns
{"question": "q", "answer": "a", "response": "b"} -> the columns can be read as question + answer and question + response; write data.columns: {user: question, assistant: answer}
{"question": "q", "answer": "a", "context": "c"} -> context beside question and answer: to put it after the question, as text, write data.columns: {instruction: question, input: context, output: answer}; to leave it out, write data.columns: {user: question, assistant: answer}
{"question": "q", "answer": " "} -> answer: the answer is empty: nothing is learned from it but to stop; leave the row out (data.on_bad_row: skip)
{"question": "q", "answer": 1} -> answer: expected text, found 1
{"instruction": "q", "output": "a", "history": ["x"]} -> history beside instruction and output: to put it after the question
{"text": "t", "label": 0} -> label: 0: nothing reads this, and it may say what is good to learn, or hold another answer; keep the rows to imitate, and write data.columns: {label: null}; to answer with it, write {user: text, assistant: label}
{"text": "t", "category": "c"} -> category: 'c': nothing reads this
{"text": "q", "completion": "a"} -> completion: 'a': nothing reads this
{"text": "q", "summary": "a"} -> summary: 'a': nothing reads this
{"text": "t", "system": "s"} -> system: 's' beside plain text, which has no system turn
{"text": 7} -> text: expected text, found int
{"text": ""} -> no token bears loss: of 1 tokens none after the first has a label other than -100
{"text": "\ud800"} -> text holds \ud800, half of a surrogate pair; write both halves or \ufffd
{"prompt": "q", "completion": [ANSWERED]} -> prompt and completion: expected both as text or both as lists
{"prompt": "q", "completion": " "} -> completion: it is empty: nothing is learned from it but to stop; leave the row out (data.on_bad_row: skip)
{"prompt": "q", "completion": "a", "system": "s"} -> system: 's' beside plain text, which has no system turn
{"prompt": [ASKED], "completion": []} -> completion: expected a non-empty list of {role, content}, found []
{"prompt": [ASKED], "completion": [ASKED]} -> expected at least one assistant turn to learn from; found the roles
{"messages": CHAT, "image": "x.png"} -> image: only text is read; to leave it out, write data.columns: {image:
{"messages": CHAT, "chat_template_kwargs": "{"} -> chat_template_kwargs: not valid JSON: Expecting property name
{"messages": CHAT, "chat_template_kwargs": 1} -> chat_template_kwargs: expected an object, found 1
{"messages": CHAT, "chat_template_kwargs": {"tokenize": true, "chat_template": "x"}} -> chat_template_kwargs: chat_template, tokenize cannot be set; expected variables of the template
{"messages": CHAT, "chat_template_kwargs": {"breif": 1}} -> chat_template_kwargs: the chat template reads no variable 'breif'; remove it
{"messages": CHAT, "tools": "["} -> tools: not valid JSON: Expecting value at column 2
{"messages": CHAT, "tools": {"f": 1}} -> tools: expected a list of function descriptions, found
{"messages": []} -> messages: expected a non-empty list of {role, content}, found []
{"conversations": []} -> conversations: expected a non-empty list of {role, content}, found []
{"messages": "hi"} -> messages: expected a non-empty list of {role, content}, found 'hi'
{"messages": "[{'role': 'user'}]"} -> messages: not valid JSON: Expecting property name enclosed in double quotes at column 3; write the list with json.dumps
{"messages": [ASKED]} -> expected at least one assistant turn to learn from; found the roles user
{"conversations": [{"from": "human", "value": "q"}]} -> expected at least one assistant turn to learn from; found
{"messages": [ANSWERED]} -> turn 1 is the assistant's, with no prompt before it; begin with another turn
{"messages": [ASKED, {"role": "assistant", "content": "a", "weight": 0}]} -> every assistant turn has weight: 0
{"messages": [{"role": "user", "content": "\ud800"}, ANSWERED]} -> text holds \ud800, half of a surrogate pair; write both halves or \ufffd
{"input_ids": "x"} -> input_ids: expected a list of integers, found str
{"input_ids": [1, 2.0]} -> input_ids: expected integers, found '2.0' at position 1
{"input_ids": [1, true]} -> input_ids: expected integers, found 'True' at position 1
{"input_ids": [1, 9223372036854775808]} -> input_ids: expected integers, found '9223372036854775808' at position 1
{"input_ids": [1, 258]} -> token id 258 at position 1 is outside the vocabulary (0..256)
{"input_ids": [-1, 1]} -> token id -1 at position 0 is outside the vocabulary (0..256)
{"input_ids": [1, 2], "labels": [-100, -1]} -> label -1 at position 1 is neither -100 nor in the vocabulary
{"input_ids": [1, 2], "labels": [1]} -> labels has 1 entries, input_ids has 2
{"input_ids": [1, 2], "labels": [1, -100]} -> no token bears loss: of 2 tokens none after the first has a label
{"input_ids": []} -> no token bears loss: of 0 tokens
{"input_ids": [1, 2], "weights": [1, 1], "loss_weights": [1, 1]} -> loss_weights and weights are two names of one
{"input_ids": [1, 2], "weights": 1} -> weights: expected a list of numbers of float32, found int
{"input_ids": [1, 2], "weights": [1, "a"]} -> weights: expected numbers of float32, found 'a' at position 1
{"input_ids": [1, 2], "weights": [true, 1]} -> weights: expected numbers of float32, found 'True' at position 0
{"input_ids": [1, 2], "weights": [1, NaN]} -> weights: expected numbers of float32, found 'nan' at position 1
{"input_ids": [1, 2], "weights": [1, -1e+39]} -> weights: expected numbers of float32, found '-1e+39' at position 1
{"input_ids": [1, 2], "attention_mask": [0, 1]} -> attention_mask[0] is 0, and a row has no padding here
"""
TURNS_REFUSED = r"""
# the second turn of a chat, and the reason, without the turn, or how it begins
"hi" -> : expected {role, content}, found 'hi'
null -> : expected {role, content}, found None
{"from": "narrator", "value": "x"} -> : unknown role 'narrator'; expected one of system, developer, user,
{"content": "x"} -> : unknown role None; expected one of system, developer, user
{"role": ["user"]} -> : unknown role ['user']; expected one of system, developer
{"from": "human", "value": "q", "content": "r"} -> : has content and value, which differ
{"role": "user", "content": null} ->  (role 'user'): content: expected text, found None; only an assistant turn with tool_calls may go
{"role": "assistant", "content": null} ->  (role 'assistant'): content: expected text, found None; only an assistant turn with
{"role": "user", "text": "x"} ->  (role 'user'): content: expected text, found None
{"role": "user", "content": {"a": 1}} ->  (role 'user'): content: expected text, found {'a': 1}
{"role": "user", "content": 7} ->  (role 'user'): content: expected text, found 7
{"role": "assistant", "content": [{"type": "audio"}]} ->  (role 'assistant'): content: only parts {type: text, text} are read, found 'audio'; only text is read
{"role": "assistant", "content": [{"type": "tool_use"}]} ->  (role 'assistant'): content: only parts {type: text, text} are read, found 'tool_use'; docs/data-formats.md#logs-of-model-calls says how to convert a log of model calls
{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]} ->  (role 'user'): content: only parts {type: text, text} are read, found 'image_url'; only text is read: for images use share_prefixes in a trainer
{"role": "assistant", "content": [{"type": "text", "text": "x", "loss": false}]} ->  (role 'assistant'): content: loss: False of a part is not read; remove it, or the part
{"role": "assistant", "content": [{"type": "text", "text": "x", "train": "no"}]} ->  (role 'assistant'): content: train: 'no' of a
{"role": "assistant", "content": [{"type": "text", "text": "x", "meta": {"loss": 0}}]} ->  (role 'assistant'): content: meta: {'loss': 0} of a
{"role": "assistant", "content": [{"type": "text", "text": "x", "loss_mask": [0]}]} ->  (role 'assistant'): content: loss_mask: [0] of a
{"role": "assistant", "content": [{"type": "text", "text": "x", "thinking": "deep"}]} ->  (role 'assistant'): content: thinking: 'deep' of a
{"role": "assistant", "tool_calls": [{"name": "f", "args": {"x": 1}}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': args: {'x': 1} of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "args": {"x": 1}}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': args: {'x': 1} of a call is not read
{"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"x": 1}}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': parameters: {'x': 1} of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "parameters": {"x": 1}}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': parameters: {'x': 1} of a call is not read
{"role": "assistant", "tool_calls": [{"name": "f", "input": "{\"x\": 1}"}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': input: '{"x": 1}' of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "input": "{\"x\": 1}"}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': input: '{"x": 1}' of a call is not read
{"role": "assistant", "tool_calls": [{"name": "f", "weight": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': weight: 0 of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "weight": 0}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': weight: 0 of a call is not read
{"role": "assistant", "tool_calls": [{"name": "f", "train": "false"}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': train: 'false' of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "train": "false"}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': train: 'false' of a call is not read
{"role": "assistant", "tool_calls": [{"name": "f", "meta": {"train": false}}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': meta: {'train': False} of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "meta": {"train": false}}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': meta: {'train': False} of a call is not read
{"role": "assistant", "tool_calls": [{"name": "f", "thought": "deep"}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': thought: 'deep' of a call is not read
{"role": "assistant", "tool_calls": [{"function": {"name": "f", "thought": "deep"}, "id": "1", "index": 0}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': thought: 'deep' of a call is not read
{"role": "user", "content": [{"image": "a"}]} ->  (role 'user'): content: only parts {type: text, text} are read, found {'image': 'a'};
{"role": "assistant", "content": ""} ->  (role 'assistant'): the answer is empty: nothing is learned from it but to stop; leave the row out (data.on_bad_row: skip), or give the turn weight: 0
{"role": "assistant", "content": " \n"} ->  (role 'assistant'): the answer is empty: nothing is learned from it but to stop; leave the row out (data.on_bad_row: skip), or give the turn weight: 0
{"role": "assistant", "content": "x", "weight": 0.5} ->  (role 'assistant'): weight: expected 0 (no loss on the turn) or 1, found 0.5
{"role": "user", "content": "q", "weight": 1} ->  (role 'user'): weight: 1 requests loss on the turn; only assistant turns bear loss
{"role": "user", "content": "q", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]} ->  (role 'user'): has tool_calls; only an assistant turn calls tools
{"role": "assistant", "content": "x", "thinking": ["r"]} ->  (role 'assistant'): thinking: expected text, found ['r']
{"role": "assistant", "content": "", "tool_calls": "f()"} ->  (role 'assistant'): tool_calls: expected a list of objects, found 'f()'
{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}], "function_call": {"name": "f", "arguments": {"x": 1}}} ->  (role 'assistant'): has tool_calls and function_call;
{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]} ->  (role 'assistant'): tool_calls: call 1: expected the
{"from": "function_call", "value": "f(1)"} ->  (role 'function_call'): expected the JSON of a call, found 'f(1)'
{"from": "function_call", "value": "{'name': 'f'}"} ->  (role 'function_call'): not valid JSON: Expecting property name enclosed in double quotes at column 2; write the list with json.dumps
{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': arguments: not valid JSON
{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "[1]"}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': arguments: expected an object
{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}]} ->  (role 'assistant'): tool_calls: call 1 of the tool 'f': arguments: key 'a' occurs
"""


def test_what_is_refused(tokenizer: Any) -> None:
    turns = [({"messages": [Q, message, A]}, f"messages: turn 2{reason}") for message, reason in cases(TURNS_REFUSED)]
    for fields, reason in [*cases(REFUSED), *turns]:
        with pytest.raises(DataError) as raised:
            ChatEncoder(tokenizer).encode(Row(fields, "a.jsonl:1"))
        assert str(raised.value).startswith(f"a.jsonl:1: {reason}"), fields
        assert "\n" not in str(raised.value)
