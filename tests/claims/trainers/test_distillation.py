"""TRL's trainers that compare distributions over the vocabulary: of a student and its teacher, or of one model with and
without a hint; and two relatives of DPO and GRPO that TRL does not vouch for yet.

Most of them generate, and both runs draw the same completions (`rollouts`).
"""

from typing import Any

import pytest

from tests.support import cases
from tests.support.trainers import Share, compare

NEW = {"max_completion_length": 8}
GROUPS = {**NEW, "num_generations": 4}
GKD = {"max_new_tokens": 8, "max_length": 160}
SDFT = {**NEW, "max_prompt_length": 160}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "distillation": ("Distillation", NEW),
    "distillation, both directions": ("Distillation", {**NEW, "beta": 0.5}),
    "GKD, given answers": ("GKD", {**GKD, "lmbda": 0.0}),
    "GKD, own answers": ("GKD", {**GKD, "lmbda": 1.0, "beta": 0.0}),
    "SDFT": ("SDFT", SDFT),
    "SDFT, whole distributions": ("SDFT", {**SDFT, "distillation_mode": "full_logits"}),
    "SDFT, sampled tokens": ("SDFT", {**SDFT, "distillation_mode": "sampled_token", "distillation_alpha": 1.0}),
    "SDPO": ("SDPO", {**GROUPS, "success_reward_threshold": 0.5}),
    "GMPO": ("GMPO", GROUPS),
    "online DPO": ("OnlineDPO", GKD),
}
SECOND = {"Distillation": "teacher_model", "GKD": "teacher_model", "OnlineDPO": "ref_model"}
OF_PADDING = {f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward")}  # of online DPO


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Tell answers apart by their number of letters."""
    said = [each[0]["content"] if isinstance(each, list) else each for each in completions]
    return [float(len(each) % 3 == 0) for each in said]


@pytest.fixture(scope="module")
def chats(prompts) -> Any:
    """`messages`, `prompt` as a chat, and a hint, `privileged_context`."""

    def chat(row: dict[str, Any]) -> dict[str, Any]:
        prompt = [{"role": "user", "content": row["prompt"]}]
        answer = {"role": "assistant", "content": row["completion"]}
        return {"prompt": prompt, "messages": [*prompt, answer], "privileged_context": row["completion"]}

    return prompts.map(chat, remove_columns=["completion"])


@pytest.mark.parametrize("case", cases(CASES, ["distillation"]))
def test_every_step_is_that_of_an_untouched_run(case, model, chats, prompts, trl_trainer, tmp_path, table):
    name, own = CASES[case]
    model(1).save_pretrained(
        tmp_path / "start"
    )  # TRL loads the second model of SDFT and SDPO from the first one's folder

    def build(share: Share) -> Any:
        policy, given = share(model(0)), {}
        policy.config._name_or_path = str(tmp_path / "start")
        if name in SECOND:
            given[SECOND[name]] = second = share(model(1))
            second.config.use_cache = False  # it is called in eval() without saying so
        if name in ("SDPO", "GMPO", "OnlineDPO"):
            given["reward_funcs"] = reward
        rows = chats.remove_columns("prompt") if name == "GKD" else chats if name in ("SDFT", "SDPO") else prompts
        trainer = trl_trainer(name, policy, rows=rows, given=given, **own)
        if name in ("SDFT", "SDPO"):
            share(trainer.teacher_model)
        return trainer

    found = compare(build, skipped=OF_PADDING)
    table(f"{name}Trainer, {case}", found)
    assert found.r > 2
