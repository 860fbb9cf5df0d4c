"""TRL's SFTTrainer with its own collators: rows with a prompt, chats, packed rows, batches without padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trainer_harness import Share, compare, settings
from transformers import EvalPrediction
from trl import SFTConfig, SFTTrainer

from radixtrain import share_prefixes
from radixtrain.errors import UserError

TARGETS = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
LORA = LoraConfig(**TARGETS)


@pytest.fixture
def prompts(preferences) -> Dataset:
    """`prompt`, `completion`."""
    return preferences.rename_column("chosen", "completion").remove_columns("rejected")


@pytest.fixture
def chats(preferences) -> Dataset:
    """`messages`: system, user, assistant."""
    return Dataset.from_list([{"messages": messages_of(row)} for row in preferences])


def messages_of(row: dict[str, str]) -> list[dict[str, str]]:
    system, question = row["prompt"].removeprefix("<system> ").removesuffix(" <assistant> ").split(" <user> ")
    said = {"system": system, "user": question, "assistant": row["chosen"]}
    return [{"role": role, "content": content} for role, content in said.items()]


@pytest.fixture
def sft(tokenizer, tmp_path) -> Callable[..., SFTTrainer]:
    """`sft(model, rows, given, **settings)`: a trainer on the rows; `given` are arguments of the trainer itself."""

    def build(model: Any, rows: Dataset, given: dict[str, Any] | None = None, **others: Any) -> SFTTrainer:
        return SFTTrainer(
            model,
            args=SFTConfig(**settings(tmp_path, **others)),
            train_dataset=rows,
            eval_dataset=rows.select(range(6)),
            processing_class=tokenizer,
            **(given or {}),
        )

    return build


def test_prompt_and_completion(model, sft, prompts, table):
    found = compare(lambda share: sft(share(model()), prompts), evaluate=True)
    assert found.r > 2.2
    assert {"entropy", "mean_token_accuracy", "eval_loss"} <= found.worst.keys()
    table("SFTTrainer, prompt and completion", found)


@pytest.mark.parametrize("others", [{"assistant_only_loss": True}, {}])
def test_chats(model, sft, chats, table, others):
    found = compare(lambda share: sft(share(model()), chats, **others))
    assert found.r > 2.2
    table(f"SFTTrainer, chats, {next(iter(others), 'every token')}", found)


@pytest.mark.parametrize("others", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 256}])
def test_several_sequences_in_one_row(model, sft, prompts, table, others):
    """TRL marks where a sequence starts by its position 0; shared prefixes are found among them."""
    found = compare(lambda share: sft(share(model()), prompts, **others))
    assert found.r > 1.5
    table(f"SFTTrainer, {next(iter(others))}", found)


def test_mixture_of_experts(mixture, sft, prompts, table):
    found = compare(lambda share: sft(share(mixture()), prompts))
    assert "aux_loss" in found.worst
    table("SFTTrainer, mixture of experts", found)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_adapters(model, sft, prompts, table, loss_type):
    adapted = {"loss_type": loss_type, "learning_rate": 1e-3}
    found = compare(lambda share: sft(share(get_peft_model(model(), LORA)), prompts, **adapted))
    table(f"SFTTrainer, LoRA, {loss_type}", found)


def test_a_model_that_the_trainer_loads(model, sft, prompts, tmp_path, table):
    """Given by its path: `share_prefixes(trainer.model)` after construction."""
    model().save_pretrained(tmp_path / "start")

    def build(share: Share) -> SFTTrainer:
        trainer = sft(str(tmp_path / "start"), prompts)
        share(trainer.model)
        return trainer

    table("SFTTrainer, model by path", compare(build))


@pytest.mark.parametrize(("wrapped_by", "use_reentrant"), [("user", True), ("trl", True), ("trl", False)])
def test_checkpointing_with_adapters(model, sft, prompts, table, wrapped_by, use_reentrant):
    """With frozen weights, reentrant checkpointing needs a gradient at the embeddings; TRL sees to it."""
    others = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}

    def build(share: Share) -> SFTTrainer:
        if wrapped_by == "trl":
            return sft(share(model()), prompts, {"peft_config": LORA}, **others)
        return sft(share(get_peft_model(model(), LORA)), prompts, **others)

    found = compare(build)
    kind = "reentrant" if use_reentrant else "checkpointing"
    table(f"SFTTrainer, LoRA by {wrapped_by}, {kind}", found)


def test_adapters_with_trained_copies_of_head_and_embeddings(model, sft, prompts, table):
    """PEFT puts its copy in the place of the module, and copies the hooks that are on it."""
    adapters = LoraConfig(**TARGETS, modules_to_save=["lm_head", "embed_tokens"])
    found = compare(lambda share: sft(share(get_peft_model(model(tie_word_embeddings=False), adapters)), prompts))
    table("SFTTrainer, LoRA, modules_to_save", found)


def test_losses_on_whole_logits(model, sft, prompts, table):
    """Label smoothing asks the model for `[B, L, V]`, whose rows at padding have no label."""
    table(
        "SFTTrainer, label smoothing", compare(lambda share: sft(share(model()), prompts, label_smoothing_factor=0.1))
    )


def test_metrics_on_whole_logits(model, sft, prompts, table):
    """`compute_metrics` gets `[B, L, V]` too."""

    def metrics(seen: EvalPrediction) -> dict[str, float]:
        logits, labels = torch.tensor(seen.predictions)[:, :-1], torch.tensor(seen.label_ids)[:, 1:]
        logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return {"logp": float(logps[labels != -100].mean())}

    found = compare(lambda share: sft(share(model()), prompts, {"compute_metrics": metrics}), evaluate=True)
    assert "eval_logp" in found.worst
    table("SFTTrainer, compute_metrics", found)


def test_noise_on_embeddings_is_refused(model, sft, prompts):
    """NEFTune draws for every copy of a token."""
    trainer = sft(share_prefixes(model()), prompts, neftune_noise_alpha=5)
    with pytest.raises(UserError, match="NEFTune"):
        trainer.train()


def test_what_is_saved_is_an_ordinary_model(model, sft, prompts, tmp_path):
    trainer = sft(share_prefixes(model()), prompts)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert "radix" not in (tmp_path / "saved" / "config.json").read_text(encoding="utf-8")
    saved = type(model()).from_pretrained(tmp_path / "saved")
    assert saved.config._attn_implementation == "sdpa"
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), saved.parameters(), strict=True))
