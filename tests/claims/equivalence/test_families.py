"""Which model families train on unique tokens: Hugging Face's own classes, tiny and random, through `share_prefixes`.

Each family gives the gradient of the ordinary model on every sequence by itself, in float64 and in float32, with every
gradient alive; or it is refused, by an error that names the reason. Sequences are longer than every sliding window, so
that windows bite, and layers with a recurrent state fork at nearly every branch.

The tables of recipes/benchmarks/families.md are written from this run: `RADIXTRAIN_WRITE_TABLE=1` writes them. Without
it a family of which they say another attention, layer or refusal than its test found fails.
"""

import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import __version__
from transformers.models.auto import modeling_auto

from radixtrain import (
    RadixCollator,
    restore_model,
    share_prefixes,
    verify_equivalence,
)
from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import is_text, mixers_of, parts_of
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import tree_runs
from radixtrain.verification.equivalence import EquivalenceReport
from radixtrain.verification.oracle import float64_throughout, gradients_of
from radixtrain.versions import transformers_is_before
from tests.claims.equivalence.families_page import FAMILIES_PAGE, REFUSED, said_of_families
from tests.support import FULL, cases
from tests.support.batches import filled
from tests.support.models import CORE, CORE_MULTIMODAL, FAMILIES, IS_OLDER, MULTIMODAL, REST, WHOLE, Family
from tests.support.steps import BAR, same_step, step_in_float64

# Grouped heads, latent attention, sinks, soft-cap, experts, shared keys, learned positions, differential attention, one
# of each kind of recurrent layer; refusals for several reasons; positions on three axes, and a model inside another.
QUICK = [
    *(("text", name) for name in ("Llama", "DeepSeek-V3", "gpt-oss", "Gemma 2", "Mixtral", "Gemma 3n", "GPT-2")),
    *(("text", name) for name in ("DiffLlama", "Qwen3.5", "Bamba", "LFM2", "BART as a decoder", "BLOOM", "Mamba")),
    *(("multimodal", name) for name in ("Qwen2.5-VL", "Nemotron-H Omni")),
]


NOT_TRIED = {
    "needs an image or another second input in every batch": """BlipForConditionalGeneration
        Blip2ForConditionalGeneration Florence2ForConditionalGeneration IdeficsForVisionText2Text
        InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration Kosmos2ForConditionalGeneration
        Molmo2ForConditionalGeneration PI0ForConditionalGeneration Pix2StructForConditionalGeneration
        PPFormulaNetForConditionalGeneration UdopForConditionalGeneration VisionEncoderDecoderModel""",
    "is no next-token model": "DiffusionGemmaForBlockDiffusion",
    "cannot be built by transformers 5.24 without another model": """Gemma4AssistantForCausalLM
        Gemma4UnifiedAssistantForCausalLM""",
    "needs timm or scipy": """Gemma3nForConditionalGeneration InklingForConditionalGeneration
        PerceptionLMForConditionalGeneration""",
}


FROZEN = Path(__file__).resolve().parents[2] / "golden" / "families.txt"
WRITING = bool(os.environ.get("RADIXTRAIN_WRITE_TABLE"))
ROWS = [  # and how many of their first tokens bear no loss
    ([7, 8, 9, 10, 11, 12, 1, 2, 3], 4),
    ([7, 8, 9, 10, 11, 12, 1, 4], 4),
    ([7, 8, 9, 10, 11, 12, 5], 6),
    ([7, 8, 9, 6, 6, 6, 13, 14], 1),
    ([30, 31, 32, 33, 34, 35, 36], 0),
]
FEATURES = [{"input_ids": ids, "labels": [-100] * start + ids[start:]} for ids, start in ROWS]
pytestmark = pytest.mark.usefixtures("free_forks")
MODELS = 9  # with other weights: the rounding of one has luck
STATEFUL = re.compile("linear attention|state-space layers|convolutions")  # layers with a recurrent state
# What the table says of an error: a pattern of its message, and few words, in which ... is the group of the pattern.
REASONS = {
    r"computes a token from others.*first in layer \d+ \((\w+)\)": "tokens meet in its ...",
    r"does not pass the entries of a radix batch on to its": "its backbone gets nothing of a radix batch",
    r"a whole language model with a head of its own \((\w+)": "share its ... instead",
    r"adds a (position_bias) to its scores": "a ... in its scores",
    r"cannot be tried on a few tokens|gets a mask .* that its model made|has not made": "attention code of its own",
    r"does not say that its attention is causal": "does not say that its attention is causal",
    r"does not take position_ids": "takes no position_ids",
    r"counts positions from padding_idx": "positions start at padding_idx + 1",
    r"which is not a PreTrainedModel": "layers in a class that is no PreTrainedModel",
    r"not a plain decoder, but an encoder and a decoder": "an encoder and a decoder",
    r"not a plain decoder \(one stack": "more than one stack of layers",
    r"does not predict next tokens: (.*?);": "...",
    r"has (sparse attention)": "...",
    r"is not a causal language model": "not among the causal language models of transformers",
    r"is not causal": "attends in both directions",
    r"adds a mask of its own": "a mask of its own",
    r"attention within chunks": "rows longer than a chunk",
    r"has a dynamic mask": "a dynamic mask",
}


TRIED = {
    **{("text", family.name): family for family in [*CORE, *REST]},
    **{("multimodal", family.name): family for family in [*CORE_MULTIMODAL, *MULTIMODAL]},
}


@pytest.mark.parametrize(("group", "name"), cases(TRIED, QUICK))
def test_equal_or_refused(
    group: str, name: str, record_property: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    family = TRIED[group, name]
    try:
        with stock_failures_skip(family):
            model = family.build()
            reason = refusal_of(model)
    except FailsByItself:
        check_said(group, name, f"{REFUSED}the ordinary model fails too", record_property)
        return
    if reason:
        check_said(group, name, f"{REFUSED}{few_words(reason)}", record_property)
        return
    mixers = mixers_of(parts_of(model).decoder)
    report = verify_equivalence(model, FEATURES)
    assert_exact(report)
    text = model.get_decoder() if group == "multimodal" else model
    inside = {id(parameter) for parameter in text.parameters()}
    idle = {name for name, parameter in model.named_parameters() if id(parameter) not in inside}
    dead = [tensor.name for tensor in report["float64"].dead if tensor.name not in idle and is_text(tensor.name)]
    assert all(family.idle and re.search(family.idle, name) for name in dead), dead
    check_said(group, name, family.what, record_property)
    assert IS_OLDER or bool(mixers) == bool(STATEFUL.search(family.what))
    if mixers:
        is_whole = "computes every sequence from its first token on" in caplog.text
        assert is_whole == (WHOLE in family.what) or transformers_is_before("5.21")
    elif not report.passed:  # in float32; in the median of several models that is no luck
        check_rounding([verify_equivalence(family.build(seed), FEATURES)["float32"] for seed in range(MODELS)])


def assert_exact(report: EquivalenceReport) -> None:
    assert report["float64"].passed and report["float64"].worst.radix <= BAR, str(report)


class FailsByItself(Exception):
    """transformers fails."""


@contextmanager
def stock_failures_skip(family: Family) -> Iterator[None]:
    """Inside, an error skips if an older transformers cannot build the model so tiny, or run it on a row of text.

    If the one that these tests were written with cannot, it raises FailsByItself.
    """
    try:
        yield
    except Exception:
        try:
            ids = torch.tensor([FEATURES[0]["input_ids"]])
            family.build()(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
        except Exception as stock:  # each class has its own
            if IS_OLDER:
                pytest.skip(f"{family.name}: transformers {__version__} fails by itself: {first_line(stock)[:80]}")
            raise FailsByItself(first_line(stock)) from stock
        raise


SAID = {(group, name): said for group in ("text", "multimodal") for name, said in said_of_families(group).items()}
EQUAL = [each for each in TRIED if not SAID.get(each, "").startswith(REFUSED)]


@FULL
@pytest.mark.parametrize(("group", "name"), [each for each in EQUAL if STATEFUL.search(TRIED[each].what)])
def test_rounding_of_layers_with_a_state(group: str, name: str) -> None:
    """How exact models with several weights are.

    With forks the two arms compute the states in different calls, so their errors are two samples, and those of one
    model differ by luck. In the median model radix may have at most twice the error.
    """
    family = TRIED[group, name]
    reports = [verify_equivalence(family.build(seed).bfloat16(), FEATURES) for seed in range(MODELS)]
    for report in reports:
        assert_exact(report)
    for precision in ("float32", "bfloat16"):
        check_rounding([report[precision] for report in reports])


def check_rounding(rungs: Sequence[Any]) -> None:
    """In the median model radix has at most twice the error of the ordinary arm, in the worst and the median tensor."""
    worst = [rung.worst.radix / rung.errors("ordinary")[-1] for rung in rungs]
    median = [statistics.median(rung.errors("radix")) / statistics.median(rung.errors("ordinary")) for rung in rungs]
    assert statistics.median(worst) <= 2 and statistics.median(median) <= 2, (worst, median)


def test_the_batch_has_forks() -> None:
    groups = tree_runs(layout_of(RadixCollator()(FEATURES)), forks=True).groups
    assert sum(group.num_runs for group in groups if group.is_fork) == 2


def refusal_of(model: Any) -> str:
    """Why the model, or a radix batch on it, is refused; empty if neither is."""
    try:
        share_prefixes(model)(**RadixCollator()(FEATURES))
    except UserError as error:
        return str(error)
    finally:
        restore_model(model)
    return ""


def few_words(reason: str) -> str:
    for pattern, words in REASONS.items():
        found = re.search(pattern, reason)
        if found:
            return words.replace("...", found.group(found.lastindex or 0).replace("_", " "))
    raise AssertionError(f"REASONS has no few words for: {reason}")


def test_the_table_has_these_families_and_no_others() -> None:
    assert WRITING or set(SAID) == set(TRIED)


def test_no_family_is_lost() -> None:
    """Those that were equal on 2026-11-28, with transformers 5.24, still are. `test_equal_or_refused` tries each."""
    frozen = [line.split(": ", 2) for line in FROZEN.read_text(encoding="utf-8").splitlines()]
    lost = [(group, name) for group, name, answer in frozen if answer == "equal" and (group, name) not in EQUAL]
    assert len(frozen) >= 260 and not lost


@pytest.mark.skipif(IS_OLDER, reason="the page of families lists the classes of a newer transformers")
def test_no_class_of_transformers_is_left_out() -> None:
    maps = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    classes = {name for each in maps for name in each.values()}
    left_out = {name for names in NOT_TRIED.values() for name in names.split()}
    assert sorted(classes) == sorted({family.model_class for family in FAMILIES} | left_out)
    assert not [name for name in left_out if f"`{name}`" not in FAMILIES_PAGE.read_text(encoding="utf-8")]


# One of each kind of layer that reaches a strategy with other arguments.
EVERY_STRATEGY = """Cohere 2, DeepSeek-V3, DiffLlama, Falcon-H1, Gemma 2, Gemma 3n, Gemma 4, GPT-2, GPT-BigCode,
    gpt-oss, Granite, LongCat-Flash, Mistral, Mixtral, Qwen3, Qwen3-Next, SmolLM3"""
QUICK_STRATEGY = ["DeepSeek-V3", "Gemma 2", "Gemma 3n", "gpt-oss"]


@pytest.mark.parametrize("name", cases(re.split(r",\s+", EVERY_STRATEGY), QUICK_STRATEGY))
def test_every_strategy(name: str) -> None:
    model = TRIED["text", name].build(seed=1)
    for attention in ("path", "expand", "reference"):
        assert_exact(verify_equivalence(model, FEATURES, attention=attention))


def test_what_a_refusal_advises() -> None:
    """Nemotron-H Omni cannot be prepared, but the language model inside it can."""
    model = TRIED["multimodal", "Nemotron-H Omni"].build()
    with pytest.raises(UserError, match=r"share that one: share_prefixes\(model\.language_model\)"):
        share_prefixes(model)
    assert_exact(verify_equivalence(model.language_model, FEATURES))


WITH_ROUTER_LOSS = """ERNIE 4.5 MoE, FlexOLMo, gpt-oss, Granite MoE, JetMoE, MiniMax-M2, Mixtral, OLMoE, Phi-3.5-MoE,
    Qwen2-MoE, Qwen3-MoE, Qwen3-Next"""


@pytest.mark.parametrize("name", cases(re.split(r",\s+", WITH_ROUTER_LOSS), ["Mixtral"]))
def test_router_statistics_count_original_tokens(name: str) -> None:
    """The load-balancing loss is no sum over tokens, so its oracle is the whole padded batch, mask and all."""
    model = TRIED["text", name].build(output_router_logits=True, router_aux_loss_coef=1.0, aux_loss_coef=1.0)
    ids = filled([feature["input_ids"] for feature in FEATURES], "right")
    labels = filled([feature["labels"] for feature in FEATURES], "right", -100)
    padded = {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}
    for pad_to_multiple_of in (None, 8):
        batch = RadixCollator(pad_to_multiple_of=pad_to_multiple_of)(FEATURES)
        with float64_throughout(restore_model(model)):
            truth = gradients_of(model, lambda: [model(**padded).loss])
        rung = same_step(model, truth, lambda model, batch=batch: [model(**batch).loss])
        assert rung.passed and not rung.dead, rung.worst
        without = step_in_float64(model, truth, lambda m, batch=batch: [m(**batch).loss - m(**batch).aux_loss])
        assert without.worst.radix > 1e-3, "the router loss does not matter here, so nothing was tested"


def check_said(group: str, name: str, found: str, record_property: Callable[[str, Any], None]) -> None:
    """The page says the same of the family, or it is being written."""
    record_property("family", json.dumps([len(FAMILIES), group, name, found]))
    said = SAID.get((group, name))
    if IS_OLDER and said != found:
        pytest.skip(f"{name}: {found}")  # every family that the test lets through is equal or refused
    assert WRITING or said == found, f"the page of families says {said}; RADIXTRAIN_WRITE_TABLE=1 writes {found}"
