"""What a cell of the benchmark holds, what it refuses to measure, and that its numbers can be true."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import radixtrain.bench.baseline
import radixtrain.hf.attention
from radixtrain.bench.arms import hidden_states, loss_terms, set_arm
from radixtrain.bench.baseline import fastest_ordinary
from radixtrain.bench.flops import ideal_speedup
from radixtrain.bench.measure import (
    Cell,
    Measured,
    ModelShape,
    Rows,
    Settings,
    build_model,
    make_work,
    measure,
    work_of,
)
from radixtrain.bench.work import UNTIMED_TOKENS, with_ordinary_rows
from radixtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)
NESTED = replace(FLAT, tree="nested")
CPU = torch.device("cpu")


def model_of(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> Any:
    return build_model(shape, CPU, dtype, "sdpa")


def measured(cell: Cell, **settings: Any) -> list[Measured]:
    return measure(model_of(cell.model), make_work(cell), Settings(repeats=1, **settings))


def ragged_features(groups: int = 2, branches: int = 4) -> list[dict[str, Any]]:
    """Prompts of 20, 21, ... tokens, each with tails of 3, 4, ... tokens that bear the loss; shuffled."""
    rng = np.random.default_rng(1)
    features = []
    for group in range(groups):
        prompt = rng.integers(0, 97, 20 + group)
        for branch in range(branches):
            ids = np.concatenate([prompt, rng.integers(0, 97, 3 + branch)])
            features.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)})
    return [features[index] for index in rng.permutation(len(features))]


RAGGED = Rows(SHAPE, "8 of train.jsonl", 8)


class TestWork:
    def test_a_flat_tree_shares_the_prompt(self) -> None:
        (plan,) = make_work(FLAT).plans
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (8 * 46, 40 + 8 * 6, 2)

    def test_a_nested_tree_has_three_levels(self) -> None:
        (plan,) = make_work(NESTED).plans
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (8 * 46, 20 + 2 * 20 + 8 * 6, 3)
        assert make_work(replace(NESTED, num_sequences=9)).num_unique_tokens("cascade") == 20 + 3 * 20 + 9 * 6

    @pytest.mark.parametrize("cell", [replace(FLAT, num_sequences=1), replace(FLAT, prompt_length=0)])
    def test_nothing_to_share(self, cell: Cell) -> None:
        work = make_work(cell)
        assert work.num_tokens == work.num_unique_tokens("cascade")
        assert work.ideal_speedup(SHAPE.config()) == 1.0

    @pytest.mark.parametrize("cell", [FLAT, NESTED])
    def test_the_loss_is_on_the_suffixes(self, cell: Cell) -> None:
        work = make_work(cell)
        assert work.num_labels == int(work.radix[0].tensors["radix_loss_weights"].sum()) == 8 * 6
        assert all((feature["labels"] != -100).sum() == 6 for feature in work.features)

    def test_the_ordinary_batch_has_no_padding(self) -> None:
        (batch,) = make_work(NESTED).ordinary
        assert batch.tensors["input_ids"].shape == (8, 46) and batch.tensors["attention_mask"].all()

    def test_a_cell_is_the_same_every_time(self) -> None:
        first, second = make_work(NESTED), make_work(NESTED)
        assert all(
            np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(first.features, second.features, strict=True)
        )

    def test_ideal_is_that_of_cost(self) -> None:
        work = make_work(FLAT)
        # a suffix of 6 has 5 predictors of its own and shares the last token of the prompt with all others
        assert work.ideal_speedup(SHAPE.config()) == ideal_speedup(SHAPE.config(), work.plans[0], 8 * 6, 1 + 8 * 5)

    def test_a_step_is_three_forward_passes(self) -> None:
        forward = make_work(replace(FLAT, mode="forward")).ordinary_teraflops(SHAPE.config())
        assert make_work(FLAT).ordinary_teraflops(SHAPE.config()) == pytest.approx(3 * forward)

    def test_an_ordinary_arm_that_is_not_timed_is_cut_small(self) -> None:
        cell = replace(FLAT, prompt_length=UNTIMED_TOKENS // 2 - 6)
        batches = make_work(cell, is_ordinary_timed=False).ordinary
        assert [batch.tensors["input_ids"].shape for batch in batches] == 4 * [(2, UNTIMED_TOKENS // 2)]

    @pytest.mark.parametrize(("name", "value"), [("tree", "deep"), ("mode", "backward")])
    def test_an_unknown_choice(self, name: str, value: str) -> None:
        with pytest.raises(UserError, match=f"{name} must be one of .*, got {value}"):
            replace(FLAT, **{name: value})


class TestGivenRows:
    """Sequences of a user's own, which differ in length."""

    def test_ordinary_micro_batches_are_sorted_by_length(self) -> None:
        features = ragged_features()
        work = work_of(RAGGED, features, rows=3)
        lengths = [[len(features[index]["input_ids"]) for index in batch.members] for batch in work.ordinary]
        assert lengths == [[27, 26, 26], [25, 25, 24], [24, 23]]
        assert [tuple(batch.tensors["input_ids"].shape) for batch in work.ordinary] == [(3, 27), (3, 25), (2, 24)]

    def test_radix_micro_batches_keep_the_budget(self) -> None:
        work = work_of(RAGGED, ragged_features(), max_tokens=40)
        assert [len(batch.members) for batch in work.radix] == [4, 4]
        assert sorted(index for batch in work.radix for index in batch.members) == list(range(8))
        assert (work.num_tokens, work.num_unique_tokens("cascade")) == (4 * 41 + 2 * 18, 41 + 2 * 18)

    def test_the_arithmetic_counts_no_padding_and_every_micro_batch(self) -> None:
        features = ragged_features()
        whole, cut = (work_of(RAGGED, features, max_tokens=size) for size in (None, 40))
        assert work_of(RAGGED, features, rows=3).ordinary_teraflops(SHAPE.config()) == pytest.approx(
            whole.ordinary_teraflops(SHAPE.config())
        )
        assert whole.ideal_speedup(SHAPE.config()) == pytest.approx(cut.ideal_speedup(SHAPE.config()))
        alone = work_of(RAGGED, features, max_tokens=1)
        assert alone.ideal_speedup(SHAPE.config()) == 1.0

    @pytest.mark.parametrize("mode", ["step", "forward"])
    @pytest.mark.parametrize("max_tokens", [None, 40])
    def test_they_are_checked_and_measured(self, mode: Any, max_tokens: int | None) -> None:
        work = work_of(replace(RAGGED, mode=mode), ragged_features(), 3, max_tokens)
        (result,) = measure(model_of(), work, Settings(("cascade",), repeats=1))
        assert (result.num_tokens, result.num_unique_tokens) == (200, 77)
        assert result.measured_speedup and result.error < 1e-5

    @pytest.mark.parametrize("keep_mask", [True, False])
    def test_both_arms_have_the_loss_of_hugging_face(self, keep_mask: bool) -> None:
        model, features = model_of(), ragged_features()
        work = with_ordinary_rows(work_of(RAGGED, features, max_tokens=40), 3, keep_mask)
        labels = [torch.tensor(feature["labels"]) for feature in features]
        ids = [torch.tensor(feature["input_ids"]) for feature in features]
        total = sum(
            model(input_ids=i[None], labels=y[None]).loss * (y[1:] >= 0).sum() for i, y in zip(ids, labels, strict=True)
        )
        assert work.ordinary[0].tensors["attention_mask"].all() == (not keep_mask)
        for arm in (None, "cascade"):
            set_arm(model, arm, "auto")
            assert sum(loss_terms(model, work, arm)).item() == pytest.approx(total.item() / work.num_labels, rel=1e-6)

    def test_hidden_states_come_in_the_order_of_the_sequences(self) -> None:
        model, features = model_of(), ragged_features()
        work = work_of(RAGGED, features, 3, 40)
        alone = [model.model(torch.tensor(feature["input_ids"])[None]).last_hidden_state[0] for feature in features]
        for arm in (None, "path"):
            set_arm(model, arm, "auto")
            torch.testing.assert_close(hidden_states(model, work, arm), torch.cat(alone), atol=1e-5, rtol=1e-5)

    def test_a_step_without_labels(self) -> None:
        features = [{"input_ids": [1, 2], "labels": [-100, -100]}]
        with pytest.raises(UserError, match=r"2x32, 8 of train\.jsonl, step: no token bears loss"):
            work_of(RAGGED, features)


class TestFastestOrdinary:
    def test_the_fastest_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = {}

        def timed(model: Any, runs: dict[int, Any], kernel: str, repeats: int) -> dict[int, list[float]]:
            asked.update({size: len(work.ordinary) for size, (work, _) in runs.items()})
            return {size: [9.0, abs(size - 3.0), 0.0] for size in runs}

        monkeypatch.setattr(radixtrain.bench.baseline, "seconds_in_turns", timed)
        work, seconds = fastest_ordinary(model_of(), work_of(RAGGED, ragged_features()), (2, 3, 50, None))
        assert asked == {2: 4, 3: 3, 8: 1}  # more rows than there are is all of them, once
        assert seconds == {2: 1.0, 3: 0.0, 8: 5.0}
        assert len(work.ordinary) == 3

    def test_what_memory_does_not_hold_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_step = radixtrain.bench.baseline.run_step

        def small(model: Any, work: Any, arm: str | None) -> None:
            if len(work.ordinary) == 1:
                raise torch.OutOfMemoryError
            run_step(model, work, arm)

        monkeypatch.setattr(radixtrain.bench.baseline, "run_step", small)
        work, seconds = fastest_ordinary(model_of(), work_of(RAGGED, ragged_features()), (4, None), repeats=1)
        assert seconds[8] == math.inf > seconds[4] > 0 and len(work.ordinary) == 2
        with pytest.raises(UserError, match=r"the device's memory holds no ordinary micro-batch of \[8\] rows"):
            fastest_ordinary(model_of(), work, (None,))


def test_measuring_needs_torch_transformers_and_numpy_alone() -> None:
    """On a machine with a GPU nothing else need be installed."""
    code = """
import sys
for name in ("jsonargparse", "datasets", "lightning", "rich", "matplotlib", "wandb", "flash_attn", "peft", "trl"):
    sys.modules[name] = None
import torch
from radixtrain.bench.measure import Cell, ModelShape, Settings, build_model, make_work, measure
shape = ModelShape(num_hidden_layers=1, hidden_size=16, head_dim=8, vocab_size=50)
model = build_model(shape, torch.device("cpu"), torch.float32, "sdpa")
(result,) = measure(model, make_work(Cell(shape, 8, 3, 4)), Settings(("cascade",), repeats=1))
print(result.num_tokens, result.num_unique_tokens)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["44", "20"]


class TestShape:
    def test_what_is_left_out_follows_from_the_width(self) -> None:
        config = ModelShape(hidden_size=256).config()
        sizes = config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert sizes == (768, 4, 2, 64)

    def test_name(self) -> None:
        assert str(ModelShape(2, 128)) == "2x128"
        assert str(ModelShape(name="Qwen3-0.6B")) == "Qwen3-0.6B"

    def test_the_weights_are_the_same_every_time(self) -> None:
        first, second = (model_of().state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


class TestMeasure:
    @pytest.mark.parametrize("cell", [FLAT, NESTED, replace(FLAT, num_sequences=1), replace(NESTED, mode="forward")])
    def test_every_strategy_is_measured(self, cell: Cell) -> None:
        strategies = ("cascade", "path", "expand")
        results = measured(cell, attention=strategies)
        assert tuple(result.attention for result in results) == strategies
        for result in results:
            assert result.num_tokens == cell.num_sequences * 46
            assert result.ordinary_seconds > 0 and result.radix_seconds > 0
            assert result.efficiency == result.measured_speedup / result.ideal_speedup
            assert result.radix_tokens_per_second == result.num_tokens / result.radix_seconds
            assert result.error < 1e-5

    @pytest.mark.parametrize("mode", ["step", "forward"])
    def test_unique_tokens_hold_less_memory(self, mode: Any) -> None:
        cell = replace(FLAT, prompt_length=200, num_sequences=16, mode=mode)
        (result,) = measured(cell, attention=("cascade",))
        assert result.r > 10
        assert 3 * result.radix_peak_bytes < result.ordinary_peak_bytes
        hidden_states = cell.num_sequences * 206 * 32 * 4  # (T, D) once; a forward pass holds several
        assert 3 * hidden_states < result.ordinary_peak_bytes < 2**27

    def test_memory_is_the_same_every_time(self) -> None:
        first, second = (measured(FLAT, attention=("cascade",))[0] for _ in range(2))
        assert first.ordinary_peak_bytes == second.ordinary_peak_bytes
        assert first.radix_peak_bytes == second.radix_peak_bytes

    def test_a_forward_pass_holds_less_than_a_step(self) -> None:
        (step,) = measured(FLAT, attention=("path",))
        (forward,) = measured(replace(FLAT, mode="forward"), attention=("path",))
        assert forward.radix_peak_bytes < step.radix_peak_bytes
        assert forward.ordinary_peak_bytes < step.ordinary_peak_bytes

    def test_the_model_comes_back(self) -> None:
        model = model_of()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        measure(model, make_work(FLAT), Settings(repeats=1))
        assert model.config._attn_implementation == "sdpa"
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_both_arms_have_the_loss_of_hugging_face(self) -> None:
        model, work = model_of(), make_work(NESTED)
        labels = torch.tensor(np.stack([feature["labels"] for feature in work.features]))
        truth = model(input_ids=work.ordinary[0].tensors["input_ids"], labels=labels).loss
        for arm in (None, "cascade"):
            set_arm(model, arm, "auto")
            (term,) = loss_terms(model, work, arm)
            assert term.item() == pytest.approx(truth.item(), rel=1e-6)

    def test_nothing_to_share_holds_as_much_memory(self) -> None:
        (result,) = measured(replace(FLAT, prompt_length=0, suffix_length=40), attention=("cascade",))
        assert result.r == result.ideal_speedup == 1.0
        assert result.memory_ratio == result.ordinary_peak_bytes / result.radix_peak_bytes > 0.8

    @pytest.mark.parametrize("mode", ["step", "forward"])
    def test_the_radix_arm_alone(self, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.bench.work.UNTIMED_TOKENS", 3 * 46)
        work = make_work(replace(FLAT, mode=mode), is_ordinary_timed=False)
        assert [len(batch.members) for batch in work.ordinary] == [3, 3, 2]
        (result,) = measure(model_of(), work, Settings(("cascade",), repeats=2, ordinary=False))
        nothing = (result.ordinary_seconds, result.measured_speedup, result.efficiency, result.memory_ratio)
        assert nothing == (None, None, None, None) and result.highest_speedup is None
        assert result.microseconds_per_unique_token == 1e6 * result.radix_seconds / (40 + 8 * 6)
        assert result.lowest_radix_seconds <= result.radix_seconds <= result.highest_radix_seconds
        assert 0 < result.error < 1e-5 and result.radix_peak_bytes > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("cell", [FLAT, replace(NESTED, mode="forward")])
    @pytest.mark.parametrize("float64_truth", [False, True])
    def test_every_truth(self, dtype: torch.dtype, cell: Cell, float64_truth: bool) -> None:
        settings = Settings(("cascade",), repeats=1, float64_truth=float64_truth)
        (result,) = measure(model_of(dtype=dtype), make_work(cell), settings)
        low, high = (1e-4, 0.2) if dtype == torch.bfloat16 else (0.0, 1e-5)
        assert low <= result.error < high


@pytest.fixture
def scaled_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """`scaled_attention(by, backward)`: keys, or only the gradients of the keys, off by this factor."""
    attend = radixtrain.hf.attention.tree_attention

    def install(by: float, backward: bool) -> None:
        def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            wrong = key + by * (key - key.detach()) if backward else key * (1 + by)
            return attend(query, wrong, value, *args, **options)

        monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", broken)

    return install


class TestRefusal:
    @pytest.mark.parametrize("float64_truth", [False, True])
    def test_a_wrong_backward_pass_is_not_timed(self, scaled_attention: Any, float64_truth: bool) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"cascade: float32: NOT EQUAL: model\.layers\.\d\.self_attn\.k_"):
            measured(FLAT, attention=("cascade",), float64_truth=float64_truth)

    def test_the_radix_arm_alone_is_checked_too(self, scaled_attention: Any) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"cascade: float32: NOT EQUAL: model\.layers\.\d\.self_attn\.k_"):
            measure(model_of(), make_work(FLAT, False), Settings(("cascade",), repeats=1, ordinary=False))

    def test_given_rows_in_several_micro_batches_are_checked_too(self, scaled_attention: Any) -> None:
        scaled_attention(1e-3, True)
        with pytest.raises(UserError, match=r"8 of train\.jsonl, step, cascade: float32: NOT EQUAL: model\.layers"):
            measure(model_of(), work_of(RAGGED, ragged_features(), 3, 40), Settings(("cascade",), repeats=1))

    def test_a_wrong_forward_pass_is_not_timed(self, scaled_attention: Any) -> None:
        scaled_attention(1e-2, False)
        with pytest.raises(UserError, match="NOT EQUAL: last_hidden_state"):
            measured(replace(FLAT, mode="forward"), attention=("path",))

    def test_in_16_bits(self, scaled_attention: Any) -> None:
        scaled_attention(1.0, True)
        with pytest.raises(UserError, match="bfloat16: NOT EQUAL"):
            measure(model_of(dtype=torch.bfloat16), make_work(FLAT), Settings(("cascade",), repeats=1))

    def test_the_model_comes_back(self, scaled_attention: Any) -> None:
        scaled_attention(1e-2, False)
        model = model_of()
        with pytest.raises(UserError):
            measure(model, make_work(FLAT), Settings(repeats=1))
        assert model.config._attn_implementation == "sdpa"

    def test_a_gradient_that_is_not_a_number(self, scaled_attention: Any) -> None:
        scaled_attention(float("nan"), True)
        with pytest.raises(UserError, match="NOT EQUAL"):
            measured(FLAT, attention=("cascade",))
