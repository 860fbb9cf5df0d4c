"""`SFTData`: optimizer steps for `fit` and for Lightning's trainer. The plans are built in the DataLoader workers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import lightning as L

from radixtrain.collators.steps import StepCollator
from radixtrain.data.prompts import Prompt, PromptDataset, Prompts, choose_prompts
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import StepDataset, StepLoader
from radixtrain.data.tokens.store import Corpus
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.settings.sections import DataSettings, Files


class SFTData(StepData, L.LightningDataModule):
    """A `StepData` with its loaders, and its state in a checkpoint of Lightning's trainer."""

    hparams: Any  # Lightning's own type has no attributes

    def __init__(self, train_file: Files = None, **settings: Any):
        """Take fields of `DataSettings`, which raises UserError for any other."""
        L.LightningDataModule.__init__(self)
        self.save_hyperparameters(vars(DataSettings(train_file, **settings)))
        StepData.__init__(self, self.hparams)

    def train_dataloader(self) -> StepLoader:
        return self._loader("train")

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        return self._loader("validation") if "validation" in self.conversations else []

    def test_dataloader(self) -> StepLoader:
        return self._loader("test")

    def predict_dataloader(self) -> StepLoader:
        """Load steps; with `predict_prompts` the prompts of as many conversations."""
        return self._loader("predict", merge_labels=False)

    def validation_prompts(self, num_samples: int | None = None) -> Prompts:
        """Return the validation rows up to their last answer; all, or `num_samples` that the seed draws."""
        hparams = self.hparams
        cut_length = hparams.max_length if hparams.excess_length_strategy == "truncate" else None
        return choose_prompts(self.conversations["validation"], num_samples, hparams.seed, cut_length)

    def first_prompt(self) -> list[Prompt]:
        """Return the prompt of the first row of `predict`, in a list."""
        return PromptDataset(self.conversations["predict"])[[0]]

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the steps depends on, and a digest of the samples; part of every checkpoint."""
        sizes: dict[str, Any] = {name: int(self.hparams[name]) for name in ("batch_size", "seed", "shuffle_dataset")}
        sizes["group_by_prefix"] = str(self.hparams.group_by_prefix).lower()  # true is not 1
        corpus = self.conversations.get("train")
        return {"conversations": len(corpus or ()), **sizes, "digest": corpus.digest if corpus else ""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UserError if the checkpoint belongs to other data: its place in their order would mean nothing here.

        Another digest is that of other rows, or of other tokens or labels of them.
        """
        if "train" not in self.conversations:
            return
        current = self.state_dict()
        changed = [f"{name} was {state.get(name)} and is {x}" for name, x in current.items() if state.get(name) != x]
        if changed:
            raise UserError(
                f"ckpt_path: the checkpoint belongs to other steps or rows: {', '.join(changed)}; give the files and "
                f"the settings of data of the run, as its fit.yaml has them"
            )

    def _loader(self, split: str, merge_labels: bool = True) -> StepLoader:
        workers, corpus = self.hparams.dataloader_num_workers, self.conversations[split]
        if merge_labels and self.trainer is not None:
            check_weights_kept(corpus, str(self.trainer.precision))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # all is tokenised; its threads do not survive a fork
        is_prompts = split == "predict" and self.hparams.predict_prompts
        return StepLoader(
            PromptDataset(corpus) if is_prompts else StepDataset(corpus, self._share_collator(merge_labels)),
            self.sampler_of(split),
            num_workers=workers,
            persistent_workers=workers > 0 and split == "train",
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def _share_collator(self, merge_labels: bool) -> StepCollator:
        """Make the collator of this rank's share of a step. Every rank draws the same steps and reads all sequences."""
        here, collator = ranks(), self.step_collator(merge_labels)
        sp_size = here.sp_size if merge_labels else 1
        return replace(collator, rank=here.rank, num_ranks=here.size, sp_size=sp_size)


def check_weights_kept(corpus: Corpus, precision: str) -> None:
    """Raise UserError that names the first row whose loss weights would be rounded. precision: the trainer's."""
    if precision != "bf16-true":
        return
    weighted = (sample for row in corpus for sample in row if sample.loss_weights is not None)
    sample = next(weighted, None)
    if sample is not None:
        raise UserError(
            f"{sample.where}: trainer.precision bf16-true would round its loss weights to 3 digits; set "
            f"trainer.precision: 32-true and model.dtype: bfloat16, which computes the same"
        )
