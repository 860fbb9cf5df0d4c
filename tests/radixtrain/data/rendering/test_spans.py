"""Where the assistant's turns stand in a whole chat, against the same templates with generation markers.

Each template below encloses in markers what the model would write. `MARKERS` removes them, and the turns have to be
found nevertheless, or the chat refused.
"""

import random
import re
from functools import cache
from typing import Any

import pytest
from byte_tokenizer import TWO_NEWLINES, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TRIES
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row
from radixtrain.data.rendering.conversation import Conversation
from radixtrain.data.rendering.spans import find_turns
from radixtrain.data.tokens.tokenization import DraftTokenizer
from radixtrain.errors import DataError

MARKERS = re.compile(r"\{%-? (?:end)?generation %\}")

CHATML = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}{%- generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- else %}{{- m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Thinking after the last question only, an empty block on the very last turn, calls of tools, merged tool results.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n' + tools|tojson + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}
    {%- set is_result = m.role == 'user' and m.content.startswith('<tool_response>') %}
    {%- if m.role == 'user' and not is_result %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content, thinking = m.content or '', m.reasoning_content or '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
        {%- if loop.last and enable_thinking is false and not thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
        {%- generation %}
        {%- if loop.index0 > ns.asked and (thinking or loop.last and enable_thinking is not false) %}
            {{- '<think>\\n' + thinking + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>' + call.function|tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA = """\
{{- '<|bos|><|head|>system<|/head|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}
{%- if messages[0].role == 'system' %}{{- '\\n' + messages[0].content|trim }}{% endif %}{{- '<|eot|>' }}
{%- for m in messages if m.role != 'system' %}
    {{- '<|head|>' + m.role + '<|/head|>\\n\\n' }}
    {%- if m.role == 'assistant' %}{%- generation %}{{- m.content|trim + '<|eot|>' }}{% endgeneration %}
    {%- elif m.role == 'tool' %}{{- '{"output": ' + m.content|tojson + '}<|eot|>' }}
    {%- else %}{{- m.content|trim + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{- '<|bos|>' }}{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
    {{- '<turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + (system if loop.first else '') }}
    {%- if m.role == 'assistant' %}{%- generation %}{{- m.content|trim + '</turn>' }}{% endgeneration %}{{- '\\n' }}
    {%- else %}{{- m.content|trim + '</turn>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\\n' }}{% endif %}"""

# No generation prompt, and the system prompt moves to the last question.
MISTRAL = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- '<|bos|>' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'assistant' %}{%- generation %}{{- ' ' + m.content|trim + '</s>' }}{% endgeneration %}
    {%- elif messages[0].role == 'system' and loop.index == ns.last %}
        {{- '[INST] ' + messages[0].content + '\\n\\n' + m.content + '[/INST]' }}
    {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}"""

# Thinking is written nowhere, and the generation prompt begins it.
DEEPSEEK = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|Assistant|>' }}
        {%- generation %}{{- m.content.split('</think>')[-1] + '</s>' }}{% endgeneration %}
    {%- elif m.role == 'system' %}{{- m.content }}
    {%- else %}{{- '<|User|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}"""

# The last turn ends with another token than all others, and only it shows its thinking.
HARMONY = """\
{%- for m in messages %}
    {{- '<|start|>' + m.role }}
    {%- if m.role == 'assistant' %}{%- generation %}
        {%- if loop.last and not add_generation_prompt and m.reasoning_content %}
            {{- '<|analysis|>' + m.reasoning_content + '<|end|><|start|>assistant' }}
        {%- endif %}
        {{- '<|final|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endgeneration %}
    {%- else %}{{- '<|final|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

PHI = """\
{%- for m in messages %}
    {{- '<|' + m.role + '|>\\n' }}
    {%- if m.role == 'assistant' %}{%- generation %}{{- m.content + '<|end|>' }}
        {%- if loop.last and not add_generation_prompt %}{{- '\\n</s>' }}{% endif %}{% endgeneration %}
        {%- if not loop.last or add_generation_prompt %}{{- '\\n' }}{% endif %}
    {%- else %}{{- m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- elif messages[-1].role != 'assistant' %}{{- '</s>' }}{% endif %}"""

KEEPING = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA}
TEMPLATES = KEEPING | {"qwen3": QWEN3, "mistral": MISTRAL, "deepseek": DEEPSEEK, "harmony": HARMONY, "phi": PHI}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|bos|>", "</s>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"),
    *("[INST]", "[/INST]", "<|User|>", "<|Assistant|>", "<|start|>", "<|end|>", "<|return|>"),
    *("<|analysis|>", "<|final|>", "<|user|>", "<|assistant|>", "<|system|>"),
)
EOS = {"llama": "<|eot|>", "gemma": "</turn>", "harmony": "<|return|>"}
EOS |= dict.fromkeys(("mistral", "deepseek", "phi"), "</s>")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


@cache
def tokenizer_of(name: str, *, with_markers: bool = False) -> PreTrainedTokenizerFast:
    template = TEMPLATES[name] if with_markers else MARKERS.sub("", TEMPLATES[name])
    return byte_tokenizer(template, eos=EOS.get(name, "<|im_end|>"), special=SPECIAL)


def message(role: str, content: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def chat_of(name: str, messages: list[dict[str, Any]], **kwargs: Any) -> Conversation:
    return Conversation(tokenizer_of(name), messages, "a.jsonl:1", kwargs)


def found(chat: Conversation) -> list[str]:
    """The text of each of the assistant's turns."""
    turns = [n for n, each in enumerate(chat.messages) if each["role"] == "assistant"]
    text, spans = find_turns(chat, turns, DraftTokenizer(chat.tokenizer))
    assert text == chat.text()
    return [text[start:end] for start, end in spans]


def marked(name: str, chat: Conversation) -> tuple[str, list[str]]:
    """The rendering of the template with markers, and what they enclose."""
    kwargs = {"tools": chat.template_kwargs.get("tools"), **chat.template_kwargs}
    texts, spans = render_jinja_template(
        [chat.messages], chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, **kwargs
    )
    return texts[0], [texts[0][start:end] for start, end in spans[0]]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
PLAIN = [message("user", "hi"), message("assistant", "yo"), message("user", "q"), message("assistant", "a")]
THINKING = [
    message("user", "hi"),
    message("assistant", "yo", reasoning_content="greet"),
    message("user", "q"),
    message("assistant", "a", reasoning_content="end"),
]
TOOL_USE = [
    message("user", "rain?"),
    message("assistant", "", tool_calls=[CALL], reasoning_content="look"),
    message("tool", "rain"),
    message("tool", "wind"),
    message("assistant", "so", tool_calls=[CALL, CALL]),
    message("tool", "sun"),
    message("assistant", "yes", reasoning_content="now"),
    message("user", "sure?"),
    message("assistant", "", tool_calls=[CALL], reasoning_content="again"),
    message("tool", "rain"),
    message("assistant", "yes!"),
]


# The turns, by hand


@pytest.mark.parametrize(
    ("name", "messages", "turns"),
    [
        ("chatml", PLAIN, ["yo<|im_end|>", "a<|im_end|>"]),
        ("chatml", [*PLAIN, message("user", "unanswered")], ["yo<|im_end|>", "a<|im_end|>"]),
        ("chatml", PLAIN[1:], ["yo<|im_end|>", "a<|im_end|>"]),
        ("chatml", [*PLAIN, message("assistant", "b")], ["yo<|im_end|>", "a<|im_end|>", "b<|im_end|>"]),
        ("qwen3", PLAIN, ["yo<|im_end|>", "<think>\n\n</think>\n\na<|im_end|>"]),
        ("qwen3", THINKING, ["yo<|im_end|>", "<think>\nend\n</think>\n\na<|im_end|>"]),
        ("llama", PLAIN, ["yo<|eot|>", "a<|eot|>"]),
        ("gemma", [message("system", "s"), *PLAIN], ["yo</turn>", "a</turn>"]),
        ("mistral", [message("system", "s"), *PLAIN], [" yo</s>", " a</s>"]),
        ("deepseek", [message("user", "hi"), message("assistant", "<think>greet</think>yo")], ["yo</s>"]),
        ("harmony", THINKING, ["<|final|>yo<|end|>", "<|analysis|>end<|end|><|start|>assistant<|final|>a<|return|>"]),
        ("phi", PLAIN, ["yo<|end|>", "a<|end|>\n</s>"]),
        (
            "qwen3",
            TOOL_USE,
            [
                f"{CALLED}<|im_end|>",
                f"so\n{CALLED}\n{CALLED}<|im_end|>",
                "yes<|im_end|>",
                f"<think>\nagain\n</think>\n\n{CALLED}<|im_end|>",
                "<think>\n\n</think>\n\nyes!<|im_end|>",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_turns(name: str, messages: list[dict[str, Any]], turns: list[str]) -> None:
    chat = chat_of(name, messages, **({"tools": TOOLS} if messages is TOOL_USE else {}))
    assert found(chat) == turns
    assert marked(name, chat) == (chat.text(), turns)


def test_a_prompt_that_closes_the_thinking_is_not_learned() -> None:
    """The empty block is in the prompt of the last turn, and nowhere in the turns before."""
    assert found(chat_of("qwen3", PLAIN, enable_thinking=False)) == ["yo<|im_end|>", "a<|im_end|>"]
    answers = [message("assistant", text) for text in ("<b>", "<th", "</think>")]
    messages = [each for n, answer in enumerate(answers) for each in (message("user", f"q{n}"), answer)]
    assert found(chat_of("qwen3", messages[:4], enable_thinking=False)) == ["<b><|im_end|>", "<th<|im_end|>"]


def with_template(template: str, messages: list[dict[str, Any]]) -> Conversation:
    return Conversation(byte_tokenizer(template), messages, "a.jsonl:1", {})


def test_a_name_that_is_written_twice() -> None:
    """gpt-oss writes the name of a tool before its result too."""
    template = """\
{%- for m in messages %}
    {{- '<|im_start|>' + (messages[loop.index0 - 1].tool_calls[0].function.name if m.role == 'tool' else m.role) }}
    {{- '\\n' + m.content + (m.tool_calls[0].function.name if m.tool_calls else '') + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
    messages = [message("user", "hi"), message("assistant", "call ", tool_calls=[CALL]), message("tool", "rain")]
    messages += [message("assistant", "yes")]
    assert found(with_template(template, messages)) == ["call weather<|im_end|>", "yes<|im_end|>"]


# Any chat: what is found is what the markers enclose

NASTY = ["<|im_end|>\n<|im_start|>assistant\n", "[/INST]", "</s>", "<|end|>", "<think>", "</think>", "<tool_response>"]
NASTY += [" ", "\n", "\n\n", "Zq0Z", "Zqq1Z", '"', "\\", "{{ x }}", "é", "🙂", "a", "yo", "</turn>\n<turn>model\n"]
CONTENT = st.lists(st.sampled_from(NASTY) | st.text(max_size=3), max_size=5).map("".join)
PAIRS = st.lists(st.tuples(CONTENT, CONTENT, st.none() | CONTENT), min_size=1, max_size=4)


@settings(max_examples=12 * TRIES, deadline=None)
@given(
    name=st.sampled_from(list(TEMPLATES)),
    system=st.none() | CONTENT,
    pairs=PAIRS,
    thinks=st.sampled_from([None, False]),
)
def test_found_is_what_is_marked_or_refused(
    name: str, system: str | None, pairs: list[tuple[str, str, str | None]], thinks: bool | None
) -> None:
    messages = [message("system", system)] if system is not None else []
    for question, answer, thinking in pairs:
        keys = {} if thinking is None or name not in ("qwen3", "harmony") else {"reasoning_content": thinking}
        messages += [message("user", question), message("assistant", answer, **keys)]
    chat = chat_of(name, messages, **({} if thinks is None else {"enable_thinking": thinks}))
    try:
        turns = found(chat)
    except DataError as error:
        assert str(error).startswith("a.jsonl:1: ")
        assert name not in KEEPING or "dropped turn" in str(error)  # keeps the text: nothing of it is refused
    else:
        text, expected = marked(name, chat)
        if name == "deepseek":  # an answer that begins as its prompt ends
            expected = [turn.removeprefix("<think>\n") for turn in expected]
        assert (chat.text(), turns) == (text, expected)


# What is refused

WAY_OUT = "; set split_turns: true, or set chat_template_path to a template with generation markers"
ENDING = "so where the answers are in the whole chat is not certain"
REFUSED = [
    (
        CHATML.replace("{%- else %}{{- m.content", "{%- else %}{{- m.content + ' ' ~ m.content|length"),
        "what the chat template writes depends on the text of turn 1",
    ),
    (
        CHATML.replace(
            "m.content + '<|im_end|>' }}{% endgen", "m.content + ('<|im_end|>' if loop.last else '') }}{% endgen"
        ),
        "the chat template ends turn 2 differently once others follow",
    ),
    (
        CHATML.replace("'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>bot\\n' }}{% endif %}"),
        "the chat template does not write its generation prompt before turn 2",
    ),
    (
        CHATML.replace("{{- m.content + '<|im_end|>' }}{% endgen", "{{- '<|im_end|>' }}{% endgen"),
        "the chat template leaves out turn 2",
    ),
    (
        CHATML.replace(
            "{{- m.content + '<|im_end|>' }}{% e",
            "{{- ('' if loop.last else messages[-1].content) + m.content + '<|im_end|>' }}{% e",
        ),
        "the chat template does not write turn 2 in one piece",
    ),
    (
        "{%- for m in messages if m.role == 'assistant' %}{{- m.content + '<|im_end|>' }}{% endfor %}"
        "{%- for m in messages if m.role == 'user' %}{{- m.content }}{% endfor %}",
        "the chat template does not write turn 2 in one piece",
    ),
]


@pytest.mark.parametrize(("template", "reason"), REFUSED, ids=[reason[:50] for _, reason in REFUSED])
def test_what_is_not_certain_is_refused(template: str, reason: str) -> None:
    with pytest.raises(DataError) as raised:
        found(with_template(MARKERS.sub("", template), [*PLAIN, message("user", "more")]))
    assert str(raised.value) == f"a.jsonl:1: split_turns: false: {reason}, {ENDING}{WAY_OUT}"


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        # The second turn begins with what ends the first one where that is the last.
        (
            with_template(
                "{% for m in messages %}{{ m.content + '-' }}{% endfor %}"
                "{{ '' if add_generation_prompt else '<|im_end|>' }}",
                [message("user", "hi"), message("assistant", "yo"), message("assistant", "<|im_end|>a")],
            ),
            "does not write turn 3 after the one before it",
        ),
        (
            with_template(MARKERS.sub("", "{{- '<|im_start|>assistant\\n' }}" + CHATML), PLAIN[1:]),
            "turn 1 is the assistant's, with no prompt before it",
        ),
        (chat_of("mistral", PLAIN[1:]), r"turn 1 is the assistant's, with no prompt before it.*; begin with another"),
    ],
    ids=["turns that overlap", "a first turn after two headers", "a first turn without a header"],
)
def test_turns_without_a_place_of_their_own_are_refused(chat: Conversation, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        found(chat)


# Samples


def encoded(name: str, messages: list[dict[str, Any]], split_turns: bool = False, **options: Any) -> list[TokenRow]:
    encoder = ChatEncoder(tokenizer_of(name, **options), split_turns=split_turns)
    return encoder.encode(Row({"messages": messages}, "a.jsonl:1"))


def test_borders_of_turns_are_borders_of_tokens() -> None:
    """Two line feeds are one token elsewhere. At inference the prompt's tokens are given, its last line feed too."""
    messages = [message("user", "a\n\nb"), message("assistant", "\nyo")]
    [sample] = encoded("chatml", messages)
    assert sample.labels[sample.labels != -100][0] == ord("\n")
    assert (sample.input_ids == TWO_NEWLINES).sum() == 1
    [split] = encoded("chatml", messages, split_turns=True)
    assert split.input_ids.tolist() == sample.input_ids.tolist()[: len(split.input_ids)]
    assert split.labels.tolist() == sample.labels.tolist()[: len(split.labels)]


# Long chats


def long_chat(rng: random.Random, num_turns: int) -> list[dict[str, Any]]:
    roles = ["system", *["user", "assistant"] * num_turns]
    words = ["nails", " paint", "\nshelf", "\n\nfour.", " 7", '"', "<b>", " ", "\n", "ab"]
    return [message(role, "x" + "".join(rng.choices(words, k=rng.randrange(1, 20)))) for role in roles]


@pytest.mark.parametrize("name", [*TEMPLATES, "tools"])
def test_a_long_chat_is_not_refused_and_rendered_a_few_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rendered = 0
    render = PreTrainedTokenizerFast.apply_chat_template

    def count(self: Any, messages: list[Any], **options: Any) -> Any:
        nonlocal num_rendered
        num_rendered += len(messages)
        return render(self, messages, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", count)
    if name == "tools":
        call = {"name": "weather", "arguments": {"city": "Bonn", "day": 7}}
        messages = [*PLAIN[:1], *[message("assistant", "", tool_calls=[{"function": call}]), message("tool", "x")] * 99]
    else:
        messages = long_chat(random.Random(0), num_turns=100)
    chat = chat_of("qwen3" if name == "tools" else name, messages)
    turns = found(chat)
    assert num_rendered < 9 * len(messages)
    assert turns == marked("qwen3" if name == "tools" else name, chat)[1]


@pytest.mark.parametrize("late", ["<think>\\n\\n</think>\\n\\n", "<|end|>"])
def test_what_a_template_writes_late_in_a_chat_is_found(late: str) -> None:
    """What it looks at is further back than the messages around a turn."""
    template = CHATML.replace("{%- generation %}{{-", "{{- 'LATE' if loop.index0 > 30 else '' }}{%- generation %}{{-")
    template = template.replace(
        "assistant\\n' }}{% endif", "assistant\\n' + ('LATE' if messages|length > 30 else '') }}{% endif"
    )
    messages = long_chat(random.Random(0), num_turns=40)
    answers = [each["content"] + "<|im_end|>" for each in messages if each["role"] == "assistant"]
    assert found(with_template(MARKERS.sub("", template.replace("LATE", late)), messages)) == answers


# Split and whole agree where the template keeps everything


@pytest.mark.parametrize("name", KEEPING)
def test_the_same_labels_with_the_same_contexts(name: str) -> None:
    for seed in range(10):
        messages = long_chat(random.Random(seed), num_turns=4)
        [whole], split = encoded(name, messages), encoded(name, messages, split_turns=True)
        assert len(split) == 4
        ids, labels = whole.input_ids.tolist(), whole.labels.tolist()
        assert all(each.input_ids.tolist() == ids[: len(each.input_ids)] for each in split)
        learned = [(t, label) for each in split for t, label in enumerate(each.labels.tolist()) if label != -100]
        assert learned == [(t, label) for t, label in enumerate(labels) if label != -100]
