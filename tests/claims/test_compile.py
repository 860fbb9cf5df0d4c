"""`torch.compile` of a prepared model: one compilation for batches of every size.

The hook in front of the backbone and tree attention itself run outside the graphs (`torch.compiler.disable`): what they
do is made of host integers and kernels of their own, and traced they would be compiled anew for every tree. So a graph
breaks at every attention and goes on after it; layers share their graphs, whatever their number and whatever U is.
Mixers with a recurrent state run outside as well.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import radixtrain.hf.attention
from radixtrain import RadixCollator, prepare_model
from radixtrain.testing import FREE_FORKS

PROMPTS = (5, 9, 14, 21, 33, 40, 6, 27)  # tokens, each a batch with another U, B and number of levels


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch_of(length: int, **options: Any) -> dict[str, Any]:
    """A prompt, half of it shared by all sequences, and a few sequences of other lengths."""
    rng = random.Random(length)

    def draw(number: int) -> list[int]:
        return [rng.randrange(50) for _ in range(number)]

    prompt = draw(length)
    sequences = [prompt + draw(rng.randrange(2, 6)) for _ in range(length % 4 + 2)]
    return RadixCollator(loss_on_all=True, **options)(
        [{"input_ids": ids} for ids in [*sequences, prompt[: length // 2] + draw(3), draw(4)]]
    )


def loss_and_gradients(model: Any, call: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = call(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.full
def test_one_compilation_for_every_size(tiny_qwen3: Callable[..., Any]) -> None:
    """And for two strategies: they differ only outside the graphs."""
    model = tiny_qwen3()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    graphs = []
    for attention in ("cascade", "path"):
        prepare_model(model, attention=attention)
        for length in PROMPTS:
            batch = batch_of(length)
            results = [loss_and_gradients(model, call, batch) for call in (compiled, model)]
            assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(*results, strict=True))
            graphs.append(counters["stats"]["unique_graphs"])
    assert len({batch_of(length)["input_ids"].shape[1] for length in PROMPTS}) == len(PROMPTS)
    assert graphs[-1] - graphs[0] <= 2, f"graphs compiled after each batch: {graphs}"  # sizes that coincide at first


@pytest.mark.full
def test_layers_share_their_graphs(tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for a layer by itself: a limit of 8 recompilations would be met by a real model.

    Attention runs outside the graphs, so each call of it is a place to count them. The second layer's call comes after
    the graphs between two layers.
    """
    counted = []

    def counting(*args: Any, **options: Any) -> Any:
        counted.append(counters["stats"]["unique_graphs"])
        return attend(*args, **options)

    attend = radixtrain.hf.attention.tree_attention
    monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", counting)
    model = prepare_model(tiny_qwen3(num_hidden_layers=6))
    torch.compile(model, dynamic=True, backend="eager")(**batch_of(9))  # graphs are counted before any backend
    assert len(counted) == 6 and 0 < counted[0] < counted[1] == counted[-1], counted


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_with_a_state(tiny_hybrid: Callable[..., Any], checkpointing: bool) -> None:
    """After the first two batches nothing is compiled for another tree; ordinary batches in between."""
    model = prepare_model(tiny_hybrid("Qwen3.5"))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, dynamic=True, backend="eager")
    ids = torch.arange(12).view(2, 6) + 3
    ordinary = {"input_ids": ids, "labels": ids}
    graphs = []
    for length in PROMPTS[:4]:
        for batch in (batch_of(length, run_cost=FREE_FORKS), ordinary):
            results = [loss_and_gradients(model, call, batch) for call in (compiled, model)]
            assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(*results, strict=True))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], f"graphs compiled after each batch: {graphs}"


@pytest.mark.full
def test_a_compiled_model_with_a_state_generates(tiny_hybrid: Callable[..., Any]) -> None:
    model = tiny_hybrid("Qwen3.5").eval()
    ids = torch.arange(12).view(2, 6) + 3
    stock = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    prepare_model(model).compile(backend="eager", dynamic=True)
    model(**batch_of(9, run_cost=FREE_FORKS))
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None), stock)
