"""Compare trainers on two processes under DeepSpeed's ZeRO, with and without `share_prefixes`.

    pip install deepspeed
    DS_ACCELERATOR=cpu python recipes/zero_trainers.py
    DS_ACCELERATOR=cpu python recipes/zero_trainers.py GRPO KTO 3 "2, float16"          # only these

Each run takes three steps of two accumulated batches. ZeRO does not support float64, so a third run with Hugging Face's
`eager` attention shows how much the order of summation matters. RLOO compares passes with and without gradients; there
only those with gradients are eager. Prints the largest difference of logged values, and of the saved weights, which
ZeRO-3 gathers (`stage3_gather_16bit_weights_on_model_save`); relative if above 1. Uses AdamW, but SGD in float16, since
AdamW steps by the sign of a gradient, which is noise if the gradient is small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

TRAINERS = ("Trainer", "SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
ZERO: dict[str, dict[str, Any]] = {
    **{str(stage): {"stage": stage} for stage in (1, 2, 3)},
    "2, offloaded": {"stage": 2, **OFFLOADED},
    "2, float16": {"stage": 2},
    "3, float16, offloaded": {"stage": 3, **OFFLOADED},
}
SCALE = {"initial_scale_power": 10}  # of a loss scale that follows; no step of these overflows and is skipped
ARMS = ("ordinary", "shared", "eager")
GENERATE = ("GRPO", "RLOO")
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


def write_models(folder: str) -> None:
    """Three: to train, its reference, and one with scores."""
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "num_labels": 1}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    config = transformers.Qwen3Config(**sizes, **heads, **ids)
    for seed, kind in enumerate(("CausalLM", "CausalLM", "SequenceClassification")):
        torch.manual_seed(seed)
        getattr(transformers, f"Qwen3For{kind}")(config).save_pretrained(os.path.join(folder, str(seed)))


def model(number: int, arm: str) -> Any:
    """One of those, which ZeRO-3 divides while it is loaded."""
    import transformers

    from radixtrain import share_prefixes

    auto = transformers.AutoModelForSequenceClassification if number == 2 else transformers.AutoModelForCausalLM
    attention = "eager" if arm == "eager" else "sdpa"
    loaded = auto.from_pretrained(os.path.join(os.environ["MODELS"], str(number)), attn_implementation=attention)
    return share_prefixes(loaded) if arm == "shared" else loaded


def eager_with_gradients(policy: Any) -> None:
    """Passes without them use `sdpa`: a row has another rounding in each of two passes that RLOO compares."""
    import torch

    def choose(*_: Any) -> None:
        policy.set_attn_implementation("eager" if torch.is_grad_enabled() else "sdpa")

    policy.register_forward_pre_hook(choose)


def data_of(name: str) -> list[dict[str, Any]]:
    """What the trainer reads."""
    if name == "KTO":
        return [
            {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
            for row in rows()
            for key in ("chosen", "rejected")
        ]
    if name in GENERATE:
        return [{"prompt": row["prompt"]} for row in rows()]
    if name == "Trainer":
        read = tokenizer()
        prompts, answers = ([read(row[key]).input_ids for row in rows()] for key in ("prompt", "chosen"))
        return [
            {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    if name == "SFT":
        return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows()]
    return list(rows())


def even_words(completions: list[str], **_: Any) -> list[float]:
    """A reward for GRPO."""
    return [sum(1.0 for word in text.split() if word[-1] in "02468") for text in completions]


def train(name: str, how: str, arm: str, out: str) -> Entries:
    """On each of the processes. Saves the weights in `out`."""
    import transformers
    import trl
    from datasets import Dataset

    from radixtrain import share_prefixes

    zero, is_half = {**ZERO[how], "stage3_gather_16bit_weights_on_model_save": True}, "float16" in how
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 0,
    }
    settings |= {"optim": "sgd", "learning_rate": 0.1} if is_half else {}
    off = {"bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "report_to": "none"}
    own = {"num_generations": 4, "max_completion_length": 8} if name in GENERATE else {}
    has_trl = name != "Trainer"
    arguments = (getattr(trl, f"{name}Config") if has_trl else transformers.TrainingArguments)(
        output_dir=out,
        save_strategy="no",
        gradient_accumulation_steps=2,
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        fp16=is_half,
        deepspeed={**config, "fp16": {"enabled": is_half, **SCALE}, **dict.fromkeys(names, "auto")},
        **settings,
        **off,
        **own,
    )
    numbers = {"Reward": [2], "DPO": [0, 1], "KTO": [0, 1]}.get(name, [0])
    models = [model(number, arm) for number in numbers]
    given: dict[str, Any] = {"args": arguments, "train_dataset": Dataset.from_list(data_of(name))}
    given["processing_class"] = tokenizer()
    if name in GENERATE:
        given["reward_funcs"] = even_words
    if not has_trl:
        given["data_collator"] = transformers.DataCollatorForSeq2Seq(tokenizer())
    trainer = (getattr(trl, f"{name}Trainer") if has_trl else transformers.Trainer)(*models, **given)
    if name == "RLOO" and arm == "shared":  # it loads its reference itself
        share_prefixes(trainer.accelerator.unwrap_model(trainer.ref_model))
    if name == "RLOO" and arm == "eager":
        eager_with_gradients(models[0])
    trainer.train()
    trainer.save_model(out)
    timed = ("epoch", "step", "step_time")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: float(value) for key, value in entry.items() if key not in timed} for entry in logged]


def launched(name: str, how: str, arm: str) -> tuple[Entries, dict[str, Any]]:
    """What the first of two processes logged, and the weights that were saved."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        subprocess.run([*command, name, how, arm, folder], check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(folder, "entries.json")) as file:
            return json.load(file), load_file(os.path.join(folder, "model.safetensors"))


def worst(one: Entries, other: Entries) -> float:
    pairs = ((a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)
    return max(abs(x - y) / max(1.0, abs(x)) for x, y in pairs)


def worst_weight(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys() and all(one[name].shape == other[name].shape for name in one)
    return max(((one[name] - other[name]).abs() / one[name].abs().clamp(min=1)).max().item() for name in one)


def main(arguments: Sequence[str]) -> None:
    if "RANK" in os.environ:
        name, how, arm, out = arguments
        entries = train(name, how, arm, out)
        if os.environ["RANK"] == "0":
            with open(os.path.join(out, "entries.json"), "w") as file:
                json.dump(entries, file)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_models(folder)
        os.environ["MODELS"] = folder
        table(*([each for each in known if each in arguments] or known for known in (TRAINERS, ZERO)))


def table(names: Iterable[str], hows: Iterable[str]) -> None:
    print("| trainer | ZeRO | logged: shared | eager | saved weights: shared | eager |\n|---|---|---|---|---|---|")
    for name in names:
        for how in hows:
            (ordinary, weights), *others = (launched(name, how, arm) for arm in ARMS)
            cells = [f"{worst(ordinary, entries):.1e}" for entries, _ in others]
            cells += [f"{worst_weight(weights, saved):.1e}" for _, saved in others]
            print(f"| {name} | {how} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
