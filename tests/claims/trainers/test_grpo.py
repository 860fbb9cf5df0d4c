"""TRL's GRPOTrainer under `share_prefixes`: losses, references, adapters, several updates with one generation batch.

Generation passes a cache, so it is not shared, and both runs must draw the same completions (`compare_rollouts`).
"""

from pathlib import Path

import pytest
from peft import LoraConfig
from rollouts import Reward, arguments, compare_rollouts, policy_of, prompts, save_policy, tokenizer
from trainer_harness import Entry, Share, compare
from trl import GRPOConfig, GRPOTrainer

from radixtrain import share_prefixes, sharing_report

# The advantages of a group have mean 0 and the mean of their squares is at most 1, so the loss is a difference of terms
# whose sizes sum up to 1 at most. The k3 estimate of the KL divergence is exp(d) - d - 1: its terms sum up to 2.
DIFFERENCES = {"loss": lambda entry: 1.0, "train_loss": lambda entry: 1.0, "kl": lambda entry: 2.0}

ON_POLICY = {
    loss_type: {"loss_type": loss_type} for loss_type in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo")
}
SETTINGS = {
    **ON_POLICY,
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "num_iterations 2": {"beta": 0.1, "num_iterations": 2, "epsilon": 0.01},
    "steps_per_generation 4": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 5},
    "truncated completions masked": {"mask_truncated_completions": True},
    "half of the entropies": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.1},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.fixture(scope="module")
def policy(tiny_qwen3, tmp_path_factory) -> Path:
    return save_policy(tiny_qwen3(), tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, policy, tmp_path, table):
    found, _ = compare_rollouts(GRPOTrainer, arguments(GRPOConfig, tmp_path, **SETTINGS[name]), policy, DIFFERENCES)
    table(f"GRPO, {name}", found)
    assert found.r > 2
    if name == "num_iterations 2":
        assert found.shared.entries[0]["kl"] > 0.01, "the reference is another model"
        assert found.shared.entries[1]["clip_ratio/region_mean"] > 0, "the policy has moved since it generated"


def test_evaluation_logs_the_same(policy, tmp_path, table):
    args, differences = arguments(GRPOConfig, tmp_path), {**DIFFERENCES, "eval_loss": lambda entry: 1.0}
    found, _ = compare_rollouts(GRPOTrainer, args, policy, differences, evaluate=True)
    table("GRPO, evaluation", found)
    assert "eval_entropy" in found.worst


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_adapters_are_their_own_reference(beta, policy, tmp_path, table):
    """Small adapters: with PEFT's lora_alpha, 8, two ordinary runs (eager, SDPA) differ by 7e-6, with 1 by 8e-7."""
    lora = LoraConfig(r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    args = arguments(GRPOConfig, tmp_path, beta=beta)
    found, _ = compare_rollouts(GRPOTrainer, args, policy, DIFFERENCES, peft_config=lora)
    table(f"GRPO, LoRA, beta {beta}", found)
    assert len(found.counts) == 1


def test_router_loss(mixture, tmp_path, table):
    """With SGD. AdamW divides gradients of any size by their own, also the rounding errors of those that are zero."""
    policy = save_policy(mixture(), tmp_path / "policy")
    args = arguments(GRPOConfig, tmp_path, beta=0.1, optim="sgd", learning_rate=1e-2)
    found, _ = compare_rollouts(GRPOTrainer, args, policy, DIFFERENCES)
    table("GRPO, mixture of experts", found)
    assert found.shared.entries[0]["aux_loss"] > 0


def test_reference_that_is_left_alone(policy, tmp_path):
    """TRL loads it with the attention of the shared policy. It computes what it always did."""
    args = arguments(GRPOConfig, tmp_path, beta=0.1)
    found, _ = compare_rollouts(GRPOTrainer, args, policy, DIFFERENCES, share_reference=False)
    assert len(found.counts) == 1 and found.shared.entries[0]["kl"] > 0.01


def test_model_by_its_name(policy, tmp_path):
    """What TRL loads itself is shared after the trainer was made."""

    def build(share: Share) -> GRPOTrainer:
        trainer = GRPOTrainer(
            str(policy), Reward(), arguments(GRPOConfig, tmp_path), prompts(), processing_class=tokenizer()
        )
        share(trainer.model)
        return trainer

    compare(build, differences=DIFFERENCES)


def test_reward_model(scorer, policy, tmp_path, table):
    """A reward model reads the same groups. TRL leaves it to its configuration whether it makes a cache."""

    def build(share: Share) -> GRPOTrainer:
        reward = scorer()
        reward.config.use_cache, reward.config._name_or_path = False, "scorer"
        models = {"model": share(policy_of(policy)), "reward_funcs": share(reward)}
        words = {"processing_class": tokenizer(), "reward_processing_classes": tokenizer()}
        return GRPOTrainer(args=arguments(GRPOConfig, tmp_path), train_dataset=prompts(), **models, **words)

    def size(entry: Entry) -> float:
        """Of a score, on average and at most; scores have both signs."""
        return abs(entry["reward"]) + entry["reward_std"]

    found = compare(build, differences={**DIFFERENCES, "reward": size, "rewards/scorer/mean": size})
    table("GRPO, reward model", found)
    assert found.shared.entries[0]["reward_std"] > 0.1


def test_generation_is_counted_as_left_alone(policy, tmp_path):
    args = arguments(GRPOConfig, tmp_path)
    trainer = GRPOTrainer(str(policy), Reward(), args, prompts(), processing_class=tokenizer())
    model = share_prefixes(trainer.model)
    trainer.train()
    (reason,) = sharing_report(model).not_shared
    assert "cache" in reason
