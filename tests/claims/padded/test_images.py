"""Padded calls with images under `share_prefixes`: positions and types that are given, outputs, and what is not shared.

That the gradient is the ordinary one is in tests/claims/equivalence/test_image_rows.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from radixtrain import position_wise, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.padded.causes import _of_pairs
from radixtrain.hf.pictures import _distinct
from tests.support.batches import IMAGE, KINDS, ROWS, Kind, Row, image_batch_of, of_family, squares
from tests.support.models import tiny_model
from tests.support.steps import in_float64
from tests.support.trainers import same_call

LLAVA = KINDS["LLaVA"]
BAR = 1e-12
IMAGES = {"image_outputs", "image_hidden_states", "image_pooler_output"}  # outputs; since 5.24, before that features
BOTH_WAYS = ["Gemma 3", "Gemma 4, in both directions"]


def call_of(kind: Kind, rows: list[Row] = ROWS) -> dict[str, Tensor]:
    """As a processor returns it."""
    inputs, _ = image_batch_of(kind, rows)
    return {**inputs, "pixel_values": inputs["pixel_values"].float()}


def reason_of(model: Any, inputs: dict[str, Tensor]) -> str:
    """Why a call is not shared, and runs as it is."""
    share_prefixes(model, min_ratio=0.0)
    model(**inputs, use_cache=False)
    (reason,) = sharing_report(model).not_shared
    return reason


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_text(name: str) -> None:
    """With types as processors return them; and two sequences in a row, longer than the window of some layers."""
    kind, ids = KINDS[name], torch.tensor([[7, 8, 9], [7, 8, 10]])
    inputs = {"input_ids": ids, kind.types: torch.zeros(2, 3).int()}
    assert same_call(kind.build(), inputs, ids != 0).num_unique_tokens == 4
    inputs[kind.types][0, :2] = 1  # two tokens that see each other
    assert same_call(kind.build(), inputs, ids != 0).num_unique_tokens == 6
    ids = torch.tensor([[*range(7, 16), *range(7, 15), 16, 17]])
    inputs = {"input_ids": ids, "position_ids": torch.tensor([[*range(9), *range(10)]])}
    assert same_call(kind.build(), inputs, ids != 0).num_unique_tokens == 8 + 1 + 2


def test_a_strategy_that_only_attends_backwards_is_refused() -> None:
    model = share_prefixes(KINDS["Gemma 3"].build(), attention="expand", min_ratio=0.0)
    with pytest.raises(UserError, match="attention='expand' only attends backwards, and the images of this batch"):
        model(**call_of(KINDS["Gemma 3"]), use_cache=False)


def of_images(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a backbone returns for images, by path: what its tower returned, or, before transformers 5.24, features."""
    output = model.model(**inputs, use_cache=False)
    entries = {name: {**each} if isinstance(each, Mapping) else each for name, each in output.items() if name in IMAGES}
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(entries)[0] if leaf is not None}


@pytest.mark.parametrize("rows", [ROWS, [[7, "A", 8], [7, "B", 8]]], ids=["copies", "no copies"])
@pytest.mark.parametrize("name", ["LLaVA", "InternVL", "Janus", "Idefics3", "Qwen2.5-VL", "Qwen3-VL", "Gemma 4"])
def test_the_features_of_every_image_are_returned(name: str, rows: list[Row]) -> None:
    """In the shapes and the dtypes in which the model returns them: some join the images, and cast under autocast.

    What has no entry for each image is left out if images are equal.
    """
    inputs, _ = image_batch_of(KINDS[name], rows)
    with in_float64(KINDS[name].build()) as pair:
        expected, found = (of_images(model, inputs) for model in (pair.ordinary, pair.shared))
        assert sharing_report(pair.shared).num_shared == 1
        assert {path for path in expected if "pooler" in path or rows is not ROWS} <= found.keys() <= expected.keys()
        for path in found:
            torch.testing.assert_close(found[path] + 0, expected[path], rtol=BAR, atol=BAR)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = call_of(KINDS[name], rows)
        expected, found = (of_images(model, inputs) for model in (pair.ordinary, pair.shared.float()))
    assert {path: each.dtype for path, each in found.items()} == {path: expected[path].dtype for path in found}


# What is not shared, and runs as it is.


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_packed_images_that_attend_in_both_directions(name: str) -> None:
    """transformers lets images see each other across sequences, and reads their blocks at positions."""
    inputs = call_of(KINDS[name], [[7, "A", "A", 9]])
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1] // 2).repeat(2)[None]
    del inputs["attention_mask"]
    reason = reason_of(KINDS[name].build().train(), inputs)
    assert reason == "a row has several sequences, and its images attend in both directions"


def test_sounds() -> None:
    """Which sound stands at a placeholder is not known."""
    model = tiny_model("VoxtralForConditionalGeneration", audio_token_id=IMAGE)
    width = 2 * model.config.audio_config.max_source_positions
    bands = model.config.audio_config.num_mel_bins
    ids = torch.tensor([[7, *[IMAGE] * (width * 32 // (2 * model.config.audio_config.intermediate_size)), 8]] * 2)
    sounds = torch.randn(1, bands, width).expand(2, -1, -1)
    assert reason_of(model, {"input_ids": ids, "input_features": sounds}) == "input_features is given"


def a_mean_of_all(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(0, keepdim=True)


@position_wise
def a_little_of_the_mean(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - 0.05 * output.mean(0, keepdim=True)


@position_wise
def attention(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """As if every picture were one sequence with the others."""
    rows = output.flatten(0, -2)[None]
    return output + nn.functional.scaled_dot_product_attention(rows, rows, rows).view_as(output)


@position_wise
def a_share_of_all(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / len(output)


@position_wise
def zeros(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0


MIXED = "their features change with other images"
HOOKS = [
    (a_mean_of_all, "code of a third party in"),
    *((mix, MIXED) for mix in (a_little_of_the_mean, attention, a_share_of_all)),
    (zeros, "their features do not depend on pixels"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hook", "reason"), HOOKS)
@pytest.mark.parametrize("name", ["Qwen3-VL", "Idefics3"])
def test_towers_that_compute_every_image(name: str, hook: Any, reason: str, dtype: torch.dtype) -> None:
    """A hook on the module that makes features for the decoder: it reads other images, or might."""
    kind = KINDS[name]
    model = kind.build().to(dtype).train()
    for path, module in model.named_modules():
        if path.endswith(("visual.merger", "connector")):
            module.register_forward_hook(hook)
    inputs, kept = image_batch_of(kind, ROWS)
    if dtype == torch.float64 and hook is not zeros:  # by which no gradient reaches the tower
        report = same_call(model, inputs, kept)
    else:
        report = sharing_report(share_prefixes(model, min_ratio=0.0))
        model(**{**inputs, "pixel_values": inputs["pixel_values"].to(dtype)}, use_cache=False)
    assert report.num_images == report.num_distinct_images > 0
    assert f"images, copies too: {reason}" in str(report)


def test_a_tower_whose_rows_stand_at_further_tokens() -> None:
    kind = of_family("Ovis 2", squares(28, 4))
    report = same_call(kind.build(), *image_batch_of(kind, ROWS))
    assert report.num_images == report.num_distinct_images


def test_a_tower_is_tried_once_in_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after transformers has put its own hooks into the model, in the first call.

    And not at all if its weights are spread over processes, which might wait for each other.
    """
    model = LLAVA.build().train()
    inputs, calls = call_of(LLAVA), list[int]()
    projector = share_prefixes(model, min_ratio=0.0).model.multi_modal_projector
    projector.register_forward_hook(position_wise(lambda *args: calls.append(1)))
    for mode, num_further in ((True, 4), (True, 4), (True, 1), (False, 4), (False, 1), (True, 1)):
        model.train(mode)(**inputs, use_cache=False)
        assert [calls.pop() for _ in range(num_further)] and not calls
    monkeypatch.setattr("radixtrain.hf.guards.model._is_whole", lambda backbone: False)
    model = share_prefixes(LLAVA.build(), min_ratio=0.0)
    model(**inputs, use_cache=False)
    assert "copies too: the weights are not whole in this process" in str(sharing_report(model))


@pytest.mark.parametrize("name", ["GOT-OCR 2", "LLaVA", "Qwen3-VL"])
def test_pixels_of_another_dtype(name: str) -> None:
    """GOT-OCR 2 casts them before its tower, others inside of it."""
    inputs, kept = image_batch_of(KINDS[name], ROWS)
    same_call(KINDS[name].build(), {**inputs, "pixel_values": inputs["pixel_values"].float()}, kept)


def test_placeholders_that_were_cut_off() -> None:
    """The model itself raises the error that it raises without us, and goes on with the next call."""
    inputs = call_of(KINDS["LLaVA"], [[7, 8, 9, "A"], [7, 8, 9, "A"]])
    cut = {name: value[:, :-1] if value.ndim == 2 else value for name, value in inputs.items()}
    model = share_prefixes(KINDS["LLaVA"].build(), min_ratio=0.0)
    with pytest.raises(ValueError, match="do not match"):
        model(**cut, use_cache=False)
    model(**inputs, use_cache=False)
    assert sharing_report(model).num_shared == 1


def test_placeholders_that_are_hidden() -> None:
    inputs, kept = image_batch_of(KINDS["LLaVA"], [[7, "A", 8], [7, "A", 8]])
    kept[0, :2] = False
    report = same_call(KINDS["LLaVA"].build(), {**inputs, "attention_mask": kept.long()}, kept)
    assert report.num_unique_tokens == 4 + 6


def test_positions_below_zero_and_images_that_are_nan() -> None:
    codes = _of_pairs(np.array([7, 7, 8]), np.array([5, -1, -1]))
    assert len(set(codes.tolist())) == 3, "7 at 5 is another token than 8 at -1"
    parts = [{"pixel_values": torch.tensor(row)} for row in ([1.0, float("nan")], [float("nan"), 1.0], [0.0], [-0.0])]
    assert _distinct([*parts, *parts])[0].tolist() == [0, 1, 2, 3] * 2, "by their bits"
