"""`StepData`: rows of files -> tokens -> optimizer steps, without a trainer.

The rows of a split are tokenised once per machine, and are the same on every rank.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from radixtrain.collators.prefix_sampler import GroupedOrder
from radixtrain.collators.steps import StepCollator
from radixtrain.data.cache import tokenized
from radixtrain.data.chat import ChatEncoder, UnlabelledEncoder
from radixtrain.data.files.sources import TRAIN_FILE, as_sources, open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.data.steps import StepSampler, epoch_size, features_of, grouped_order
from radixtrain.data.template import warn_of_mistakes, writes_date
from radixtrain.data.tokens.store import Corpus, Part, distinct_turns, last_turns
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.config import end_tokens, read_config
from radixtrain.settings.fields import value_of
from radixtrain.settings.sections import DataSettings, Files
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROWS_LOOKED_AT = 32  # for mistakes


def encoder_of(settings: Any, unlabelled: bool = False) -> ChatEncoder:
    """Make the encoder that renders and tokenises the rows. settings: of an `SFTData`."""
    if settings.model_name_or_path is None:
        raise UserError("data.model_name_or_path is missing: name the model whose tokenizer reads the rows")
    tokenizer = load_tokenizer(settings.model_name_or_path, settings.chat_template_path)
    return (UnlabelledEncoder if unlabelled else ChatEncoder)(
        tokenizer,
        vocab_size=int(read_config(settings.model_name_or_path).get_text_config().vocab_size),  # rows of the embedding
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


def load_split(files: Any, settings: Any, key: str, unlabelled: bool = False) -> tuple[Corpus, EncodeReport]:
    """Load the conversations of a split, and report what happened to its rows.

    files: what the configuration names: a path, or a list of paths and of sources with a weight.
    settings: of an `SFTData`.
    key: the key that names the files, for errors.

    Raises UserError or DataError as `tokenized` does.
    """
    encoder = encoder_of(settings, unlabelled)
    report = EncodeReport()
    parts: list[Part] = []
    sources = as_sources(files, settings.columns, key)
    if key == TRAIN_FILE and not unlabelled:
        rows = [*islice(chain.from_iterable(open_rows(source) for source in sources), ROWS_LOOKED_AT)]
        warn_of_mistakes(encoder, rows, _stops(settings.model_name_or_path, encoder))
    for source in sources:
        found = tokenized(source, encoder, settings)
        report.add(found.report)
        part = Part(name=source.label, conversations=found.store, weight=source.weight, digest=found.digest)
        parts.append(_trained_turns(part, settings.train_on) if key == TRAIN_FILE and not unlabelled else part)
    corpus = Corpus(parts)
    size = len(corpus) if corpus.weights is None else epoch_size(corpus.weights)
    if not size and len(corpus):
        raise UserError(f"{key}: with these weights no conversation is left in an epoch; raise one of them")
    return corpus, report


def _trained_turns(part: Part, train_on: str) -> Part:
    """Select the turns of a source that are trained; one line in the log if some are not."""
    if train_on == "every_turn":
        return part
    chosen_by, reason = {
        "last_turn": (last_turns, "are not the last of their row"),
        "distinct_turns": (distinct_turns, "occur in another row too, after the same messages"),
    }[train_on]
    is_chosen = chosen_by(part.conversations)
    num_left_out = len(is_chosen) - int(is_chosen.sum())
    if not num_left_out:
        return part
    counts = f"{num_left_out:,} of {len(is_chosen):,} turns"
    logger.warning("%s: %s %s: they are left out (data.train_on: %s)", part.name, counts, reason, train_on)
    digest = xxhash.xxh3_128(is_chosen.tobytes()).hexdigest()
    return replace(part, conversations=part.conversations.select(is_chosen), digest=f"{part.digest} {digest}")


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


def read_together(read: Callable[[], tuple[Corpus, EncodeReport]], key: str) -> tuple[Corpus, EncodeReport]:
    """Return what `read` returns here. Every rank calls this; a single process just reads.

    Rank 0 reads first, and writes the tokens. Then the first rank of every other machine does, since its cache may be
    another folder. The other ranks find what was written, or tokenise themselves.

    read: `load_split` of the same rows on every rank.
    key: the key that names the files, for errors.

    Raises what `read` raises. Raises UserError if some rank has read other rows than rank 0: they would cut the steps
    differently.
    """
    here = ranks()
    machines = here.gather(socket.gethostname())
    is_first = machines.index(machines[here.rank]) == here.rank
    found = here.rank0_first(lambda: read() if is_first else None)
    here.barrier()
    corpus, report = found or read()
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


class StepData:
    """Chats, prompt/completion pairs, plain text or tokens from files or data sets of many kinds.

    Rows are tokenised in parallel, once: the tokens are kept on disk, where later runs find them. `report` and
    `inspect` need no more than this; `SFTData` has the loaders of a training run.
    """

    def __init__(self, settings: DataSettings):
        self.settings = settings
        self.conversations: dict[str, Corpus] = {}
        self.reports: dict[str, EncodeReport] = {}
        """What happened to the rows of each split; with `val_size`, before the validation rows were taken out."""

    def setup(self, stage: str) -> None:
        """Read, render and tokenise what this stage needs, unless that has been done."""
        needed = {"validate": "validation", "test": "test", "predict": "predict"}.get(stage)
        is_taken_out = stage == "validate" and self.settings.val_size and not self._file("validation")
        wanted = [needed] if needed and not is_taken_out else ["train", "validation"]
        for split in wanted:
            if split not in self.conversations and self._file(split):
                unlabelled = split == "predict" and self.settings.predict_prompts
                key = f"data.{split}_file"
                read = partial(load_split, self._file(split), self.settings, key, unlabelled)
                self.conversations[split], self.reports[split] = read_together(read, key)
        if "train" in wanted and "train" not in self.conversations:
            raise UserError("data.train_file is missing: name the file to train on")
        if "validation" in wanted and "validation" not in self.conversations and self.settings.val_size:
            self.conversations["train"], self.conversations["validation"] = take_validation(
                self.conversations["train"], self.settings.val_size, self.settings.seed
            )
        if needed and needed not in self.conversations:
            raise UserError(f"data.{needed}_file is missing: name the file to {stage} on")

    def longest(self) -> int:
        """Return the number of tokens of the longest sequence that was read."""
        return max(int(corpus.lengths.max(initial=0)) for corpus in self.conversations.values())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, with the chat template of the configuration."""
        assert self.settings.model_name_or_path is not None
        return load_tokenizer(self.settings.model_name_or_path, self.settings.chat_template_path)

    def encoder(self, unlabelled: bool = False) -> ChatEncoder:
        """Make the encoder of the rows; unlabelled: of `predict`, for rows without answers."""
        return encoder_of(self.settings, unlabelled)

    @property
    def steps_per_epoch(self) -> int:
        """Count the optimizer steps in an epoch of training."""
        return len(self.sampler_of("train"))

    def step_collator(self, merge_labels: bool = True) -> StepCollator:
        """Make the collator of a whole optimizer step of sequences.

        With several ranks, each calls it. In training each rank collates only its share, see `_share_collator`.

        merge_labels: False for `predict`, which lists every label once.
        """
        settings = self.settings
        return StepCollator(
            dedup=settings.dedup,
            max_tokens=settings.max_tokens,
            merge_labels=merge_labels,
            min_shared_tokens=settings.min_shared_tokens,
        )

    def features_of_step(self, index: int) -> list[dict[str, Any]]:
        """Return the sequences of a training step of the first epoch, before they are cut and collated."""
        indices = self.train_steps()[index]
        return features_of(sample for each in indices for sample in self.conversations["train"][each])

    def train_steps(self) -> list[list[int]]:
        """List the conversations of each optimizer step of the first epoch, by index."""
        return list(self.sampler_of("train"))

    def train_order(self) -> IntArray:
        """Return the conversations of the first epoch, by index, in the order in which they are cut into steps."""
        return self.sampler_of("train").order()

    @cached_property
    def _grouping(self) -> GroupedOrder | None:
        """Return the order that draws training steps; None for a plain shuffle. Reads every conversation once."""
        settings = self.settings
        order = grouped_order(self.conversations["train"], settings.batch_size, settings.group_by_prefix, settings.seed)
        if order is not None and settings.group_by_prefix is True:
            logger.info("data.group_by_prefix: %d conversations of a prompt stay together in a step", order.together)
        return order

    def sampler_of(self, split: str) -> StepSampler:
        """Make the sampler of a split. Only training steps are shuffled, grouped and weighted."""
        corpus, settings = self.conversations[split], self.settings
        if split != "train":
            return StepSampler(len(corpus), settings.batch_size, shuffle=False, seed=settings.seed)
        return StepSampler(
            len(corpus),
            settings.batch_size,
            settings.shuffle_dataset,
            settings.seed,
            self._grouping,
            corpus.weights,
        )

    def _file(self, split: str) -> Files:
        if split == "predict":
            return self.settings.predict_file or self.settings.test_file or ""
        return value_of(self.settings, f"{split}_file") or ""
