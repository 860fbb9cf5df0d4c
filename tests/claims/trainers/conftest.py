"""What the trainers here share: a tokenizer of whole words, preferences after one system prompt, a tiny model.

Lets the tests of this folder import its harness, and prints one table of what they found.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
WORDS = [*SPECIAL, *(f"w{n}" for n in range(250))]
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
    gc.freeze()


@pytest.fixture
def table(print_after) -> Callable[..., None]:
    """`table(name, comparison)`: a line of the table after the run: trainer, r, worst relative differences."""
    return lambda name, found: print_after("trainers under share_prefixes", found.line(name))


@pytest.fixture
def model(tiny_qwen3) -> Callable[..., PreTrainedModel]:
    """`model(seed)`: the tiny Qwen3, 64 wide, with the tokenizer's vocabulary."""
    return lambda seed=0, **changes: tiny_qwen3(
        seed, vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, pad_token_id=0, eos_token_id=1, **changes
    )


@pytest.fixture
def scorer(model) -> Callable[..., PreTrainedModel]:
    """`scorer(seed)`: the tiny Qwen3 with one score for a row instead of logits."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    def build(seed: int = 0) -> PreTrainedModel:
        source = model(seed)
        made = Qwen3ForSequenceClassification(Qwen3Config(**{**source.config.to_dict(), "num_labels": 1}))
        made.model.load_state_dict(source.model.state_dict())
        with torch.no_grad():
            made.score.weight.copy_(source.lm_head.weight[:1])
        return made

    return build


@pytest.fixture
def mixture(model) -> Callable[..., PreTrainedModel]:
    """`mixture(seed)`: a tiny Qwen3 with four experts in every layer, of which a token takes two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    def build(seed: int = 0) -> PreTrainedModel:
        sizes = {
            key: value for key, value in model().config.to_dict().items() if key not in ("architectures", "model_type")
        }
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "router_aux_loss_coef": 0.01,
        }
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        return made

    return build


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word between blanks, and a chat template that marks what the assistant says."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def preferences() -> Dataset:
    """`prompt`, `chosen`, `rejected`: a system prompt that all share, a question, two answers of 5 to 10 words."""
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
