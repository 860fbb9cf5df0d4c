"""A tiny Qwen3.5 with a fork at nearly every branch, in trainers: what they log, and the batch's way through them.

The forks are in the batch: tensors, and nested tuples of ints that nothing on the way may change.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import FULL
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.pin_memory import pin_memory
from trainer_harness import Run, Share, compare, differences_of, run, settings

from radixtrain import RadixCollator, prepare_model
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.testing import FREE_FORKS
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.runs import RunLayout

pytestmark = FULL

TARGETS = ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]
COLLATOR = RadixCollator(run_cost=FREE_FORKS)
META = torch.device("meta")

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


def num_forks(batch: dict[str, Any]) -> int:
    return RunLayout.from_batch(batch).num_forks


def test_every_batch_has_nested_forks(rows):
    for start in range(0, len(rows), 4):
        batch = COLLATOR(rows[start : start + 4])
        assert num_forks(batch) == 3, "the system prompt, and each of two prompts"
        assert any(sources for *_, sources in batch["radix_runs_calls"])


class TestTrainers:
    """Untouched with its own collator, against the prepared model with ours."""

    def compare(self, build: Callable[[Any, Any], Any], hybrid: Callable[..., Any], stock: Any) -> None:
        def trained(prepare: Share, collator: Any) -> Run:
            found = run(lambda share: build(share(hybrid()), collator), prepare)
            for entry in found.entries:
                entry.pop("num_tokens", None)  # TRL counts unique tokens, which the model sees
            return found

        differences_of(trained(lambda model: model, stock), trained(prepare_model, COLLATOR))

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

    def test_dpo(self, hybrid, preferences, trl_trainer, table, monkeypatch):
        """With `share_prefixes`, which makes the runs itself."""
        monkeypatch.setattr(PaddedSharing, "_run_cost", lambda *_: FREE_FORKS)
        build = lambda share: trl_trainer("DPO", share(hybrid(0)), share(hybrid(1)), rows=preferences)  # noqa: E731
        table("DPOTrainer, Qwen3.5", compare(build))


class TestTheBatchesWay:
    """A layout reads the same forks from a batch that was pinned or moved as from one that was not."""

    def assert_same_forks(self, moved: dict[str, Any], batch: dict[str, Any]) -> None:
        found, expected = (TreeLayout.from_batch(each).runs for each in (moved, batch))
        assert found is not None and expected is not None
        assert found.calls == expected.calls and num_forks(batch) == 3

    def test_pinned(self, rows, monkeypatch):
        """Without a GPU nothing is pinned, so `Tensor.pin_memory` only keeps which tensors it was asked for."""
        seen: set[int] = set()
        monkeypatch.setattr(Tensor, "pin_memory", lambda x, *_: seen.add(x.data_ptr()) or x)
        batch = COLLATOR(rows[:4])
        self.assert_same_forks(pin_memory(batch), batch)
        assert {batch[f"radix_runs_{name}"].data_ptr() for name in ("rows", "places", "parents")} <= seen

    @pytest.mark.parametrize("mover", ["accelerate", "lightning"])
    def test_moved(self, rows, mover):
        """By Hugging Face's Trainer it was in `TestTrainers`."""
        from accelerate.utils.operations import send_to_device
        from lightning.fabric.utilities.apply_func import move_data_to_device

        batch = COLLATOR(rows[:4])
        moved = {"accelerate": send_to_device, "lightning": move_data_to_device}[mover](batch, META)
        self.assert_same_forks(moved, batch)
        assert all(x.device == META for x in tree_leaves(moved) if isinstance(x, Tensor))
