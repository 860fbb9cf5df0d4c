"""Measure how close correct models come to the tolerances of `verify`: random Qwen3 models, rows, dtypes and adapters.

    python recipes/benchmarks/false_alarms.py --runs 400

Every comparison here is of correct gradients, so each failure is a false alarm that would have stopped a
run under `verify_first_batch`. Prints these, and the largest share of a tolerance that any other comparison reached.
"""

import argparse
import random
from collections import Counter
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from radixtrain import RadixCollator
from radixtrain.verification.equivalence import verify_arms
from radixtrain.verification.oracle import ordinary_padded, radix_batch

KINDS = ("float32", "bfloat16", "autocast", "LoRA", "LoRA on bfloat16")


def random_model(draw: random.Random, kind: str) -> Any:
    """1 to 4 layers of 32 to 128, Hugging Face's own random weights; adapters of order one."""
    hidden = draw.choice([32, 64, 128])
    torch.manual_seed(draw.randrange(2**31))
    config = Qwen3Config(
        vocab_size=draw.choice([50, 400]),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        head_dim=16,
        num_hidden_layers=draw.randint(1, 4),
        num_attention_heads=4,
        num_key_value_heads=draw.choice([1, 2, 4]),
        tie_word_embeddings=draw.random() < 0.5,
        initializer_range=draw.choice([0.02, hidden**-0.5]),
    )
    model = Qwen3ForCausalLM(config)
    if "LoRA" in kind:
        from peft import LoraConfig, get_peft_model  # slow to import

        adapters = LoraConfig(target_modules="all-linear", init_lora_weights=False, r=8)
        model = get_peft_model(model.bfloat16() if "bfloat16" in kind else model, adapters)
    return model.bfloat16() if kind == "bfloat16" else model


def random_features(draw: random.Random) -> list[dict[str, list[int]]]:
    """2 to 24 rows that start with one of one or two prompts; loss on the rest and on a few shared tokens."""
    prompts = [[draw.randrange(50) for _ in range(draw.randint(2, 60))] for _ in range(draw.randint(1, 2))]
    rows = []
    for _ in range(draw.randint(2, 24)):
        prompt, tail = draw.choice(prompts), [draw.randrange(50) for _ in range(draw.randint(1, 20))]
        labels = [token if draw.random() < 0.1 else -100 for token in prompt]
        rows.append({"input_ids": prompt + tail, "labels": labels + tail})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    alarms, shares, medians = Counter[str](), Counter[str](), Counter[str]()
    for number in range(options.runs):
        draw = random.Random(f"{options.seed}-{number}")
        kind = KINDS[number % len(KINDS)]
        model, features = random_model(draw, kind), random_features(draw)
        batch = RadixCollator()(features)
        report = verify_arms(
            model,
            features,
            lambda model=model, features=features: ordinary_padded(model, features),
            lambda model=model, batch=batch: radix_batch(model, batch),
            autocast=torch.bfloat16 if kind == "autocast" else None,
        )
        if not report.passed:
            alarms[kind] += 1
            print(f"run {number}, {kind}: {report.reason}")
        for rung in report.rungs:
            shares[rung.precision] = max(shares[rung.precision], *(rung.share(tensor) for tensor in rung.tensors))
            medians[rung.precision] = max(medians[rung.precision], rung.median_ratio)
    print(f"{options.runs} runs, {alarms.total()} false alarms")
    for precision, share in shares.items():
        print(f"  {precision}: a tensor reached {share:.2f} of its bar, a median ratio {medians[precision]:.2f} of 2")


if __name__ == "__main__":
    main()
