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
import tiny_models
from rollouts import save_reference
from trainer_harness import settings

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
    make = partial(tiny_models.tiny_model, "Qwen3ForSequenceClassification", **SIZES)
    return lambda seed=0, num_labels=1: make(seed, num_labels=num_labels)


@pytest.fixture(scope="session")
def mixture() -> Callable[..., Any]:
    """`mixture(seed)`: four experts in every layer, of which a token takes two. As a loop, which float64 needs."""
    own = {"router_aux_loss_coef": 0.01, "experts_implementation": "eager"}
    return lambda seed=0: tiny_models.tiny_model("Qwen3MoeForCausalLM", seed, **SIZES, **own)


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Path:
    """The folder of the reference of trainers that generate (`rollouts`)."""
    return save_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token for each word between blanks, and a chat template that marks what the assistant says."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


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
