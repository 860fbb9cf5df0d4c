"""What `sp_size: auto` takes, and what it says."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import on_ranks
from tiny_models import tiny_hybrid, tiny_qwen3

from radixtrain.data.division import Division
from radixtrain.training.devices.split import CLEARLY, Chosen, choose_sp_size, fastest
from radixtrain.training.module import RadixModule

PARALLEL = Division(num_ranks=4, sp_size=1, r=5.0, num_rows=964.4, sent_bytes=0, seconds=1.0, most_rows=1)


def test_the_fastest_if_it_is_clearly_faster() -> None:
    two, four = (PARALLEL._replace(sp_size=n, num_rows=700.0, sent_bytes=2**21) for n in (2, 4))
    chosen = fastest([PARALLEL, two._replace(seconds=0.8), four._replace(seconds=0.7)])
    assert chosen.sp_size == 4
    assert chosen.told == (
        "sp_size 4 (auto) has 700 rows in a step on the busiest rank, which sends 2 MiB in each layer; data parallel "
        "has 964 rows. Predicted at 0.70 of its time; 0.95 or less is split"
    )
    not_clearly = fastest([PARALLEL, two._replace(seconds=CLEARLY + 0.01), four._replace(seconds=0.99)])
    assert not_clearly.sp_size == 1
    assert not_clearly.told.startswith("none (auto): sp_size 2 has 700 rows in a step")
    assert fastest([PARALLEL]).sp_size == 1


def run_of(model: Any = None, num_prompts: int = 1, num_nodes: int = 1, **settings: Any) -> tuple[Any, Any, Any]:
    """Trainer, module and data: 64 conversations of 300 tokens of one of some prompts and 8 of their own."""
    module = RadixModule("unused", **settings)
    module.model = tiny_qwen3(hidden_size=512, intermediate_size=2048) if model is None else model
    prompts = [[1 + prompt] * 300 for prompt in range(num_prompts)]
    ids = [np.array([*prompts[number % num_prompts], *[100 + number] * 8]) for number in range(64)]
    data = SimpleNamespace(
        hparams=SimpleNamespace(dedup=module.hparams.dedup, batch_size=8, max_tokens=4096),
        conversations={"train": [[SimpleNamespace(input_ids=each)] for each in ids]},
        train_order=lambda: np.arange(64),
    )
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(strategy=strategy, precision="32-true", num_nodes=num_nodes), module, data


def chosen_on(num_ranks: int, *run: Any) -> Chosen:
    first, *others = on_ranks(num_ranks, lambda rank: choose_sp_size(*run))
    assert all(each == first for each in others)
    return Chosen(*first)


def test_one_prompt_is_split_and_a_prompt_for_each_rank_is_not() -> None:
    """8 of 64 conversations: data parallel has 300 + 4 x 8 rows on each of two ranks, the split 182."""
    shared = chosen_on(2, *run_of())
    assert shared.sp_size == 2 and "182 rows" in shared.told and "332 rows" in shared.told
    own = chosen_on(2, *run_of(num_prompts=2))
    assert own.sp_size == 1 and own.told.startswith("none (auto): sp_size 2 has 332 rows")
    assert chosen_on(1, *run_of()) == (1, "")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"dedup": False}, "dedup: false"),
        ({"attention": "reference"}, "attention or device"),
        ({"verify_first_batch": True}, "verify_first_batch"),
        ({"model": "hybrid"}, "recurrent layers"),
        ({"num_nodes": 2}, "no number of these ranks"),
    ],
)
def test_what_cannot_be_split_is_not_and_says_why(run: dict[str, Any], reason: str) -> None:
    model = tiny_hybrid("Qwen3.5") if run.pop("model", None) else None
    chosen = chosen_on(2, *run_of(model, **run))
    assert chosen.sp_size == 1 and chosen.told.startswith("none (auto): ") and reason in chosen.told
