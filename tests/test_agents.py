"""AGENTS.md: its blocks run one after the other, and its messages are those that its mistakes get."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from trainer_harness import settings
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from radixtrain import RadixCollator, prepare_model, share_prefixes, sharing_report
from radixtrain.collators.misuse_guard import end_watch

PAGE = (Path(__file__).resolve().parents[1] / "AGENTS.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ERRORS, REPORTED = (
    re.findall(r"^\| `([^`]+)` \|", part, re.M) for part in PAGE.partition("## 5.")[2].split("These are no")
)
ROWS = [{"input_ids": [3, 1, 4, 1, 5, 9, number], "labels": [-100] * 6 + [number]} for number in range(10, 34)]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(ROWS)


def train(tmp_path: Path, model: Any, rows: Any = ROWS, **options: Any) -> Trainer:
    args = TrainingArguments(**settings(tmp_path, max_steps=1))
    return Trainer(model=model, args=args, train_dataset=rows, data_collator=RadixCollator(), **options)


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM"))


# In the order of the page: what a message is for.
MISTAKES: list[Callable[[Callable[[], Any], Path], Any]] = [
    lambda model, folder: train(folder, model()).train(),
    lambda model, folder: RadixCollator()([{"input_ids": [1, 2, 3]}]),
    lambda model, folder: RadixCollator()([{"input_ids": [1, 2], "labels": [1, 2], "token_type_ids": [0, 0]}]),
    lambda model, folder: RadixCollator()([{"input_ids": [1, 2], "labels": [1, 2], "pixel_values": [[[0.5]]]}]),
    lambda model, folder: prepare_model(AutoModelForSequenceClassification.from_config(model().config)),
    lambda model, folder: share_prefixes(adapted(model())),
    lambda model, folder: sharing_report(model()),
    lambda model, folder: train(
        folder, prepare_model(model()), eval_dataset=ROWS, compute_metrics=lambda found: {}
    ).evaluate(),
    lambda model, folder: train(
        folder, prepare_model(model()), compute_loss_func=lambda output, labels, **_: output.logits.square().mean()
    ).train(),
    lambda model, folder: train(folder, prepare_model(model()), Stream()).train(),
]


def test_the_blocks_run_and_check_what_they_trained(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: load(shop / "model"))
    prompt = "Where is the hammer, please? " * 8
    pairs = [{"prompt": prompt, "chosen": f"Shelf {number}.", "rejected": f"Door {number}."} for number in range(24)]
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "DPOTrainer": lambda *given, **options: DPOTrainer(*given, processing_class=tokenizer, **options),
        "Trainer": Trainer,
        "args": DPOConfig(**settings(tmp_path / "dpo")),
        "sft_args": TrainingArguments(**settings(tmp_path / "sft")),
        "pairs": Dataset.from_list(pairs),
        "rows": ROWS,
    }
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        exec(compile(block, "AGENTS.md", "exec"), names)
    printed = capsys.readouterr().out
    assert " calls shared: " in printed and "equal" in printed
    assert names["report"].compression_ratio > 2 and names["sft_trainer"].state.global_step == 3


@pytest.mark.parametrize(("message", "mistake"), zip(ERRORS, MISTAKES, strict=True), ids=ERRORS)
def test_a_mistake_gets_its_message(
    message: str, mistake: Callable[..., Any], tiny_qwen3: Callable[..., Any], tmp_path: Path
) -> None:
    end_watch()  # as in a new process
    with pytest.raises(ValueError, match=re.escape(message)):
        mistake(tiny_qwen3, tmp_path)


def test_a_report_says_why_nothing_is_shared(tiny_qwen3: Callable[..., Any]) -> None:
    model = share_prefixes(tiny_qwen3())
    said = str(sharing_report(model))
    model(torch.tensor([[1, 2, 3]]), use_cache=False)
    model(torch.tensor([[1, 2, 3], [1, 2, 4]]), use_cache=True)
    said += str(sharing_report(model))
    prepared = prepare_model(tiny_qwen3())
    prepared(torch.tensor([[1, 2, 3]]))
    said += str(sharing_report(prepared))
    assert len(REPORTED) == 4 and all(reason in said for reason in REPORTED)
