"""Head and loss compute every row once if what they get is a view of what came before, and else what they are given.

Every case is compared with the untouched model, in float64: logits at kept tokens, and the gradient of every parameter.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import utils
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout
from tests.support.steps import assert_same_gradient

IDS = torch.tensor([[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4, 0], [7, 8, 9, 5, 0, 0], [7, 8, 9, 5, 6, 0]])
MASK = (IDS != 0).long()
LABELS = IDS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": IDS, "attention_mask": MASK}
WHOLE = {"input_ids": IDS}
FIRST_THREE = slice(None), slice(3)
ALIKE = torch.tensor([[5, 7, 8]] * 3)


def hidden_of(model: Any, batch: dict[str, Tensor] = BATCH) -> Tensor:
    return model.model(**batch, use_cache=False).last_hidden_state


def cross_entropy(logits: Tensor, labels: Tensor = LABELS, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def some(logits: Tensor) -> Tensor:
    """A number that every one of these logits has a part in."""
    return logits.log_softmax(-1)[..., 3].sin().sum()


def rows_and_places(model: Any, loss_of: Callable[[Any], Tensor]) -> tuple[int, int]:
    """Asserts the same loss and gradients, shared and not: the rows that the head computed, and of how many places."""
    report = assert_same_gradient(model, loss_of)
    assert report.num_shared
    return report.num_head_rows, report.num_head_places


class TestShares:
    @pytest.mark.parametrize(
        ("loss_of", "expected"),
        [
            (lambda model: cross_entropy(model.lm_head(hidden_of(model))), (10, 24)),
            (lambda model: some(model.lm_head(hidden_of(model)[FIRST_THREE])), (3, 12)),
            (lambda model: some(model.lm_head(hidden_of(model)[:, 0])), (1, 4)),
            (lambda model: some(model.lm_head(hidden_of(model)[:, :4].reshape(2, 2, 4, -1))), (5, 16)),
            (lambda model: some(model.lm_head(input=hidden_of(model)[FIRST_THREE])), (3, 12)),
            (lambda model: some(model.lm_head(hidden_of(model)[MASK == 1])), (9, 20)),
            (lambda model: cross_entropy(model.lm_head(hidden_of(model) * 2)), (10, 24)),
            (lambda model: cross_entropy(model.lm_head(hidden_of(model).to(torch.device("cpu")))), (10, 24)),
            (lambda model: some(model(input_ids=ALIKE, logits_to_keep=2).logits), (2, 6)),
        ],
        ids=[
            "whole",
            "slice",
            "column",
            "4 axes",
            "by name",
            "masked",
            "scaled",
            "to its device",
            "the last two",
        ],
    )
    def test_views(self, tiny_qwen3, loss_of, expected):
        """24 places, 9 unique rows and padding."""
        assert rows_and_places(tiny_qwen3(), loss_of) == expected

    def test_in_a_checkpoint_by_chunks(self, tiny_qwen3):
        """As a preference loss that runs the backbone on both answers first.

        The hidden states are gone, and another call came, when the head runs again: CheckpointError once.
        """

        def chunk_loss(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(model.lm_head(hidden), labels)

        def loss_of(model: Any) -> Tensor:
            total = torch.zeros(())
            flipped = {name: value.flip(0) for name, value in BATCH.items()}
            for hidden, labels in ((hidden_of(model), LABELS), (hidden_of(model, flipped), LABELS.flip(0))):
                for chunk in (slice(2), slice(2, 4)):
                    rows = hidden[chunk], labels[chunk]
                    total = 0.3 * total + checkpoint(chunk_loss, model, *rows, use_reentrant=False)
            return total

        rows, places = rows_and_places(tiny_qwen3(), loss_of)
        assert rows < places / 1.5


def logprobs(logits: Tensor) -> Tensor:
    return (logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0] * MASK[:, 1:]).sin().sum()


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "labels": lambda model: model(**BATCH, labels=LABELS).loss,
    "accumulation": lambda model: model(**BATCH, labels=LABELS, num_items_in_batch=torch.tensor(50)).loss,
    "logits": lambda model: cross_entropy(model(**BATCH).logits / 0.7),
    "each token": lambda model: cross_entropy(model(**BATCH).logits, reduction="none").sin().sum(),
    "log-probabilities": lambda model: logprobs(model(**BATCH).logits / 0.7),
}


class WholeLogits(TorchDispatchMode):
    """Whether logits of every place are computed."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.is_floating_point() and result.shape[-1:] == (50,):
            self.found |= result.numel() == IDS.numel() * 50
        return result


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("name", LOSSES)
def test_losses(tiny_qwen3, name):
    """Without logits of every place, [4, 6, 50], in either pass."""
    model = tiny_qwen3()
    assert assert_same_gradient(model, LOSSES[name]).num_head_rows == 10
    with float64_throughout(model), WholeLogits() as logits:
        LOSSES[name](model).backward()
    assert not logits.found


@pytest.mark.parametrize("reads_first", [False, True])
def test_a_view_of_a_view_passes_its_gradient_to_it(tiny_qwen3: Callable[..., Any], reads_first: bool) -> None:
    """Whichever of them is read first, and whoever waits: a tensor that keeps its gradient, a hook, autograd."""
    found = []
    for share in (lambda model: model, share_prefixes):
        model, seen = tiny_qwen3(), list[Tensor]()
        with float64_throughout(model):
            shifted = share(model)(**WHOLE).logits[:, 1:]
            inner = shifted[..., :-1, :]
            last = inner[:, 1:]
            if reads_first:
                last.norm()
            shifted.retain_grad()
            inner.register_hook(seen.append)
            loss = some(last)
            (asked,) = torch.autograd.grad(loss, shifted, retain_graph=True)
            loss.backward()
            found.append([asked, shifted.grad, *seen, model.lm_head.weight.grad])
    assert len(found[0]) == 5
    for ordinary, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, ordinary, rtol=1e-11, atol=1e-14)


def of_its_own_rows(model: Any) -> Tensor:
    """Without gradients the hidden states become an ordinary tensor while their first row does, which is the weight."""
    with torch.no_grad():
        hidden = hidden_of(model, WHOLE)
        scores = nn.functional.linear(hidden, hidden[0])
    return some(model.lm_head(hidden_of(model, WHOLE))) * scores.sum()


def of_a_vector(model: Any) -> Tensor:
    return nn.functional.linear(hidden_of(model), model.lm_head.weight[0])[MASK == 1].sin().sum()


@pytest.mark.parametrize("loss_of", [of_a_vector, of_its_own_rows])
def test_unusual_weights(tiny_qwen3, loss_of):
    """A weight that is a vector, and one that is lazy itself."""
    assert_same_gradient(tiny_qwen3(), loss_of)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_torch_does_not_ask_about_is_refused(tiny_qwen3, in_place):
    logits = share_prefixes(tiny_qwen3())(**WHOLE).logits
    with pytest.raises(UserError, match="clone them before it"):
        torch.func.vmap(lambda row: row.mul_(2) if in_place else row * 2)(logits)
    assert torch.func.vmap(lambda row: row * 2)(logits.clone()).isfinite().all()


def test_code_that_takes_the_memory_without_asking_ends_in_an_error(tiny_qwen3):
    """Not in a segmentation fault."""
    with torch.no_grad():
        hidden = hidden_of(share_prefixes(tiny_qwen3()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(hidden)
        hidden.norm()


def test_nothing_is_left(tiny_qwen3):
    """A lazy tensor that became an ordinary one holds nothing that only the garbage collector finds."""
    model = tiny_qwen3()
    share_prefixes(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            before = sum(isinstance(each, Tensor) for each in gc.get_objects())
            logits = model(**BATCH).logits
            loss = cross_entropy(logits) + logits[:, 1:].float().logsumexp(-1).mean()
            loss = loss + 0 * (logits.log_softmax(-1).exp() * MASK[..., None]).sum()
            del logits, loss
        assert sum(isinstance(each, Tensor) for each in gc.get_objects()) == before
    finally:
        gc.enable()


class Half(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def test_an_apply_that_was_taken_before_ours(tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives functions what it gets. What they make of that is right, or refused: no gradient is lost."""
    model = share_prefixes(tiny_qwen3(), min_ratio=0.0)
    assert Half.apply(model(**BATCH).logits).sum().isfinite()
    monkeypatch.setattr(utils, "unwrap_dead_wrappers", lambda args: args)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        monkeypatch.setattr(Function, "apply", vars(torch._C._FunctionBase)["apply"])
    found = Half.apply(model(**BATCH).logits)
    with pytest.raises(UserError, match=r"an `apply` of an autograd.Function that was taken before radixtrain"):
        found.sum()
