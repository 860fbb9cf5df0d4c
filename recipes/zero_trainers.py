"""TRL's SFT, DPO and reward trainers on two processes that DeepSpeed's ZeRO divides, with `share_prefixes` and without.

    pip install deepspeed
    DS_ACCELERATOR=cpu python recipes/zero_trainers.py

ZeRO takes no float64, so a third run, with Hugging Face's `eager` attention, says what another order of summation
changes. Prints the largest difference of what is logged in three steps, relative if above 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

TRAINERS, STAGES, ARMS = ("SFT", "DPO", "Reward"), (1, 2, 3), ("ordinary", "shared", "eager")
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(250))]
Entries = list[dict[str, float]]


def rows() -> list[dict[str, str]]:
    """16 questions after one system prompt, each with a good and a bad answer."""
    draw = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{n}" for n in draw.integers(0, 250, count))

    system = text(60)
    questions = [f"{system} {text(8)} " for _ in range(16)]
    return [{"prompt": each, "chosen": text(6), "rejected": text(9)} for each in questions]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(seed: int, has_scores: bool, arm: str) -> Any:
    import torch
    import transformers

    from radixtrain import share_prefixes

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "num_labels": 1}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    config = transformers.Qwen3Config(**sizes, **heads, **ids)
    name = "Qwen3ForSequenceClassification" if has_scores else "Qwen3ForCausalLM"
    made = getattr(transformers, name)(config)
    if arm == "eager":
        made.set_attn_implementation("eager")
    return share_prefixes(made) if arm == "shared" else made


def train(name: str, stage: int, arm: str) -> Entries:
    """On each of the processes."""
    import trl
    from datasets import Dataset

    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3, "seed": 0}
    off = {"bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "report_to": "none"}
    arguments = getattr(trl, f"{name}Config")(
        output_dir=tempfile.mkdtemp(),
        save_strategy="no",
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        deepspeed={**zero, **dict.fromkeys(names, "auto"), "zero_force_ds_cpu_optimizer": False},
        **settings,
        **off,
    )
    data = Dataset.from_list(rows())
    if name == "SFT":
        data = data.rename_column("chosen", "completion").remove_columns("rejected")
    models = [model(seed, name == "Reward", arm) for seed in range(2 if name == "DPO" else 1)]
    trainer = getattr(trl, f"{name}Trainer")(*models, args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    timed = ("epoch", "step")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: float(value) for key, value in entry.items() if key not in timed} for entry in logged]


def launched(name: str, stage: int, arm: str) -> Entries:
    """What the first of two processes logged."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "entries.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        subprocess.run([*command, name, str(stage), arm, out], check=True, stdout=subprocess.DEVNULL)
        with open(out) as file:
            entries: Entries = json.load(file)
    return entries


def worst(one: Entries, other: Entries) -> float:
    pairs = ((a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)
    return max(abs(x - y) / max(1.0, abs(x)) for x, y in pairs)


def main(arguments: Sequence[str]) -> None:
    if arguments:
        name, stage, arm, out = arguments
        entries = train(name, int(stage), arm)
        if os.environ["RANK"] == "0":
            with open(out, "w") as file:
                json.dump(entries, file)
        return
    print("| trainer | ZeRO | shared | eager |\n|---|---|---|---|")
    for name in TRAINERS:
        for stage in STAGES:
            ordinary, shared, eager = (launched(name, stage, arm) for arm in ARMS)
            print(f"| {name} | {stage} | {worst(ordinary, shared):.1e} | {worst(ordinary, eager):.1e} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
