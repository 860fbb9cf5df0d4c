"""`PrefixGroupedSampler(num_batches=...)`: two ranks that are dealt a step's rows take the step of one process."""

from typing import Any

import numpy as np

from radixtrain import PrefixGroupedSampler, share_prefixes, sharing_report
from tests.support.processes import on_ranks
from tests.support.trainers import Run, differences_of, run, settings

ONE_PROCESS = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
LOGGED = {"loss", "grad_norm", "train_loss"}  # others are means over batches of other lengths


def test_a_step_that_is_dealt_is_that_of_one_process(model, tokenizer, tmp_path):
    """Batches of 4 rows, two accumulated, on two ranks; beside them the same steps as they are drawn."""
    from accelerate.state import AcceleratorState
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    draw = np.random.default_rng(0)
    prompts = draw.integers(6, 256, (4, 48)).tolist() * 12
    rows = [{"input_ids": prompt + draw.integers(6, 256, draw.integers(3, 41)).tolist()} for prompt in prompts]

    def trained(num_batches: int, **others: Any) -> tuple[Run, int]:
        class Grouped(Trainer):
            def _get_train_sampler(self, train_dataset: Any = None) -> PrefixGroupedSampler:
                return PrefixGroupedSampler(rows, self.args.train_batch_size, 1, 5, num_batches=num_batches)

        kept: list[Any] = []

        def build(share: Any) -> Any:
            kept.append(share(model()))
            arguments = TrainingArguments(**settings(tmp_path, **others))
            return Grouped(kept[0], arguments, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows)

        AcceleratorState._reset_state(reset_partial_state=True)
        found = run(build, lambda model: share_prefixes(model, min_ratio=0))
        entries = [{key: value for key, value in entry.items() if key in LOGGED} for entry in found.entries]
        return Run(entries, found.gradients), sharing_report(kept[0]).num_unique_tokens

    def both(rank: int) -> tuple[tuple[Run, int], tuple[Run, int]]:
        return trained(num_batches=4), trained(num_batches=1)

    one, _ = trained(num_batches=1, **ONE_PROCESS)
    first, second = on_ranks(2, both, has_group=False)
    for other, _ in (*first, *second):
        differences_of(one, other)
    dealt, drawn = (max(tokens) for tokens in zip(*(([n for _, n in first]), [n for _, n in second]), strict=True))
    assert dealt < 0.8 * drawn
