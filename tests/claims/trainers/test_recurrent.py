"""A tiny Qwen3.5 with a fork at nearly every branch, in trainers: what they log, and the batch's way through them.

The forks are in the batch: tensors, and nested tuples of ints that nothing on the way may change.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from preference_bars import BETA, differences
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from trainer_harness import BAR, Run, Share, compare, differences_of, run, settings
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from radixtrain import RadixCollator, prepare_model
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.testing import FREE_FORKS
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.run_layout import RunLayout

LORA = LoraConfig(r=4, target_modules=["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"], task_type="CAUSAL_LM")
SGD = {"optim": "sgd", "learning_rate": 1e-2}  # in three steps of AdamW two ordinary runs differ by 1.6e-5
COLLATOR = RadixCollator(run_cost=FREE_FORKS)
META = torch.device("meta")

Row = dict[str, list[int]]


@pytest.fixture
def hybrid(tokenizer) -> Callable[..., PreTrainedModel]:
    """`hybrid(seed)`: three layers with a state that lasts for the whole row, and one that attends."""

    def build(seed: int = 0) -> PreTrainedModel:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = Qwen3_5TextConfig(vocab_size=len(tokenizer), **sizes, **heads, **linear, **widths, **ids)
        model = Qwen3_5ForCausalLM(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                shift = -4.0 if name.endswith("A_log") else 0.0  # a state that forgets soon would hide a wrong fork
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
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

    def compare(self, build: Callable[..., Trainer], hybrid: Callable[..., PreTrainedModel], stock: Any) -> None:
        def trained(model: Any, collator: Any) -> Run:
            found = run(lambda _: build(model, collator), lambda same: same, evaluate=False)
            for entry in found.entries:
                entry.pop("num_tokens", None)  # TRL counts unique tokens, which the model sees
            return found

        differences_of(trained(hybrid(), stock), trained(prepare_model(hybrid()), COLLATOR), {})

    @pytest.mark.parametrize("others", [{}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}])
    def test_hugging_face(self, hybrid, rows, tokenizer, tmp_path, others):
        def build(model: Any, collator: Any) -> Trainer:
            arguments = TrainingArguments(**settings(tmp_path, **SGD, **others))
            return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)

        self.compare(build, hybrid, DataCollatorForSeq2Seq(tokenizer))

    @pytest.mark.parametrize("lora", [None, LORA])
    def test_trl(self, hybrid, preferences, tokenizer, tmp_path, lora):
        data = Dataset.from_list([row for pair in preferences for row in _rows_of(pair, tokenizer)])

        def build(model: Any, collator: Any) -> Trainer:
            torch.manual_seed(0)  # of the adapters
            arguments = SFTConfig(**settings(tmp_path, **SGD, max_length=None))
            return SFTTrainer(model, arguments, collator, data, processing_class=tokenizer, peft_config=lora)

        self.compare(build, hybrid, None)

    def test_dpo(self, hybrid, preferences, tokenizer, tmp_path, table, monkeypatch):
        """With `share_prefixes`, which makes the runs itself."""
        monkeypatch.setattr(PaddedSharing, "_run_cost", lambda *_: FREE_FORKS)

        def build(share: Share) -> DPOTrainer:
            arguments = DPOConfig(**settings(tmp_path, **SGD, beta=BETA))
            models = share(hybrid(0)), share(hybrid(1))
            return DPOTrainer(*models, arguments, train_dataset=preferences, processing_class=tokenizer)

        table("DPOTrainer, Qwen3.5", compare(build, differences=differences()))


class TestLoops:
    def test_accelerate(self, hybrid, rows, tokenizer):
        from accelerate import Accelerator

        def losses(model: nn.Module, collator: Any) -> list[float]:
            accelerator = Accelerator(cpu=True)
            loader = DataLoader(rows, 4, collate_fn=collator)
            model, loader = accelerator.prepare(model.train(), loader)
            return [float(model(**batch).loss) for batch, _ in zip(loader, range(3), strict=False)]

        self.assert_equal(losses, hybrid, tokenizer)

    def test_lightning(self, hybrid, rows, tokenizer, tmp_path):
        import lightning as L

        class Module(L.LightningModule):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model, self.losses = model.train(), []

            def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
                loss = self.model(**batch).loss
                self.losses.append(float(loss))
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def losses(model: nn.Module, collator: Any) -> list[float]:
            quiet = dict.fromkeys(
                ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
            )
            module = Module(model)
            trainer = L.Trainer(max_steps=3, accelerator="cpu", default_root_dir=tmp_path, **quiet)
            trainer.fit(module, DataLoader(rows, 4, collate_fn=collator))
            return module.losses

        self.assert_equal(losses, hybrid, tokenizer)

    def assert_equal(self, losses: Callable[..., list[float]], hybrid: Any, tokenizer: Any) -> None:
        plain = losses(hybrid(), DataCollatorForSeq2Seq(tokenizer))
        radix = losses(prepare_model(hybrid()), COLLATOR)
        assert len(plain) == 3
        np.testing.assert_allclose(radix, plain, rtol=BAR)


class TestTheBatchesWay:
    """A layout reads the same forks from a batch that was pinned or moved as from one that was not."""

    def assert_same_forks(self, moved: dict[str, Any], batch: dict[str, Any]) -> None:
        found, expected = (TreeLayout.from_batch(each).runs for each in (moved, batch))
        assert found is not None and expected is not None
        assert found.calls == expected.calls and num_forks(batch) == 3

    def test_pinned(self, rows, monkeypatch):
        seen: set[int] = set()
        monkeypatch.setattr(Tensor, "pin_memory", lambda x, *_: seen.add(x.data_ptr()) or x)
        batch = COLLATOR(rows[:4])
        self.assert_same_forks(pin_memory(batch), batch)
        assert {batch[f"radix_runs_{name}"].data_ptr() for name in ("rows", "places", "parents")} <= seen

    @pytest.mark.parametrize("mover", ["accelerate", "lightning", "trainer"])
    def test_moved(self, rows, mover, hybrid, tmp_path):
        batch = COLLATOR(rows[:4])
        moved = self.movers(hybrid, tmp_path)[mover](batch)
        self.assert_same_forks(moved, batch)
        assert all(x.device == META for x in tree_leaves(moved) if isinstance(x, Tensor))

    def movers(self, hybrid: Any, folder: Any) -> dict[str, Callable[[Any], Any]]:
        from accelerate.utils.operations import send_to_device
        from lightning.fabric.utilities.apply_func import move_data_to_device

        def trainer(batch: Any) -> Any:
            arguments = TrainingArguments(**settings(folder))
            arguments.__dict__["_setup_devices"] = META
            return Trainer(hybrid(), arguments)._prepare_input(batch)

        return {
            "accelerate": lambda batch: send_to_device(batch, META),
            "lightning": lambda batch: move_data_to_device(batch, META),
            "trainer": trainer,
        }
