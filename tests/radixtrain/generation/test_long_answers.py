"""Answers that are longer than a lane was made for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from answers import is_idle

from radixtrain import RadixCache, generate
from radixtrain.generation import generate as module
from radixtrain.generation import scheduler

PROMPTS = [[7, 8, 9, 10, place] for place in range(1, 6)] + [[3], [3, 4, 5, 6, 7, 8, 9, 10, 11]]
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(vocab_size=64).double().eval()


@pytest.mark.parametrize(("batch_size", "cached"), [(None, False), (3, True)])
def test_lanes_grow(model: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int | None, cached: bool) -> None:
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [5, 17], "batch_size": batch_size}
    enough = generate(model, PROMPTS, **options)
    assert max(map(len, enough.token_ids)) == 40
    monkeypatch.setattr(module, "FIRST_ANSWER", 2)
    lengthened = []
    lengthen = scheduler.RunningBatch._lengthen

    def counted(self: scheduler.RunningBatch) -> None:
        lengthened.append(self.lanes.step)
        lengthen(self)

    monkeypatch.setattr(scheduler.RunningBatch, "_lengthen", counted)
    cache = RadixCache() if cached else None
    grown = generate(model, PROMPTS, cache=cache, **options)
    assert grown.token_ids == enough.token_ids
    for one, other in zip(grown.logprobs, enough.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert len(lengthened) > 2
    assert sorted(lengthened) == lengthened
    assert cache is None or is_idle(cache)


def test_nothing_is_lost_if_there_is_no_memory(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_ANSWER", 2)
    cache = RadixCache()
    generate(model, PROMPTS, max_new_tokens=2, do_sample=False, cache=cache)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(cache.store), "copy", full)
        with pytest.raises(MemoryError):
            generate(model, PROMPTS, max_new_tokens=20, do_sample=False, eos_token_id=None, cache=cache)
    assert is_idle(cache)


def test_a_generous_limit_costs_nothing_beforehand(model: Any) -> None:
    cache = RadixCache()
    options = {"do_sample": True, "seed": 1, "eos_token_id": list(range(1, 64, 2)), "cache": cache}
    found = generate(model, [[3, 5]] * 64, max_new_tokens=10**8, **options)
    assert set(found.finish_reasons) == {"stop"}
    assert cache.pool.capacity < 65_536
