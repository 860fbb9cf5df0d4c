"""TRL's GRPOTrainer and RLOOTrainer: losses, references, adapters, several updates with one generation batch.

Generation passes a cache, so it is not shared, and both runs must draw the same completions (`compare_rollouts`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL, cases
from tests.support.models import tiny_model, tiny_qwen3
from tests.support.trainers import (
    LORA,
    VOCAB_SIZE,
    Comparison,
    Reward,
    Share,
    arguments,
    compare,
    policy_of,
    prompts,
    tokenizer,
)


def compare_rollouts(
    trainer_class: type[Any],
    args: Any,
    folder: Path,
    *,
    evaluate: bool = False,
    share_reference: bool = True,
    make: Callable[[int], Any] = tiny_qwen3,
    **others: Any,
) -> Comparison:
    """Both arms of a trainer, with the same completions.

    folder: as `save_reference` returns it. make: the policy. others: further arguments of the trainer.
    """
    rewards: list[Reward] = []

    def build(share: Share) -> Any:
        rewards.append(reward := Reward())
        model = share(policy_of(folder, make))
        trainer = trainer_class(model, reward, args, prompts(), prompts().select(range(4)), tokenizer(), **others)
        if trainer.ref_model is not None:
            share(trainer.ref_model) if share_reference else trainer.ref_model.double()
        return trainer

    found = compare(build, evaluate=evaluate)
    plain, shared = rewards
    assert plain.completions == shared.completions
    assert len(set(map(len, shared.completions))) > 1, "completions of one length need no padding"
    return found


LOSSES = ("dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo")
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
MIXTURE = {"vocab_size": VOCAB_SIZE, "router_aux_loss_coef": 0.01, "experts_implementation": "eager"}  # in float64
# Settings, and options of `compare_rollouts`.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "GRPO": ("GRPO", {}),
    **{f"GRPO, {loss_type}": ("GRPO", {"loss_type": loss_type, "max_steps": 1}) for loss_type in LOSSES},
    "GRPO, luspo": ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence", "max_steps": 1}),
    "GRPO, reference that follows": ("GRPO", {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "GRPO, num_iterations 2": ("GRPO", {"beta": 0.1, "num_iterations": 2, "epsilon": 0.01}),
    "GRPO, steps_per_generation 4": ("GRPO", {"steps_per_generation": 4, "gradient_accumulation_steps": 1}),
    "GRPO, truncated completions masked": ("GRPO", {"mask_truncated_completions": True, "max_steps": 1}),
    "GRPO, entropies": ("GRPO", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "max_steps": 1}),
    "GRPO, reentrant checkpointing": ("GRPO", CHECKPOINTING),
    "RLOO": ("RLOO", {}),
    "RLOO, no reference": ("RLOO", {"beta": 0.0, "normalize_advantages": True}),
    "RLOO, num_iterations 2": ("RLOO", {"num_iterations": 2, "epsilon": 0.01}),
    "RLOO, steps_per_generation 4": ("RLOO", {"steps_per_generation": 4, "gradient_accumulation_steps": 1}),
    "RLOO, gradient checkpointing": ("RLOO", {"gradient_checkpointing": True, "mask_truncated_completions": True}),
    "GRPO, evaluation": ("GRPO", {}, {"evaluate": True}),
    "GRPO, LoRA": ("GRPO", {"beta": 0.0}, {"peft_config": LORA}),
    "GRPO, LoRA, its own reference": ("GRPO", {"beta": 0.1}, {"peft_config": LORA}),
    "RLOO, LoRA": ("RLOO", {}, {"peft_config": LORA}),
    "GRPO, mixture of experts": ("GRPO", {}, {"make": partial(tiny_model, "Qwen3MoeForCausalLM", **MIXTURE)}),
    # TRL loads it with the attention of the shared policy. It computes what it always did.
    "GRPO, a reference that is left alone": ("GRPO", {"beta": 0.1}, {"share_reference": False}),
}
LOGGED = {"GRPO, evaluation": "eval_entropy", "GRPO, mixture of experts": "aux_loss"}


def classes(name: str) -> tuple[Any, Any]:
    import trl

    return getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")


@pytest.mark.parametrize("name", cases(SETTINGS, ["GRPO"]))
def test_settings(name, reference, tmp_path, table):
    from peft import LoraConfig

    kind, own, *others = SETTINGS[name]
    options = dict(*others)
    if "peft_config" in options:
        options["peft_config"] = LoraConfig(**options["peft_config"])
    config, trainer = classes(kind)
    found = compare_rollouts(trainer, arguments(config, tmp_path, **own), reference, **options)
    table(name, found)
    assert found.r > 2
    assert LOGGED.get(name, "loss") in found.worst
    assert len(found.counts) == 1 or not options.keys() & {"peft_config", "share_reference"}
    if name == "GRPO, num_iterations 2":
        assert found.shared.entries[0]["kl"] > 0.01, "the reference is another model"
        assert found.shared.entries[1]["clip_ratio/region_mean"] > 0, "the policy has moved since it generated"


@FULL
def test_reward_model(scorer, reference, tmp_path, table):
    """A reward model reads the same groups. TRL leaves it to its configuration whether it makes a cache."""
    config, trainer_class = classes("GRPO")

    def build(share: Share) -> Any:
        reward = scorer()
        reward.config.use_cache, reward.config._name_or_path = False, "scorer"
        models = {"model": share(policy_of(reference)), "reward_funcs": share(reward)}
        words = {"processing_class": tokenizer(), "reward_processing_classes": tokenizer()}
        return trainer_class(args=arguments(config, tmp_path), train_dataset=prompts(), **models, **words)

    found = compare(build)
    table("GRPO, reward model", found)
    assert found.shared.entries[0]["reward_std"] > 0.1
