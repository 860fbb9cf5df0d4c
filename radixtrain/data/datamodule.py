"""`SFTData`: chat files -> optimizer steps. The plans are built in the DataLoader workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lightning as L

from radixtrain.collators.prefix_sampler import GroupedOrder
from radixtrain.collators.steps import StepCollator
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.grouping import grouped_order
from radixtrain.data.prompts import Prompt, PromptDataset, Prompts, choose_prompts
from radixtrain.data.sample import EncodeReport
from radixtrain.data.splits import encoder_of, load_split, read_together, take_validation
from radixtrain.data.steps import StepDataset, StepLoader, StepSampler, features_of
from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.redaction import masked
from radixtrain.settings.data import DataSettings, Files
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.cost_model import StepCost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class SharingAcross(NamedTuple):
    """What a model and its strategy say of prefixes that are kept from one micro-batch to the next.

    refused: why they cannot be; None if they can. holds_graph: of `StepCollator`, in training and in evaluations, which
        have no graph.
    """

    refused: str | None
    holds_graph: bool | Literal["auto"]
    holds_graph_evaluating: bool


class SFTData(L.LightningDataModule):
    """Chats, prompt/completion pairs, plain text or tokens from files, folders or data sets of many kinds.

    Rows are tokenised in parallel, once: the tokens are kept on disk, where later runs find them.
    """

    hparams: Any  # Lightning's own type knows no attribute

    def __init__(self, train_file: Files = None, **settings: Any):
        """train_file, settings: fields of `DataSettings`, which raises UserError for what it does not take."""
        super().__init__()
        self.save_hyperparameters(vars(DataSettings(train_file, **settings)))
        self.conversations: dict[str, Corpus] = {}
        self.reports: dict[str, EncodeReport] = {}
        """What became of the rows of each split; of `val_size`, before it was taken out."""
        self.step_cost: Callable[[], StepCost | None] | None = None
        """What `min_shared_tokens: auto` chooses by; a `RadixModule` sets it. None: every branch is taken."""
        self.across: Callable[[], SharingAcross] | None = None
        """What `share_across_micro_batches` depends on; a `RadixModule` sets it. None: nothing is shared across."""

    @property
    def hparams_initial(self) -> Any:
        """What Lightning gives to every logger: the settings without secrets. `hparams` has the real ones."""
        settings = super().hparams_initial
        settings.update(masked(settings))
        return settings

    def setup(self, stage: str) -> None:
        """Read, render and tokenise what this stage needs, unless that has been done."""
        needed = {"validate": "validation", "test": "test", "predict": "predict"}.get(stage)
        is_taken_out = stage == "validate" and self.hparams.val_size and not self._file("validation")
        wanted = [needed] if needed and not is_taken_out else ["train", "validation"]
        for split in wanted:
            if split not in self.conversations and self._file(split):
                unlabelled = split == "predict" and (self.hparams.predict_unlabelled or self.hparams.predict_prompts)
                key = f"data.{split}_file"
                read = partial(load_split, self._file(split), self.hparams, key, unlabelled)
                self.conversations[split], self.reports[split] = read_together(read, key)
        if "train" in wanted and "train" not in self.conversations:
            raise UserError("data.train_file is missing: name the file to train on")
        if "validation" in wanted and "validation" not in self.conversations and self.hparams.val_size:
            self.conversations["train"], self.conversations["validation"] = take_validation(
                self.conversations["train"], self.hparams.val_size, self.hparams.seed
            )
        if needed and needed not in self.conversations:
            raise UserError(f"data.{needed}_file is missing: name the file to {stage} on")

    def train_dataloader(self) -> StepLoader:
        return self._loader("train")

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        return self._loader("validation") if "validation" in self.conversations else []

    def test_dataloader(self) -> StepLoader:
        return self._loader("test")

    def predict_dataloader(self) -> StepLoader:
        """Steps; with `predict_prompts` the prompts of as many conversations."""
        return self._loader("predict", merge_labels=False)

    def validation_prompts(self, num_samples: int | None = None) -> Prompts:
        """The rows of the validation up to their last answer; all, or `num_samples` that the seed draws."""
        hparams = self.hparams
        cut_length = hparams.max_length if hparams.excess_length_strategy == "truncate" else None
        return choose_prompts(self.conversations["validation"], num_samples, hparams.seed, cut_length)

    def first_prompt(self) -> list[Prompt]:
        """That of the first row of `predict`, in a list."""
        return PromptDataset(self.conversations["predict"])[[0]]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """With the chat template of the configuration."""
        assert self.hparams.model_name_or_path is not None
        return load_tokenizer(self.hparams.model_name_or_path, self.hparams.chat_template_path)

    def encoder(self, unlabelled: bool = False) -> ChatEncoder:
        """What renders and tokenises the rows; unlabelled: of `predict`, for rows without answers."""
        return encoder_of(self.hparams, unlabelled)

    def state_dict(self) -> dict[str, Any]:
        """What the order of the steps depends on, and a digest of the samples; part of every checkpoint."""
        sizes: dict[str, Any] = {name: int(self.hparams[name]) for name in ("batch_size", "seed", "shuffle_dataset")}
        sizes["group_by_prefix"] = str(self.hparams.group_by_prefix).lower()  # true is not 1
        corpus = self.conversations.get("train")
        return {"conversations": len(corpus or ()), **sizes, "digest": corpus.digest if corpus else ""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError if the checkpoint belongs to other data: its place in their order would mean nothing here."""
        if "train" not in self.conversations:
            return
        current = self.state_dict()
        changed = [f"{name} was {state.get(name)} and is {x}" for name, x in current.items() if state.get(name) != x]
        if changed:
            raise UserError(
                f"ckpt_path: the checkpoint belongs to other steps: {', '.join(changed)}; give the data settings of "
                f"the run"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch of training."""
        return len(self._sampler("train"))

    def step_collator(self, merge_labels: bool = True) -> StepCollator:
        """What makes a whole optimizer step of sequences. Calls `step_cost`.

        With several ranks, each calls it. In training each rank collates only its share, see `_share_collator`.

        merge_labels: False for `predict`, which lists every label once.
        """
        hparams = self.hparams
        is_auto = hparams.min_shared_tokens == "auto"
        return StepCollator(
            dedup=hparams.dedup,
            max_tokens=hparams.max_tokens,
            merge_labels=merge_labels,
            min_shared_tokens=1 if is_auto else hparams.min_shared_tokens,
            pad_to_multiple_of=hparams.pad_to_multiple_of,
            shared_targets=hparams.shared_targets if merge_labels else "every",
            step_cost=self.step_cost() if is_auto and hparams.dedup and self.step_cost else None,
            **(self._sharing_across() if hparams.dedup and merge_labels and self.across else {}),
        )

    def _sharing_across(self) -> dict[str, Any]:
        """Arguments of a `StepCollator`. UserError if sharing across micro-batches is needed and refused."""
        assert self.across is not None
        refused, holds_graph, _ = self.across()
        wanted, max_tokens = self.hparams.share_across_micro_batches, self.hparams.max_tokens * ranks().sp_size
        if refused is None:
            return {"share_across_micro_batches": wanted, "holds_graph": holds_graph}
        if wanted is True:
            raise UserError(f"data.share_across_micro_batches: {refused}; set it to false")
        if self.hparams.max_length is not None and self.hparams.max_length > max_tokens:
            raise UserError(f"data.max_length exceeds data.max_tokens, and {refused}; raise max_tokens")
        return {}

    def features_of_step(self, index: int) -> list[dict[str, Any]]:
        """The sequences of an optimizer step of the first epoch of training, before they are cut and collated."""
        indices = self.train_steps()[index]
        return features_of(sample for each in indices for sample in self.conversations["train"][each])

    def train_steps(self) -> list[list[int]]:
        """The conversations of each optimizer step of the first epoch, by index."""
        return list(self._sampler("train"))

    def train_order(self) -> IntArray:
        """The conversations of the first epoch, by index, in the order in which they are cut into steps."""
        return self._sampler("train").order()

    @cached_property
    def _grouping(self) -> GroupedOrder | None:
        """What draws the training steps; None for a plain shuffle. Reads every conversation once."""
        sizes = {name: self.hparams[name] for name in ("batch_size", "group_by_prefix", "seed")}
        order = grouped_order(self.conversations["train"], **sizes)
        if order is not None and self.hparams.group_by_prefix is True:
            logger.info("data.group_by_prefix: %d conversations of a prompt stay together in a step", order.together)
        return order

    def _sampler(self, split: str) -> StepSampler:
        """Only training steps are shuffled, grouped and weighted."""
        corpus, hparams = self.conversations[split], self.hparams
        if split != "train":
            return StepSampler(len(corpus), hparams.batch_size, shuffle=False, seed=hparams.seed)
        trainer: Any = self.trainer
        return StepSampler(
            len(corpus),
            hparams.batch_size,
            hparams.shuffle_dataset,
            hparams.seed,
            self._grouping,
            corpus.weights,
            is_fixed=bool(trainer and trainer.overfit_batches),
        )

    def _loader(self, split: str, merge_labels: bool = True) -> StepLoader:
        workers, corpus = self.hparams.dataloader_num_workers, self.conversations[split]
        if merge_labels and self.trainer is not None:
            check_weights_kept(corpus, str(self.trainer.precision))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # all is tokenised; its threads do not survive a fork
        is_prompts = split == "predict" and self.hparams.predict_prompts
        return StepLoader(
            PromptDataset(corpus) if is_prompts else StepDataset(corpus, self._share_collator(split, merge_labels)),
            self._sampler(split),
            num_workers=workers,
            persistent_workers=workers > 0 and split == "train",
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def _share_collator(self, split: str, merge_labels: bool) -> StepCollator:
        """What makes this rank's share of a step. Every rank draws the same steps, and reads all their sequences."""
        here, collator = ranks(), self.step_collator(merge_labels)
        sp_size = here.sp_size if merge_labels else 1
        if split != "train" and self.across is not None:
            collator = replace(collator, holds_graph=self.across().holds_graph_evaluating)
        return replace(collator, rank=here.rank, num_ranks=here.size, sp_size=sp_size)

    def _file(self, split: str) -> Files:
        if split == "predict":
            return self.hparams.predict_file or self.hparams.test_file or ""
        return self.hparams[f"{split}_file"] or ""


def check_weights_kept(corpus: Corpus, precision: str) -> None:
    """UserError that names the first row with loss weights if they would be rounded. precision: the trainer's."""
    if precision != "bf16-true":
        return
    weighted = (sample for row in corpus for sample in row if sample.loss_weights is not None)
    sample = next(weighted, None)
    if sample is not None:
        raise UserError(
            f"{sample.where}: trainer.precision bf16-true would round its loss weights to 3 digits; set "
            f"trainer.precision: 32-true and model.dtype: bfloat16, which computes the same"
        )
