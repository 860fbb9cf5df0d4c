"""`SFTData`: chat files -> optimizer steps. The plans are built in the DataLoader workers."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import numpy as np
from transformers import AutoConfig

from radixtrain.collators.steps import StepCollator
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import read_rows
from radixtrain.data.report import EncodeReport
from radixtrain.data.sample import Sample
from radixtrain.data.steps import StepDataset, StepLoader, StepSampler, features_of
from radixtrain.data.tokenization import load_tokenizer
from radixtrain.data.unlabelled import UnlabelledEncoder
from radixtrain.errors import DataError, UserError, first_line
from radixtrain.tree.cost_model import StepCost

__all__ = ["SFTData"]

logger = logging.getLogger(__name__)
Conversations = list[list[Sample]]


class SFTData(L.LightningDataModule):
    """Chats, prompt/completion pairs, plain text or tokens from JSONL, JSON, parquet or a saved data set.

    Args:
        train_file: rows to train on. `.jsonl`, `.json`, `.parquet`, or a folder written by `Dataset.save_to_disk`.
        validation_file: rows for the validation loss. Without it, see `val_size`.
        test_file: rows for `test` and, without `predict_file`, for `predict`.
        predict_file: rows for `predict`.
        val_size: rows taken out of `train_file` for validation if there is no `validation_file`: a share below 1, or a
            number of conversations.
        batch_size: conversations in one optimizer step. Its gradient does not depend on how the step is cut.
        max_tokens: unique tokens in one micro-batch, which is what memory is spent on.
        max_length: longest sample, in tokens; none is cut silently, see `excess_length_strategy`.
        excess_length_strategy: what is done with a longer one: raise, drop, or truncate (keeps the start).
        on_bad_row: what is done with a row that cannot be used: raise stops with `file:line: reason`, skip reports and
            goes on.
        assistant_only_loss: loss on the assistant's turns only; otherwise on every token of a chat.
        completion_only_loss: loss on the completion only, in rows that have one.
        split_turns: one sample per assistant turn, rendered exactly as the model will see it at inference.
        chat_template_path: a Jinja file in place of the tokenizer's own chat template.
        chat_template_kwargs: variables for the template, for instance `enable_thinking: false`.
        shuffle_dataset: draw the steps of every epoch in a new order, seeded.
        seed: of that order and of `val_size`; on the command line it is `seed_everything`, and 42 if that
            is true or false and not a number.
        min_shared_tokens: a branch point that saves fewer tokens than this gets no branch; auto chooses for each batch,
            together with the attention strategy, by a calibration of this machine that is measured once.
        shared_targets: what a label counts that several sequences of a step share. every counts it once for each of
            them, as an ordinary trainer does; once counts it once, with the mean of their loss weights.
        pad_to_multiple_of: pad the unique tokens of a micro-batch to a multiple of this many.
        dataloader_num_workers: processes that collate and build plans ahead of the training step.
        model_name_or_path: whose tokenizer and vocabulary; on the command line it is the model's.
        dedup: False for the ordinary padded baseline on the same batches.
        predict_unlabelled: rows for `predict` need no answer, and each is one sequence; on the command line it is true
            if no score of `model.scores` is of labelled tokens.
    """

    hparams: Any  # Lightning's own type knows no attribute

    def __init__(
        self,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        val_size: float = 0.0,
        batch_size: int = 32,
        max_tokens: int = 16384,
        max_length: int | None = 4096,
        excess_length_strategy: Literal["raise", "drop", "truncate"] = "raise",
        on_bad_row: Literal["raise", "skip"] = "raise",
        assistant_only_loss: bool = True,
        completion_only_loss: bool = True,
        split_turns: bool = True,
        chat_template_path: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        shuffle_dataset: bool = True,
        seed: int = 42,
        min_shared_tokens: int | Literal["auto"] = "auto",
        shared_targets: Literal["every", "once"] = "every",
        pad_to_multiple_of: int | None = None,
        dataloader_num_workers: int = 1,
        model_name_or_path: str | None = None,
        dedup: bool = True,
        predict_unlabelled: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.conversations: dict[str, Conversations] = {}
        self.step_cost: Callable[[], StepCost | None] | None = None
        """What `min_shared_tokens: auto` chooses by; a `RadixModule` sets it. None: every branch is taken."""
        self._check_sizes()

    def setup(self, stage: str) -> None:
        """Read, render and tokenise what this stage needs, unless that has been done."""
        wanted = {
            "fit": ("train", "validation"),
            "verify": ("train", "validation"),
            "validate": ("validation",),
            "test": ("test",),
            "predict": ("predict",),
        }
        for split in wanted[stage]:
            if split not in self.conversations and self._file(split):
                unlabelled = split == "predict" and self.hparams.predict_unlabelled
                self.conversations[split] = self._encode(self._file(split), unlabelled)
        if "train" in wanted[stage] and "train" not in self.conversations:
            raise UserError("data.train_file is missing: name the file to train on")
        if "validation" in wanted[stage] and "validation" not in self.conversations and self.hparams.val_size:
            self._split_validation()
        needed = {"validate": "validation", "test": "test", "predict": "predict"}.get(stage)
        if needed and needed not in self.conversations:
            raise UserError(f"data.{needed}_file is missing: name the file to {stage} on")

    def train_dataloader(self) -> StepLoader:
        return self._loader("train", shuffle=self.hparams.shuffle_dataset)

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        return self._loader("validation") if "validation" in self.conversations else []

    def test_dataloader(self) -> StepLoader:
        return self._loader("test")

    def predict_dataloader(self) -> StepLoader:
        return self._loader("predict", merge_labels=False)

    def state_dict(self) -> dict[str, int]:
        """What the order of the steps depends on, and a checksum of the rows; part of every checkpoint."""
        rows = self.conversations.get("train", [])
        tokens = b"".join(sample.input_ids.tobytes() for samples in rows for sample in samples)
        sizes = {name: int(self.hparams[name]) for name in ("batch_size", "seed", "shuffle_dataset")}
        return {"conversations": len(rows), **sizes, "rows": zlib.crc32(tokens)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """UserError if the checkpoint belongs to other data: its place in their order would mean nothing here."""
        if "train" not in self.conversations:
            return
        here = self.state_dict()
        changed = [f"{name} was {state[name]} and is {here[name]}" for name in here if state.get(name) != here[name]]
        if changed:
            named = ", ".join(changed)
            raise UserError(
                f"ckpt_path: the checkpoint belongs to other steps: {named}; resume with the data of the run"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch of training."""
        return -(-len(self.conversations["train"]) // self.hparams.batch_size)

    def step_collator(self, merge_labels: bool = True) -> StepCollator:
        """What makes an optimizer step of sequences. Calls `step_cost`, which may calibrate.

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
        )

    def features_of_step(self, index: int) -> list[dict[str, Any]]:
        """The sequences of an optimizer step of the first epoch of training, before they are cut and collated."""
        indices = list(self._sampler("train", self.hparams.shuffle_dataset))[index]
        return features_of(sample for each in indices for sample in self.conversations["train"][each])

    def _sampler(self, split: str, shuffle: bool) -> StepSampler:
        return StepSampler(len(self.conversations[split]), self.hparams.batch_size, shuffle, self.hparams.seed)

    def _loader(self, split: str, shuffle: bool = False, merge_labels: bool = True) -> StepLoader:
        if merge_labels:
            self._check_weights(split)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # all is tokenised; its threads do not survive a fork
        workers = self.hparams.dataloader_num_workers
        return StepLoader(
            StepDataset(self.conversations[split], self.step_collator(merge_labels)),
            self._sampler(split, shuffle),
            num_workers=workers,
            persistent_workers=workers > 0 and split == "train",
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def _encode(self, path: str, unlabelled: bool) -> Conversations:
        hparams = self.hparams
        if hparams.model_name_or_path is None:
            raise UserError("data.model_name_or_path is missing: whose tokenizer reads the rows?")
        tokenizer = load_tokenizer(hparams.model_name_or_path, hparams.chat_template_path)
        encoder = (UnlabelledEncoder if unlabelled else ChatEncoder)(
            tokenizer,
            vocab_size=_vocab_size(hparams.model_name_or_path),
            max_length=hparams.max_length,
            assistant_only_loss=hparams.assistant_only_loss,
            completion_only_loss=hparams.completion_only_loss,
            split_turns=hparams.split_turns,
            excess_length_strategy=hparams.excess_length_strategy,
            chat_template_kwargs=hparams.chat_template_kwargs or {},
        )
        on_error = _report_bad_row if hparams.on_bad_row == "skip" else None
        report = EncodeReport()
        encoded = encoder.encode_all(read_rows(path, on_error), on_error, report)
        conversations = [samples for samples in encoded if samples]
        logger.info("%s: %s", path, report)
        if not conversations:
            raise UserError(f"{path}: none of its {report.num_rows} rows can be used; {report}")
        return conversations

    def _split_validation(self) -> None:
        train, size = self.conversations["train"], self.hparams.val_size
        num_validation = round(size * len(train)) if size < 1 else int(size)
        if not 0 < num_validation < len(train):
            raise UserError(
                f"data.val_size {size} takes {num_validation} of {len(train)} conversations, which leaves one side "
                f"empty"
            )
        order = np.random.default_rng([self.hparams.seed, 0x5F]).permutation(len(train)).tolist()
        chosen = set(order[:num_validation])
        self.conversations["validation"] = [train[index] for index in sorted(chosen)]
        self.conversations["train"] = [row for index, row in enumerate(train) if index not in chosen]

    def _check_weights(self, split: str) -> None:
        """Loss weights are float32, but a precision of 16 bits converts every float of a batch."""
        weighted = (sample for row in self.conversations[split] for sample in row if sample.loss_weights is not None)
        sample = next(weighted, None)
        if sample is not None and self.trainer is not None and str(self.trainer.precision) == "bf16-true":
            raise UserError(
                f"{sample.where}: trainer.precision bf16-true would round its loss weights to 3 digits; set "
                f"trainer.precision: 32-true and model.dtype: bfloat16, which computes the same"
            )

    def _file(self, split: str) -> str:
        if split == "predict":
            return self.hparams.predict_file or self.hparams.test_file or ""
        return self.hparams[f"{split}_file"] or ""

    def _check_sizes(self) -> None:
        hparams = self.hparams
        smallest = {"batch_size": 1, "max_tokens": 1, "min_shared_tokens": 1, "dataloader_num_workers": 0}
        for name, least in smallest.items():
            if hparams[name] != "auto" and hparams[name] < least:
                raise UserError(f"data.{name} must be at least {least}, got {hparams[name]}")
        if hparams.val_size < 0:
            raise UserError(
                f"data.val_size must be a share below 1 or a number of conversations, got {hparams.val_size}"
            )
        if hparams.max_length is not None and hparams.max_length > hparams.max_tokens:
            raise UserError(
                f"data.max_length {hparams.max_length} exceeds data.max_tokens {hparams.max_tokens}: a sequence that "
                f"long has no micro-batch to go into; raise max_tokens or lower max_length"
            )


def _vocab_size(model_name_or_path: str) -> int:
    """Rows of the model's embedding. A token id outside of it raises IndexError, and on CUDA the device is lost."""
    try:
        config = AutoConfig.from_pretrained(model_name_or_path)
    except (OSError, ValueError) as error:
        raise UserError(f"{model_name_or_path}: cannot read the model's config.json: {first_line(error)}") from None
    return int(config.get_text_config().vocab_size)


def _report_bad_row(error: DataError) -> None:
    logger.warning("skipped %s", error)
