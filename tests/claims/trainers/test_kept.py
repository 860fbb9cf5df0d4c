"""TRL's trainers with a reference or a reward model whose prompts are computed once: every number stays the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollouts import LORA, Reward, arguments, policy_of, prompts, tokenizer
from tiers import cases
from trainer_harness import Share, differences_of, run

from radixtrain import RadixCache, share_prefixes, sharing_report
from radixtrain.hf.sharing_report import SharingReport

BuildOf = Callable[[Share, Share], Any]  # what shares the policy, and what shares a frozen model


def compare(build: BuildOf, budget: int | None = None) -> SharingReport:
    """Of the frozen model, after both runs have logged the same numbers."""
    frozen: list[Any] = []

    def kept(model: Any) -> Any:
        frozen.append(share_prefixes(model, cache=RadixCache(budget)))
        return frozen[-1]

    untouched = run(lambda share: build(share, share), lambda model: model)
    shared = run(lambda share: build(lambda model: share_prefixes(share(model)), lambda model: kept(share(model))),
                 lambda model: model)  # fmt: skip
    differences_of(untouched, shared)
    return sharing_report(frozen[0])


@pytest.mark.parametrize("budget", cases([None, 120], [120]))
def test_dpo(model: Any, trl_trainer: Any, preferences: Any, budget: int | None) -> None:
    """Three steps are one epoch and a half. A prompt has 95 tokens, of which 81 are the system's."""

    def build(share: Share, keep: Share) -> Any:
        return trl_trainer("DPO", share(model(0)), keep(model(1)), rows=preferences, beta=0.1)

    report = compare(build, budget)
    assert report.num_cached_tokens > 0.6 * report.num_tokens and not report.not_cached
    assert report.num_head_places > 2 * report.num_head_rows, "distinct rows, those from the cache too"


SETTINGS: dict[str, dict[str, Any]] = {
    "a reference": {"beta": 0.1},
    "a reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "adapters": {"beta": 0.1},
    "adapters, old log-probabilities": {"beta": 0.1, "num_iterations": 2},
}


@pytest.mark.parametrize("name", cases(SETTINGS, ["a reference", "adapters, old log-probabilities"]))
def test_grpo(name: str, reference: Path, tmp_path: Path) -> None:
    """Prompts share 24 tokens, which are in the cache from the second micro-batch on, unless the weights change."""
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    adapters = {"peft_config": LoraConfig(**LORA)} if "adapters" in name else {}

    def build(share: Share, keep: Share) -> Any:
        policy = (keep if adapters else share)(policy_of(reference))
        args = arguments(GRPOConfig, tmp_path, **SETTINGS[name])
        trainer = GRPOTrainer(policy, Reward(), args, prompts(), processing_class=tokenizer(), **adapters)
        if trainer.ref_model is not None:
            keep(trainer.ref_model)
        return trainer

    report = compare(build)
    reasons = {"it has gradients", "a trained adapter is active"} if adapters else set()
    assert set(report.not_cached) <= reasons
    assert report.num_cached_tokens > (0 if "follows" in name or adapters else 0.5 * report.num_tokens)


def test_a_reward_model_of_grpo(scorer: Any, reference: Path, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    def build(share: Share, keep: Share) -> Any:
        reward = scorer()
        reward.config.use_cache, reward.config._name_or_path = False, "scorer"
        models = {"model": share(policy_of(reference)), "reward_funcs": keep(reward)}
        words = {"processing_class": tokenizer(), "reward_processing_classes": tokenizer()}
        return GRPOTrainer(args=arguments(GRPOConfig, tmp_path), train_dataset=prompts(), **models, **words)

    report = compare(build)
    assert report.num_cached_tokens > 0.4 * report.num_tokens
