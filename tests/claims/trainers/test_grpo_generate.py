"""recipes/any_trainer/grpo_generate.py: completions from one prefill, and every number that TRL logs stays the same.

Greedy completions are those of the untouched trainer. Sampled ones take other draws, of the same distribution, which
tests/claims/generation asserts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import radixtrain
from radixtrain import share_prefixes, sharing_report
from radixtrain.generation.cache import RadixCache
from tests.support import FULL
from tests.support.trainers import (
    ENDS,
    GENERATIONS,
    LORA,
    MAX_COMPLETION,
    Counts,
    Reward,
    Run,
    arguments,
    differences_of,
    policy_of,
    prompts,
    run,
    tokenizer,
)

pytestmark = FULL

# Completions of a greedy group are equal and their advantages zero: what is left of the loss is the KL divergence to
# the reference.
GREEDY = {"beta": 0.1, "generation_kwargs": {"do_sample": False}}


@pytest.fixture(scope="module")
def arms() -> dict[str, tuple[Any, Any, Any]]:
    """By name: TRL's trainer, the same that generates on a radix cache, and their configuration."""
    from grpo_generate import RadixGeneration, RadixGRPOTrainer
    from grpo_whole_groups import WholeGroups
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    class RadixRLOOTrainer(RadixGeneration, RLOOTrainer):
        """As the recipe says."""

    class GroupedRadixGRPOTrainer(WholeGroups, RadixGRPOTrainer):
        """Both recipes at once."""

    class GroupedGRPOTrainer(WholeGroups, GRPOTrainer):
        """The other one only."""

    return {
        "GRPO": (GRPOTrainer, RadixGRPOTrainer, GRPOConfig),
        "GRPO, whole groups": (GroupedGRPOTrainer, GroupedRadixGRPOTrainer, GRPOConfig),
        "RLOO": (RLOOTrainer, RadixRLOOTrainer, RLOOConfig),
    }


@pytest.fixture
def caches(monkeypatch) -> list[tuple[list[list[int]], RadixCache]]:
    """The prompts of each call of `radixtrain.generate`, and a cache that it was given."""
    found: list[tuple[list[list[int]], RadixCache]] = []
    generate = radixtrain.generate

    def keep(model: Any, input_ids: Any, attention_mask: Any, **options: Any) -> Any:
        prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids, attention_mask, strict=True)]
        found.append((prompts, RadixCache()))
        return generate(model, input_ids, attention_mask=attention_mask, cache=found[-1][1], **options)

    monkeypatch.setattr(radixtrain, "generate", keep, raising=False)
    return found


def trained(
    trainer_class: type[Any], args: Any, reference: Path, ends: list[int], **others: Any
) -> tuple[Run, Reward, Any]:
    """The run of a shared policy and its reference, what the reward was given, and the policy."""
    kept: list[Any] = []

    def build(share: Any) -> Any:
        model, reward = share(policy_of(reference, ends=ends)), Reward()
        trainer = trainer_class(model, reward, args, prompts(), prompts().select(range(4)), tokenizer(), **others)
        if trainer.ref_model is not None:
            share(trainer.ref_model)
        kept.extend([reward, model])
        return trainer

    return run(build, share_prefixes, evaluate=True), *kept


@pytest.mark.parametrize(
    ("name", "settings", "lora"),
    [
        ("GRPO", {}, False),
        ("GRPO", {}, True),
        ("GRPO, whole groups", {"gradient_checkpointing": True}, False),
        ("RLOO", {}, False),  # its KL divergence is part of the reward, so the gradient of a greedy group is zero
    ],
)
def test_greedy_completions_and_every_logged_number_are_the_same(
    name, settings, lora, arms, reference, tmp_path, caches
):
    from peft import LoraConfig

    stock, radix, configuration = arms[name]
    args = arguments(configuration, tmp_path, **GREEDY, **settings)
    others = {"peft_config": LoraConfig(**LORA)} if lora else {}
    (plain, drawn, _), (found, drawn_again, model) = (
        trained(each, args, reference, greedy_ends(reference), **others) for each in (stock, radix)
    )
    assert caches and drawn.completions == drawn_again.completions
    assert len(set(map(len, drawn.completions))) > 1, "completions of one length need no padding"
    worst = differences_of(plain, found, zero_gradient=name == "RLOO")
    assert {"reward", "kl", "completions/mean_length", "eval_reward"} <= worst.keys()
    assert sharing_report(model).num_shared > 0, "the loss is shared as before"


def greedy_ends(reference: Path) -> list[int]:
    """Tokens that end some of the policy's greedy completions: each at the third token of another prompt."""
    model = policy_of(reference).double().eval()
    asked = [tokenizer()(row["prompt"])["input_ids"] for row in prompts()]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    return sorted({int(model.generate(torch.tensor([ids]), **options)[0, -1]) for ids in asked[::3]})


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_sampled_groups_fork_from_one_prefill(name, arms, reference, tmp_path, caches):
    stock, radix, configuration = arms[name]
    args = arguments(configuration, tmp_path, temperature=0.9, top_p=0.95)
    (found, drawn, _), (plain, _, _) = (trained(each, args, reference, ENDS) for each in (radix, stock))
    assert [entry.keys() for entry in found.entries] == [entry.keys() for entry in plain.entries]
    for asked, cache in caches:
        expected = Counts()
        expected.add([ids[:-1] for ids in asked])  # the last token of each is computed with its completion
        assert cache.counters.num_computed == expected.num_unique <= expected.num_tokens / GENERATIONS
    completions = drawn.completions
    groups = [completions[start : start + GENERATIONS] for start in range(0, len(completions), GENERATIONS)]
    assert sum(len(set(map(tuple, group))) > 1 for group in groups) > len(groups) / 2, "samples of a group differ"
    assert all(len(ids) == MAX_COMPLETION or ids[-1] in ENDS for ids in completions)
    assert all(token not in ENDS for ids in completions for token in ids[:-1])


def test_images_are_refused():
    from grpo_generate import RadixGeneration

    with pytest.raises(NotImplementedError, match="for text"):
        RadixGeneration()._generate_single_turn([[3, 4]], [["an image"]], {})
