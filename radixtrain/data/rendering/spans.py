"""Where the assistant's turns are in the rendering of a whole chat, for a template that does not mark them.

A mark is a word that occurs nowhere in the chat. The chat is rendered with and without one in every message:

    <|im_start|>user\nHe[0]llo<|im_end|>\n<|im_start|>assistant\nHi.[1]<|im_end|>\n<|im_start|>user\nBy[2]e<|im_end|>\n

Without its marks this has to be the chat's own rendering. Then each mark is a place in it, and parts of the chat, which
are rendered with the same marks, tell where message 1, the assistant's, stands:

- It begins after `llo<|im_end|>\n<|im_start|>assistant\n`, which follows mark 0 if only message 0 and the generation
    prompt are rendered, and has to follow it here too.
- It ends with `<|im_end|>`, which follows mark 1, up to the end-of-turn token, if nothing after message 1 is rendered,
    and has to follow it here too.

These are the borders of `split_turns: true`, in a text in which earlier turns may have lost their thinking.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.rendering.conversation import FIX_MARKERS, Conversation
from radixtrain.errors import DataError

if TYPE_CHECKING:
    from radixtrain.data.tokens.tokenization import DraftTokenizer

Message = dict[str, Any]
Rest = Callable[[int, list[Message], bool], tuple[int, str]]
Span = tuple[int, int]

INSTRUCTING = ("system", "developer")
MAX_BEFORE_ARGUMENTS = 40  # characters between the name of a tool and its arguments
NEIGHBOURS = 4  # messages, at least, that are rendered for a turn with those that begin the chat
TURNS_TRIED = 16  # of a refused chat, each with all before it
WITHOUT_PROMPT = "the chat template does not write its generation prompt before turn {}"


def sample_of_chat(chat: Conversation, turns: list[int], tokenize: DraftTokenizer) -> TokenRow:
    """Make the whole chat one sample, with loss on some of the assistant's turns.

    turns: indices of their messages.

    Tokens end at the borders of a turn, as in `split_turns: true`. Raises as `find_turns`.
    """
    try:
        text, spans = find_turns(chat, turns, tokenize)
    except DataError:
        for turn in filter(None, turns[:TURNS_TRIED]):  # if split_turns: true fails too, its error is the reason
            chat.prompt_and_target(turn, turn + 1)
        raise
    for turn, (start, end) in zip(turns, spans, strict=True):
        chat.check_turns(text[start:end], [turn])
    borders = [0, *(border for span in spans for border in span), len(text)]
    pieces = _token_ids([text[start:end] for start, end in pairwise(borders)], tokenize)
    masked = [np.full_like(ids, IGNORE_INDEX) if n % 2 == 0 else ids for n, ids in enumerate(pieces)]
    return TokenRow(np.concatenate(pieces), np.concatenate(masked), chat.where)


def find_turns(chat: Conversation, turns: list[int], tokenize: DraftTokenizer) -> tuple[str, list[Span]]:
    """Return `chat.text()`, and the start and end of each turn in it, from the generation prompt to the end token.

    turns: indices of assistant messages, rising.

    Raises DataError, naming the turn, if the template gives no proof of where it stands.
    """
    finder = _Finder(chat, tokenize)
    spans = finder.spans(turns)
    for (_, end), (start, _), turn in zip(spans, spans[1:], turns[1:], strict=False):
        if start < end:
            raise finder.unproven(turn, "the chat template does not write turn {} after the one before it")
    return finder.whole, spans


class _Finder:
    def __init__(self, chat: Conversation, tokenize: DraftTokenizer):
        self.chat, self.tokenize = chat, tokenize
        self.whole = chat.text()
        self.marks = Marks(f"{self.whole}{chat.messages}{chat.template_kwargs}")
        self.messages = [self.marks.into(message, n) for n, message in enumerate(chat.messages)]
        self.rendering = self._render(self.messages)
        self.likely: dict[tuple[Any, ...], tuple[int, int, str, str]] = {}
        self.headers: set[str] = set()
        spoken = (n for n, message in enumerate(chat.messages, start=1) if message["role"] not in INSTRUCTING)
        self.num_before_second = next(spoken, len(chat.messages))
        self.by_place = sorted((place, n) for n, places in self.rendering.places.items() for place in places)
        if self.rendering.text != self.whole:
            raise self.unproven(self._first_changed(), "what the chat template writes depends on the text of turn {}")

    def spans(self, turns: list[int]) -> list[Span]:
        """Find each turn from the messages around it, since rendering all before each one would cost O(turns^2).

        All are rendered for the first four turns, for turn 16, 64 ... and the last one, and for a turn that its
        neighbours do not show. If one of these is elsewhere, the template looks further back: all, for every turn.
        """
        spans: list[Span] = []
        due = 16
        for number, turn in enumerate(turns, start=1):
            span = near = self._span_by_neighbours(turn)
            if span is None or number in (1, 2, 3, 4, due) or turn == turns[-1]:
                span = self._span(turn, self.messages[: turn + 1], self._rest)
            if near not in (None, span):
                return [self._span(turn, self.messages[: turn + 1], self._rest) for turn in turns]
            due *= 4 if number == due else 1
            spans.append(span)
        return spans

    def _span_by_neighbours(self, turn: int) -> Span | None:
        """Find a turn as if most of what precedes it were unsaid; roles still alternate, as some templates require."""
        first = self.num_before_second
        role = self.messages[first]["role"] if first < turn else ""
        again = next((n for n in range(turn - NEIGHBOURS, first, -1) if self.messages[n]["role"] == role), first)
        messages = (
            self.messages[:first] + self.messages[again : turn + 1] if turn >= first else self.messages[: turn + 1]
        )
        for rest in (self._likely_rest, self._rest):
            with suppress(DataError):
                span = self._span(turn, messages, rest)
                header = self._header_in_turn(turn, span)  # may hold more of this turn's prompt than another turn does
                if header in self.headers or rest == self._rest:
                    self.headers.add(header)
                    return span
        return None

    def _header_in_turn(self, turn: int, span: Span) -> str:
        """Return what the template writes in a turn before its text, or before the mark in a tool call."""
        place = next(place for place in self.rendering.places[turn] if place >= span[0])
        own, is_marked, _ = self.messages[turn].get("content", "").partition(self.marks.word(turn))
        return self.whole[span[0] : place].removesuffix(own.lstrip() if is_marked else "")

    def _span(self, turn: int, messages: list[Message], rest: Rest) -> Span:
        """Find a turn. messages: up to the turn. rest: renders what follows the mark of the last of some messages."""
        start = self._start(turn, messages[:-1], rest) if turn else self._start_of_first()
        place, end = self._end(turn, messages, rest)
        inside = self.by_place[bisect_left(self.by_place, (start,)) : bisect_left(self.by_place, (end,))]
        if not start <= place <= end or any(n != turn for _, n in inside):
            raise self.unproven(turn, "the chat template does not write turn {} in one piece")
        return start, end

    def _start(self, turn: int, before: list[Message], rest: Rest) -> int:
        place, prompt = self._after(turn - 1, rest(turn - 1, before, True))
        if self.whole.startswith(prompt, place):
            return place + len(prompt)
        header = self._header(turn)
        if prompt.startswith(header) and self.whole.startswith(header, place):
            return place + len(header)
        raise self.unproven(turn, WITHOUT_PROMPT)

    def _header(self, turn: int) -> str:
        """Return what the template writes from the mark before a turn to its content, in the whole chat.

        This may be less than the generation prompt: with `enable_thinking: false` Qwen3's has an empty thinking block,
        which is not written in earlier turns.
        """
        starts, ends = self._plain.places.get(turn - 1), self._plain.places.get(turn)
        if not starts or not ends:
            raise self.unproven(turn, WITHOUT_PROMPT)
        return self._plain.text[starts[-1] : ends[0]]

    @cached_property
    def _plain(self) -> Rendering:
        """Render the chat with a mark for the text of every assistant turn, and without its thinking."""
        return self._render([self._without_text(n) for n in range(len(self.messages))])

    def _without_text(self, n: int) -> dict[str, Any]:
        message = self.chat.messages[n]
        if message["role"] != "assistant":
            return self.messages[n]
        kept = {key: message[key] for key in ("role", "tool_calls") if key in message}
        return kept | {"content": self.marks.word(n)}

    def _start_of_first(self) -> int:
        """Find where the assistant begins the chat, without a mark before it: its header is its generation prompt."""
        first = self.chat.render(self.chat.messages[:1])
        prompt = self.chat.render(self.chat.messages[:1], add_generation_prompt=True)
        before = self._plain.text[: self._plain.places.get(0, [0])[0]]
        header = prompt.removeprefix(first)
        end = before.rfind(header) + len(header)
        if not header or header == prompt or before.count(header) != 1 or not self.whole.startswith(before[:end]):
            reason = "turn {} is the assistant's, with no prompt before it"
            raise self.unproven(0, reason, fix="begin with another turn")
        return end

    def _end(self, turn: int, messages: list[Message], rest: Rest) -> Span:
        """Return the place of a turn's mark, and where the turn ends."""
        place, ending = self._ending(turn, messages, rest)
        for known in self._endings(turn, ending, messages[:-1], rest):
            if self.whole.startswith(known, place):
                return place, place + len(known)
        raise self.unproven(turn, "the chat template ends turn {} differently once others follow")

    def _endings(self, turn: int, ending: str, before: list[Message], rest: Rest) -> Iterator[str]:
        """Yield the ways in which a turn may end in the whole chat: as it does alone, and as earlier turns end.

        Phi-3's writes an EOS only after the last message. gpt-oss ends the last turn with <|return|> and earlier ones
        with the token that ends the other messages.
        """
        yield ending
        without_blanks, token = self._last_token(ending)
        shorter, end = self._last_token(without_blanks.rstrip())
        if token and end:
            yield shorter + end
        if token and turn:
            _, usual = self._last_token(self._ending(turn - 1, before, rest)[1])
            yield without_blanks + usual

    def _ending(self, turn: int, messages: list[Message], rest: Rest) -> tuple[int, str]:
        place, text = self._after(turn, rest(turn, messages, False))
        return place, self.tokenize.until_end_of_turn(text)

    def _last_token(self, text: str) -> tuple[str, str]:
        """Split the special token off the end of a text; it is empty if there is none."""
        token = max((token for token in self.tokenize.special_tokens if text.endswith(token)), key=len, default="")
        return text.removesuffix(token), token

    def _after(self, n: int, marks_and_text: tuple[int, str]) -> tuple[int, str]:
        """Return the place in the whole of message n's mark that was the last in a part of the chat, and the text."""
        num_marks, text = marks_and_text
        here = self.rendering.places.get(n, [])
        if not num_marks or len(here) < num_marks:
            raise self.unproven(n, "the chat template leaves out turn {}")
        return here[num_marks - 1], text

    def _rest(self, n: int, messages: list[Message], add_generation_prompt: bool) -> tuple[int, str]:
        """Count the marks of message n, the last of some, in their rendering; return what follows the last mark too."""
        part = self.rendering
        if add_generation_prompt or len(messages) < len(self.messages):
            part = self._render(messages, add_generation_prompt)
        places = part.places.get(n, [])
        return len(places), part.text[places[-1] :] if places else ""

    def _likely_rest(self, n: int, messages: list[Message], add_generation_prompt: bool) -> tuple[int, str]:
        """Guess `_rest` from a message with the same text before it: the end of its content, and what comes after."""
        own = self._after_mark(n)
        forms = (own, own.rstrip(), json.dumps(own, ensure_ascii=False)[1:-1])  # as a template may write it
        key = (add_generation_prompt, *map(own.__eq__, forms), *((each["role"], *each) for each in messages))
        if key not in self.likely:
            num_marks, text = self._rest(n, messages, add_generation_prompt)
            form = next((i for i, form in enumerate(forms) if form in text[: len(form) + MAX_BEFORE_ARGUMENTS]), None)
            if form is None:
                return num_marks, text
            at = text.index(forms[form])
            self.likely[key] = num_marks, form, text[:at], text[at + len(forms[form]) :]
        num_marks, form, before, after = self.likely[key]
        return num_marks, before + forms[form] + after

    def _after_mark(self, n: int) -> str:
        """Return what follows the mark in the content of message n, or the arguments of the call that is marked."""
        calls = self.messages[n].get("tool_calls")
        if not calls:
            return self.messages[n]["content"].partition(self.marks.word(n))[2]
        return json.dumps(calls[-1]["function"]["arguments"], ensure_ascii=False)

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> Rendering:
        return self.marks.read(self.chat.render(messages, add_generation_prompt))

    def _first_changed(self) -> int:
        """Return the message whose mark is the last one before the first character that the marks changed."""
        both = zip(self.rendering.text, self.whole, strict=False)
        at = next((i for i, (marked, plain) in enumerate(both) if marked != plain), len(self.whole))
        return next((n for place, n in reversed(self.by_place) if place <= at), 0)

    def unproven(self, turn: int, reason: str, fix: str = "set split_turns: true") -> DataError:
        found = f"{reason.format(turn + 1)}, so where the answers are in the whole chat is not certain"
        return DataError(self.chat.where, f"split_turns: false: {found}; {fix}, or {FIX_MARKERS}")


def _token_ids(pieces: list[str], tokenize: DraftTokenizer) -> list[np.ndarray]:
    """Tokenise each piece, after what comes before it if the tokenizer marks where a text begins."""
    separate = tokenize.token_ids(pieces)
    if not tokenize.marks_text_start:
        return separate
    joined: list[np.ndarray] = []
    special = re.compile("|".join(map(re.escape, tokenize.special_tokens)) or "$.")
    before = ""  # from the last special token on: a tokenizer cuts a text there before it does anything else
    for piece, own in zip(pieces, separate, strict=True):
        ids, both = tokenize.token_ids([before, before + piece])
        joined.append(both[len(ids) :] if len(ids) and np.array_equal(both[: len(ids)], ids) else own)
        before += piece
        before = before[max((found.start() for found in special.finditer(before)), default=0) :]
    return joined


@dataclass(frozen=True)
class Rendering:
    """A rendered chat.

    text: without the marks.
    places: message -> the characters of `text` before which its mark stood; a template may write a name twice.
    """

    text: str
    places: dict[int, list[int]]


class Marks:
    """Words of letters and digits, one for each message.

    text: everything that may be rendered; no mark occurs in it.
    """

    def __init__(self, text: str):
        self.stem = "Zq"
        while self.stem in text:
            self.stem += "q"
        self.pattern = re.compile(self.stem + r"(\d+)Z")

    def word(self, n: int) -> str:
        """Return the mark of message n."""
        return f"{self.stem}{n}Z"

    def into(self, message: Message, n: int) -> Message:
        """Mark a message of `check_messages` where templates neither trim nor look for a word.

        That is in the name of its last tool call, at the end of the assistant's text, or in the middle of any other.
        """
        if message.get("tool_calls"):
            *calls, last = message["tool_calls"]
            function = last["function"]
            marked = last | {"function": function | {"name": f"{function['name']}{self.word(n)}"}}
            return message | {"tool_calls": [*calls, marked]}
        content = message["content"]
        num_blanks = len(content) - len(content.lstrip())
        length = len(content.strip())
        at = num_blanks + (length if message["role"] == "assistant" else length // 2)
        return message | {"content": content[:at] + self.word(n) + content[at:]}

    def read(self, marked: str) -> Rendering:
        """Separate the rendered text from its marks, and return their places."""
        texts = self.pattern.split(marked)
        places: dict[int, list[int]] = {}
        place = 0
        for text, n in zip(texts[::2], texts[1::2], strict=False):
            place += len(text)
            places.setdefault(int(n), []).append(place)
        return Rendering("".join(texts[::2]), places)
