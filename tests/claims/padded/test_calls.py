"""Ways to call a model of `share_prefixes` and to use what it returns, each against the untouched model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.padded.calls import LEARNS_NOTHING
from radixtrain.verification.oracle import gradients_of
from tests.support.batches import PaddedBatch, pad
from tests.support.models import tiny_hybrid, tiny_qwen3
from tests.support.steps import in_float64, same_gradient

BAR = 1e-12
ROWS = [[7, 8, 9, 1, 2], [7, 8, 9, 3], [7, 8, 5, 6, 4, 4], [7, 8, 9, 1]]


@pytest.fixture
def batch() -> PaddedBatch:
    """ROWS, padded on both sides."""
    return pad(np.random.default_rng(0), ROWS, [2, 1, 0, 3], np.zeros((4, 8), dtype=np.int64), positions=None)


def scored(logits: Tensor, batch: PaddedBatch) -> Tensor:
    return logits[batch.kept].log_softmax(-1)[:, 3].mean()


def logits_of_views(model: Any, batch: PaddedBatch) -> Tensor:
    return model(**{name: x.t().contiguous().t() for name, x in batch.inputs.items()}, use_cache=False).logits


def logits_by_position(model: Any, batch: PaddedBatch) -> Tensor:
    return model.lm_head(model.model(batch.inputs["input_ids"], batch.inputs["attention_mask"], use_cache=False)[0])


def logits_in_a_tuple(model: Any, batch: PaddedBatch) -> Tensor:
    return model(**batch.inputs, use_cache=False, return_dict=False)[0]


CALLS = [logits_of_views, logits_by_position, logits_in_a_tuple]


@pytest.mark.parametrize("logits_of", CALLS, ids=lambda call: call.__name__)
def test_the_gradient(batch: PaddedBatch, logits_of: Callable[..., Tensor]) -> None:
    model = tiny_qwen3()
    share = partial(share_prefixes, min_ratio=0.0)
    same_gradient(model, lambda model: scored(logits_of(model, batch), batch), share)
    assert sharing_report(model).num_shared >= 1 and not sharing_report(model).not_shared, sharing_report(model)


def test_a_cast_that_is_none_and_a_view_that_is_an_error(batch: PaddedBatch) -> None:
    logits = share_prefixes(tiny_qwen3(), min_ratio=0.0)(**batch.inputs, use_cache=False).logits
    assert logits.to(logits.dtype) is logits
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        logits.view(3, 7)


VALUES = [(torch.no_grad, False, True), (torch.inference_mode, True, True)]  # of a reference model, of an evaluation
VALUES += [(torch.enable_grad, False, layers) for layers in (True, [0, -1], [1], -1, [])]


@pytest.mark.parametrize(("mode", "training", "layers"), VALUES)
def test_values(batch: PaddedBatch, mode: Any, training: bool, layers: Any) -> None:
    """Logits and hidden states are those of the untouched model; states of layers that are not wanted are None."""
    model, wanted = tiny_qwen3().train(training), {**batch.inputs, "use_cache": False, "output_hidden_states": layers}
    with in_float64(model) as pair, mode():
        truth, found = ([each.logits, *(each.hidden_states or ())] for each in (model(**wanted), pair.shared(**wanted)))
    for one, other in zip(truth, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other - one)[batch.kept].norm() <= BAR * one[batch.kept].norm()
    assert sharing_report(pair.shared).num_shared == 1


def collated(model: Any, batch: PaddedBatch) -> Any:
    """The loss of a `RadixCollator`'s batch."""
    return share_prefixes(model)(**RadixCollator()([{"input_ids": row, "labels": row} for row in ROWS])).loss


def padded(model: Any, batch: PaddedBatch) -> Any:
    return scored(model(**batch.inputs, use_cache=False).logits, batch)


@pytest.mark.parametrize("loss", [padded, collated], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("make", [tiny_qwen3, partial(tiny_hybrid, "Qwen3.5")], ids=["Qwen3", "Qwen3.5"])
def test_a_default_device_of_another_kind(make: Any, batch: PaddedBatch, loss: Any) -> None:
    """As after `torch.set_default_device("cuda")`; what stays on the host says so."""
    model = share_prefixes(make(), min_ratio=0.0)
    expected = gradients_of(model, lambda: [loss(model, batch)])
    with torch.device("meta"):
        found = gradients_of(model, lambda: [loss(model, batch)])
    assert all(torch.equal(found.tensors[name], gradient) for name, gradient in expected.tensors.items())


READERS = {
    "a label of padding": lambda output, labels: cross_entropy(output.logits[:, :-1].mT, labels[:, 1:].clamp(min=0)),
    "the label of the first token, predicted from padding on the left": lambda output, labels: output.loss,
    "the states of an inner layer": lambda output, labels: output.hidden_states[1].square().mean(),
    "a distance, with a gradient to every token": lambda output, labels: (
        (output.hidden_states[-1] - output.hidden_states[-1][:, 2:3]).square().sum()
    ),
    "the last column": lambda output, labels: output.logits[:, -1].logsumexp(-1).sum(),
}


@pytest.mark.parametrize("reads", READERS)
def test_a_loss_that_reads_padding_is_refused(reads: str) -> None:
    """In the backward pass, because only the loss knows what it reads."""
    ids = torch.tensor([[7, 8, 9, 1, 2], [7, 8, 9, 3, 0], [0, 7, 8, 0, 0]])
    model, labels = share_prefixes(tiny_qwen3()), ids.masked_fill(ids == 0, -100)
    output = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels, output_hidden_states=True)
    loss = READERS[reads](output, labels)
    with pytest.raises(UserError, match=r"places that attention_mask hides.* label of the first token"):
        loss.backward()
    assert sharing_report(model).num_shared == 1


def kept_by_hook(x: Tensor, loss: Tensor) -> Any:
    found: list[Any] = []
    x.register_hook(found.append)
    loss.backward()
    return found[0] + 1


ASKS = {
    "a hook that keeps it": lambda output, loss: kept_by_hook(output.hidden_states[-1], loss),
    "retain_grad": lambda output, loss: (output.hidden_states[-1].retain_grad(), loss.backward()),
    "autograd.grad, the loss reads it too": lambda output, loss: torch.autograd.grad(
        loss + output.hidden_states[-1][0].square().mean(), output.hidden_states[-1]
    ),
}


@pytest.mark.parametrize("asks", ASKS)
def test_a_gradient_at_hidden_states_that_is_asked_for_after_the_head(batch: PaddedBatch, asks: str) -> None:
    """The head had one row for equal ones, so it is refused."""
    model = share_prefixes(tiny_qwen3(), min_ratio=0.0)
    output = model(**batch.inputs, use_cache=False, output_hidden_states=True)
    loss = scored(output.logits, batch)
    with pytest.raises(UserError, match="gradient at each place"):
        ASKS[asks](output, loss)


def with_adapters(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear"))


def merged(model: Any) -> Any:
    (model := with_adapters(model)).merge_adapter()
    return model


def without_adapters(model: Any) -> Any:
    (model := with_adapters(model)).base_model.disable_adapter_layers()
    return model


def beside_the_model(model: Any) -> Any:
    model.requires_grad_(False).further = torch.nn.Linear(2, 2)
    return model


LEARN_NOTHING: dict[str, Callable[[Any], Any]] = {
    "frozen": lambda model: model.requires_grad_(False),
    "merged adapters": merged,
    "disabled adapters": without_adapters,
    "a module that is not called": beside_the_model,
}


@pytest.mark.parametrize("kind", ["padded", "without padding", "collated"])
@pytest.mark.parametrize("name", LEARN_NOTHING)
@pytest.mark.filterwarnings("ignore:.*merge")
def test_a_model_that_learns_nothing(name: str, kind: str) -> None:
    """Training it is torch's own error, as without sharing.

    With gradients a loss that reads padding could not be noticed, without them there is no loss to notice.
    """
    ids = torch.tensor([[7, 8, 9, 1], [7, 8, 9, 0 if kind == "padded" else 3]])
    features = [{"input_ids": row[row != 0].tolist()} for row in ids]
    inputs: Any = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
    losses = []
    for share in (lambda model: model, share_prefixes):
        torch.manual_seed(0)
        model = share(LEARN_NOTHING[name](tiny_qwen3().train()))
        if kind == "collated" and share is share_prefixes:
            inputs = RadixCollator(loss_on_all=True)(features)
        losses.append(model(**inputs).loss)
        assert not losses[-1].requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    assert list(sharing_report(model).not_shared) == ([LEARNS_NOTHING] if kind == "padded" else [])
    if kind == "padded":
        with torch.no_grad():
            model(**inputs, use_cache=False)
        assert sharing_report(model).num_shared == 1


def test_the_cache_that_training_does_not_make() -> None:
    """`config.use_cache` asks for one, and an ordinary model would return it."""
    ids = torch.tensor([[7, 8, 9, 1], [7, 8, 9, 2]])
    model = share_prefixes(tiny_qwen3())
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert sharing_report(model).num_shared == 1
    for use in (
        lambda: output.past_key_values.get_seq_length(),
        lambda: output.past_key_values[0],
        lambda: len(output.past_key_values),
        lambda: model(input_ids=ids[:, :1], past_key_values=output.past_key_values),
    ):
        with pytest.raises(UserError, match="use_cache=True"):
            use()
    assert model(input_ids=ids, use_cache=False).past_key_values is None
