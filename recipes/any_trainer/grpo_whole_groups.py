"""Train GRPO with groups that stay together, so that each prompt is computed once. One line differs from grpo.py.

TRL generates several micro-batches at once, shuffles their rows and splits them, which scatters a group. This trainer
shuffles groups. For RLOO, write `class GroupedRLOOTrainer(WholeGroups, RLOOTrainer)`. For text only.

make fit && python recipes/any_trainer/grpo_whole_groups.py
"""

import math
from typing import Any

from grpo import train
from trl import GRPOTrainer


class WholeGroups:
    """Pass tensors of groups `[G, n, ...]` to the shuffle, and rows `[G n, ...]` to the loss."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        rows = super()._generate_and_score_completions(inputs)
        if "num_images" in rows:
            raise NotImplementedError("WholeGroups is for text, and these rows have images: leave it out")
        # If a group does not fit into micro-batches, its largest parts that do. Evaluation cuts nothing.
        unit = math.gcd(self.num_generations, self.args.per_device_train_batch_size) if self.model.training else 1
        return {name: values.unflatten(0, (-1, unit)) if values.ndim else values for name, values in rows.items()}

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        groups = super()._prepare_inputs(generation_batch)
        return {name: values.flatten(0, 1) if values.ndim else values for name, values in groups.items()}


class GroupedGRPOTrainer(WholeGroups, GRPOTrainer):
    """GRPOTrainer whose micro-batches hold whole groups."""


if __name__ == "__main__":
    train(GroupedGRPOTrainer)  # <- was GRPOTrainer
