"""The benchmark of a step: what both arms compute, its count of operations, and that arms that differ are not timed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import step
import torch
from flops import costs_of, ordinary_flops, unique_flops
from hypothesis import given, settings
from step import Arm, ModelShape, build_model, measure, random_rows, work_of
from tiers import FULL, cases
from tiny_models import tiny_model
from transformers import LlamaConfig, Qwen3_5TextConfig
from wrong_keys import with_wrong_keys

from radixtrain.errors import UserError
from radixtrain.testing import ragged_batches
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.verification.oracle import float64_throughout

CPU = torch.device("cpu")
SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
ORDINARY, CASCADE = Arm(plain_head=True), Arm(attention="cascade", plain_head=True)
BAR = 1e-12
# One layer: q and o 8 x 8 each, k and v 8 x 4 each, gate, up and down 8 x 16 each: 576 parameters.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
SIZES = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10, **HEADS}
COSTS = costs_of(LlamaConfig(**SIZES, num_hidden_layers=1))


@pytest.fixture
def model() -> Any:
    return build_model(SHAPE, CPU, torch.float32)


@pytest.fixture
def ragged() -> list[dict[str, Any]]:
    """Two prompts of 20 and 21 tokens, each with four answers of 3 to 6 tokens that bear the loss; shuffled."""
    rng = np.random.default_rng(1)
    rows = []
    for group in range(2):
        prompt = rng.integers(0, 97, 20 + group)
        for branch in range(4):
            ids = np.concatenate([prompt, rng.integers(0, 97, 3 + branch)])
            rows.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)})
    return [rows[index] for index in rng.permutation(len(rows))]


def plan_of(sequences: list[list[int]], **options: Any) -> Any:
    ids = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    return build_prefix_plan(ids, np.cumsum([0] + [len(sequence) for sequence in sequences]), **options)


class TestFlops:
    def test_two_sequences_that_share_two_tokens(self) -> None:
        plan = plan_of([[1, 2, 3], [1, 2, 4]])
        assert COSTS == (576, 2 * 2 * 4, 80)
        assert ordinary_flops(COSTS, plan, 2) == (2 * 576 * 6, 4 * 8 * 12, 2 * 80 * 2)  # 6 + 6 pairs
        assert unique_flops(COSTS, plan, 1) == (2 * 576 * 4, 4 * 8 * 9, 2 * 80)  # 1 + 2 + 3 + 3 pairs
        assert ordinary_flops(COSTS, plan, 2).total == 6912 + 384 + 320

    def test_a_hybrid_attends_in_some_layers_only(self) -> None:
        """Of 4 layers one attends, and three mix: in parameters, and 3 x 2 heads x 4 x 4 numbers of state each."""
        linear = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 4}
        linear = {f"linear_{name}": size for name, size in linear.items()}
        config = Qwen3_5TextConfig(**SIZES, num_hidden_layers=4, linear_conv_kernel_dim=2, **linear)
        attention = 8 * (16 + 4 + 4) + 8 * 8  # q with its gate, k, v; o
        matrices = 8 * (8 + 8 + 8) + 8 * 8 + 8 * (2 + 2) + 8 * 8 + 24 * 2  # q, k, v; z; a and b; o; convolution
        expected = attention + 3 * (matrices + 3 * 2 * 4 * 4) + 4 * 384
        assert costs_of(config) == (expected, 2 * 2 * 4, 80)

    def test_padding_rows_are_not_part_of_the_ideal(self) -> None:
        sequences = [[1, 2, 3], [1, 2, 4]]
        padded, plain = plan_of(sequences, pad_to_multiple_of=8), plan_of(sequences)
        assert unique_flops(COSTS, padded, 1) == unique_flops(COSTS, plain, 1)

    @settings(max_examples=100, deadline=None)
    @given(ragged_batches())
    def test_every_pair_of_the_trie_is_counted_once(self, sequences: Any) -> None:
        paths = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
        unique = unique_flops(COSTS, plan_of(sequences), 1)
        assert (unique.linear, unique.attention) == (2 * 576 * len(paths), 4 * 8 * sum(map(len, paths)))


@pytest.mark.parametrize(
    ("prompt", "number", "tree", "num_unique", "depth"),
    [
        (40, 8, "flat", 40 + 8 * 6, 2),
        (40, 8, "nested", 20 + 2 * 20 + 8 * 6, 3),
        (40, 9, "nested", 20 + 3 * 20 + 9 * 6, 3),
        (40, 1, "flat", 46, 1),
        (0, 8, "flat", 8 * 6, 1),
    ],
)
def test_random_rows(prompt: int, number: int, tree: Any, num_unique: int, depth: int) -> None:
    rows, again = (random_rows(97, prompt, 6, number, tree) for _ in range(2))
    assert all(np.array_equal(one["input_ids"], other["input_ids"]) for one, other in zip(rows, again, strict=True))
    assert all((row["labels"] != -100).sum() == 6 for row in rows)
    work = work_of("rows", rows)
    assert (work.plans[0].depth, work.num_unique_tokens, work.num_tokens) == (depth, num_unique, number * (prompt + 6))
    assert (work.ideal_speedup(SHAPE.config()) == 1.0) == (depth == 1)


def test_how_both_arms_are_cut(ragged: Any) -> None:
    whole, work, apart = (work_of("rows", ragged, batch_size=3, max_tokens=size) for size in (None, 40, 1))
    assert [tuple(batch["input_ids"].shape) for batch in work.ordinary.micro_batches] == [(3, 27), (3, 25), (2, 24)]
    assert [*map(len, work.radix.members)] == [4, 4]
    assert (work.num_tokens, work.num_unique_tokens) == (4 * 41 + 2 * 18, 41 + 2 * 18)
    assert work.ideal_speedup(SHAPE.config()) == pytest.approx(whole.ideal_speedup(SHAPE.config()))
    assert apart.ideal_speedup(SHAPE.config()) == 1.0
    with pytest.raises(UserError, match="rows: no token bears loss"):
        work_of("rows", [{"input_ids": [1, 2], "labels": [-100, -100]}])


@pytest.mark.parametrize("keep_mask", [True, False])
def test_the_loss_in_several_micro_batches(keep_mask: bool, model: Any, ragged: Any) -> None:
    work = step.with_ordinary_batch_size(work_of("rows", ragged, max_tokens=40), 3, keep_mask)
    assert work.ordinary.micro_batches[0]["attention_mask"].all() == (not keep_mask)
    pairs = [(torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])[None]) for row in ragged]
    with float64_throughout(model):
        truth = sum(model(input_ids=ids, labels=y).loss * (y[0, 1:] >= 0).sum() for ids, y in pairs)
        for arm in (ORDINARY, CASCADE, replace(CASCADE, attention="path")):
            arm.prepare(model)
            found = sum(arm.loss_terms(model, work)).item()
            assert found == pytest.approx(truth.item() / work.radix.num_labels, rel=BAR)


def test_a_head_that_is_more_than_one_matrix_is_computed_as_a_whole() -> None:
    """Granite divides its logits; the fused loss of its matrix would be another loss, in both arms alike."""
    work = work_of("rows", random_rows(97, 40, 6, 8))
    (found,) = measure(tiny_model("GraniteForCausalLM", vocab_size=97, logits_scaling=3.0), work, repeats=1)
    assert found.error < 1e-5


@pytest.mark.parametrize("mode", cases(["step", "forward"], ["step"]))
@pytest.mark.parametrize("dtype", cases([torch.float32, torch.bfloat16], [torch.float32]))
def test_what_is_measured(mode: Any, dtype: torch.dtype) -> None:
    model, strategies = build_model(SHAPE, CPU, dtype), ["cascade", "path", "expand"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure(model, work_of("rows", random_rows(97, 200, 6, 16, "nested"), mode=mode), strategies, repeats=2)
    assert [each.attention for each in found] == strategies
    assert all(len(each.turns) == len(each.ordinary_turns) == 2 and min(each.turns) > 0 for each in found)
    assert found[0].r > found[0].ideal > 2 and found[0].peaks[0] > 2 * found[0].peaks[1]
    assert all((1e-4 < each.error < 0.1) == (dtype == torch.bfloat16) for each in found)
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("by", "forward", "mode"), cases([(1e-3, False, "step"), (1e-2, True, "forward")], [(1e-3, False, "step")])
)
def test_a_wrong_gradient_is_not_timed(
    by: float,
    forward: bool,
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    ragged: Any,
    without_the_trial: None,
) -> None:
    with_wrong_keys(monkeypatch, by, forward)
    with pytest.raises(UserError, match=r"rows, cascade: float32: NOT EQUAL: model\.layers\."):
        measure(model, work_of("rows", ragged, 3, 40, mode), ["cascade"], repeats=1)
    assert model.config._attn_implementation == "sdpa"


TINY = ["--layers=1", "--hidden=64", "--repeats=1", "--own=4", "--sequences=4"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*TINY, "--prompt", "8", "0", "--attention", "cascade", "expand"]) == 0
    header, _, titles, _, *rows = capsys.readouterr().out.splitlines()
    assert ", medians of 1 alternating runs" in header and titles == step.TITLES
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    named = ("1x64, 4 x (8 + 4), flat, step", "1x64, 4 x (0 + 4), flat, step")
    assert [row[:5] for row in cells] == [
        [name, attention, unique, r, cells[2 * number][4]]
        for number, (name, unique, r) in enumerate(zip(named, ("24", "16"), ("2.00", "1.00"), strict=True))
        for attention in ("cascade", "expand")
    ]


@FULL
def test_what_was_measured_before_an_error_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_wrong_keys(monkeypatch, above=17)  # the second step only
    assert step.main([*TINY, "--prompt", "1", "8", "--attention", "cascade"]) == 1
    printed = capsys.readouterr()
    assert "4 x (1 + 4)" in printed.out and "4 x (8 + 4)" not in printed.out
    assert "error: 1x64, 4 x (8 + 4), flat, cascade: float32: NOT EQUAL: model.layers.0" in printed.err
