"""`torch.compile` of a prepared model: one compilation for batches of every size.

Attention is one operator in the graph, which gets the plan as two tensors. The two hooks of the backbone run outside
(`torch.compiler.disable`), and so do mixers with a recurrent state. No graph is compiled to machine code here: whether
torch's compiler can do that on a processor is its own matter.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.hf.guards.code import code_in
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import float64_throughout, gradients_of
from tests.support import FULL
from tests.support.models import tiny_model
from tests.support.trainers import padded_batches

pytestmark = FULL

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


def assert_the_same(
    compiled: Any, model: Any, batch: dict[str, Any], loss_of: Callable[[Any], Tensor] = lambda out: out.loss
) -> None:
    """Loss and gradients are as near to those of the model in float64 as those of the model that is not compiled."""
    with float64_throughout(model):
        truth = gradients_of(model, lambda: [loss_of(model(**batch))])
    plain, found = (gradients_of(model, lambda call=call: [loss_of(call(**batch))]) for call in (model, compiled))
    rung = compare_gradients("float32", truth, plain, found)
    assert rung.passed, rung.reason


def test_one_compilation_for_every_size(tiny_qwen3: Callable[..., Any]) -> None:
    """And for two strategies: they differ only outside the graphs."""
    model = tiny_qwen3()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    graphs = []
    for attention in ("cascade", "path"):
        share_prefixes(model, attention=attention)
        for length in PROMPTS:
            assert_the_same(compiled, model, batch_of(length))
            graphs.append(counters["stats"]["unique_graphs"])
    assert len({batch_of(length)["input_ids"].shape[1] for length in PROMPTS}) == len(PROMPTS)
    assert graphs[-1] - graphs[0] <= 2, f"graphs compiled after each batch: {graphs}"  # sizes that coincide at first
    assert len(counters["graph_break"]) <= 2, counters["graph_break"]  # at our hooks


def test_a_loss_of_padded_logits() -> None:
    model = share_prefixes(tiny_model("PhiForCausalLM", num_hidden_layers=1))
    compiled = torch.compile(model, backend="aot_eager")
    for batch in padded_batches(steps=2):
        labels = batch.pop("labels")[:, 1:].flatten()
        assert_the_same(
            compiled,
            model,
            batch,
            lambda output, labels=labels: cross_entropy(output.logits[:, :-1].flatten(0, 1), labels),
        )
    report = sharing_report(model)
    assert report.num_shared == 6 and not report.not_shared


# Class, strategy, and how many kinds of layers it has here: with a window and without one.
LAYERS = [
    *(("Qwen3ForCausalLM", attention, 1) for attention in ("cascade", "path", "expand")),
    ("LlamaForCausalLM", "auto", 1),
    ("Gemma3ForCausalLM", "auto", 1),
    ("GptOssForCausalLM", "auto", 2),
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("name", "attention", "kinds"), LAYERS)
def test_layers_are_one_graph(name: str, attention: str, kinds: int, checkpointing: bool) -> None:
    """One for each kind, for all layers and batches, without a break; exact in float64."""
    model = share_prefixes(tiny_model(name, num_hidden_layers=4), attention=attention).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # eager experts break graphs by themselves, others round
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = map(batch_of, PROMPTS)
    expected = [(batch, gradients_of(model, lambda batch=batch: [model(**batch).loss])) for batch in batches]
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, truth in expected:
        found = gradients_of(model, lambda batch=batch: [model(**batch).loss])
        for name, each in truth.tensors.items():
            torch.testing.assert_close(found.tensors[name], each, rtol=1e-12, atol=1e-14)
    assert counters["stats"]["unique_graphs"] == kinds and not counters["graph_break"]


def test_layers_share_their_graphs(tiny_qwen3: Callable[..., Any]) -> None:
    """Nothing is compiled for a layer by itself: a limit of 8 recompilations would be met by a real model."""
    graphs = []
    for layers in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        model = share_prefixes(tiny_qwen3(num_hidden_layers=layers))
        torch.compile(model, dynamic=True, backend="eager")(**batch_of(9))  # graphs are counted before any backend
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1], graphs
    assert code_in(model, model.model).tried == "", "what the compiler adds to a model's file is no code of others"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.usefixtures("free_forks")
def test_layers_with_a_state(tiny_hybrid: Callable[..., Any], checkpointing: bool) -> None:
    """After the first two batches nothing is compiled for another tree; ordinary batches in between."""
    model = share_prefixes(tiny_hybrid("Qwen3.5"))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, dynamic=True, backend="eager")
    ids = torch.arange(12).view(2, 6) + 3
    graphs = []
    for length in PROMPTS[:4]:
        for batch in (batch_of(length), {"input_ids": ids, "labels": ids}):
            assert_the_same(compiled, model, batch)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], f"graphs compiled after each batch: {graphs}"


@pytest.mark.usefixtures("free_forks")
def test_a_compiled_model_with_a_state_generates(tiny_hybrid: Callable[..., Any]) -> None:
    model = tiny_hybrid("Qwen3.5").double().eval()
    ids = torch.arange(12).view(2, 6) + 3
    stock = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    share_prefixes(model).compile(backend="eager", dynamic=True)
    model(**batch_of(9))
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None), stock)
