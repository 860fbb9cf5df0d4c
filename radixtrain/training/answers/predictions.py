"""The records of `predict`, an answer to each prompt or log-probabilities of each sequence, and `predictions.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from radixtrain.checkpoints.atomic import check_replaceable, sync_folder, writing_file
from radixtrain.collators.steps import Step
from radixtrain.data.prompts import Prompt
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache
from radixtrain.hf.predicting_rows import forward_rows, labelled_logprobs
from radixtrain.screen import print_line
from radixtrain.settings.commands import AnswerSettings
from radixtrain.training.answers.answering import answer_prompts
from radixtrain.training.progress import Speed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 65_536  # of prompts and answers to keep in the cache


class PredictedAnswers:
    """Answers batch after batch of prompts. A cache keeps what these share from one batch to the next.

    options: of the generation; set by the command line. The counts cover all answers so far.
    """

    def __init__(self) -> None:
        self.options = AnswerSettings()
        self.cache = RadixCache(max_tokens=MAX_TOKENS)
        self.num_answers = self.num_new_tokens = self.num_prompt_tokens = self.num_computed_tokens = 0
        self.seconds = 0.0

    def records(
        self, model: object, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
    ) -> list[dict[str, Any]]:
        """Return for each prompt its file row and its answer. Arguments and errors are those of `answer_prompts`."""
        answers = answer_prompts(model, prompts, tokenizer, self.options, logprobs=True, cache=self.cache)
        self.num_answers += len(answers.answers)
        self.num_new_tokens += sum(len(answer.token_ids) for answer in answers.answers)
        self.num_prompt_tokens += answers.num_prompt_tokens
        self.num_computed_tokens += answers.num_computed_tokens
        self.seconds += answers.seconds
        return [
            {"row": prompt.where, "answer": text, "num_tokens": len(ids), "logprob": logprob, "finish_reason": reason}
            for prompt, (ids, reason, text, logprob) in zip(prompts, answers.answers, strict=True)
        ]

    @property
    def speed(self) -> str:
        """Report answers per second, and how much of their prompts was shared."""
        r = self.num_prompt_tokens / self.num_computed_tokens
        answers, tokens = self.num_answers / self.seconds, self.num_new_tokens / self.seconds
        rates = f"{answers:,.1f} answers/s, {tokens:,.0f} new tokens/s, {self.seconds:.0f} s"
        return f"{r:.2f} tokens of prompts per computed token; {rates}"


def scored_records(model: nn.Module, step: Step, plain_head: bool) -> list[dict[str, Any]]:
    """Return for each sequence its file row, or None, and its labelled tokens: the whole step, on every rank.

    Afterwards `step.num_computed_tokens` counts the rows of all ranks.
    """
    gathered = ranks().gather(list(_scored(model, step, plain_head)))
    (step.num_computed_tokens,) = ranks().total(step.num_computed_tokens)
    pairs = sorted((pair for part in gathered for pair in part), key=lambda pair: pair[0])
    rows = step.where or (None,) * len(pairs)
    return [{"row": rows[member], **scores} for member, scores in pairs]


@torch.no_grad()
def _scored(model: nn.Module, step: Step, plain_head: bool) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield index, labels and log-probabilities of each sequence of this rank; none for a micro-batch of weight zero.

    step: its batches are not merged.
    """
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        logprobs = forward_rows(model, batch, plain_head).logprobs()
        scores: list[dict[str, list[Any]]] = [{"tokens": [], "logprobs": []} for _ in members]
        if members:
            for sequence, label, logprob in labelled_logprobs(batch, logprobs):
                scores[sequence]["tokens"].append(label)
                scores[sequence]["logprobs"].append(logprob)
        yield from zip(members, scores, strict=True)


class PredictionWriter:
    """Writes `predictions.jsonl`: one line for each sequence, with its scores or its answer, in the order of the file.

    {"row": "test.jsonl:1", "tokens": [3, 17], "logprobs": [-0.12, -0.03]}
    {"row": "test.jsonl:1", "answer": "Shelf two.", "num_tokens": 4, "logprob": -0.31, "finish_reason": "stop"}

    The file appears when it is complete and on the disk. Only rank 0 writes.
    """

    def __init__(self, output_dir: Path):
        self.path = output_dir / "predictions.jsonl"
        self.num_sequences = 0
        self.speed = Speed()

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.speed.start()
        check_replaceable(self.path)
        if not ranks().is_first:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing_file(self.path) as partial, partial.open("w", encoding="utf-8") as self._file:
            yield
            self._file.flush()
            os.fsync(self._file.fileno())
        sync_folder(self.path.parent)

    def add(self, records: Sequence[dict[str, Any]], step: Any) -> None:
        """Write the records of a step, or of a batch of prompts."""
        if not ranks().is_first:
            return
        self._file.writelines(f"{_as_json(record)}\n" for record in records)
        self.num_sequences += len(records)
        if isinstance(step, Step):
            self.speed.add(step)

    def print_results(self, of_answers: str) -> None:
        """Print the path, r, and sequences and tokens per second. of_answers: the speed of answers; or empty."""
        print_line("predictions", f"{self.path} ({self.num_sequences} sequences)")
        if of_answers:
            print_line("r", of_answers)
        if self.speed.seconds:
            effective, computed = self.speed.rates
            per_second = f"{self.num_sequences / self.speed.seconds:,.1f} sequences/s"
            rates = f"{per_second}, {effective:,.0f} tokens/s effective, {computed:,.0f} computed"
            print_line("r", f"{self.speed.r_text}; {rates}, {self.speed.seconds:.0f} s")


def _as_json(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        name = "logprob" if "logprob" in record else "logprobs"
        raise UserError(
            f"predict: {name} of {record['row']} is not finite, which JSON cannot hold; 16 bits may overflow, so try "
            f"model.dtype: float32"
        ) from None
