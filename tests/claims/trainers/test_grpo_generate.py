"""recipes/any_trainer/grpo_generate.py: completions from one prefill, and every number that TRL logs stays the same.

Greedy completions are those of the untouched trainer. Sampled ones take other draws, of the same distribution, which
tests/claims/generation asserts.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from rollouts import ENDS, GENERATIONS, MAX_COMPLETION, Reward, arguments, policy_of, prompts, save_policy, tokenizer
from trainer_harness import BAR, Counts, Run, differences_of, run
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import radixtrain
from radixtrain import share_prefixes, sharing_report
from radixtrain.generation.generated import Generated

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "any_trainer"
from grpo_generate import RadixGeneration, RadixGRPOTrainer  # noqa: E402
from grpo_whole_groups import WholeGroups  # noqa: E402

sys.modules.pop("grpo", None)  # a recipe, and recipes are imported anew by their own tests

# Completions of a greedy group are equal and their advantages zero: what is left of the loss is the KL divergence to
# the reference. `DIFFERENCES` is that of test_grpo.py.
GREEDY = {"beta": 0.1, "generation_kwargs": {"do_sample": False}}
GREEDY_ENDS = [1, 3, 18]  # tokens that the greedy policy reaches
DIFFERENCES: dict[str, Callable[[Any], float]] = {
    "loss": lambda entry: 1.0,
    "train_loss": lambda entry: 1.0,
    "kl": lambda entry: 2.0,
}


class RadixRLOOTrainer(RadixGeneration, RLOOTrainer):
    """As the recipe says."""


class GroupedRadixGRPOTrainer(WholeGroups, RadixGRPOTrainer):
    """Both recipes at once."""


class GroupedGRPOTrainer(WholeGroups, GRPOTrainer):
    """The other one only."""


ARMS = {
    "GRPO": (GRPOTrainer, RadixGRPOTrainer, GRPOConfig),
    "GRPO, whole groups": (GroupedGRPOTrainer, GroupedRadixGRPOTrainer, GRPOConfig),
    "RLOO": (RLOOTrainer, RadixRLOOTrainer, RLOOConfig),
}


@pytest.fixture(scope="module")
def policy(tiny_qwen3, tmp_path_factory) -> Path:
    return save_policy(tiny_qwen3(), tmp_path_factory.mktemp("policy"))


@pytest.fixture
def answers(monkeypatch) -> list[Generated]:
    """What `radixtrain.generate` returned."""
    found: list[Generated] = []
    generate = radixtrain.generate

    def keep(*arguments: Any, **options: Any) -> Generated:
        found.append(generate(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(radixtrain, "generate", keep, raising=False)
    return found


def trained(
    trainer_class: type[Trainer], args: Any, policy: Path, ends: list[int] = GREEDY_ENDS, **others: Any
) -> tuple[Run, Reward, Any]:
    """The run of a shared policy and its reference, what the reward was given, and the policy."""
    kept: list[Any] = []

    def build(share: Any) -> Trainer:
        model, reward = share(policy_of(policy)), Reward()
        model.generation_config.eos_token_id = ends
        trainer = trainer_class(model, reward, args, prompts(), prompts().select(range(4)), tokenizer(), **others)
        if trainer.ref_model is not None:
            share(trainer.ref_model)
        kept.extend([reward, model])
        return trainer

    return run(build, share_prefixes, evaluate=True), *kept


SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GRPO": ("GRPO", {}, {}),
    "whole groups, checkpointing": ("GRPO, whole groups", {"gradient_checkpointing": True}, {}),
    "LoRA": (
        "GRPO",
        {},
        {
            "peft_config": LoraConfig(
                r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
            )
        },
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_completions_and_every_logged_number_are_the_same(name, policy, tmp_path, answers):
    arms, settings, others = SETTINGS[name]
    stock, radix, configuration = ARMS[arms]
    args = arguments(configuration, tmp_path, **GREEDY, **settings)
    (plain, drawn, _), (found, drawn_again, model) = (trained(t, args, policy, **others) for t in (stock, radix))
    assert answers and drawn.completions == drawn_again.completions
    assert len(set(map(len, drawn.completions))) > 1, "completions of one length need no padding"
    worst = differences_of(plain, found, DIFFERENCES)
    assert {"reward", "kl", "completions/mean_length", "eval_reward"} <= worst.keys()
    assert sharing_report(model).num_shared > 0, "the loss is shared as before"


def test_greedy_rloo(policy, tmp_path, answers):
    """Its KL divergence is part of the reward, so the gradient of a greedy group is zero."""
    stock, radix, configuration = ARMS["RLOO"]
    args = arguments(configuration, tmp_path, **GREEDY)
    (plain, drawn, _), (found, drawn_again, _) = (trained(t, args, policy) for t in (stock, radix))
    assert answers and drawn.completions == drawn_again.completions
    for one, other in zip(plain.entries, found.entries, strict=True):
        assert other == pytest.approx(one, rel=BAR, abs=BAR)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_sampled_groups_fork_from_one_prefill(name, policy, tmp_path, answers):
    stock, radix, configuration = ARMS[name]
    args = arguments(configuration, tmp_path, temperature=0.9, top_p=0.95)
    (found, drawn, _), (plain, _, _) = (trained(each, args, policy, ENDS) for each in (radix, stock))
    assert [entry.keys() for entry in found.entries] == [entry.keys() for entry in plain.entries]
    for each in answers:
        expected = Counts()
        expected.add(each.prompt_ids)
        assert each.stats.num_computed_tokens == expected.num_unique <= each.stats.num_prompt_tokens / GENERATIONS
    completions = [ids for each in answers for ids in each.token_ids]
    assert completions == drawn.completions
    groups = [completions[start : start + GENERATIONS] for start in range(0, len(completions), GENERATIONS)]
    assert sum(len(set(map(tuple, group))) > 1 for group in groups) > len(groups) / 2, "samples of a group differ"
    assert all(len(ids) == MAX_COMPLETION or ids[-1] in ENDS for ids in completions)
    assert all(token not in ENDS for ids in completions for token in ids[:-1])


def test_the_seed_of_the_trainer_governs_the_samples(policy, tmp_path):
    args = arguments(GRPOConfig, tmp_path)
    (one, drawn, _), (again, drawn_again, _) = (trained(RadixGRPOTrainer, args, policy) for _ in range(2))
    assert drawn.completions == drawn_again.completions and one.entries == again.entries


def test_images_are_refused():
    with pytest.raises(NotImplementedError, match="for text"):
        RadixGeneration()._generate_single_turn([[3, 4]], [["an image"]], {})
