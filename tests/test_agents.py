"""AGENTS.md: its edits work on TRL's own quick starts, and its messages are those that its mistakes get."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.collators.misuse_guard import end_watch
from radixtrain.hf.sharing_report import _warn, warn_of_rounding
from tests.pages import blocks_in, read
from tests.support import cases
from tests.support.trainers import settings

PAGE = read("AGENTS.md")
SHARE, REPORT, VERIFY = blocks_in(PAGE)
[COLLATE] = blocks_in(PAGE, "diff")
TRL = metadata("trl")
QUICK_STARTS = blocks_in(str(TRL.get_payload() or TRL["Description"]))
ERRORS, REPORTED = (
    re.findall(r"^\| `([^`]+)` \|", part, re.M) for part in PAGE.partition("## 5.")[2].split("These are no")
)
ROWS = [{"input_ids": [3, 1, 4, 1, 5, 9, number], "labels": [-100] * 6 + [number]} for number in range(10, 34)]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(ROWS)


def train(
    tmp_path: Path, model: Any, rows: Any = ROWS, neftune_noise_alpha: float | None = None, **options: Any
) -> Trainer:
    args = TrainingArguments(**settings(tmp_path, max_steps=1), neftune_noise_alpha=neftune_noise_alpha)
    return Trainer(model=model, args=args, train_dataset=rows, data_collator=RadixCollator(), **options)


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM"))


Mistake = Callable[[Callable[[], Any], Path], Any]


def with_dropout_of_the_configuration() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32, attn_pdrop=0.0))


IDS = torch.tensor([[1, 2, 3], [1, 2, 4]])


# In the order of the page: what a message is for.
MISTAKES: list[Mistake | list[Mistake]] = [
    lambda model, folder: train(folder, model()).train(),
    lambda model, folder: RadixCollator()([{"input_ids": [1, 2, 3]}]),
    [
        lambda model, folder: RadixCollator()([{"input_ids": [1, 2], "labels": [1, 2], "token_type_ids": [0, 0]}]),
        lambda model, folder: RadixCollator()([{"input_ids": [1, 2], "labels": [1, 2], "pixel_values": [[[0.5]]]}]),
    ],
    lambda model, folder: train(
        folder, share_prefixes(AutoModelForSequenceClassification.from_config(model().config))
    ).train(),
    [
        lambda model, folder: train(folder, share_prefixes(adapted(model()))).train(),
        lambda model, folder: share_prefixes(with_dropout_of_the_configuration())(IDS, use_cache=False),
        lambda model, folder: train(folder, share_prefixes(model()), neftune_noise_alpha=5.0).train(),
    ],
    lambda model, folder: sharing_report(model()),
    lambda model, folder: train(
        folder, share_prefixes(model()), eval_dataset=ROWS, compute_metrics=lambda found: {}
    ).evaluate(),
    lambda model, folder: train(
        folder, share_prefixes(model()), compute_loss_func=lambda output, labels, **_: output.logits.square().mean()
    ).train(),
    lambda model, folder: train(folder, share_prefixes(model()), Stream()).train(),
]


PROMPT = [{"role": "user", "content": "Where is the hammer, please? " * 8}]
ANSWERS = [[{"role": "assistant", "content": f"Shelf {number}."}] for number in range(16)]
DATA: dict[str, list[dict[str, Any]]] = {
    "chats": [{"messages": PROMPT + answer} for answer in ANSWERS],
    "answers": [{"prompt": PROMPT, "completion": answer} for answer in ANSWERS],
    "prompts": [{"prompt": PROMPT}] * 16,
    "pairs": [{"prompt": PROMPT, "chosen": answer, "rejected": ANSWERS[0]} for answer in ANSWERS[1:]],
    "verdicts": [{"prompt": PROMPT, "completion": answer, "label": answer != ANSWERS[0]} for answer in ANSWERS],
}
STARTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # trainer, data, arguments besides those of a short run
    "SFT": ("SFT", "chats", {}),
    "SFT, RadixCollator": ("SFT", "answers", {}),
    "DPO": ("DPO", "pairs", {}),
    "GRPO": ("GRPO", "prompts", {"max_completion_length": 4}),
    "GRPO, with a reference": ("GRPO", "prompts", {"max_completion_length": 4, "beta": 0.1}),
    "KTO": ("KTO", "verdicts", {}),
    "Reward": ("Reward", "pairs", {}),
}
SHORT = {"use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 8, "report_to": "none", "save_strategy": "no"}
DTYPES = "sorted({str(weight.dtype) for weight in trainer.model.parameters()})"


def quick_start(trainer: str, model: Path, rows: Path, arguments: dict[str, Any]) -> str:
    """TRL's, with a local model and local rows in place of the hub's, and with what a machine without a GPU needs."""
    [program] = [each for each in QUICK_STARTS if f"{trainer}Trainer(" in each]
    program, count = re.subn(r'load_dataset\("[^"]+"', f'load_dataset("json", data_files="{rows}"', program)
    program, others = re.subn(
        r'    model="[^"]+"', f'    args=trl.{trainer}Config(**{arguments}),\n    model="{model}"', program
    )
    assert (count, others) == (1, 1)
    own = "def accuracy_reward(completions, **columns): return [float(len(each[0]['content'])) for each in completions]"
    return "import trl\n" + program.replace("from trl.rewards import accuracy_reward", own)  # needs another package


def edited(program: str, diff: str) -> str:
    """The program with the `+` lines of a diff, which skips some lines of the program by `...`."""
    lines, place = program.splitlines(), 0
    for line in diff.splitlines():
        if line.startswith("+"):
            lines.insert(place, line[1:])
            place += 1
        elif line.strip() != "...":
            place = lines.index(line[1:], place) + 1
    return "\n".join(lines)


@pytest.fixture(scope="module")
def bfloat16_model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is stored as most are."""
    folder = tmp_path_factory.mktemp("bfloat16")
    AutoModelForCausalLM.from_pretrained(shop / "model").bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(shop / "model").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", cases(STARTS, ["DPO", "SFT, RadixCollator"]))
def test_a_quick_start_of_trl_shares_after_the_edits(name: str, bfloat16_model: Path, tmp_path: Path) -> None:
    trainer, data, arguments = STARTS[name]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in DATA[data]), encoding="utf-8")
    program = quick_start(trainer, bfloat16_model, rows, SHORT | arguments | {"output_dir": str(tmp_path / "out")})
    after = edited(program, COLLATE) if "Collator" in name else program.replace("trainer.train()\n", SHARE)
    whole = f"""{program.replace("trainer.train()", "")}
dtypes = {DTYPES}
{after}
{REPORT}
print("DTYPES", dtypes, {DTYPES})
"""
    (tmp_path / "program.py").write_text(whole, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + indent(after, "> ")
    assert "DTYPES ['torch.float32'] ['torch.float32']" in done.stdout and " calls shared: " in done.stdout
    assert "the optimizer changes weights" not in done.stderr


def test_the_check_of_equality_runs(
    bfloat16_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import Dataset

    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: load(bfloat16_model))
    exec(compile(VERIFY, "AGENTS.md", "exec"), {"rows": Dataset.from_list(ROWS)})
    assert "equal" in capsys.readouterr().out


@pytest.mark.parametrize(("message", "mistake"), zip(ERRORS, MISTAKES, strict=True), ids=ERRORS)
def test_a_mistake_gets_its_message(
    message: str, mistake: Mistake | list[Mistake], tiny_qwen3: Callable[..., Any], tmp_path: Path
) -> None:
    end_watch()  # as in a new process
    for each in mistake if isinstance(mistake, list) else [mistake]:
        with pytest.raises(ValueError, match=re.escape(message)):
            each(tiny_qwen3, tmp_path)


def test_a_report_or_a_warning_says_why_nothing_is_shared_or_learned(
    tiny_qwen3: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = share_prefixes(tiny_qwen3())
    trainer = SimpleNamespace(model=model, ref_model=tiny_qwen3())
    said = str(sharing_report(trainer))
    share_prefixes(trainer.ref_model)
    assert not sharing_report(trainer).unshared_models
    model(torch.tensor([[1, 2, 3]]), use_cache=False)
    model(torch.tensor([[1, 2, 3], [1, 2, 4]]), use_cache=True)
    said += str(sharing_report(model))
    prepared = share_prefixes(tiny_qwen3())
    prepared(torch.tensor([[1, 2, 3]]))
    said += str(sharing_report(prepared))
    _warn.cache_clear()
    trained = tiny_qwen3().bfloat16()
    trained(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    with caplog.at_level(logging.WARNING, logger="radixtrain"):
        warn_of_rounding(torch.optim.SGD(trained.parameters()))
    said += caplog.text
    assert len(REPORTED) == 5 and all(reason in said for reason in REPORTED)
