"""What was shared: the report, and the warning that nothing was."""

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, StepCollator, share_prefixes, sharing_report, step_losses
from radixtrain.hf.sharing_report import NOT_ALIKE as NOT_ALIKE_REASON
from radixtrain.hf.sharing_report import NUM_CALLS, SharingReport

SHARED = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
UNSHARED = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [6, 8, 9, 3])]
LONG = [{"input_ids": [*range(7, 19), n, 3], "labels": [-100] * 12 + [n, 3]} for n in range(20, 24)]
NOTHING = "the first 10 training batches of Qwen3ForCausalLM shared nothing: "
TOO_LITTLE = "calls not shared: less than min_ratio = 1.1 to save"
NOT_ALIKE = NOTHING + "no two sequences of a batch began alike"


@pytest.fixture
def model(tiny_qwen3: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, logger="radixtrain")
    return share_prefixes(tiny_qwen3()).train()


def ordinary() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[7, 8, 9, 1, 2], [7, 8, 9, 3, 4]])
    return {"input_ids": ids, "labels": ids}


def unlike() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[7, 8, 9, 1, 2], [6, 8, 9, 3, 4]])
    return {"input_ids": ids, "labels": ids}


def run(model: Any, batch: dict[str, Any], times: int) -> None:
    for _ in range(times):
        model(**batch)


class TestOrdinaryBatches:
    def test_said_once(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        run(model, unlike(), NUM_CALLS - 1)
        assert not caplog.records
        run(model, unlike(), 2 * NUM_CALLS)
        assert [TOO_LITTLE in record.getMessage() for record in caplog.records] == [True]

    def test_not_if_a_radix_batch_was_among_them(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        run(model, unlike(), NUM_CALLS - 1)
        run(model, RadixCollator()(SHARED), 1)
        run(model, unlike(), 2 * NUM_CALLS)
        assert not caplog.records

    def test_not_in_evaluation_or_generation(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        with torch.no_grad():  # as a preference loss runs its reference model
            run(model, unlike(), 2 * NUM_CALLS)
            model.generate(input_ids=torch.tensor([[7, 8]]), max_new_tokens=2 * NUM_CALLS, pad_token_id=0)
        run(model.eval(), unlike(), 2 * NUM_CALLS)
        assert not caplog.records


class TestCounts:
    """Of `RadixCollator`, counted by hand."""

    def test_radix_batches(self, model: Any) -> None:
        run(model, RadixCollator()(SHARED), 2)  # 5 + 4 tokens, 6 unique; 4 + 3 labels have a token before them
        run(model, RadixCollator()(UNSHARED), 1)  # 9 tokens and unique ones: it counts in r
        run(model, unlike(), 3)
        sharing_report(model).plan_seconds = 1e-9
        with torch.no_grad():
            model.generate(input_ids=torch.tensor([[7, 8]]), max_new_tokens=4, pad_token_id=0)
        assert str(sharing_report(model)).splitlines() == [
            "2 calls shared: 30 places, 27 tokens, 21 unique, r = 1.29; plans took 0.00 s",
            "the head computed 15 rows for 30 places",
            "3 calls not shared: less than min_ratio = 1.1 to save",
            f"1 calls not shared: {NOT_ALIKE_REASON}",
            "4 calls of generation",
        ]

    def test_both_kinds_are_one_report(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = share_prefixes(tiny_qwen3()).train()
        run(model, ordinary(), 1)  # 10 tokens, 7 unique
        run(model, RadixCollator()(SHARED), 1)
        report = sharing_report(model)
        assert (report.num_shared, report.num_tokens, report.num_unique_tokens) == (2, 19, 13)
        assert sharing_report(copy.deepcopy(model)).num_tokens == 0

    def test_a_batch_that_only_fills_up(self, model: Any) -> None:
        """Of a rank that has no sequence left."""
        collators = [StepCollator(num_ranks=3, rank=rank) for rank in range(3)]
        steps = [collator(SHARED) for collator in collators]
        for step in steps:
            list(step_losses(model, step))
        assert sharing_report(model).num_tokens == steps[0].num_tokens == 9


class TestRadixBatches:
    @pytest.mark.parametrize("collator", [RadixCollator(), RadixCollator(pad_to_multiple_of=16)])
    def test_said_once(self, model: Any, caplog: pytest.LogCaptureFixture, collator: RadixCollator) -> None:
        batch = collator(UNSHARED)
        run(model, batch, NUM_CALLS - 1)
        assert not caplog.records
        run(model, batch, 2 * NUM_CALLS)
        assert [NOT_ALIKE in record.getMessage() for record in caplog.records] == [True]

    def test_not_if_one_shared(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        run(model, RadixCollator()(UNSHARED), NUM_CALLS - 1)
        run(model, RadixCollator()(SHARED), 1)
        run(model, RadixCollator()(UNSHARED), 2 * NUM_CALLS)
        run(share_prefixes(model), RadixCollator(pad_to_multiple_of=64)(SHARED), 2 * NUM_CALLS)  # less than the padding
        assert not caplog.records

    def test_not_of_a_frozen_model_or_in_evaluation(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        """A reference model that computes with gradients on."""
        run(model.eval(), RadixCollator()(UNSHARED), 2 * NUM_CALLS)
        model.train().requires_grad_(False)
        run(model, RadixCollator()(UNSHARED), 2 * NUM_CALLS)
        run(share_prefixes(model), unlike(), 2 * NUM_CALLS)
        assert not caplog.records


def test_a_copy_counts_by_itself(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    run(model, unlike(), NUM_CALLS - 1)
    copied = copy.deepcopy(model)
    run(copied, unlike(), 1)
    assert len(caplog.records) == 1
    run(model, unlike(), 1)
    assert len(caplog.records) == 2


def test_lines():
    report = SharingReport(
        num_shared=2,
        not_shared=Counter({"a cache is wanted (use_cache=True)": 1, "attention_mask has a hole": 3}),
        num_places=2400,
        num_tokens=2000,
        num_unique_tokens=500,
        num_head_places=2400,
        num_head_rows=501,
        plan_seconds=0.125,
    )
    assert report.compression_ratio == 4.0
    assert str(report).splitlines() == [
        "2 calls shared: 2,400 places, 2,000 tokens, 500 unique, r = 4.00; plans took 0.12 s",
        "the head computed 501 rows for 2,400 places",
        "3 calls not shared: attention_mask has a hole",
        "1 calls not shared: a cache is wanted (use_cache=True)",
    ]


def test_a_copy_counts_its_own_calls():
    report = SharingReport(num_shared=3, not_shared=Counter({"a hole": 2}))
    for copied in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        copied.not_shared["a hole"] += 1
        assert report.not_shared["a hole"] == 2
