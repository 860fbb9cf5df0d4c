"""TRL's SFTTrainer with its own collators: rows with a prompt, chats, packed rows, batches without padding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tiers import FULL
from trainer_harness import Share, compare, mean_log_probability

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.fixture
def sft(trl_trainer, prompts) -> Callable[..., Any]:
    """`sft(model, **settings)`: a trainer on prompts and completions, or on other `rows`."""
    return partial(trl_trainer, "SFT", rows=prompts)


@pytest.fixture
def chats(preferences) -> Any:
    """`messages`: system, user, assistant."""
    from datasets import Dataset

    return Dataset.from_list([{"messages": messages_of(row)} for row in preferences])


def messages_of(row: dict[str, str]) -> list[dict[str, str]]:
    system, question = row["prompt"].removeprefix("<system> ").removesuffix(" <assistant> ").split(" <user> ")
    said = {"system": system, "user": question, "assistant": row["chosen"]}
    return [{"role": role, "content": content} for role, content in said.items()]


def test_prompt_and_completion(model, sft, table):
    found = compare(lambda share: sft(share(model())), evaluate=True)
    assert found.r > 2.2
    assert {"entropy", "mean_token_accuracy", "eval_loss"} <= found.worst.keys()
    table("SFTTrainer, prompt and completion", found)


@FULL
@pytest.mark.parametrize("others", [{"assistant_only_loss": True}, {}])
def test_chats(model, sft, chats, table, others):
    found = compare(lambda share: sft(share(model()), rows=chats, **others))
    assert found.r > 2.2
    table(f"SFTTrainer, chats, {next(iter(others), 'every token')}", found)


SETTINGS = {
    "padding_free": {"padding_free": True, "max_length": None},  # TRL marks the start of a sequence by position 0
    "packing": {"packing": True, "max_length": 256},
    "label smoothing": {"label_smoothing_factor": 0.1},  # of whole logits, whose rows at padding have no label
    "dft": {"loss_type": "dft"},
}


@FULL
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(model, sft, table, name):
    found = compare(lambda share: sft(share(model()), **SETTINGS[name]))
    assert found.r > 1.5
    table(f"SFTTrainer, {name}", found)


@FULL
def test_mixture_of_experts(mixture, sft, table):
    found = compare(lambda share: sft(share(mixture())))
    assert "aux_loss" in found.worst
    table("SFTTrainer, mixture of experts", found)


@FULL
@pytest.mark.parametrize(("wrapped_by", "others"), [("user", {}), ("user", REENTRANT), ("trl", CHECKPOINTING)])
def test_adapters(model, sft, lora, table, wrapped_by, others):
    """With frozen weights, reentrant checkpointing needs a gradient at the embeddings; TRL sees to it."""
    from peft import get_peft_model

    def build(share: Share) -> Any:
        if wrapped_by == "trl":
            return sft(share(model()), given={"peft_config": lora()}, **others)
        return sft(share(get_peft_model(model(), lora())), **others)

    table(f"SFTTrainer, LoRA by {wrapped_by}, {others.get('gradient_checkpointing_kwargs', '')}", compare(build))


@FULL
def test_adapters_with_trained_copies_of_head_and_embeddings(model, sft, lora, table):
    """PEFT puts its copy in the place of the module, and copies the hooks that are on it."""
    from peft import get_peft_model

    adapters = lora(modules_to_save=["lm_head", "embed_tokens"])
    found = compare(lambda share: sft(share(get_peft_model(model(tie_word_embeddings=False), adapters))))
    table("SFTTrainer, LoRA, modules_to_save", found)


@FULL
def test_metrics_on_whole_logits(model, sft, table):
    """`compute_metrics` gets `[B, L, V]`."""
    given = {"compute_metrics": mean_log_probability}
    found = compare(lambda share: sft(share(model()), given=given, max_steps=1), evaluate=True)
    assert "eval_logp" in found.worst
    table("SFTTrainer, compute_metrics", found)
