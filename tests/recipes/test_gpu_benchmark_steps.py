"""Steps of the GPU's benchmark on a CPU: shapes, rivals, turns, micro-batches, sequences of unequal lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
from gpu_parts import arms as gpu_arms  # noqa: E402
from gpu_parts import steps as gpu_steps  # noqa: E402
from gpu_parts import turns as gpu_turns  # noqa: E402
from gpu_parts.run import Run  # noqa: E402

from radixtrain.bench.arms import OrdinaryArm, RadixArm  # noqa: E402
from radixtrain.bench.cells import Cell, GivenBatch, ModelShape, build_model, features_of_cell  # noqa: E402
from radixtrain.bench.work import work_of  # noqa: E402
from radixtrain.testing import relative_error  # noqa: E402

CPU = torch.device("cpu")
TINY = gpu_steps.TINY_MODELS[0]
CASCADE = ("cascade",)


@pytest.fixture(autouse=True)
def one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not looked at."""
    monkeypatch.setattr(gpu_steps, "MAX_TURNS", 1)


def run_of(seconds: float = 100.0, **options: Any) -> Run:
    return Run(CPU, seconds, {"date": "today"}, **options)


def cases(run: Run, part: str) -> dict[str, dict[str, Any]]:
    return {case: measures for row_part, case, measures in run.results if row_part == part}


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return build_model(TINY, CPU, dtype, "sdpa")


def unequal_work(batch_size: int | None = None) -> Any:
    features = gpu_steps.features_of_unequal_lengths(TINY, 12, 64, 6)
    return work_of(GivenBatch(TINY, "six", 6), features, batch_size)


def packed_arm() -> gpu_arms.PackedArm:
    return gpu_arms.PackedArm(plain_head=True, implementation=gpu_arms.packed_implementation(CPU))


def test_shapes_are_those_of_qwen3() -> None:
    """Parameters in billions, as the model cards have them."""
    from transformers import Qwen3ForCausalLM

    counted = {}
    for shape in gpu_steps.MODELS:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(shape.config())
        counted[shape.name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 2)
    assert counted == {"Qwen3-0.6B": 0.6, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19}
    assert {*gpu_steps.RECOMPUTING} < {*counted}


class TestPacked:
    def test_the_batch_by_hand(self) -> None:
        features = [
            {"input_ids": np.array([5, 6, 7]), "labels": np.array([-100, 6, 7])},
            {"input_ids": np.array([8, 9]), "labels": np.array([8, 9])},
        ]
        (batch,) = gpu_arms.packed_work(work_of(GivenBatch(TINY, "two", 2), features)).ordinary
        assert batch.members == [0, 1]
        found = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in batch.tensors.items()}
        assert found == {
            "input_ids": [[5, 6, 7, 8, 9]],
            "position_ids": [[0, 1, 2, 0, 1]],
            **{name: [0, 3, 5] for name in ("cu_seq_lens_q", "cu_seq_lens_k")},
            **dict.fromkeys(("max_length_q", "max_length_k"), 3),
            "shift_labels": [[6, 7, 9]],
            "radix_predictor_indices": [0, 1, 3],
            "radix_prediction_rows": [0, 1, 2],
            "radix_loss_weights": [1.0, 1.0, 1.0],
        }
        assert batch.tensors["cu_seq_lens_q"].dtype == torch.int32

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_its_gradient_is_that_of_the_padded_arm(self, batch_size: int | None) -> None:
        """Every arm in float32, on sequences of unequal lengths: a rival that computes less would be no rival."""
        model, work = model_of(), unequal_work(batch_size)
        arms = (OrdinaryArm(plain_head=True), packed_arm(), RadixArm(attention="cascade", plain_head=True))
        gradients = []
        for arm, of_arm in zip(arms, (work, gpu_arms.packed_work(work), work), strict=True):
            arm.prepare(gpu_arms.as_loaded(model))
            model.zero_grad(set_to_none=True)
            loss = gpu_turns._pass(model, arm, of_arm)
            gradients.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
        for found in gradients[1:]:
            errors = [relative_error(one, other.double()) for one, other in zip(found, gradients[0], strict=True)]
            assert max(errors) < 2e-5

    def test_its_hidden_states_are_those_of_the_padded_arm(self) -> None:
        model, work = model_of().eval(), unequal_work()
        with torch.no_grad():
            expected = OrdinaryArm(plain_head=True).hidden_states(gpu_arms.as_loaded(model), work)
            arm, packed = packed_arm(), gpu_arms.packed_work(work)
            arm.prepare(model)
            assert relative_error(arm.hidden_states(model, packed), expected.double()) < 1e-5

    def test_it_runs_on_varlen_attention_and_builds_no_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        attend = gpu_arms.attention_in_pieces
        monkeypatch.setattr(gpu_arms, "attention_in_pieces", lambda *given: calls.append(given[3]) or attend(*given))
        model, arm = model_of(), packed_arm()
        arm.prepare(gpu_arms.as_loaded(model))
        gpu_turns._pass(model, arm, gpu_arms.packed_work(unequal_work()))
        assert [len(pieces) for pieces in calls] == [1] * TINY.num_hidden_layers
        assert len(calls[0][0].ragged.cu_seqlens_q) == 6 + 1

    @pytest.mark.parametrize(
        ("flash_3", "flash_2", "expected"),
        [
            (None, True, "flash_attention_3"),
            ("absent", True, "flash_attention_2"),
            ("absent", False, "torch_varlen"),
        ],
    )
    def test_which_flash(self, monkeypatch: pytest.MonkeyPatch, flash_3: Any, flash_2: bool, expected: str) -> None:
        monkeypatch.setattr(gpu_arms, "flash_3_missing", lambda device: flash_3)
        monkeypatch.setattr(gpu_arms, "is_flash_attn_3_available", lambda: True)
        monkeypatch.setattr(gpu_arms, "is_flash_attn_2_available", lambda: flash_2)
        assert gpu_arms.packed_implementation(torch.device("cuda")) == expected


def test_unequal_lengths_share_their_prompt() -> None:
    features = gpu_steps.features_of_unequal_lengths(TINY, 2048, 1024, 32)
    lengths = sorted(len(feature["input_ids"]) - 2048 for feature in features)
    assert (lengths[0], lengths[-1]) == (16, 1024) and 200 < np.mean(lengths) < 300 > np.median(lengths) * 2
    assert all((feature["input_ids"][:2048] == features[0]["input_ids"][:2048]).all() for feature in features)
    assert len({int(feature["input_ids"][2048]) for feature in features}) == 32, "branches differ from the first token"
    assert all((feature["labels"] >= 0).sum() == len(feature["labels"]) - 2048 for feature in features)


def test_padding_is_cut_for_unequal_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    works = []
    turns = gpu_steps.take_turns
    monkeypatch.setattr(gpu_steps, "take_turns", lambda *given: works.append(given[2]) or turns(*given))
    run = run_of()
    gpu_steps.unequal(run, gpu_steps.TINY_MODELS, CASCADE, 16, 64, 16)
    padded, packed = (works[0][name][1] for name in ("padded", "packed"))
    assert [len(batch.members) for batch in padded.ordinary] == [8, 8]
    lengths = [batch.tensors["input_ids"].shape[1] for batch in padded.ordinary]
    assert lengths[0] > lengths[1], "sorted by length"
    assert sum(batch.tensors["input_ids"].numel() for batch in packed.ordinary) == packed.num_tokens
    assert cases(run, "unequal")["tiny, step, cascade"]["padded_loss_difference"] < 1e-2


def test_nothing_is_shared() -> None:
    run = run_of()
    gpu_steps.unshared(run, gpu_steps.TINY_MODELS, CASCADE, 40, 4)
    (measures,) = cases(run, "unshared").values()
    assert measures["r"] == measures["ideal"] == 1.0
    assert measures["slowdown"] == pytest.approx(1 / measures["measured"])


def test_the_faster_rival_counts() -> None:
    radix = gpu_turns.Turns([1.0, 1.0, 2.0], 10**9, 2.0)
    rivals = {"padded": gpu_turns.Turns([4.0, 4.0, 4.0], 1, 2.0), "packed": gpu_turns.Turns([3.0, 3.0, 3.0], 1, 2.02)}
    work = unequal_work()
    found = gpu_steps._beside(rivals, radix, work, TINY.config())
    assert (found["over_padded"], found["over_packed"], found["measured"]) == (4.0, 3.0, 3.0)
    assert found["efficiency"] == pytest.approx(3.0 / work.ideal_speedup(TINY.config()))
    assert found["packed_loss_difference"] == pytest.approx(0.02 / 2.02)
    alone = gpu_steps._beside({}, radix, work, TINY.config())
    assert alone["radix_seconds"] == 1.0 and "efficiency" not in alone, "without a rival there is no figure"


class TestTurns:
    def work(self) -> Any:
        return work_of(Cell(TINY, 32, 8, 4), features_of_cell(Cell(TINY, 32, 8, 4)))

    def test_an_arm_that_does_not_run_leaves_the_others(self) -> None:
        model, work = model_of(), self.work()
        arms = {"padded": (OrdinaryArm(plain_head=True), work), "packed": (packed_arm(), work)}  # not packed
        run = run_of()
        turns = gpu_turns.take_turns(run, model, arms, 100, 2)
        assert list(turns) == ["padded"] and len(turns["padded"].seconds) == 2
        assert run.left_out[0].startswith(f"{work.cell}, packed: ")

    def test_at_least_one_turn(self) -> None:
        arms = {"padded": (OrdinaryArm(plain_head=True), self.work())}
        (turns,) = gpu_turns.take_turns(run_of(), model_of(), arms, 0.0, 5).values()
        assert len(turns.seconds) == 1 and turns.median > 0 and turns.loss > 0

    def test_every_turn_begins_without_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So the peak of a step has them, as that of a trainer's first step has; a forward pass keeps nothing."""
        model, work, arm, begins = model_of(), self.work(), OrdinaryArm(plain_head=True), []
        measure = gpu_turns.peak_bytes

        def peak_bytes(call: Any, device: torch.device) -> int:
            begins.append(all(parameter.grad is None for parameter in model.parameters()))
            return measure(call, device)

        monkeypatch.setattr(gpu_turns, "peak_bytes", peak_bytes)
        peaks = {}
        for mode in ("step", "forward"):
            arms = {"padded": (arm, replace(work, cell=replace(work.cell, mode=mode)))}
            peaks[mode] = gpu_turns.take_turns(run_of(), model, arms, 100.0, 2)["padded"].peak_bytes
        assert begins == [True] * 2 * 3, "the warm-up and two turns of each"
        assert peaks["step"] > 2 * peaks["forward"] > 0
        assert all(parameter.grad is None for parameter in model.parameters())


class TestMicroBatches:
    def sizes(self, run: Run, free: int, monkeypatch: pytest.MonkeyPatch, num_sequences: int = 8) -> Any:
        """The work if a token costs 1,000 bytes, and `free` bytes are left for sequences."""
        monkeypatch.setattr(gpu_turns, "_peak", lambda run, model, work, arm: 1000 * work.num_tokens)
        monkeypatch.setattr(gpu_turns, "_free_bytes", lambda run: free)
        cell = Cell(TINY, 32, 8, num_sequences)
        arms = OrdinaryArm(plain_head=True), RadixArm(attention="cascade", plain_head=True)
        return gpu_turns.fitting_work(run, None, cell, features_of_cell(cell), 1.0, *arms)

    def test_all_in_one_if_there_is_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = self.sizes(run_of(), 10**9, monkeypatch)
        assert (len(work.ordinary), len(work.radix)) == (1, 1)

    def test_as_few_as_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = self.sizes(run_of(), 40 * 3 * 1000, monkeypatch)  # three sequences of 40 tokens
        assert [len(batch.members) for batch in work.ordinary] == [3, 3, 2]
        assert len(work.radix) == 1 and work.num_unique_tokens("cascade") == 32 + 8 * 8  # 96 of 120

    def test_gradients_are_there_when_free_memory_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise the gradients of a large model would not fit beside the activations."""
        model, has_gradients = model_of(), []

        def free_bytes(run: Run) -> int:
            has_gradients.append(all(parameter.grad is not None for parameter in model.parameters()))
            return 10**9

        monkeypatch.setattr(gpu_turns, "_free_bytes", free_bytes)
        cell = Cell(TINY, 32, 8, 4)
        arms = OrdinaryArm(plain_head=True), RadixArm(attention="cascade", plain_head=True)
        gpu_turns.fitting_work(run_of(), model, cell, features_of_cell(cell), 1.0, *arms)
        assert has_gradients == [True, True]

    def test_one_sequence_at_least(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = self.sizes(run_of(), 0, monkeypatch)
        assert [len(batch.members) for batch in work.ordinary] == [1] * 8
        assert [len(batch.members) for batch in work.radix] == [1] * 8


def test_a_step_of_several_micro_batches_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "CPU_BYTES", 10**6)  # two sequences of 40 tokens in a step
    run = run_of()
    gpu_steps.steps(run, gpu_steps.TINY_MODELS, CASCADE, 32, 8, 12)
    step, forward = cases(run, "step").values()
    assert step["ordinary_micro_batches"] > step["radix_micro_batches"] > 1
    assert forward["ordinary_micro_batches"] < step["ordinary_micro_batches"], "no activations are kept"
    for measures in (step, forward):
        assert measures["padded_loss_difference"] < 1e-2 and measures["packed_loss_difference"] < 1e-2


def test_out_of_memory_is_tried_again_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def measure(*given: Any) -> None:
        shares.append(given[-1])
        if given[-1] > 0.3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_steps, "_measure", measure)
    run = run_of()
    gpu_steps.steps(run, gpu_steps.TINY_MODELS, CASCADE, 32, 8, 4)
    assert shares == [0.8, 0.4, 0.2] * 2 and not run.left_out
    monkeypatch.setattr(gpu_steps, "MEMORY_SHARES", (0.8, 0.4))
    gpu_steps.steps(run, gpu_steps.TINY_MODELS, CASCADE, 32, 8, 4)
    assert [line.partition(": ")[2] for line in run.left_out] == ["CUDA out of memory"] * 2


def test_a_model_is_built_once_for_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], gpu_steps.build_model
    monkeypatch.setattr(gpu_steps, "build_model", lambda shape, *rest: built.append(shape) or build(shape, *rest))
    monkeypatch.setattr(gpu_steps, "_measure", lambda *args: None)
    gpu_steps.steps(run_of(), gpu_steps.TINY_MODELS, CASCADE, 32, 8, 4)
    assert built == list(gpu_steps.TINY_MODELS)


def test_large_shapes_recompute_in_every_arm() -> None:
    """Each layer starts again in the backward pass, which stops it when it has what it needs."""
    shape = ModelShape(2, 64, head_dim=16, vocab_size=100, name="Qwen3-8B")
    model, work, calls = gpu_steps._built(shape, CPU), unequal_work(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *given: calls.append(1))
    arms = (OrdinaryArm(plain_head=True), packed_arm(), RadixArm(attention="cascade", plain_head=True))
    for arm, of_arm in zip(arms, (work, gpu_arms.packed_work(work), work), strict=True):
        arm.prepare(gpu_arms.as_loaded(model))
        calls.clear()
        gpu_turns._pass(model, arm, of_arm)
        assert len(calls) == 2, arm
    run = run_of()
    gpu_steps.steps(run, (shape,), CASCADE, 32, 8, 4)
    step = cases(run, "step")["Qwen3-8B, step, cascade"]
    assert step["recomputing"] is True
    assert step["padded_loss_difference"] < 1e-2 and step["packed_loss_difference"] < 1e-2


def test_without_time_everything_is_left_out() -> None:
    run = run_of(seconds=0.0)
    gpu_steps.steps(run, gpu_steps.TINY_MODELS, CASCADE, 32, 8, 4)
    gpu_steps.unequal(run, gpu_steps.TINY_MODELS, CASCADE, 32, 64, 4)
    gpu_steps.unshared(run, gpu_steps.TINY_MODELS, CASCADE, 40, 4)
    assert not run.results
    assert len([line for line in run.left_out if "0 of 0 seconds were left" in line]) == 2 + 1 + 1
