"""Which model families train on unique tokens: Hugging Face's own classes, tiny and random, through `prepare_model`.

Each family gives the gradient of the ordinary model on every sequence by itself, in float64 and in float32, with every
gradient alive; or it is refused, by an error that names the reason. Sequences are longer than every sliding window, so
that windows bite, and layers with a recurrent state fork at nearly every branch.

The tables of docs/families.md are written from this run: `RADIXTRAIN_WRITE_TABLE=1` writes them, and without it a row
that says something else than its test found fails.
"""

import json
import os
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CORE, CORE_MULTIMODAL, FAMILIES, MULTIMODAL, NOT_TRIED, REST, WHOLE, Family
from transformers.models.auto import modeling_auto

from radixtrain import RadixCollator, prepare_model, restore_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.recurrent.mixers import mixers_of
from radixtrain.testing import FREE_FORKS
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import float64_throughout, gradients_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "families.md"
WRITING = bool(os.environ.get("RADIXTRAIN_WRITE_TABLE"))
ALL = WRITING or os.environ.get("RADIXTRAIN_FAMILIES") == "all"
IN_FULL = pytest.mark.skipif(not ALL, reason="make test-full runs this family (RADIXTRAIN_FAMILIES=all)")
FEATURES = [
    {"input_ids": [7, 8, 9, 10, 11, 12, 1, 2, 3], "labels": [-100, -100, -100, -100, 11, 12, 1, 2, 3]},
    {"input_ids": [7, 8, 9, 10, 11, 12, 1, 4], "labels": [-100, -100, -100, -100, 11, 12, 1, 4]},
    {"input_ids": [7, 8, 9, 10, 11, 12, 5], "labels": [-100, -100, -100, -100, -100, -100, 5]},
    {"input_ids": [7, 8, 9, 6, 6, 6, 13, 14], "labels": [-100, 8, 9, 6, 6, 6, 13, 14]},
    {"input_ids": [30, 31, 32, 33, 34, 35, 36], "labels": [30, 31, 32, 33, 34, 35, 36]},
]
FORKING = RadixCollator(run_cost=FREE_FORKS)
MODELS = 9  # with other weights, for each family with a recurrent state: the rounding of one has luck
ROUNDED = ("Bamba", "LFM2", "Qwen3.5")  # families of which `make test` computes all of these models
NUMBER = r"\d\.\de-\d\d"
# What the table says of an error: a pattern of its message, and few words, in which ... is the group of the pattern.
REASONS = {
    r"layer \d+ is '(\w+)', whose state": "... layers with a state outside Hugging Face's cache",
    r"layer \d+ is '(\w+)'": "... layers",
    r"has a \w+ \(\S+\), whose state": "a state outside Hugging Face's cache",
    r"state-space layers only": "passes nothing on to its layers",
    r"a whole language model with a head of its own \((\w+)": "prepare its ... instead",
    r"adds a (position_bias) to its scores": "a ... in its scores",
    r"does not take its attention from AttentionInterface": "attention code of its own",
    r"does not take position_ids": "takes no position_ids",
    r"counts positions from padding_idx": "positions start at padding_idx + 1",
    r"not a plain decoder, but an encoder and a decoder": "an encoder and a decoder",
    r"not a plain decoder \(one stack": "more than one stack of layers",
    r"does not predict next tokens: (.*)": "...",
    r"attends in both directions": "attends in both directions",
    r"attends within chunks": "rows longer than a chunk",
    r"has a dynamic mask": "a dynamic mask",
}


def tried(families: list[Family], core: list[Family], group: str) -> list[Any]:
    return [
        pytest.param(group, family, id=f"{group}: {family.name}", marks=() if family in core else IN_FULL)
        for family in families
    ]


TRIED = [*tried([*CORE, *REST], CORE, "text"), *tried([*CORE_MULTIMODAL, *MULTIMODAL], CORE_MULTIMODAL, "multimodal")]


@pytest.mark.parametrize(("group", "family"), TRIED)
def test_equal_or_refused(
    group: str, family: Family, record_property: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = family.build()
    reason = refusal_of(model)
    if reason:
        check_row(group, [family.name, family.what, f"refused: {few_words(reason)}", "-", "-"], record_property)
        return
    mixers = mixers_of(parts_of(model).decoder)
    report = verify_equivalence(model, FEATURES, collator=FORKING if mixers else None)
    float64, float32 = report["float64"], report["float32"]
    assert float64.passed and float64.worst.radix <= 1e-12, str(report)
    text = model.get_decoder() if group == "multimodal" else model
    inside = {id(parameter) for parameter in text.parameters()}
    idle = {name for name, parameter in model.named_parameters() if id(parameter) not in inside}
    dead = [tensor.name for tensor in float64.dead if tensor.name not in idle]
    assert all(family.idle and re.search(family.idle, name) for name in dead), dead
    figures = [f"{x:.1e}" for x in (float64.worst.radix, float32.worst.radix, float32.worst_ordinary)]
    check_row(group, [family.name, family.what, *figures], record_property)
    if mixers:
        assert ("computes every sequence from its first token on" in caplog.text) == (WHOLE in family.what)
        name = family.name if group == "text" else f"{family.name}, {group}"
        kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers.values()}))
        if ALL or name in ROUNDED:
            check_row("recurrent", [name, kinds, *rounding_of(family)], record_property)
    else:
        assert report.passed, str(report)


def rounding_of(family: Family) -> list[str]:
    """Cells of the table of families with a recurrent state: how exact models with several weights are.

    With forks the two arms compute the states in different calls, so their errors are two samples, and those of one
    model differ by luck. In the median model radix may have at most twice the error.
    """
    reports = [verify_equivalence(family.build(seed).bfloat16(), FEATURES, collator=FORKING) for seed in range(MODELS)]
    assert all(report["float64"].passed for report in reports), "\n".join(map(str, reports))
    cells = [f"{max(report['float64'].worst.radix for report in reports):.1e}"]
    for precision in ("float32", "bfloat16"):
        rungs = [report[precision] for report in reports]
        cells.append(both_errors([(rung.worst.radix, rung.worst_ordinary) for rung in rungs]))
        cells.append(both_errors([(rung.median_radix, rung.median_ordinary) for rung in rungs]))
    return cells


def both_errors(pairs: Sequence[tuple[float, float]]) -> str:
    """The errors of radix and of the ordinary arm in the median model."""
    assert statistics.median(radix / ordinary for radix, ordinary in pairs) <= 2, pairs
    radix, ordinary = (statistics.median(errors) for errors in zip(*pairs, strict=True))
    return f"{radix:.1e} / {ordinary:.1e}"


def test_the_batch_has_forks() -> None:
    calls = FORKING(FEATURES)["radix_runs_calls"]
    assert sum(num_runs for num_runs, _, keeps, _ in calls if keeps) == 2


def refusal_of(model: Any) -> str:
    """Why the model, or a radix batch on it, is refused; empty if neither is."""
    try:
        prepare_model(model)(**RadixCollator()(FEATURES))
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
    if not WRITING:
        for group, families in {"text": [*CORE, *REST], "multimodal": [*CORE_MULTIMODAL, *MULTIMODAL]}.items():
            assert sorted(table(group)) == sorted(family.name for family in families)


def test_no_class_of_transformers_is_left_out() -> None:
    maps = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    classes = {name for each in maps for name in each.values()}
    left_out = {name for names in NOT_TRIED.values() for name in names.split()}
    assert sorted(classes) == sorted({family.model_class for family in FAMILIES} | left_out)
    assert not [name for name in left_out if f"`{name}`" not in PAGE.read_text(encoding="utf-8")]


# One of each kind of layer that reaches a strategy with other arguments.
EVERY_STRATEGY = """Cohere 2, DeepSeek-V3, DiffLlama, Falcon-H1, Gemma 2, Gemma 3n, Gemma 4, GPT-2, GPT-BigCode,
    gpt-oss, Granite, LongCat-Flash, Mistral, Mixtral, Qwen3, Qwen3-Next, SmolLM3"""


@pytest.mark.parametrize("name", re.split(r",\s+", EVERY_STRATEGY))
@pytest.mark.parametrize("attention", ["path", "expand", "reference"])
def test_every_strategy(name: str, attention: str) -> None:
    model = named(name).build(seed=1)
    report = verify_equivalence(model, FEATURES, attention=attention, collator=FORKING, precisions=["float64"])
    assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)


def test_what_a_refusal_advises() -> None:
    """Nemotron-H Omni cannot be prepared, but the language model inside it can."""
    model = next(family for family in CORE_MULTIMODAL if family.name == "Nemotron-H Omni").build()
    with pytest.raises(UserError, match=r"prepare that one: prepare_model\(model\.language_model\)"):
        prepare_model(model)
    report = verify_equivalence(model.language_model, FEATURES, collator=FORKING, precisions=["float64"])
    assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)


WITH_ROUTER_LOSS = """ERNIE 4.5 MoE, FlexOLMo, gpt-oss, Granite MoE, JetMoE, MiniMax-M2, Mixtral, OLMoE, Phi-3.5-MoE,
    Qwen2-MoE, Qwen3-MoE, Qwen3-Next"""


@pytest.mark.parametrize("name", re.split(r",\s+", WITH_ROUTER_LOSS))
@pytest.mark.parametrize("pad_to_multiple_of", [None, 8])
def test_router_statistics_count_original_tokens(name: str, pad_to_multiple_of: int | None) -> None:
    """The load-balancing loss is no sum over tokens, so its oracle is the whole padded batch, mask and all."""
    model = named(name).build(output_router_logits=True, router_aux_loss_coef=1.0, aux_loss_coef=1.0)
    longest = max(len(feature["input_ids"]) for feature in FEATURES)
    padded = {
        name: torch.tensor([[*f[name], *[fill] * (longest - len(f[name]))] for f in FEATURES])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    mask = [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in FEATURES]
    batch = replace(FORKING, pad_to_multiple_of=pad_to_multiple_of)(FEATURES)
    with float64_throughout(model):
        truth = gradients_of(model, lambda: [model(**padded, attention_mask=torch.tensor(mask)).loss])
        radix = gradients_of(prepare_model(model), lambda: [model(**batch).loss])
        unique = gradients_of(model, lambda: [model(**batch).loss - model(**batch).aux_loss])
    restore_model(model)
    rung = compare_gradients("float64", truth, truth, radix)
    assert rung.passed and not rung.dead, rung.worst
    without = compare_gradients("float64", truth, truth, unique)
    assert without.worst.radix > 1e-3, "the router loss does not matter here, so nothing was tested"


def named(name: str) -> Family:
    return next(family for family in CORE if family.name == name)


def table(group: str) -> dict[str, list[str]]:
    """The page's rows of a group, by family."""
    block = PAGE.read_text(encoding="utf-8").split(f"<!-- {group}: begin -->")[1].split(f"<!-- {group}: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines()[2:]]
    return {row[0]: row for row in rows}


def check_row(group: str, row: list[str], record_property: Callable[[str, Any], None]) -> None:
    """The page says the same, but for the last digits, which are another machine's; or it is being written."""
    record_property("family", json.dumps([len(FAMILIES), group, *row]))
    if WRITING:
        return
    said = table(group).get(row[0], [])
    differs = f"docs/families.md has {said}, this run found {row}; RADIXTRAIN_WRITE_TABLE=1 writes it"
    assert [re.sub(NUMBER, "", cell) for cell in said] == [re.sub(NUMBER, "", cell) for cell in row], differs
    old, new = (re.findall(NUMBER, " ".join(cells)) for cells in (said, row))
    assert all(0.1 < float(x) / float(y) < 10 for x, y in zip(old, new, strict=True)), differs
