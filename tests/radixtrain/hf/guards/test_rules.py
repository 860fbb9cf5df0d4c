"""Positions: those of a batch are used as they are, and models that would count differently are refused."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixtrain import RadixCollator, generate, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.backbone import text_decoder_of
from radixtrain.hf.guards.rules import positions_in_table
from tests.support.models import tiny_model
from tests.support.steps import assert_same_gradient, same_step

ROPES: list[dict[str, Any]] = [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "dynamic_mine", "factor": 2.0, "rope_theta": 1e4},  # of one's own, named as transformers asks
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_frequencies_that_follow_the_largest_position(tiny_qwen3, rope, monkeypatch):
    """Hugging Face looks at the largest position of a batch, not at the longest row. A dynamic kind may have grown."""
    limit = 8 if rope["rope_type"] == "longrope" else 7
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "dynamic_mine", ROPE_INIT_FUNCTIONS["dynamic"])
    ordinary = tiny_qwen3(rope_parameters=rope, max_position_embeddings=8)
    model = share_prefixes(deepcopy(ordinary))

    def batch(first: int) -> dict[str, Any]:
        rows = [[7, 8, 9, 1, 2], [7, 8, 9, 3]]
        features = [{"input_ids": row, "position_ids": range(first, first + len(row))} for row in rows]
        return RadixCollator(loss_on_all=True)(features)

    assert model(**batch(limit - 5)).loss.isfinite()
    message = (
        rf"has {rope['rope_type']} rotary embeddings change .* after {limit} tokens; set max_length to {limit} or less"
    )
    with pytest.raises(UserError, match=message):
        model(**batch(limit - 4))
    assert torch.equal(model(IDS).logits, ordinary(IDS).logits)
    assert list(sharing_report(model).not_shared) == [
        f"{rope['rope_type']} rotary embeddings change their frequencies after {limit} tokens"
    ]


ROWS = [[1, 2, 3, 4, 5, 6, 7, 8, *more] for more in ([9, 1, 2, 3], [9, 1, 5, 5], [2, 2, 3, 1], [9, 3, 3, 4])]
IDS = torch.tensor(ROWS)
SCALED = {"floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [1, 0], "attention_chunk_size": 64}


@pytest.fixture
def model() -> Any:
    return tiny_model("Llama4ForCausalLM", **SCALED)


def batch(ids: Tensor, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, "use_cache": False, **more}


def on_the_right() -> dict[str, Any]:
    wide, mask = nn.functional.pad(IDS, (0, 3), value=5), (torch.arange(15) < 12).long().expand(4, -1)
    return batch(wide, attention_mask=mask) | {"labels": wide.masked_fill(mask == 0, -100)}


def on_the_left() -> dict[str, Any]:
    wide, mask = nn.functional.pad(IDS, (3, 0), value=5), (torch.arange(15) >= 3).long().expand(4, -1)
    return batch(wide, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


# Of the calls that are not shared, transformers counts padding, and another sequence in the row.
CALLS = {
    "padded": batch(IDS),
    "padded on the right": on_the_right(),
    "not shared, padded on the left": on_the_left(),
    "not shared, packed": batch(IDS.reshape(1, 48), position_ids=torch.arange(12).repeat(1, 4)),
}
NOT_SHARED = "queries are scaled by their place in a row from 4 tokens on, padding counted"


@pytest.mark.parametrize("name", CALLS)
def test_queries_scaled_by_their_place(model: Any, name: str) -> None:
    """As in layers of Llama 4. The scale changes within every row; the 26 unique tokens go on for longer."""
    report = assert_same_gradient(model, lambda model: model(**CALLS[name]).loss)
    assert (report.num_shared, [*report.not_shared]) == ((0, [NOT_SHARED]) if "not shared" in name else (1, []))


def test_queries_of_a_radix_batch_scaled_by_their_place(model: Any) -> None:
    features = [{"input_ids": row, "labels": row} for row in ROWS]
    same_step(model, features, lambda model: [model(**RadixCollator()(features)).loss])


def test_generation_scaled_by_the_place(model: Any) -> None:
    model.eval()
    answers = [model.generate(row[None], max_new_tokens=4, do_sample=False, eos_token_id=None) for row in IDS]
    found = generate(model, IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(found, torch.cat(answers))


TABLES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "learned": ("GPT2LMHeadModel", {"n_positions": 48}, 48),
    "with an offset": ("OPTForCausalLM", {"max_position_embeddings": 48}, 48),
    "after the padding": ("RobertaForCausalLM", {"max_position_embeddings": 48, "pad_token_id": 1}, 46),
    "a buffer": ("GPTJForCausalLM", {"n_positions": 48, "rotary_dim": 4}, 48),
    "none": ("LlamaForCausalLM", {"max_position_embeddings": 48}, None),
}


@pytest.mark.parametrize("name", TABLES)
def test_how_many_positions_a_table_has(name: str) -> None:
    """The untouched model takes so many tokens, and not one more."""
    model_class, sizes, expected = TABLES[name]
    model = tiny_model(model_class, **sizes).eval()
    assert positions_in_table(text_decoder_of(model)) == expected
    if expected is not None:
        model(input_ids=torch.full((1, expected), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, expected + 1), 5))
