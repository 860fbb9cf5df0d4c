"""Compare radixtrain's rendering of chat templates with transformers: token ids and loss masks of 200 generated chats.

    python recipes/templates.py          # writes tests/golden/templates.json and recipes/templates.md

Chats are compared whole and turn by turn. The templates are TRL's, with a small tokenizer, and those of the tokenizers
in runs/real, if there are any. Every part of a chat begins and ends with a unique word, and these words show which
parts a text contains. The page says what is compared.
"""

import hashlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
import transformers
import trl
from transformers import AutoTokenizer

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row
from radixtrain.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "golden" / "templates.json"
PAGE = ROOT / "recipes" / "templates.md"
FOLDER = Path(trl.__file__).parent / "chat_templates"
REAL = ROOT / "runs" / "real"
NUM_CHATS, NUM_FIRST = 200, 10
DAY = datetime(2026, 11, 27)
SAME_IDS, SAME_TEXT, APART = "same ids", "same text, other ids", "same prompt and same answer, apart"
WORST_LAST = (SAME_IDS, SAME_TEXT, APART)
AS_MARKED = "as TRL's"
MARKER = re.compile(r"<[|｜][^<>'\"{}\s]+[|｜]>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|s)>")
WORD = re.compile(r"kw\d+x")
FILLINGS = [
    "",
    "é 漢字 🙂",
    "def f(x):\n    return {'a': x}",
    "  two  blanks ",
    '"quoted" \\n \\',
    "\n\n- a\n- b",
    "1,024.5%",
]
IN_TEXT = ["<|im_end|>", "</think", "[INST]", "<tool_call", "{{ x }}", "<br>"]
Message = dict[str, Any]


class Chats:
    """Rows that differ in everything that agents and people write, by a seed."""

    def __init__(self, seed: int):
        self.random, self.number = random.Random(seed), 0

    def words(self) -> str:
        """A text between two words that occur nowhere else."""
        self.number += 2
        inner = self.random.choice(FILLINGS + ([self.random.choice(IN_TEXT)] if self.random.random() < 0.3 else []))
        return f"kw{self.number}x {inner} kw{self.number + 1}x"

    def row(self) -> dict[str, Any]:
        draw = self.random.random
        system = self.random.choice([None, None, "system", "system", "developer"])
        messages = [{"role": system, "content": self.words()}] if system else []
        has_tools, thinks = draw() < 0.5, draw() < 0.35
        for _ in range(self.random.randint(1, 3)):
            blanks = self.random.choice(["", "", "", " ", "\n"])
            messages.append({"role": "user", "content": f"{self.words()}{blanks}"})
            if has_tools and draw() < 0.7:
                messages += self.calls(self.random.choice([1, 1, 2]), thinks)
            messages.append({"role": "assistant", "content": self.words(), **self.thought(thinks)})
        return {"messages": messages, **({"tools": [tool("find_shelf"), tool("count_all")]} if has_tools else {})}

    def thought(self, thinks: bool) -> Message:
        return {"reasoning_content": self.words()} if thinks and self.random.random() < 0.8 else {}

    def calls(self, number: int, thinks: bool) -> list[Message]:
        names = [self.random.choice(["find_shelf", "count_all"]) for _ in range(number)]
        content = {"content": self.words()} if self.random.random() < 0.3 else {"content": ""}
        calls = [{"type": "function", "function": {"name": name, "arguments": self.arguments()}} for name in names]
        results = [{"role": "tool", "name": name, "content": self.words()} for name in names]
        return [{"role": "assistant", **content, **self.thought(thinks), "tool_calls": calls}, *results]

    def arguments(self) -> Message:
        return {"thing": self.words()} | (
            {"n": self.random.randint(0, 9), "deep": [1.5]} if self.random.random() < 0.4 else {}
        )


def tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {"thing": {"type": "string", "description": "What."}}}
    return {"type": "function", "function": {"name": name, "description": "Finds.", "parameters": parameters}}


def chats(number: int = NUM_CHATS) -> list[dict[str, Any]]:
    made = Chats(seed=0)
    return [made.row() for _ in range(number)]


def templates() -> dict[str, Any]:
    """Name -> a function that makes the tokenizer."""
    stock = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))}
    found: dict[str, Any] = {f"TRL {name}": lambda path=path: stock_tokenizer(path) for name, path in stock.items()}
    folders = [REAL / "smollm2", *sorted((REAL / "tokenizers").glob("*"))] if REAL.exists() else []
    return found | {f"real {each.name}": lambda each=each: real_tokenizer(each) for each in folders}


def real_tokenizer(folder: Path) -> Any:
    """Its own template, or if the folder has none, that of TRL's with its name."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        tokenizer.chat_template = (FOLDER / f"{folder.name.replace('-', '')}.jinja").read_text("utf-8")
    return tokenizer


def stock_tokenizer(path: Path) -> Any:
    """A small tokenizer whose special tokens are those that the template writes."""
    template = path.read_text("utf-8")
    special = sorted({"<|endoftext|>", "<|bos|>", "<|im_end|>", *MARKER.findall(template)})
    tokenizer = tiny.train_tokenizer([*FILLINGS, "find_shelf"], 280 + len(special), special, template)
    tokenizer.eos_token, tokenizer.bos_token = "<|endoftext|>", "<|bos|>"
    return tokenizer


class Reference:
    """A row as transformers renders it; nothing of this is the library's."""

    def __init__(self, tokenizer: Any, row: dict[str, Any]):
        self.tokenizer, self.tools = tokenizer, row.get("tools")
        self.messages = next(filter(self.can_render, forms(row["messages"])), row["messages"])

    def can_render(self, messages: list[Message]) -> bool:
        """Without a word on a developer's turn lost: not every template knows the role."""
        try:
            return {*words_of(messages[0])} <= {*WORD.findall(self.text(messages))}
        except Exception:  # a template is a program and may raise anything
            return False

    def text(self, messages: list[Message], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=False, **options))

    def ids(self, messages: list[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=True, return_dict=True, **options
        )

    def turns(self) -> list[int]:
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def cause(self, whole: bool) -> str:
        """Why the chat cannot be trained, as far as the template's own renderings tell; empty if they do not."""
        try:
            text = self.text(self.messages)
            if any(each["function"]["name"] not in text for each in self.tools or ()):
                return "a tool is left out"
            return self.cause_of_chat(text) if whole else next(filter(None, map(self.cause_of_turn, self.turns())), "")
        except Exception:  # a template is a program and may raise anything
            return "the template fails"

    def cause_of_turn(self, turn: int) -> str:
        before = self.text(self.messages[:turn], add_generation_prompt=True)
        full = self.text(self.messages[: turn + 1])
        if not {*words_of(self.messages[turn])} <= {*WORD.findall(full)}:
            return "words are left out"
        return "" if full.startswith(before) else "the prompt is not how the chat begins"

    def cause_of_chat(self, text: str) -> str:
        places = {found[0]: found.span() for found in WORD.finditer(text)}
        last = len(self.messages) - 1
        speakers = {word: n for n, each in enumerate(self.messages) for word in words_of(each)}
        if not {word for n, each in enumerate(self.messages) for word in words_of(each, n == last)} <= {*places}:
            return "words are left out"
        order = [speakers[word] for word in places]
        if order != sorted(order):
            return "a turn is in pieces"
        for turn in self.turns():
            prompt = self.text(self.messages[:turn], add_generation_prompt=True)
            word = [*WORD.finditer(prompt)][-1]
            if not text.startswith(prompt[word.end() :], places[word[0]][1]):
                return "a turn does not begin with its prompt"
        return ""

    def of_turn(self, turn: int, sample: Any) -> str:
        """How a sample of one turn compares: with the prompt, strictly; and with the chat up to the turn's end."""
        ids, learned = sample.input_ids.tolist(), sample.labels[sample.labels != -100].tolist()
        prompt = self.ids(self.messages[:turn], add_generation_prompt=True)["input_ids"]
        if ids != prompt + learned:
            return "wrong: other prompt"
        answer = self.tokenizer.decode(learned)
        if sorted(WORD.findall(answer)) != sorted(words_of(self.messages[turn])):
            return "wrong: loss on other words"
        rendered = self.ids(self.messages[: turn + 1])["input_ids"]
        if rendered[: len(ids)] == ids and not self.tokenizer.decode(rendered[len(ids) :]).strip():
            return SAME_IDS
        text = self.text(self.messages[: turn + 1])
        if text.rstrip() == self.tokenizer.decode(ids).rstrip():
            return SAME_TEXT
        # gpt-oss: the prompt has a thought that the template drops once the answer is there.
        return APART if text.rstrip().endswith(answer.rstrip()) else "wrong: other text"

    def of_chat(self, sample: Any) -> str:
        """How a sample of a whole chat compares: with the ids and the text, and its loss with the words."""
        ids, is_learned = sample.input_ids.tolist(), sample.labels != -100
        if sample.labels[is_learned].tolist() != sample.input_ids[is_learned].tolist():
            return "wrong: other labels"
        found, last = WORD.findall(self.tokenizer.decode(sample.labels[is_learned])), len(self.messages) - 1
        least = {word for turn in self.turns() for word in words_of(self.messages[turn], turn == last)}
        most = {word for turn in self.turns() for word in words_of(self.messages[turn])}
        if not least <= {*found} <= most:
            return "wrong: loss on other words"
        if ids == self.ids(self.messages)["input_ids"]:
            return SAME_IDS
        return SAME_TEXT if self.tokenizer.decode(ids) == self.text(self.messages) else "wrong: other text"

    def masks(self, sample: Any, marked: str) -> set[str]:
        """How the loss of a whole chat compares with the generation markers of TRL's variant, by character."""
        try:
            theirs = self.ids(self.messages, chat_template=marked, return_assistant_tokens_mask=True)
        except Exception:  # a template is a program and may raise anything
            return {"not compared: the training variant fails"}
        ours = self.by_character(sample.input_ids.tolist(), (sample.labels != -100).tolist())
        others = self.by_character(theirs["input_ids"], map(bool, theirs["assistant_masks"]))
        if ours is None or others is None or ours[0] != others[0]:
            return {"not compared: the training variant writes another text"}
        pairs = [*zip(ours[0], ours[1], others[1], strict=True)]
        runs = [(key, "".join(pair[0] for pair in run)) for key, run in groupby(pairs, key=lambda pair: pair[1:])]
        return {self.difference(text, mine) for (mine, other), text in runs if mine != other} or {AS_MARKED}

    def by_character(self, ids: list[int], mask: Iterable[bool]) -> tuple[str, list[bool]] | None:
        """The text, and whether each character is learned; None where a border is none between characters."""
        runs = [(key, [pair[0] for pair in run]) for key, run in groupby(zip(ids, mask, strict=True), lambda p: p[1])]
        texts = [(key, self.tokenizer.decode(run)) for key, run in runs]
        text = "".join(each for _, each in texts)
        return (text, [key for key, each in texts for _ in each]) if text == self.tokenizer.decode(ids) else None

    def difference(self, text: str, is_ours: bool) -> str:
        """What kind of text only one of both trains."""
        prompts = [self.text(self.messages[:turn], add_generation_prompt=True) for turn in self.turns()]
        if is_ours:
            fulls = [self.text(self.messages[: turn + 1]) for turn in self.turns()]
            answers = [
                full[len(prompt) :] for full, prompt in zip(fulls, prompts, strict=True) if full.startswith(prompt)
            ]
            return (
                "ours trains what the prompt does not hold"
                if any(text in each for each in answers)
                else "ours trains more"
            )
        if not text.strip():
            return "TRL's trains blanks after the end of a turn"
        given = any(text in prompt[[*WORD.finditer(prompt)][-1].end() :] for prompt in prompts)
        return "TRL's trains what the prompt holds" if given else "TRL's trains more"


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The same chat as templates may want it: a developer's turn as the system's, arguments as text."""
    for role in {messages[0]["role"]: 0, messages[0]["role"].replace("developer", "system"): 0}:
        first = [messages[0] | {"role": role}, *messages[1:]]
        yield first
        yield [with_text(message) if "tool_calls" in message else message for message in first]


def with_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    functions = [each | {"arguments": json.dumps(each["arguments"], ensure_ascii=False)} for each in functions]
    return message | {"tool_calls": [{"type": "function", "function": each} for each in functions]}


def words_of(message: Message, thinking: bool = True) -> list[str]:
    """The words of a message in the order in which templates write them."""
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    thought = message.get("reasoning_content", "") if thinking else ""
    return WORD.findall(" ".join([thought, message["content"], *calls]))


def outcome(encoder: ChatEncoder, row: dict[str, Any]) -> tuple[str, list[Any]]:
    """How the row compares, or why it is refused; and its samples."""
    whole = not encoder.split_turns
    reference = Reference(encoder.tokenizer, row)
    try:
        samples = encoder.encode(Row(row, "chats.jsonl:1"))
    except DataError as error:
        reason = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\d+", "_", str(error).partition(": ")[2].partition(";")[0])[:80]
        return f"refused: {reference.cause(whole) or f'none found, {reason}'}", []
    if whole:
        return reference.of_chat(samples[0]), samples
    found = [reference.of_turn(turn, each) for turn, each in zip(reference.turns(), samples, strict=True)]
    return max(found, key=lambda each: (each not in WORST_LAST, each in WORST_LAST and WORST_LAST.index(each))), samples


def measured(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the outcomes of one template, and digests of all ids and masks, of these rows and of the first ones."""
    tokenizer = templates()[name]()
    training = FOLDER / f"{name.partition(' ')[2].replace('-', '')}_training.jinja"
    marked = training.read_text("utf-8") if training.exists() else None
    return {"turns": measured_way(tokenizer, rows, False, None), "whole": measured_way(tokenizer, rows, True, marked)}


def measured_way(tokenizer: Any, rows: list[dict[str, Any]], whole: bool, marked: str | None) -> dict[str, Any]:
    counts, masks, though, digest, first = Counter[str](), Counter[str](), Counter[str](), hashlib.sha256(), ""
    encoder = ChatEncoder(tokenizer, split_turns=not whole, template_date=f"{DAY:%Y-%m-%d}")
    for number, row in enumerate(rows, start=1):
        what, samples = outcome(encoder, row)
        counts[what] += 1
        if marked is not None and samples:
            masks.update(Reference(tokenizer, row).masks(samples[0], marked))
        if samples and (cause := Reference(tokenizer, row).cause(whole)):
            though[cause] += 1
        digest.update(what.partition(":")[0].encode())
        for sample in samples:
            digest.update(sample.input_ids.tobytes() + sample.labels.tobytes())
        first = digest.hexdigest()[:16] if number == NUM_FIRST else first
    found = {"outcomes": dict(sorted(counts.items())), "first": first, "all": digest.hexdigest()[:16]}
    more = {"masks": dict(sorted(masks.items())), "trained though": dict(sorted(though.items()))}
    return found | {name: counted for name, counted in more.items() if counted}


def frozen() -> Any:
    """The day that transformers tells templates."""
    today = mock.Mock(wraps=datetime, now=lambda: DAY)
    return mock.patch("transformers.utils.chat_template_utils.datetime", today)


INTRO = f"""# Chat templates

The table compares the same {NUM_CHATS} generated chats for each template of TRL {trl.__version__} and of five real
tokenizers. `python recipes/templates.py` wrote this page; `tests/recipes/test_templates.py` checks the counts, and
digests of all ids and labels. Each chat counts once for each way.

**Each turn** (`split_turns: true`). *Same ids*: each sample begins with exactly the ids of `apply_chat_template` for
the messages before the turn, with `add_generation_prompt=True`; everything after is trained and contains every word of
the turn; and the sample equals the chat rendered up to this turn, id by id, except for white space at its end.
*Other*: {SAME_TEXT}; or {APART}, since gpt-oss's template drops thinking from the history once the answer follows.

**Whole** (`split_turns: false`). *Same ids*: the ids equal those of `apply_chat_template` for the chat, and the loss
covers all words of the assistant, possibly without the thinking of turns before the last. *Mask* applies if TRL has a
training variant that differs from the template: *same* if both train the same characters; *differs* gives the number of
chats and how they differ, by the letters below; *not compared* if the variant writes a different text.
"""
MASKS = {
    "TRL's trains what the prompt holds": (
        "a",
        "TRL's variant also trains a part of the generation prompt: `<think>\\n` (Nemotron, Qwen3.5, 3.6, 3.8), the "
        "empty block of thinking (Qwen3.5 without thinking), `<｜Assistant｜>` (DeepSeek), `<|start|>assistant` "
        "(gpt-oss, Muse). At inference the prompt holds it, and the model does not write it.",
    ),
    "TRL's trains blanks after the end of a turn": (
        "b",
        "TRL's variant also trains the line end that follows the end-of-turn token, where generation has stopped.",
    ),
    "ours trains what the prompt does not hold": (
        "c",
        "We also train `<|turn>model\\n` after a tool's result, and `<|tool_response>` after a call (DiffusionGemma). "
        "This template's generation prompt is empty after a tool's result, and yet it writes `<|turn>model\\n` before "
        "the answer: at inference only the model can write it. A chat that ends with a call ends with "
        "`<|tool_response>`, in no prompt: so the model writes it, and without loss there it would not learn where a "
        "call ends.",
    ),
    "TRL's trains more": ("d", "TRL's variant trains something else, too."),
    "ours trains more": ("e", "We train something else, too."),
}
HEAD = (
    "| template | each turn: same ids | other | refused | whole: same ids | other | refused "
    "| mask: same | differs | not compared |"
)
PROMPT = """
Nemotron's prompt ends with `<think>\\n`, and its turns without thinking begin with `<think></think>`. With
`data.chat_template_kwargs: {enable_thinking: false}` the prompt ends with `<think></think>`, and the chats in which no
turn thinks are trained, each turn and whole. Turn by turn, chats with turns of both kinds are refused either way. For
the chats that think, Qwen3.5's template without thinking needs `{enable_thinking: true}`."""
THOUGH = """
## Trained whole, though

These chats are as `apply_chat_template` writes them, but one of their turns follows something else than the prompt at
inference, or is in pieces: to train each turn after its own prompt, or to have the chat refused if it has none, set
`split_turns: true`.
"""


def lines(table: dict[str, Any]) -> Iterator[str]:
    yield INTRO
    yield f"{HEAD}\n|---|---|---|---|---|---|---|---|---|---|"
    for name, ways in table.items():
        cells = [str(cell) for way in ways.values() for cell in counts_of(way["outcomes"])]
        yield f"| {name} | {' | '.join([*cells, *cells_of_masks(ways['whole'].get('masks'))])} |"
    yield "\n## Masks that differ\n"
    found = {kind for ways in table.values() for kind in ways["whole"].get("masks", ())}
    yield from (f"- {letter}: {why}" for kind, (letter, why) in MASKS.items() if kind in found)
    yield "\n## Not of the same ids, and why\n\nIt is told from what transformers renders, not from our error.\n"
    yield "| template | each turn | whole |\n|---|---|---|"
    for name, ways in table.items():
        shown = [", ".join(reasons(way["outcomes"])) for way in ways.values()]
        if any(shown):
            yield f"| {name} | {' | '.join(shown)} |"
    yield PROMPT
    yield THOUGH
    for name, ways in table.items():
        yield from (f"- {name}: {number} {why}" for why, number in ways["whole"].get("trained though", {}).items())


def counts_of(outcomes: dict[str, int]) -> tuple[int, int, int]:
    refused = sum(number for what, number in outcomes.items() if what.startswith("refused"))
    return outcomes.get(SAME_IDS, 0), sum(outcomes.values()) - refused - outcomes.get(SAME_IDS, 0), refused


def cells_of_masks(masks: dict[str, int] | None) -> tuple[str, str, str]:
    if masks is None:
        return "", "", ""
    differ = [f"{masks[kind]} {letter}" for kind, (letter, _) in MASKS.items() if kind in masks]
    unknown = sum(number for kind, number in masks.items() if kind.startswith("not compared"))
    return str(masks.get(AS_MARKED, 0)), ", ".join(differ), str(unknown or "")


def reasons(outcomes: dict[str, int]) -> list[str]:
    return [f"{number} {what.removeprefix('refused: ')}" for what, number in outcomes.items() if what != SAME_IDS]


def main() -> None:
    rows, table = chats(), {}
    start = time.process_time()
    with frozen():
        for name in sys.argv[1:] or templates():
            table[name] = measured(name, rows)
            print(name, *({**way, "first": "", "all": ""} for way in table[name].values()), flush=True)
    print(f"{len(rows)} rows x {len(table)} templates, {time.process_time() - start:.0f} CPU s")
    if not sys.argv[1:]:
        made = {"trl": trl.__version__, "transformers": transformers.__version__, "templates": table}
        TABLE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text("\n".join(lines(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
