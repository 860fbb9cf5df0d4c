"""How answers are generated in `fit`, `validate` and `predict`: the fields of Hugging Face's `GenerationConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixtrain.data.prompts import Prompt, end_tokens
from radixtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AnswerOptions"]

OWN_KEYS = ("max_new_tokens", "do_sample", "temperature")
KEY = "evaluate_generation"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are generated.

    max_new_tokens: most tokens of an answer.
    do_sample: draw tokens; otherwise the most likely one is taken, whatever the model's generation config says.
    temperature: of the draws; None is the model's.
    generation_kwargs: more fields of `GenerationConfig`.
    batch_size: prompts at once; None leaves it to `radixtrain.generate`.
    seed: of the draws.

    Raises UserError that names the key.
    """

    max_new_tokens: int = 256
    do_sample: bool = False
    temperature: float | None = None
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UserError(f"{KEY}.{name} must be at least 1, got {number}")
        if self.temperature is not None and not self.do_sample:
            raise UserError(f"{KEY}.temperature {self.temperature} is read only with {KEY}.do_sample: true")
        if self.temperature is not None and not self.temperature > 0:
            raise UserError(f"{KEY}.temperature must be above 0, got {self.temperature}")
        for name in OWN_KEYS:
            if name in self.generation_kwargs:
                raise UserError(f"{KEY}.generation_kwargs: {name} is a key of its own, {KEY}.{name}")
        if self.generation_kwargs.get("num_return_sequences", 1) != 1:
            raise UserError(f"{KEY}.generation_kwargs: num_return_sequences must be 1, since a row gets one answer")

    def fields(self, tokenizer: PreTrainedTokenizerBase, model: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Fields of `GenerationConfig`, with the tokens that end an answer."""
        given = {"temperature": self.temperature} if self.temperature is not None else {}
        own = {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        fields = {"eos_token_id": _ends(tokenizer, model, prompts), **own, **given, **self.generation_kwargs}
        if isinstance(fields["eos_token_id"], int):
            fields["eos_token_id"] = [fields["eos_token_id"]]
        return fields


def _ends(tokenizer: PreTrainedTokenizerBase, model: Any, prompts: Sequence[Prompt]) -> list[int]:
    """The model's end tokens, the tokenizer's, and what ends a turn in training, which a base model's config lacks."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    own = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id}
    found = (own - {None}) | end_tokens(tokenizer, prompts)
    if not found:
        raise UserError("neither the model nor its tokenizer has an end-of-sequence token, so no answer would end")
    return sorted(found)
