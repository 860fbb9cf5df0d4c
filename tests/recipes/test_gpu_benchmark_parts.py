"""Parts of the GPU's benchmark on a CPU: equivalence, rows, waiting, and the attention of one layer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
from gpu_parts import attention as gpu_attention  # noqa: E402
from gpu_parts import equivalence as gpu_equivalence  # noqa: E402
from gpu_parts import flex as gpu_flex  # noqa: E402
from gpu_parts import rows as gpu_rows  # noqa: E402
from gpu_parts import steps as gpu_steps  # noqa: E402
from gpu_parts import sync as gpu_sync  # noqa: E402
from gpu_parts.run import Run  # noqa: E402

from radixtrain.kernels.reference import tree_mask  # noqa: E402
from radixtrain.kernels.triton_runtime import triton_missing  # noqa: E402
from radixtrain.kernels.varlen import KERNELS  # noqa: E402
from radixtrain.testing import relative_error  # noqa: E402
from radixtrain.tree.layout import TreeLayout  # noqa: E402

CPU = torch.device("cpu")
TINY = gpu_steps.TINY_MODELS[0]


def run_of(seconds: float = 100.0, **options: Any) -> Run:
    return Run(CPU, seconds, {"date": "today"}, **options)


def cases(run: Run, part: str) -> dict[str, dict[str, Any]]:
    return {case: measures for row_part, case, measures in run.results if row_part == part}


class TestEquivalence:
    def test_every_strategy_with_every_installed_kernel(self) -> None:
        run = run_of()
        ways = list(gpu_equivalence.ways(run, "equivalence", torch.bfloat16, 64))
        strategies = ("cascade", "path", "expand")
        assert ways == [*((s, kernel) for kernel in ("torch", "eager") for s in strategies), ("reference", "auto")]
        left_out = [line.split(":")[0] for line in run.left_out]
        refused = [kernel for kernel in KERNELS if kernel not in ("torch", "eager")]
        assert left_out == [f"equivalence with {name}" for name in (*refused, "tree")]

    def test_a_kernel_by_request_comes_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_equivalence, "KERNELS", ("torch", "cudnn", "eager"))
        monkeypatch.setattr(gpu_equivalence, "choose_attention", lambda *given: None)
        monkeypatch.setattr(gpu_equivalence, "varlen_kernel", lambda *given: None)
        ways = list(gpu_equivalence.ways(run_of(), "equivalence", torch.bfloat16, 64))
        kernels = [kernel for _, kernel in ways if kernel != "auto"]
        assert kernels == ["torch"] * 3 + ["eager"] * 3 + ["cudnn"] * 3 and ways[-1][1] == "cudnn"

    def test_a_kernel_that_raises_is_a_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(model: Any, features: Any, attention: str, **_: Any) -> Any:
            raise RuntimeError("CUDA error: misaligned address")

        monkeypatch.setattr(gpu_equivalence, "verify_equivalence", broken)
        run = run_of()
        gpu_equivalence.equivalence(run, TINY, 32)
        assert len(run.results) == 7 and not any(measures["passed"] for _, _, measures in run.results)
        assert "misaligned address" in run.left_out[-2]


class TestRows:
    def test_kernels_agree_and_move_bytes(self) -> None:
        run = run_of()
        gpu_rows.rows(run, gpu_rows.TINY_GATHERS)
        found = cases(run, "rows")
        assert len(found) == 6
        for measures in found.values():
            assert measures["gigabytes_per_second"] > 0 and measures["share_of_copy"] > 0
        assert all(measures["difference_to_torch"] < 0.01 for measures in found.values())
        assert run.left_out == ["rows in Triton: they need CUDA"]

    def test_an_arm_that_does_not_compile_leaves_the_others(self) -> None:
        def broken() -> torch.Tensor:
            raise ValueError("no such instruction")

        run = run_of()
        gpu_rows.beside_a_copy(run, "sum", {"torch": lambda: torch.ones(4), "Triton": broken}, 64)
        assert list(cases(run, "rows")) == ["sum, torch"]
        assert run.left_out == ["rows sum, Triton: no such instruction"]


class TestSync:
    """The watch is torch's own and needs a device; here it is a stand-in that raises as torch does."""

    @pytest.fixture
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def clip(*given: Any) -> None:
            if gpu_sync.watching.is_on:
                raise RuntimeError("called a synchronizing CUDA operation")

        class Watch:
            is_on = False

            def __init__(self, device: torch.device):
                pass

            def __enter__(self) -> None:
                Watch.is_on = True

            def __exit__(self, *error: Any) -> None:
                Watch.is_on = False

        monkeypatch.setattr(gpu_sync, "watching", Watch)
        monkeypatch.setattr(gpu_sync, "sees_a_read", lambda device: True)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)

    def test_steps_run_without_a_device(self) -> None:
        run = run_of()
        gpu_sync.sync(run, TINY, 32)
        found = cases(run, "sync")
        losses = ("own loss", "loss of fit")
        assert list(found) == [f"{name}, {loss}" for name in ("cascade", "path", "expand") for loss in losses]
        assert all(measures == {"finite": True} for measures in found.values()), "no verdict without a watch"
        assert run.left_out[0] == "sync, the watch: torch reports no wait on cpu, not even a read"

    def test_a_wait_is_found_with_its_place(self, waits: None) -> None:
        run = run_of()
        gpu_sync.sync(run, TINY, 32)
        found = cases(run, "sync")
        assert len(found) == 6 and {measures["waits"] for measures in found.values()} == {1}
        assert all(measures["where"].startswith("recipes/test_gpu_benchmark_parts.py:") for measures in found.values())

    def test_no_wait(self, waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: None)
        run = run_of()
        gpu_sync.sync(run, TINY, 32)
        assert [(m["waits"], m["where"]) for m in cases(run, "sync").values()] == [(0, "nowhere")] * 6

    def test_any_other_error_is_left_out(self, waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a watched step, too: it is no wait."""

        def broken(*given: Any) -> None:
            if gpu_sync.watching.is_on:
                raise RuntimeError("out of registers")

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
        run = run_of()
        gpu_sync.sync(run, TINY, 32)
        assert not run.results and run.left_out[-1] == "sync expand, loss of fit: out of registers"

    def test_a_step_trains(self) -> None:
        model = gpu_sync.prepare_model(gpu_sync.build_model(TINY, CPU, torch.float32, "sdpa"))
        features = gpu_sync.features_of_cell(gpu_sync.Cell(TINY, 32, 4, 10, tree="nested"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in (gpu_sync.own_loss_step, gpu_sync.fit_step):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            step(model, optimizer, features, False)
            changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
            assert all(changed) and all(parameter.grad is None for parameter in model.parameters())


class TestAttention:
    @pytest.fixture(autouse=True)
    def one_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times are not looked at."""
        monkeypatch.setattr(gpu_attention, "seconds_of", lambda call, device: call() is None or 1.0)

    def test_plans_have_the_same_size_and_their_own_depth(self) -> None:
        plans = {name: make() for name, make in gpu_attention.PLANS.items()}
        assert {plan.num_unique_tokens for plan in plans.values()} == {10_240}, "FlexAttention is compiled once"
        levels = {name: len(TreeLayout.from_plan(plan).levels) for name, plan in plans.items()}
        assert levels == {"one prompt": 1, "three levels": 2, "comb of 200 forks": 199}

    def test_pairs_are_those_of_the_mask(self) -> None:
        for make in gpu_attention.TINY_PLANS.values():
            plan = make()
            mask = tree_mask(TreeLayout.from_plan(plan).row_subtree_ends)
            assert gpu_attention.num_pairs(plan) == int(mask.sum())

    def test_every_way_on_every_plan(self) -> None:
        run = run_of()
        gpu_attention.attention(run, gpu_attention.TINY_PLANS, gpu_attention.TINY_HEADS)
        found = cases(run, "attention")
        ways = ["cascade torch", "path torch", "expand torch", "cascade eager", "path eager", "expand eager"]
        ways += ["reference auto", *(["tree auto"] if triton_missing(CPU) is None else [])]
        plans = [*gpu_attention.TINY_PLANS]
        flex = [f"{plan}, FlexAttention" for plan in plans]
        assert list(found) == [*(f"{plan}, {way}" for plan in plans for way in ways), *flex]
        assert all(measures["error_ratio"] < 2 and measures["worst_error"] < 1e-6 for measures in found.values())
        assert all("step_milliseconds" in measures for case, measures in found.items() if case not in flex)
        assert all("mask_milliseconds" in found[case] for case in flex)
        backward = [line for line in run.left_out if "FlexAttention, backward" in line]
        assert len(backward) == len(plans), "there is none on a CPU"

    def test_a_wrong_gradient_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """dk twice as large, in every way: only the errors of the backward pass see it."""
        attend = gpu_attention.tree_attention

        def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
            return attend(q, 2 * k - k.detach(), v, **options)

        monkeypatch.setattr(gpu_attention, "tree_attention", wrong)
        run = run_of()
        plans = {"one prompt": gpu_attention.TINY_PLANS["one prompt"]}
        gpu_attention.attention(run, plans, gpu_attention.TINY_HEADS)
        found = {case: m for case, m in cases(run, "attention").items() if "Flex" not in case}
        assert found and all(measures["error_ratio"] > 1000 for measures in found.values())

    def test_a_kernel_that_fails_leaves_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attend = gpu_attention.tree_attention

        def broken(*heads: Any, attention: str, **options: Any) -> Any:
            if attention == "path":
                raise RuntimeError("misaligned address")
            return attend(*heads, attention=attention, **options)

        monkeypatch.setattr(gpu_attention, "tree_attention", broken)
        run = run_of()
        gpu_attention.attention(run, {"comb": gpu_attention.TINY_PLANS["comb of 4 forks"]}, gpu_attention.TINY_HEADS)
        assert "attention comb, path torch: misaligned address" in run.left_out
        assert {"comb, expand torch", "comb, FlexAttention"} <= {*cases(run, "attention")}

    def test_a_nan_is_the_worst_error(self) -> None:
        assert math.isnan(gpu_attention._worst([1.0, math.nan, 3.0])) and gpu_attention._worst([1.0, 3.0]) == 3.0

    def test_flex_takes_one_plan_after_another(self) -> None:
        """The mask of an earlier plan is not kept."""
        plans = [gpu_attention.one_prompt(16, 8, 6), gpu_attention.comb(4, 8, 8)]
        flex = gpu_flex.FlexTree(64, CPU)
        heads = gpu_attention._inputs(64, gpu_attention.TINY_HEADS, torch.float32, CPU)
        for plan in (*plans, plans[0]):
            layout = TreeLayout.from_plan(plan)
            flex.take(layout.row_subtree_ends)
            expected = gpu_attention.tree_attention(heads.q, heads.k, heads.v, layout, attention="reference")
            assert relative_error(heads.forward(flex.attend), expected.double()) < 1e-6


def test_without_time_everything_is_left_out() -> None:
    run = run_of(seconds=0.0)
    gpu_equivalence.equivalence(run, TINY, 32)
    gpu_rows.rows(run, gpu_rows.TINY_GATHERS)
    gpu_sync.sync(run, TINY, 32)
    gpu_attention.attention(run, gpu_attention.TINY_PLANS, gpu_attention.TINY_HEADS)
    assert not run.results
    assert len([line for line in run.left_out if "0 of 0 seconds were left" in line]) == 4
