"""Tokenised rows as prompts: up to their last answer, as the model saw them in training, with that answer as target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.conversation import Conversation
from radixtrain.data.tokens.tokenization import DraftTokenizer
from radixtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompt(NamedTuple):
    """What the model reads before it answers, and what it should answer.

    token_ids: (P,), int64. the row up to its last answer, with the generation prompt of the chat template.
    target_ids: (A,), int64. the labels of that answer, with the token that ends it; empty if the row has none.
    where: file and line of the row.
    """

    token_ids: np.ndarray
    target_ids: np.ndarray
    where: str


@dataclass(frozen=True)
class Prompts:
    """The prompts of rows, in the order of the file.

    num_left_out, first_left_out: rows without an answer after a prompt, and the file and line of one of them.
    """

    prompts: list[Prompt]
    num_left_out: int = 0
    first_left_out: str = ""

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(eq=False)
class PromptDataset(Dataset[list[Prompt]]):
    """Maps conversation indices to their prompts; a sample whose tokens are all labels is a prompt as a whole."""

    conversations: Sequence[Sequence[TokenRow]]

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, indices: list[int]) -> list[Prompt]:
        samples = [sample for index in indices for sample in self.conversations[index]]
        return [prompt_of(each) or Prompt(each.input_ids, each.labels[:0], each.where) for each in samples]


def prompt_of(sample: TokenRow) -> Prompt | None:
    """Split a sample into the tokens before its last run of labels, and that run. None if labels begin at once.

    Labels of `[-100, -100, 7, -100, 8, 9]` are a prompt of four tokens and the target `[8, 9]`. Without labels every
    token belongs to the prompt.
    """
    labelled = sample.labels != IGNORE_INDEX
    end = len(labelled) - int(labelled[::-1].argmax()) if labelled.any() else len(labelled)
    before = np.flatnonzero(~labelled[:end])
    start = int(before[-1]) + 1 if len(before) else 0
    return Prompt(sample.input_ids[:start], sample.labels[start:end], sample.where) if start else None


def choose_prompts(
    conversations: Sequence[Sequence[TokenRow]], num_samples: int | None, seed: int, cut_length: int | None = None
) -> Prompts:
    """Return the last answer of each conversation, or of `num_samples` of them, drawn by the seed.

    cut_length: samples of this length may have lost the end of their answer, and are left out; None if none was cut.

    Rows are drawn until there are enough, so the counts of those left out cover only the rows that were drawn.
    """
    drawn = np.random.default_rng([seed, 0x6E]).permutation(len(conversations))
    found: dict[int, Prompt] = {}
    left_out: dict[int, str] = {}
    for index in np.arange(len(conversations)) if num_samples is None else drawn:
        if len(found) == num_samples:
            break
        sample = conversations[int(index)][-1]
        prompt = None if len(sample.input_ids) == cut_length else prompt_of(sample)
        if prompt is None or not len(prompt.target_ids):
            left_out[int(index)] = sample.where
        else:
            found[int(index)] = prompt
    return Prompts(
        [found[index] for index in sorted(found)], len(left_out), left_out[min(left_out)] if left_out else ""
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> set[int]:
    """Return the special tokens that end the targets; without targets, the one that ends an answer in the template."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    last = {int(prompt.target_ids[-1]) for prompt in prompts if len(prompt.target_ids)}
    return special & (last or _last_of_a_turn(tokenizer))


def _last_of_a_turn(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the token that ends a turn; empty without a chat template that can render two plain turns."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        _, target = Conversation(tokenizer, turns, "", {}).prompt_and_target(1, 2)
    except UserError:
        return set()
    ended = DraftTokenizer(tokenizer).until_end_of_turn(target)
    return set(tokenizer(ended, add_special_tokens=False)["input_ids"][-1:])
