"""Planted causes are found, with their rows and what each fix saves by itself; data without one has none."""

import json
import random
import uuid
from collections.abc import Callable

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.token_row import TokenRow
from radixtrain.explain.breaks import find_breaks
from radixtrain.tree.plan import build_prefix_plan
from tests.support import cases, tries

VOCABULARY = """
shop order parcel refund card price note letter street bridge garden window kettle ticket train river paper pencil
bottle basket answer question customer agent rule list short clear polite careful always never before after between
until because although write read send check keep give take open close large small green quiet early late
"""
WORDS = VOCABULARY.split()
CALENDAR = "January February March April May June July August September October November December"
PEOPLE = "Maria Ben Chloe Dmitri Esther Farid Greta Hugo Ines Jonas Karim Lena Mateo Nadia Omar Petra Rosa Tara"
ROWS, BATCH_SIZE = 120, 32

Conversations = list[list[TokenRow]]
Build = Callable[..., Conversations]
Make = Callable[[random.Random, int], tuple[str, ...]]  # a row's system prompt, and what it is once causes are fixed


def sentence(rng: random.Random, words: int = 12) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + "."


def paragraph(seed: int, sentences: int = 20) -> str:
    rng = random.Random(seed)
    return "\n".join(sentence(rng, rng.randint(8, 16)) for _ in range(sentences))


POLICY = paragraph(0)
EXAMPLES = [f"Problem: {paragraph(seed, 2)}\nSolution: {paragraph(seed + 50, 2)}" for seed in range(100, 120)]
TOOLS = [
    json.dumps({"type": "function", "function": {"name": f"tool_{name}", "description": paragraph(seed, 1)}})
    for seed, name in enumerate(("send", "refund", "open", "list"), start=200)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    texts = [POLICY, *EXAMPLES, *TOOLS, CALENDAR, PEOPLE, "Today is the Session Number You talk to Customer"]
    return tiny.train_tokenizer(texts, 1000)


@pytest.fixture(scope="module")
def chats(tokenizer: PreTrainedTokenizerBase) -> Build:
    """`chats(system prompts)`: a conversation for each, with a question of its own and one or more answers."""

    def build(systems: list[str], turns: int = 1) -> Conversations:
        rng = random.Random(5)
        return [conversation(f"train.jsonl:{n}", system, rng, turns) for n, system in enumerate(systems, start=1)]

    def conversation(where: str, system: str, rng: random.Random, turns: int) -> list[TokenRow]:
        messages, samples = [{"role": "system", "content": system}], []
        for _ in range(turns):
            messages.append({"role": "user", "content": sentence(rng)})
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            messages.append({"role": "assistant", "content": sentence(rng, 4)})
            prompt_ids = tokenizer(prompt)["input_ids"]
            ids = np.array(prompt_ids + tokenizer(messages[-1]["content"])["input_ids"], dtype=np.int64)
            samples.append(TokenRow(ids, np.where(np.arange(len(ids)) < len(prompt_ids), -100, ids), where))
        return samples

    return build


def num_unique(conversations: Conversations) -> int:
    """Of steps of the order in which `find_breaks` draws."""
    order = np.random.default_rng(0).permutation(len(conversations)).tolist()
    total = 0
    for start in range(0, len(order), BATCH_SIZE):
        rows = [sample.input_ids for index in order[start : start + BATCH_SIZE] for sample in conversations[index]]
        total += build_prefix_plan(np.concatenate(rows), np.cumsum([0, *map(len, rows)])).num_unique_tokens
    return total


def dates(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(CALENDAR.split())} {rng.randint(2019, 2026)}"


def uuids(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128)))


def planted(make: Make) -> list[list[str]]:
    """The system prompts with the causes, and as they would be once they are fixed."""
    rng = random.Random(3)
    return [list(prompts) for prompts in zip(*(make(rng, row) for row in range(ROWS)), strict=True)]


def moved(before: str, draw: Callable[[random.Random], str], after: str) -> Make:
    """A value between two texts, and at their end."""
    return lambda rng, row: (
        f"{before} {(value := draw(rng))}{after}",
        f"{before}{after}\n{value}",
    )


def in_order(items: list[str], join: str, after: str, count: int) -> Make:
    return lambda rng, row: (
        f"Read this.\n\n{join.join(rng.sample(items, count))}{after}",
        f"Read this.\n\n{join.join(items[:count])}{after}",
    )


def every(step: int, now: str, fixed: str) -> Make:
    """In one row of so many."""
    return lambda rng, row: (fixed if row % step else now, fixed)


def date_in_one_of_five(rng: random.Random, row: int) -> tuple[str, str]:
    prompt, date = paragraph(20 + row % 5), dates(rng)
    return f"{prompt[:200]}\nToday is {date}.\n{prompt}", f"{prompt[:200]}\nToday is\n{prompt}\n{date}."


def date_before_one_of_ten_questions(rng: random.Random, row: int) -> tuple[str, str]:
    date, question = dates(rng), sentence(random.Random(row % 10), 30)
    return f"Today is {date}.\n{POLICY}\n{question}", f"Today is.\n{POLICY}\n{date}\n{question}"


def persona(rng: random.Random, row: int) -> tuple[str, str]:
    """One of three."""
    who = paragraph(70 + row % 3, 2)
    return f"{who}\n{POLICY}", f"{POLICY}\n{who}"


SECOND = paragraph(1)
STRAY = POLICY.replace("shop", "house", 1).replace("card", "paper card", 1)
CAUSES: dict[str, tuple[str, Make, int]] = {
    "a date": ("a date or time", moved("Today is", dates, f".\n{POLICY}"), ROWS),
    "a date in each of several prompts": ("a date or time", date_in_one_of_five, ROWS),
    "a date before questions that recur": ("a date or time", date_before_one_of_ten_questions, ROWS),
    "a date and an id side by side": (
        "a date or time and a UUID",
        moved("Date:", lambda rng: f"{dates(rng)}\nSession: {uuids(rng)}", f"\n{POLICY}"),
        ROWS,
    ),
    "a date in a tenth of the rows": (
        "a date or time",
        lambda rng, row: (f"Today is {dates(rng)}.\n{POLICY}" if row % 10 == 0 else POLICY, POLICY),
        ROWS // 10,
    ),
    "a UUID": ("a UUID", moved("Session", uuids, f"\n{POLICY}"), ROWS),
    "a question before the rules": ("a text of the row's own", moved("Read:", sentence, f"\n{POLICY}"), ROWS),
    "personas": ("several prompts", persona, ROWS),
    "tools, a line each": ("the order of the tools", in_order(TOOLS, "\n", f"\n{POLICY}", 4), ROWS),
    "two tools": ("the order of the tools", in_order(TOOLS[:2], "\n", f"\n{POLICY}", 2), 51),
    "example order": ("the order of the examples", in_order(EXAMPLES[:4], "\n\n", "", 4), ROWS),
    "example choice": ("the choice of the examples", in_order(EXAMPLES, "\n\n", "", 4), ROWS),
    "line ends": ("white space", every(4, POLICY.replace("\n", "\r\n"), POLICY), ROWS // 4),
    "a word twice": (
        "another version of the template",
        every(12, f"{POLICY} clearly clearly {SECOND}", f"{POLICY} clearly {SECOND}"),
        ROWS // 12,
    ),
    "a stray version": ("another version of the template", every(12, f"Be quick.\n{STRAY}", POLICY), ROWS // 12),
}


@pytest.mark.parametrize(
    "planting",
    cases(CAUSES, ["a date before questions that recur", "personas", "tools, a line each", "example choice"]),
)
def test_a_planted_cause(planting: str, chats: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    cause, make, num_rows = CAUSES[planting]
    now, fixed = map(chats, planted(make))
    (found,) = find_breaks(now, tokenizer, BATCH_SIZE)
    assert (found.cause, found.num_sequences) == (cause, num_rows)
    assert found.tokens_saved == found.tokens_with_others
    assert found.tokens_saved == pytest.approx(num_unique(now) - num_unique(fixed), rel=0.07)
    assert found.advice.endswith(".")
    texts = {sample.where: tokenizer.decode(sample.input_ids) for (sample,) in now}
    for example in found.examples if cause != "white space" else ():
        assert f"{example.before}{example.value}{example.after}" in texts[example.where]


def test_two_causes_far_apart(chats: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    """What each saves by itself, and once the other is fixed."""

    def make(rng: random.Random, row: int) -> tuple[str, ...]:
        id_, date, (head, tail) = uuids(rng), dates(rng), (POLICY[:400], POLICY[400:])
        return (
            f"Session {id_}\n{head}\nToday is {date}\n{tail}",
            f"Session\n{head}\nToday is {date}\n{tail}\n{id_}",
            f"Session {id_}\n{head}\nToday is\n{tail}\n{date}",
            f"Session\n{head}\nToday is\n{tail}\n{id_} {date}",
        )

    now, without_id, without_date, without = (num_unique(chats(systems)) for systems in planted(make))
    first, last = find_breaks(chats(planted(make)[0]), tokenizer, BATCH_SIZE)
    assert (first.cause, last.cause) == ("a UUID", "a date or time")
    found = first.tokens_saved, first.tokens_with_others, last.tokens_with_others
    assert found == pytest.approx((now - without_id, without_date - without, without_id - without), rel=0.1)
    assert last.tokens_saved == pytest.approx(now - without_date, abs=ROWS)


def test_an_example_says_where_and_what(chats: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    now, _ = planted(moved("Today is", lambda rng: f"2026-{rng.randint(10, 12)}-{rng.randint(10, 28)}", f".\n{POLICY}"))
    (found,) = find_breaks(chats(now), tokenizer, BATCH_SIZE)
    assert len(found.examples) == 3
    for example in found.examples:
        system = now[int(example.where.removeprefix("train.jsonl:")) - 1]
        assert system.startswith(f"Today is {example.value}.\n") and example.before.endswith("system\nToday is ")
        assert example.after.startswith(f".\n{POLICY[:20]}")
    (found,) = find_breaks(chats(planted(CAUSES["line ends"][1])[0]), tokenizer, BATCH_SIZE)
    assert found.examples[0].value == "␍↵"


@given(mixtures=st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=2, max_size=12))
@settings(max_examples=tries(100, 2000), deadline=None)
def test_any_mixture_of_paragraphs_is_read_to_its_end(
    mixtures: list[list[int]], chats: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = [paragraph(60, 3), paragraph(61, 3), "a b", f"{sentence(random.Random(0))}\n\n"]
    now = chats(["".join(texts[text] for text in mixture) for mixture in mixtures])
    for found in find_breaks(now, tokenizer, 4):
        assert 0 < found.num_sequences <= len(now)
        assert 0 < max(found.tokens_saved, found.tokens_with_others) < num_unique(now)


@pytest.mark.parametrize(("times", "turns"), [(20, 1), (1, 3)])
def test_what_is_drawn_is_scaled_to_the_samples_of_an_epoch(
    times: int, turns: int, chats: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    """2,000 of 2,400 conversations are drawn, or all with several turns each."""
    now, fixed = (times * chats(systems, turns) for systems in planted(CAUSES["a UUID"][1]))
    (found,) = find_breaks(now, tokenizer, BATCH_SIZE)
    assert found.num_sequences == times * turns * ROWS
    assert found.tokens_saved == pytest.approx(num_unique(now) - num_unique(fixed), rel=0.07)


CLEAN: dict[str, Callable[[random.Random, int], str]] = {
    "one prompt": lambda rng, row: POLICY,
    "many prompts": lambda rng, row: paragraph(row % 30),
    "prompts that begin alike": lambda rng, row: f"{POLICY[:400]}\n{paragraph(40 + row % 12)}",
    "fixed sets of examples": lambda rng, row: "\n\n".join(
        ["Read this.", *EXAMPLES[3 * (row % 6) : 3 * (row % 6) + 3]]
    ),
    "short prompts with a name": lambda rng, row: f"You talk to {rng.choice(PEOPLE.split())}. Be polite.",
    "a row's own text after the prompt": lambda rng, row: f"{POLICY}\n{sentence(rng, 60)}",
}


@pytest.mark.parametrize("turns", cases([1, 3], [1]))
@pytest.mark.parametrize("name", CLEAN)
def test_clean_data_has_none(name: str, turns: int, chats: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(4)
    assert find_breaks(chats([CLEAN[name](rng, row) for row in range(ROWS)], turns), tokenizer, BATCH_SIZE) == ()


def test_samples_without_a_prompt_have_none(chats: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = chats([POLICY])[0]
    for conversations in ([], [[], [sample], []], [[TokenRow(sample.input_ids, sample.input_ids, "a:1")]] * 3):
        assert find_breaks(conversations, tokenizer) == ()
