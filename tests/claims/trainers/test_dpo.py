"""TRL's DPOTrainer: the policy and its reference on unique tokens. A system prompt and each pair's prompt are shared.

The reference has other weights than the policy unless it is made by TRL: of two equal models every reward is 0, and
`rewards/accuracies` would compare nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from preference_bars import BETA, differences
from trainer_harness import Share, compare, gradient_distances, run, settings
from trl import DPOConfig, DPOTrainer

from radixtrain import share_prefixes

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def dpo(tokenizer, preferences, tmp_path) -> Callable[..., DPOTrainer]:
    """`dpo(model, reference, **settings)`: a trainer on the preferences."""

    def build(model: Any, reference: Any = None, **others: Any) -> DPOTrainer:
        return DPOTrainer(
            model,
            reference,
            args=DPOConfig(**settings(tmp_path, beta=BETA, **others)),
            train_dataset=preferences,
            eval_dataset=preferences.select(range(6)) if "eval_strategy" in others else None,
            processing_class=tokenizer,
        )

    return build


def test_policy_and_reference(model, dpo, table):
    def build(share: Share) -> DPOTrainer:
        return dpo(share(model(0)), share(model(1)), eval_strategy="steps", eval_steps=2)

    found = compare(build, differences={**differences(), **differences("eval_")}, evaluate=True)
    policy, reference = found.counts
    assert policy == reference, "both see every batch"
    assert found.r > 3.5
    assert any("eval_loss" in entry for entry in found.shared.entries)
    table("DPOTrainer, reference given", found)


def test_a_reference_that_is_not_shared_changes_nothing(model, dpo, table):
    """Sharing the policy only is right too, and saves half."""
    found = compare(lambda share: dpo(share(model(0)), model(1)), differences=differences())
    table("DPOTrainer, reference untouched", found)


def test_a_reference_made_by_trl(model, dpo, tmp_path, table):
    """TRL loads it from the policy's folder, without hooks: `share_prefixes(trainer.ref_model)` after construction."""
    model(0).save_pretrained(tmp_path / "start")

    def build(share: Share) -> DPOTrainer:
        policy = type(model(0)).from_pretrained(tmp_path / "start")
        trainer = dpo(share(policy))
        share(trainer.ref_model)
        return trainer

    found = compare(build, differences=differences())
    assert found.counts[0] == found.counts[1]
    table("DPOTrainer, reference made by TRL", found)


def test_a_reference_made_by_trl_that_is_left_as_it_is(model, dpo, tmp_path):
    """It takes over the attention of the policy by its name, without hooks, and computes as ever.

    Its weights are others than the policy's here. With equal ones, as TRL's reference has before the first step, every
    reward is 0 in an ordinary run and of rounding size in this one, and `rewards/accuracies` of that step compares
    those: one more reason to share the reference too.
    """
    model(1).save_pretrained(tmp_path / "start")

    def build(share: Share) -> DPOTrainer:
        policy = model(0)
        policy.config._name_or_path = str(tmp_path / "start")
        return dpo(share(policy))

    compare(build, differences=differences())


@pytest.mark.parametrize("wrapped_by", ["user", "trl"])
def test_adapters_and_no_reference(model, tokenizer, preferences, tmp_path, table, wrapped_by):
    """The reference pass is the same model with its adapters disabled: two shared calls for every batch."""

    def build(share: Share) -> DPOTrainer:
        base = model(0)
        policy = share(get_peft_model(base, LORA)) if wrapped_by == "user" else share(base)
        return DPOTrainer(
            policy,
            args=DPOConfig(**settings(tmp_path, beta=BETA, learning_rate=1e-3)),
            train_dataset=preferences,
            processing_class=tokenizer,
            peft_config=LORA if wrapped_by == "trl" else None,
        )

    found = compare(build, differences=differences())
    assert found.counts[0].calls == 12, "two for each of six micro-batches"
    table(f"DPOTrainer, LoRA by {wrapped_by}", found)


def test_precomputed_reference_log_probabilities(model, tokenizer, preferences, tmp_path, table):
    """The reference runs when the trainer is made, so it is shared before. TRL keeps what it found in a file that is
    named after the rows: a column that differs makes the second run compute its own.
    """
    runs = iter(range(2))

    def build(share: Share) -> DPOTrainer:
        rows = preferences.add_column("run", [next(runs)] * len(preferences))
        return DPOTrainer(
            share(model(0)),
            share(model(1)),
            args=DPOConfig(**settings(tmp_path, beta=BETA, precompute_ref_log_probs=True)),
            train_dataset=rows,
            processing_class=tokenizer,
        )

    found = compare(build, differences=differences())
    assert [each.calls for each in found.counts] == [6, 4], "the reference ran once over 16 pairs, four at a time"
    table("DPOTrainer, precomputed reference", found)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("several losses", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
        ("label smoothing", {"label_smoothing": 0.1}),
        ("ipo", {"loss_type": "ipo"}),
        ("weights", {"use_weighting": True, "ld_alpha": 0.5, "f_divergence_type": "js_divergence"}),
        ("synchronised reference", {"sync_ref_model": True, "ref_model_sync_steps": 1}),
        ("checkpointing", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("reentrant", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    ],
)
def test_settings(model, dpo, table, name, others):
    found = compare(lambda share: dpo(share(model(0)), share(model(1)), **others), differences=differences())
    assert found.r > 3.5
    table(f"DPOTrainer, {name}", found)


def test_rows_without_a_system_prompt(model, tokenizer, preferences, tmp_path, table):
    """The least a pair shares: its own prompt."""
    short = preferences.map(lambda row: {"prompt": row["prompt"].split("<user>")[1]})

    def build(share: Share) -> DPOTrainer:
        arguments = DPOConfig(**settings(tmp_path, beta=BETA))
        return DPOTrainer(
            share(model(0)), share(model(1)), args=arguments, train_dataset=short, processing_class=tokenizer
        )

    found = compare(build, differences=differences())
    assert 1.2 < found.r < 2.0
    table("DPOTrainer, no system prompt", found)


def test_mixture_of_experts(mixture, dpo, table):
    """The router's loss counts every token of the batch, shared or not; TRL logs it as `aux_loss`."""
    found = compare(lambda share: dpo(share(mixture(0)), share(mixture(1))), differences=differences())
    assert "aux_loss" in found.worst
    table("DPOTrainer, mixture of experts", found)


def test_bfloat16(model, dpo):
    """Under autocast: the shared gradient is as near to that of float32 as the ordinary one is."""

    def build(share: Share) -> DPOTrainer:
        return dpo(share(model(0)), share(model(1)), bf16=share is not untouched_float32)

    def untouched_float32(model: Any) -> Any:
        return model

    truth, ordinary, shared = (
        run(build, share, evaluate=False) for share in (untouched_float32, lambda model: model, share_prefixes)
    )
    errors = [gradient_distances(truth, other) for other in (ordinary, shared)]
    for of_ordinary, of_shared in zip(*errors, strict=True):
        assert 1e-3 < of_ordinary < 5e-2, "it was bfloat16"
        assert of_shared <= 2 * of_ordinary, "one bit for luck, as in radixtrain.testing"
