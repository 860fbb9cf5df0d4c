"""R predictor rows, P predictions, D hidden, V vocabulary."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import gradcheck
from torch.nn.functional import cross_entropy, linear

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

CHUNKS = (1, 4, 13, 100)  # rows of a chunk

biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def parameters(
    dtype: torch.dtype, num_rows: int = R, hidden_size: int = D, vocab_size: int = V, bias: bool = True
) -> list[Tensor | None]:
    """hidden, weight, bias; logits of order one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) * hidden_size**-0.5
    offset = torch.randn(vocab_size, generator=generator, dtype=torch.float64) if bias else None
    return [None if x is None else x.to(dtype) for x in (hidden, weight, offset)]


def with_gradients(function, given: list[Tensor | None]) -> list[Tensor]:
    """Loss and gradients of what there is of hidden, weight and bias."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, [x for x in leaves if x is not None])]


def ours(labels: Tensor = LABELS, rows: Tensor = ROWS, weights: Tensor = WEIGHTS, impl: Any = "fused"):
    return lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, labels, rows, weights, bias, impl)


def by_torch(*predictions: Tensor):
    return ours(*predictions, impl="reference")


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


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_three_targets_at_one_row_literally(impl: Any) -> None:
    """Logits (0, ln 2, ln 3): probabilities 1/6, 2/6, 3/6. Labels 0, 1, 2 stand for 1, 2 and 4 tokens."""
    hidden = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)]], dtype=torch.float64, requires_grad=True)
    rows, labels, weights = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0, 4.0])
    loss = ours(labels, rows, weights, impl)(hidden, weight, None)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(6) + 2 * math.log(3) + 4 * math.log(2), abs=1e-12)
    d_logits = [7 / 6 - 1, 7 * 2 / 6 - 2, 7 * 3 / 6 - 4]
    assert weight.grad.flatten().tolist() == pytest.approx(d_logits, abs=1e-12)
    assert hidden.grad.item() == pytest.approx(d_logits[1] * math.log(2) + d_logits[2] * math.log(3), abs=1e-12)


@biases
def test_cross_entropy_of_torch(monkeypatch: pytest.MonkeyPatch, dealt: str, bias: bool) -> None:
    given = parameters(torch.float64, bias=bias)
    truth = with_gradients(by_torch(), given)
    for rows_per_chunk in CHUNKS:
        cut_into(monkeypatch, rows_per_chunk)
        assert_equal_in_float64(with_gradients(ours(), given), truth)


def test_another_impl_is_refused() -> None:
    with pytest.raises(ValueError, match='impl must be "fused" or "reference", got \'liger\''):
        ours(impl="liger")(*parameters(torch.float32))


@dtypes
def test_lower_precision(monkeypatch: pytest.MonkeyPatch, dealt: str, dtype: torch.dtype) -> None:
    """Losses of 16 draws together: the rounding of a single one is luck."""
    for rows_per_chunk, bias in ((40, True), (10_000, False)):
        cut_into(monkeypatch, rows_per_chunk)
        given = parameters(dtype, 200, 64, 150, bias)
        in_float64 = [None if x is None else x.double() for x in given]
        results: list[list[list[Tensor]]] = [[], [], []]
        for seed in range(16):
            predictions = random_predictions(seed)
            results[0].append(with_gradients(ours(*predictions), given))
            results[1].append(with_gradients(by_torch(*predictions), given))
            results[2].append(with_gradients(by_torch(*predictions), in_float64))
        actual, reference, truth = ([torch.stack(x) for x in zip(*draws, strict=True)] for draws in results)
        assert [x.dtype for x in actual] == [torch.float32] + [dtype] * (len(actual) - 1)
        assert_within_reference_error(actual, reference, truth, names=NAMES[: len(actual)])


def test_any_predictions(monkeypatch: pytest.MonkeyPatch, dealt: str) -> None:
    """Any number of rows, some of them in many predictions and some in none, in any order, in chunks of any size."""
    for seed in range(tries(50, 10_000)):
        generator = torch.Generator().manual_seed(seed)
        num_rows, num_predictions, rows_per_chunk = torch.randint(1, 40, (3,), generator=generator).tolist()
        cut_into(monkeypatch, rows_per_chunk)
        rows, labels = (torch.randint(0, n, (num_predictions,), generator=generator) for n in (num_rows, 4))
        given = parameters(torch.float64, num_rows, vocab_size=4)
        weights = torch.randint(0, 4, (num_predictions,), generator=generator).double()
        weights[0] += 1  # some prediction counts, or there is no relative error
        assert_equal_in_float64(*(with_gradients(f(labels, rows, weights), given) for f in (ours, by_torch)))


def test_large_logits_stay_finite() -> None:
    hidden, weight, _ = parameters(torch.float32)
    for scale in (1e4, 3e4):
        results = with_gradients(
            lambda h, w, b: linear_cross_entropy(h, w, LABELS, ROWS, WEIGHTS), [hidden * scale, weight, None]
        )
        assert all(x.isfinite().all() for x in results)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch, dealt: str) -> None:
    """Of the loss and of log-likelihoods, from hidden states and from logits. ROWS names some rows several times."""
    leaves = [x.requires_grad_() for x in parameters(torch.float64)]
    logits = linear(*leaves).detach().requires_grad_()
    functions: list[tuple[Any, list[Tensor]]] = [
        (lambda h, w, b=None: linear_cross_entropy(h, w, LABELS, ROWS, WEIGHTS, b), leaves),
        (lambda h, w, b=None: linear_cross_entropy(h, w, LABELS, ROWS, WEIGHTS, b), leaves[:2]),
        (lambda h, w, b=None: linear_logprobs(h, w, LABELS, ROWS, b), leaves),
        (lambda z: logits_cross_entropy(z, LABELS, ROWS, WEIGHTS), [logits]),
        (lambda z: logits_logprobs(z, LABELS, ROWS), [logits]),
    ]
    for rows_per_chunk in (1, 4, 100):
        cut_into(monkeypatch, rows_per_chunk)
        assert all(gradcheck(function, given, fast_mode=True) for function, given in functions)


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


def test_strided_parameters() -> None:
    hidden, weight, bias = parameters(torch.float64)
    views = [hidden.t().contiguous().t(), weight.t().contiguous().t(), bias.repeat_interleave(2)[::2]]
    assert not any(x.is_contiguous() for x in views)
    assert_equal_in_float64(*(with_gradients(ours(), given) for given in (views, [hidden, weight, bias])))


def test_given_tensors_are_left_alone() -> None:
    given = [*parameters(torch.float32), LABELS, ROWS, WEIGHTS, linear(*parameters(torch.float32))]
    before = [x.clone() for x in given]
    with_gradients(ours(), given[:3])
    of_logits(given[-1], LABELS, ROWS, WEIGHTS)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_no_predictions() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for num_rows in (0, 5):
        for dtype in (torch.float32, torch.bfloat16):
            given = parameters(dtype, num_rows)
            results = with_gradients(ours(none, none, torch.zeros(0)), given)
            assert results[0].dtype == torch.float32
            assert [x.shape for x in results] == [(), (num_rows, D), (V, D), (V,)]
            assert not any(x.any() for x in results)
            logits = linear(*given)
            for logprobs in (linear_logprobs(*given[:2], none, none, given[2]), logits_logprobs(logits, none, none)):
                assert logprobs.shape == (0,) and logprobs.dtype == torch.float32
            loss, d_logits = of_logits(logits, none, none, torch.zeros(0))
            assert not loss and not d_logits.any() and d_logits.shape == logits.shape


def test_same_bits_every_time() -> None:
    given = parameters(torch.float32)
    first, *others = (with_gradients(ours(), given) for _ in range(5))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


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
        logits = linear(*parameters(torch.float64)).bfloat16()
        expected = of_logits(logits, LABELS, ROWS, WEIGHTS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = of_logits(logits, LABELS, ROWS, WEIGHTS)
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


class TestPeak:
    """Bytes at the highest point of forward and backward, the gradients among them. Exact, and the same every time."""

    num_rows, hidden_size, vocab_size = 1024, 64, 4096
    chunk = 4 * 128 * vocab_size

    def leaves(self, hidden_size: int, vocab_size: int, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype).requires_grad_()
        weight = (torch.randn(vocab_size, hidden_size, generator=generator) * hidden_size**-0.5).to(dtype)
        return [hidden, weight.requires_grad_()]

    def predictions(self, num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.arange(num_rows) % vocab_size, torch.arange(num_rows), torch.ones(num_rows)

    def peak(self, num_rows: int, hidden_size: int, vocab_size: int, dtype=torch.float32, times: int = 1) -> int:
        hidden, weight = self.leaves(hidden_size, vocab_size, num_rows, dtype)
        for _ in range(times):
            hidden.grad = None
            peak = peak_bytes(
                lambda: linear_cross_entropy(hidden, weight, *self.predictions(num_rows, vocab_size)).backward(), CPU
            )
        return peak

    @pytest.mark.parametrize("times", [1, pytest.param(2, marks=FULL)], ids=["no grad yet", "grad is there"])
    def test_one_gradient_and_one_chunk(self, times: int) -> None:
        """With a `.grad` there is one gradient more than that, the one to be added: counted here, since it is new."""
        gradients = 4 * self.hidden_size * (self.vocab_size + self.num_rows)
        beyond = self.peak(self.num_rows, self.hidden_size, self.vocab_size, times=times) - gradients
        assert self.chunk < beyond < 1.1 * self.chunk, (beyond, self.chunk)
        assert beyond < self.num_rows * self.vocab_size * 4 / 7

    def test_what_needs_no_gradient_has_no_buffer(self) -> None:
        """A frozen head (LoRA), and validation: a chunk of logits, and nothing in the shape of the head."""
        hidden, weight = self.leaves(self.hidden_size, self.vocab_size, self.num_rows, torch.float32)
        predictions = self.predictions(self.num_rows, self.vocab_size)
        frozen = peak_bytes(lambda: linear_cross_entropy(hidden, weight.detach(), *predictions).backward(), CPU)
        assert self.chunk < frozen < 4 * self.hidden_size * self.num_rows + 1.1 * self.chunk
        logits = (hidden @ weight.t()).detach().requires_grad_()
        for grad_mode in (torch.no_grad, torch.inference_mode):
            for loss_of in (
                lambda: linear_cross_entropy(hidden, weight, *predictions),
                lambda: linear_logprobs(hidden, weight, *predictions[:2]),
                lambda: logits_cross_entropy(logits, *predictions),
            ):
                with grad_mode():
                    assert 0 < peak_bytes(loss_of, CPU) < 1.1 * self.chunk

    @FULL
    def test_half_precision_sums_in_float32(self) -> None:
        num_rows, hidden_size, vocab_size = 512, 256, 4096
        in_float32, chunk = 4 * hidden_size * vocab_size, 4 * 128 * vocab_size
        d_hidden = 2 * hidden_size * num_rows
        forward, backward = in_float32 + d_hidden + 1.6 * chunk, 1.5 * in_float32 + d_hidden
        peak = self.peak(num_rows, hidden_size, vocab_size, torch.bfloat16)
        assert backward <= peak < 1.01 * max(forward, backward), (peak, forward, backward)

    @FULL
    def test_logprobs_and_logits(self) -> None:
        """A gradient of what is given, and a chunk."""
        predictions = self.predictions(self.num_rows, self.vocab_size)
        hidden, weight = self.leaves(self.hidden_size, self.vocab_size, self.num_rows, torch.float32)
        gradients = 4 * self.hidden_size * (self.vocab_size + self.num_rows)
        peak = peak_bytes(lambda: linear_logprobs(hidden, weight, *predictions[:2]).sum().backward(), CPU)
        assert gradients + self.chunk < peak < gradients + 1.1 * self.chunk, (peak, gradients, self.chunk)
        logits, gradient = (
            (hidden @ weight.t()).detach().bfloat16().requires_grad_(),
            2 * self.num_rows * self.vocab_size,
        )
        peak = peak_bytes(lambda: logits_cross_entropy(logits, *predictions).backward(), CPU)
        assert gradient < peak < gradient + 1.1 * self.chunk, (peak, gradient, self.chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(
    chunked_by_four: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Fake tensors have no values, so that asking for one raises; what the host may know is their shapes."""
    with FakeTensorMode() as mode:
        hidden, weight, bias = (mode.from_tensor(x).requires_grad_() for x in parameters(dtype))
        labels, rows, weights = (mode.from_tensor(x) for x in (LABELS, ROWS, WEIGHTS))
        with pytest.raises(DataDependentOutputException):
            linear_cross_entropy(hidden, weight, labels, rows, weights, bias)
        monkeypatch.setattr(loss_module, "_on_host", lambda x: False)
        (linear_cross_entropy(hidden, weight, labels, rows, weights, bias) / 3).backward()
        assert [x.grad.shape for x in (hidden, weight, bias)] == [(R, D), (V, D), (V,)]
        logprobs = linear_logprobs(hidden, weight, labels, rows, bias)
        assert logprobs.shape == LABELS.shape
        (weights * logprobs).sum().backward()
        logits = linear(hidden, weight, bias).detach().requires_grad_()
        logits_cross_entropy(logits, labels, rows, weights).backward()
        assert logits.grad.shape == (R, V)
        logits_logprobs(logits, labels, rows).sum().backward()


@FULL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_compiled_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype) -> None:
    """By Inductor for a CPU, whole and once for any number of rows, beside the same functions in eager.

    The maximum and the product have the same bits. A sum is added in another order, and `exp` may differ in its last
    bit, which changes a rounding to 8 bits once in 2**15.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # not what another process is writing
    counter = CompileCounterWithBackend("inductor")
    compile = partial(torch.compile, dynamic=True, fullgraph=True, backend=counter)
    compiled = cache(compile)

    def fused(function: Any, *tensors: Tensor) -> Any:
        for x in tensors:
            torch._dynamo.mark_static(x, [*range(1, x.ndim)])
        return compiled(function)(*tensors)

    def compare(found: list[Tensor], eager: list[Tensor], truth: list[Tensor]) -> None:
        if dtype == torch.float64:
            assert_equal_in_float64(found, truth)
        else:
            assert_within_reference_error(found, eager, truth)

    for num_rows in (40, 200, 65):
        logits = torch.randn(num_rows, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        eager, found = logits.clone(), logits.clone()
        (top, sums), (found_top, found_sums) = loss_module._max_and_sum(eager), fused(loss_module._max_and_sum, found)
        assert torch.equal(top, found_top)
        compare([found_sums], [sums], [(logits.double() - top).exp().sum(-1, keepdim=True)])
        found = eager.clone()
        loss_module._softmax(eager, top, 1 / sums)
        fused(loss_module._softmax, found, top, 1 / sums)
        differ = (eager != found).double().mean()
        assert differ < 2**-13 if dtype == torch.bfloat16 else not differ, differ
    assert counter.frame_count == 2
    monkeypatch.setattr(loss_module, "_on_host", lambda x: False)
    given, predictions = parameters(dtype, 200, 64, 150), random_predictions()
    truth = with_gradients(by_torch(*predictions), [x.double() for x in given])
    reference = with_gradients(ours(*predictions), given)
    monkeypatch.setattr(loss_module, "fused", fused)
    compare(with_gradients(ours(*predictions), given)[1:], reference[1:], truth[1:])  # the loss is one number: luck


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


class TestLogprobs:
    @biases
    def test_log_softmax_of_torch(self, monkeypatch: pytest.MonkeyPatch, dealt: str, bias: bool) -> None:
        hidden, weight, offset = parameters(torch.float64, bias=bias)
        logits = linear(hidden, weight, offset)
        truth = logits.log_softmax(-1)[ROWS, LABELS]
        for rows_per_chunk in CHUNKS:
            cut_into(monkeypatch, rows_per_chunk)
            found = linear_logprobs(hidden, weight, LABELS, ROWS, offset), logits_logprobs(logits, LABELS, ROWS)
            assert_equal_in_float64(found, [truth] * 2)
        assert logits_logprobs(logits.bfloat16(), LABELS, ROWS).dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lower_precision(self, dealt: str, dtype: torch.dtype) -> None:
        labels, rows, _ = random_predictions()
        factors = torch.randn(300, generator=torch.Generator().manual_seed(0))
        given = parameters(dtype, 200, 64, 150)

        def by_torch(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return linear(hidden, weight, bias).to(wide).log_softmax(-1)[rows, labels]

        def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return linear_logprobs(hidden, weight, labels, rows, bias)

        results = []
        for function, tensors in ((ours, given), (by_torch, given), (by_torch, [x.double() for x in given])):
            _, *grads = with_gradients(lambda *x, function=function: (factors * function(*x)).sum(), tensors)
            results.append([function(*tensors), *grads])  # not the sum, which is one number: its rounding is luck
        assert [x.dtype for x in results[0]] == [torch.float32] + [dtype] * 3
        assert_within_reference_error(*results, names=("logprobs", *NAMES[1:]))

    def test_without_gradients(self) -> None:
        leaves = [x.requires_grad_() for x in parameters(torch.float64)]
        with torch.no_grad():
            assert not linear_logprobs(*leaves[:2], LABELS, ROWS, leaves[2]).requires_grad
            assert not logits_logprobs(linear(*leaves).requires_grad_(), LABELS, ROWS).requires_grad
            loss = ours()(*leaves)
        assert not loss.requires_grad and relative_error(loss, ours()(*leaves)) <= 1e-12


FORMULAS = {
    "fused": lambda hidden, weight, labels: ours(labels)(hidden, weight, None),
    "reference": lambda hidden, weight, labels: ours(labels, impl="reference")(hidden, weight, None),
    "logits": lambda hidden, weight, labels: logits_cross_entropy(linear(hidden, weight), labels, ROWS, WEIGHTS),
    "logprobs": lambda hidden, weight, labels: linear_logprobs(hidden, weight, labels, ROWS),
    "logprobs of logits": lambda hidden, weight, labels: logits_logprobs(linear(hidden, weight), labels, ROWS),
}


@pytest.mark.parametrize("label", [-1, -V, -V - 1, V])
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_label_that_is_no_token(dealt: str, formula: str, label: int) -> None:
    """An index of -1 is the last one. On a device it fails the assertion that index V fails."""
    hidden, weight, _ = parameters(torch.float32)
    labels = LABELS.clone()
    labels[3] = label
    says_which = dealt == "on host" or formula == "reference"
    with pytest.raises(IndexError, match=f"Target {label} is out of" if says_which else f"index {V} is out of"):
        FORMULAS[formula](hidden, weight, labels)


@pytest.mark.parametrize("formula", ["fused", "reference", "logits"])
def test_no_prediction_counts(dealt: str, formula: str) -> None:
    """The mean is NaN, as torch's own, and its gradient 0 and not `0 * inf`."""
    for labels, rows, weights in ((LABELS, ROWS, WEIGHTS * 0), (LABELS[:0], ROWS[:0], WEIGHTS[:0])):
        hidden, weight, bias = (x.requires_grad_() for x in parameters(torch.float32))
        if formula == "logits":
            loss = logits_cross_entropy(linear(hidden, weight, bias), labels, rows, weights)
        else:
            loss = ours(labels, rows, weights, formula)(hidden, weight, bias)
        mean = loss / weights.sum()
        mean.backward()
        assert loss.item() == 0 and mean.isnan() and not any(x.grad.any() for x in (hidden, weight, bias))


def test_a_row_that_overflows_and_does_not_count(dealt: str, chunked_by_four: None) -> None:
    """The first row of a chunk, which stands for that of all predictions elsewhere if they are dealt to all."""
    hidden, weight, _ = parameters(torch.float32)
    counts = ROWS != 4

    def found() -> Tensor:
        logprobs = linear_logprobs(hidden, weight, LABELS, ROWS)[counts]
        return torch.cat([logprobs, ours(weights=WEIGHTS * counts)(hidden, weight, None)[None]])

    expected = found()
    hidden[4] = float("inf")
    assert torch.equal(found(), expected)


def of_logits(logits: Tensor, *predictions: Tensor) -> list[Tensor]:
    """Loss and its gradient."""
    leaf = logits.detach().requires_grad_()
    loss = logits_cross_entropy(leaf, *predictions)
    return [loss.detach(), *torch.autograd.grad(loss, leaf)]


class TestOfLogits:
    """The same formula on logits that a model computed itself."""

    def by_torch(self, logits: Tensor, labels: Tensor, rows: Tensor, weights: Tensor) -> list[Tensor]:
        leaf = logits.detach().requires_grad_()
        wide = torch.promote_types(leaf.dtype, torch.float32)
        loss = (weights.to(wide) * cross_entropy(leaf[rows].to(wide), labels, reduction="none")).sum()
        return [loss.detach(), *torch.autograd.grad(loss, leaf)]

    def test_is_the_fused_loss(self, monkeypatch: pytest.MonkeyPatch, dealt: str) -> None:
        given = parameters(torch.float64)
        for rows_per_chunk in CHUNKS:
            cut_into(monkeypatch, rows_per_chunk)
            found = with_gradients(lambda *x: logits_cross_entropy(linear(*x), LABELS, ROWS, WEIGHTS), given)
            assert_equal_in_float64(found, with_gradients(ours(), given))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_lower_precision(self, monkeypatch: pytest.MonkeyPatch, dealt: str, dtype: torch.dtype) -> None:
        """Of the losses of 16 draws together, as above."""
        logits = torch.randn(200, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
        for rows_per_chunk in (40, 10_000):
            cut_into(monkeypatch, rows_per_chunk)
            draws = [
                (of_logits(logits, *each), self.by_torch(logits, *each), self.by_torch(logits.double(), *each))
                for each in map(random_predictions, range(16))
            ]
            results = [[torch.stack(x) for x in zip(*arm, strict=True)] for arm in zip(*draws, strict=True)]
            assert [x.dtype for x in results[0]] == [torch.float32, dtype]
            assert_within_reference_error(*results, names=("loss", "d_logits"))

    def test_a_target_that_is_almost_certain(self, dealt: str) -> None:
        """Its gradient is rounded once: a softmax of 0.999 in bfloat16 is 1, and its gradient would be 0."""
        logits, rows = torch.tensor([[8.0, 0, 0, 1], [0, 9, 1, 1]]).bfloat16(), torch.tensor([0, 0, 1, 0])
        predictions = torch.tensor([0, 0, 1, 3]), rows, torch.tensor([0.3, 1.7, 1.0, 0.0])
        truth = self.by_torch(logits.double(), *predictions)[1]
        assert torch.equal(of_logits(logits, *predictions)[1], truth.bfloat16()) and truth[0, 0] < 0

    @pytest.mark.parametrize("view", ["transposed", "every other row", "one row for all"])
    def test_strided_logits(self, chunked_by_four: None, view: str) -> None:
        logits = linear(*parameters(torch.float64))
        strided = {
            "transposed": logits.t().contiguous().t(),
            "every other row": logits.repeat_interleave(2, 0)[::2],
            "one row for all": logits[:1].expand(R, V),
        }[view]
        expected = self.by_torch(strided.contiguous(), LABELS, ROWS, WEIGHTS)
        assert_equal_in_float64(of_logits(strided, LABELS, ROWS, WEIGHTS), expected)
