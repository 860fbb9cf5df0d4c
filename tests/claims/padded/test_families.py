"""In float64 the gradient under `share_prefixes` is the ordinary one, family by family, over generated padded batches.

The oracle is the model as it came from Hugging Face, on the same padded batch. The bar is a relative L2 error of 1e-12
for every parameter tensor. Every parameter must have a gradient in some of them. `sharing_report` must say of each
batch that it was shared, and of those that this family cannot share exactly that they were not.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixtrain.testing import ragged_batches
from tests.support import TRIES, cases
from tests.support.batches import PaddedBatch, packed, pad
from tests.support.models import CORE, CORE_MULTIMODAL, REST, Family
from tests.support.steps import Pair, Reads, assert_same_gradient, in_float64

LONGEST = 11  # tokens; every sliding window of a tiny model is shorter


def draw_batch(rng: np.random.Generator, rows: list[list[int]], pad_id: int | None) -> PaddedBatch:
    """pad_id: the id of padding, which no token has; None for any ids."""
    if rng.random() < 0.1:
        return packed(rows)
    side = ["left", "right", "both"][rng.integers(3)]
    width = max(map(len, rows)) + int(rng.integers(3))
    room = [width - len(row) for row in rows]
    left = [{"left": most, "right": 0, "both": int(rng.integers(most + 1))}[side] for most in room]
    fill = rng.integers(0, 5, (len(rows), width)) if pad_id is None else np.full((len(rows), width), pad_id)
    hidden = len(rows) - 1 if pad_id is None and len(rows) > 1 and rng.random() < 0.1 else None
    positions = [None, None, "mask", "columns", "one row", "offset", "jumps"][rng.integers(7)]
    return pad(rng, rows, left, fill, positions, hidden, side)


NUM_BATCHES = 2 * TRIES
STRATEGIES = ["auto", "path", "expand", "reference"]
# Of `Family.what`: its positions are learned, so left padding without position_ids is another function.
LEARNED = "learned positions"
# These make their mask without positions, so that Hugging Face does not separate the sequences of a packed row.
WITHOUT_PACKING = {"gpt-oss", "OPT", "Qwen2.5-VL"}
# Each kind of attention and of positions.
NAMED = """DeepSeek-V3, Gemma 2, Gemma 3, GPT-2, gpt-oss, Llama, Mistral, Mixtral, OPT, Phi, Qwen3, Qwen3-MoE"""
MULTIMODAL = ("Gemma 3", "LLaVA", "Qwen2.5-VL")
HEADS = [
    Family("Llama, token classes", "LlamaForTokenClassification", settings={"num_labels": 3, "pad_token_id": 0}),
    Family("Mistral, row classes", "MistralForSequenceClassification", settings={"num_labels": 3, "pad_token_id": 0}),
    Family("Qwen3, a reward", "Qwen3ForSequenceClassification", settings={"num_labels": 1, "pad_token_id": 0}),
]


TRIED = {
    **{family.name: (family, "default") for family in CORE if family.name in re.split(r",\s+", NAMED)},
    **{f"{family.name}, eager": (family, "eager") for family in CORE if family.name in ("Gemma 2", "Qwen3")},
    **{f"{each.name}, multimodal": (each, "default") for each in CORE_MULTIMODAL if each.name in MULTIMODAL},
    **{family.name: (family, "default") for family in HEADS},
}
QUICK = ["DeepSeek-V3", "Gemma 2", "GPT-2", "gpt-oss", "Qwen3-MoE", "Qwen3", "Qwen3, a reward"]


@pytest.mark.parametrize("name", cases(TRIED, QUICK))
def test_generated_batches(name: str, print_after: Callable[[str, str], None]) -> None:
    family, implementation = TRIED[name]
    model = family.build()
    if implementation == "eager":
        model.set_attn_implementation("eager")
    with in_float64(model, learned=family.what == LEARNED, packs=family.name not in WITHOUT_PACKING) as pair:

        @settings(max_examples=NUM_BATCHES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(
            rows=ragged_batches(max_sequences=7, max_length=LONGEST),
            seed=st.integers(0, 2**32 - 1),
            attention=st.sampled_from(STRATEGIES),
            min_shared_tokens=st.sampled_from([1, 1, 2, 3]),
        )
        def one_try(rows: list[list[int]], seed: int, **options: Any) -> None:
            pair.share(**options)
            check(pair, family, rows, np.random.default_rng(seed))

        one_try()
        names = {name for name, _ in model.named_parameters() if is_text(name)}
    dead = [name for name in names - pair.alive if not re.search(family.idle or "$^", name)]
    assert not dead, f"no try proves anything of {sorted(dead)}"
    print_after(
        "float64: share_prefixes, worst gradient tensor",
        f"{family.name} ({implementation}, {family.model_class}): {NUM_BATCHES} batches, {pair.worst:.1e}",
    )


def is_text(name: str) -> bool:
    """Whether rows of text reach a parameter. The bias of a router is no parameter of the loss."""
    return not re.search("vision|visual|projector|correction_bias", name)


def check(pair: Pair, family: Family, rows: list[list[int]], rng: np.random.Generator) -> None:
    pad_id = 0 if "SequenceClassification" in family.model_class else None  # found by the last id that is not padding
    batch = draw_batch(rng, rows if pad_id is None else [[token + 1 for token in row] for row in rows], pad_id)
    arguments = inspect.signature(pair.ordinary.forward).parameters
    reads = Reads.draw(
        rng,
        batch.kept.shape[1],
        has_own_loss="Classification" not in family.model_class,
        can_keep="logits_to_keep" in arguments,
        has_router="output_router_logits" in arguments,
    )
    pair.check(batch, reads)


def family_named(name: str) -> Family:
    return next(family for family in [*CORE, *REST] if family.name == name)


PACKED = packed([[1, 2, 3, 1], [1, 2, 3, 3, 2], [1, 2]])


AS_THEY_ARE = [(name, 1.0) for name in ("AFMoE", "BERT as a decoder", "gpt-oss", "OPT", "Qwen3")]
HARDLY = [(name, 1e-3) for name in ("BERT as a decoder", "gpt-oss", "Qwen3")]
QUICK_PACKED = [("gpt-oss", 1.0), ("Qwen3", 1.0), ("Qwen3", 1e-3)]


@pytest.mark.parametrize(("name", "factor"), cases([*AS_THEY_ARE, *HARDLY], QUICK_PACKED))
def test_a_packed_row_is_what_the_model_makes_of_it(name: str, factor: float) -> None:
    """Whether sequences see each other depends on the model and on its cache, and stays as it is.

    factor: of what attention adds. It is small in a narrow model before it is trained: what its sequences see of each
    other then is small, and still there.
    """
    for options in ({}, {"use_cache": False}):
        model = family_named(name).build()
        with torch.no_grad():
            for path, weight in model.named_parameters():
                weight.mul_(factor if re.search(r"o_proj|attention\.output\.dense", path) else 1)
        assert_same_gradient(model, lambda each, own=options: each(**PACKED.inputs, **own).logits.square().sum())


LEFT_PADDED = ["Beam", "CTRL", "GPT-2", "Hunyuan", "Hunyuan MoE", "Llama 4", "OPT", "SmolLM3"]


@pytest.mark.parametrize("name", cases(LEFT_PADDED, ["GPT-2", "SmolLM3"]))
def test_left_padding_without_positions_is_what_the_model_makes_of_it(name: str) -> None:
    """Positions count the padding. Where that is another function and not another rounding, nothing is shared."""
    model = family_named(name).build()
    rows = [[1, 2, 3, 1, 2, 2], [1, 2, 3, 3], [1, 2]]
    left = [9 - len(row) for row in rows]
    batch = pad(np.random.default_rng(0), rows, left, np.zeros((3, 9), dtype=np.int64), positions=None)
    assert batch.counts_padding
    assert_same_gradient(model, lambda each: each(**batch.inputs, use_cache=False).logits[batch.kept].square().sum())
