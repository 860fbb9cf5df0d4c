"""R predictor rows, P predictions, D hidden, V vocabulary."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import gradcheck
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from radixtrain.bench.memory import peak_bytes
from radixtrain.kernels import loss_chunks
from radixtrain.loss import (
    clipped_policy_loss,
    linear_cross_entropy,
    linear_logprobs,
    logits_cross_entropy,
    logits_logprobs,
)
from radixtrain.testing import assert_within_reference_error, relative_error

NAMES = ("loss", "d_hidden", "d_weight", "d_bias")
R, D, V = 13, 6, 11

# Three predictions at row 4, the same label twice at row 0, none at rows 2 and 7; in no order.
ROWS = torch.tensor([4, 0, 1, 4, 3, 12, 0, 4, 5, 6, 8, 9, 10, 11])
LABELS = torch.tensor([1, 7, 0, 10, 3, 3, 7, 2, 5, 5, 9, 0, 4, 6])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 0.5, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 7.0, 1.0])

biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
chunks = pytest.mark.parametrize("rows_per_chunk", [1, 4, 13, 100])


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


def ours(labels: Tensor = LABELS, rows: Tensor = ROWS, weights: Tensor = WEIGHTS):
    return lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, labels, rows, weights, bias)


def by_torch(labels: Tensor = LABELS, rows: Tensor = ROWS, weights: Tensor = WEIGHTS):
    """One row of logits a prediction, as a stock head computes them; the softmax in float32 or wider, as in HF."""

    def total(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = linear(hidden[rows], weight, bias).to(wide)
        return (weights.to(wide) * cross_entropy(logits, labels, reduction="none")).sum()

    return total


def cut_into(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    monkeypatch.setattr(loss_chunks, "CHUNK_ROWS", (rows_per_chunk, rows_per_chunk))
    monkeypatch.setattr(loss_chunks, "MIN_CHUNK_ELEMENTS", {"cpu": 1, "other": 1})


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> int:
    cut_into(monkeypatch, rows_per_chunk)
    return rows_per_chunk


@pytest.fixture
def chunked_by_four(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(monkeypatch, 4)


@pytest.fixture(params=["on host", "to all"])
def dealt(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """How predictions come to their chunks on CPU, and on accelerators."""
    if request.param == "to all":
        monkeypatch.setattr(loss_chunks, "_deal_on_host", loss_chunks._deal_to_all)
    return request.param


def test_three_targets_at_one_row_literally() -> None:
    """Logits (0, ln 2, ln 3): probabilities 1/6, 2/6, 3/6. Labels 0, 1, 2 stand for 1, 2 and 4 tokens."""
    hidden = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)]], dtype=torch.float64, requires_grad=True)
    rows, labels, weights = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0, 4.0])
    loss = linear_cross_entropy(hidden, weight, labels, rows, weights)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(6) + 2 * math.log(3) + 4 * math.log(2), abs=1e-14)
    d_logits = [7 / 6 - 1, 7 * 2 / 6 - 2, 7 * 3 / 6 - 4]
    assert weight.grad.flatten().tolist() == pytest.approx(d_logits, abs=1e-14)
    assert hidden.grad.item() == pytest.approx(d_logits[1] * math.log(2) + d_logits[2] * math.log(3), abs=1e-14)


@biases
@chunks
def test_cross_entropy_of_torch(chunked: int, dealt: str, bias: bool) -> None:
    given = parameters(torch.float64, bias=bias)
    truth = with_gradients(by_torch(), given)
    errors = [relative_error(x, y) for x, y in zip(with_gradients(ours(), given), truth, strict=True)]
    assert max(errors) <= 1e-12, errors


@biases
@pytest.mark.parametrize("rows_per_chunk", [40, 10_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_lower_precision(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, rows_per_chunk: int) -> None:
    """Losses of 16 draws together: the rounding of a single one is luck."""
    cut_into(monkeypatch, rows_per_chunk)
    given = parameters(dtype, 200, 64, 150, bias)
    results: list[list[list[Tensor]]] = [[], [], []]
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        rows, labels = (torch.randint(0, n, (300,), generator=generator) for n in (200, 150))
        predictions = labels, rows, torch.randint(1, 5, (300,), generator=generator).float()
        in_float64 = [None if x is None else x.double() for x in given]
        results[0].append(with_gradients(ours(*predictions), given))
        results[1].append(with_gradients(by_torch(*predictions), given))
        results[2].append(with_gradients(by_torch(*predictions), in_float64))
    actual, reference, truth = ([torch.stack(x) for x in zip(*draws, strict=True)] for draws in results)
    assert [x.dtype for x in actual] == [torch.float32] + [dtype] * (len(actual) - 1)
    assert_within_reference_error(actual, reference, truth, names=NAMES[: len(actual)])


@chunks
def test_chunks_add_up(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    given = parameters(torch.float64)
    whole = with_gradients(ours(), given)
    cut_into(monkeypatch, rows_per_chunk)
    errors = [relative_error(x, y) for x, y in zip(with_gradients(ours(), given), whole, strict=True)]
    assert max(errors) <= 1e-14, errors


@pytest.mark.parametrize("seed", range(10))
def test_any_predictions(monkeypatch: pytest.MonkeyPatch, dealt: str, seed: int) -> None:
    """Any number of rows, some of them in many predictions and some in none, in any order, in chunks of any size."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_predictions, rows_per_chunk = torch.randint(1, 40, (3,), generator=generator).tolist()
    cut_into(monkeypatch, rows_per_chunk)
    rows, labels = (torch.randint(0, n, (num_predictions,), generator=generator) for n in (num_rows, 4))
    given = parameters(torch.float64, num_rows, vocab_size=4)
    predictions = labels, rows, torch.randint(0, 4, (num_predictions,), generator=generator).double()
    pairs = zip(*(with_gradients(f(*predictions), given) for f in (ours, by_torch)), strict=True)
    errors = [relative_error(actual, truth) for actual, truth in pairs]
    assert max(errors) <= 1e-12, errors


def test_weight_of_a_prediction_is_how_often_it_is_listed() -> None:
    given, times = parameters(torch.float64), WEIGHTS.to(torch.int64)  # the half becomes none
    listed = ours(LABELS.repeat_interleave(times), ROWS.repeat_interleave(times), torch.ones(int(times.sum())))
    merged = ours(weights=times.float())
    errors = [relative_error(*pair) for pair in zip(*(with_gradients(f, given) for f in (merged, listed)), strict=True)]
    assert max(errors) <= 1e-14, errors


def test_integer_weights_and_a_weight_of_zero() -> None:
    hidden, weight, bias = parameters(torch.float64)
    labels, rows = LABELS[:3], ROWS[:3]
    dropped = linear_cross_entropy(hidden, weight, labels, rows, torch.tensor([2, 0, 1]), bias)
    kept = linear_cross_entropy(hidden, weight, labels[[0, 2]], rows[[0, 2]], torch.tensor([2.0, 1.0]), bias)
    assert relative_error(dropped, kept) <= 1e-15


def test_rows_without_a_prediction_get_no_gradient() -> None:
    _, d_hidden, *_ = with_gradients(ours(), parameters(torch.float32))
    named = torch.zeros(R, dtype=torch.bool).index_fill_(0, ROWS, True)
    assert not d_hidden[~named].any()
    assert d_hidden[named].any(-1).all()


@pytest.mark.parametrize("scale", [1e4, 3e4])
def test_large_logits_stay_finite(scale: float) -> None:
    hidden, weight, _ = parameters(torch.float32)
    results = with_gradients(
        lambda h, w, b: linear_cross_entropy(h, w, LABELS, ROWS, WEIGHTS), [hidden * scale, weight, None]
    )
    assert all(x.isfinite().all() for x in results)


@biases
@chunks
def test_gradcheck(chunked: int, dealt: str, bias: bool) -> None:
    leaves = [x.requires_grad_() for x in parameters(torch.float64, bias=bias) if x is not None]
    assert gradcheck(lambda h, w, b=None: linear_cross_entropy(h, w, LABELS, ROWS, WEIGHTS, b), leaves)


def test_differentiating_twice_is_refused() -> None:
    hidden, weight, _ = (x.requires_grad_() for x in parameters(torch.float64))
    loss = linear_cross_entropy(hidden, weight, LABELS, ROWS, WEIGHTS)
    (d_hidden,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_hidden.sum().backward()


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

    def test_twice_where_it_is_not_raises(self) -> None:
        leaves = [x.requires_grad_() for x in parameters(torch.float64)]
        loss = ours()(*leaves)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    def test_unknown_whether_the_graph_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = parameters(torch.float64)
        expected = with_gradients(ours(), given)
        monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
        assert all(torch.equal(x, y) for x, y in zip(with_gradients(ours(), given), expected, strict=True))

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
            assert relative_error(leaf.grad, expected) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_is_scaled_by_what_comes_from_above(dtype: torch.dtype) -> None:
    given = parameters(dtype)
    once = with_gradients(ours(), given)
    half = with_gradients(lambda *x: ours()(*x) / 2, given)
    assert all(torch.equal(x / 2, y) for x, y in zip(once, half, strict=True))


@pytest.mark.parametrize(
    "trained", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_some_are_frozen(trained: tuple[bool, bool, bool]) -> None:
    """A frozen head (LoRA) gets no gradient, and what is trained gets the same."""
    given = parameters(torch.float64)
    expected = with_gradients(ours(), given)
    leaves = [x.clone().requires_grad_(flag) for x, flag in zip(given, trained, strict=True)]
    ours()(*leaves).backward()
    for leaf, flag, gradient in zip(leaves, trained, expected[1:], strict=True):
        assert leaf.grad is None if not flag else torch.equal(leaf.grad, gradient)


def test_strided_parameters() -> None:
    hidden, weight, bias = parameters(torch.float64)
    views = [hidden.t().contiguous().t(), weight.t().contiguous().t(), bias.repeat_interleave(2)[::2]]
    errors = [
        relative_error(*p)
        for p in zip(*(with_gradients(ours(), x) for x in (views, [hidden, weight, bias])), strict=True)
    ]
    assert max(errors) <= 1e-14, errors


def test_given_tensors_are_left_alone() -> None:
    given = [*parameters(torch.float32), LABELS, ROWS, WEIGHTS]
    before = [x.clone() for x in given]
    with_gradients(ours(), given[:3])
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_predictions(num_rows: int, dtype: torch.dtype) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    results = with_gradients(ours(none, none, torch.zeros(0)), parameters(dtype, num_rows))
    assert results[0].dtype == torch.float32
    assert [x.shape for x in results] == [(), (num_rows, D), (V, D), (V,)]
    assert not any(x.any() for x in results)


def test_same_bits_every_time() -> None:
    given = parameters(torch.float32)
    first, *others = (with_gradients(ours(), given) for _ in range(20))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


class TestAutocast:
    def test_is_the_loss_of_bfloat16_parameters(self) -> None:
        given = parameters(torch.float32)
        expected = with_gradients(ours(), [x.bfloat16() for x in given])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = with_gradients(ours(), given)
        assert [x.dtype for x in actual] == [torch.float32] * 4  # gradients have the dtype of the parameters
        assert all(torch.equal(x, y.float()) for x, y in zip(actual, expected, strict=True))

    def test_within_the_error_of_torch_under_autocast(self) -> None:
        """As many rows as make luck average out. The reference runs `linear` under autocast and casts, as HF does."""
        generator = torch.Generator().manual_seed(0)
        rows, labels = (torch.randint(0, n, (300,), generator=generator) for n in (200, 150))
        given = parameters(torch.float32, 200, 64, 150)
        predictions = labels, rows, torch.ones(300)
        truth = with_gradients(by_torch(*predictions), [x.double() for x in given])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reference = with_gradients(by_torch(*predictions), given)
            actual = with_gradients(ours(*predictions), given)
        assert_within_reference_error(actual, reference, truth, names=NAMES)

    def test_backward_outside_of_it(self) -> None:
        leaves = [x.requires_grad_() for x in parameters(torch.float32)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ours()(*leaves)
        loss.backward()
        assert all(x.grad.dtype == torch.float32 for x in leaves)


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor has that any operation made; views and in-place results do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.made.append((x.numel(), str(func), tuple(x.shape)))
        return results

    @property
    def largest(self) -> int:
        return max(self.made)[0]


@pytest.mark.usefixtures("chunked_by_four")
class TestMemory:
    num_rows, hidden_size, vocab_size, num_predictions = 64, 8, 100, 90

    def given(self, requires_grad: bool) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
        leaves = parameters(torch.float32, self.num_rows, self.hidden_size, self.vocab_size)
        rows, labels = (torch.randint(0, n, (self.num_predictions,)) for n in (self.num_rows, self.vocab_size))
        return [x.requires_grad_(requires_grad) for x in leaves], (labels, rows, torch.ones(self.num_predictions))

    def test_probe_sees_the_logits(self) -> None:
        leaves, predictions = self.given(requires_grad=True)
        with LargestTensor() as probe:
            by_torch(*predictions)(*leaves).backward()
        assert probe.largest == self.num_predictions * self.vocab_size

    def test_logits_never_exist_as_a_whole(self) -> None:
        leaves, predictions = self.given(requires_grad=True)
        with LargestTensor() as probe:
            ours(*predictions)(*leaves).backward()
        largest_that_must_be = max(self.vocab_size * self.hidden_size, self.num_rows * self.hidden_size)
        assert probe.largest == largest_that_must_be < self.num_rows * self.vocab_size

    def test_frozen_head_has_no_gradient_buffer(self) -> None:
        leaves, predictions = self.given(requires_grad=False)
        leaves[0].requires_grad_()
        with LargestTensor() as probe:
            ours(*predictions)(*leaves).backward()
        assert probe.largest == self.num_rows * self.hidden_size

    @pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
    def test_no_gradient_is_computed_where_none_is_asked_for(self, grad_mode) -> None:
        """Validation: a chunk of logits, and no buffer in the shape of the head."""
        leaves, predictions = self.given(requires_grad=True)
        with grad_mode(), LargestTensor() as probe:
            loss = ours(*predictions)(*leaves)
        assert not loss.requires_grad
        assert probe.largest == 4 * self.vocab_size, max(probe.made)

    def test_logprobs(self) -> None:
        (hidden, weight, bias), (labels, rows, _) = self.given(requires_grad=True)
        with LargestTensor() as probe:
            linear_logprobs(hidden, weight, labels, rows, bias)
        assert probe.largest == 4 * self.vocab_size


class TestPeak:
    """Bytes at the highest point of forward and backward, the gradients among them. Exact, and the same every time."""

    def peak(self, num_rows: int, hidden_size: int, vocab_size: int, dtype=torch.float32, times: int = 1) -> int:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype).requires_grad_()
        weight = (torch.randn(vocab_size, hidden_size, generator=generator) * hidden_size**-0.5).to(dtype)
        weight.requires_grad_()
        labels = torch.randint(0, vocab_size, (num_rows,), generator=generator)
        rows, ones = torch.arange(num_rows), torch.ones(num_rows)
        for _ in range(times):
            hidden.grad = None
            peak = peak_bytes(
                lambda: (linear_cross_entropy(hidden, weight, labels, rows, ones) / num_rows).backward(),
                torch.device("cpu"),
            )
        return peak

    @pytest.mark.parametrize("times", [1, 2], ids=["no grad yet", "grad is there"])
    def test_one_gradient_and_one_chunk(self, times: int) -> None:
        """With a `.grad` there is one gradient more than that, the one to be added: counted here, since it is new."""
        num_rows, hidden_size, vocab_size = 1024, 64, 4096
        gradients = 4 * hidden_size * (vocab_size + num_rows)
        chunk = 4 * 128 * vocab_size
        beyond = self.peak(num_rows, hidden_size, vocab_size, times=times) - gradients
        assert chunk < beyond < 1.1 * chunk, (beyond, chunk)
        assert beyond < num_rows * vocab_size * 4 / 7

    def test_half_precision_sums_in_float32(self) -> None:
        num_rows, hidden_size, vocab_size = 512, 256, 4096
        in_float32, chunk = 4 * hidden_size * vocab_size, 4 * 128 * vocab_size
        d_hidden = 2 * hidden_size * num_rows
        forward, backward = in_float32 + d_hidden + 1.6 * chunk, 1.5 * in_float32 + d_hidden
        peak = self.peak(num_rows, hidden_size, vocab_size, torch.bfloat16)
        assert backward <= peak < 1.01 * max(forward, backward), (peak, forward, backward)

    def test_grows_with_the_rows_by_their_gradient_alone(self) -> None:
        one, two = (self.peak(num_rows, 32, 4096) for num_rows in (1024, 2048))
        assert two - one < 2 * 1024 * 32 * 4

    @pytest.mark.full
    def test_qwen3(self) -> None:
        """4,096 predictions, whose logits would take 2.5 GB. An eighth of them, to save time: chunks are as large."""
        num_rows, hidden_size, vocab_size = 512, 1024, 151_936
        sizes = {loss_chunks.rows_per_chunk(n, vocab_size, hidden_size, torch.device("cpu")) for n in (num_rows, 4096)}
        assert sizes == {256}
        peak = self.peak(num_rows, hidden_size, vocab_size)
        d_hidden_of_the_others = 4 * hidden_size * (4096 - num_rows)
        assert peak + d_hidden_of_the_others - 4 * hidden_size * vocab_size < 200e6


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
        monkeypatch.setattr(loss_chunks, "_deal_on_host", loss_chunks._deal_to_all)
        (linear_cross_entropy(hidden, weight, labels, rows, weights, bias) / 3).backward()
        assert [x.grad.shape for x in (hidden, weight, bias)] == [(R, D), (V, D), (V,)]
        logprobs = linear_logprobs(hidden, weight, labels, rows, bias)
        assert logprobs.shape == LABELS.shape
        clipped_policy_loss(logprobs, weights, weights, logprobs.detach()).backward()


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


def test_no_grad_gives_the_same_loss() -> None:
    given = parameters(torch.float32)
    with torch.no_grad():
        loss = ours()(*(x.requires_grad_() for x in given))
    assert not loss.requires_grad
    assert torch.equal(loss, with_gradients(ours(), given)[0])


class TestLogprobs:
    @biases
    @chunks
    def test_log_softmax_of_torch(self, chunked: int, dealt: str, bias: bool) -> None:
        hidden, weight, offset = parameters(torch.float64, bias=bias)
        truth = linear(hidden, weight, offset).log_softmax(-1)[ROWS, LABELS]
        assert relative_error(linear_logprobs(hidden, weight, LABELS, ROWS, offset), truth) <= 1e-12

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lower_precision(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        rows, labels = (torch.randint(0, n, (300,), generator=generator) for n in (200, 150))
        hidden, weight, bias = parameters(dtype, 200, 64, 150)
        truth = linear(hidden.double(), weight.double(), bias.double()).log_softmax(-1)[rows, labels]
        reference = linear(hidden, weight, bias).float().log_softmax(-1)[rows, labels]
        assert_within_reference_error(linear_logprobs(hidden, weight, labels, rows, bias), reference, truth)

    @biases
    @chunks
    def test_gradcheck(self, chunked: int, dealt: str, bias: bool) -> None:
        leaves = [x.requires_grad_() for x in parameters(torch.float64, bias=bias) if x is not None]
        assert gradcheck(lambda h, w, b=None: linear_logprobs(h, w, LABELS, ROWS, b), leaves)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_in_lower_precision(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        rows, labels = (torch.randint(0, n, (300,), generator=generator) for n in (200, 150))
        factors, given = torch.randn(300, generator=generator), parameters(dtype, 200, 64, 150)

        def by_torch(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return (factors * linear(hidden, weight, bias).to(wide).log_softmax(-1)[rows, labels]).sum()

        truth = with_gradients(by_torch, [x.double() for x in given])
        actual = with_gradients(lambda h, w, b: (factors * linear_logprobs(h, w, labels, rows, b)).sum(), given)
        assert [x.dtype for x in actual] == [torch.float32] + [dtype] * 3
        # Not the sum itself, which is one number: its rounding is luck.
        assert_within_reference_error(actual[1:], with_gradients(by_torch, given)[1:], truth[1:], names=NAMES[1:])

    def test_gradients_under_autocast(self) -> None:
        given = parameters(torch.float32)
        expected = with_gradients(
            lambda *x: linear_logprobs(*x[:2], LABELS, ROWS, x[2]).sum(), [x.bfloat16() for x in given]
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = with_gradients(lambda *x: linear_logprobs(*x[:2], LABELS, ROWS, x[2]).sum(), given)
        assert [x.dtype for x in actual] == [torch.float32] * 4
        assert all(torch.equal(x, y.float()) for x, y in zip(actual, expected, strict=True))

    def test_a_frozen_head_gets_no_gradient(self) -> None:
        hidden, weight, bias = parameters(torch.float64)
        linear_logprobs(hidden.requires_grad_(), weight, LABELS, ROWS, bias).sum().backward()
        assert hidden.grad is not None and weight.grad is None and bias.grad is None

    def test_twice_where_the_graph_is_kept(self) -> None:
        leaves = [x.requires_grad_() for x in parameters(torch.float64)]
        total = linear_logprobs(*leaves[:2], LABELS, ROWS, leaves[2]).sum()
        first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    def test_without_gradients(self) -> None:
        hidden, weight, bias = (x.requires_grad_() for x in parameters(torch.float64))
        with torch.no_grad():
            assert not linear_logprobs(hidden, weight, LABELS, ROWS, bias).requires_grad

    def test_holds_the_gradients_and_a_chunk(self) -> None:
        num_rows, hidden_size, vocab_size = 1024, 64, 4096
        hidden, weight, _ = (x.requires_grad_() for x in parameters(torch.float32, num_rows, hidden_size, vocab_size))
        labels, rows = torch.randint(0, vocab_size, (num_rows,)), torch.arange(num_rows)
        peak = peak_bytes(lambda: linear_logprobs(hidden, weight, labels, rows).sum().backward(), torch.device("cpu"))
        gradients, chunk = 4 * hidden_size * (vocab_size + num_rows), 4 * 128 * vocab_size
        assert gradients + chunk < peak < gradients + 1.1 * chunk, (peak, gradients, chunk)

    def test_is_the_loss(self) -> None:
        hidden, weight, bias = (x.requires_grad_() for x in parameters(torch.float64))
        logprobs = linear_logprobs(hidden, weight, LABELS, ROWS, bias)
        assert relative_error(-(logprobs * WEIGHTS).sum(), ours()(hidden, weight, bias)) <= 1e-12

    @pytest.mark.parametrize("num_rows", [0, 5])
    def test_no_predictions(self, num_rows: int) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        hidden, weight, bias = parameters(torch.bfloat16, num_rows)
        logprobs = linear_logprobs(hidden, weight, none, none, bias)
        assert logprobs.shape == (0,) and logprobs.dtype == torch.float32


class TestOfLogits:
    """The same formula on logits that a model computed itself."""

    def logits(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return linear(*parameters(torch.float64)).to(dtype)

    def with_gradient(self, logits: Tensor, *predictions: Tensor) -> list[Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = logits_cross_entropy(leaf, *predictions)
        return [loss.detach(), *torch.autograd.grad(loss, leaf)]

    def by_torch(self, logits: Tensor, labels: Tensor, rows: Tensor, weights: Tensor) -> list[Tensor]:
        leaf = logits.detach().requires_grad_()
        wide = torch.promote_types(leaf.dtype, torch.float32)
        loss = (weights.to(wide) * cross_entropy(leaf[rows].to(wide), labels, reduction="none")).sum()
        return [loss.detach(), *torch.autograd.grad(loss, leaf)]

    def test_three_targets_at_one_row_literally(self) -> None:
        logits = torch.tensor([[0.0, math.log(2), math.log(3)]], dtype=torch.float64)
        labels, weights = torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0, 4.0])
        loss, d_logits = self.with_gradient(logits, labels, torch.zeros(3, dtype=torch.int64), weights)
        assert loss.item() == pytest.approx(math.log(6) + 2 * math.log(3) + 4 * math.log(2), abs=1e-14)
        assert d_logits[0].tolist() == pytest.approx([7 / 6 - 1, 7 * 2 / 6 - 2, 7 * 3 / 6 - 4], abs=1e-14)

    @chunks
    def test_gradcheck(self, chunked: int, dealt: str) -> None:
        logits = self.logits().requires_grad_()
        assert gradcheck(lambda z: logits_cross_entropy(z, LABELS, ROWS, WEIGHTS), logits)

    @chunks
    def test_is_the_fused_loss(self, chunked: int, dealt: str) -> None:
        given = parameters(torch.float64)
        of_logits = with_gradients(lambda *x: logits_cross_entropy(linear(*x), LABELS, ROWS, WEIGHTS), given)
        errors = [relative_error(x, y) for x, y in zip(of_logits, with_gradients(ours(), given), strict=True)]
        assert max(errors) <= 1e-14, errors

    @pytest.mark.parametrize("rows_per_chunk", [40, 10_000])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_lower_precision(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows_per_chunk: int) -> None:
        cut_into(monkeypatch, rows_per_chunk)
        generator = torch.Generator().manual_seed(0)
        rows, labels = (torch.randint(0, n, (300,), generator=generator) for n in (200, 150))
        predictions = labels, rows, torch.randint(1, 5, (300,), generator=generator).float()
        logits = torch.randn(200, 150, generator=generator).to(dtype)
        actual = self.with_gradient(logits, *predictions)
        assert [x.dtype for x in actual] == [torch.float32, dtype]
        reference, truth = self.by_torch(logits, *predictions), self.by_torch(logits.double(), *predictions)
        assert_within_reference_error(actual, reference, truth, names=("loss", "d_logits"))

    @pytest.mark.parametrize("view", ["transposed", "every other row", "one row for all"])
    def test_strided_logits(self, chunked_by_four: None, view: str) -> None:
        logits = self.logits()
        strided = {
            "transposed": logits.t().contiguous().t(),
            "every other row": logits.repeat_interleave(2, 0)[::2],
            "one row for all": logits[:1].expand(R, V),
        }[view]
        expected = self.by_torch(strided.contiguous(), LABELS, ROWS, WEIGHTS)
        actual = self.with_gradient(strided, LABELS, ROWS, WEIGHTS)
        assert max(relative_error(x, y) for x, y in zip(actual, expected, strict=True)) <= 1e-14

    def test_given_tensors_are_left_alone(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            given = [self.logits(dtype), LABELS, ROWS, WEIGHTS]
            before = [x.clone() for x in given]
            self.with_gradient(*given)
            logits_logprobs(*given[:3])
            assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))

    @pytest.mark.parametrize("num_rows", [0, 5])
    def test_no_predictions(self, num_rows: int) -> None:
        none, logits = torch.zeros(0, dtype=torch.int64), torch.randn(num_rows, V, dtype=torch.bfloat16)
        loss, d_logits = self.with_gradient(logits, none, none, torch.zeros(0))
        assert loss.dtype == torch.float32 and not loss and not d_logits.any() and d_logits.shape == logits.shape
        assert logits_logprobs(logits, none, none).shape == (0,)

    def test_logprobs(self, chunked_by_four: None, dealt: str) -> None:
        logits = self.logits().requires_grad_()
        logprobs = logits_logprobs(logits, LABELS, ROWS)
        assert relative_error(logprobs, logits.log_softmax(-1)[ROWS, LABELS]) <= 1e-14
        assert logits_logprobs(logits.bfloat16(), LABELS, ROWS).dtype == torch.float32

    @chunks
    def test_gradcheck_of_logprobs(self, chunked: int, dealt: str) -> None:
        logits = self.logits().requires_grad_()
        assert gradcheck(lambda z: logits_logprobs(z, LABELS, ROWS), logits)
        assert not torch.no_grad()(logits_logprobs)(logits, LABELS, ROWS).requires_grad

    def test_no_gradient_is_computed_where_none_is_asked_for(self, chunked_by_four: None) -> None:
        logits = self.logits(torch.float32).requires_grad_()
        with torch.no_grad(), LargestTensor() as probe:
            loss = logits_cross_entropy(logits, LABELS, ROWS, WEIGHTS)
        assert not loss.requires_grad
        assert probe.largest == 5 * V, max(probe.made)  # 13 rows evenly cut

    def test_twice_where_the_graph_is_kept(self) -> None:
        _, expected = self.with_gradient(self.logits(), LABELS, ROWS, WEIGHTS)
        leaf = self.logits().requires_grad_()
        loss = 3 * logits_cross_entropy(leaf, LABELS, ROWS, WEIGHTS)
        for retain_graph in (True, False):
            leaf.grad = None
            loss.backward(retain_graph=retain_graph)
            assert relative_error(leaf.grad, 3 * expected) <= 1e-15

    def test_under_autocast_it_is_computed_in_float32(self) -> None:
        logits = self.logits(torch.bfloat16)
        expected = self.with_gradient(logits, LABELS, ROWS, WEIGHTS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = self.with_gradient(logits, LABELS, ROWS, WEIGHTS)
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))

    def test_holds_a_gradient_and_a_chunk(self) -> None:
        num_rows, vocab_size = 1024, 4096
        logits = torch.randn(num_rows, vocab_size, dtype=torch.bfloat16).requires_grad_()
        labels, rows, ones = torch.randint(0, vocab_size, (num_rows,)), torch.arange(num_rows), torch.ones(num_rows)
        peak = peak_bytes(lambda: logits_cross_entropy(logits, labels, rows, ones).backward(), torch.device("cpu"))
        gradient, chunk = 2 * num_rows * vocab_size, 4 * 128 * vocab_size
        assert gradient < peak < gradient + 1.1 * chunk, (peak, gradient, chunk)

    def test_nothing_waits_for_the_device(self, chunked_by_four: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loss_chunks, "_deal_on_host", loss_chunks._deal_to_all)
        with FakeTensorMode() as mode:
            logits, labels, rows, weights = (mode.from_tensor(x) for x in (self.logits(), LABELS, ROWS, WEIGHTS))
            loss = logits_cross_entropy(logits.requires_grad_(), labels, rows, weights)
            loss.backward()
            assert logits.grad.shape == (R, V)
            logprobs = logits_logprobs(logits, labels, rows)
            assert logprobs.shape == LABELS.shape
            logprobs.sum().backward()


class TestClippedPolicyLoss:
    OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    LOGPROBS = OLD + torch.tensor([0.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)  # ratios 1, e, e, 1/e, 1/e
    ADVANTAGES = torch.tensor([2.0, 1.0, -1.0, 1.0, -3.0], dtype=torch.float64)
    WEIGHTS = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0], dtype=torch.float64)

    def test_literally(self) -> None:
        """A ratio is held where it would gain from going further: 2 at most at e, and 0.75 at least at 1/e."""
        logprobs = self.LOGPROBS.clone().requires_grad_()
        loss = clipped_policy_loss(logprobs, self.ADVANTAGES, self.WEIGHTS, self.OLD, epsilon=0.25, epsilon_high=1.0)
        loss.backward()
        assert loss.item() == pytest.approx(-(2 + 2 - 2 * math.e + 1 / math.e - 3 * 0.75), abs=1e-14)
        assert logprobs.grad.tolist() == pytest.approx([-2, 0, 2 * math.e, -1 / math.e, 0], abs=1e-14)

    def test_the_bounds_are_alike_unless_it_is_said(self) -> None:
        given = self.LOGPROBS, self.ADVANTAGES, self.WEIGHTS, self.OLD
        assert torch.equal(clipped_policy_loss(*given, 0.5), clipped_policy_loss(*given, 0.5, 0.5))
        assert torch.equal(clipped_policy_loss(*given), clipped_policy_loss(*given, 0.2))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"advantages": torch.ones(4, 1)}, r"advantages must be \(P,\) as logprobs: got \[4, 1\] and \[4\]"),
            ({"loss_weights": torch.ones(1)}, r"loss_weights must be \(P,\)"),
            ({"old_logprobs": torch.ones(3)}, r"old_logprobs must be \(P,\)"),
            ({"epsilon": -1.0}, r"epsilon must be in \(0, 1\)"),
            ({"epsilon_high": 0.0}, "epsilon_high above 0, got 0.2 and 0.0"),
        ],
    )
    def test_what_would_be_broadcast_is_refused(self, changed, message):
        given = {"logprobs": torch.zeros(4), "advantages": torch.ones(4), "loss_weights": torch.ones(4)}
        with pytest.raises(ValueError, match=message):
            clipped_policy_loss(**{**given, **changed})

    def test_of_the_policy_as_it_is_now(self) -> None:
        """Then the gradient is that of the log-likelihood, weighted by the advantages."""
        logprobs = self.LOGPROBS.clone().requires_grad_()
        loss = clipped_policy_loss(logprobs, self.ADVANTAGES, self.WEIGHTS)
        loss.backward()
        assert loss.item() == pytest.approx(-(self.WEIGHTS * self.ADVANTAGES).sum().item())
        assert torch.equal(logprobs.grad, -self.WEIGHTS * self.ADVANTAGES)
