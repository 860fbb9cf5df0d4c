"""Random programs on what `share_prefixes` returns: each ends as with the untouched model (`random_programs.py`)."""

import os
from random import Random, SystemRandom

import pytest
import torch

from radixtrain import sharing_report
from tests.claims.padded.random_programs import (
    BATCH,
    LOSSES,
    PADDED,
    Run,
    compare,
    difference,
    note,
    program,
    tiny_pair,
)
from tests.support import cases

BLOCK = 100
BLOCKS = {"float64": 6, "autocast": 1, "padded": 1}  # of 100 programs, in `make test`
FIRST = SystemRandom().randrange(10**9) if os.environ.get("RADIXTRAIN_FUZZ") else 0
CASES = [(kind, block) for kind, count in BLOCKS.items() for block in range(count * 10)]


@pytest.mark.parametrize(("kind", "block"), cases(CASES, [case for case in CASES if case[1] < BLOCKS[case[0]]]))
def test_programs(kind: str, block: int) -> None:
    """In float64; in float32 with everything under autocast; and with padding, which a loss must leave alone."""
    pair = tiny_pair(torch.float32 if kind == "autocast" else torch.float64)
    context, batch = "autocast" if kind == "autocast" else "", PADDED if kind == "padded" else BATCH
    found: dict[str, list[str]] = {}
    for seed in range(FIRST + BLOCK * block, FIRST + BLOCK * (block + 1)):
        each = program(Random(seed), kind)
        found.setdefault(compare(pair, each, batch, context), []).append(f"{seed}: {each}")
    same, refused = found.pop("", []), found.pop("refused", [])
    assert not found, "\n".join(f"{how}\n  {each}" for how, programs in found.items() for each in programs)
    assert len(same) > BLOCK / 2 and len(refused) < BLOCK / (2 if kind == "padded" else 20)
    assert sharing_report(pair[1]).num_head_rows < 0.7 * sharing_report(pair[1]).num_head_places


COMPILED = ["mean", "z", "entropy", "squares", "gather"]


@pytest.mark.parametrize("name", cases(COMPILED, ["z", "entropy"]))
def test_a_compiled_loss(name: str) -> None:
    """The compiler gets ordinary tensors."""
    torch._dynamo.reset()
    step = LOSSES[name]
    compiled = torch.compile(lambda x: step(Run(None, BATCH), x, Random(0)), backend="aot_eager")
    runs = []
    for model in tiny_pair():
        run = Run(model, BATCH)
        model.zero_grad(set_to_none=True)
        loss = compiled(model(**BATCH).logits)
        loss.backward()
        note(run, loss, *(p.grad for p in model.parameters()))
        runs.append(run)
    assert not difference(*runs, 1e-12)
