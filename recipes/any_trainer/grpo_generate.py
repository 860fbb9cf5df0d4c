"""Train GRPO and generate each group of completions from one prefill of its prompt. One line differs from grpo.py.

TRL repeats a prompt for each of its completions, and Hugging Face's `generate` computes and stores every copy.
`radixtrain.generate` computes and stores common prefixes once, and all completions of a group attend to them in one
product. For RLOO, write `class RadixRLOOTrainer(RadixGeneration, RLOOTrainer)`. For text and unsharded weights only.

make fit && python recipes/any_trainer/grpo_generate.py
"""

from typing import Any

from grpo import train
from trl import GRPOTrainer

import radixtrain


class RadixGeneration:
    """Generate completions with TRL's own options. Returns their token ids, including the end token."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any, *others: Any) -> Any:
        if images is not None:
            raise NotImplementedError("RadixGeneration is for text, and these prompts have images: leave it out")
        model, ends = self.accelerator.unwrap_model(self.model), self.generation_config.eos_token_id
        batch = self.processing_class.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        with self.accelerator.autocast():
            found = radixtrain.generate(model, **batch.to(model.device), generation_config=self.generation_config)
        return [until_end(ids, ends) for ids in found[:, batch["input_ids"].shape[1] :].tolist()]


def until_end(ids: list[int], ends: int | list[int]) -> list[int]:
    ends = ends if isinstance(ends, list) else [ends]
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]


class RadixGRPOTrainer(RadixGeneration, GRPOTrainer):
    """GRPOTrainer that generates with a radix cache. To combine: `class ...(WholeGroups, RadixGRPOTrainer)`."""

    def _generate_single_turn(self, *turn: Any, **others: Any) -> tuple[Any, None]:
        return super()._generate_single_turn(*turn, **others), None  # no log-probabilities, as without vLLM


if __name__ == "__main__":
    train(RadixGRPOTrainer)  # <- was GRPOTrainer
