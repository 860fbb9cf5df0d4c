"""Keys that were set and that this run does not read, each with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import lightning as L

from radixtrain.data.files.sources import as_sources
from radixtrain.data.formats import UnreadRow, open_rows
from radixtrain.data.rows.columns import standard_row
from radixtrain.data.rows.trajectories import plain_rows
from radixtrain.errors import DataError

__all__ = ["unused_keys"]

LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora")
FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")
SCORES = ("scores", "next_tokens", "normalize_embeddings", "generate")
SHARING = ("attention", "kernel", "allow_dropout")
COLLATING = ("min_shared_tokens", "pad_to_multiple_of")
CHATS = ("split_turns", "assistant_only_loss", "chat_template_path", "chat_template_kwargs")
VALIDATING = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "num_sanity_val_steps")


def unused_keys(model: Any, data: Any, trainer: Any) -> list[str]:
    """`model.lora_r (only with use_peft: true)` and the like, of a run of `fit`.

    model, data: a `RadixModule` and an `SFTData`. trainer: the trainer's part of the configuration.

    A key counts as set if it does not have its default. Rows are no chats if no source begins with one.
    """
    return [
        *(f"model.{text}" for text in _of_model(model.hparams, _set_keys(model))),
        *(f"data.{text}" for text in _of_data(data.hparams, _set_keys(data))),
        *(f"trainer.{text}" for text in _of_trainer(trainer, data.hparams)),
    ]


def _set_keys(owner: Any) -> set[str]:
    """Names of the arguments that do not have their default."""
    parameters = inspect.signature(type(owner).__init__).parameters
    return {name for name, value in owner.hparams.items() if name in parameters and value != parameters[name].default}


def _of_model(settings: Any, given: set[str]) -> Iterator[str]:
    if not settings.use_peft:
        yield from _each(LORA, given, "only with use_peft: true")
    if not settings.load_in_4bit:
        yield from _each(FOUR_BITS, given, "only with load_in_4bit: true")
    if not settings.dedup:
        yield from _each(SHARING, given, "not with dedup: false")
    elif settings.attn_implementation != "eager":
        yield from _each(("attn_implementation",), given, "only with dedup: false")
    if settings.lr_scheduler_type == "constant":
        yield from _each(("warmup_steps",), given, "the schedule constant has no warm-up; constant_with_warmup has one")
    yield from _each(SCORES, given, "only for predict")


def _of_data(settings: Any, given: set[str]) -> Iterator[str]:
    if settings.validation_file:
        yield from _each(("val_size",), given, "beside validation_file")
    if not settings.dedup:
        yield from _each(COLLATING, given, "not with dedup: false")
    if settings.max_length is None:
        yield from _each(("excess_length_strategy",), given, "only with max_length")
    if given.intersection(CHATS) and not any(
        map(_begins_with_a_chat, as_sources(settings.train_file, settings.columns))
    ):
        yield from _each(CHATS, given, "the rows are no chats")
    yield from _each(("test_file",), given, "only for test and predict")
    yield from _each(("predict_file",), given, "only for predict")


def _of_trainer(config: Any, data: Any) -> Iterator[str]:
    if not data.validation_file and not data.val_size:
        defaults = {parameter.name: parameter.default for parameter in inspect.signature(L.Trainer).parameters.values()}
        given = {name for name in VALIDATING if config.get(name) not in (None, defaults.get(name))}
        yield from _each(VALIDATING, given, "there are no rows to validate on")


def _begins_with_a_chat(source: Any) -> bool:
    """Whether the first row of a source is rendered by the chat template; True if it cannot be read."""
    first = next(open_rows(source))
    try:
        row = first.read() if isinstance(first, UnreadRow) else first
        if isinstance(row, DataError):
            return True
        fields = [standard_row(plain).fields for plain in plain_rows(row)]
    except DataError:
        return True
    return any("messages" in each or isinstance(each.get("prompt"), list) for each in fields)


def _each(names: tuple[str, ...], given: set[str], reason: str) -> Iterator[str]:
    yield from (f"{name} ({reason})" for name in names if name in given)
