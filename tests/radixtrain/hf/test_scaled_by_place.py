"""Llama 4: layers without rotary embeddings scale queries by the place of a token in its row."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from radixtrain import RadixCollator, generate, score_completions, share_prefixes, sharing_report
from radixtrain.testing import relative_error

ROWS = [[1, 2, 3, 4, 5, 6, 7, 8, *more] for more in ([9, 1, 2, 3], [9, 1, 5, 5], [2, 2, 3, 1], [9, 3, 3, 4])]
IDS = torch.tensor(ROWS)
SCALED = {"floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [1, 0], "attention_chunk_size": 64}


@pytest.fixture
def model() -> Any:
    return tiny_model("Llama4ForCausalLM", **SCALED)


def trained(model: Any, *calls: dict[str, Any]) -> Tensor:
    """The loss, averaged over calls of equal weight, and its whole gradient."""
    model.zero_grad()
    loss = sum(model(**call).loss for call in calls) / len(calls)
    loss.backward()
    grads = (torch.zeros(1) if p.grad is None else p.grad.flatten() for p in model.parameters())
    return torch.cat([loss.detach()[None], *grads])


def batch(ids: Tensor, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, "use_cache": False, **more}


@pytest.fixture
def expected(model: Any) -> tuple[Tensor, float]:
    """Of the ordinary batch, and how far its rows alone are from it."""
    whole, rows = trained(model, batch(IDS)), trained(model, *(batch(row[None]) for row in IDS))
    return whole, 8 * float(relative_error(rows, whole))


def test_share_prefixes(model: Any, expected: tuple[Tensor, float]) -> None:
    """The scale changes within every row; the 26 unique tokens go on for longer."""
    whole, bar = expected
    assert relative_error(trained(share_prefixes(model), batch(IDS)), whole) <= bar < 1e-4
    assert sharing_report(model).num_shared == 1


def test_padding_on_the_right(model: Any, expected: tuple[Tensor, float]) -> None:
    wide = nn.functional.pad(IDS, (0, 3), value=5)
    mask = (torch.arange(15) < 12).long().expand(4, -1)
    given = batch(wide, attention_mask=mask) | {"labels": wide.masked_fill(mask == 0, -100)}
    assert relative_error(trained(share_prefixes(model), given), expected[0]) <= expected[1]
    assert sharing_report(model).num_shared == 1


@pytest.mark.parametrize("kind", ["left", "packed"])
def test_places_that_count_what_stands_before(model: Any, kind: str) -> None:
    """Padding on the left, with positions, and another sequence in the row: transformers counts both."""
    if kind == "left":
        wide, mask = nn.functional.pad(IDS, (3, 0), value=5), (torch.arange(15) >= 3).long().expand(4, -1)
        given = batch(wide, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    else:
        given = batch(IDS.reshape(1, 48), position_ids=torch.arange(12).repeat(1, 4))
    ordinary = trained(deepcopy(model), given)
    assert torch.equal(trained(share_prefixes(model), given), ordinary)
    assert list(sharing_report(model).not_shared) == [
        "queries are scaled by their place in a row from 4 tokens on, padding counted"
    ]


def test_radix_collator(model: Any, expected: tuple[Tensor, float]) -> None:
    found = trained(share_prefixes(model), RadixCollator()([{"input_ids": row, "labels": row} for row in ROWS]))
    assert relative_error(found, expected[0]) <= expected[1]


def test_generation(model: Any) -> None:
    model.eval()
    answers = [model.generate(row[None], max_new_tokens=4, do_sample=False, eos_token_id=None) for row in IDS]
    found = generate(model, IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(found, torch.cat(answers))
    with torch.no_grad():
        logs = model(IDS).logits.log_softmax(-1)[:, 7:-1].gather(2, IDS[:, 8:, None])[..., 0].sum(1)
    (scores,) = score_completions(model, [ROWS[0][:8]], [row[8:] for row in ROWS])
    assert relative_error(torch.tensor([each.logprob for each in scores]), logs) <= 1e-5
