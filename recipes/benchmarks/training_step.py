"""One training step, ordinary and on unique tokens: forward + backward, alternating in one process, medians.

    python recipes/benchmarks/training_step.py
    python recipes/benchmarks/training_step.py --hidden 512 --layers 2 --prompt 2048 --suffix 128

The ordinary arm is Hugging Face with padded `sdpa` and the head only where there are labels. Both must give the same
gradient before a time is printed. `ideal` is the ratio of floating-point operations, `efficiency` measured / ideal.
"""

import argparse
import platform
import statistics
import subprocess
import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from radixtrain.collators.steps import StepCollator
from radixtrain.cost import ideal_speedup
from radixtrain.loss import linear_cross_entropy
from radixtrain.model import backbone_of, prepare_model, restore_model
from radixtrain.plan import build_prefix_plan

TARGET_KEYS = ("shift_labels", "radix_prediction_rows", "radix_loss_weights")


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape(options)).train()
    features = shared_prompt(options)
    ordinary, unique = (StepCollator(dedup=dedup)(features)["micro_batches"][0] for dedup in (False, True))
    plan = build_prefix_plan(
        np.concatenate([feature["input_ids"] for feature in features]),
        np.cumsum([0] + [len(feature["input_ids"]) for feature in features]),
    )
    num_labels, num_predictors = int(unique["radix_loss_weights"].sum()), len(unique["radix_predictor_indices"])
    ideal = ideal_speedup(model.config, plan, num_labels, num_predictors)
    arms: dict[str, Any] = {"ordinary": (None, ordinary), **{name: (name, unique) for name in options.attention}}
    difference = check(model, arms)
    seconds = measure(model, arms, options.repeats)
    header(options, plan)
    base = statistics.median(seconds["ordinary"])
    print(f"{'arm':<10} {'ms':>8} {'speed-up':>9} {'ideal':>7} {'efficiency':>10} {'largest gradient difference':>28}")
    for name, times in seconds.items():
        median = statistics.median(times)
        paired = statistics.median(a / b for a, b in zip(seconds["ordinary"], times, strict=True))
        tail = "" if name == "ordinary" else f"{ideal:>7.2f} {paired / ideal:>10.2f} {difference[name]:>28.1e}"
        print(f"{name:<10} {median * 1e3:>8.0f} {paired:>9.2f} {tail}")
    print(f"r = {plan.compression_ratio:.2f}; the ordinary step took {base * 1e3:.0f} ms, median of {options.repeats}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "hidden": 256, "vocab": 4096, "prompt": 512, "suffix": 64, "sequences": 16, "repeats": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", nargs="+", default=["cascade", "path", "expand"])
    return parser.parse_args()


def shape(options: argparse.Namespace) -> Qwen3Config:
    heads = options.hidden // 64
    return Qwen3Config(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip


def shared_prompt(options: argparse.Namespace) -> list[dict[str, np.ndarray]]:
    """One prompt, a completion of its own behind it in every sequence, loss on the completions."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, options.vocab, options.prompt)
    features = []
    for _ in range(options.sequences):
        ids = np.concatenate([prompt, rng.integers(0, options.vocab, options.suffix)])
        features.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < options.prompt, -100, ids)})
    return features


def step(model: Qwen3ForCausalLM, batch: dict[str, Any], attention: str | None) -> float:
    """Forward and backward of one micro-batch; the loss."""
    labels = batch["shift_labels"][0]
    backbone, head = backbone_of(model), model.get_output_embeddings()
    if attention is None:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        hidden = backbone(**inputs, use_cache=False).last_hidden_state
        logits = head(hidden.flatten(0, 1)[batch["predictor_indices"]])
        loss = torch.nn.functional.cross_entropy(logits, labels)
    else:
        inputs = {name: value for name, value in batch.items() if name not in TARGET_KEYS}
        hidden, weights = backbone(**inputs).last_hidden_state[0], batch["radix_loss_weights"]
        rows = batch["radix_prediction_rows"]
        loss = linear_cross_entropy(hidden, head.weight, labels, rows, weights) / weights.sum()
    loss.backward()
    return loss.item()


def set_arm(model: Qwen3ForCausalLM, attention: str | None) -> None:
    restore_model(model) if attention is None else prepare_model(model, attention=attention)
    model.zero_grad(set_to_none=True)


def check(model: Qwen3ForCausalLM, arms: dict[str, Any]) -> dict[str, float]:
    """Largest relative gradient difference of each arm to the ordinary one; stops where it is not rounding."""
    gradients = {}
    for name, (attention, batch) in arms.items():
        set_arm(model, attention)
        step(model, batch, attention)
        gradients[name] = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    truth = gradients["ordinary"]
    worst = {
        name: max(float((grads[key] - truth[key]).norm() / truth[key].norm()) for key in truth)
        for name, grads in gradients.items()
    }
    too_far = {name: error for name, error in worst.items() if error > 1e-5}
    if too_far:
        raise SystemExit(f"the arms do not have the same gradient, so their times are not comparable: {too_far}")
    return worst


def measure(model: Qwen3ForCausalLM, arms: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, (attention, batch) in arms.items():
            set_arm(model, attention)
            start = time.perf_counter()
            step(model, batch, attention)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def header(options: argparse.Namespace, plan: Any) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        f"{time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip() or 'unknown'}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    print(
        f"{options.layers} layers, hidden {options.hidden}, vocabulary {options.vocab}, prompt {options.prompt} + "
        f"{options.suffix}, {options.sequences} sequences: {plan}"
    )


if __name__ == "__main__":
    main()
