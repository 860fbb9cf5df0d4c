"""TRL's trainers of two models that read whole logits or hidden states: distillation, with a teacher or itself."""

import importlib
from functools import partial

import numpy as np
import pytest
from rollouts import COMMON, MAX_COMPLETION, VOCAB_SIZE, Reward, policy_of
from rollouts import tokenizer as numbers_tokenizer
from tiny_models import tiny_qwen3
from trainer_harness import compare, settings

TEMPLATE = "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}01 {% endif %}{% endfor %}"


def chat_tokenizer():
    t = numbers_tokenizer()
    t.padding_side = "left"
    t.chat_template = TEMPLATE
    return t


def rows(kind):
    from datasets import Dataset

    rng = np.random.default_rng(0)

    def text(n):
        return " ".join(f"{x:02}" for x in rng.integers(10, VOCAB_SIZE, n))

    common = " ".join(f"{x:02}" for x in COMMON)
    out = []
    for n in (2, 8, 5, 3, 6, 4, 7, 2):
        user = f"{common} {text(n)}"
        if kind == "messages":
            out.append({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": text(n + 2)}]})
        elif kind == "prompt":
            out.append({"prompt": user})
        elif kind == "chat":
            out.append({"prompt": [{"role": "user", "content": user}]})
        elif kind == "privileged":
            out.append({"prompt": [{"role": "user", "content": user}], "privileged_context": text(3)})
    return Dataset.from_list(out)


def cls(module, name):
    m = importlib.import_module(module)
    return getattr(m, name + "Config"), getattr(m, name + "Trainer")


def teacher(seed=3):
    m = tiny_qwen3(seed)
    m.config.use_cache = False
    m.config._name_or_path = FOLDER[0]
    return m


FOLDER = [""]


def student(folder, **kw):
    m = policy_of(folder, **kw)
    return m


def build_teacher(module, name, kind, tmp_path, reference, own, share, second="teacher_model"):
    config, trainer = cls(module, name)
    args = config(**settings(tmp_path, **own))
    FOLDER[0] = str(reference)
    s = share(student(reference))
    t = share(teacher())
    return trainer(s, t, args=args, train_dataset=rows(kind), processing_class=chat_tokenizer())


GKD = {"max_new_tokens": MAX_COMPLETION, "max_length": 64, "lmbda": 0.0}
CASES = {
    "distillation": ("trl", "Distillation", "prompt", {"max_completion_length": MAX_COMPLETION}),
    "distillation jsd": ("trl", "Distillation", "prompt", {"max_completion_length": MAX_COMPLETION, "beta": 0.5}),
    "gkd": ("trl.experimental.gkd", "GKD", "messages", GKD),
    "gkd on policy": ("trl.experimental.gkd", "GKD", "messages", {**GKD, "lmbda": 1.0}),
    "gkd seq": ("trl.experimental.gkd", "GKD", "messages", {**GKD, "beta": 0.0}),
    "gold": (
        "trl.experimental.gold",
        "GOLD",
        "messages",
        {"use_uld_loss": False, "max_completion_length": MAX_COMPLETION, "max_length": 64, "lmbda": 0.0},
    ),
    "iw_opd": (
        "trl.experimental.iw_opd",
        "IWOPD",
        "messages",
        {"max_completion_length": MAX_COMPLETION, "max_length": 64, "lmbda": 1.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_teacher(case, tmp_path, reference, table):
    module, name, kind, own = CASES[case]
    found = compare(partial(build_teacher, module, name, kind, tmp_path, reference, own))
    table(case, found)


SELF = {
    "sdft": (
        "trl.experimental.sdft",
        "SDFT",
        "privileged",
        {"distillation_topk": 7, "max_completion_length": MAX_COMPLETION, "max_prompt_length": 64},
    ),
    "sdft full": (
        "trl.experimental.sdft",
        "SDFT",
        "privileged",
        {"max_completion_length": MAX_COMPLETION, "max_prompt_length": 64, "distillation_mode": "full_logits"},
    ),
    "sdft sampled": (
        "trl.experimental.sdft",
        "SDFT",
        "privileged",
        {
            "max_completion_length": MAX_COMPLETION,
            "max_prompt_length": 64,
            "distillation_mode": "sampled_token",
            "distillation_alpha": 1.0,
        },
    ),
    "sdpo": (
        "trl.experimental.sdpo",
        "SDPO",
        "chat",
        {"max_completion_length": MAX_COMPLETION, "num_generations": 4, "success_reward_threshold": 0.3},
    ),
    "gmpo": (
        "trl.experimental.gmpo",
        "GMPO",
        "prompt",
        {"max_completion_length": MAX_COMPLETION, "num_generations": 4},
    ),
    "a2po": ("trl.experimental.a2po", "A2PO", "prompt", {"max_completion_length": MAX_COMPLETION}),
    "online_dpo": (
        "trl.experimental.online_dpo",
        "OnlineDPO",
        "prompt",
        {"max_new_tokens": MAX_COMPLETION, "max_length": 64},
    ),
}


@pytest.mark.parametrize("case", SELF)
def test_self(case, tmp_path, reference, table):
    module, name, kind, own = SELF[case]
    config, trainer = cls(module, name)

    def build(share):
        args = config(**settings(tmp_path, **own))
        s = share(student(reference))
        kw = {}
        if name in ("SDPO", "GMPO"):
            kw["reward_funcs"] = Reward()
        if name == "A2PO":
            kw["reward_funcs"] = lambda prompts, completions, **k: [float(len(c) % 5) / 5 for c in completions]
        if name == "OnlineDPO":
            kw["reward_funcs"] = lambda prompts, completions, completion_ids=None, **k: [
                float(len(c) % 5) for c in completions
            ]
        if name == "OnlineDPO":
            kw["ref_model"] = share(teacher())
        t = trainer(s, args=args, train_dataset=rows(kind), processing_class=chat_tokenizer(), **kw)
        for other in ("ref_model", "teacher_model"):
            m = getattr(t, other, None)
            if m is not None and m is not s and name != "OnlineDPO":
                print("has", other, type(m))
                share(m)
        return t

    found = compare(
        build, skipped={"objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"}
    )
    table(case, found)
