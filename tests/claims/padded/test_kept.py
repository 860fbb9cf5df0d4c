"""A frozen model under `share_prefixes(model, cache=...)` returns what the untouched model returns, call after call.

Generated batches, whose few tokens meet again in later ones, padded left, right and on both sides, packed, with
positions of every kind. Hidden states and logits of every token are within 1e-12 of the model as it came from Hugging
Face, in float64. In between the weights change, and a small budget evicts. With RADIXTRAIN_FUZZ=1 every run draws
others.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import CORE, CORE_MULTIMODAL, MULTIMODAL, REST, Family
from padded_batches import PaddedBatch, draw_batch
from same_step import BAR
from shared_runs import Pair, in_float64
from tiers import TRIES, cases
from torch import Tensor

from radixtrain import RadixCache, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.padded.kept import KeptPrefixes
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.tree.cached_layout import shared_runs
from radixtrain.versions import transformers_is_before

SEED = int.from_bytes(os.urandom(4), "little") if os.environ.get("RADIXTRAIN_FUZZ") else 0
BUDGETS = [None, 24, 8]  # tokens; with one token less for each row a batch has up to 70
# Windows that bind, with sinks and experts too, a soft-cap, latent attention, layers with the keys of others, learned
# positions, one attention twice in a layer, one that is refused, one of several modalities, a score.
QUICK = [
    *("DeepSeek-V3", "DiffLlama", "Falcon-H1", "Gemma 2", "Gemma 3n", "Gemma 3, multimodal", "GPT-2", "gpt-oss"),
    *("Mistral", "Qwen3", "Qwen3-MoE", "a reward"),
]
FAMILIES = {
    **{family.name: family for family in CORE + REST},
    **{f"{family.name}, multimodal": family for family in CORE_MULTIMODAL + MULTIMODAL},
    "a reward": Family("a reward", "Qwen3ForSequenceClassification", settings={"num_labels": 1, "pad_token_id": 0}),
}
# What says that nothing changes between calls, so that a call may have no gradient.
FROZEN: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode, nullcontext]


@pytest.mark.parametrize("name", cases(FAMILIES, QUICK))
def test_generated_batches(name: str, print_after: Callable[[str, str], None]) -> None:
    if name == "Gemma 3, multimodal" and transformers_is_before("5.6"):
        pytest.skip("before transformers 5.6: Gemma 3 asks for token_type_ids in training")
    family = FAMILIES[name]
    model = family.build().requires_grad_(False)
    model.config.vision_start_token_id = 47  # which those of Omni models read, and do not have
    try:
        share_prefixes(family.build())
    except (UserError, TypeError) as error:
        print_after("kept prefixes", f"{name}: refused without a cache too: {error}")
        return
    with in_float64(model) as pair:
        try:
            share_prefixes(pair.shared, cache=RadixCache())
        except UserError as error:
            assert "recurrent layers" in str(error)
            print_after("kept prefixes", f"{name}: {error}")
            return
        worst, hits = many_calls(pair, family, 6 * TRIES if name in QUICK else 6 * max(10, TRIES // 5))
    print_after("kept prefixes", f"{name}: {worst:.1e}, {hits:.0%} of the tokens from the cache")


def many_calls(pair: Pair, family: Family, num_calls: int) -> tuple[float, float]:
    """The largest error, and the part of the tokens that came from the caches."""
    for model in (pair.ordinary, pair.shared):
        backbone_of(model).register_forward_hook(keep_output)  # once: hooks that come and go empty the cache
    worst, hits, tokens, evictions = 0.0, 0, 0, 0
    for index, budget in enumerate(BUDGETS):
        cache = RadixCache(budget)
        share_prefixes(pair.shared, cache=cache, min_shared_tokens=1 + index)
        for number, batch in enumerate(batches(family, num_calls // len(BUDGETS), index)):
            if number % 7 == 6:
                change_weights(pair, number)
            worst = max(worst, error_of(pair, batch, FROZEN[number % 3]))
            assert cache.num_reserved == cache.root.locks == 0, "a call left something behind"
            assert cache.pool.capacity - cache.pool.num_free == cache.num_tokens <= (budget or cache.num_tokens)
        report = sharing_report(pair.shared)
        hits, tokens = hits + report.num_cached_tokens, tokens + report.num_tokens
        assert set(report.not_cached) <= {"position_ids do not count from 0 in every row"}, report
        evictions += cache.counters.num_evictions
    assert evictions or not hits
    return worst, hits / max(tokens, 1)


def batches(family: Family, count: int, *seeds: int) -> Iterator[PaddedBatch]:
    """Of three groups, which have no token in common."""
    pad_id = 0 if "SequenceClassification" in family.model_class else None
    for number in range(count):
        rng = np.random.default_rng([SEED, *seeds, number])
        batch = draw_batch(rng, pad_id)
        ids = batch.inputs["input_ids"] + 6 * int(rng.integers(3)) * batch.kept
        yield replace(batch, inputs={**batch.inputs, "input_ids": ids})


def change_weights(pair: Pair, number: int) -> None:
    """In place, by `load_state_dict`, or by an optimizer's step without `requires_grad`, as TRL follows a policy."""
    generator = torch.Generator().manual_seed(number)
    state = {name: x + 0.01 * torch.randn(x.shape, generator=generator) if x.is_floating_point() else x
             for name, x in pair.ordinary.state_dict().items()}  # fmt: skip
    pair.ordinary.load_state_dict(state)
    if number % 2:
        pair.shared.load_state_dict(state)
    else:
        for name, x in pair.shared.state_dict().items():
            x.data.copy_(state[name])


def error_of(pair: Pair, batch: PaddedBatch, frozen: Callable[[], Any]) -> float:
    """The largest error of hidden states and logits, relative to their norm. AssertionError above BAR."""
    pair.ordinary.eval(), pair.shared.eval()
    grads = frozen is nullcontext and not batch.kept.all()  # in eval() padding is then not shared
    both = []
    for model in (pair.ordinary, pair.shared):
        model.train(grads)
        with frozen():
            logits = model(**batch.inputs, use_cache=False).logits
            both.append([at_tokens(x, batch).clone() for x in (backbone_of(model).returned, logits)])
    errors = [float((found - truth).norm() / truth.norm()) for truth, found in zip(*both, strict=True)]
    assert max(errors) <= BAR, f"{batch.kind} (seed {SEED}): {errors}\n{sharing_report(pair.shared)}"
    return max(errors)


def keep_output(backbone: Any, inputs: Any, output: Any) -> None:
    backbone.returned = output[0]


def at_tokens(x: Tensor, batch: PaddedBatch) -> Tensor:
    """x: (B, L, ...), or (B, ...) of whole rows, of which one that the mask hides has no meaning."""
    return x[batch.kept] if x.ndim == 3 else x[batch.kept.any(1)]


# The test is tested: each mistake below is seen.


def leave_out_a_stored_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("radixtrain.tree.cached_layout.shared_runs", lambda nodes: shared_runs(nodes)[1:])


def count_from_the_stored_end(patch: pytest.MonkeyPatch) -> None:
    arguments = PaddedSharing._arguments
    patch.setattr(PaddedSharing, "_arguments", lambda *given: arguments(*given[:4], given[4] - given[4].min()))


def mix_up_hidden_states(patch: pytest.MonkeyPatch) -> None:
    """Of two kept tokens each gets the hidden state of the other."""
    start = KeptPrefixes.start

    def wrong(*args: Any, **options: Any) -> Any:
        call = start(*args, **options)
        call.stored_slots = np.roll(call.stored_slots, 1)
        return call

    patch.setattr(KeptPrefixes, "start", wrong)


def keep_ends_before_beginnings(patch: pytest.MonkeyPatch) -> None:
    """Of too many rows the last ones are kept, as if they began a sequence."""

    def wrong(self: KeptPrefixes, plan: Any) -> Any:
        return np.arange(plan.num_rows) >= plan.num_rows - max(self.cache.num_free, 0)

    patch.setattr(KeptPrefixes, "_rows_to_keep", wrong)


def do_not_read_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixCache, "of_model", lambda self, model, what: None)


def leave_unkept_rows_out_of_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("radixtrain.hf.padded.kept.window_may_bind", lambda config, longest: False)


MISTAKES = {
    "a stored run is left out": ("Qwen3", leave_out_a_stored_run),
    "positions begin after what is stored": ("Qwen3", count_from_the_stored_end),
    "hidden states are mixed up": ("Qwen3", mix_up_hidden_states),
    "the ends of sequences are kept without their beginnings": ("Qwen3", keep_ends_before_beginnings),
    "changed weights are not seen": ("Qwen3", do_not_read_weights),
    "windows see only kept rows": ("Mistral", leave_unkept_rows_out_of_windows),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make = MISTAKES[mistake]
    make(monkeypatch)
    with (
        in_float64(FAMILIES[name].build().requires_grad_(False)) as pair,
        pytest.raises((AssertionError, IndexError, RuntimeError, UserError, ValueError)),
    ):
        many_calls(pair, FAMILIES[name], 6 * TRIES)
