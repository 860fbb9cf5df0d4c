"""Train a tiny Qwen3 on banking77: 10,003 real customer messages after one prompt that lists 77 intents.

    python recipes/banking77.py --data_dir path/to/sft                 # train; exact match before and after
    python recipes/banking77.py --data_dir path/to/sft --compare 50    # 50 steps with and without deduplication

`--data_dir` has banking77_train.jsonl and banking77_test.jsonl, with one {"messages": [...]} per line. The model has 2
layers of width 128 and random weights; the tokenizer learns 4,096 entries from the training rows. Training uses the
ordinary command line; only the accuracy is measured here, on the model folder that it writes.

Exact match is that of greedy decoding: every token of the answer is the most probable one after the previous tokens.
"""

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from radixtrain.collators.steps import StepCollator
from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import read_rows
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.predicting_rows import inputs_of
from radixtrain.hf.share import share_prefixes
from radixtrain.tree.layout import sequences_of

CONFIG = Path(__file__).parent.parent / "configs" / "banking77.yaml"
MOST_ROWS = 20_000  # that a tokenizer is learnt from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/banking77"))
    parser.add_argument("--max_epochs", type=int, default=8)
    parser.add_argument("--compare", type=int, default=0, metavar="STEPS")
    options = parser.parse_args()
    train, test = (options.data_dir / f"banking77_{split}.jsonl" for split in ("train", "test"))
    for path in (train, test):
        if not path.is_file():
            sys.exit(f"error: no such file: {path}")
    start = options.output_dir / "start"
    if not start.exists():
        make_start(train, start)
    if options.compare:
        compare(train, start, options.output_dir, options.compare)
        return
    print(f"exact match before: {exact_match_of_folder(start, test):.1%}")
    began = time.perf_counter()
    fit(train, start, options.output_dir / "sft", f"--trainer.max_epochs={options.max_epochs}")
    print(f"{options.max_epochs} epochs, including start-up and export: {time.perf_counter() - began:.0f} s")
    print(f"exact match after: {exact_match_of_folder(options.output_dir / 'sft' / 'model', test):.1%}")


def make_start(train: Path, folder: Path, layers: int = 2, hidden: int = 128) -> None:
    """Write tokenizer and random weights. The folder appears only when it is complete."""
    tokenizer = learnt_tokenizer(train)
    partial = folder.with_name(f".{folder.name}.partial")
    for path in (partial, folder):
        shutil.rmtree(path, ignore_errors=True)
    tiny.tiny_qwen3(tokenizer, layers=layers, hidden=hidden).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def learnt_tokenizer(train: Path) -> PreTrainedTokenizerBase:
    """Train a tokenizer with 4,096 entries on the messages of the first rows."""
    rows = islice(read_rows(train), MOST_ROWS)
    return tiny.train_tokenizer(sorted({turn["content"] for row in rows for turn in row.fields["messages"]}), 4096)


def fit(train: Path, start: Path, output_dir: Path, *flags: str) -> None:
    shutil.rmtree(output_dir, ignore_errors=True)
    command = [sys.executable, "-m", "radixtrain", "fit", "--config", str(CONFIG), f"--output_dir={output_dir}"]
    paths = [f"--model.model_name_or_path={start}", f"--data.train_file={train}"]
    subprocess.run([*command, *paths, *flags], check=True)


def exact_match_of_folder(folder: Path, test: Path) -> float:
    return exact_match(share_prefixes(AutoModelForCausalLM.from_pretrained(folder)), load_tokenizer(folder), test)


@torch.no_grad()
def exact_match(model: Any, tokenizer: PreTrainedTokenizerBase, test: Path, most: int | None = None) -> float:
    """Return the share of rows whose whole answer greedy decoding would produce.

    model: prepared. most: number of rows to use, from the first; None for all.
    """
    model.eval()
    encoded = ChatEncoder(tokenizer).encode_all(read_rows(test))
    samples = [sample for samples in islice(encoded, most) for sample in samples]
    features = [{"input_ids": sample.input_ids, "labels": sample.labels} for sample in samples]
    step = StepCollator(max_tokens=16384, merge_labels=False)(features)
    wrong = 0
    step = step.to(model.device)
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        labels, tokens = batch["shift_labels"].flatten(), batch["radix"].label_indices
        hidden = backbone_of(model)(**inputs_of(batch)).last_hidden_state[0]
        best = model.lm_head(hidden).argmax(-1)[batch["radix"].prediction_rows]
        sequences = sequences_of(tokens, batch["radix"].cu_seqlens)
        missed = torch.zeros(len(members), dtype=torch.bool, device=model.device)
        missed[sequences[(best != labels) & (labels >= 0)]] = True
        wrong += int(missed.sum())
    return 1 - wrong / len(samples)


def compare(train: Path, start: Path, output_dir: Path, steps: int) -> None:
    """Train with the same seed with and without deduplication; print the losses and the time."""
    losses, rates = {}, {}
    for name, dedup in (("on", "true"), ("off", "false")):
        folder = output_dir / f"dedup-{name}"
        fit(train, start, folder, f"--dedup={dedup}", f"--trainer.max_steps={steps}", "--trainer.log_every_n_steps=1")
        with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["loss"]]
        losses[name] = [float(row["loss"]) for row in rows]
        rates[name] = [float(row["tokens_per_second"]) for row in rows]
    differences = [abs(on - off) for on, off in zip(losses["on"], losses["off"], strict=True)]
    for name, curve in losses.items():
        print(f"dedup {name}: loss {curve[0]:.4f} -> {curve[-1]:.4f}, {statistics.median(rates[name]):,.0f} tokens/s")
    print(f"largest difference of the loss in {steps} steps: {max(differences):.1e}")
    speed_up = statistics.median(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
    print(f"a step with deduplication is {speed_up:.1f}x as fast, median of {steps}")


if __name__ == "__main__":
    main()
