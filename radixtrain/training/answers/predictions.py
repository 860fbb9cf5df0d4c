"""The records of `predict`: an answer to each prompt, or scores of each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from radixtrain.collators.steps import Step
from radixtrain.data.prompts import Prompt
from radixtrain.data.tokens.decode import next_token_ids
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.generation.cache import RadixCache
from radixtrain.hf.scores import Scorer, named_scores
from radixtrain.training.answers.answering import AnswerOptions, Answers, answer_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 65_536  # of prompts and answers that are kept


class PredictedAnswers:
    """Answers batch after batch of prompts. A cache keeps what these share from one batch to the next.

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
        answers = answer_prompts(model, prompts, tokenizer, self.options, dedup, logprobs=True, cache=cache)
        self.speed.add(answers)
        pairs = zip(prompts, answers.answers, strict=True)
        return [{"row": prompt.where, **answer.record()} for prompt, answer in pairs]


class AnswerSpeed:
    """How many answers were generated, and how much of their prompts was shared."""

    def __init__(self) -> None:
        self.num_answers = self.num_new_tokens = self.num_prompt_tokens = self.num_computed_tokens = 0
        self.seconds = 0.0

    def add(self, answers: Answers) -> None:
        self.num_answers += len(answers.answers)
        self.num_new_tokens += sum(len(answer.token_ids) for answer in answers.answers)
        self.num_prompt_tokens += answers.num_prompt_tokens
        self.num_computed_tokens += answers.num_computed_tokens
        self.seconds += answers.seconds

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
    gathered = ranks().gather(list(_scored(scorer, model, step, plain_head)))
    (step.num_computed_tokens,) = ranks().total(step.num_computed_tokens)
    pairs = sorted((pair for part in gathered for pair in part), key=lambda pair: pair[0])
    rows = step.where or (None,) * len(pairs)
    return [{"row": rows[member], **scores} for member, scores in pairs]


def _scored(scorer: Scorer, model: nn.Module, step: Step, plain_head: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and scores of each sequence of this rank. A micro-batch of weight zero is computed, and has none."""
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        scores = scorer(model, batch, plain_head)
        if members:
            yield from zip(members, scores, strict=True)
