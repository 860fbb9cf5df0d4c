"""TRL's RewardTrainer: a score for the last token of every row, of a model for sequence classification."""

from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from trainer_harness import Entry, compare, settings
from trl import RewardConfig, RewardTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="SEQ_CLS", modules_to_save=["score"])


def differences(prefix: str = "") -> dict[str, Callable[[Entry], float]]:
    """A score is a sum of terms of both signs, and so are their mean and margin: of the size of the largest score."""
    names = ("min_reward", "mean_reward", "max_reward", "margin")
    return {
        prefix + name: lambda entry: max(abs(entry[f"{prefix}min_reward"]), abs(entry[f"{prefix}max_reward"]))
        for name in names
    }


@pytest.fixture
def reward(tokenizer, preferences, tmp_path) -> Callable[..., RewardTrainer]:
    """`reward(model, **settings)`: a trainer on the preferences."""

    def build(model: Any, **others: Any) -> RewardTrainer:
        return RewardTrainer(
            model,
            args=RewardConfig(**settings(tmp_path, **others)),
            train_dataset=preferences,
            eval_dataset=preferences.select(range(6)),
            processing_class=tokenizer,
        )

    return build


def test_scores(scorer, reward, table):
    found = compare(
        lambda share: reward(share(scorer())), differences={**differences(), **differences("eval_")}, evaluate=True
    )
    assert found.r > 3.5
    table("RewardTrainer", found)


def test_centered_rewards(scorer, reward, table):
    found = compare(lambda share: reward(share(scorer()), center_rewards_coefficient=0.01), differences=differences())
    table("RewardTrainer, centered rewards", found)


def test_adapters_and_a_trained_head(scorer, reward, table):
    """PEFT trains a copy of the score head (`modules_to_save`), which stands after the backbone as before."""
    found = compare(
        lambda share: reward(share(get_peft_model(scorer(), LORA)), learning_rate=1e-3), differences=differences()
    )
    trained = len(found.shared.gradients[0])
    assert trained > 64, "the head and the adapters"
    table("RewardTrainer, LoRA and score head", found)
