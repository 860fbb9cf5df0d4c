"""R predictor rows, P predictions, D hidden, V vocabulary."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import gradcheck
from torch.nn.functional import linear

from radixtrain import loss as loss_module
from radixtrain.errors import UserError
from radixtrain.loss import (
    linear_cross_entropy,
    linear_logprobs,
    logits_cross_entropy,
    logits_logprobs,
)
from radixtrain.testing import assert_within_reference_error, relative_error
from radixtrain.timing import peak_bytes
from tests.support import FULL, tries

NAMES = ("loss", "d_hidden", "d_weight", "d_bias")
R, D, V = 13, 6, 11
CPU = torch.device("cpu")

# Three predictions at row 4, the same label twice at row 0, none at rows 2 and 7; in no order.
ROWS = torch.tensor([4, 0, 1, 4, 3, 12, 0, 4, 5, 6, 8, 9, 10, 11])
LABELS = torch.tensor([1, 7, 0, 10, 3, 3, 7, 2, 5, 5, 9, 0, 4, 6])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 0.5, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 7.0, 1.0])


def parameters(
    dtype: torch.dtype, num_rows: int = R, hidden_size: int = D, vocab_size: int = V, bias: bool = True
) -> list[Tensor | None]:
    """hidden, weight, bias; logits of order one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) * hidden_size**-0.5
    offset = torch.randn(vocab_size, generator=generator, dtype=torch.float64) if bias else None
    return [None if x is None else x.to(dtype) for x in (hidden, weight, offset)]


def inputs(formula: str, dtype: torch.dtype, *sizes: int, bias: bool = True) -> list[Tensor | None]:
    """What the formula is given: `parameters`, or their logits, as a model has computed them."""
    if "logits" not in formula:
        return parameters(dtype, *sizes, bias=bias)
    return [linear(*parameters(torch.float64, *sizes, bias=bias)).to(dtype)]


def with_gradients(function: Any, given: Sequence[Tensor | None]) -> list[Tensor]:
    """Loss and gradients of what there is of hidden, weight and bias, or of logits."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in given]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


# Each gives log-probabilities, or minus their weighted sum. given: hidden, weight and bias, or logits.
LOGPROBS: dict[str, Callable[..., Tensor]] = {
    "logprobs": lambda given, labels, rows: linear_logprobs(*given[:2], labels, rows, *given[2:]),
    "logprobs of logits": lambda given, labels, rows: logits_logprobs(*given, labels, rows),
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "fused": lambda given, *predictions: linear_cross_entropy(*given[:2], *predictions, *given[2:]),
    "loss of logits": lambda given, *predictions: logits_cross_entropy(*given, *predictions),
}
FORMULAS = [*LOSSES, *LOGPROBS]
every_formula = pytest.mark.parametrize("formula", FORMULAS)
every_loss = pytest.mark.parametrize("formula", LOSSES)


def ours(
    labels: Tensor = LABELS, rows: Tensor = ROWS, weights: Tensor = WEIGHTS, formula: str = "fused"
) -> Callable[..., Tensor]:
    """A loss, whose gradient passes through every log-probability if the formula gives these."""
    if formula in LOSSES:
        return lambda *given: LOSSES[formula](given, labels, rows, weights)
    return lambda *given: -(weights * LOGPROBS[formula](given, labels, rows)).sum()


def by_torch(labels: Tensor = LABELS, rows: Tensor = ROWS, weights: Tensor = WEIGHTS) -> Callable[..., Tensor]:
    """The specification, of logits too: those are hidden rows whose head is the identity."""

    def loss(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        head = torch.eye(x.shape[1], dtype=x.dtype) if weight is None else weight
        return linear_cross_entropy(x, head, labels, rows, weights, bias, impl="reference")

    return loss


def assert_equal_in_float64(actual: list[Tensor], truth: list[Tensor]) -> None:
    errors = [relative_error(x, y) for x, y in zip(actual, truth, strict=True)]
    assert max(errors) <= 1e-12, errors


def cut_into(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", (rows_per_chunk, rows_per_chunk))
    monkeypatch.setattr(loss_module, "MIN_CHUNK_ELEMENTS", {"cpu": 1, "other": 1})


@pytest.fixture
def chunked_by_four(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, 4)


@pytest.fixture(params=["on host", "to all"])
def dealt(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """How predictions come to their chunks on CPU, and on accelerators, which leave 16-bit logits as they are."""
    if request.param == "to all":
        monkeypatch.setattr(loss_module, "_on_host", lambda x: False)
    return request.param


def random_predictions(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, rows and weights of 300 predictions at 200 rows, of a vocabulary of 150: luck averages out."""
    generator = torch.Generator().manual_seed(seed)
    rows, labels = (torch.randint(0, n, (300,), generator=generator) for n in (200, 150))
    return labels, rows, torch.randint(1, 5, (300,), generator=generator).float()


@pytest.mark.parametrize("loss_of", [ours, by_torch])
def test_three_targets_at_one_row_literally(loss_of: Callable[..., Any]) -> None:
    """Logits (0, ln 2, ln 3): probabilities 1/6, 2/6, 3/6. Labels 0, 1, 2 stand for 1, 2 and 4 tokens."""
    hidden = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)]], dtype=torch.float64, requires_grad=True)
    rows, labels, weights = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0, 4.0])
    loss = loss_of(labels, rows, weights)(hidden, weight)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(6) + 2 * math.log(3) + 4 * math.log(2), abs=1e-12)
    d_logits = [7 / 6 - 1, 7 * 2 / 6 - 2, 7 * 3 / 6 - 4]
    assert weight.grad.flatten().tolist() == pytest.approx(d_logits, abs=1e-12)
    assert hidden.grad.item() == pytest.approx(d_logits[1] * math.log(2) + d_logits[2] * math.log(3), abs=1e-12)


def test_another_impl_is_refused() -> None:
    with pytest.raises(ValueError, match='impl must be "fused" or "reference", got \'liger\''):
        linear_cross_entropy(*parameters(torch.float32)[:2], LABELS, ROWS, WEIGHTS, impl="liger")


@every_formula
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision(monkeypatch: pytest.MonkeyPatch, dealt: str, dtype: torch.dtype, formula: str) -> None:
    """Losses of 16 draws together: the rounding of a single one is luck."""
    for rows_per_chunk, bias in ((40, True), (10_000, False)):
        cut_into(monkeypatch, rows_per_chunk)
        given = inputs(formula, dtype, 200, 64, 150, bias=bias)
        in_float64 = [None if x is None else x.double() for x in given]
        results: list[list[list[Tensor]]] = [[], [], []]
        for predictions in map(random_predictions, range(16)):
            results[0].append(with_gradients(ours(*predictions, formula=formula), given))
            results[1].append(with_gradients(by_torch(*predictions), given))
            results[2].append(with_gradients(by_torch(*predictions), in_float64))
        actual, reference, truth = ([torch.stack(x) for x in zip(*draws, strict=True)] for draws in results)
        assert [x.dtype for x in actual] == [torch.float32] + [dtype] * (len(actual) - 1)
        assert_within_reference_error(actual, reference, truth, names=NAMES[: len(actual)])


@every_formula
def test_any_predictions(monkeypatch: pytest.MonkeyPatch, dealt: str, formula: str) -> None:
    """Any number of rows, some of them in many predictions and some in none, in any order, in chunks of any size."""
    for seed in range(tries(50, 10_000)):
        generator = torch.Generator().manual_seed(seed)
        num_rows, num_predictions, rows_per_chunk = torch.randint(1, 40, (3,), generator=generator).tolist()
        cut_into(monkeypatch, rows_per_chunk)
        rows, labels = (torch.randint(0, n, (num_predictions,), generator=generator) for n in (num_rows, 4))
        given = inputs(formula, torch.float64, num_rows, D, 4, bias=bool(seed % 3))
        weights = torch.randint(0, 4, (num_predictions,), generator=generator).double()
        weights[0] += 1  # some prediction counts, or there is no relative error
        both = ours(labels, rows, weights, formula), by_torch(labels, rows, weights)
        assert_equal_in_float64(*(with_gradients(loss, given) for loss in both))
        with torch.no_grad():
            assert_equal_in_float64(*([loss(*given)] for loss in both))


def test_large_logits_stay_finite() -> None:
    hidden, weight, _ = parameters(torch.float32)
    for scale in (1e4, 3e4):
        assert all(x.isfinite().all() for x in with_gradients(ours(), [hidden * scale, weight]))


@every_formula
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, dealt: str, formula: str) -> None:
    """ROWS names some rows several times."""
    leaves = [x.requires_grad_() for x in inputs(formula, torch.float64)]
    for rows_per_chunk in (1, 4, 100):
        cut_into(monkeypatch, rows_per_chunk)
        assert gradcheck(ours(formula=formula), leaves, fast_mode=True)
        assert gradcheck(ours(formula=formula), leaves[:2], fast_mode=True), "a head without a bias"


def test_differentiating_twice_is_refused() -> None:
    hidden, weight, _ = (x.requires_grad_() for x in parameters(torch.float64))
    loss = linear_cross_entropy(hidden, weight, LABELS, ROWS, WEIGHTS)
    with pytest.raises(UserError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


class TestBackwardInPlace:
    """The saved gradients are scaled in place and become `.grad`; what autograd still needs is left as it was."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_twice_where_the_graph_is_kept(self, dtype: torch.dtype) -> None:
        expected = with_gradients(lambda *x: 3 * ours()(*x), parameters(dtype))[1:]
        leaves = [x.requires_grad_() for x in parameters(dtype)]
        loss = 3 * ours()(*leaves)
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
            assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True))
            for x in leaves:
                x.grad.zero_()  # if it is ours, the next time finds zeros
                x.grad = None

    def test_a_batch_of_gradients(self) -> None:
        leaves = [x.requires_grad_() for x in parameters(torch.float64)]
        expected = torch.autograd.grad(ours()(*leaves), leaves)
        loss, factors = ours()(*leaves), torch.tensor([1.0, 2.0], dtype=torch.float64)
        for one, two in zip(torch.autograd.grad(loss, leaves, factors, is_grads_batched=True), expected, strict=True):
            assert torch.equal(one, torch.stack([two, 2 * two]))

    def test_gradients_accumulate(self) -> None:
        """Over micro-batches, and over two losses and an embedding that share the weight."""
        given = parameters(torch.float64)
        _, d_hidden, d_weight, d_bias = with_gradients(ours(), given)
        leaves = [x.clone().requires_grad_() for x in given]
        for factor in (1, 2):
            (factor * ours()(*leaves)).backward()
        (ours()(*leaves) + leaves[1][LABELS].sum() + 3 * ours()(*leaves)).backward()
        d_weight = 7 * d_weight + torch.bincount(LABELS, minlength=V)[:, None]
        for leaf, expected in zip(leaves, (7 * d_hidden, d_weight, 7 * d_bias), strict=True):
            assert relative_error(leaf.grad, expected) <= 1e-12


def test_some_are_frozen() -> None:
    """A frozen head (LoRA) gets no gradient, and what is trained gets the same."""
    given = parameters(torch.float64)
    expected = with_gradients(ours(), given)
    for trained in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        leaves = [x.clone().requires_grad_(flag) for x, flag in zip(given, trained, strict=True)]
        ours()(*leaves).backward()
        for leaf, flag, gradient in zip(leaves, trained, expected[1:], strict=True):
            assert relative_error(leaf.grad, gradient) <= 1e-12 if flag else leaf.grad is None
    hidden, weight, bias = parameters(torch.float64)
    linear_logprobs(hidden.requires_grad_(), weight, LABELS, ROWS, bias).sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "one row for all": lambda x: (
        x[:1].expand(x.shape) if len(x) == R else x
    ),  # a head of equal rows has no gradient in hidden
}


@every_loss
@pytest.mark.parametrize("view", VIEWS)
def test_strided_inputs(chunked_by_four: None, view: str, formula: str) -> None:
    views = [VIEWS[view](x) for x in inputs(formula, torch.float64)]
    expected = with_gradients(by_torch(), [x.contiguous() for x in views])
    assert_equal_in_float64(with_gradients(ours(formula=formula), views), expected)


@every_formula
def test_given_tensors_are_left_alone(formula: str) -> None:
    given = [*inputs(formula, torch.float32), LABELS, ROWS, WEIGHTS]
    before = [x.clone() for x in given]
    with_gradients(ours(formula=formula), given[:-3])
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


class TestAutocast:
    def test_within_the_error_of_torch_under_autocast(self) -> None:
        """The reference runs `linear` under autocast and casts, as HF does. Backward also outside of it."""
        labels, rows, _ = random_predictions()
        given, predictions = parameters(torch.float32, 200, 64, 150), (labels, rows, torch.ones(300))
        truth = with_gradients(by_torch(*predictions), [x.double() for x in given])
        leaves = [x.clone().requires_grad_() for x in given]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reference = with_gradients(by_torch(*predictions), given)
            loss = ours(*predictions)(*leaves)
        loss.backward()
        actual = [loss.detach(), *(x.grad for x in leaves)]
        assert [x.dtype for x in actual] == [torch.float32] * 4
        assert_within_reference_error(actual, reference, truth, names=NAMES)

    def test_logits_are_taken_to_float32(self) -> None:
        given, loss = inputs("loss of logits", torch.bfloat16), ours(formula="loss of logits")
        expected = with_gradients(loss, given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = with_gradients(loss, given)
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


# Bytes at the highest point of forward and backward, the gradients among them. Exact, and the same every time.


VOCABULARY = 4096
CHUNK = 4 * 128 * VOCABULARY  # of logits


def large(formula: str, dtype: torch.dtype, num_rows: int = 1024, hidden_size: int = 64) -> list[Tensor | None]:
    given = inputs(formula, dtype, num_rows, hidden_size, VOCABULARY, bias=False)
    return [None if x is None else x.requires_grad_() for x in given]


def loss_of_each_row(formula: str, given: list[Any]) -> Tensor:
    rows = torch.arange(len(given[0]))
    return ours(rows % VOCABULARY, rows, torch.ones(len(rows)), formula)(*given)


def peak_of_both(formula: str, given: list[Any]) -> int:
    return peak_bytes(lambda: loss_of_each_row(formula, given).backward(), CPU)


@pytest.mark.parametrize(
    ("formula", "dtype", "frozen", "times"),
    [
        ("fused", torch.float32, (), 1),
        pytest.param("fused", torch.float32, (), 2, marks=FULL),
        ("fused", torch.float32, (1,), 1),  # LoRA: nothing in the shape of the head
        pytest.param("logprobs", torch.float32, (), 1, marks=FULL),
        pytest.param("loss of logits", torch.bfloat16, (), 1, marks=FULL),
    ],
)
def test_one_gradient_and_one_chunk(formula: str, dtype: torch.dtype, frozen: tuple[int, ...], times: int) -> None:
    """With a `.grad` there is one gradient more than that, the one to be added: counted here, since it is new."""
    given: list[Any] = large(formula, dtype)
    for place in frozen:
        given[place].requires_grad_(False)
    for _ in range(times):
        given[0].grad = None
        peak = peak_of_both(formula, given)
    gradients = sum(x.nbytes for x in given if x is not None and x.requires_grad)
    assert max(gradients, CHUNK) < peak < gradients + 1.1 * CHUNK, (peak, gradients, CHUNK)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_formula
def test_without_gradients_there_is_a_chunk(formula: str, mode: Any) -> None:
    """Validation."""
    given = large(formula, torch.float32)
    with mode():
        assert 0 < peak_bytes(lambda: loss_of_each_row(formula, given), CPU) < 1.1 * CHUNK


@FULL
def test_half_precision_sums_in_float32() -> None:
    hidden, weight, _ = given = large("fused", torch.bfloat16, 512, 256)
    assert hidden is not None and weight is not None
    in_float32, peak = 2 * weight.nbytes, peak_of_both("fused", given)
    forward, backward = in_float32 + hidden.nbytes + 1.6 * CHUNK, 1.5 * in_float32 + hidden.nbytes
    assert backward <= peak < 1.01 * max(forward, backward), (peak, forward, backward)


@every_formula
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(
    chunked_by_four: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, formula: str
) -> None:
    """Fake tensors have no values, so that asking for one raises; what the host may know is their shapes."""
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x).requires_grad_() for x in inputs(formula, dtype)]
        loss_of = ours(*map(mode.from_tensor, (LABELS, ROWS, WEIGHTS)), formula)
        with pytest.raises(DataDependentOutputException):
            loss_of(*given)
        monkeypatch.setattr(loss_module, "_on_host", lambda x: False)
        (loss_of(*given) / 3).backward()
        assert all(x.grad.shape == x.shape for x in given)


@FULL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_compiled_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype) -> None:
    """By Inductor for a CPU, whole and once for any number of rows, beside the same functions in eager."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # not what another process is writing
    counter = CompileCounterWithBackend("inductor")
    compile = partial(torch.compile, dynamic=True, fullgraph=True, backend=counter)
    compiled = cache(compile)

    def fused(function: Any, *tensors: Tensor) -> Any:
        for x in tensors:
            torch._dynamo.mark_static(x, [*range(1, x.ndim)])
        return compiled(function)(*tensors)

    monkeypatch.setattr(loss_module, "_on_host", lambda x: False)
    given, predictions = parameters(dtype, 200, 64, 150), random_predictions()
    truth = with_gradients(by_torch(*predictions), [x.double() for x in given])[1:]  # the loss is one number: luck
    for rows_per_chunk in (200, 40, 65):
        cut_into(monkeypatch, rows_per_chunk)
        with monkeypatch.context() as patch:
            reference = with_gradients(ours(*predictions), given)[1:]
            patch.setattr(loss_module, "fused", fused)
            found = with_gradients(ours(*predictions), given)[1:]
        if dtype == torch.float64:
            assert_equal_in_float64(found, truth)
        else:
            assert_within_reference_error(found, reference, truth)
    assert counter.frame_count == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs this: make test-gpu")
def test_on_cuda_nothing_waits_and_the_result_is_the_same(chunked_by_four: None) -> None:
    given = parameters(torch.float64)
    expected = with_gradients(ours(), given)
    on_cuda, predictions = [x.cuda() for x in given], [x.cuda() for x in (LABELS, ROWS, WEIGHTS)]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = with_gradients(ours(*predictions), on_cuda)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    errors = [relative_error(x.cpu(), y) for x, y in zip(actual, expected, strict=True)]
    assert max(errors) <= 1e-12, errors


@pytest.mark.parametrize("label", [-1, -V, -V - 1, V])
@pytest.mark.parametrize("formula", [*FORMULAS, "reference"])
def test_a_label_that_is_no_token(dealt: str, formula: str, label: int) -> None:
    """An index of -1 is the last one. On a device it fails the assertion that index V fails."""
    labels = LABELS.clone()
    labels[3] = label
    says_which = dealt == "on host" or formula == "reference"
    loss_of = by_torch(labels) if formula == "reference" else ours(labels, formula=formula)
    with pytest.raises(IndexError, match=f"Target {label} is out of" if says_which else f"index {V} is out of"):
        loss_of(*inputs(formula, torch.float32))


@pytest.mark.parametrize("formula", [*FORMULAS, "reference"])
def test_no_prediction_counts(dealt: str, formula: str) -> None:
    """The mean is NaN, as torch's own, and its gradient 0 and not `0 * inf`."""
    none = LABELS[:0], ROWS[:0], WEIGHTS[:0]
    for num_rows, predictions in ((R, (LABELS, ROWS, WEIGHTS * 0)), (R, none), (0, none)):
        if formula in LOGPROBS and predictions is not none:
            continue  # a log-probability has no weight
        for dtype in (torch.float32, torch.bfloat16):
            given = [x.requires_grad_() for x in inputs(formula, dtype, num_rows)]
            loss = (by_torch(*predictions) if formula == "reference" else ours(*predictions, formula))(*given)
            mean = loss / predictions[2].sum()
            mean.backward()
            assert loss.dtype == torch.float32 and loss.shape == () and loss.item() == 0 and mean.isnan()
            assert all(x.grad.shape == x.shape and not x.grad.any() for x in given)


def test_a_row_that_overflows_and_does_not_count(dealt: str, chunked_by_four: None) -> None:
    """The first row of a chunk, which stands for that of all predictions elsewhere if they are dealt to all."""
    hidden, weight, _ = parameters(torch.float32)
    counts = ROWS != 4

    def found() -> Tensor:
        logprobs = linear_logprobs(hidden, weight, LABELS, ROWS)[counts]
        return torch.cat([logprobs, ours(weights=WEIGHTS * counts)(hidden, weight)[None]])

    expected = found()
    hidden[4] = float("inf")
    assert torch.equal(found(), expected)


def test_a_target_that_is_almost_certain(dealt: str) -> None:
    """Its gradient is rounded once: a softmax of 0.999 in bfloat16 is 1, and its gradient would be 0."""
    logits, rows = torch.tensor([[8.0, 0, 0, 1], [0, 9, 1, 1]]).bfloat16(), torch.tensor([0, 0, 1, 0])
    predictions = torch.tensor([0, 0, 1, 3]), rows, torch.tensor([0.3, 1.7, 1.0, 0.0])
    truth = with_gradients(by_torch(*predictions), [logits.double()])[1]
    found = with_gradients(ours(*predictions, formula="loss of logits"), [logits])[1]
    assert torch.equal(found, truth.bfloat16()) and truth[0, 0] < 0
