"""Every kind of adapter of the installed PEFT has the gradient of each sequence by itself, or shares nothing.

A PEFT with a kind that is not known here fails `test_every_kind_has_a_case`: add its case. No kind is known to the
library, which tries the model with its adapters.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from radixtrain import RadixCollator, share_prefixes, sharing_report, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.guards.batch import check_not_shared
from radixtrain.verification.oracle import float64_throughout, radix_batch
from tests.support import FULL, cases
from tests.support.models import tiny_model
from tests.support.steps import same_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about layers that it does not know

ROWS = [[7, 8, 9, 1, 2], [7, 8, 9, 3], [7, 8, 4, 4, 5]]
FEATURES = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ROWS]
IDS = torch.tensor([row[:4] for row in ROWS])

PROJECTIONS = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
EMBEDDING = {"target_modules": ["embed_tokens"]}
BLOCKS = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj", "up_proj", "down_proj"], "nblocks": 2}
VIRTUAL = {"num_virtual_tokens": 3}
PROMPT_OF_TOKENS = {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2]}

# The kinds of which `make test` tries the first settings: one for each way in which adapters compute.
QUICK = ("ADAPTION_PROMPT", "BOFT", "IA3", "LN_TUNING", "LORA", "OFT", "TRAINABLE_TOKENS")
ONLY_A_RANK = ("DEFT", "DELORA", "GLORA", "HIRA", "HRA", "LOHA", "PSOFT", "RANDLORA", "SHIRA", "VERA")
# The settings that each exact kind is tried with. Target modules are PROJECTIONS unless they are given.
EXACT_CASES: dict[str, list[dict[str, Any]]] = {
    **{kind: [{"r": 4}] for kind in ONLY_A_RANK},
    "ADALORA": [{"total_step": 10, "orth_reg_weight": 0.0}],  # `ordinary_one_by_one` knows no regularizer
    "ADAMSS": [{"r": 4, "num_subspaces": 2, "use_asa": True}],
    "ADAPTION_PROMPT": [{"adapter_len": 3, "adapter_layers": 2}],
    "BEFT": [{}],
    "BOFT": [{"boft_block_size": 4}],
    "C3A": [{"block_size": 16}],
    "FOURIERFT": [{"n_frequency": 20}],
    "FROD": [{"progressbar": False}],
    "GRALORA": [{"r": 4, "alpha": 4, "hybrid_r": 2}],
    "IA3": [{"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}],
    "LN_TUNING": [{"target_modules": ["input_layernorm", "q_norm", "norm"]}],
    "LOKR": [{"r": 4, "decompose_both": True, "decompose_factor": 4}],
    "LORA": [
        {"r": 4, "use_rslora": True, "lora_bias": True},
        {"r": 4, "use_dora": True},
        {"r": 4, "use_bdlora": BLOCKS},
        {"r": 4, "kasa_config": {}},
        {"r": 4, "velora_config": {"num_groups": 4, "init_type": "random"}},
        {"r": 4, "modules_to_save": ["lm_head"]},
        {"r": 4, "trainable_token_indices": [7, 8]},
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
        {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
        {"r": 4, "use_dora": True, **EMBEDDING},
    ],
    "MISS": [{"r": 4, "init_weights": "bat"}],
    "OFT": [
        {"oft_block_size": 4},
        {"oft_block_size": 4, "block_share": True, "use_cayley_neumann": False},
    ],
    "OSF": [{"effective_rank": 4}],
    "PEANUT": [{"r": 4, "depth": 2}],
    "ROAD": [{"group_size": 8, "variant": "road_4"}],
    "SUPERTUNING": [{"sparsity": 0.9, "r": 4, "lora_alpha": 4}],
    "TINYLORA": [{"r": 2, "u": 4, **EMBEDDING}],
    "TRAINABLE_TOKENS": [{"token_indices": [7, 8], **EMBEDDING}],
    "UNILORA": [{"r": 4, "theta_d_length": 16}],
    "VBLORA": [{"r": 4, "num_vectors": 8, "vector_length": 16, "topk": 2}],
    "WAVEFT": [{"n_frequency": 20}],
}
EVERY_CASE = [(kind, settings) for kind, every in EXACT_CASES.items() for settings in every]
# Kinds and settings that are not exact: the reason of a call that is not shared, and the error of a radix batch.
MIXES, DRAWS, GRADIENT = "computes a token from others", "draws at random", "has another gradient of .* an average"
EMBEDS, CACHE, TASKS = "inputs_embeds are given", "a cache is given", "task_ids"
CUT = "has cut the batch|cut the batch or added tokens"
REFUSED_CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "CARTRIDGE": (VIRTUAL, CACHE, "puts keys in front of every sequence"),
    "CPT": ({**VIRTUAL, **PROMPT_OF_TOKENS}, EMBEDS, "does not match the shape of the indexed tensor"),  # by PEFT
    "LILY": ({"r": 4}, MIXES, MIXES),
    "MULTITASK_PROMPT_TUNING": (VIRTUAL, TASKS, TASKS),  # by PEFT, without sharing too
    "POLY": ({"r": 4, "n_skills": 2}, TASKS, TASKS),
    "PREFIX_TUNING": (VIRTUAL, CACHE, "puts keys in front of every sequence"),
    "PROMPT_TUNING": (VIRTUAL, EMBEDS, CUT),
    "PVERA": ({"r": 4}, DRAWS, DRAWS),
    "P_TUNING": ({**VIRTUAL, "encoder_hidden_size": 8}, EMBEDS, CUT),
    "SHADOW": (
        {"r": 4, "target_modules": None, "shadow_dropout": 0.0},
        "Shadow state sequence shape",
        "must match the size of tensor",
    ),
    "XLORA": ({"hidden_size": 32, "xlora_dropout_p": 0.0}, "cannot be tried", "output_hidden_states"),
}
MONTE_CARLO = {"num_samples": 2, "buffer_size": 3, "sample_scaler": 0.1}
AVERAGES = f"{GRADIENT}|leaves another state in a module"  # which averages, if it adds nothing yet
REFUSED_SETTINGS = [
    ("LORA", {"r": 4, "alora_invocation_tokens": [8, 9]}, r"alora_invocation_tokens=\[8, 9\]"),
    ("LORA", {"r": 4, "layer_replication": [(0, 2), (1, 2)]}, "cannot be tried"),
    ("LORA", {"r": 4, "velora_config": {"num_groups": 4}}, AVERAGES),
    ("LORA", {"r": 4, "monteclora_config": MONTE_CARLO}, DRAWS),
    ("BOFT", {"boft_block_size": 4, "boft_dropout": 0.5}, DRAWS),
    ("LOHA", {"r": 4, "rank_dropout": 0.5}, rf"{DRAWS} \(layers.*rank_dropout=0.5\)"),
    ("LOHA", {"r": 4, "module_dropout": 0.5}, rf"{DRAWS} \(layers.*module_dropout=0.5\)"),
]


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason="pip install peft")


def configuration(peft: Any, kind: str, **settings: Any) -> Any:
    """A configuration of a kind, by default with PROJECTIONS. Skips what this PEFT is too old for."""
    if kind not in peft.PeftType.__members__:
        pytest.skip(f"PEFT {peft.__version__} has no {kind}")
    config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    names = {field.name for field in dataclasses.fields(config_class)}
    if lacking := settings.keys() - names:
        pytest.skip(f"{kind} of PEFT {peft.__version__} has no {', '.join(sorted(lacking))}")
    nested = {"kasa_config": "KasaConfig", "monteclora_config": "MontecloraConfig", "use_bdlora": "BdLoraConfig"}
    for name in settings.keys() & nested.keys():
        settings[name] = getattr(peft.tuners.lora.config, nested[name])(**settings[name])
    targets = PROJECTIONS if "target_modules" in names and kind != "ADAPTION_PROMPT" else {}
    return config_class(**{"task_type": "CAUSAL_LM", **targets, **settings})


def adapted(peft: Any, base: nn.Module, config: Any) -> Any:
    """A PEFT model in training mode, whose trained parameters are random, so that no gradient is dead."""
    torch.manual_seed(0)
    return randomized(peft.get_peft_model(base, config))


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def refused_model(peft: Any, tiny_qwen3: Any, kind: str, folder: Path) -> Any:
    settings = dict(REFUSED_CASES[kind][0])
    if kind == "XLORA":
        expert = peft.get_peft_model(tiny_qwen3(), configuration(peft, "LORA", r=4, init_lora_weights=False))
        expert.save_pretrained(folder)
        settings["adapters"] = {"0": str(folder), "1": str(folder)}
    return adapted(peft, tiny_qwen3(use_cache=False), configuration(peft, kind, **settings))


class TestKinds:
    def test_every_kind_has_a_case(self, peft):
        known = EXACT_CASES.keys() | REFUSED_CASES.keys()
        assert {kind.value for kind in peft.PeftType} - known == set(), "kinds of this PEFT that have not been tried"

    @pytest.mark.parametrize(("kind", "settings"), cases(EVERY_CASE, [(kind, EXACT_CASES[kind][0]) for kind in QUICK]))
    def test_exact(self, peft, tiny_qwen3, kind, settings):
        """Adaption prompts are made for few families. AdaMSS clusters its subspaces when it is made."""
        if kind == "ADAMSS":
            pytest.importorskip("sklearn", reason="AdaMSS needs scikit-learn: pip install scikit-learn")
        base = tiny_model("LlamaForCausalLM") if kind == "ADAPTION_PROMPT" else tiny_qwen3()
        assert_exact(adapted(peft, base, configuration(peft, kind, **settings)))

    @pytest.mark.parametrize("kind", REFUSED_CASES)
    def test_refused(self, peft, tiny_qwen3, kind, tmp_path):
        _, unshared, refused = REFUSED_CASES[kind]
        with pytest.raises(Exception, match=refused):
            share_prefixes(refused_model(peft, tiny_qwen3, kind, tmp_path))(**RadixCollator()(FEATURES))
        model = share_prefixes(refused_model(peft, tiny_qwen3, kind, tmp_path))
        try:
            model(input_ids=IDS, labels=IDS)
        except Exception as error:
            assert unshared in str(error)
        else:
            report = sharing_report(model)
            assert not report.num_shared and any(unshared in reason for reason in report.not_shared)


class TestSettings:
    @pytest.mark.parametrize(("kind", "settings", "message"), REFUSED_SETTINGS)
    @pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
    def test_refused(self, peft, tiny_qwen3, kind, settings, message, is_early):
        """Whether the adapter comes before the model is shared or after; it is in training mode even if that is not."""
        config, base = configuration(peft, kind, **settings), tiny_qwen3().eval()
        with pytest.raises(UserError, match=message):
            if is_early:
                model = share_prefixes(adapted(peft, base, config))
            else:
                model = peft.get_peft_model(share_prefixes(base), config)
            model(**RadixCollator()(FEATURES))

    def test_the_regularizer_of_adalora_is_added_once(self, peft, tiny_qwen3):
        """The same for a radix batch and an ordinary one."""
        ids, losses = torch.tensor(ROWS[:1]), []
        for weight in (0.0, 0.5):
            config = configuration(peft, "ADALORA", total_step=10, orth_reg_weight=weight)
            model = share_prefixes(adapted(peft, tiny_qwen3(), config))
            with float64_throughout(model):
                losses.append((model(**RadixCollator()(FEATURES[:1])).loss, model(input_ids=ids, labels=ids).loss))
        (plain_radix, plain), (radix, ordinary) = losses
        assert radix - plain_radix > 0.1
        torch.testing.assert_close(radix - plain_radix, ordinary - plain, rtol=1e-10, atol=0)

    @FULL
    def test_verify_compares_without_the_regularizer(self, peft, tiny_qwen3):
        model = adapted(peft, tiny_qwen3(), configuration(peft, "ADALORA", total_step=10, orth_reg_weight=0.5))
        report = verify_equivalence(model, FEATURES)
        assert report.passed and model.peft_config["default"].orth_reg_weight == 0.5, str(report)


class TestAdaptersThatCameLater:
    def test_a_second_adapter(self, peft, tiny_qwen3):
        model = peft.get_peft_model(share_prefixes(tiny_qwen3()), configuration(peft, "LORA", r=4))
        batch = RadixCollator()(FEATURES)
        model(**batch)
        model.add_adapter("second", configuration(peft, "LORA", r=4, alora_invocation_tokens=[8]))
        with pytest.raises(UserError, match=r"adapter 'second' with alora_invocation_tokens=\[8\]"):
            model(**batch)
        model.delete_adapter("second")
        model(**batch)

    @pytest.mark.parametrize("into", ["the model", "the backbone"])
    def test_injected(self, peft, tiny_qwen3, into):
        """Without a PEFT model around it. The adapter adds nothing yet, because one of its matrices is zero.

        Its gradient shows what it computes, in a call without gradients too: its weights may train later.
        """
        base, config = share_prefixes(tiny_qwen3()), configuration(peft, "LILY", r=4)
        peft.inject_adapter_in_model(config, base if into == "the model" else base.model)
        with pytest.raises(UserError, match=GRADIENT):
            base(**RadixCollator()(FEATURES))
        with torch.no_grad():
            base(input_ids=IDS, use_cache=False)
        assert "has another gradient of layers.0.self_attn.q_proj.lily" in str(sharing_report(base))

    @FULL
    def test_several_kinds_in_one_model(self, peft, tiny_qwen3):
        base = tiny_qwen3()
        model = peft.get_peft_model(base, configuration(peft, "LOHA", r=4), adapter_name="first", mixed=True)
        model.add_adapter("second", configuration(peft, "LORA", r=4))
        assert_exact(randomized(model), alive=False)
        model.add_adapter("third", configuration(peft, "LOKR", r=4, module_dropout=0.5))
        assert share_prefixes(model)(**RadixCollator()(FEATURES)).loss.isfinite(), "it is not active yet"
        model.set_adapter(["first", "second", "third"])
        for holder in (model, base):
            with pytest.raises(UserError, match=DRAWS):
                share_prefixes(holder)(**RadixCollator()(FEATURES))


def assert_exact(model: Any, alive: bool = True) -> None:
    """The gradient of each sequence by itself. alive: no gradient is zero, which would prove nothing."""
    rung = same_step(model, FEATURES, lambda model: radix_batch(model, RadixCollator()(FEATURES)))
    assert not (alive and rung.dead)


class TestSharedMatrices:
    @pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"]])
    def test_an_adapter_on_a_tied_matrix_is_refused(self, peft, tiny_qwen3, targets):
        model = adapted(peft, tiny_qwen3(tie_word_embeddings=True), configuration(peft, "LORA", target_modules=targets))
        other = "lm_head" if "embed_tokens" in targets else "model.embed_tokens"
        with pytest.raises(UserError, match=rf"shares its weight with {other} \(tie_word_embeddings\)"):
            check_not_shared(model)
