"""The answers of `predict`, batch after batch of prompts: what these share stays in a cache from one to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from radixtrain.collators.steps import Step
from radixtrain.data.prompts import Prompt
from radixtrain.data.tokens.next_tokens import next_token_ids
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.generation.cache import RadixCache
from radixtrain.hf.scores import Scorer, named_scores
from radixtrain.training.answers.answering import AnswerOptions, Answers, answer_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AnswerSpeed", "PredictedAnswers", "scored_records", "scorer_of"]

MAX_TOKENS = 65_536  # of prompts and answers that are kept


class PredictedAnswers:
    """Answers prompts as often as it is asked.

    options: how; the command line sets them. speed: of all answers so far.
    """

    def __init__(self) -> None:
        self.options = AnswerOptions()
        self.speed = AnswerSpeed()
        self.cache = RadixCache(max_tokens=MAX_TOKENS)

    def records(
        self, model: Any, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, dedup: bool
    ) -> list[dict[str, Any]]:
        """For each prompt its file row and its answer. Arguments, and errors, as of `answer_prompts`."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        cache = self.cache if 2 * longest <= MAX_TOKENS else None
        found = answer_prompts(model, prompts, tokenizer, self.options, dedup, logprobs=True, cache=cache)
        self.speed.add(found)
        pairs = zip(prompts, found.answers, strict=True)
        return [{"row": prompt.where, **answer.record()} for prompt, answer in pairs]


class AnswerSpeed:
    """How many answers were generated, and how much of their prompts was shared."""

    def __init__(self) -> None:
        self.num_answers = self.num_new_tokens = self.num_prompt_tokens = self.num_computed_tokens = 0
        self.seconds = 0.0

    def add(self, found: Answers) -> None:
        self.num_answers += len(found.answers)
        self.num_new_tokens += sum(len(answer.token_ids) for answer in found.answers)
        self.num_prompt_tokens += found.num_prompt_tokens
        self.num_computed_tokens += found.num_computed_tokens
        self.seconds += found.seconds

    def __str__(self) -> str:
        r = self.num_prompt_tokens / self.num_computed_tokens
        answers, tokens = self.num_answers / self.seconds, self.num_new_tokens / self.seconds
        rates = f"{answers:,.1f} answers/s, {tokens:,.0f} new tokens/s, {self.seconds:.0f} s"
        return f"{r:.2f} tokens of prompts per computed token; {rates}"


def scorer_of(settings: Any) -> Scorer:
    """What computes the scores. settings: of a `RadixModule`. Reads the tokenizer if words are scored.

    Raises UserError if a word is not one token.
    """
    words = settings.next_tokens
    ids = next_token_ids(load_tokenizer(settings.model_name_or_path), words) if words else {}
    return Scorer(named_scores(settings.scores), ids, settings.normalize_embeddings)


def scored_records(scorer: Scorer, model: nn.Module, step: Step, plain_head: bool) -> list[dict[str, Any]]:
    """For each sequence its file row, or None, and its scores: the whole step, on every rank.

    Afterwards `step.num_computed_tokens` counts the rows of all ranks.
    """
    here = ranks()
    found = [each for part in here.gather(list(_scored(scorer, model, step, plain_head))) for each in part]
    (step.num_computed_tokens,) = here.total(step.num_computed_tokens)
    rows = step.where or (None,) * len(found)
    return [{"row": rows[member], **scores} for member, scores in sorted(found, key=lambda pair: pair[0])]


def _scored(scorer: Scorer, model: nn.Module, step: Step, plain_head: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place and scores of each sequence of this rank. A micro-batch of weight zero is computed, and has none."""
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        scores = scorer(model, batch, plain_head)
        if members:
            yield from zip(members, scores, strict=True)
