"""`StepData`: rows of files -> tokens -> optimizer steps, without a trainer."""

from __future__ import annotations

import logging
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from radixtrain.collators.prefix_sampler import GroupedOrder
from radixtrain.collators.steps import StepCollator
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.sample import EncodeReport
from radixtrain.data.splits import encoder_of, load_split, read_together, take_validation
from radixtrain.data.steps import StepSampler, features_of, grouped_order
from radixtrain.data.tokens.corpus import Corpus
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.settings.data import DataSettings, Files
from radixtrain.settings.fields import value_of
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class StepData:
    """Chats, prompt/completion pairs, plain text or tokens from files, folders or data sets of many kinds.

    Rows are tokenised in parallel, once: the tokens are kept on disk, where later runs find them. `report` and
    `inspect` need no more than this; `SFTData` hands the steps to Lightning.
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
            pad_to_multiple_of=settings.pad_to_multiple_of,
            shared_targets=settings.shared_targets if merge_labels else "every",
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
