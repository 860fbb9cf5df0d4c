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
        model = self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            return radixtrain.generate(model, prompt_ids, generation_config=self.generation_config).token_ids


class RadixGRPOTrainer(RadixGeneration, GRPOTrainer):
    """GRPOTrainer that generates with a radix cache. To combine: `class ...(WholeGroups, RadixGRPOTrainer)`."""

    def _generate_single_turn(self, *turn: Any, **others: Any) -> tuple[Any, None]:
        return super()._generate_single_turn(*turn, **others), None  # no log-probabilities, as without vLLM


if __name__ == "__main__":
    train(RadixGRPOTrainer)  # <- was GRPOTrainer
