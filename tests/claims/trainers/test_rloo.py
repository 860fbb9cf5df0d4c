"""TRL's RLOOTrainer under `share_prefixes`."""

from pathlib import Path

import pytest
from peft import LoraConfig
from rollouts import arguments, compare_rollouts, save_policy
from trl import RLOOConfig, RLOOTrainer

MAX_COMPLETION = 4
# Rewards are between 0 and 1, so an advantage is between -1 and 1, and the loss a mean of such terms; normalised by
# their standard deviation, the mean of their squares is 1 at most. The KL divergence is a mean of differences of two
# log-probabilities, of at most 10 each here. A ratio is exp of the difference of two sums of log-probabilities of a
# completion, old and new: the rounding errors of both are relative errors of the gradient. (grad_norm of two ordinary
# runs, one with eager attention, one with SDPA, differs by up to 2.0e-6.) A sum is the entropy times
# the number of tokens on average.
DIFFERENCES = {
    "loss": lambda entry: 1.0,
    "train_loss": lambda entry: 1.0,
    "kl": lambda entry: 20.0,
    "grad_norm": lambda entry: entry["grad_norm"] * (1 + 2 * entry["entropy"] * MAX_COMPLETION),
}
SETTINGS = {
    "default": {},
    "no reference": {"beta": 0.0},
    "num_iterations 2": {"num_iterations": 2, "epsilon": 0.01},
    "steps_per_generation 4": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 5},
    "advantages normalised": {"normalize_advantages": True},
    "truncated completions masked": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def policy(tiny_qwen3, tmp_path_factory) -> Path:
    return save_policy(tiny_qwen3(), tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, policy, tmp_path, table):
    args = arguments(RLOOConfig, tmp_path, max_completion_length=MAX_COMPLETION, **SETTINGS[name])
    found, _ = compare_rollouts(RLOOTrainer, args, policy, DIFFERENCES)
    table(f"RLOO, {name}", found)
    assert found.r > 2


def test_adapters_are_their_own_reference(policy, tmp_path, table):
    lora = LoraConfig(r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    args = arguments(RLOOConfig, tmp_path, max_completion_length=MAX_COMPLETION)
    found, _ = compare_rollouts(RLOOTrainer, args, policy, DIFFERENCES, peft_config=lora)
    table("RLOO, LoRA", found)
    assert len(found.counts) == 1
