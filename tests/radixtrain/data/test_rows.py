"""Rows of every format: what is read and learned from each, what is only listed, or why the row is refused.

What is learned is written as text, in which [ ] enclose what bears loss and | ends a turn. The fix that an error names is
tried. What a template and the settings make of a chat: `test_chat.py`.
"""
# ruff: noqa: E501 (the tables)

import json
import re
from typing import Any

import pytest
import yaml

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.rows import Row, UnreadRow
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import DataError
from tests.support.batches import byte_tokenizer

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
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}{%- if brief is defined %}{{- brief }}{% endif %}
{%- if false %}{{- 'analysis' }}{% endif %}"""  # a word that it only writes is no key that it reads


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(TEMPLATE, special=("|",), eos="|")


def turn(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


Q, A = turn("user", "q"), turn("assistant", "a")
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
{"messages": CHAT, "id": 0, "difficulty": 0.5, "quality": "good", "lang": "no"} -> user: q|assistant: [a|] unread: id, difficulty, quality, lang
{"messages": CHAT, "num_turns": 1, "token_count": 0, "created": 17.5, "year": 2024} -> user: q|assistant: [a|] unread: num_turns, token_count, created, year
{"messages": CHAT, "metadata": {"temperature": 0.7, "ok": false, "lang": "en"}, "tags": ["a"]} -> user: q|assistant: [a|] unread: metadata, tags
{"messages": CHAT, "version": 1.0, "age": 42, "status_code": 200, "parallel_tool_calls": false} -> user: q|assistant: [a|] unread: version, age, status_code, parallel_tool_calls
{"messages": CHAT, "train": true, "weight": 1.0, "used_in_training": "yes", "reasoning": "off"} -> user: q|assistant: [a|] unread: train, weight, used_in_training, reasoning
{"messages": CHAT, "hash": "1", "reward_model": "R", "reasoning_effort": "high"} -> user: q|assistant: [a|] unread: hash, reward_model, reasoning_effort
{"messages": [ASKED, {"role": "assistant", "content": "3"}], "label": 3} -> user: q|assistant: [3|] unread: label
{"instruction": "q", "input": "", "output": "a", "text": ""} -> user: q|assistant: [a|]
{"text": "t", "language_score": 0.97, "token_count": 1} -> [t|] unread: language_score, token_count
{"messages": [{"role": "user", "content": "q", "header": {"agent": "x"}}, {"role": "assistant", "content": "a", "train": true, "name": "Bob", "index": 0, "reasoning_effort": "high"}]} -> user: q|assistant: [a|] unread: messages.header, messages.train, messages.index, messages.reasoning_effort
{"messages": [ASKED, {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}]} -> user: q|assistant: [a|]
{"messages": CHAT, "tools": [], "functions": [{"name": "f"}]} -> {f}user: q|assistant: [a|]
{"messages": [{"role": "system", "content": "s", "tools": "[{\"name\": \"f\"}]"}, ASKED, ANSWERED], "tools": "[]"} -> {f}system: s|user: q|assistant: [a|]
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


def test_what_a_row_means(tokenizer: Any, shown: Any) -> None:
    for fields, becomes in cases(READ):
        text, _, unread = becomes.partition(" unread: ")
        before, report = repr(fields), EncodeReport()
        given = Row({**fields, "nothing": None}, "a.jsonl:1", {"before": "x"})
        [[sample]] = ChatEncoder(tokenizer, split_turns=False).encode_all([given], report=report)
        assert (shown(sample, tokenizer.decode), sample.where) == (text, "a.jsonl:1"), fields
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


def test_what_a_turn_means(tokenizer: Any, shown: Any) -> None:
    for message, text in cases(TURNS):
        before = repr(message)
        [sample] = ChatEncoder(tokenizer, split_turns=False).encode(Row({"messages": [Q, message, A]}, "a.jsonl:1"))
        assert shown(sample, tokenizer.decode) == f"user: q|{text}assistant: [a|]", message
        assert repr(message) == before, "rows may be read again"


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
{"instruction": "q", "output": "a", "history": "x"} -> history beside instruction and output: to put it after the question
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
{"input_ids": [81, 82], "position_ids": [0, 1]} -> position_ids: [0, 1]: nothing reads this
{"input_ids": [81, 82], "labels": [-100, 82], "reward": 0.0} -> reward: 0.0: nothing reads this
{"messages": CHAT, "Is it: good?": false} -> Is it: good?: False: nothing reads this
{"messages": CHAT, "meta": {"human": {"label": false}}} -> meta: {'human': {'label': False}}: nothing reads this
{"messages": CHAT, "chosen": [{"role": "assistant", "content": "b"}], "rejected": [ASKED, {"role": "assistant", "content": "c"}]} -> chosen and rejected: preference data
{"messages": CHAT, "rejected_response": "b"} -> rejected_response: preference data
{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "r"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"}} -> chosen and rejected: preference data
{"messages": [{"role": "user", "content": "q", "attachments": ["a.pdf"]}, ANSWERED]} -> turn 1 (role 'user'): attachments: ['a.pdf'] is not read, so it would be lost
{"messages": [ASKED, {"role": "assistant", "content": "b", "toxic": false}, ASKED, {"role": "assistant", "content": "a", "toxic": false, "edited": true}]} -> turn 2 (role 'assistant'): toxic: False is not read
{"messages": CHAT, "tools": [{"name": "g"}], "functions": [{"name": "f"}]} -> tools and functions differ; remove one of them
{"messages": [{"role": "system", "content": "s", "tools": [{"name": "f"}]}, ASKED, ANSWERED], "tools": [{"name": "g"}]} -> tools and tools of the system turn differ; remove one of them
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


FIX = re.compile(r"data\.columns: (\{.*?\})")


def test_what_is_refused_and_that_the_fix_works(tokenizer: Any) -> None:
    """A fix names all that would be refused next."""
    turns = [({"messages": [Q, message, A]}, f"messages: turn 2{reason}") for message, reason in cases(TURNS_REFUSED)]
    for fields, reason in [*cases(REFUSED), *turns]:
        with pytest.raises(DataError) as raised:
            ChatEncoder(tokenizer).encode(Row(fields, "a.jsonl:1"))
        said = str(raised.value)
        assert said.startswith(f"a.jsonl:1: {reason}") and "\n" not in said, (fields, said)
        fixes = [yaml.safe_load(fix) for fix in FIX.findall(said)]
        left_out = {name: None for fix in fixes for name in fix if fix[name] is None}
        for columns in [left_out] if left_out else fixes:
            assert learned(tokenizer, fields, columns), fields


def learned(tokenizer: Any, fields: dict[str, Any], columns: dict[str, str | None] | None = None) -> list[str]:
    """What bears loss in each sample of a row, read with a mapping."""
    row = UnreadRow(json.dumps(fields).encode(), "a.jsonl:1", columns).read()
    return [tokenizer.decode(each.labels[each.labels != -100]) for each in ChatEncoder(tokenizer).encode(row)]


def test_a_preference_file_is_named_as_such_where_nothing_is_left_to_learn(tokenizer: Any) -> None:
    """LLaMA-Factory's, of which two thirds end in their first question."""
    with pytest.raises(DataError, match="chosen and rejected: preference data"):
        learned(tokenizer, {"conversations": SHAREGPT[:1], "chosen": A, "rejected": turn("assistant", "b")})


# Columns beside a chat, each of which may say that it is bad, or hold a part of it.
MORE: list[tuple[str, Any]] = [
    ("label", False), ("label", "0"), ("label", "bad"), ("thumbs", -1), ("reward", 0.0), ("score", 3), ("rating", "2"),
    ("rank", 2), ("pass_rate", 0.25), ("verdict", "rejected"), ("accepted", "no"), ("stars", 5), ("outcome", "failed"),
    ("zufrieden", False), ("is_spam", True), ("评分", 0), ("weight", 0), ("ok", "0"), ("feedback", {"value": "negative"}),
    ("turn_mask", [0, 1]), ("responses", [A]), ("final", turn("assistant", "good")), ("thinking", "deep"),
    ("rationale", "deep"), ("cot", "deep"), ("chain_of_thoughts", "long and deep"), ("loss_weights", [1.0, 2.0]),
    ("used_in_training", "no"), ("loss", "off"), ("points", 3), ("quality", 2), ("negative", "another answer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), MORE)
def test_a_column_that_says_more(name: str, value: Any, tokenizer: Any) -> None:
    fields = {"messages": [Q, turn("assistant", "BAD")], name: value}
    fix = f"write data.columns: {{{name}: null}}"
    with pytest.raises(DataError, match=re.escape(f"a.jsonl:1: {name}: {value!r}"[:60]) + f".*{re.escape(fix)}"):
        learned(tokenizer, fields)
    assert learned(tokenizer, fields, {name: None}) == ["BAD|"]


def test_a_mapping_ignores_only_what_it_names(tokenizer: Any) -> None:
    """Runs of tau-bench: the hint of the first error leads to the second one."""
    row = {"task_id": 0, "reward": 0.0, "info": {"reward_info": {"reward": 0.0}}, "traj": [Q, A]}
    for columns, error in (
        (None, "no format has the columns task_id, reward, info, traj"),
        ({"messages": "traj"}, "reward: 0.0, info: {'reward_info': {'reward': 0.0}}: nothing reads this"),
        ({"messages": "traj", "reward": None}, "data.columns: {info: null}"),
    ):
        with pytest.raises(DataError, match=re.escape(error)):
            learned(tokenizer, row, columns)
    assert learned(tokenizer, row, {"messages": "traj", "reward": None, "info": None}) == ["a|"]


TO_WEIGHT, TO_THINKING = ("messages.weight", ["a|"]), ("messages.reasoning_content", ["(deep)b|", "a|"])
KEYS = [
    # the setting that reads a key of the first answer of two, and what is learned then; keys and values
    (TO_WEIGHT, [
        ("train", False), ("training", 0), ("loss", 0.0), ("loss_mask", 0), ("learn", False), ("is_good", False), ("反", 0),
    ]),
    (("messages.weight", ["b|", "a|"]), [("masked", True), ("no_loss", True), ("edited", True)]),
    (TO_THINKING, [
        ("reasoning_details", [{"type": "reasoning.text", "text": "deep"}]),
        ("thinking_blocks", [{"type": "thinking", "thinking": "deep", "signature": "x"}]),
        ("thought", "deep"), ("chain_of_thoughts", "deep"), ("rationale", "deep"), ("analysis", "deep"),
    ]),
    (("", []), [
        ("train_detail", [{"begin_offset": 0, "end_offset": 2, "train": False}]), ("parts", [{"text": "deep"}]),
        ("annotations", ["x"]), ("note", "what it would have said instead"), ("extra", {"train": False}),
        ("provider_specific_fields", {"reasoning_content": "deep"}), ("feedback", "bad"), ("verdict", "wrong"),
        ("loss", "off"), ("extra", {"x": {"y": 0}}), ("thoughts", ["deep", "deeper"]), ("思考", "先算三乘四再加上二"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("how", "key", "value"), [(how, *each) for how, keys in KEYS for each in keys])
def test_a_turn_that_says_more(how: tuple[str, list[str]], key: str, value: Any, tokenizer: Any) -> None:
    row = {"messages": [Q, turn("assistant", "b", **{key: value}), Q, A]}
    with pytest.raises(DataError) as raised:
        learned(tokenizer, row)
    said, (reads, then) = str(raised.value), how
    assert f"a.jsonl:1: turn 2 (role 'assistant'): {key}: " in said
    assert f"data.columns: {{messages.{key}: null}} leaves it out" in said
    assert learned(tokenizer, row, {f"messages.{key}": None}) == ["b|", "a|"]
    assert (f"data.columns: {{{reads}: messages.{key}}} reads it" in said) == bool(reads)
    for given in (row, {"conversations": json.dumps(row["messages"])}) if reads else ():
        assert learned(tokenizer, given, {reads: f"messages.{key}"}) == then


@pytest.mark.parametrize("keys", [{"loss_mask": 0, "weight": None}, {"weight": None, "loss_mask": 0}])
def test_a_null_does_not_undo_a_mapping(keys: dict[str, Any], tokenizer: Any) -> None:
    row, columns = {"messages": [Q, turn("assistant", "b", **keys), Q, A]}, {"messages.weight": "messages.loss_mask"}
    assert learned(tokenizer, row, columns) == ["a|"]
    row["messages"][1]["weight"] = 1
    with pytest.raises(DataError, match=r"messages: turn 2: two keys are weight by data\.columns, and they differ"):
        learned(tokenizer, row, columns)
