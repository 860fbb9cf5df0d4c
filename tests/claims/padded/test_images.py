"""Under `share_prefixes` rows with images have the ordinary gradient, and the tower computes each distinct image once.

In float64; the oracle is the model as it came from Hugging Face on the same batch. The mutations at the end are
mistakes of the plan, each of which the same check must see.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from image_batches import IMAGE, KINDS, OF_SIZES, ROWS, Kind, Row, batch_of, of_family, squares
from peft import LoraConfig, get_peft_model
from shared_runs import in_float64
from tiers import cases
from tiny_models import tiny_model
from torch import Tensor
from transformers.models.llava.modeling_llava import LlavaModel

from radixtrain import share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf import image_models, windows
from radixtrain.hf.padded.images import Images
from radixtrain.images import tokens, tower
from radixtrain.images.tensors import distinct_images
from radixtrain.images.tokens import ImageTokens
from radixtrain.images.tower import Tower
from radixtrain.tree.blocks import BlockLayout
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import gradients_of

pytestmark = pytest.mark.skipif(
    tower.FEATURES not in inspect.signature(LlavaModel.forward).parameters,
    reason="this transformers does not take the features of images ready made, so such calls run untouched",
)
BAR = 1e-12
QUICK = ["LLaVA", "Qwen3-VL", "Idefics3"]


def loss_of(model: Any, inputs: dict[str, Tensor], kept: Tensor) -> Tensor:
    logits = model(**inputs, use_cache=False).logits[kept]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    return (logits.log_softmax(-1) * weights).mean()


def check(
    kind: Kind,
    rows: Sequence[Row] = ROWS,
    left: bool = False,
    change: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> Any:
    """Assert equal gradients, that the batch was shared, and that the tower had each distinct image once."""
    inputs, kept = batch_of(kind, rows, left)
    model = change(kind.build())
    with in_float64(model) as pair:
        pair.share(**options)
        truth = gradients_of(pair.ordinary, lambda: [loss_of(pair.ordinary, inputs, kept)])
        towers: list[Tower] = []
        read = Tower.read
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tower, "read", lambda *args, **options: towers.append(read(*args, **options)) or towers[-1])
            found = gradients_of(pair.shared, lambda: [loss_of(pair.shared, inputs, kept)])
        report = sharing_report(pair.shared)
        assert report.num_shared == 1, str(report)
        rung = compare_gradients("float64", truth, truth, found)
        assert not rung.failed, rung.reason
        assert rung.worst.radix <= BAR, rung.worst
        assert abs(found.loss - truth.loss) <= BAR * abs(truth.loss)
        letters = [part for row in rows for part in row if isinstance(part, str)]
        if letters:
            assert len(towers) == 1
            assert (report.num_images, report.num_distinct_images) == (len(letters), len(set(letters)))
            assert towers[0].num_distinct == len(set(letters))
            assert any(re.search("vis|tower", tensor.name) for tensor in rung.alive), "no gradient reached the tower"
    return report


@pytest.mark.parametrize("name", cases(KINDS, QUICK))
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_the_gradient_is_the_ordinary_one(name: str, left: bool) -> None:
    report = check(KINDS[name], left=left)
    assert report.num_unique_tokens < report.num_tokens


BOTH_WAYS = ["Gemma 3", "Gemma 4, in both directions"]
NEIGHBOURS: list[Row] = [["A"], ["A", 8], [7, "B"], [7, "A"], [7, "A", "B"], [7, "A", "B", 9], [7, "A", 8]]


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("options", [{}, {"attention": "path"}, {"attention": "reference"}], ids=str)
def test_images_that_attend_in_both_directions(name: str, options: dict[str, str]) -> None:
    """An image, and images side by side, are shared as a whole or not at all. Longer than the window."""
    report = check(KINDS[name], NEIGHBOURS, **options)
    image = 16 if name == "Gemma 3" else 4
    assert report.num_unique_tokens == (image + 1) + 1 + image + (image + 1) + (2 * image + 1)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_without_types_images_attend_backwards(name: str) -> None:
    report = check(replace(KINDS[name], types=None), NEIGHBOURS)
    image = 16 if name == "Gemma 3" else 4
    assert report.num_unique_tokens == (image + 1) + 1 + image + (image + 1) + (image + 1)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_text_with_types_as_processors_return_them(name: str) -> None:
    inputs = {"input_ids": torch.tensor([[7, 8, 9], [7, 8, 10]]), KINDS[name].types: torch.zeros(2, 3).int()}
    kept = inputs["input_ids"] != 0
    with in_float64(KINDS[name].build()) as pair:
        truth = gradients_of(pair.ordinary, lambda: [loss_of(pair.ordinary, inputs, kept)])
        found = gradients_of(pair.shared, lambda: [loss_of(pair.shared, inputs, kept)])
        assert compare_gradients("float64", truth, truth, found).worst.radix <= BAR
        assert sharing_report(pair.shared).num_unique_tokens == 4
    inputs[KINDS[name].types][0, :2] = 1
    assert reason_of(KINDS[name].build().train(), inputs) == f"{KINDS[name].types} is given"


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_an_image_is_shared_only_if_all_its_positions_are(name: str) -> None:
    kind = KINDS[name]
    inputs, kept = batch_of(kind, [[7, "A", 8], [7, "A", 8]])
    positions = torch.arange(kept.shape[1]).repeat(2, 1)
    positions[1, 4:] += 3
    inputs["position_ids"] = positions
    with in_float64(kind.build()) as pair:
        truth = gradients_of(pair.ordinary, lambda: [loss_of(pair.ordinary, inputs, kept)])
        found = gradients_of(pair.shared, lambda: [loss_of(pair.shared, inputs, kept)])
        assert compare_gradients("float64", truth, truth, found).worst.radix <= BAR
        assert sharing_report(pair.shared).num_unique_tokens == 1 + 2 * (kept.shape[1] - 1)


def test_a_strategy_that_only_attends_backwards_is_refused() -> None:
    inputs, _ = batch_of(KINDS["Gemma 3"], ROWS)
    model = share_prefixes(KINDS["Gemma 3"].build().double(), attention="expand", min_ratio=0.0)
    with pytest.raises(UserError, match="attention='expand' only attends backwards, and the images of this batch"):
        model(**inputs, use_cache=False)


@pytest.mark.parametrize("name", cases([name for name, kind in KINDS.items() if kind.has_sizes], ["Qwen3-VL"]))
def test_images_of_different_sizes(name: str) -> None:
    check(KINDS[name], OF_SIZES)


def test_images_are_told_apart_by_their_bytes() -> None:
    """Alike rows behind different images share what stands before the images, and nothing after."""
    together = check(KINDS["LLaVA"], [[7, 8, "A", 9, 10], [7, 8, "B", 9, 10]])
    assert together.num_unique_tokens == 2 + 2 * (4 + 2)
    alone = check(KINDS["LLaVA"], [[7, 8, "A", 9, 10], [7, 8, "A", 9, 11]])
    assert alone.num_unique_tokens == 2 + 4 + 1 + 2


@pytest.mark.parametrize("name", cases(["Qwen3-VL", "Qwen2.5-VL", "GLM-4V"], ["Qwen3-VL"]))
def test_equal_pixels_on_different_grids_are_different_images(name: str) -> None:
    together = check(KINDS[name], [[7, 8, "V", 9, 10], [7, 8, "W", 9, 10]])
    assert together.num_unique_tokens == 3 + 2 * (4 + 2)


def frozen_tower(model: Any) -> Any:
    """Trained is its last layer only, so that a gradient still has to reach it."""
    model.model.visual.requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    return model


def with_lora(model: Any) -> Any:
    names = ["q_proj", "v_proj", "qkv"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False)).train()


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


OTHERS = [("Qwen3-VL", with_lora), ("Qwen3-VL", checkpointing), ("Qwen3-VL", frozen_tower)]
MORE = [("LLaVA", with_lora), ("LLaVA", checkpointing), ("Gemma 3", with_lora), ("Gemma 3", checkpointing)]


@pytest.mark.parametrize(("name", "change"), cases([*OTHERS, *MORE], OTHERS))
def test_with_lora_recomputed_activations_and_a_frozen_tower(name: str, change: Callable[[Any], Any]) -> None:
    check(KINDS[name], change=change)


def test_positions_that_are_given() -> None:
    """Rows with equal ids and images, of which one counts another axis differently, share nothing after that."""
    kind = KINDS["Qwen3-VL"]
    inputs, kept = batch_of(kind, [[7, "A", 8, 9], [7, "A", 8, 9]])
    model = kind.build()
    inputs["position_ids"] = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )[0].clone()
    inputs["position_ids"][2, 1, 3:] += 2
    with in_float64(model) as pair:
        truth = gradients_of(pair.ordinary, lambda: [loss_of(pair.ordinary, inputs, kept)])
        found = gradients_of(pair.shared, lambda: [loss_of(pair.shared, inputs, kept)])
        assert compare_gradients("float64", truth, truth, found).worst.radix <= BAR
        assert sharing_report(pair.shared).num_unique_tokens == 3 + 2 * (len(inputs["input_ids"][0]) - 3)


@pytest.mark.parametrize("name", ["LLaVA", "InternVL", "Janus"])
def test_the_features_of_every_image_are_returned(name: str) -> None:
    """In the shape and the dtype in which the model returns them: some join the images, and cast under autocast."""
    inputs, _ = batch_of(KINDS[name], ROWS)

    def features_of(*models: Any) -> list[Tensor]:
        return [model.model(**inputs, use_cache=False).image_hidden_states for model in models]

    with in_float64(KINDS[name].build()) as pair:
        expected, found = features_of(pair.ordinary, pair.shared)
        assert sharing_report(pair.shared).num_shared == 1
        assert found.shape == expected.shape
        torch.testing.assert_close(found + 0, expected, rtol=BAR, atol=BAR)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = features_of(pair.ordinary, pair.shared.float())
    assert found.dtype == expected.dtype


# What is not shared, and runs as it is.


def reason_of(model: Any, inputs: dict[str, Tensor]) -> str:
    share_prefixes(model, min_ratio=0.0)
    model(**inputs, use_cache=False)
    (reason,) = sharing_report(model).not_shared
    return reason


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_that_attend_in_both_directions_before_transformers_says_which(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    inputs, _ = batch_of(kind, ROWS)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    monkeypatch.setattr(image_models, "block_function_of", lambda backbone: None)
    assert reason_of(kind.build(), inputs) == f"{kind.types} is given"


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_packed_images_that_attend_in_both_directions(name: str) -> None:
    """transformers lets images see each other across sequences, and reads their blocks at positions."""
    kind = KINDS[name]
    inputs, _ = batch_of(kind, [[7, "A", "A", 9]])
    middle = inputs["input_ids"].shape[1] // 2
    inputs["position_ids"] = torch.arange(middle).repeat(2)[None]
    inputs["pixel_values"] = inputs["pixel_values"].float()
    del inputs["attention_mask"]
    reason = reason_of(kind.build().train(), inputs)
    assert reason == "a row has several sequences, and its images attend in both directions"


@pytest.mark.parametrize(("window", "is_shared"), [(15, False), (16, True)])
def test_images_that_see_each_other_beyond_a_window(window: int, is_shared: bool) -> None:
    """Of 16 tokens, in the unified Gemma 4."""
    kind = KINDS["Gemma 4 unified"]
    settings = {**kind.settings, "text_config": {**kind.settings["text_config"], "sliding_window": window}}
    kind = replace(kind, settings=settings)
    rows: list[Row] = [[7, "A", 8], [7, "A", 9], [8, "B"], ["A"], ["B"]]  # the last ones are neighbours
    if is_shared:
        check(kind, rows)
        return
    inputs, _ = batch_of(kind, rows)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    reason = reason_of(kind.build().train(), inputs)
    assert reason == "an image is longer than a window, beyond which its tokens see each other"


def test_sounds() -> None:
    """The backbone takes no features of sounds ready made."""
    model = tiny_model("VoxtralForConditionalGeneration", audio_token_id=IMAGE)
    width = 2 * model.config.audio_config.max_source_positions
    bands = model.config.audio_config.num_mel_bins
    ids = torch.tensor([[7, *[IMAGE] * (width * 32 // (2 * model.config.audio_config.intermediate_size)), 8]] * 2)
    sounds = torch.randn(1, bands, width).expand(2, -1, -1)
    assert reason_of(model, {"input_ids": ids, "input_features": sounds}) == "input_features is given"


def test_images_of_several_tensors_for_a_placeholder() -> None:
    kind = of_family("Ovis 2", squares(28, 4))
    inputs, _ = batch_of(kind, ROWS)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    assert "reads more than one row for each placeholder" in reason_of(kind.build(), inputs)


def test_a_tower_whose_features_depend_on_the_batch() -> None:
    model = KINDS["LLaVA"].build()
    model.model.vision_tower.norm = torch.nn.BatchNorm1d(3)
    inputs, _ = batch_of(KINDS["LLaVA"], ROWS)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    assert "batch norms" in reason_of(model, inputs)


@pytest.mark.parametrize("place", ["module", "setting", "attribute"])
def test_a_tower_that_draws(place: str) -> None:
    """Of the tower only: the rest of the model is in evaluation mode."""
    model = KINDS["LLaVA"].build().eval()
    tower = model.model.vision_tower.train()
    if place == "module":
        tower.dropout = torch.nn.Dropout(0.1)
    elif place == "setting":
        model.model.config.vision_config.attention_dropout = 0.1
    else:
        tower.drop_path_rate = 0.1
    inputs, _ = batch_of(KINDS["LLaVA"], ROWS)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    assert "draws at random" in reason_of(model, inputs)


def two_rows() -> dict[str, Any]:
    inputs, _ = batch_of(KINDS["LLaVA"], [[7, 8, "A", 9], [7, 8, "B", 9]])
    return {**inputs, "pixel_values": inputs["pixel_values"].float()}


def test_pixels_that_are_learned() -> None:
    """Each copy of an image has a gradient of its own."""
    inputs = two_rows()
    inputs["pixel_values"].requires_grad_()
    assert "images that require a gradient" in reason_of(KINDS["LLaVA"].build(), inputs)


def test_features_that_are_given() -> None:
    model, inputs = KINDS["LLaVA"].build(), two_rows()
    given = {"image": model.model.get_image_features(inputs.pop("pixel_values"), return_dict=True)}
    assert reason_of(model, {**inputs, "mm_encoder_outputs": given}) == "mm_encoder_outputs is given"


@pytest.mark.parametrize("letters", ["AA", "AB"])
def test_placeholders_that_were_cut_off(letters: str) -> None:
    """The model itself raises the error that it raises without us."""
    inputs, _ = batch_of(KINDS["LLaVA"], [[7, 8, 9, letters[0]], [7, 8, 9, letters[1]]])
    cut = {name: value[:, :-1] if value.ndim == 2 else value.float() for name, value in inputs.items()}
    model = share_prefixes(KINDS["LLaVA"].build(), min_ratio=0.0)
    with pytest.raises(ValueError, match="do not match"):
        model(**cut, use_cache=False)
    assert list(sharing_report(model).not_shared) == ["6 placeholders of images for 8 features"]


def test_positions_below_zero_and_images_that_are_nan() -> None:
    tokens = ImageTokens(np.array([7, 7, 8]), np.zeros(3, bool), np.zeros(0, int), np.array([5, -1, -1]), None)
    assert len(set(tokens.codes.tolist())) == 3, "7 at 5 is another token than 8 at -1"
    parts = [{"pixel_values": torch.tensor(row)} for row in ([1.0, float("nan")], [float("nan"), 1.0], [0.0], [-0.0])]
    assert distinct_images([*parts, *parts])[0].tolist() == [0, 1, 2, 3] * 2, "by their bits"


def test_embeddings_without_ids() -> None:
    model = KINDS["LLaVA"].build()
    embeddings = model.get_input_embeddings()(torch.tensor([[7, 8, 9]])).detach()
    assert "inputs_embeds are given" in reason_of(model, {"inputs_embeds": embeddings})


# Mistakes.


def mistaken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, changed: Callable[..., Any]) -> None:
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: changed(real, *args, **kwargs))


def all_one(real: Any, parts: Any) -> Any:
    """Every image is the first one."""
    return np.zeros(len(parts), dtype=np.int64), [0]


def shapes_only(real: Any, parts: Any) -> Any:
    """Images are compared without their pixels."""
    return real([{name: torch.zeros_like(part) for name, part in image.items()} for image in parts])


def of_one_copy(real: Any, tower: Tower, rows: Any) -> Any:
    """The gradient of the tower is that of the first placeholder of each row only."""
    output = real(tower, rows)
    _, first = np.unique(rows.numpy(), return_index=True)
    is_first = torch.zeros(len(rows), 1, dtype=torch.bool)
    is_first[torch.from_numpy(first)] = True
    (pooled,) = output.pooler_output
    output.pooler_output = (torch.where(is_first, pooled, pooled.detach()),)
    return output


def one_place_further(real: Any, tower: Tower, rows: Any) -> Any:
    return real(tower, rows.roll(1))


def deepstack_of_another_place(real: Any, tower: Tower, rows: Any) -> Any:
    output = real(tower, rows)
    output.deepstack_features = [(each[0].flip(0),) for each in output.deepstack_features]
    return output


def deepstack_in_another_order(real: Any, tower: Tower, rows: Any) -> Any:
    output = real(tower, rows)
    output.deepstack_features = output.deepstack_features[::-1]
    return output


def detached(real: Any, tower: Tower, rows: Any) -> Any:
    output = real(tower, rows)
    output.pooler_output = tuple(each.detach() for each in output.pooler_output)
    return output


def ids_only(real: Any, *args: Any) -> Any:
    """Tokens are compared without the images behind them."""
    found = real(*args)
    found.tokens.codes[found.tokens.is_image] = 10_000
    return found


def without_positions(real: Any, *args: Any) -> Any:
    """Positions are counted along each row."""
    found = real(*args)
    found.tokens.positions = None
    return found


def of_the_next_token(real: Any, *args: Any) -> Any:
    given = real(*args)
    given["position_ids"] = given["position_ids"].roll(1, -1)
    return given


def one_axis(real: Any, *args: Any) -> Any:
    """All three axes are the first one."""
    given = real(*args)
    given["position_ids"] = given["position_ids"][:1].expand(3, -1, -1)
    return given


def without_blocks(real: Any, codes: Any, blocks: Any) -> Any:
    """Tokens of an image are shared although another image follows it."""
    return np.minimum(blocks, 0)


def one_block(real: Any, blocks: Any) -> Any:
    """Images of two rows that are neighbours among the unique tokens are one."""
    return real(np.minimum(blocks, 0))


def without_the_last_rows(real: Any, blocks: Any) -> Any:
    """The last row of each image attends only backwards, and none to it."""
    return real(np.where(blocks == np.roll(blocks, -1), blocks, -1))


def in_every_layer(real: Any, *args: Any) -> Any:
    return True, real(*args)[1]


def without_a_window(real: Any, *args: Any) -> Any:
    return real(*args)[0], 0


OF_TOWERS: list[tuple[Any, str, Any]] = [
    (tower, "distinct_images", all_one),
    (tower, "distinct_images", shapes_only),
    *((Tower, "features_at", change) for change in (of_one_copy, one_place_further, deepstack_of_another_place)),
    *((Tower, "features_at", change) for change in (deepstack_in_another_order, detached)),
    (Images, "in_place_of", of_the_next_token),
    (Images, "in_place_of", one_axis),
    (Images, "read", ids_only),
    (Images, "read", without_positions),
]
OF_BOTH_WAYS: list[tuple[Any, str, Any]] = [
    (tokens, "whole_blocks", without_blocks),
    (BlockLayout, "of", one_block),
    (BlockLayout, "of", without_the_last_rows),
    (windows, "_seen", in_every_layer),
    (windows, "_seen", without_a_window),
]
MISTAKES = [
    *(("Qwen3-VL", ROWS, *mistake) for mistake in OF_TOWERS),
    *(("Gemma 4, in both directions", NEIGHBOURS, *mistake) for mistake in OF_BOTH_WAYS),
]


@pytest.mark.parametrize(
    ("kind", "rows", "owner", "name", "changed"), MISTAKES, ids=[each[-1].__name__ for each in MISTAKES]
)
def test_a_mistake_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: list[Row], owner: Any, name: str, changed: Any
) -> None:
    mistaken(monkeypatch, owner, name, changed)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(KINDS[kind], rows)
