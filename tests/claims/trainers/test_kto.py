"""TRL's KTOTrainer: four passes for a batch, those of the policy and of the reference on the answers and on the answers
of other prompts that estimate the KL term.
"""

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from preference_bars import BETA, differences
from trainer_harness import compare, settings
from trl import KTOConfig, KTOTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def kto(tokenizer, preferences, tmp_path) -> Callable[..., KTOTrainer]:
    """`kto(model, reference, **settings)`: a trainer on the preferences, good and bad answers by turns."""
    rows = Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
            for row in preferences
            for answer in ("chosen", "rejected")
        ]
    )

    def build(model: Any, reference: Any = None, **others: Any) -> KTOTrainer:
        return KTOTrainer(
            model,
            reference,
            args=KTOConfig(**settings(tmp_path, beta=BETA, **others)),
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            processing_class=tokenizer,
        )

    return build


def test_policy_and_reference(model, kto, table):
    found = compare(
        lambda share: kto(share(model(0)), share(model(1))),
        differences={**differences(), **differences("eval_")},
        evaluate=True,
    )
    policy, reference = found.counts
    assert policy == reference and policy.calls == 2 * (6 + 2), (
        "answers and KL, six micro-batches and two of evaluation"
    )
    assert found.r > 2.5
    assert any(entry.get("kl", 0) > 0 for entry in found.shared.entries), "a KL that is clamped to 0 compares nothing"
    table("KTOTrainer, reference given", found)


def test_without_the_kl_term(model, kto, table):
    found = compare(
        lambda share: kto(share(model(0)), share(model(1)), loss_type="apo_zero_unpaired"), differences=differences()
    )
    assert [each.calls for each in found.counts] == [6, 6]
    table("KTOTrainer, apo_zero_unpaired", found)


def test_adapters_and_no_reference(model, kto, table):
    found = compare(
        lambda share: kto(share(get_peft_model(model(0), LORA)), learning_rate=1e-3), differences=differences()
    )
    assert found.counts[0].calls == 24, "policy and reference in one model"
    table("KTOTrainer, LoRA", found)
