"""A tiny Qwen3.5 with a fork at nearly every branch, in trainers: what they log."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, share_prefixes
from radixtrain.hf.recurrent import tree_runs
from radixtrain.tree.runs import RunLayout
from tests.support import FULL
from tests.support.trainers import Run, Share, compare, differences_of, run, settings

pytestmark = [FULL, pytest.mark.usefixtures("free_forks")]

TARGETS = ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]
COLLATOR = RadixCollator()

Row = dict[str, list[int]]


@pytest.fixture
def hybrid(tokenizer, tiny_hybrid) -> Callable[..., Any]:
    """`hybrid(seed)`: a layer with a state that lasts for the whole row, and one that attends."""

    def build(seed: int = 0) -> Any:
        model = tiny_hybrid("Qwen3.5", seed, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.fill_(-4.0)  # a state that forgets soon would hide a wrong fork
        return model

    return build


@pytest.fixture
def rows(preferences, tokenizer) -> list[Row]:
    """Two answers to each prompt, one after the other, loss on the answers."""
    return [row for pair in preferences for row in _rows_of(pair, tokenizer)]


def _rows_of(pair: dict[str, str], tokenizer: Any) -> Iterator[Row]:
    prompt = tokenizer(pair["prompt"])["input_ids"]
    for answer in (tokenizer(pair[name])["input_ids"] for name in ("chosen", "rejected")):
        yield {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def runs_of(batch: dict[str, Any]) -> RunLayout:
    return tree_runs(batch["radix"].layout, forks=True)


def test_every_batch_has_nested_forks(rows):
    for start in range(0, len(rows), 4):
        batch = COLLATOR(rows[start : start + 4])
        assert runs_of(batch).num_forks == 3, "the system prompt, and each of two prompts"
        assert any(sources for *_, sources in runs_of(batch).calls)


class TestTrainers:
    """Untouched with its own collator, against the prepared model with ours."""

    def compare(self, build: Callable[[Any, Any], Any], hybrid: Callable[..., Any], stock: Any) -> None:
        def trained(prepare: Share, collator: Any) -> Run:
            found = run(lambda share: build(share(hybrid()), collator), prepare)
            for entry in found.entries:
                entry.pop("num_tokens", None)  # TRL counts unique tokens, which the model sees
            return found

        differences_of(trained(lambda model: model, stock), trained(share_prefixes, COLLATOR))

    @pytest.mark.parametrize("others", [{}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}])
    def test_hugging_face(self, hybrid, rows, tokenizer, tmp_path, others):
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

        def build(model: Any, collator: Any) -> Trainer:
            return Trainer(model, TrainingArguments(**settings(tmp_path, **others)), collator, train_dataset=rows)

        self.compare(build, hybrid, DataCollatorForSeq2Seq(tokenizer))

    @pytest.mark.parametrize("adapters", [False, True])
    def test_trl(self, hybrid, rows, trl_trainer, lora, adapters):
        from datasets import Dataset

        def build(model: Any, collator: Any) -> Any:
            torch.manual_seed(0)  # of the adapters
            given = {"data_collator": collator, "peft_config": lora(target_modules=TARGETS) if adapters else None}
            return trl_trainer("SFT", model, rows=Dataset.from_list(rows), given=given, max_length=None)

        self.compare(build, hybrid, None)

    def test_dpo(self, hybrid, preferences, trl_trainer, table):
        build = lambda share: trl_trainer("DPO", share(hybrid(0)), share(hybrid(1)), rows=preferences)  # noqa: E731
        table("DPOTrainer, Qwen3.5", compare(build))
