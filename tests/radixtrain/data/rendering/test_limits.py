"""Chat templates that never end or fill the memory: each is stopped, by name, before it has taken either."""

import multiprocessing
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import FULL
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from radixtrain.data.rendering import limits
from radixtrain.data.rendering.conversation import Conversation
from radixtrain.data.rendering.limited import limit
from radixtrain.data.rendering.template import template_variables
from radixtrain.errors import DataError, UserError

pytestmark = FULL
MESSAGES = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
MEGABYTES = 1 << 10  # of ru_maxrss, which is in KiB
LONG = "{% set ns = namespace(s='abcdefgh') %}{% for i in range(14) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
AGAIN = "{% set ns = namespace(x='" + "a" * 100 + "') %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}END"
ENDLESS = {
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(99) %}x{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops without a pass": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "a loop that calls itself": "{% for x in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 40 }}{% endfor %}",
    "a filter of filters": "{% for a in range(9999) %}{{ range(9999)|map('string')|list|length }}{% endfor %}",
}
LARGE = {
    "a sum": AGAIN.replace("STEP", "ns.x + ns.x").replace("END", "{{ ns.x|length }}"),
    "a sum of many": AGAIN.replace("STEP", "ns.x + ns.x + ns.x + ns.x + ns.x + ns.x"),
    "a concatenation": AGAIN.replace("STEP", "ns.x ~ ns.x"),
    "a list": AGAIN.replace("STEP", "[ns.x] + [ns.x]").replace("= [ns.x] + [ns.x]", "= [ns.x, ns.x]"),
    "sums of lists": AGAIN.replace("'" + "a" * 100 + "'", "[1]").replace("STEP", "ns.x + ns.x"),
    "a mapping": AGAIN.replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    "dict()": AGAIN.replace("STEP", "dict(a=ns.x, b=ns.x)"),
    "a tuple": AGAIN.replace("STEP", "(ns.x, ns.x)"),
    "a batch": AGAIN.replace("STEP", "[ns.x]|batch(2, ns.x)|list"),
    "a slice": AGAIN.replace("STEP", "[ns.x]|slice(2, ns.x)|list"),
    "a default": AGAIN.replace("STEP", "[1, 2]|map(attribute='no', default=ns.x)|list"),
    "a namespace": AGAIN.replace("STEP", "namespace(a=ns.x, b=ns.x)").replace("END", "{{ ns.x }}"),
    "JSON of JSON": AGAIN.replace("a" * 100, '"\\\\').replace("STEP", "ns.x|tojson"),
    "text of a list": AGAIN.replace("a" * 100, '"\\\\').replace("STEP", "[ns.x, ns.x]|string"),
    "a block": AGAIN.replace("{% set ns.x = STEP %}", "{% set ns.x %}{{ ns.x }}{{ ns.x + ns.x }}{% endset %}"),
    "a macro": "{% macro f(x) %}{{ x ~ x }}{% endmacro %}" + AGAIN.replace("STEP", "f(ns.x)"),
    "a method": AGAIN.replace("STEP", "ns.x.replace('a', ns.x)"),
    "a filter": AGAIN.replace("STEP", "ns.x|replace('a', ns.x)"),
    "join": AGAIN.replace("STEP", "ns.x.join(['', '', ''])"),
    "join as a filter": AGAIN.replace("STEP", "['', '', '']|join(ns.x)"),
    "join of an iterator": LONG + "{{ range(9999)|map('replace', '', ns.s)|join|length }}",
    "what is written": LONG + "{% for a in range(99999) %}{{ ns.s }}{% endfor %}",
    "text of the template": "{% for a in range(9999) %}{% for b in range(99) %}"
    + "x" * 9999
    + "{% endfor %}{% endfor %}",
    "times": "{{ 'a' * 10000000000 }}",
    "times a list": LONG + "{{ ([ns.s] * 99999)|string|length }}",
    "a power": "{{ 10 ** 9999999999 }}",
    "squares": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "%": "{{ '%9999999999d' % 1 }}",
    "% of many": LONG + "{{ ('%s' * 9999) % ([ns.s] * 9999) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "a width": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "format as a filter": "{{ '%9999999999d'|format(1) }}",
    "format of many": LONG + "{{ ('{0}' * 9999).format(ns.s)|length }}",
    "center": "{{ 'a'.center(9999999999) }}",
    "center as a filter": "{{ 'a'|center(9999999999) }}",
    "tabs": LONG + "{{ ns.s.replace('a', '\\t').expandtabs(99999)|length }}",
    "indent": LONG + "{{ ns.s.replace('a', '\\n')|indent(99999)|length }}",
    "JSON": "{{ messages|tojson(indent=9999999999) }}",
    "translate": LONG + "{{ ns.s.translate({97: ns.s})|length }}",
    "a batch of many": "{{ [1]|batch(9999999999, 0)|list|length }}",
    "a slow filter": LONG + "{% for i in range(4) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|urlize|length }}",
}


@pytest.fixture(scope="module")
def tokenizer(shop: Path) -> Any:
    return AutoTokenizer.from_pretrained(shop / "model")


def rendered(tokenizer: Any, template: str, messages: Any = MESSAGES, **kwargs: Any) -> str:
    tokenizer.chat_template = template
    return Conversation(tokenizer, messages, "a.jsonl:3", kwargs).render(messages)


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends(name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STEPS", 50_000)
    with pytest.raises(
        UserError, match=r"^a\.jsonl:3: the chat template \(.*model\) makes more than 50,000 passes"
    ) as e:
        rendered(tokenizer, ENDLESS[name])
    assert "set chat_template_path to a template that does less" in str(e.value)


@pytest.mark.parametrize("name", LARGE)
def test_what_fills_the_memory(name: str, tokenizer: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"^a\.jsonl:3: the chat template \("):
        rendered(tokenizer, LARGE[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1500 * MEGABYTES


def test_the_limit_of_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"takes more than 0\.2 seconds; "):
        rendered(tokenizer, ENDLESS["loops in loops"])


@pytest.mark.parametrize("start", ["thread", "process"])
def test_elsewhere(start: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, where no signal arrives, and in a process that is forked as those that tokenise are."""
    monkeypatch.setattr(limits, "MAX_STEPS", 50_000)
    context = multiprocessing.get_context("fork")
    said: Any = context.SimpleQueue()

    def work() -> None:
        try:
            rendered(tokenizer, ENDLESS["loops in loops"])
        except UserError as error:
            said.put(str(error))

    worker: Any = threading.Thread(target=work) if start == "thread" else context.Process(target=work)
    worker.start()
    worker.join(60)
    assert "makes more than 50,000 passes" in said.get()


ORDINARY = {
    "sums": "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' ~ loop.index ~ '!' }}{% endfor %}",
    "slices": "{% for m in messages[1:] if m.role != 'user' %}{{ m.content[::-1] }}{% endfor %}",
    "methods": "{{ messages[0].content.replace('l', 'LL').center(20) ~ ', '.join(['a', 'b']) }}"
    "{{ '{:>4}|{}'.format(1, 2) }}",
    "filters": "{{ messages|map(attribute='role')|join(', ') }}{{ messages|tojson(indent=2) }}{{ 'a\nb'|indent(4) }}"
    "{{ [1, 2, 3]|batch(2, 0)|list }}{{ '%s-%d'|format('a', 3) }}{{ [3, 1]|sort|first }}{{ 'a b'|wordcount }}",
    "macros": "{% macro f(m, x=2) %}{{ m.role * x }}{{ caller() if caller }}{% endmacro %}{{ f(messages[0]) }}"
    "{% call f(messages[1], x=1) %}inside{% endcall %}",
    "namespaces": "{% set ns = namespace(n=0, all=[]) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 % 5 %}"
    "{% set ns.all = ns.all + [m] %}{% endfor %}{{ ns.n }}{{ ns.all }}{{ dict(a=ns.n).items()|list }}",
    "blocks": "{% block b scoped %}{% set x %}{{ bos }}{{ messages[0].role }}{% endset %}{{ x|upper }}{% endblock %}",
    "tuples": "{% for k, v in {'a': 1, 'b': messages[0].role}.items() %}{{ k, v }}{% endfor %}{{ (1, 2) }}",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_templates_write_what_they_did(name: str, tokenizer: Any) -> None:
    """The same text as transformers' own. The template with a blank more is one that is not limited."""
    [plain], _ = render_jinja_template([MESSAGES], chat_template=ORDINARY[name] + "{# #}", bos="<s>")
    assert rendered(tokenizer, ORDINARY[name], bos="<s>") == plain


def test_generation_markers(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    ids, mask = Conversation(tokenizer, MESSAGES, "a.jsonl:3", {}).tokens_and_mask()
    assert tokenizer.decode([i for i, marked in zip(ids, mask, strict=True) if marked]) == "Hi."


def test_what_is_written_between_markers_counts(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        LONG + "{% generation %}x{% endgeneration %}{% for a in range(9999) %}{{ ns.s }}{% endfor %}"
    )
    chat = Conversation(tokenizer, MESSAGES, "a.jsonl:3", {})
    with pytest.raises(UserError, match="makes more than 268,435,456 characters of text"):
        chat._apply(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)


def test_other_templates_are_left_alone() -> None:
    """Those of a program that uses radixtrain and renders by itself."""
    limit("{{ 'limited' }}")
    [text], _ = render_jinja_template([MESSAGES], chat_template="{{ lipsum is defined }}")
    assert text == "True"


def test_long_chats_are_rendered(tokenizer: Any) -> None:
    """2000 turns that each look at all the turns before them, and a text of 16 MB."""
    template = (
        "{% for m in messages %}{% for n in messages[:loop.index] %}{% endfor %}{{ m.content + '|' }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "x" * 8000}] * 2000
    assert len(rendered(tokenizer, template, turns)) == 2000 * 8001


def test_a_template_that_is_nested_too_deeply(tokenizer: Any) -> None:
    template = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    with pytest.raises(DataError, match="the chat template failed: RecursionError"):
        rendered(tokenizer, template)
    assert template_variables(SimpleNamespace(chat_template=template)) is None
