"""What makes two tokens one at the text decoder: one test for each sentence of `radixtrain/hf/padded/causes.py`.

Equal gradients are those of the untouched model in float64. Each mistake at the end must be seen by one of the tests.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from radixtrain import position_wise, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf import pictures
from radixtrain.hf.padded import causes
from radixtrain.hf.padded.causes import OTHER_MASK, READS_GRADIENT, TOLD_APART, UNSEEN_TOWER, Causes
from radixtrain.verification.oracle import float64_throughout
from tests.claims.mistakes import SEEN, plant, returning
from tests.support.batches import KINDS, ROWS, Kind, image_batch_of
from tests.support.models import tiny_model
from tests.support.steps import same_gradient
from tests.support.trainers import same_call

QWEN, LLAVA = KINDS["Qwen3-VL"], KINDS["LLaVA"]
TWICE = [[7, "A", 8, 9], [7, "A", 8, 10]]


def shared(model: Any) -> Any:
    return share_prefixes(model, min_ratio=0.0)


def unshared(model: Any, inputs: dict[str, Tensor], kept: Tensor, share: Callable[[Any], Any] = shared) -> str:
    """Assert equal gradients of a call that is not shared, and return why."""

    def loss_of(model: Any) -> Tensor:
        torch.manual_seed(0)
        logits = model(**inputs, use_cache=False).logits[kept]
        return (logits.log_softmax(-1) * torch.linspace(0, 1, logits.numel()).view(logits.shape)).mean()

    same_gradient(model, loss_of, share)
    (reason,) = sharing_report(model).not_shared
    assert not sharing_report(model).num_shared
    return reason


# Causes.


def test_two_ids_with_equal_embeddings_are_two() -> None:
    """Behind a tower, where the decoder gets no ids, as in a model of text."""
    ids = torch.tensor([[7, 8, 3], [7, 9, 3]])
    for model in (LLAVA.build(), tiny_model("Qwen3ForCausalLM")):
        with torch.no_grad():
            model.get_input_embeddings().weight[9] = model.get_input_embeddings().weight[8]
        assert same_call(model, {"input_ids": ids}, ids != 0).num_unique_tokens == 5


def test_two_pictures_behind_a_projector_of_zeros_are_two() -> None:
    model = LLAVA.build()
    for parameter in model.model.multi_modal_projector.linear_2.parameters():
        nn.init.zeros_(parameter)
    inputs, kept = image_batch_of(LLAVA, [[7, "A", 8], [7, "B", 8]])
    # The gradient of the tower is zero here, that of the projector is not.
    loss = lambda model: model(**inputs, use_cache=False).logits[kept].log_softmax(-1)[:, ::3].mean()  # noqa: E731
    same_gradient(model, loss, shared)
    assert sharing_report(model).num_unique_tokens == 1 + 2 * (4 + 1)


AXES: list[tuple[str, Any, int]] = [("Qwen3-VL", axis, 4) for axis in range(3)]
AXES += [(name, ..., 1) for name in ("Gemma 3", "Gemma 4, in both directions")]  # whose blocks count as a whole


@pytest.mark.parametrize(("name", "axis", "num_shared"), AXES)
def test_the_position_on_each_axis(name: str, axis: Any, num_shared: int) -> None:
    """Equal ids and pictures, and other positions on one axis from the second feature on."""
    model, (inputs, kept) = KINDS[name].build(), image_batch_of(KINDS[name], [[7, "A", 8], [7, "A", 8]])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    if axis is ...:
        positions = torch.arange(kept.shape[1]).repeat(2, 1)
    else:
        positions = model.model.get_rope_index(**{name: inputs[name] for name in names})[0].clone()
    positions[axis, 1, 4:] += 3
    report = same_call(model, {**inputs, "position_ids": positions}, kept)
    assert report.num_unique_tokens == num_shared + 2 * (kept.shape[1] - num_shared)


def after_each_place(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A hook that tells equal tokens apart: each row of the output gets another multiple."""
    rows = output.flatten(0, -2)
    return (rows * torch.linspace(1, 2, len(rows), dtype=rows.dtype)[:, None]).view(output.shape)


# What stands between the ids and the decoder, and gradients that are read there.


def change_deep_features(decoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    levels = given["deepstack_visual_embeds"]
    return args, {**given, "deepstack_visual_embeds": [levels[0], after_each_place(decoder, args, levels[1])]}


def of_deep_features(model: Any) -> None:
    """What the tower returns for each image goes into the decoder layers too, and there only it is changed."""
    model.model.language_model.register_forward_pre_hook(change_deep_features, with_kwargs=True)


def of_embeddings(hook: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda model: model.get_input_embeddings().register_forward_hook(hook)


def noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + torch.rand_like(output)


def keep_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    output.retain_grad()


def hook_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(torch.neg)


def a_tower_that_draws(model: Any) -> None:
    """Not in its trial, as a tower that draws seldom."""
    model.model.multi_modal_projector.register_forward_hook(
        position_wise(lambda module, args, output: nn.functional.dropout(output, 0.5 * torch.is_grad_enabled()))
    )


def backward_hook_at(part: str) -> Callable[[Any], None]:
    return lambda model: model.model.get_submodule(part).register_full_backward_hook(lambda *_: None)


def longer_than_its_window() -> Kind:
    """Of the unified Gemma 4, whose images of 16 tokens see each other beyond 15."""
    kind = KINDS["Gemma 4 unified"]
    return replace(
        kind, settings={**kind.settings, "text_config": {**kind.settings["text_config"], "sliding_window": 15}}
    )


UNSHARED: dict[str, tuple[Kind, Callable[[Any], None], str]] = {
    "deep features that differ": (QWEN, of_deep_features, TOLD_APART),
    "a hook": (LLAVA, of_embeddings(after_each_place), TOLD_APART),
    "noise": (LLAVA, of_embeddings(noise), TOLD_APART),
    "a tower that draws": (LLAVA, a_tower_that_draws, TOLD_APART),
    "a gradient that is kept": (LLAVA, of_embeddings(keep_gradient), READS_GRADIENT),
    "a hook of a gradient": (LLAVA, of_embeddings(hook_gradient), READS_GRADIENT),
    "a backward hook of the projector": (LLAVA, backward_hook_at("multi_modal_projector"), READS_GRADIENT),
    "a backward hook of the embedding": (LLAVA, backward_hook_at("language_model.embed_tokens"), READS_GRADIENT),
    "an image that is longer than its window": (longer_than_its_window(), lambda model: None, OTHER_MASK),
}


@pytest.mark.parametrize("name", UNSHARED)
def test_what_is_not_shared(name: str) -> None:
    kind, change, reason = UNSHARED[name]
    change(model := kind.build().train())
    assert unshared(model, *image_batch_of(kind, TWICE)) == reason


def test_what_treats_each_token_alike_before_the_decoder_is_shared() -> None:
    model = LLAVA.build().train()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)
    model.model.multi_modal_projector.register_forward_hook(position_wise(lambda module, args, output: output.tanh()))
    assert same_call(model, *image_batch_of(LLAVA, TWICE)).num_unique_tokens == 1 + 4 + 1 + 2


def test_batch_norms_of_a_tower_see_every_image() -> None:
    """Their statistics are those of all copies, whether the call is shared or not."""
    inputs, kept = image_batch_of(LLAVA, [*TWICE, [7, "B", 8]])
    found = []
    for share in (lambda model: model, shared):
        model = LLAVA.build().train()
        model.model.multi_modal_projector.norm = nn.BatchNorm1d(32)
        model.model.multi_modal_projector.register_forward_hook(normed)
        with float64_throughout(model):
            share(model)(**inputs, use_cache=False).logits[kept].log_softmax(-1)[:, ::3].mean().backward()
            mean = model.model.multi_modal_projector.norm.running_mean.clone()
            found.append([mean, *(parameter.grad for parameter in model.parameters())])
    for ordinary, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, ordinary, rtol=1e-11, atol=1e-16)


@position_wise
def normed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return module.norm(output.flatten(0, -2)).view(output.shape)  # type: ignore[operator]


def test_pixels_that_are_learned_have_a_gradient_for_each_copy() -> None:
    inputs, kept = image_batch_of(LLAVA, TWICE)
    model, found = LLAVA.build().double(), []
    for share in (lambda model: model, shared):
        pixels = inputs["pixel_values"].clone().requires_grad_()
        logits = share(model)(**{**inputs, "pixel_values": pixels}, use_cache=False).logits[kept]
        logits.log_softmax(-1)[:, ::3].mean().backward()
        found.append(pixels.grad)
    assert sharing_report(model).num_shared == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-18)


def test_a_tower_that_is_not_seen() -> None:
    """As in a model that was pickled with its hooks."""

    def share(model: Any) -> Any:
        share_prefixes(model, min_ratio=0.0)
        model.model.get_image_features = MethodType(type(model.model).get_image_features, model.model)
        return model

    assert unshared(LLAVA.build(), *image_batch_of(LLAVA, ROWS), share) == UNSEEN_TOWER


@pytest.mark.parametrize("name", ["LLaVA", "Qwen3-VL", "Gemma 3", "Gemma 4", "Idefics3"])
def test_a_plain_lookup_needs_ids_only(name: str) -> None:
    """In a call without images no bits are compared and no mask is proved, for which the host would wait."""
    waits: list[Any] = []
    model = shared(KINDS[name].build().train())
    with pytest.MonkeyPatch.context() as patch:
        for owner, function in ((causes, "bits_of"), (Causes, "_proved_window")):
            plant(patch, owner, function, lambda real, *args: (waits.append(real), real(*args))[1])
        model(**TEXT, use_cache=False)
        assert sharing_report(model).num_shared == 1 and not waits
        model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)
        model(**TEXT, use_cache=False)
        assert sharing_report(model).num_shared == 2 and waits


# Gradients at the embeddings that are wanted after the decoder ran.


TEXT = {"input_ids": torch.tensor([[7, 8, 9], [7, 8, 10]]), "attention_mask": torch.ones(2, 3).long()}
IMAGES = {name: x.float() if x.is_floating_point() else x for name, x in image_batch_of(LLAVA, TWICE)[0].items()}
READERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "retain_grad": lambda x, loss: (x.retain_grad(), loss.backward()),
    "a hook": lambda x, loss: (x.register_hook(torch.neg), loss.backward()),
    "autograd.grad": lambda x, loss: torch.autograd.grad(loss, x),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("inputs", [TEXT, IMAGES], ids=["text", "images"])
def test_a_gradient_read_late_where_ids_are_embedded(inputs: dict[str, Tensor], reader: str) -> None:
    model, embedded = LLAVA.build().train(), list[Tensor]()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: embedded.append(output))
    loss = shared(model)(**inputs, use_cache=False).logits.sum()
    with pytest.raises(UserError, match="a gradient is read at inputs_embeds"):
        READERS[reader](embedded[0], loss)  # later ones are of the trial of the model


# Mistakes. Each changes what the real function returns.


def equal_embeddings_are_one(real: Any, self: Causes) -> Any:
    codes, ids = real(self), self.batch.input_ids[self.batch.attended]
    return np.where(ids == 9, codes[ids == 8][0], codes)


def no_bits_of(name: str) -> Callable[..., Any]:
    def mistake(real: Any, self: Causes, plan: Any) -> Any:
        kept = dict(self.given), dict(self.per_token)
        self.given, self.per_token = dict(self.given), dict(self.per_token)
        self.given.pop(name, None), self.per_token.pop(name, None)
        real(self, plan)
        self.given, self.per_token = kept

    return mistake


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], Callable[[], Any]]] = {
    "equal embeddings are one": (
        *(Causes, "codes", equal_embeddings_are_one),
        test_two_ids_with_equal_embeddings_are_two,
    ),
    "every picture is the first": (
        *(pictures, "_distinct", lambda real, each: (np.zeros(len(each), int), [0])),
        test_two_pictures_behind_a_projector_of_zeros_are_two,
    ),
    "ids and pictures only": (
        *(causes, "_of_pairs", lambda real, codes, others: codes),
        lambda: test_the_position_on_each_axis("Qwen3-VL", 0, 4),
    ),
    "deep features are not compared": (
        *(Causes, "check_bits", no_bits_of("deepstack_visual_embeds")),
        lambda: test_what_is_not_shared("deep features that differ"),
    ),
    "embeddings are not compared": (
        *(Causes, "check_bits", no_bits_of("inputs_embeds")),
        lambda: test_what_is_not_shared("a hook"),
    ),
    "images that are not seen are ids": (
        *(causes, "OF_PICTURES", returning(())),
        test_a_tower_that_is_not_seen,
    ),
    "a tower's draws are those of the distinct images": (
        *(pictures, "has_drawn", returning(False)),
        lambda: test_what_is_not_shared("a tower that draws"),
    ),
    "batch norms see each image once": (
        *(pictures, "_what_features_show", returning(None)),
        test_batch_norms_of_a_tower_see_every_image,
    ),
    "copies of learned pixels are one": (
        *(pictures, "_each_has_its_gradient", returning(False)),
        test_pixels_that_are_learned_have_a_gradient_for_each_copy,
    ),
    "no one reads a gradient": (
        *(causes, "_is_read", returning(False)),
        lambda: test_what_is_not_shared("a gradient that is kept"),
    ),
    "no one asks autograd": (
        *(causes, "_is_wanted", returning(False)),
        lambda: test_a_gradient_read_late_where_ids_are_embedded(IMAGES, "autograd.grad"),
    ),
    "masks are not compared": (
        *(Causes, "_is_within", returning(True)),
        lambda: test_what_is_not_shared("an image that is longer than its window"),
    ),
    "every lookup is not plain": (
        *(causes, "is_plain", returning(False)),
        lambda: test_a_plain_lookup_needs_ids_only("LLaVA"),
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    *planted, check = MISTAKES[what]
    plant(monkeypatch, *planted)
    with pytest.raises(SEEN):
        check()
