"""Repeat Table 7 of the RadixMLP paper with working RoPE and a real loss: unique tokens against `sdpa`, in float32.

    python recipes/benchmarks/table7.py

The paper compares logits and gradients of a 2-layer Qwen3-style model on six patterns of shared prefixes. Its
published test truncates the cosines and sines of RoPE to integers, so that every query and key after position 0 is
zero, and its loss is the sum of the logits. Here the model is Hugging Face's own Qwen3, the reference runs one
sequence at a time, and nothing is printed unless RoPE turns the queries and q_proj and k_proj have gradients.

The paper describes the patterns in words; the sequences below are ours, with its names and its numbers of tokens.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from radixtrain import RadixCollator, position_wise, restore_model, share_prefixes
from radixtrain.hf.predicting_rows import inputs_of
from radixtrain.timing import environment

Sequences = list[list[int]]
Batch = dict[str, Any]

PATTERNS: dict[str, Sequences] = {
    "single_sequence": [[17, 4, 256, 31, 8]],
    "identical_sequences": [[17, 4, 256, 31, 8], [17, 4, 256, 31, 8]],
    "shared_prefix": [[17, 4, 256, 31, 8], [17, 4, 256, 90, 77]],
    "no_sharing": [[17, 4, 256], [602, 5, 111]],
    "mixed_lengths": [[17, 4, 256, 31, 8], [17, 4, 90], [17, 4]],
    "complex_sharing": [[17, 4, 256, 31, 8], [17, 4, 256, 31, 40], [17, 4, 90, 77], [17, 512, 9], [602, 5, 111]],
}
# Panel (a), SDPA + radix: max and mean |delta| of the logits, then of the gradients.
PUBLISHED = {
    "single_sequence": (0.0, 0.0, 0.0, 0.0),
    "identical_sequences": (0.0, 0.0, 3.81e-6, 3.0e-8),
    "shared_prefix": (0.0, 0.0, 1.144e-5, 1.0e-7),
    "no_sharing": (0.0, 0.0, 0.0, 0.0),
    "mixed_lengths": (0.0, 0.0, 1.144e-5, 1.5e-7),
    "complex_sharing": (4.8e-7, 9.0e-8, 1.907e-5, 3.9e-7),
}
LOSSES = ("logits.sum()", "cross-entropy")
STRATEGIES = ("cascade", "path", "expand")
ALIVE = 0.01  # least norm of the gradients of q_proj and k_proj, over that of v_proj; 1e-8 if RoPE is truncated


@dataclass(frozen=True)
class Pass:
    """Logits of the packed tokens, (T, V), and the gradient of every parameter."""

    logits: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Max and mean |delta|; of the gradients the mean is over tensors, as in the published proof.

    largest_gradient: the scale of the absolute differences.
    worst, relative: the tensor with the largest ||delta|| / ||ordinary||, and this ratio.
    """

    logits: tuple[float, float]
    gradients: tuple[float, float]
    largest_gradient: float
    worst: str
    relative: float


def build_model(seed: int = 0) -> Qwen3ForCausalLM:
    """The paper's sizes; vocabulary and numbers of heads, which it leaves out, as in its proof. Hugging Face's init."""
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.02,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float().train()


def ordinary_pass(model: Qwen3ForCausalLM, sequences: Sequences, loss: str) -> Pass:
    """Stock `sdpa`, one sequence at a time: no padding, no packing, no plan."""
    restore_model(model)
    model.zero_grad(set_to_none=True)
    logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]
    if loss == "logits.sum()":
        torch.cat(logits).sum().backward()
    else:
        predicting = torch.cat([rows[:-1] for rows in logits])
        targets = torch.tensor([token for ids in sequences for token in ids[1:]])
        torch.nn.functional.cross_entropy(predicting, targets).backward()
    return Pass(torch.cat(logits).detach(), gradients_of(model))


def radix_pass(
    model: Qwen3ForCausalLM,
    sequences: Sequences,
    loss: str,
    attention: str,
    change: Callable[[Batch], None] | None = None,
) -> Pass:
    """On unique tokens. Every token bears loss, so shared ones weigh double, and branches have several labels.

    change: damages the batch, to find out what a comparison can see.
    """
    share_prefixes(model, attention=attention)
    model.zero_grad(set_to_none=True)
    collate = RadixCollator(token_loss=True)  # `logits.sum()` is a sum over tokens, as the model's loss is
    batch = collate([{"input_ids": ids, "labels": ids} for ids in sequences])
    if change:
        change(batch)
    logits = unique_logits(model, batch)[batch["radix"].layout.inverse_indices]
    if loss == "logits.sum()":
        logits.sum().backward()
    else:
        model(**batch).loss.backward()
    gradients = gradients_of(model)
    restore_model(model)
    return Pass(logits.detach(), gradients)


def unique_logits(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """(U, V). As if every unique row predicted something."""
    return model(**inputs_of(batch, predictor_indices=torch.arange(batch["radix"].layout.num_rows))).logits[0]


def gradients_of(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(radix: Pass, ordinary: Pass) -> Difference:
    deltas = {name: (radix.gradients[name] - gradient).abs() for name, gradient in ordinary.gradients.items()}
    assert deltas.keys() == radix.gradients.keys()
    relative = {name: relative_l2(radix.gradients[name], ordinary.gradients[name]) for name in deltas}
    worst = max(relative, key=lambda name: relative[name])
    logits = (radix.logits - ordinary.logits).abs()
    means = [float(delta.mean()) for delta in deltas.values()]
    return Difference(
        logits=(float(logits.max()), float(logits.mean())),
        gradients=(max(float(delta.max()) for delta in deltas.values()), sum(means) / len(means)),
        largest_gradient=max(float(gradient.abs().max()) for gradient in ordinary.gradients.values()),
        worst=worst,
        relative=relative[worst],
    )


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Infinite if only the expected one is zero."""
    difference, norm = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / norm if norm else (float("inf") if difference else 0.0)


def check_alive(model: Qwen3ForCausalLM, sequences: Sequences) -> None:
    """RuntimeError unless RoPE turns every query after position 0 and keeps its length, and q and k learn from it."""
    for layer, (before, after) in enumerate(rotated_queries(model, sequences)):
        length, turned = before.norm(dim=-1), (after - before).norm(dim=-1)
        if not torch.allclose(after.norm(dim=-1), length, rtol=1e-4) or bool((turned < 1e-2 * length).any()):
            raise RuntimeError(
                f"RoPE is dead in layer {layer}: after position 0 the queries have length {length.mean():.3g} before "
                f"it and {after.norm(dim=-1).mean():.3g} after it, and it moves them by {turned.mean():.3g}"
            )
    for loss in LOSSES:
        for (layer, name), share in projection_shares(ordinary_pass(model, sequences, loss)).items():
            if share < ALIVE:
                raise RuntimeError(
                    f"the gradient of {name} in layer {layer} is {share:.1e} of v_proj's ({loss}): it proves nothing"
                )


def rotated_queries(model: Qwen3ForCausalLM, sequences: Sequences) -> list[tuple[Tensor, Tensor]]:
    """Per layer, the queries at positions above 0, before and after RoPE: (tokens, N, H) each."""
    stock, seen = modeling_qwen3.apply_rotary_pos_emb, []

    def record(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rotated = stock(q, k, *args, **kwargs)
        seen.append(tuple(x[0, :, 1:].transpose(0, 1).detach() for x in (q, rotated[0])))
        return rotated

    restore_model(model)
    with mock.patch.object(modeling_qwen3, "apply_rotary_pos_emb", record), torch.no_grad():
        for ids in sequences:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    layers = model.config.num_hidden_layers
    return [tuple(map(torch.cat, zip(*seen[layer::layers], strict=True))) for layer in range(layers)]


def projection_shares(ordinary: Pass) -> dict[tuple[int, str], float]:
    """Norm of the gradients of q_proj and k_proj over that of v_proj, per layer."""
    shares = {}
    for layer in range(2):
        norm = {
            name: float(ordinary.gradients[f"model.layers.{layer}.self_attn.{name}.weight"].norm())
            for name in ("q_proj", "k_proj", "v_proj")
        }
        shares |= {(layer, name): norm[name] / norm["v_proj"] for name in ("q_proj", "k_proj")}
    return shares


@contextmanager
def integer_rope() -> Iterator[None]:
    """The RoPE of the published proof: head_dim / 4 frequencies, cosines and sines in the dtype of the positions.

    As integers they are 1 and 0 at position 0, and 0 and 0 after it.
    """

    @position_wise
    def truncated(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        num_frequencies = self.config.head_dim // 4
        angles = position_ids[..., None] * 10000.0 ** -(torch.arange(num_frequencies) / num_frequencies)
        cos, sin = (wave(angles).repeat(1, 1, 4).to(position_ids.dtype) for wave in (torch.cos, torch.sin))
        return cos, sin

    with mock.patch.object(modeling_qwen3.Qwen3RotaryEmbedding, "forward", truncated):
        yield


def off_by_one(batch: Batch) -> None:
    """A mistake in a plan: a token below the root is one position too far."""
    row = int((batch["position_ids"][0] > 0).nonzero()[0])
    batch["position_ids"][0, row] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    model = build_model(parser.parse_args().seed)
    torch.set_num_threads(1)  # their number decides how sums are cut, and so the last digits
    print_header()
    check_alive(model, PATTERNS["complex_sharing"])
    print_alive(model)
    for loss in LOSSES:
        print_table(model, loss)
    print_flaw(model)


def print_header() -> None:
    facts = environment(torch.device("cpu"), "float32")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))


def print_alive(model: Qwen3ForCausalLM) -> None:
    before, after = rotated_queries(model, PATTERNS["complex_sharing"])[0]
    print(f"\nRoPE, queries at positions above 0: length {before.norm(dim=-1).mean():.2f} before, ", end="")
    print(f"{after.norm(dim=-1).mean():.2f} after, moved by {(after - before).norm(dim=-1).mean():.2f}.")
    for loss in LOSSES:
        shares = projection_shares(ordinary_pass(model, PATTERNS["complex_sharing"], loss)).values()
        print(f"Gradients of q_proj and k_proj, {loss}: {min(shares):.2f} to {max(shares):.2f} of v_proj's norm.")


def print_table(model: Qwen3ForCausalLM, loss: str) -> None:
    """With the published line above ours, for the loss that the paper has."""
    print(f"\n### {loss}\n")
    print("| pattern, tokens | arm | logits max, mean | gradients max, mean | largest gradient | worst relative L2 |")
    print("|---|---|---|---|---|---|")
    for pattern, sequences in PATTERNS.items():
        name = f"{pattern}, {sum(map(len, sequences))}"
        if loss == "logits.sum()":
            print(f"| {name} | published | {numbers(PUBLISHED[pattern][:2])} | {numbers(PUBLISHED[pattern][2:])} | | |")
        ordinary = ordinary_pass(model, sequences, loss)
        for attention in STRATEGIES:
            found = compare(radix_pass(model, sequences, loss, attention), ordinary)
            worst = f"{number(found.relative)} {short_name(found.worst)}" if found.relative else "0"
            cells = [name, attention, numbers(found.logits), numbers(found.gradients), number(found.largest_gradient)]
            print(f"| {' | '.join([*cells, worst])} |")


def numbers(pair: tuple[float, ...]) -> str:
    return ", ".join(number(value) for value in pair)


def number(value: float) -> str:
    """Two digits and a short exponent: 4.3e-4, 0, 740."""
    if value == 0 or 0.1 <= value < 1e4:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def short_name(parameter: str) -> str:
    """`model.layers.1.self_attn.k_norm.weight` -> `1.k_norm`."""
    dropped = ("model", "layers", "self_attn", "mlp", "weight")
    return ".".join(part for part in parameter.split(".") if part not in dropped)


def print_flaw(model: Qwen3ForCausalLM) -> None:
    """What the published set-up cannot see: gradients of q and k that are noise, and a wrong position."""
    print("\n### complex_sharing, logits.sum(), cascade: RoPE as it is and truncated to integers\n")
    print("| RoPE | batch | q_proj, max gradient | v_proj | q_proj, relative L2 | all, max | worst relative L2 |")
    print("|---|---|---|---|---|---|---|")
    for rope in ("alive", "integers"):
        for batch, change in (("right", None), ("a position off by one", off_by_one)):
            print(f"| {rope} | {batch} | {flaw_cells(model, rope == 'integers', change)} |")


def flaw_cells(model: Qwen3ForCausalLM, is_truncated: bool, change: Callable[[Batch], None] | None) -> str:
    sequences, name = PATTERNS["complex_sharing"], "model.layers.0.self_attn.{}.weight"
    with integer_rope() if is_truncated else mock.patch.dict({}):
        ordinary = ordinary_pass(model, sequences, "logits.sum()")
        radix = radix_pass(model, sequences, "logits.sum()", "cascade", change)
    q_proj, v_proj = (ordinary.gradients[name.format(projection)] for projection in ("q_proj", "v_proj"))
    relative = relative_l2(radix.gradients[name.format("q_proj")], q_proj)
    found = compare(radix, ordinary)
    values = (float(q_proj.abs().max()), float(v_proj.abs().max()), relative, found.gradients[0])
    return " | ".join([*map(number, values), f"{number(found.relative)} {short_name(found.worst)}"])


if __name__ == "__main__":
    main()
