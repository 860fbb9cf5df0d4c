"""Random programs on what `share_prefixes` returns: each ends as with the untouched model (`random_programs.py`)."""

import os
from random import SystemRandom

import pytest
import torch

from radixtrain import sharing_report
from tests.claims.padded.random_programs import BATCH, Run, compare, difference, losses, program, tiny_pair
from tests.support import cases

BLOCK = 100
BLOCKS = {"float64": 6, "autocast": 1, "padded": 1}  # of 100 programs, in `make test`
FIRST = SystemRandom().randrange(10**9) if os.environ.get("RADIXTRAIN_FUZZ") else 0
CASES = [(way, block) for way, count in BLOCKS.items() for block in range(count * 10)]


@pytest.mark.parametrize(("way", "block"), cases(CASES, [case for case in CASES if case[1] < BLOCKS[case[0]]]))
def test_programs(way: str, block: int) -> None:
    pair = tiny_pair(way)
    found: dict[str, list[str]] = {}
    for seed in range(FIRST + BLOCK * block, FIRST + BLOCK * (block + 1)):
        each = program(seed, way)
        found.setdefault(compare(pair, each, way), []).append(f"{seed}: {each}")
    same, refused = found.pop("", []), found.pop("refused", [])
    assert not found, "\n".join(f"{how}\n  {each}" for how, programs in found.items() for each in programs)
    assert len(same) > BLOCK / 2 and len(refused) < BLOCK / (2 if way == "padded" else 20)
    assert sharing_report(pair[1]).num_head_rows < 0.7 * sharing_report(pair[1]).num_head_places


@pytest.mark.parametrize("name", ["z", "entropy", "gather"])
def test_a_compiled_loss(name: str) -> None:
    """The compiler gets ordinary tensors."""
    torch._dynamo.reset()
    compiled = torch.compile(losses(Run(None, BATCH))[name], backend="aot_eager")
    runs = []
    for model in tiny_pair():
        run = Run(model, BATCH)
        model.zero_grad(set_to_none=True)
        loss = compiled(model(**BATCH).logits)
        loss.backward()
        run.note([loss, *(p.grad for p in model.parameters())])
        runs.append(run)
    assert not difference(*runs, 1e-12)
