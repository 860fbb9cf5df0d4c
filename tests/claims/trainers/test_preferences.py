"""TRL's trainers on pairs of answers: DPO, KTO, reward models, ORPO, CPO, TPO. A system prompt and the pair's own are
shared.

A reference has other weights than the policy unless TRL makes it: of two equal models every reward is 0, and
`rewards/accuracies` would compare nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tiers import FULL
from trainer_harness import Share, compare

from radixtrain import share_prefixes, sharing_report

ADAPTED = {"learning_rate": 1e-3}


@pytest.fixture
def dpo(trl_trainer, preferences) -> Callable[..., Any]:
    """`dpo(model, reference, **settings)`: a trainer on the preferences."""
    return partial(trl_trainer, "DPO", rows=preferences, beta=0.1)


class TestDPO:
    def test_policy_and_reference(self, model, dpo, table):
        found = compare(lambda share: dpo(share(model(0)), share(model(1))), evaluate=True)
        policy, reference = found.counts
        assert policy == reference, "both see every batch"
        assert found.r > 3.5 and {"eval_loss", "eval_rewards/margins"} <= found.worst.keys()
        table("DPOTrainer, reference given", found)

    def test_a_reference_that_computes_every_copy_is_named(self, model, dpo):
        trainer = dpo(share_prefixes(model(0)), model(1))
        assert "ref_model shares nothing: share_prefixes(trainer.ref_model)" in str(sharing_report(trainer))
        share_prefixes(trainer.ref_model)
        assert not sharing_report(trainer).unshared_models

    @FULL
    def test_a_reference_made_by_trl(self, model, dpo, tmp_path, table):
        """TRL loads it from the policy's folder, without hooks: `share_prefixes(trainer.ref_model)` afterwards."""
        model(1).save_pretrained(tmp_path / "start")

        def build(share: Share) -> Any:
            trainer = dpo(share(loaded_from(tmp_path / "start", model(0))))
            share(trainer.ref_model)
            return trainer

        found = compare(build)
        assert found.counts[0] == found.counts[1]
        table("DPOTrainer, reference made by TRL", found)

    @FULL
    @pytest.mark.parametrize("wrapped_by", ["user", "trl"])
    def test_adapters_and_no_reference(self, model, dpo, lora, table, wrapped_by):
        """The reference pass is the same model with its adapters disabled: two shared calls for every batch."""
        from peft import get_peft_model

        def build(share: Share) -> Any:
            if wrapped_by == "user":
                return dpo(share(get_peft_model(model(0), lora())), **ADAPTED)
            return dpo(share(model(0)), given={"peft_config": lora()}, **ADAPTED)

        found = compare(build)
        assert found.counts[0].calls == 12, "two for each of six micro-batches"
        table(f"DPOTrainer, LoRA by {wrapped_by}", found)

    @FULL
    def test_precomputed_reference_log_probabilities(self, model, dpo, preferences, table):
        """The reference runs when the trainer is made, so it is shared before. TRL keeps what it found in a file that
        is named after the rows: a column that differs makes the second run compute its own.
        """
        runs = iter(range(2))

        def build(share: Share) -> Any:
            rows = preferences.add_column("run", [next(runs)] * len(preferences))
            return dpo(share(model(0)), share(model(1)), rows=rows, precompute_ref_log_probs=True)

        found = compare(build)
        assert [each.calls for each in found.counts] == [6, 4 + 2], "the reference ran once over 16 and 6 pairs"
        table("DPOTrainer, precomputed reference", found)

    @FULL
    @pytest.mark.parametrize(
        ("name", "others"),
        [
            ("several losses", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
            ("ipo, label smoothing", {"loss_type": "ipo", "label_smoothing": 0.1}),
            ("weights", {"use_weighting": True, "ld_alpha": 0.5, "f_divergence_type": "js_divergence"}),
            ("synchronised reference", {"sync_ref_model": True, "ref_model_sync_steps": 1}),
            ("checkpointing", {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
            ("reentrant", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ],
    )
    def test_settings(self, model, dpo, table, name, others):
        others = {"gradient_checkpointing": "gradient_checkpointing_kwargs" in others, **others}
        found = compare(lambda share: dpo(share(model(0)), share(model(1)), **others))
        assert found.r > 3.5
        table(f"DPOTrainer, {name}", found)

    @FULL
    def test_rows_without_a_system_prompt(self, model, dpo, preferences, table):
        """The least a pair shares: its own prompt."""
        short = preferences.map(lambda row: {"prompt": row["prompt"].split("<user>")[1]})
        found = compare(lambda share: dpo(share(model(0)), share(model(1)), rows=short))
        assert 1.2 < found.r < 2.0
        table("DPOTrainer, no system prompt", found)

    @FULL
    def test_mixture_of_experts(self, mixture, dpo, table):
        """The router's loss counts every token of the batch, shared or not; TRL logs it as `aux_loss`."""
        found = compare(lambda share: dpo(share(mixture(0)), share(mixture(1))))
        assert "aux_loss" in found.worst
        table("DPOTrainer, mixture of experts", found)


def loaded_from(folder: Any, policy: Any) -> Any:
    """The policy, of which TRL takes the folder's model as the reference."""
    policy.config._name_or_path = str(folder)
    return policy


class TestKTO:
    """Passes of policy and reference on the answers, and on answers of other prompts, which estimate the KL term."""

    @pytest.fixture
    def kto(self, trl_trainer, preferences) -> Callable[..., Any]:
        """`kto(model, reference, **settings)`: a trainer on good and bad answers by turns."""
        from datasets import Dataset

        rows = [
            {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
            for row in preferences
            for answer in ("chosen", "rejected")
        ]
        return partial(trl_trainer, "KTO", rows=Dataset.from_list(rows), beta=0.1)

    @FULL
    def test_policy_and_reference(self, model, kto, table):
        found = compare(lambda share: kto(share(model(0)), share(model(1))), evaluate=True)
        policy, reference = found.counts
        assert policy == reference and policy.calls == 2 * (6 + 2), "answers and KL, 6 micro-batches, 2 of evaluation"
        assert found.r > 2.5
        assert any(entry.get("kl", 0) > 0 for entry in found.shared.entries), "one clamped to 0 compares nothing"
        table("KTOTrainer, reference given", found)

    @FULL
    def test_without_the_kl_term(self, model, kto, table):
        found = compare(lambda share: kto(share(model(0)), share(model(1)), loss_type="apo_zero_unpaired"))
        assert [each.calls for each in found.counts] == [6, 6]
        table("KTOTrainer, apo_zero_unpaired", found)

    @FULL
    def test_adapters_and_no_reference(self, model, kto, lora, table):
        from peft import get_peft_model

        found = compare(lambda share: kto(share(get_peft_model(model(0), lora())), **ADAPTED))
        assert found.counts[0].calls == 24, "policy and reference in one model"
        table("KTOTrainer, LoRA", found)


@FULL
@pytest.mark.parametrize("others", [{}, {"center_rewards_coefficient": 0.01}])
def test_reward_model(scorer, trl_trainer, preferences, table, others):
    """A score for the last token of every row."""
    build = partial(trl_trainer, "Reward", rows=preferences, **others)
    found = compare(lambda share: build(share(scorer())), evaluate=True)
    assert found.r > 3.5
    table(f"RewardTrainer, {next(iter(others), 'scores')}", found)


@FULL
def test_adapters_and_a_trained_head_of_a_reward_model(scorer, trl_trainer, preferences, lora, table):
    """PEFT trains a copy of the score head (`modules_to_save`), which stands after the backbone as before."""
    from peft import get_peft_model

    adapters = lora(task_type="SEQ_CLS", modules_to_save=["score"])
    build = partial(trl_trainer, "Reward", rows=preferences, **ADAPTED)
    found = compare(lambda share: build(share(get_peft_model(scorer(), adapters))))
    assert len(found.shared.gradients[0]) > 32, "the head and the adapters"
    table("RewardTrainer, LoRA and score head", found)


# ORPO's and CPO's means of the logits are over padding too, where shared runs have zeros.
OVER_PADDING = ("logits/chosen", "logits/rejected", "eval_logits/chosen", "eval_logits/rejected")


@FULL
@pytest.mark.parametrize("name", ["ORPO", "CPO", "TPO"])
def test_without_a_reference(model, trl_trainer, preferences, table, name):
    """TPO wants a third answer, its gold standard; here it is a longer chosen one."""
    rows = preferences.map(lambda row: {"reference": row["chosen"] + " w1"}) if name == "TPO" else preferences
    found = compare(
        lambda share: trl_trainer(name, share(model()), rows=rows), skipped=() if name == "TPO" else OVER_PADDING
    )
    assert found.r > 3.5
    table(f"{name}Trainer", found)
