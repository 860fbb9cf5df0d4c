"""recipes/any_trainer/grpo_whole_groups.py: groups stay together, a step over the generation batch is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from radixtrain import share_prefixes, sharing_report
from tests.support import FULL
from tests.support.trainers import (
    BAR,
    GENERATIONS,
    Counts,
    Reward,
    Run,
    Share,
    arguments,
    gradient_distances,
    policy_of,
    prompts,
    run,
    tokenizer,
)

pytestmark = FULL

ONE_STEP = {"gradient_accumulation_steps": 4, "max_steps": 1}  # 16 rows, 4 groups, 4 micro-batches
# Sums over rows, or over tokens that are divided by a count of the whole generation batch.
INDEPENDENT = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
Trained = tuple[Run, Any, Reward]


def classes(kind: str) -> tuple[Any, Any, Any]:
    """Configuration, TRL's trainer, and the same whose micro-batches hold whole groups."""
    import trl
    from grpo_whole_groups import WholeGroups

    trainer = getattr(trl, f"{kind}Trainer")
    return getattr(trl, f"{kind}Config"), trainer, type("Grouped", (WholeGroups, trainer), {})


def trained(trainer_class: type[Any], args: Any, reference: Path) -> Trained:
    """The run of a shared policy, its report and what the reward was given."""
    kept: list[Any] = []

    def build(share: Share) -> Any:
        kept.extend([share(policy_of(reference)), Reward()])
        return trainer_class(*kept, args, prompts(common=[], own=20), processing_class=tokenizer())

    done = run(build, share_prefixes)
    return done, sharing_report(kept[0]), kept[1]


def assert_same_step(one: Run, other: Run) -> None:
    assert abs(one.entries[0]["loss"] - other.entries[0]["loss"]) <= BAR
    assert max(gradient_distances(one, other)) <= BAR


SIZES = {  # groups that do not fit: parts of the greatest common divisor stay together
    "two groups in a micro-batch": {"per_device_train_batch_size": 8},
    "half a group": {"num_generations": 8},
    "a group and a half": {"per_device_train_batch_size": 6},
}
SETTINGS = {
    **{loss_type: ("GRPO", {"loss_type": loss_type}) for loss_type in INDEPENDENT},
    **{name: ("GRPO", sizes) for name, sizes in SIZES.items()},
    "rloo": ("RLOO", {"beta": 0.0}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_accumulated_step_is_the_same(name, reference, tmp_path):
    """So every row is used once, with its own advantage."""
    kind, own = SETTINGS[name]
    config, *both = classes(kind)
    args = arguments(config, tmp_path, **own, **ONE_STEP)
    (plain, before, drawn), (whole, after, drawn_again) = (trained(each, args, reference) for each in both)
    assert drawn == drawn_again
    assert_same_step(plain, whole)
    assert after.num_tokens == before.num_tokens and after.num_unique_tokens < before.num_unique_tokens
    if kind == "GRPO" and name not in SIZES:
        assert after.num_unique_tokens == unique_tokens_of_groups(drawn).num_unique


def test_an_accumulated_bnpo_step_is_another(reference, tmp_path):
    """Its divisor is the number of tokens of a micro-batch, which depends on the rows in it."""
    config, *both = classes("GRPO")
    args = arguments(config, tmp_path, loss_type="bnpo", **ONE_STEP)
    assert max(gradient_distances(*(trained(each, args, reference)[0] for each in both))) > 1e-3


def test_settings_of_trl_that_keep_groups_whole(reference, tmp_path):
    """Without any class of ours: one micro-batch is the same step, one generation for each draws other rows."""
    config, trainer, _ = classes("GRPO")
    settings = ({}, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}, {"steps_per_generation": 1})
    found = [trained(trainer, arguments(config, tmp_path, **ONE_STEP | own), reference) for own in settings]
    (plain, before, _), (whole, after, _), (_, of_each, drawn) = found
    assert_same_step(plain, whole)
    assert after.num_tokens == before.num_tokens and after.num_unique_tokens < 0.6 * before.num_unique_tokens
    assert of_each.compression_ratio > 1.5 * before.compression_ratio
    assert of_each.num_unique_tokens == unique_tokens_of_groups(drawn).num_unique


def unique_tokens_of_groups(drawn: Reward) -> Counts:
    """What a micro-batch for each group has to compute."""
    found = Counts()
    rows = [[*map(int, prompt.split()), *ids] for prompt, ids in zip(drawn.prompts, drawn.completions, strict=True)]
    for start in range(0, len(rows), GENERATIONS):
        found.add(rows[start : start + GENERATIONS])
    return found


def test_images_are_refused():
    from grpo_whole_groups import WholeGroups

    class Images:
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return {"pixel_values": torch.zeros(7, 3), "num_images": [1, 1]}

    class Grouped(WholeGroups, Images):
        pass

    with pytest.raises(NotImplementedError, match="for text"):
        Grouped()._generate_and_score_completions([])
