"""TRL's SFTTrainer with its own collators, and its trainers on pairs of answers: DPO, KTO, reward models, ORPO, CPO,
TPO. A system prompt is shared, and the pair's own.

A reference has other weights than the policy unless TRL makes it: of two equal models every reward is 0, and
`rewards/accuracies` would compare nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support import FULL, cases
from tests.support.trainers import Share, compare, mean_log_probability

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
ADAPTED = {"learning_rate": 1e-3}
# ORPO's and CPO's means of the logits are over padding too, where shared runs have zeros.
OVER_PADDING = ("logits/chosen", "logits/rejected", "eval_logits/chosen", "eval_logits/rejected")


@dataclass(frozen=True)
class Case:
    """A trainer and what it gets.

    models: fixtures, each with its own seed. settings: of the trainer. given: arguments of the trainer itself.
    adapters: changes of LoRA for the first model; None without. by_trl: whether TRL wraps it.
    logged: metrics that have to be compared. calls: of each model's backbone. r: at least so much is shared.
    """

    trainer: str
    models: tuple[str, ...] = ("model",)
    rows: str = "preferences"
    settings: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] | None = None
    by_trl: bool = False
    evaluate: bool = False
    logged: tuple[str, ...] = ()
    calls: tuple[int, ...] = ()
    r: float = 1.5


TWO = ("model", "model")


def sft(**options: Any) -> Case:
    return Case("SFT", **{"rows": "prompts", **options})


def dpo(**settings: Any) -> Case:
    return Case("DPO", TWO, settings=settings, r=3.5)


CASES: dict[str, Case] = {
    "SFT": sft(evaluate=True, logged=("entropy", "mean_token_accuracy", "eval_loss"), r=2.2),
    "SFT, chats": sft(rows="chats", r=2.2),
    "SFT, what the assistant says": sft(rows="chats", settings={"assistant_only_loss": True}, r=2.2),
    "SFT, padding_free": sft(settings={"padding_free": True, "max_length": None}),  # a sequence begins at position 0
    "SFT, packing": sft(settings={"packing": True, "max_length": 256}),
    "SFT, label smoothing": sft(settings={"label_smoothing_factor": 0.1}),  # of whole logits
    "SFT, dft": sft(settings={"loss_type": "dft"}),
    "SFT, mixture of experts": sft(models=("mixture",), logged=("aux_loss",)),
    "SFT, recurrent": sft(models=("hybrid",)),
    "SFT, recurrent, LoRA": sft(
        models=("hybrid",), adapters={"target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]}
    ),
    "SFT, LoRA": sft(adapters={}),
    "SFT, LoRA, reentrant": sft(adapters={}, settings=REENTRANT),  # TRL sees to a gradient at the embeddings
    "SFT, LoRA by TRL": sft(adapters={}, by_trl=True, settings=CHECKPOINTING),
    # PEFT puts its copy in the place of the module, and copies the hooks that are on it.
    "SFT, copies of head and embeddings": sft(
        models=("untied",), adapters={"modules_to_save": ["lm_head", "embed_tokens"]}
    ),
    "SFT, compute_metrics": sft(
        given={"compute_metrics": mean_log_probability}, settings={"max_steps": 1}, evaluate=True, logged=("eval_logp",)
    ),
    "DPO": Case("DPO", TWO, evaluate=True, logged=("eval_loss", "eval_rewards/margins"), calls=(8, 8), r=3.5),
    # The reference pass is the same model with its adapters disabled.
    "DPO, LoRA": Case("DPO", adapters={}, settings=ADAPTED, calls=(12,)),
    "DPO, LoRA by TRL": Case("DPO", adapters={}, by_trl=True, settings=ADAPTED, calls=(12,)),
    "DPO, several losses": dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "DPO, ipo": dpo(loss_type="ipo", label_smoothing=0.1),
    "DPO, weights": dpo(use_weighting=True, ld_alpha=0.5, f_divergence_type="js_divergence"),
    "DPO, synchronised reference": dpo(sync_ref_model=True, ref_model_sync_steps=1),
    "DPO, checkpointing": dpo(**CHECKPOINTING),
    "DPO, reentrant": dpo(**REENTRANT),
    "DPO, no system prompt": Case("DPO", TWO, "short", r=1.2),
    "DPO, recurrent": Case("DPO", ("hybrid", "hybrid")),
    "DPO, mixture of experts": Case("DPO", ("mixture", "mixture"), logged=("aux_loss",)),
    # Answers, and answers of other prompts, which estimate the KL term.
    "KTO": Case("KTO", TWO, "answers", evaluate=True, logged=("kl",), calls=(16, 16), r=2.5),
    "KTO, without the KL term": Case("KTO", TWO, "answers", {"loss_type": "apo_zero_unpaired"}, calls=(6, 6)),
    "KTO, LoRA": Case("KTO", rows="answers", adapters={}, settings=ADAPTED, calls=(24,)),
    "Reward": Case("Reward", ("scorer",), evaluate=True, r=3.5),
    "Reward, centred": Case("Reward", ("scorer",), settings={"center_rewards_coefficient": 0.01}, r=3.5),
    "Reward, LoRA and score head": Case(
        "Reward", ("scorer",), adapters={"task_type": "SEQ_CLS", "modules_to_save": ["score"]}, settings=ADAPTED
    ),
    **{name: Case(name, r=3.5) for name in ("ORPO", "CPO")},
    "TPO": Case("TPO", rows="with gold", r=3.5),
}


@pytest.fixture
def row_sets(preferences, prompts) -> dict[str, Any]:
    """By name: what the cases train on."""
    from datasets import Dataset

    answers = [
        {"prompt": row["prompt"], "completion": row[answer], "label": answer == "chosen"}
        for row in preferences
        for answer in ("chosen", "rejected")
    ]
    return {
        "preferences": preferences,
        "prompts": prompts,
        "chats": Dataset.from_list([{"messages": messages_of(row)} for row in preferences]),
        "answers": Dataset.from_list(answers),
        "short": preferences.map(lambda row: {"prompt": row["prompt"].split("<user>")[1]}),
        "with gold": preferences.map(lambda row: {"reference": row["chosen"] + " w1"}),
    }


def messages_of(row: dict[str, str]) -> list[dict[str, str]]:
    system, question = row["prompt"].removeprefix("<system> ").removesuffix(" <assistant> ").split(" <user> ")
    said = {"system": system, "user": question, "assistant": row["chosen"]}
    return [{"role": role, "content": content} for role, content in said.items()]


@pytest.mark.parametrize("name", cases(CASES, ["SFT", "DPO"]))
@pytest.mark.usefixtures("free_forks")
def test_every_step_is_that_of_an_untouched_run(
    name, model, scorer, mixture, hybrid, lora, row_sets, trl_trainer, table, caplog
):
    from peft import get_peft_model

    case, rows = CASES[name], row_sets[CASES[name].rows]
    makers: dict[str, Callable[[int], Any]] = {"model": model, "scorer": scorer, "mixture": mixture, "hybrid": hybrid}
    makers["untied"] = lambda seed: model(seed, tie_word_embeddings=False)

    def build(share: Share) -> Any:
        models = [makers[each](seed) for seed, each in enumerate(case.models)]
        given = dict(case.given)
        if case.adapters is not None and case.by_trl:
            given["peft_config"] = lora(**case.adapters)
        elif case.adapters is not None:
            models[0] = get_peft_model(models[0], lora(**case.adapters))
        return trl_trainer(case.trainer, *map(share, models), rows=rows, given=given, **case.settings)

    skipped = OVER_PADDING if case.trainer in ("ORPO", "CPO") else ()
    found = compare(build, evaluate=case.evaluate, skipped=skipped)
    assert found.r > case.r and {*case.logged} <= found.worst.keys()
    assert "from its first token on" not in caplog.text, "recurrent layers fork"
    assert not case.calls or tuple(each.calls for each in found.counts) == case.calls
    assert "kl" not in case.logged or any(entry.get("kl", 0) > 0 for entry in found.shared.entries), "clamped to 0"
    table(f"{case.trainer}Trainer, {name}", found)


@FULL
def test_precomputed_reference_log_probabilities(model, trl_trainer, preferences, table):
    """The reference runs when the trainer is made, so it is shared before. TRL keeps what it found in a file that is
    named after the rows: a column that differs makes the second run compute its own.
    """
    runs = iter(range(2))

    def build(share: Share) -> Any:
        rows = preferences.add_column("run", [next(runs)] * len(preferences))
        return trl_trainer("DPO", share(model(0)), share(model(1)), rows=rows, precompute_ref_log_probs=True)

    found = compare(build)
    assert [each.calls for each in found.counts] == [6, 4 + 2], "the reference ran once over 16 and 6 pairs"
    table("DPOTrainer, precomputed reference", found)
