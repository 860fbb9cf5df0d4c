"""Rows to samples: which tokens bear loss, and which rows are refused.

The fixture's tokenizer gives every byte its own id, so that ids can be written as bytes: `[*b"hi", END]`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.formats import Row
from radixtrain.data.report import EncodeReport
from radixtrain.errors import DataError, UserError

TWO_NEWLINES, START, END, BOS = 256, 257, 258, 259  # two newlines are the only merge
VOCAB_SIZE = 260
THINK = [*b"<think>", TWO_NEWLINES, *b"</think>", TWO_NEWLINES]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_tokenizer(template=CHATML, bos=None, eos="<|im_end|>"):
    names = bytes_to_unicode()
    newline = names[ord("\n")]
    vocab = {names[byte]: byte for byte in range(256)} | {newline * 2: TWO_NEWLINES}
    backend = Tokenizer(models.BPE(vocab, [(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text) for text in ("<|im_start|>", "<|im_end|>", "<|bos|>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=template)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def chat(*messages, **columns):
    return Row({"messages": list(messages), **columns}, "a.jsonl:1")


def row(**fields):
    return Row(fields, "a.jsonl:1")


def lists(samples):
    assert all(sample.input_ids.dtype == sample.labels.dtype == np.int64 for sample in samples)
    return [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in samples]


def after(prompt, target):
    return [*prompt, *target], [-100] * len(prompt) + [*target]


def error_of(encoder, bad_row):
    with pytest.raises(UserError) as raised:
        encoder.encode(bad_row)
    return str(raised.value)


TURN_1 = [START, *b"user\nhi", END, *b"\n", START, *b"assistant\n"]
ANSWER_1 = [*THINK, *b"yo", END]
TURN_2 = [*TURN_1, *b"yo", END, *b"\n", START, *b"user\nq", END, *b"\n", START, *b"assistant\n"]
ANSWER_2 = [*THINK, *b"a", END]
TWO_TURNS = (user("hi"), assistant("yo"), user("q"), assistant("a"))


# What comes out, token by token


def test_every_turn_is_a_sample_as_at_inference(tokenizer):
    samples = ChatEncoder(tokenizer).encode(chat(*TWO_TURNS))
    assert lists(samples) == [after(TURN_1, ANSWER_1), after(TURN_2, ANSWER_2)]
    assert [sample.where for sample in samples] == ["a.jsonl:1"] * 2


def test_what_follows_the_last_assistant_turn_is_unused(tokenizer):
    samples = ChatEncoder(tokenizer).encode(chat(user("hi"), assistant("yo"), user("unanswered")))
    assert lists(samples) == [after(TURN_1, ANSWER_1)]


def test_loss_on_everything_is_one_sample(tokenizer):
    everything = [*TURN_2, *ANSWER_2, *b"\n"]
    samples = ChatEncoder(tokenizer, assistant_only_loss=False).encode(chat(*TWO_TURNS))
    assert lists(samples) == [(everything, everything)]


def test_generation_markers_mask_a_whole_chat():
    samples = ChatEncoder(byte_tokenizer(MARKED), split_turns=False).encode(chat(*TWO_TURNS))
    head_1, head_2 = TURN_1, [*b"\n", START, *b"user\nq", END, *b"\n", START, *b"assistant\n"]
    (ids_1, labels_1), (ids_2, labels_2) = after(head_1, [*b"yo", END]), after(head_2, [*b"a", END])
    assert lists(samples) == [([*ids_1, *ids_2, *b"\n"], [*labels_1, *labels_2, -100])]


def test_prompt_and_completion_as_text(tokenizer):
    fields = row(prompt="1+1=\n", completion="\n2")
    # The newlines are not merged: at inference the prompt's tokens are given.
    assert lists(ChatEncoder(tokenizer).encode(fields)) == [after(b"1+1=\n", [*b"\n2", END])]
    everything = [*b"1+1=\n\n2", END]
    assert lists(ChatEncoder(tokenizer, completion_only_loss=False).encode(fields)) == [(everything, everything)]
    assert lists(ChatEncoder(tokenizer).encode(row(prompt="", completion="ab"))) == [([*b"ab", END],) * 2]


def test_plain_text_gets_bos_and_eos_once():
    encoder = ChatEncoder(byte_tokenizer(bos="<|bos|>"))
    assert lists(encoder.encode(row(text="ab"))) == [([BOS, *b"ab", END], [-100, *b"ab", END])]
    assert lists(encoder.encode(row(text="ab<|im_end|>"))) == [([BOS, *b"ab", END], [-100, *b"ab", END])]
    assert lists(encoder.encode(row(prompt="a", completion="b"))) == [([BOS, *b"ab", END], [-100, -100, *b"b", END])]
    assert lists(encoder.encode(chat(user("hi"), assistant("yo")))) == [after(TURN_1, ANSWER_1)]


def test_prompt_and_completion_as_messages(tokenizer):
    single = row(prompt=[user("hi")], completion=[assistant("yo")])
    for encoder in (ChatEncoder(tokenizer), ChatEncoder(tokenizer, split_turns=False)):
        assert lists(encoder.encode(single)) == [after(TURN_1, ANSWER_1)]
    everything = [*TURN_1, *ANSWER_1, *b"\n"]
    assert lists(ChatEncoder(tokenizer, completion_only_loss=False).encode(single)) == [(everything, everything)]


def test_only_the_completion_of_a_longer_chat_is_learned(tokenizer):
    several = row(prompt=list(TWO_TURNS[:2]), completion=list(TWO_TURNS[2:]))
    assert lists(ChatEncoder(tokenizer).encode(several)) == [after(TURN_2, ANSWER_2)]
    whole = byte_tokenizer(MARKED)  # renders the prompt's answer alike when another turn follows
    samples = ChatEncoder(whole, assistant_only_loss=False).encode(several)
    target = [START, *b"user\nq", END, *b"\n", START, *b"assistant\na", END]
    assert lists(samples) == [after([*TURN_1, *b"yo", END, *b"\n"], target)]
    assert error_of(ChatEncoder(whole, split_turns=False), several) == (
        "a.jsonl:1: completion: expected a single assistant turn, or split_turns: true, or assistant_only_loss: false; "
        "found the roles user, assistant"
    )


def test_sharegpt_becomes_messages(tokenizer):
    turns = [("system", "s"), ("human", "hi"), ("gpt", "yo")]
    samples = ChatEncoder(tokenizer).encode(row(conversations=[{"from": f, "value": v} for f, v in turns]))
    assert lists(samples) == [after([START, *b"system\ns", END, *b"\n", *TURN_1], ANSWER_1)]


def test_text_parts_are_joined_and_nulls_ignored(tokenizer):
    parts = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": None}
    samples = ChatEncoder(tokenizer).encode(chat(parts, assistant("yo", tool_calls=None), tools=None, prompt=None))
    assert lists(samples) == [after(TURN_1, ANSWER_1)]


GIVEN_TOKENS = [
    ({}, [1, 2, 3]),
    ({"labels": [-100, 2, -100]}, [-100, 2, -100]),
    ({"completion_mask": [0, 0, 1]}, [-100, -100, 3]),
    ({"assistant_masks": [0, 1, 0]}, [-100, 2, -100]),
    ({"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}, [-100, 2, -100]),
    ({"labels": [-100, -100, 7], "completion_mask": [0, 1, 0]}, [-100, -100, 7]),
]


@pytest.mark.parametrize(("columns", "labels"), GIVEN_TOKENS)
def test_tokens_that_are_there_already(tokenizer, columns, labels):
    assert lists(ChatEncoder(tokenizer).encode(row(input_ids=[1, 2, 3], **columns))) == [([1, 2, 3], labels)]


def test_completion_mask_counts_only_when_asked(tokenizer):
    encoder = ChatEncoder(tokenizer, completion_only_loss=False)
    assert lists(encoder.encode(row(input_ids=np.array([1, 2]), completion_mask=[0, 0]))) == [([1, 2], [1, 2])]


def test_a_base_models_turn_ends_at_its_own_token():
    """Its EOS is another token, so the template's end of turn is known by being special."""
    samples = ChatEncoder(byte_tokenizer(eos="<|bos|>")).encode(chat(user("hi"), assistant("yo")))
    assert lists(samples) == [after(TURN_1, ANSWER_1)]


@pytest.mark.parametrize(
    ("ending", "target"),
    [("\\n", b"yo\n"), ("<|im_end|>tail", [*b"yo", END]), ("<|im_start|>tail", [*b"yo", START, *b"tail"])],
    ids=["no special token: everything stays", "after EOS all is cut", "another special token cuts only blanks"],
)
def test_where_a_turn_ends(ending, target):
    template = (
        "{%- for m in messages %}{{- m.role[0] + m.content }}"
        "{%- if m.role == 'assistant' %}{{- 'ENDING' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{- 'a' }}{% endif %}"
    )
    samples = ChatEncoder(byte_tokenizer(template.replace("ENDING", ending))).encode(chat(user("hi"), assistant("yo")))
    assert lists(samples) == [after(b"uhia", target)]


def test_a_target_gets_no_space_where_a_text_begins():
    """SentencePiece tokenizers (Llama 2, Mistral) put a space before a text's first word, which a target is not."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", "▁", "a", "b", ":"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    samples = ChatEncoder(tokenizer).encode(row(prompt="a:", completion="b"))
    assert lists(samples) == [after([2, 3, 5], [4, 1])]


# Turns without loss, variables of the template


UNSURE = (user("hi"), assistant("yo", weight=0), user("q"), assistant("a", weight=1))


def test_a_turn_with_weight_0_is_history(tokenizer):
    assert lists(ChatEncoder(tokenizer).encode(chat(*UNSURE))) == [after(TURN_2, ANSWER_2)]


@pytest.mark.parametrize("template", [MARKED, CHATML.replace("and loop.last ", "")], ids=["markers", "no markers"])
def test_a_turn_with_weight_0_in_a_whole_chat(template):
    encoder = ChatEncoder(byte_tokenizer(template), split_turns=False)
    [(_, target)] = texts(encoder, encoder.encode(chat(*UNSURE)))
    assert target.removeprefix("<think>\n\n</think>\n\n") == "a<|im_end|>"


@pytest.mark.parametrize("options", [{"assistant_only_loss": False}, {"completion_only_loss": False}])
def test_weight_0_where_every_token_bears_loss_is_refused(tokenizer, options):
    rows = {
        "assistant_only_loss": chat(*UNSURE),
        "completion_only_loss": row(prompt=[*UNSURE[:3]], completion=[UNSURE[3]]),
    }
    assert error_of(ChatEncoder(tokenizer, **options), rows[next(iter(options))]) == (
        "a.jsonl:1: turn 2 has weight: 0, but here every token bears loss; "
        "set assistant_only_loss: true and split_turns: true"
    )


def test_a_misspelt_variable_of_the_config_is_no_matter_of_a_row():
    template = CHATML + "{% if enable_thinking is defined %}{% endif %}"
    encoder = ChatEncoder(byte_tokenizer(template), chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(UserError) as raised:
        encoder.encode_all([chat(*TWO_TURNS)], on_error=lambda error: None)
    assert str(raised.value) == (
        "chat_template_kwargs: the chat template reads no variable 'enable_thinkin', did you mean enable_thinking?"
    )


def test_columns_that_nothing_reads_are_counted(tokenizer):
    report = EncodeReport()
    rows = [row(text="ab", id=1), row(text="ab", id=2, source="x"), row(body="x")]
    ChatEncoder(tokenizer).encode_all(rows, lambda error: None, report)
    assert report.unused_columns == {"id": 2, "source": 1}


# Batches, lengths, counts


def test_a_batch_is_the_rows_one_by_one(tokenizer):
    rows = [row(text="x" * n) if n % 3 else chat(*TWO_TURNS) for n in range(1, 100)]
    encoder = ChatEncoder(tokenizer)
    assert [lists(samples) for samples in encoder.encode_all(iter(rows))] == [lists(encoder.encode(r)) for r in rows]


def test_bad_rows_are_reported_in_order_and_leave_their_place_empty(tokenizer):
    rows = [row(input_ids=[999, 1]), row(text="ok"), row(nothing=1), row(text="")]
    rows = [r._replace(where=f"a.jsonl:{n}") for n, r in enumerate(rows, start=1)]
    errors, report = [], EncodeReport()
    encoded = ChatEncoder(tokenizer).encode_all(rows, errors.append, report)
    assert [len(samples) for samples in encoded] == [0, 1, 0, 0]
    assert [error.where for error in errors] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"]
    counts = {"num_rows": 4, "num_bad_rows": 3, "num_samples": 1, "num_tokens": 3, "num_labels": 2}
    assert report == EncodeReport(**counts, bad_rows=[str(error) for error in errors])
    with pytest.raises(DataError, match=r"^a\.jsonl:1: token id 999"):
        ChatEncoder(tokenizer).encode_all(rows)


def test_a_long_row_is_refused_by_default(tokenizer):
    assert error_of(ChatEncoder(tokenizer, max_length=3), row(text="abc")) == (
        "a.jsonl:1: 4 tokens exceed max_length 3; raise max_length or set excess_length_strategy: drop | truncate"
    )
    assert len(ChatEncoder(tokenizer, max_length=4).encode(row(text="abc"))) == 1


def test_dropping_keeps_the_turns_that_fit(tokenizer):
    encoder = ChatEncoder(tokenizer, max_length=len(TURN_1 + ANSWER_1), excess_length_strategy="drop")
    report = EncodeReport()
    encoded = encoder.encode_all([chat(*TWO_TURNS), row(text="x" * 99)], report=report)
    assert [lists(samples) for samples in encoded] == [[after(TURN_1, ANSWER_1)], []]
    counts = {"num_rows": 2, "num_dropped_rows": 1, "num_samples": 1, "num_dropped_samples": 2, "num_long_samples": 2}
    tokens = {"num_tokens": len(TURN_1 + ANSWER_1), "num_labels": len(ANSWER_1), "longest": 100}
    assert report == EncodeReport(**counts, **tokens, longest_where="a.jsonl:1")


def test_truncating_keeps_the_start(tokenizer):
    encoder = ChatEncoder(tokenizer, max_length=len(TURN_1) + 2, excess_length_strategy="truncate")
    report = EncodeReport()
    encoded = encoder.encode_all([chat(user("hi"), assistant("yo")), row(text="ab")], report=report)
    assert [lists(samples) for samples in encoded] == [[after(TURN_1, ANSWER_1[:2])], [([*b"ab", END],) * 2]]
    assert (report.num_rows, report.num_samples, report.num_truncated_samples) == (2, 2, 1)
    assert (report.num_tokens, report.num_labels) == (len(TURN_1) + 2 + 3, 2 + 2)


def test_truncating_away_the_answer_is_counted(tokenizer):
    encoder = ChatEncoder(tokenizer, max_length=8, excess_length_strategy="truncate")
    report = EncodeReport()
    assert encoder.encode_all([chat(user("hi"), assistant("yo"))], report=report) == [[]]
    assert (report.num_without_loss, report.num_dropped_rows, report.num_truncated_samples) == (1, 1, 0)
    assert str(report) == "1 rows, 0 samples, 1 samples dropped because truncation left them no loss"


# Rows that cannot be used

TURN = "a.jsonl:1: messages: turn"
BAD_ROWS = [
    (
        row(id=1, messages=None),
        "a.jsonl:1: no format has the columns id, messages (null); expected messages, prompt + completion, "
        "instruction + output, question + answer, conversations, text or input_ids, or data.columns: ",
    ),
    (row(), "a.jsonl:1: no format has the columns (none); expected messages, "),
    (chat(), "a.jsonl:1: messages: expected a non-empty list of {role, content}, found a list of 0"),
    (row(messages="hi"), "a.jsonl:1: messages: expected a non-empty list of {role, content}, found 'hi'"),
    (chat("hi"), f"{TURN} 1: expected {{role, content}}, found 'hi'"),
    (
        chat({"role": "narrator", "content": "x"}),
        f"{TURN} 1: unknown role 'narrator'; expected one of system, developer, user, assistant, tool, or ShareGPT's",
    ),
    (chat(user("x"), {"content": "x"}), f"{TURN} 2: unknown role None; expected one of system, developer, user"),
    (chat(user("x"), {"role": ["user"]}), f"{TURN} 2: unknown role ['user']; expected one of system, developer"),
    (
        chat(user(None)),
        f"{TURN} 1 (role 'user'): content: expected text, found null; "
        "only an assistant turn with tool_calls may go without",
    ),
    (
        chat(user("x"), assistant(None)),
        f"{TURN} 2 (role 'assistant'): content: expected text, found null; "
        "only an assistant turn with tool_calls may go without",
    ),
    (chat(user({"a": 1})), f"{TURN} 1 (role 'user'): content: expected text, found an object with the keys a"),
    (chat(user(7)), f"{TURN} 1 (role 'user'): content: expected text, found 7"),
    (
        chat(user([{"type": "image", "image": "x.png"}])),
        f"{TURN} 1 (role 'user'): content: only parts {{type: text, text}} are read, found 'image'",
    ),
    (
        chat({**user("x"), "tool_calls": [{"name": "f"}]}),
        f"{TURN} 1 (role 'user'): has tool_calls; only an assistant turn calls tools",
    ),
    (
        chat(user("x"), assistant("", tool_calls="f()")),
        f"{TURN} 2 (role 'assistant'): tool_calls: expected a list of objects, found 'f()'",
    ),
    (chat(user("x")), "a.jsonl:1: expected at least one assistant turn to learn from; found the roles user"),
    (
        chat(assistant("x")),
        "a.jsonl:1: turn 1 is the assistant's, with no prompt before it; "
        "begin with another turn or set split_turns: false",
    ),
    (
        chat(user("x"), assistant("y", tool_calls=[{"function": {"name": "weather"}}])),
        "a.jsonl:1: the chat template dropped turn 2's call of the tool 'weather'; "
        "set chat_template_path to a template that renders it",
    ),
    (
        chat(user("x"), assistant("y"), tools=[{"function": {"name": "weather"}}]),
        "a.jsonl:1: the chat template dropped the tool 'weather'; set chat_template_path to a template that renders it",
    ),
    (
        chat(user("x"), assistant("y"), assistant("z")),
        "a.jsonl:1: the chat template renders the prompt of turn 3 differently with and without its answer "
        r"('y<|im_end|>\n<|im_start|>assist' and '<think>\n\n</think>\n\ny<|im_end|>'); "
        "set chat_template_path to a template that renders both alike",
    ),
    (chat(user("x"), assistant("y"), tools="["), "a.jsonl:1: tools: not valid JSON: Expecting value at column 2"),
    (
        chat(user("x"), assistant("y"), tools={"f": 1}),
        "a.jsonl:1: tools: expected a list of function descriptions, found",
    ),
    (
        chat(user("x"), assistant("y"), chat_template_kwargs=1),
        "a.jsonl:1: chat_template_kwargs: expected an object, found 1",
    ),
    (
        chat(user("x"), assistant("y"), chat_template_kwargs={"tokenize": True, "chat_template": "x"}),
        "a.jsonl:1: chat_template_kwargs: chat_template, tokenize cannot be set; expected variables of the template",
    ),
    (
        chat(user("\ud800"), assistant("y")),
        r"a.jsonl:1: text holds \ud800, half of a surrogate pair; write both halves",
    ),
    (row(text="\ud800"), r"a.jsonl:1: text holds \ud800, half of a surrogate pair; write both halves"),
    (row(text=7), "a.jsonl:1: text: expected text, found int"),
    (row(text=""), "a.jsonl:1: no token bears loss: of 1 tokens none after the first has a label other than -100"),
    (row(prompt="x", completion=7), "a.jsonl:1: prompt and completion: expected both as text or both as lists"),
    (
        row(prompt=[user("x")], completion=[]),
        "a.jsonl:1: completion: expected a non-empty list of {role, content}, found",
    ),
    (
        row(prompt=[user("x")], completion=[user("y")]),
        "a.jsonl:1: expected at least one assistant turn to learn from; found the roles user",
    ),
    (
        row(conversations=[{"from": "narrator", "value": "x"}]),
        "a.jsonl:1: conversations: turn 1: unknown role 'narrator'; expected one of system",
    ),
    (
        row(conversations=[]),
        "a.jsonl:1: conversations: expected a non-empty list of {role, content}, found a list of 0",
    ),
    (row(conversations=[user("x")]), "a.jsonl:1: expected at least one assistant turn to learn from; found the roles"),
    (row(input_ids="x"), "a.jsonl:1: input_ids: expected a list of integers, found str"),
    (row(input_ids=[1, 2.0]), "a.jsonl:1: input_ids: expected integers, found '2.0' at position 1"),
    (row(input_ids=[1, True]), "a.jsonl:1: input_ids: expected integers, found 'True' at position 1"),
    (row(input_ids=[1, 2**63]), "a.jsonl:1: input_ids: expected integers, found '9223372036854775808' at position 1"),
    (row(input_ids=[1, 260]), "a.jsonl:1: token id 260 at position 1 is outside the vocabulary (0..259)"),
    (row(input_ids=[-1, 1]), "a.jsonl:1: token id -1 at position 0 is outside the vocabulary (0..259)"),
    (
        row(input_ids=[1, 2], labels=[-100, -1]),
        "a.jsonl:1: label -1 at position 1 is neither -100 nor in the vocabulary (0..259)",
    ),
    (row(input_ids=[1, 2], labels=[1]), "a.jsonl:1: labels: expected 2 values, as many as input_ids, found 1"),
    (
        row(input_ids=[1, 2], completion_mask=[0, 2]),
        "a.jsonl:1: completion_mask: expected 0 or 1, found 2 at position 1",
    ),
    (
        row(input_ids=[1, 2], labels=[1, -100]),
        "a.jsonl:1: no token bears loss: of 2 tokens none after the first has a label other than -100",
    ),
    (row(input_ids=[]), "a.jsonl:1: no token bears loss: of 0 tokens"),
]


@pytest.mark.parametrize(("bad_row", "message"), BAD_ROWS, ids=[message[11:60] for _, message in BAD_ROWS])
def test_bad_rows_say_what_and_where(tokenizer, bad_row, message):
    error = error_of(ChatEncoder(tokenizer), bad_row)
    assert error.startswith(message)
    assert "\n" not in error


def test_a_token_beyond_the_models_embedding_is_named(tokenizer):
    message = error_of(ChatEncoder(tokenizer, vocab_size=258), chat(user("hi"), assistant("yo")))
    assert message == "a.jsonl:1: token id 258 at position 8 is outside the vocabulary (0..257)"


def test_a_dropped_turn_is_noticed():
    template = CHATML.replace("{{- message.content", "{{- '' if message.role == 'tool' else message.content")
    result = {"role": "tool", "content": " rain "}
    assert error_of(ChatEncoder(byte_tokenizer(template)), chat(user("hi"), result, assistant("yo"))) == (
        "a.jsonl:1: the chat template dropped turn 2 (role 'tool'); "
        "set chat_template_path to a template that renders it"
    )


def test_a_tool_result_printed_as_json_is_not_dropped():
    template = CHATML.replace(
        "message.content", "(message.content if message.role != 'tool' else message.content|tojson)"
    )
    result = {"role": "tool", "content": '{"é": "\n"}'}
    assert len(ChatEncoder(byte_tokenizer(template)).encode(chat(user("hi"), result, assistant("yo")))) == 1


TEMPLATE_FAULTS = [
    (None, True, "the tokenizer has no chat template; set chat_template_path to a template, or use rows with"),
    ("{% for %}", True, "the chat template is not valid at its line 1: "),
    ("{{ raise_exception('no\nsystem') }}", True, "a.jsonl:1: the chat template failed: TemplateError: no"),
    ("{{ messages[0].content + 1 }}", True, "a.jsonl:1: the chat template failed: TypeError: "),
    (
        MARKED.replace("== 'assistant'", "== 'model'"),
        False,
        "a.jsonl:1: the chat template's generation markers mark no token; "
        "set split_turns: true, or set chat_template_path to a template with generation markers",
    ),
]


@pytest.mark.parametrize(("template", "split_turns", "message"), TEMPLATE_FAULTS)
def test_template_faults(template, split_turns, message):
    encoder = ChatEncoder(byte_tokenizer(template), split_turns=split_turns)
    error = error_of(encoder, chat(user("hi"), assistant("yo")))
    assert error.startswith(message)
    assert "\n" not in error


def test_a_wrong_policy_is_refused(tokenizer):
    with pytest.raises(UserError, match="excess_length_strategy: expected raise, drop or truncate, found 'cut'"):
        ChatEncoder(tokenizer, excess_length_strategy="cut")
    with pytest.raises(UserError, match="max_length: expected at least 2 tokens, found 1"):
        ChatEncoder(tokenizer, max_length=1)


# The stock templates


def trl_template(name):
    trl = pytest.importorskip("trl", reason="carries a copy of Qwen3's stock chat template: pip install trl")
    path = Path(trl.__file__).parent / "chat_templates" / name
    if not path.exists():
        pytest.skip(f"this trl has no {name}: pip install 'trl>=1.10'")
    return path.read_text()


def texts(encoder, samples):
    decode = encoder.tokenizer.decode
    return [
        (decode(sample.input_ids[sample.labels == -100]), decode(sample.input_ids[sample.labels != -100]))
        for sample in samples
    ]


THOUGHTFUL = (user("hi"), assistant("yo", reasoning_content="greet"), user("q"), assistant("a"))


def test_qwen3_shows_a_turn_its_own_thinking_and_hides_it_from_the_next():
    encoder = ChatEncoder(byte_tokenizer(trl_template("qwen3.jinja")))
    first = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    second = first + "yo<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert texts(encoder, encoder.encode(chat(*THOUGHTFUL))) == [
        (first, "<think>\ngreet\n</think>\n\nyo<|im_end|>"),
        (second, "<think>\n\n</think>\n\na<|im_end|>"),
    ]


def test_qwen3_without_thinking_has_the_empty_think_block_in_the_prompt():
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    row_kwargs = chat(user("hi"), assistant("yo"), chat_template_kwargs={"enable_thinking": False})
    for kwargs, fields in (({"enable_thinking": False}, chat(user("hi"), assistant("yo"))), ({}, row_kwargs)):
        encoder = ChatEncoder(byte_tokenizer(trl_template("qwen3.jinja")), chat_template_kwargs=kwargs)
        assert texts(encoder, encoder.encode(fields)) == [(prompt, "yo<|im_end|>")]


def test_qwen3_tool_use():
    encoder = ChatEncoder(byte_tokenizer(trl_template("qwen3.jinja")))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    result = {"role": "tool", "content": "rain"}
    messages = (user("rain?"), assistant(None, tool_calls=[call]), result, assistant("yes"))
    for columns in ({"tools": tools}, {"tools": json.dumps(tools)}):
        samples = texts(encoder, encoder.encode(chat(*messages, **columns)))
        assert [target for _, target in samples] == [
            "<think>\n\n</think>\n\n<tool_call>\n"
            '{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nyes<|im_end|>",
        ]
        assert all('"name": "weather", "parameters"' in prompt for prompt, _ in samples)
        assert "<tool_response>\nrain\n</tool_response>" in samples[1][0]


def test_qwen3_renders_a_developer_as_the_system():
    encoder = ChatEncoder(byte_tokenizer(trl_template("qwen3.jinja")))
    [[(prompt, _)], [(expected, _)]] = [
        texts(encoder, encoder.encode(chat({"role": role, "content": "be brief"}, user("hi"), assistant("yo"))))
        for role in ("developer", "system")
    ]
    assert prompt == expected and "<|im_start|>system\nbe brief<|im_end|>" in prompt


def test_a_template_that_knows_developers_keeps_them(tokenizer):
    [(prompt, _)] = texts(
        ChatEncoder(tokenizer),
        ChatEncoder(tokenizer).encode(chat({"role": "developer", "content": "x"}, user("hi"), assistant("yo"))),
    )
    assert prompt.startswith("<|im_start|>developer\nx<|im_end|>")


def test_qwen3_whole_chats_need_no_markers():
    encoder = ChatEncoder(byte_tokenizer(trl_template("qwen3.jinja")), split_turns=False)
    first = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    [sample] = encoder.encode(chat(*THOUGHTFUL))
    assert encoder.tokenizer.decode(sample.input_ids) == (
        first
        + "yo<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n"
    )
    assert texts(encoder, [sample])[0][1] == "yo<|im_end|><think>\n\n</think>\n\na<|im_end|>"


def test_a_turn_of_weight_0_bears_no_loss_in_a_whole_chat():
    """With markers in the template too, which would mark all turns."""
    messages = (user("hi"), assistant("yo", weight=0), user("q"), assistant("a"))
    for template in (CHATML, MARKED):
        encoder = ChatEncoder(byte_tokenizer(template), split_turns=False)
        [(_, target)] = texts(encoder, encoder.encode(chat(*messages)))
        assert target.removeprefix("<think>\n\n</think>\n\n") == "a<|im_end|>"


def test_qwen3_training_template_marks_whole_chats():
    encoder = ChatEncoder(byte_tokenizer(trl_template("qwen3_training.jinja")), split_turns=False)
    [(_, target)] = texts(encoder, encoder.encode(chat(*TWO_TURNS)))
    assert "yo<|im_end|>" in target
    assert "a<|im_end|>" in target
    assert "user" not in target


# Any text

CONTENT = st.text(min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(system=CONTENT, question=CONTENT, answer=CONTENT.filter(str.strip))
def test_no_character_is_lost(tokenizer, system, question, answer):
    encoder = ChatEncoder(tokenizer)
    messages = [{"role": "system", "content": system}, user(question), assistant(answer)]
    [(prompt, target)] = texts(encoder, encoder.encode(chat(*messages)))
    assert (
        prompt
        == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert target == f"<think>\n\n</think>\n\n{answer}<|im_end|>"


KEYS = ["role", "content", "from", "value", "weight", "function", "name", "arguments"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(KEYS), values),
    max_leaves=8,
)
COLUMNS = [
    *("messages", "prompt", "completion", "conversations", "text", "input_ids", "labels", "tools", "dialog", "system"),
    *("instruction", "input", "output", "history", "question", "answer", "functions", "chat_template_kwargs", "label"),
]
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=3)},
        optional=dict.fromkeys(("weight", "tool_calls", "function_call", "name", "reasoning_content"), JSON),
    ),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(COLUMNS), JSON | TURNS, max_size=4))
def test_any_row_gives_samples_or_a_user_error(tokenizer, fields):
    try:
        samples = ChatEncoder(tokenizer).encode(row(**fields))
    except UserError as error:
        assert str(error).startswith("a.jsonl:1: ")
    else:
        assert all((sample.labels[1:] != -100).any() for sample in samples)


# The tokenizer's files


def test_load_tokenizer_with_another_template(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "other.jinja").write_text(MARKED)
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML
    loaded = load_tokenizer(str(tmp_path), tmp_path / "other.jinja")
    assert loaded.chat_template == MARKED
    assert loaded("hi<|im_end|>")["input_ids"] == [*b"hi", END]


def test_load_tokenizer_says_what_is_missing(tmp_path, tokenizer):
    with pytest.raises(
        UserError, match=r"^no tokenizer in .*: expected a model folder with tokenizer\.json or"
    ) as raised:
        load_tokenizer(str(tmp_path / "missing"))
    assert "\n" not in str(raised.value)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"^chat_template_path: cannot read .*x\.jinja: No such file or directory; expected"
    ):
        load_tokenizer(str(tmp_path), tmp_path / "x.jinja")
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(
        UserError, match=r"^chat_template_path: cannot read .*x\.jinja: not UTF-8; expected a Jinja file$"
    ):
        load_tokenizer(str(tmp_path), tmp_path / "x.jinja")


@pytest.mark.parametrize(
    ("mask", "ids"), [([1, 1, 1, 0, 0], [65, 66, 67]), ([0, 0, 1, 1, 1], [67, 68, 69]), ([0, 1, 1, 1, 0], [66, 67, 68])]
)
def test_padding_is_left_out(tokenizer, mask, ids):
    fields = {"input_ids": [65, 66, 67, 68, 69], "labels": [65, 66, 67, 68, 69], "attention_mask": mask}
    assert lists(ChatEncoder(tokenizer).encode(row(**fields, loss_weights=[1.0] * 5))) == [(ids, ids)]


def test_a_hole_in_the_attention_mask_is_refused(tokenizer):
    reason = "a.jsonl:1: attention_mask: has a 0 between two 1s; expected zeros only at the ends, for padding"
    assert error_of(ChatEncoder(tokenizer), row(input_ids=[65, 66, 67], attention_mask=[1, 0, 1])) == reason
    assert "no token bears loss" in error_of(ChatEncoder(tokenizer), row(input_ids=[65], attention_mask=[0]))
