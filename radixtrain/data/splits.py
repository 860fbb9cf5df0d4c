"""The files of a split -> its conversations, tokenised once per machine and the same on every rank; validation."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash

from radixtrain.data.cache import TokenizingOptions, tokenized
from radixtrain.data.chat import ChatEncoder, UnlabelledEncoder
from radixtrain.data.files.sources import KEY, Source, as_sources, open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.data.steps import epoch_size
from radixtrain.data.template import (
    warn_of_endless_turns,
    warn_of_likely_mistakes,
    warn_of_rewritten_history,
    writes_date,
)
from radixtrain.data.tokens.corpus import Corpus, Part, distinct_turns, last_turns
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.config import end_tokens, read_config

logger = logging.getLogger(__name__)

LARGEST_EPOCH = 2**31 - 1  # conversations, whose order is drawn in memory
ROWS_LOOKED_AT = 32  # for a template that rewrites history


def encoder_of(settings: Any, unlabelled: bool = False) -> ChatEncoder:
    """Make the encoder that renders and tokenises the rows. settings: of an `SFTData`."""
    if settings.model_name_or_path is None:
        raise UserError("data.model_name_or_path is missing: name the model whose tokenizer reads the rows")
    tokenizer = load_tokenizer(settings.model_name_or_path, settings.chat_template_path)
    return (UnlabelledEncoder if unlabelled else ChatEncoder)(
        tokenizer,
        vocab_size=_vocab_size(settings.model_name_or_path),
        max_length=settings.max_length,
        assistant_only_loss=settings.assistant_only_loss,
        completion_only_loss=settings.completion_only_loss or unlabelled,
        split_turns=settings.split_turns,
        excess_length_strategy=settings.excess_length_strategy,
        chat_template_kwargs=settings.chat_template_kwargs or {},
        on_unrendered=settings.on_unrendered,
        template_date=settings.template_date if writes_date(tokenizer) else None,
        system_prompt=settings.system_prompt or "",
    )


def encoder_for(source: Source, encoder: ChatEncoder) -> ChatEncoder:
    """Return the encoder with the system prompt of a source, if the source has its own."""
    own = source.system_prompt
    return encoder if own is None else replace(encoder, system_prompt=own)


def load_split(
    files: Any, settings: Any, key: str, unlabelled: bool = False, is_first: bool = True
) -> tuple[Corpus, EncodeReport]:
    """Load the conversations of a split, and report what happened to its rows.

    files: what the configuration names: a path, or a list of paths and of sources with a weight.
    settings: of an `SFTData`.
    key: the key that names the files, for errors.
    is_first: False if another process of this run has read the same just now, so that it is not tokenised again.

    Raises UserError or DataError as `tokenized` does.
    """
    encoder = encoder_of(settings, unlabelled)
    options = TokenizingOptions(
        skip_bad_rows=settings.on_bad_row == "skip",
        dataset_num_proc=settings.dataset_num_proc,
        cache_dir=settings.cache_dir,
        overwrite_cache=settings.overwrite_cache and is_first,
    )
    report = EncodeReport()
    parts: list[Part] = []
    sources = as_sources(files, settings.columns, key)
    if key == KEY and not unlabelled:
        rows = [*islice(chain.from_iterable(open_rows(source) for source in sources), ROWS_LOOKED_AT)]
        warn_of_likely_mistakes(encoder, rows)  # first: it renders the rows, so settings that cannot work raise here
        warn_of_endless_turns(encoder, rows, _stops(settings.model_name_or_path, encoder))
        warn_of_rewritten_history(encoder, rows)
    for source in sources:
        found = tokenized(source, encoder_for(source, encoder), options)
        report.add(found.report)
        part = Part(name=source.label, conversations=found.store, weight=source.weight, digest=found.digest)
        parts.append(_trained_turns(part, settings.train_on) if key == KEY and not unlabelled else part)
    corpus = Corpus(parts)
    size = len(corpus) if corpus.weights is None else epoch_size(corpus.weights)
    if not size and len(corpus):
        raise UserError(f"{key}: with these weights no conversation is left in an epoch; raise one of them")
    if size > LARGEST_EPOCH:
        raise UserError(f"{key}: with these weights an epoch has {size:,} conversations; lower them")
    return corpus, report


def _trained_turns(part: Part, train_on: str) -> Part:
    """Select the turns of a source that are trained; one line in the log if some are not."""
    store = part.conversations
    if train_on == "last_turn":
        is_chosen, reason = last_turns(store), "are not the last of their row"
    else:
        is_chosen, reason = distinct_turns(store), "occur in another row too, after the same messages"
    num_left_out = len(is_chosen) - int(is_chosen.sum())
    if not num_left_out:
        return part
    counts = f"{num_left_out:,} of {len(is_chosen):,} turns {reason}"
    if train_on == "every_turn":
        logger.warning("%s: %s, and are trained there too (data.train_on: every_turn)", part.name, counts)
        return part
    logger.warning("%s: %s: they are left out (data.train_on: %s)", part.name, counts, train_on)
    digest = xxhash.xxh3_128(is_chosen.tobytes()).hexdigest()
    return replace(part, conversations=store.select(is_chosen), digest=f"{part.digest} {digest}")


def take_validation(corpus: Corpus, size: float, seed: int) -> tuple[Corpus, Corpus]:
    """Split off conversations for validation, drawn by the seed; both parts keep the order of the file.

    size: a share below 1, or a number of conversations. UserError if one side would be empty.
    """
    number = round(size * len(corpus)) if size < 1 else int(size)
    if not 0 < number < len(corpus):
        raise UserError(
            f"data.val_size {size} takes {number} of {len(corpus)} conversations, which leaves one side empty"
        )
    order = np.random.default_rng([seed, 0x5F]).permutation(len(corpus))
    return corpus.select(np.sort(order[number:])), corpus.select(np.sort(order[:number]))


def _stops(model_name_or_path: str, encoder: ChatEncoder) -> set[int]:
    eos = encoder.tokenizer.eos_token_id
    return end_tokens(model_name_or_path) | ({eos} if isinstance(eos, int) else set())


def _vocab_size(model_name_or_path: str) -> int:
    """Return the rows of the model's embedding. A larger token id raises IndexError, or on CUDA loses the device."""
    return int(read_config(model_name_or_path).get_text_config().vocab_size)


def read_together(read: Callable[[bool], tuple[Corpus, EncodeReport]], key: str) -> tuple[Corpus, EncodeReport]:
    """Return what `read` returns here. Every rank calls this; a single process just reads.

    Rank 0 reads first, and writes the tokens. Then the first rank of every other machine does, since its cache may be
    another folder. The other ranks find what was written, or tokenise themselves.

    read: `load_split` of the same rows on every rank; receives whether this rank is the first one of its machine.
    key: the key that names the files, for errors.

    Raises what `read` raises. Raises UserError if some rank has read other rows than rank 0: they would cut the steps
    differently.
    """
    here = ranks()
    machines = here.gather(socket.gethostname())
    is_first = machines.index(machines[here.rank]) == here.rank
    found = here.rank0_first(lambda: read(True) if is_first else None)
    here.barrier()
    corpus, report = found or read(False)
    digests = here.gather(corpus.digest, long_timeout=True)
    here.broadcast_from_rank0(lambda: _check_same(digests, machines, key))
    return corpus, report


def _check_same(digests: list[str], machines: list[str], key: str) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(
                f"{key}: rank {rank} on {machines[rank]} reads other rows than rank 0 on {machines[0]}: the files "
                f"differ; give every rank the same ones"
            )
