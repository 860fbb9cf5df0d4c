"""Every kind of adapter of the installed PEFT has the gradient of each sequence by itself, or is refused by its name.

A PEFT with a kind or a setting that is not known here fails `test_every_kind_has_a_case` or
`test_every_setting_was_judged`: read the source of the new one, add its case, and add it to the table that fits.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import FULL
from tiny_models import tiny_model
from torch import nn

from radixtrain import RadixCollator, share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.generation.fingerprint import fingerprint, unread
from radixtrain.hf.adapters import EXACT, NOT_EXACT, check_not_shared
from radixtrain.verification.oracle import float64_throughout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about layers that it does not know

ROWS = [[7, 8, 9, 1, 2], [7, 8, 9, 3], [7, 8, 4, 4, 5]]
FEATURES = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ROWS]
BAR = 1e-12  # relative L2 of the worst tensor; the worst found is 1.5e-14

PROJECTIONS = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
EMBEDDING = {"target_modules": ["embed_tokens"]}
BLOCKS = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj", "up_proj", "down_proj"], "nblocks": 2}
VIRTUAL = {"num_virtual_tokens": 3}
PROMPT_OF_TOKENS = {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2]}

# The kinds of which `make test` tries the first settings: one for each way in which adapters compute.
QUICK = ("ADAPTION_PROMPT", "BOFT", "IA3", "LN_TUNING", "LORA", "OFT", "TRAINABLE_TOKENS")
# The settings that each exact kind is tried with. Target modules are PROJECTIONS unless they are given.
EXACT_CASES: dict[str, list[dict[str, Any]]] = {
    "ADALORA": [{"total_step": 10, "orth_reg_weight": 0.0}],  # `ordinary_one_by_one` knows no regularizer
    "ADAMSS": [{"r": 4, "num_subspaces": 2, "use_asa": True}, {"r": 4, "num_subspaces": 2, "use_dynamic_rank": True}],
    "ADAPTION_PROMPT": [{"adapter_len": 3, "adapter_layers": 2}],
    "BEFT": [{}],
    "BOFT": [{"boft_block_size": 4}],
    "C3A": [{"block_size": 16}],
    "DEFT": [{"r": 4}, {"r": 4, "para": True}, {"r": 4, "decomposition_method": "qr"}],
    "DELORA": [{"r": 4}],
    "FOURIERFT": [{"n_frequency": 20}],
    "FROD": [{"progressbar": False}],
    "GLORA": [{"r": 4}, {"config_A_B": "vector", "config_C": "none", "config_D_E": "vector"}],
    "GRALORA": [{"r": 4, "alpha": 4}, {"r": 4, "alpha": 4, "hybrid_r": 2}],
    "HIRA": [{"r": 4}],
    "HRA": [{"r": 4}, {"r": 4, "apply_GS": True}],
    "IA3": [{"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}],
    "LN_TUNING": [{"target_modules": ["input_layernorm", "q_norm", "norm"]}],
    "LOHA": [{"r": 4}],
    "LOKR": [{"r": 4}, {"r": 4, "decompose_both": True, "decompose_factor": 4}],
    "LORA": [
        {"r": 4, "use_rslora": True, "lora_bias": True},
        {"r": 4, "use_dora": True},
        {"r": 4, "use_bdlora": BLOCKS},
        {"r": 4, "kasa_config": {}},
        {"r": 4, "velora_config": {"num_groups": 4, "init_type": "random"}},
        {"r": 4, "init_lora_weights": "pissa"},
        {"r": 4, "init_lora_weights": "mica"},
        {"r": 4, "modules_to_save": ["lm_head"]},
        {"r": 4, "trainable_token_indices": [7, 8]},
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
        {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
        {"r": 4, "use_dora": True, **EMBEDDING},
    ],
    "MISS": [{"r": 4}, {"r": 4, "init_weights": "bat"}, {"r": 4, "init_weights": "mini", "mini_r": 4}],
    "OFT": [
        {"oft_block_size": 4},
        {"oft_block_size": 4, "coft": True, "eps": 1e-2},
        {"oft_block_size": 4, "block_share": True, "use_cayley_neumann": False},
    ],
    "OSF": [{"effective_rank": 4}],
    "PEANUT": [{"r": 4, "depth": 2}],
    "PSOFT": [{"r": 4}],
    "RANDLORA": [{"r": 4}],
    "ROAD": [{"group_size": 8, "variant": variant} for variant in ("road_1", "road_2", "road_4")],
    "SHIRA": [{"r": 4}],
    "SUPERTUNING": [{"sparsity": 0.9}, {"sparsity": 0.9, "r": 4, "lora_alpha": 4}],
    "TINYLORA": [{"r": 2, "u": 4}, {"r": 2, "u": 4, **EMBEDDING}],
    "TRAINABLE_TOKENS": [{"token_indices": [7, 8], **EMBEDDING}],
    "UNILORA": [{"r": 4, "theta_d_length": 16}],
    "VBLORA": [{"r": 4, "num_vectors": 8, "vector_length": 16, "topk": 2}],
    "VERA": [{"r": 4}],
    "WAVEFT": [{"n_frequency": 20}, {"n_frequency": 20, "use_idwt": False}],
}
EVERY_CASE = pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, marks=() if kind in QUICK and settings is every[0] else FULL)
        for kind, every in EXACT_CASES.items()
        for settings in every
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "default",
)
REFUSED_CASES: dict[str, dict[str, Any]] = {
    "CARTRIDGE": VIRTUAL,
    "CPT": {**VIRTUAL, **PROMPT_OF_TOKENS},
    "LILY": {"r": 4},
    "MULTITASK_PROMPT_TUNING": VIRTUAL,
    "POLY": {"r": 4, "n_skills": 2},
    "PREFIX_TUNING": VIRTUAL,
    "PROMPT_TUNING": VIRTUAL,
    "PVERA": {"r": 4},
    "P_TUNING": {**VIRTUAL, "encoder_hidden_size": 8},
    "SHADOW": {"r": 4, "target_modules": None, "shadow_dropout": 0.0},
    "XLORA": {"hidden_size": 32, "xlora_dropout_p": 0.0},
}
# Settings of an exact kind that make it inexact: kind, settings, what the error says of them.
MONTE_CARLO = {"num_samples": 2, "buffer_size": 3, "sample_scaler": 0.1}
BREAKING_CASES = [
    ("LORA", {"alora_invocation_tokens": [8, 9]}, r"alora_invocation_tokens=\[8, 9\]"),
    ("LORA", {"layer_replication": [(0, 2), (1, 2)]}, r"layer_replication=\[\(0, 2\), \(1, 2\)\]"),
    ("LORA", {"velora_config": {"num_groups": 4}}, "velora_config of init_type='batch_average'"),
    (
        "LORA",
        {"velora_config": {"num_groups": 4, "init_type": "batch_average_once"}},
        "velora_config of init_type='batch_average_once'",
    ),
]
DRAWING_CASES = [
    ("BOFT", {"boft_block_size": 4}, {"boft_dropout": 0.5}),
    ("LOHA", {"r": 4}, {"rank_dropout": 0.5}),
    ("LOHA", {"r": 4}, {"module_dropout": 0.5}),
    ("LOKR", {"r": 4}, {"rank_dropout": 0.5}),
    ("LOKR", {"r": 4}, {"module_dropout": 0.5}),
    ("LORA", {"r": 4}, {"monteclora_config": MONTE_CARLO}),
    ("OFT", {"oft_block_size": 4}, {"module_dropout": 0.5}),
]
# Every setting of an exact kind: it was read in PEFT's source and works token by token, or it is refused.
JUDGED = """
ab_svd_init act_fn adapter_layers adapter_len alora_invocation_tokens alpha alpha_pattern apply_GS arrow_config
asa_importance_beta asa_schedule_exponent asa_target_subspaces asa_uncertainty_beta beta1 beta2 bias block_share
block_size block_size_pattern boft_block_num boft_block_size boft_dropout boft_n_butterfly_factor
cayley_neumann_eps coft config_A_B config_C config_D_E corda_config d_initial decompose_both decompose_factor
decomposition_method deft_dropout delora_lambda deltaT depth effective_rank ensure_weight_tying eps eva_config
exclude_modules fan_in_fan_out feedforward_modules final_warmup frod_dropout gralora_dropout gralora_k group_size
hira_dropout hybrid_r init_ia3_weights init_logits_std init_lora_weights init_r init_scale init_theta_d_bound
init_v_bound init_vector_bank_bound init_warmup init_weights kasa_config lambda_pattern layer_replication
layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout lora_ga_config mask_interval
mask_type megatron_config megatron_core mini_r miss_dropout module_dropout modules_to_save monteclora_config
n_frequency n_frequency_pattern num_cayley_neumann_terms num_subspaces num_vectors oft_block_size orth_reg_weight
para progressbar proj_seed projection_prng_key projection_seed proportional_parameters psoft_alpha psoft_dropout
psoft_mag_a psoft_mag_b psoft_orth psoft_svd psoft_svd_lowrank_niter qalora_group_size r randlora_alpha
randlora_dropout random_loc_seed random_seed rank_dropout rank_dropout_scale rank_pattern regularization_alpha
runtime_config runtime_offload_base_weight save_indices save_only_topk_weights save_precomputed_indices
save_projection scaling select_top sparse sparse_rate sparsity subspace_rank svd_threshold target_modules
target_parameters target_r target_svd_config tfinal theta_d_length tinit tinylora_dropout token_indices topk
total_step trainable_token_indices u unilora_dropout use_asa use_bdlora use_cayley_neumann use_dora
use_dynamic_rank use_effective_conv2d use_idwt use_qalora use_rslora variant vblora_dropout vector_length
velora_config vera_dropout very_sparse wavelet_family weight_tying
"""


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
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(0.3 * noise.to(parameter.dtype))
    return model.train()


def refused_model(peft: Any, tiny_qwen3: Any, kind: str, folder: Path) -> Any:
    settings = dict(REFUSED_CASES[kind])
    if kind == "XLORA":
        expert = peft.get_peft_model(tiny_qwen3(), configuration(peft, "LORA", r=4, init_lora_weights=False))
        expert.save_pretrained(folder)
        settings["adapters"] = {"0": str(folder), "1": str(folder)}
    return adapted(peft, tiny_qwen3(use_cache=False), configuration(peft, kind, **settings))


def prepared_first(peft: Any, base: nn.Module, config: Any) -> Any:
    """Adapters that a trainer puts around a prepared model."""
    return adapted(peft, share_prefixes(base), config)


class TestKinds:
    def test_every_kind_has_a_case(self, peft):
        known = EXACT_CASES.keys() | REFUSED_CASES.keys()
        assert {kind.value for kind in peft.PeftType} - known == set(), "kinds of this PEFT that have not been tried"
        assert EXACT_CASES.keys() == EXACT.keys()
        assert REFUSED_CASES.keys() == NOT_EXACT.keys()

    def test_every_setting_was_judged(self, peft):
        classes = [
            config for kind, config in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind.value in EXACT_CASES
        ]
        common = {field.name for field in dataclasses.fields(peft.PeftConfig)}
        settings = {field.name for config in classes for field in dataclasses.fields(config)} - common
        assert settings - set(JUDGED.split()) == set(), "settings of this PEFT that have not been judged"

    @EVERY_CASE
    def test_exact(self, peft, tiny_qwen3, kind, settings):
        """Adaption prompts are made for few families. AdaMSS clusters its subspaces when it is made."""
        if kind == "ADAMSS":
            pytest.importorskip("sklearn", reason="AdaMSS needs scikit-learn: pip install scikit-learn")
        base = tiny_model("LlamaForCausalLM") if kind == "ADAPTION_PROMPT" else tiny_qwen3()
        assert_exact(adapted(peft, base, configuration(peft, kind, **settings)))

    @EVERY_CASE
    def test_what_fingerprints_leave_out_is_not_read(self, peft, tiny_qwen3, kind, settings):
        """Weights of a disabled adapter: a change of them changes no logit. Enabled, they are read again.

        Those that layers share have another name too, by which they are read.
        """
        base = tiny_model("LlamaForCausalLM") if kind == "ADAPTION_PROMPT" else tiny_qwen3()
        model = adapted(peft, base, configuration(peft, kind, **settings)).eval()
        ids, enabled = torch.tensor(ROWS[:1]), fingerprint(model)
        with model.disable_adapter(), torch.no_grad():
            seen, logits, left_out = fingerprint(model), model(input_ids=ids).logits, tuple(unread(model))
            trained = [name for name, _ in model.named_parameters() if "lora_A" in name]
            assert all(name.startswith(left_out) for name in trained)
            parameters, buffers = (
                named(remove_duplicate=False) for named in (model.named_parameters, model.named_buffers)
            )
            tensors = [*parameters, *buffers]
            read = {id(x) for name, x in tensors if not name.startswith(left_out)}
            changed = [x for _, x in tensors if id(x) not in read and x.is_floating_point()]
            for x in changed:
                x.data.add_(1.0)
            assert fingerprint(model) == seen and torch.equal(model(input_ids=ids).logits, logits)
        assert (fingerprint(model) == enabled) == (not changed)

    @pytest.mark.parametrize("kind", REFUSED_CASES)
    def test_refused(self, peft, tiny_qwen3, kind, tmp_path):
        """With the reason and the fix, and nothing is prepared."""
        model = refused_model(peft, tiny_qwen3, kind, tmp_path)
        message = f"adapter 'default' is of PEFT's kind {kind}, which {NOT_EXACT[kind]}: .* train it without sharing"
        with pytest.raises(UserError, match=message):
            share_prefixes(model)

    def test_a_kind_of_a_later_peft(self, tiny_qwen3):
        model = tiny_qwen3()
        model.peft_config = {"mine": SimpleNamespace(peft_type="NEXTLORA")}
        with pytest.raises(UserError, match="'mine' is of PEFT's kind NEXTLORA, which is not known to compute each"):
            share_prefixes(model)


class TestSettings:
    @pytest.mark.parametrize(("kind", "settings", "message"), BREAKING_CASES)
    def test_refused(self, peft, tiny_qwen3, kind, settings, message):
        config = configuration(peft, kind, r=4, **settings)
        refused = pytest.raises(UserError, match=rf"adapter 'default' \({kind}\) has an? {message}|has {message}")
        with refused:
            share_prefixes(adapted(peft, tiny_qwen3(), config))
        model = prepared_first(peft, tiny_qwen3(), config)
        with refused:
            model(**RadixCollator()(FEATURES))

    @FULL
    def test_arrow_routes_each_token_by_itself(self, peft, tiny_qwen3):
        expert = {"r": 4, "init_lora_weights": False}
        model = peft.get_peft_model(tiny_qwen3(), configuration(peft, "LORA", **expert), adapter_name="first")
        model.add_adapter("second", configuration(peft, "LORA", **expert))
        router = peft.ArrowConfig(top_k=1, rng_seed=0)
        router.task_adapter_names, router.gks_adapter_names = ["first", "second"], []
        model.add_adapter("router", configuration(peft, "LORA", r=4, arrow_config=router))
        model.set_adapter("router")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".first." in name or ".second." in name)
        assert_exact(randomized(model), alive=False)

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
        report = verify_equivalence(model, FEATURES, precisions=["float64"])
        assert report.passed and model.peft_config["default"].orth_reg_weight == 0.5, str(report)


class TestDraws:
    @pytest.mark.parametrize(("kind", "settings", "drawing"), DRAWING_CASES)
    def test_refused_while_it_draws_unless_allowed_by_name(self, peft, tiny_qwen3, kind, settings, drawing):
        """Before and after the model is prepared; in evaluation mode nothing is drawn."""
        config, (name,) = configuration(peft, kind, **settings, **drawing), drawing
        refused = pytest.raises(
            UserError, match=rf"adapter 'default' \({kind}\) has {name}=.* random .* allow_dropout=\['{name}'\]"
        )
        model = adapted(peft, tiny_qwen3(), config)
        with refused:
            share_prefixes(model)
        share_prefixes(model, allow_dropout=[name])
        share_prefixes(model.eval())
        later = prepared_first(peft, tiny_qwen3(), config)
        with refused:
            later(**RadixCollator()(FEATURES))

    @FULL
    def test_verify_compares_without_a_draw_that_was_allowed(self, peft, tiny_qwen3):
        model = adapted(peft, tiny_qwen3(), configuration(peft, "LOHA", r=4, rank_dropout=0.5))
        share_prefixes(model, allow_dropout=["rank_dropout"])
        report = verify_equivalence(model, FEATURES, precisions=["float64"])
        assert report.passed and model.training, str(report)

    @FULL
    def test_settings_of_dropout_modules_are_left_to_the_dropout_check(self, peft, tiny_qwen3):
        """Each setting that the table says creates an `nn.Dropout` is refused as a module."""
        for kind, shown in EXACT.items():
            for name in shown:
                if kind in peft.PeftType.__members__:
                    settings = {**EXACT_CASES[kind][-1], name: 0.5}
                    model = adapted(peft, tiny_qwen3(), configuration(peft, kind, **settings))
                    with pytest.raises(UserError, match=r"^dropout p=0\.5 at '.*_dropout\.default'"):
                        share_prefixes(model)

    def test_layers_start_in_training_mode(self, peft, tiny_qwen3):
        """Whatever the mode of the model."""
        model = peft.get_peft_model(
            share_prefixes(tiny_qwen3().eval()), configuration(peft, "LOHA", r=4, rank_dropout=0.5)
        )
        with pytest.raises(UserError, match=r"rank_dropout=0\.5"):
            model(**RadixCollator()(FEATURES))


class TestAdaptersThatCameLater:
    def test_a_batch_refuses_what_a_trainer_added(self, peft, tiny_qwen3):
        model = prepared_first(peft, tiny_qwen3(), configuration(peft, "LILY", r=4))
        with pytest.raises(UserError, match="kind LILY"):
            model(**RadixCollator()(FEATURES))
        assert model(input_ids=torch.tensor(ROWS[:1])).logits.isfinite().all(), "an ordinary batch is not refused"

    def test_a_second_adapter(self, peft, tiny_qwen3):
        model, batch = prepared_first(peft, tiny_qwen3(), configuration(peft, "LORA", r=4)), RadixCollator()(FEATURES)
        model(**batch)
        model.add_adapter("second", configuration(peft, "LORA", r=4, alora_invocation_tokens=[8]))
        with pytest.raises(UserError, match=r"adapter 'second' \(LORA\) has alora_invocation_tokens=\[8\]"):
            model(**batch)
        model.delete_adapter("second")
        model(**batch)

    @pytest.mark.parametrize("into", ["the model", "the backbone"])
    def test_injected(self, peft, tiny_qwen3, into):
        """Without a PEFT model around it."""
        base, config = share_prefixes(tiny_qwen3()), configuration(peft, "LILY", r=4)
        peft.inject_adapter_in_model(config, base if into == "the model" else base.model)
        with pytest.raises(UserError, match="kind LILY"):
            base(**RadixCollator()(FEATURES))

    @FULL
    def test_several_kinds_in_one_model(self, peft, tiny_qwen3):
        base = tiny_qwen3()
        model = peft.get_peft_model(base, configuration(peft, "LOHA", r=4), adapter_name="first", mixed=True)
        model.add_adapter("second", configuration(peft, "LORA", r=4))
        assert_exact(randomized(model), alive=False)
        model.add_adapter("third", configuration(peft, "LOKR", r=4, module_dropout=0.5))
        for holder in (model, base):
            with pytest.raises(UserError, match=r"adapter 'third' \(LOKR\) has module_dropout=0\.5"):
                share_prefixes(holder)


def assert_exact(model: Any, alive: bool = True) -> None:
    """The gradient of each sequence by itself. alive: no gradient is zero, which would prove nothing."""
    (rung,) = verify_equivalence(model, FEATURES, precisions=["float64"]).rungs
    assert not (alive and rung.dead)
    assert rung.worst.radix <= BAR, rung.worst


class TestSharedMatrices:
    @pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"]])
    def test_an_adapter_on_a_tied_matrix_is_refused(self, peft, tiny_qwen3, targets):
        model = adapted(peft, tiny_qwen3(tie_word_embeddings=True), configuration(peft, "LORA", target_modules=targets))
        other = "lm_head" if "embed_tokens" in targets else "model.embed_tokens"
        with pytest.raises(UserError, match=rf"shares its weight with {other} \(tie_word_embeddings\)"):
            check_not_shared(model)

    @pytest.mark.parametrize(("tied", "targets"), [(True, ["q_proj"]), (False, ["lm_head", "embed_tokens"])])
    def test_an_adapter_on_a_matrix_of_its_own(self, peft, tiny_qwen3, tied, targets):
        model = tiny_qwen3(tie_word_embeddings=tied)
        check_not_shared(adapted(peft, model, configuration(peft, "LORA", target_modules=targets)))
