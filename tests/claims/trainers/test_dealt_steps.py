"""`PrefixGroupedSampler(num_batches=...)`: two ranks that are dealt a step's rows take the step of one process."""

from typing import Any

import numpy as np
import pytest

from radixtrain import PrefixGroupedSampler, share_prefixes, sharing_report
from tests.support import cases
from tests.support.processes import on_ranks
from tests.support.trainers import Run, differences_of, run, settings

ONE_PROCESS = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
LOGGED = {"loss", "grad_norm", "train_loss"}  # others are means over batches of other lengths


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, str]]:
    """Two answers of 3 to 40 words to each of four prompts, twelve times."""
    generator = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(f"w{n}" for n in generator.integers(0, 250, length))

    prompts = [text(48) for _ in range(4)] * 12
    answers = [{key: text(generator.integers(3, 41)) for key in ("chosen", "rejected")} for _ in prompts]
    return [{"prompt": f"{prompt} ", **each} for prompt, each in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("name", cases(["Trainer", "DPO"], ["Trainer"]))
def test_a_step_that_is_dealt_is_that_of_one_process(name, model, tokenizer, pairs, tmp_path):
    """Batches of 4 rows, two accumulated, on two ranks; beside them the same steps as they are drawn."""
    import transformers
    import trl
    from accelerate.state import AcceleratorState
    from datasets import Dataset

    rows = [dict(tokenizer(pair["prompt"] + pair["chosen"])) for pair in pairs]
    parent = trl.DPOTrainer if name == "DPO" else transformers.Trainer
    column = "prompt_ids" if name == "DPO" else "input_ids"

    def trained(num_batches: int, **others: Any) -> tuple[Run, int]:
        class Grouped(parent):  # type: ignore[misc, valid-type]
            def _get_train_sampler(self, train_dataset: Any = None) -> PrefixGroupedSampler:
                size = self.args.train_batch_size
                return PrefixGroupedSampler(self.train_dataset, size, 1, 5, column=column, num_batches=num_batches)

        kept: list[Any] = []

        def build(share: Any) -> Any:
            kept.append(share(model()))
            if name == "DPO":
                given = {"args": trl.DPOConfig(**settings(tmp_path, **others)), "ref_model": share(model(1))}
                return Grouped(kept[0], train_dataset=Dataset.from_list(pairs), processing_class=tokenizer, **given)
            arguments = transformers.TrainingArguments(**settings(tmp_path, **others))
            collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
            return Grouped(kept[0], arguments, train_dataset=rows, data_collator=collator)

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
