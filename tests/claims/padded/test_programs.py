"""What programs do around a model: batches without a label, labels that are no token, and whatever
looks through the outputs. With `share_prefixes` all of it is as with the untouched model, which runs beside it.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from radixtrain import share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_arithmetic
from tests.support.models import tiny_model, tiny_qwen3


def scorer() -> Any:
    return tiny_model("Qwen3ForSequenceClassification", num_labels=3, pad_token_id=0)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# What looks through the outputs.


LOOKS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda output: pickle.loads(pickle.dumps(output)),
    "tree_map": lambda output: tree_map(lambda x: x * 2 if isinstance(x, Tensor) else x, output),
    "Accelerate": accelerate.utils.convert_to_fp32,
    "DDP": lambda output: list(torch.nn.parallel.distributed._find_tensors(output)),
    "default": lambda output: getattr(output.past_key_values, "device", None),
    "truth": lambda output: (bool(output.past_key_values), output.past_key_values is None),
}


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("grad", [True, False])
def test_what_looks_through_outputs(name, grad):
    """A score head has no cache to give in evaluation either. What it returns is kept, and never read."""
    ids = torch.tensor([[7, 8, 9, 1], [7, 8, 9, 2]])
    models = scorer().double(), share_prefixes(scorer().double())
    with float64_arithmetic(), torch.set_grad_enabled(grad):
        ordinary, shared = (model(input_ids=ids) for model in models)
        expected, found = (seen(LOOKS[name], output) for output in (ordinary, shared))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-12 if isinstance(other, Tensor) else one == other


def seen(look: Callable[[Any], Any], output: Any) -> list[Any]:
    """Tensors and plain values of what came of it; the error, if it was one."""
    try:
        found = look(output)
    except RuntimeError as error:
        return [str(error)]
    leaves = tree_leaves(dict(found) if isinstance(found, dict) else found)
    numbers = (torch.tensor(x) if isinstance(x, float) else x for x in leaves)
    return [x for x in numbers if x is None or isinstance(x, Tensor | bool | int)]


# Labels that do not count or are no tokens.

IDS = torch.tensor([[7, 8, 9, 1, 2], [7, 8, 9, 3, 0], [7, 8, 5, 0, 0]])
MASK = (IDS != 0).long()
LABELS = IDS.masked_fill(MASK == 0, -100)


def cross_entropy(model: Any, labels: Tensor, **options: Any) -> Tensor:
    logits = model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def own_loss(model: Any, labels: Tensor, **options: Any) -> Tensor:
    return model(input_ids=IDS, attention_mask=MASK, labels=labels, **options).loss


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": cross_entropy,
    "sum": lambda model, labels: cross_entropy(model, labels, reduction="sum"),
    "a mean by hand": lambda model, labels: cross_entropy(model, labels, reduction="sum") / (labels != -100).sum(),
    "each": lambda model, labels: cross_entropy(model, labels, reduction="none").sum(),
    "the model's": own_loss,
    "of no items": lambda model, labels: own_loss(model, labels, num_items_in_batch=torch.tensor(0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_in_which_no_label_counts(name, dtype):
    """Its gradient is 0, whatever the loss is divided by, so that it leaves that of the other micro-batches."""
    found = []
    for model in (tiny_qwen3(), share_prefixes(tiny_qwen3(), min_ratio=0.0)):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = LOSSES[name](model, torch.full_like(LABELS, -100))
        loss.backward()
        assert not gradient_of(model).any()  # NaN is something
        found.append((loss.dtype, str(loss.item())))
    assert found[0] == found[1]


def of_places(model: Any) -> Tensor:
    return model.model(input_ids=IDS, attention_mask=MASK, use_cache=False).last_hidden_state[:, 0].square().sum()


def of_rows(model: Any, mask: Tensor = MASK) -> Tensor:
    return model(input_ids=IDS, attention_mask=mask, use_cache=False).logits[:, 0].square().sum(-1)


# Of a Hessian-vector product only the weights' gradient is asked for, where torch's `once_differentiable` is silent.
# Over several gradients at once, one for each row, say, torch maps, and nothing in them can be looked at.
ASKED: dict[str, tuple[Callable[[Any], Tensor], str]] = {
    "a gradient of a gradient, hidden states": (of_places, "create_graph"),
    "a gradient of a gradient, the model's loss": (lambda model: own_loss(model, LABELS), "create_graph"),
    "several, without padding": (lambda model: of_rows(model, torch.ones_like(MASK)), "is_grads_batched"),
    "several, with padding": (of_rows, "is_grads_batched"),
    "several, the model's loss": (lambda model: own_loss(model, LABELS).expand(2), "is_grads_batched"),
}


@pytest.mark.parametrize("name", ASKED)
def test_other_gradients_are_refused(name):
    loss_of, option = ASKED[name]
    model = share_prefixes(tiny_qwen3(), min_ratio=0.0)
    losses, weights = loss_of(model), list(model.parameters())
    of_each = torch.eye(len(losses)) if losses.ndim else None
    with pytest.raises(UserError, match=rf"{option}=True.* restore_model"):
        torch.autograd.grad(losses, weights, of_each, allow_unused=True, **{option: True})


@pytest.mark.parametrize("label", [-1, 50])
@pytest.mark.parametrize("name", LOSSES)
def test_a_label_that_is_no_token(name, label):
    """Some pipelines mark with -1 what is not trained. As an index it would be the last token of the vocabulary."""
    for model in (tiny_qwen3(), share_prefixes(tiny_qwen3(), min_ratio=0.0)):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            LOSSES[name](model, with_label(LABELS, label))


def with_label(labels: Tensor, label: int) -> Tensor:
    """Labels one of which is this."""
    return labels.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(label))


@pytest.mark.parametrize("label", [-1, 50])
def test_what_trl_makes_of_a_label_that_is_no_token(label):
    """It is no error there. Packed with its row into one number it would be a token of the row beside."""
    functions = pytest.importorskip("trl.trainer.utils", reason="pip install trl")
    labels = with_label(LABELS[:, 1:].clamp(min=0), label)
    found = []
    for model in (tiny_qwen3(), share_prefixes(tiny_qwen3(), min_ratio=0.0)):
        hidden = model.model(input_ids=IDS, attention_mask=MASK, use_cache=False).last_hidden_state[:, :-1]
        rows = hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, None, labels.flatten()
        found.append(functions._ChunkedLogProbFunction.apply(*rows, 1.0, 16)[0][MASK[:, 1:].flatten().bool()])
    assert sharing_report(model).num_head_rows
    torch.testing.assert_close(*found)
