"""recipes/any_trainer/grpo_whole_groups.py: groups stay together, a step over the generation batch is the same."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import GENERATIONS, Reward, arguments, policy_of, prompts, save_policy, tokenizer
from trainer_harness import BAR, Counts, Run, Share, gradient_distances, run
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from radixtrain import share_prefixes, sharing_report

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "any_trainer"
from grpo_whole_groups import GroupedGRPOTrainer, WholeGroups  # noqa: E402

sys.modules.pop("grpo", None)  # a recipe, and recipes are imported anew by their own tests

ONE_STEP = {"gradient_accumulation_steps": 4, "max_steps": 1}  # 16 rows, 4 groups, 4 micro-batches
WHOLE_BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 1}
# Sums over rows, or over tokens that are divided by a count of the whole generation batch.
INDEPENDENT = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")


class GroupedRLOOTrainer(WholeGroups, RLOOTrainer):
    """RLOOTrainer whose micro-batches hold whole groups."""


@pytest.fixture(scope="module")
def policy(tiny_qwen3, tmp_path_factory) -> Path:
    return save_policy(tiny_qwen3(), tmp_path_factory.mktemp("policy"))


def trained(trainer_class: type[Trainer], args: Any, policy: Path) -> tuple[Run, Any, Reward]:
    """The run of a shared policy, its report and what the reward was given."""
    kept: list[Any] = []

    def build(share: Share) -> Trainer:
        kept.extend([share(policy_of(policy)), Reward()])
        return trainer_class(*kept, args, prompts(common=[], own=20), processing_class=tokenizer())

    done = run(build, share_prefixes, evaluate=False)
    return done, sharing_report(kept[0]), kept[1]


def assert_same_step(one: Run, other: Run) -> None:
    """As in test_grpo.py, the terms of a loss sum up to 1."""
    assert abs(one.entries[0]["loss"] - other.entries[0]["loss"]) <= BAR
    assert max(gradient_distances(one, other)) <= BAR


@pytest.mark.parametrize("loss_type", INDEPENDENT)
def test_an_accumulated_grpo_step_is_the_same(loss_type, policy, tmp_path):
    args = arguments(GRPOConfig, tmp_path, loss_type=loss_type, **ONE_STEP)
    (scattered, _, drawn), (whole, _, drawn_again) = (
        trained(t, args, policy) for t in (GRPOTrainer, GroupedGRPOTrainer)
    )
    assert drawn == drawn_again
    assert_same_step(scattered, whole)


def test_an_accumulated_bnpo_step_is_another(policy, tmp_path):
    """Its divisor is the number of tokens of a micro-batch, which depends on the rows in it."""
    args = arguments(GRPOConfig, tmp_path, loss_type="bnpo", **ONE_STEP)
    runs = [trained(trainer_class, args, policy)[0] for trainer_class in (GRPOTrainer, GroupedGRPOTrainer)]
    assert max(gradient_distances(*runs)) > 1e-3


def test_an_accumulated_rloo_step_is_the_same(policy, tmp_path):
    args = arguments(RLOOConfig, tmp_path, beta=0.0, max_completion_length=4, **ONE_STEP)
    (scattered, _, drawn), (whole, _, drawn_again) = (
        trained(t, args, policy) for t in (RLOOTrainer, GroupedRLOOTrainer)
    )
    assert drawn == drawn_again
    assert_same_step(scattered, whole)


def test_one_micro_batch_is_the_same_step(policy, tmp_path):
    """Without any class of ours: the generation batch is the micro-batch, and nothing is left to scatter."""
    scattered, before, _ = trained(GRPOTrainer, arguments(GRPOConfig, tmp_path, **ONE_STEP), policy)
    whole, after, _ = trained(GRPOTrainer, arguments(GRPOConfig, tmp_path, **WHOLE_BATCH), policy)
    assert_same_step(scattered, whole)
    assert after.num_tokens == before.num_tokens and after.num_unique_tokens < 0.6 * before.num_unique_tokens


def test_one_generation_for_each_micro_batch_keeps_groups_whole(policy, tmp_path):
    """Without any class of ours, too: steps_per_generation=1."""
    _, scattered, _ = trained(GRPOTrainer, arguments(GRPOConfig, tmp_path, **ONE_STEP), policy)
    _, whole, drawn = trained(GRPOTrainer, arguments(GRPOConfig, tmp_path, steps_per_generation=1, **ONE_STEP), policy)
    assert whole.compression_ratio > 1.5 * scattered.compression_ratio
    assert whole.num_unique_tokens == unique_tokens_of_groups(drawn).num_unique


def test_what_it_saves_is_what_whole_groups_save(policy, tmp_path):
    args = arguments(GRPOConfig, tmp_path, **ONE_STEP)
    _, scattered, drawn = trained(GRPOTrainer, args, policy)
    _, whole, _ = trained(GroupedGRPOTrainer, args, policy)
    expected = unique_tokens_of_groups(drawn)
    assert (whole.num_tokens, whole.num_unique_tokens) == (expected.num_tokens, expected.num_unique)
    assert scattered.num_unique_tokens > 1.5 * whole.num_unique_tokens


def unique_tokens_of_groups(drawn: Reward) -> Counts:
    """What a micro-batch for each group has to compute."""
    found = Counts()
    rows = [[*map(int, prompt.split()), *ids] for prompt, ids in zip(drawn.prompts, drawn.completions, strict=True)]
    for start in range(0, len(rows), GENERATIONS):
        found.add(rows[start : start + GENERATIONS])
    return found


@pytest.mark.parametrize(
    ("generations", "batch_size", "prompts_in_batch"), [(4, 4, 1), (4, 8, 2), (8, 4, 1), (4, 6, 3)]
)
def test_every_row_is_used_once_with_its_own_advantage(generations, batch_size, prompts_in_batch, policy, tmp_path):
    """prompts_in_batch: at most; of a group that fits badly, parts of the greatest common divisor stay together."""
    seen: list[list[tuple[tuple[int, ...], tuple[int, ...], float]]] = []

    class Recording(GroupedGRPOTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            seen.append(rows_of(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    sizes = {"num_generations": generations, "per_device_train_batch_size": batch_size}
    steps = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 4}
    _, _, drawn = trained(Recording, arguments(GRPOConfig, tmp_path, **sizes, **steps), policy)
    assert [len(rows) for rows in seen] == [batch_size] * 4
    assert max(len({prompt for prompt, _, _ in rows}) for rows in seen) <= prompts_in_batch
    assert Counter(row for rows in seen for row in rows) == Counter(expected_rows(drawn, generations))


def rows_of(inputs: dict[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """Prompt, completion and advantage of every row of a micro-batch."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    return [
        (tuple(prompt[kept.bool()].tolist()), tuple(ids[mask.bool()].tolist()), round(float(advantage), 4))
        for prompt, kept, ids, mask, advantage in zip(*(inputs[name] for name in names), strict=True)
    ]


def expected_rows(drawn: Reward, generations: int) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """The same of a generation batch, from what the reward was given."""
    rewards = torch.tensor(Reward()(drawn.prompts, drawn.completions)).view(-1, generations)
    deviations = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = (deviations / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten().tolist()
    return [
        (tuple(map(int, prompt.split())), tuple(ids), round(advantage, 4))
        for prompt, ids, advantage in zip(drawn.prompts, drawn.completions, advantages, strict=True)
    ]


def test_evaluation_is_that_of_trl(policy, tmp_path):
    losses = []
    for trainer_class in (GRPOTrainer, GroupedGRPOTrainer):
        args = arguments(GRPOConfig, tmp_path)
        trainer = trainer_class(policy_of(policy), Reward(), args, prompts(), prompts(), tokenizer())
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_images_are_refused():
    class Images:
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return {"pixel_values": torch.zeros(7, 3), "num_images": [1, 1]}

    class Grouped(WholeGroups, Images):
        pass

    with pytest.raises(NotImplementedError, match="for text"):
        Grouped()._generate_and_score_completions([])
