"""One chat and its template: what is rendered, and what the template may not do. Rows of chats: `test_chat.py`."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixtrain.data.rendering.conversation import Conversation
from radixtrain.errors import DataError, UserError

TEMPLATE = """\
{%- for m in messages %}
    {{- '[' + m.role[0] + ']' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content + '[/]' }}{% endgeneration %}
    {%- else %}{{- m.content + '[/]' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[a]' + prefill|default('') }}{% endif %}"""

WITHOUT_MARKERS = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "q"}]


def conversation(template: str | None = TEMPLATE, messages: Any = MESSAGES, **kwargs: Any) -> Conversation:
    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken("[/]")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[/]", chat_template=template)
    return Conversation(tokenizer, messages, "a.jsonl:1", kwargs)


def test_what_is_rendered() -> None:
    chat = conversation()
    assert chat.assistant_turns() == [1]
    assert chat.text() == "[u]hi[/][a]yo[/][u]q[/]"
    assert chat.prompt() == "[u]hi[/][a]yo[/][u]q[/][a]"
    assert chat.prompt_and_target(1, 2) == ("[u]hi[/][a]", "yo[/]")
    assert chat.prompt_and_target(1, 3) == ("[u]hi[/][a]", "yo[/][u]q[/]")
    assert chat.prompt_and_target(2, 3) == ("[u]hi[/][a]yo[/]", "[u]q[/]")
    assert chat.render(MESSAGES[1:2], add_generation_prompt=True) == "[a]yo[/][a]"


def test_variables_of_the_template() -> None:
    assert conversation(prefill="so").prompt().endswith("[a]so")


def test_markers() -> None:
    assert conversation().has_markers and not conversation(WITHOUT_MARKERS).has_markers
    ids, mask = conversation().tokens_and_mask()
    assert len(ids) == len(mask) and sum(mask) == 3
    assert [n for n, marked in enumerate(mask) if marked] == [9, 10, 11]  # y, o and the end after [u]hi[/][a]


@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        (None, {}, "the tokenizer has no chat template; set chat_template_path to a template, or use rows with "),
        (TEMPLATE, {"tokenize": True}, "a.jsonl:1: chat_template_kwargs: tokenize cannot be set; expected variables"),
        (
            TEMPLATE.replace("m.content + '[/]'", "'[/]'"),
            {},
            "a.jsonl:1: the chat template dropped turn 1 (role 'user')",
        ),
        ("{{ messages[0].content + 1 }}", {}, "a.jsonl:1: the chat template failed: TypeError: "),
        ("{% if %}", {}, "the chat template is not valid at its line 1: "),
    ],
)
def test_what_a_template_may_not_do(template: str | None, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        conversation(template, **kwargs).text()
    assert str(raised.value).startswith(message)


def test_a_prompt_has_to_begin_its_answer() -> None:
    with pytest.raises(DataError, match=r"renders the prompt of turn 2 differently .*\('yo\[/\]' and 'so'\)"):
        conversation(prefill="so").prompt_and_target(1, 2)
    with pytest.raises(DataError, match="turn 1 is the assistant's, with no prompt before it"):
        conversation(messages=MESSAGES[1:]).prompt_and_target(0, 1)


def test_markers_have_to_mark() -> None:
    template = TEMPLATE.replace("m.role == 'assistant'", "m.role == 'model'")
    with pytest.raises(DataError, match="generation markers mark no token; set split_turns: true"):
        conversation(template).tokens_and_mask()
