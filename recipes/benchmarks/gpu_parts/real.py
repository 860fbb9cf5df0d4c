"""A run on real weights and real rows: SmolLM2-135M-Instruct on banking77, its losses beside the ordinary ones, and its
accuracy before and after.

The folder holds `smollm2`, banking77_train.jsonl and banking77_test.jsonl, as `gpu_wheels.py --unpack` makes them.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from banking77 import exact_match
from gpu_parts.run import Run
from gpu_parts.trainers import OTHER_ORDER, Clock, compare, reversed_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForSeq2Seq

from radixtrain import RadixCollator, share_prefixes
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import read_rows
from radixtrain.timing import seconds_of

__all__ = ["real"]

ROWS = 48  # conversations of a step: with padding they take about 50 GB


def real(run: Run, folder: Path | None, steps: int, tiny: bool, kernel: str) -> None:
    """Some steps with radixtrain beside those without it; the exact match before and after an epoch with it."""
    if folder is None:
        return run.leave_out("real", "--real names no folder with weights and rows")
    who, tokenizer = "SmolLM2 on banking77", AutoTokenizer.from_pretrained(folder / "smollm2")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    num_rows, num_tests, steps = (2, 4, 1) if tiny else (ROWS, None, steps)
    with tempfile.TemporaryDirectory() as output:
        chats = ChatEncoder(tokenizer).encode_all(read_rows(folder / "banking77_train.jsonl"))
        encoded = islice(chats, num_rows * steps if tiny else None)
        rows = [_lists(sample, 64 if tiny else 0) for samples in encoded for sample in samples]
        trainer, model = partial(_trainer, run, output, rows, num_rows), partial(_model, run, folder)
        shared = partial(share_prefixes, attention="cascade", kernel=kernel)
        tokens = sum(len(row["input_ids"]) for row in rows) * num_rows // len(rows)  # of a step, on average
        arms = _arms(model, shared, tokenizer, partial(trainer, max_steps=steps))
        compare(run, who, tokens, arms, run.seconds_left / 2)
        trained, test = shared(model()), folder / "banking77_test.jsonl"
        run.found("real", f"{who}, before", exact_match=exact_match(trained, tokenizer, test, num_tests))
        epoch = trainer(trained.train(), RadixCollator(), **{"max_steps": 1} if tiny else {"num_train_epochs": 1})
        epoch.add_callback(Clock(run.device, time.perf_counter() + 0.8 * run.seconds_left))
        seconds = seconds_of(epoch.train, run.device)
        match = exact_match(trained, tokenizer, test, num_tests)
        run.found("real", f"{who}, after", exact_match=match, seconds=seconds, steps=epoch.state.global_step)
    return None


def _lists(sample: TokenRow, most: int) -> dict[str, list[int]]:
    """A row as a data set would give it, the ordinary collator is slow with arrays. most: last tokens; 0: all."""
    return {name: np.asarray(getattr(sample, name))[-most:].tolist() for name in ("input_ids", "labels")}


def _arms(
    model: Callable[[], Any], shared: partial[Any], tokenizer: Any, trainer: Callable[..., Trainer]
) -> dict[str, Callable[[], Trainer]]:
    padded = DataCollatorForSeq2Seq(tokenizer)
    return {
        "padded": lambda: trainer(model(), padded),
        f"radixtrain {'/'.join(shared.keywords.values())}": lambda: trainer(shared(model()), RadixCollator()),
        OTHER_ORDER: lambda: trainer(model(), reversed_rows(padded)),
    }


def _trainer(
    run: Run, output: str, rows: list[Any], num_rows: int, model: Any, collate: Callable[..., Any], **flags: Any
) -> Trainer:
    arguments = TrainingArguments(
        **{"output_dir": output, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        **{"per_device_train_batch_size": num_rows, "learning_rate": 2e-4, "logging_steps": 1, "seed": 0},
        **{"bf16": run.device.type == "cuda", "use_cpu": run.device.type == "cpu", "remove_unused_columns": False},
        **{"accelerator_config": {"non_blocking": True}, **flags},
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)


def _model(run: Run, folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "smollm2", dtype=torch.float32).to(run.device).train()
