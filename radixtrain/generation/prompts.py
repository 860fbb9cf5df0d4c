"""Prompts of any kind -> token ids: texts, token ids, conversations, and padded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from radixtrain.data.files.rows import check_encodable
from radixtrain.data.rendering.conversation import Conversation
from radixtrain.data.rendering.template import renders_developer, template_variables, unread_variable
from radixtrain.data.rows.messages import check_messages
from radixtrain.data.tokens.pretokenize import PieceTokenizer
from radixtrain.errors import UserError
from radixtrain.hf.padded.calls import reads_zeros

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# What a tokenizer returns about text. Of the rest a model may compute something else.
OF_TEXT = ("input_ids", "attention_mask", "special_tokens_mask", "offset_mapping", "length")
EXPECTED = "expected a text, a list of token ids, or a list of messages {role, content}"


def token_ids_of(
    prompts: object,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: object = None,
    **chat_template_kwargs: object,
) -> list[np.ndarray]:
    """Return the token ids of each prompt, (L,), int64, in order.

    prompts: a list, whose entries may be of different kinds:
        a text, which gets the tokenizer's special tokens, as `tokenizer(text)` gives them;
        a list or 1-D array of token ids, which are taken as they are;
        a conversation, a list of messages, which the chat template renders with its generation prompt.
        One text or one conversation is a list of one. Also a (B, L) array or tensor of token ids, and what
        `tokenizer(texts)` returns.
    tokenizer: for texts and conversations.
    attention_mask: (B, L), for a (B, L) array of prompts: tokens where it is 0 are padding and left out.
    chat_template_kwargs: variables of the chat template, and `tools`.

    Raises UserError for a prompt that is empty or of another kind (by its place in the list, from 0), if texts come
    without a tokenizer, and for a variable that the template does not read.
    """
    if tokenizer is not None and not callable(tokenizer):
        raise UserError(
            f"tokenizer: expected the model's tokenizer, got {type(tokenizer).__name__}; load it with "
            f"AutoTokenizer.from_pretrained"
        )
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return token_ids_of(*_encoded(prompts, attention_mask))
    if isinstance(prompts, Tensor | np.ndarray):
        rows = _rows_of(_array(prompts), None if attention_mask is None else _array(attention_mask))
    else:
        rows = _each(_listed(prompts, attention_mask), tokenizer, chat_template_kwargs)
    for place, ids in enumerate(rows):
        if not len(ids):
            raise UserError(f"prompt {place} is empty; a prompt needs at least one token")
    return rows


def check_ids(ids: np.ndarray, name: str, vocabulary: int) -> None:
    """Raise UserError for a token id that the model has no embedding for. name: whose ids, for the error."""
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if len(wrong):
        raise UserError(
            f"{name} has the token id {wrong[0]}, and the model has embeddings for ids from 0 to {vocabulary - 1}: is "
            f"it the tokenizer of this model?"
        )


def padding_mask(prompts: object, config: GenerationConfig) -> Any:
    """Infer the attention_mask of a (B, L) array of prompts that has none, as `model.generate` does.

    config: whose pad_token_id is padding wherever it stands, unless it is an end token too.

    Returns None if there is no padding, and for prompts of any other kind.
    """
    ids = prompts.get("input_ids") if isinstance(prompts, Mapping) and "attention_mask" not in prompts else prompts
    pad, eos = config.pad_token_id, config.eos_token_id
    if not isinstance(ids, Tensor | np.ndarray) or pad is None or pad in (eos if isinstance(eos, list) else [eos]):
        return None
    mask = _array(ids) != pad
    return None if mask.all() else mask


def _encoded(encoding: Mapping[str, Any], attention_mask: Any) -> tuple[Any, None, Any]:
    """Return the prompts, no tokenizer, and the mask of what a tokenizer returned, maybe lists of different lengths."""
    _check_only_text(encoding)
    ids = encoding["input_ids"]
    mask = encoding.get("attention_mask") if attention_mask is None else attention_mask
    if isinstance(ids, list) and ids and isinstance(ids[0], int):  # of one text
        ids, mask = [ids], None if mask is None else [mask]
    if mask is None or isinstance(ids, Tensor | np.ndarray):
        return ids, None, mask
    if len(mask) != len(ids) or any(len(row) != len(kept) for row, kept in zip(ids, mask, strict=True)):
        raise UserError("attention_mask: expected one number for each token of input_ids")
    return [_array(row)[_array(kept) != 0] for row, kept in zip(ids, mask, strict=True)], None, None


def check_types(backbone: PreTrainedModel, prompts: object) -> None:
    """Raise UserError if zero types, which `token_ids_of` drops, change what a model computes, as in PaliGemma."""
    for name in prompts if isinstance(prompts, Mapping) else ():
        if name.endswith("token_type_ids") and reads_zeros(backbone, name):
            raise UserError(
                f"prompts: {name} of zeros changes what {type(backbone).__name__} computes; leave it out, or use "
                f"model.generate"
            )


def _check_only_text(encoding: Mapping[str, Any]) -> None:
    """Raise UserError for what would be lost: images, or types that are not those of plain text."""
    for name, values in encoding.items():
        if name in OF_TEXT or (name.endswith("token_type_ids") and not any(_array(row).any() for row in values)):
            continue
        raise UserError(
            f"prompts: {name} is not supported, because a prompt is token ids of text; leave it out if the answer does "
            f"not depend on it, or use model.generate"
        )


def _each(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase | None, template_kwargs: dict[str, Any]
) -> list[np.ndarray]:
    """Tokenise texts and conversations in one call each, because prompts share most of their pieces."""
    ids: dict[int, np.ndarray] = {}
    texts: dict[int, str] = {}
    conversations: dict[int, list[Any]] = {}
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_encodable(prompt, f"prompt {place}")
            texts[place] = prompt
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            if "messages" in prompt[0]:
                raise UserError(f'prompt {place} is made of rows, not of messages: give row["messages"] of each')
            conversations[place] = prompt
        else:
            ids[place] = _ids(prompt, place)
    if not texts and not conversations:
        return list(ids.values())
    if tokenizer is None:
        place = min([*texts, *conversations])
        kind = "a text" if place in texts else "a conversation"
        raise UserError(f"prompt {place} is {kind}, which needs a tokenizer: pass tokenizer=, or give token ids")
    if texts:
        encoded = tokenizer(list(texts.values()))["input_ids"]
        ids |= {place: np.array(row, dtype=np.int64) for place, row in zip(texts, encoded, strict=True)}
    if conversations:
        rendered = _rendered(conversations, tokenizer, template_kwargs)
        ids |= zip(conversations, PieceTokenizer(tokenizer)(rendered), strict=True)
    return [ids[place] for place in range(len(prompts))]


def _rendered(
    conversations: dict[int, list[Any]], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]
) -> list[str]:
    """Render what the model reads before it answers, each conversation with its generation prompt, as in training."""
    if not tokenizer.chat_template:
        raise UserError(
            f"prompt {min(conversations)} is a conversation, and the tokenizer has no chat template; set "
            f"tokenizer.chat_template, or give texts"
        )
    if reason := unread_variable(kwargs, template_variables(tokenizer)):
        raise UserError(reason)
    as_system = not renders_developer(tokenizer)
    texts = []
    for place, conversation in conversations.items():
        messages = check_messages(
            [dict(each) if isinstance(each, Mapping) else each for each in conversation], f"prompt {place}"
        )
        for message in messages:
            if as_system and message["role"] == "developer":
                message["role"] = "system"
        texts.append(Conversation(tokenizer, messages, f"prompt {place}", kwargs).prompt())
    return texts


def _listed(prompts: object, attention_mask: object) -> list[Any]:
    """Return the prompts as a list: one text or one conversation becomes a list of one."""
    if attention_mask is not None:
        raise UserError(
            f"attention_mask is for prompts in one (batch, length) array, and these are a {type(prompts).__name__}; "
            f"leave it out, and give each prompt without padding"
        )
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):  # a column of a data set is one too
        raise UserError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
    is_conversation = bool(prompts) and isinstance(prompts[0], Mapping)
    if prompts and isinstance(prompts[0], int | np.integer):
        raise UserError("prompts: expected a list of prompts, got a list of numbers; for one prompt write [token_ids]")
    return [list(prompts)] if is_conversation else list(prompts)


def _ids(prompt: object, place: int) -> np.ndarray:
    """Return the token ids of a prompt that is neither text nor conversation."""
    if not isinstance(prompt, list | tuple | Tensor | np.ndarray):
        raise UserError(f"prompt {place}: {EXPECTED}, got {type(prompt).__name__}")
    if isinstance(prompt, list | tuple):
        # By type: 64 prompts of 580 ids take 1 ms, looking at each of them 49 ms.
        wrong = [kind for kind in set(map(type, prompt)) if kind is bool or not issubclass(kind, int | np.integer)]
        if wrong:
            first = next(each for each in prompt if type(each) in wrong)
            raise UserError(f"prompt {place}: {EXPECTED}, got a list with {first!r}"[:200])
    ids = _array(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"prompt {place}: {EXPECTED}, got an array of shape {ids.shape} and dtype {ids.dtype}")
    return ids.astype(np.int64)


def _rows_of(ids: np.ndarray, mask: np.ndarray | None) -> list[np.ndarray]:
    """Return the rows of a padded batch without their padding."""
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise UserError(
            f"prompts: expected token ids of shape (batch, length), got shape {ids.shape} and dtype {ids.dtype}"
        )
    if mask is None:
        return list(ids.astype(np.int64))
    if mask.shape != ids.shape:
        raise UserError(f"attention_mask: expected the shape of the prompts, {ids.shape}, got {mask.shape}")
    return [row[kept] for row, kept in zip(ids.astype(np.int64), mask != 0, strict=True)]


def _array(values: object) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
