"""What generation returns: answers with their log-probabilities, and what was computed for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixtrain.errors import UserError

__all__ = ["Generated", "GenerationStats"]

SHOWN_ANSWERS = 10
SHOWN_CHARACTERS = 60
SHOWN_TOKENS = 12


@dataclass(frozen=True)
class GenerationStats:
    """What the answers took.

    num_prompt_tokens: of all prompts.
    num_cached_tokens: of those, found in the cache.
    num_computed_tokens: computed for the prompts; what they share counts once.
    num_new_tokens: of all answers.
    seconds: of the whole call.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    seconds: float

    @property
    def r(self) -> float:
        """Prompt tokens for each computed one; inf if all were cached, nan without prompts."""
        if not self.num_computed_tokens:
            return float("inf") if self.num_prompt_tokens else float("nan")
        return self.num_prompt_tokens / self.num_computed_tokens

    @property
    def hit_rate(self) -> float:
        """The part of the prompt tokens that was in the cache; nan without prompts."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else float("nan")

    def __str__(self) -> str:
        rate = f", {self.num_new_tokens / self.seconds:,.0f} a second" if self.seconds > 0 else ""
        return (
            f"{self.num_prompt_tokens:,} prompt tokens, {self.num_computed_tokens:,} computed (r {self.r:.2f}), "
            f"{self.num_cached_tokens:,} from the cache; {self.num_new_tokens:,} new tokens in "
            f"{self.seconds:.2f} s{rate}"
        )


@dataclass(frozen=True)
class Generated:
    """Answers, prompt by prompt: those of prompt i are entries [i n, (i + 1) n), n = `num_return_sequences`.

    prompt_ids: one a prompt.
    token_ids: one an answer. With the end-of-sequence token if there was one, without padding.
    texts: one an answer, without special tokens; None without a tokenizer.
    logprobs: one an answer. Of every token, in nats, under the model itself: temperature 1, before processors.
    finish_reasons: one an answer. "stop" (end token, stop string, criterion) or "length" (also max_time).
    """

    prompt_ids: list[list[int]]
    token_ids: list[list[int]]
    texts: list[str] | None
    logprobs: list[list[float]]
    finish_reasons: list[str]
    num_return_sequences: int
    stats: GenerationStats

    def __len__(self) -> int:
        """The number of answers."""
        return len(self.token_ids)

    def sequences(self, pad_token_id: int) -> Tensor:
        """What `model.generate` returns, (answers, L), int64: prompts padded on the left, answers on the right."""
        if not isinstance(pad_token_id, int):
            raise UserError(f"pad_token_id: expected a token id to pad with, got {pad_token_id!r}; 0 will do")
        n = self.num_return_sequences
        longest_prompt = max(map(len, self.prompt_ids), default=0)
        longest_answer = max(map(len, self.token_ids), default=0)
        sequences = torch.full((len(self), longest_prompt + longest_answer), pad_token_id, dtype=torch.int64)
        for place, answer in enumerate(self.token_ids):
            prompt = self.prompt_ids[place // n]
            sequences[place, longest_prompt - len(prompt) : longest_prompt + len(answer)] = torch.tensor(
                [*prompt, *answer], dtype=torch.int64
            )
        return sequences

    def __str__(self) -> str:
        """The first answers, one a line, after a line of counts."""
        shown = min(len(self), SHOWN_ANSWERS)
        lines = [f"{len(self)} answers to {len(self.prompt_ids)} prompts: {self.stats}"]
        if shown:
            lines.append("prompt  tokens  end     logprob  answer")
        lines += [self._line(place) for place in range(shown)]
        if shown < len(self):
            lines.append(f"... and {len(self) - shown} more")
        return "\n".join(lines)

    def _line(self, place: int) -> str:
        prompt, tokens = place // self.num_return_sequences, len(self.token_ids[place])
        logprob = sum(self.logprobs[place])
        return f"{prompt:>6}  {tokens:>6}  {self.finish_reasons[place]:<6}  {logprob:>7.2f}  {self._shown(place)}"

    def _shown(self, place: int) -> str:
        """The text of an answer on one line, or its first token ids."""
        if self.texts is None:
            ids = self.token_ids[place]
            return " ".join(map(str, ids[:SHOWN_TOKENS])) + (" ..." if len(ids) > SHOWN_TOKENS else "")
        text = " ".join(self.texts[place].split())
        return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 4] + " ..."
