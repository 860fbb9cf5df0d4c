"""What the trainers here share: a tokenizer of whole words, preferences after one system prompt, tiny models, and any
trainer of TRL by its name. Prints one table of what the comparisons found.
"""

import gc
import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import models
from tests.support.trainers import (
    DRAWN,
    NUM_ROWS,
    LabelledRow,
    Share,
    rollout_trainer,
    row_of,
    save_reference,
    settings,
    word_tokenizer,
)

SPECIAL = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
WORDS = [*SPECIAL, *(f"w{n}" for n in range(250))]
SIZES = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 512}
SYSTEM_WORDS, QUESTION_WORDS = 80, 12
PAIRS = 16
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {% generation %}{{ m.content }} <eos>"
    "{% endgeneration %} {% else %}<{{ m.role }}> {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL names the settings of transformers as they were before version 5, and every run would warn of it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> None:
    """A Trainer collects garbage twice at its start; going through all imported modules is a third of a test's time.

    `gc.freeze` in `tests/conftest.py` came before what these tests import.
    """
    import trl  # noqa: F401

    gc.freeze()


@pytest.fixture
def table(print_after) -> Callable[..., None]:
    """`table(name, comparison)`: a line of the table after the run: trainer, r, worst relative differences."""
    return lambda name, found: print_after("trainers under share_prefixes", found.line(name))


@pytest.fixture(scope="session")
def model(tiny_qwen3) -> Callable[..., Any]:
    """`model(seed)`: the tiny Qwen3 with the tokenizer's vocabulary."""
    return lambda seed=0, **changes: tiny_qwen3(seed, **SIZES, **changes)


@pytest.fixture(scope="session")
def scorer() -> Callable[..., Any]:
    """`scorer(seed, num_labels)`: a tiny Qwen3 with scores for a row instead of logits, by default one."""
    make = partial(models.tiny_model, "Qwen3ForSequenceClassification", **SIZES)
    return lambda seed=0, num_labels=1: make(seed, num_labels=num_labels)


@pytest.fixture(scope="session")
def mixture() -> Callable[..., Any]:
    """`mixture(seed)`: four experts in every layer, of which a token takes two. As a loop, which float64 needs."""
    own = {"router_aux_loss_coef": 0.01, "experts_implementation": "eager"}
    return lambda seed=0: models.tiny_model("Qwen3MoeForCausalLM", seed, **SIZES, **own)


@pytest.fixture(scope="session")
def hybrid() -> Callable[..., Any]:
    """`hybrid(seed)`: a tiny Qwen3.5, whose first layer has a state that lasts for the whole row."""

    def build(seed: int = 0) -> Any:
        model = models.tiny_hybrid("Qwen3.5", seed, **SIZES)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.fill_(-4.0)  # a state that forgets soon would hide a wrong fork
        return model

    return build


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Path:
    """The folder of the reference of trainers that generate (`rollouts`)."""
    return save_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token for each word between blanks, and a chat template that marks what the assistant says."""
    return word_tokenizer(WORDS, *SPECIAL[:3], chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def preferences() -> Any:
    """`prompt`, `chosen`, `rejected`: a system prompt that all share, a question, two answers of 5 to 10 words."""
    from datasets import Dataset

    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{n}" for n in rng.integers(0, 250, count))

    system = text(SYSTEM_WORDS)
    rows = [
        {
            "prompt": f"<system> {system} <user> {text(QUESTION_WORDS)} <assistant> ",
            "chosen": text(int(rng.integers(5, 11))),
            "rejected": text(int(rng.integers(5, 11))),
        }
        for _ in range(PAIRS)
    ]
    return Dataset.from_list(rows)


@pytest.fixture(scope="session")
def prompts(preferences) -> Any:
    """`prompt`, `completion`."""
    return preferences.rename_column("chosen", "completion").remove_columns("rejected")


@pytest.fixture(scope="session")
def lora() -> Callable[..., Any]:
    """`lora(**changes)`: adapters of a causal model."""
    from peft import LoraConfig

    own = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return lambda **changes: LoraConfig(**{**own, **changes})


@pytest.fixture
def trl_trainer(tokenizer, tmp_path) -> Callable[..., Any]:
    """`trl_trainer("DPO", *models, rows=preferences, given={}, **settings)`: TRL's trainer of that name.

    given: arguments of the trainer itself. It evaluates on the first 6 rows.
    """

    def build(name: str, *models: Any, rows: Any, given: dict[str, Any] | None = None, **others: Any) -> Any:
        arguments = {"train_dataset": rows, "eval_dataset": rows.select(range(6)), "processing_class": tokenizer}
        config, trainer = trl_classes(name)
        return trainer(*models, args=config(**settings(tmp_path, **others)), **arguments, **(given or {}))

    return build


def trl_classes(name: str) -> tuple[Any, Any]:
    """Configuration and trainer. Those that TRL does not vouch for yet are under `trl.experimental`."""
    module = importlib.import_module("trl")
    if not hasattr(module, f"{name}Trainer"):
        try:
            room = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
            module = importlib.import_module(f"trl.experimental.{room}")
        except ModuleNotFoundError:
            pytest.skip(f"this TRL has no trl.experimental.{room}; `pip install trl==1.16.0` has it")
    return getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")


@pytest.fixture(scope="session")
def rows() -> list[LabelledRow]:
    """Answers of 2 to 12 tokens to one prompt: micro-batches differ in their number of labels, and so do ranks."""
    rng = np.random.default_rng(0)
    return [row_of(rng.integers(50, 250, length).tolist()) for length in rng.integers(2, 13, NUM_ROWS)]


@pytest.fixture
def trainer(tokenizer, tmp_path) -> Callable[..., Any]:
    """`trainer(model, rows, collator, **settings)`: Hugging Face's, with its stock collator if none is given."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    def build(model: Any, rows: Any, collator: Any = None, compute_metrics: Any = None, **others: Any) -> Trainer:
        return Trainer(
            model,
            TrainingArguments(**settings(tmp_path, **others)),
            data_collator=collator or DataCollatorForSeq2Seq(tokenizer),
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=compute_metrics,
        )

    return build


@pytest.fixture
def built(model, scorer, trainer, trl_trainer, rows, prompts, preferences, lora, reference, tmp_path) -> Any:
    """`built(name, share, collator=None, times=0, seed=0, **settings)`: a trainer by its name.

    times: so often it has 16 of its rows, which leave no micro-batch smaller than others; 0 for all of them, once.
    seed: of the weights that are trained.
    """
    from datasets import Dataset, concatenate_datasets

    answers = prompts.add_column("label", [True, False] * (len(prompts) // 2))
    labelled = Dataset.from_list(rows).select(range(16))
    data = {"DPO": preferences, "Reward": preferences, "KTO": answers, "SFT, labels": labelled}

    def build(name: str, share: Share, collator: Any = None, times: int = 0, seed: int = 0, **how: Any) -> Any:
        if name == "Trainer":
            own = how.pop("data", list)(how.pop("rows", rows))
            return trainer(share(model(seed)), own[:16] * times if times else own, collator, **how)
        if name in DRAWN:
            return rollout_trainer(name, share, reference, tmp_path, seed, **how)
        kind, _, extra = name.partition(", ")
        makers = [scorer] if kind == "Reward" else [model]
        models = [share(make(0 if extra == "LoRA" else seed)) for make in makers]
        models += [share(model(1))] if name in ("DPO", "KTO") else []  # of adapters the reference is the model without
        torch.manual_seed(seed)  # for adapters
        given = {"peft_config": lora()} if extra == "LoRA" else {}
        given |= {"data_collator": collator} if collator else {}
        own = concatenate_datasets([data.get(name, data.get(kind, prompts))] * max(1, times))
        return trl_trainer(kind, *models, rows=own, given=given, **how)

    return build
