"""What is sampled depends on the model, the prompt, the seed and the answer's place in the result; on nothing else.

In float64, so that no rounding moves a cumulative probability over a draw. Frequencies of 10,000 pairs of a first and a
second token are compared with their exact probabilities.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from answers import finished_logits, with_pieces_of
from tiers import FULL, cases

from radixtrain import RadixCache, generate
from radixtrain.verification.oracle import float64_arithmetic, float64_throughout

PROMPTS = [[7, 8, 9, 1, 2], [7, 8, 9, 3], [7, 8], [30, 31], [7, 8, 9, 1, 2, 5], [7, 8, 9, 3], [9]]
OTHERS = [[1], [7, 8, 9, 1], [30, 31, 32], [2, 2], [7], [40, 41, 42, 43], [7, 8, 9, 3, 3, 3]]
SAMPLED: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6, "seed": 11}
NUCLEUS = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "eos_token_id": [3, 9, 14, 22, 31]}
NUM_DRAWS = 10_000


KINDS: dict[str, dict[str, Any]] = {"plain": {"top_k": 0}, "processors": NUCLEUS}


@pytest.mark.parametrize("kind", cases(KINDS, ["processors"]))
def test_batches_change_nothing(tiny_qwen3: Callable[..., Any], kind: str) -> None:
    """Other batch sizes, kept rows and caches: each answer is that of its prompt computed by itself in that place."""
    model, options = tiny_qwen3().eval(), KINDS[kind]
    with float64_throughout(model):
        expected = generate(model, PROMPTS, **SAMPLED, **options)
        for cells, batch_size, caches in [(512, 1, (None,)), (1, 3, (None, RadixCache(max_tokens=30)))]:
            with with_pieces_of(cells):
                for cache in caches:
                    found = generate(model, PROMPTS, **SAMPLED, **options, batch_size=batch_size, cache=cache)
                    assert found.token_ids == expected.token_ids, (cells, batch_size)
                    assert found.finish_reasons == expected.finish_reasons
        assert len(set(map(tuple, expected.token_ids))) > len(PROMPTS), "the answers are all the same"
        assert generate(model, PROMPTS, **{**SAMPLED, "seed": 12}, **options).token_ids != expected.token_ids


@FULL
@pytest.mark.parametrize("kind", KINDS)
def test_other_prompts_change_nothing(tiny_qwen3: Callable[..., Any], kind: str) -> None:
    """A prompt keeps its place, and the others are replaced, permuted or left out after it."""
    model, options = tiny_qwen3().eval(), KINDS[kind]
    with float64_throughout(model), with_pieces_of(2):
        expected = generate(model, PROMPTS, **SAMPLED, **options).token_ids
        for place in (2, 5):
            prompt, rest = PROMPTS[place], PROMPTS[:place] + PROMPTS[place + 1 :]
            for others in (OTHERS[:6], rest[::-1], rest[:place]):
                prompts = [*others[:place], prompt, *others[place:]]
                found = generate(model, prompts, **SAMPLED, **options, batch_size=4)
                assert found.token_ids[2 * place : 2 * place + 2] == expected[2 * place : 2 * place + 2], prompts


@pytest.mark.parametrize("caches", cases([0, 1, 2], [1]))
def test_two_threads(tiny_qwen3: Callable[..., Any], caches: int) -> None:
    """One model, and a cache for both, one for each or none: each thread gets what it gets alone."""
    model = tiny_qwen3().double().train()
    groups, options = (PROMPTS, OTHERS), {**SAMPLED, "do_sample": False, "num_return_sequences": 1, "batch_size": 3}
    each = [None, None] if not caches else [RadixCache(max_tokens=40) for _ in range(caches)] * (3 - caches)

    def call(place: int) -> list[list[list[int]]]:
        with float64_arithmetic():  # of this thread; the default dtype is float64 already
            return [generate(model, groups[place], cache=each[place], **options).token_ids for _ in range(3)]

    with float64_arithmetic(), ThreadPoolExecutor(2) as pool:
        expected = [generate(model, prompts, **options).token_ids for prompts in groups]
        found = list(pool.map(call, range(2)))
    assert found == [[tokens] * 3 for tokens in expected]
    assert model.training and all(module.training for module in model.modules())


def test_without_a_seed(tiny_qwen3: Callable[..., Any]) -> None:
    """`torch.manual_seed` governs, as for `model.generate`."""
    model, options = tiny_qwen3().eval(), {**SAMPLED, "seed": None}
    found = []
    for seed in (0, 0, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        found.append(generate(model, PROMPTS, **options).token_ids)
    assert found[0] == found[1] != found[2]
    assert found[3] not in found[:3], "two calls after each other differ, as those of `model.generate`"


DISTRIBUTIONS: dict[str, dict[str, Any]] = {"plain": {"top_k": 0}, "top_k": {"top_k": 5, "temperature": 0.7}}


@pytest.mark.parametrize("name", cases(DISTRIBUTIONS, ["top_k"]))
def test_distribution(tiny_qwen3: Callable[..., Any], name: str, print_after: Callable[[str, str], None]) -> None:
    model, options = tiny_qwen3(vocab_size=12).eval(), DISTRIBUTIONS[name]
    prompt = [7, 8, 9, 1, 2]
    sampled = {"do_sample": True, "num_return_sequences": NUM_DRAWS, "max_new_tokens": 2, "seed": 5}
    with float64_throughout(model):
        found = generate(model, [prompt], eos_token_id=None, **sampled, **options)
        logits = torch.stack(finished_logits(model, [(prompt, [token, 0]) for token in range(12)]))
    counts = np.zeros((12, 12))
    np.add.at(counts, tuple(np.array(found.token_ids).T), 1)
    first, second = (probabilities(each, **options) for each in (logits[0, 0], logits[:, 1]))
    chi_squared, freedom = distance(counts, (first[:, None] * second).numpy())
    print_after(
        "generation: distribution of 10,000 pairs of tokens",
        f"{name}: chi squared {chi_squared:.0f} at {freedom} degrees of freedom",
    )
    assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)
    independent = (first[:, None] * (first @ second)).numpy()
    assert distance(counts, independent)[0] > 10 * freedom, "the second token does not depend on the first here"


def probabilities(logits: torch.Tensor, top_k: int = 0, temperature: float = 1.0) -> torch.Tensor:
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    return (logits / temperature).softmax(-1)


def distance(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Pearson's chi squared and its degrees of freedom; pairs that are expected less than five times are one."""
    expected = NUM_DRAWS * probabilities
    rare = expected < 5
    if rare.any():
        counts, expected = (np.append(each[~rare], each[rare].sum()) for each in (counts, expected))
    kept = expected > 0
    if counts[~kept].any():  # a pair without probability
        return np.inf, int(kept.sum()) - 1
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1
