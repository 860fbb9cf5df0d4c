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
from torch.utils._python_dispatch import TorchDispatchMode

from radixtrain import position_wise, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf import pictures
from radixtrain.hf.padded import causes
from radixtrain.hf.padded.causes import OTHER_MASK, READS_GRADIENT, TOLD_APART, UNSEEN_TOWER, Causes
from radixtrain.verification.oracle import float64_throughout
from tests.claims.mistakes import SEEN, plant, returning
from tests.support.batches import KINDS, ROWS, image_batch_of
from tests.support.models import tiny_model
from tests.support.steps import same_gradient
from tests.support.trainers import same_call

QWEN, LLAVA, GEMMA = (KINDS[name] for name in ("Qwen3-VL", "LLaVA", "Gemma 3"))
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


def test_the_position_on_each_axis() -> None:
    """Equal ids and pictures, and other positions on one axis from the second feature on."""
    inputs, kept = image_batch_of(QWEN, [[7, "A", 8], [7, "A", 8]])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    for axis in range(3):
        model = QWEN.build()
        inputs["position_ids"] = model.model.get_rope_index(**{name: inputs[name] for name in names})[0].clone()
        inputs["position_ids"][axis, 1, 4:] += 3
        assert same_call(model, inputs, kept).num_unique_tokens == 4 + 2 * (kept.shape[1] - 4)


def after_each_place(module: nn.Module, output: Any) -> Any:
    """Something that tells equal tokens apart: each row of the output gets another multiple."""
    rows = output.flatten(0, -2)
    return (rows * torch.linspace(1, 2, len(rows), dtype=rows.dtype)[:, None]).view(output.shape)


def test_deep_features_that_differ_are_seen() -> None:
    model = QWEN.build()
    # What the tower returns for each image goes into the decoder layers too, and there only it is changed.
    model.model.language_model.register_forward_pre_hook(change_deep_features, with_kwargs=True)
    assert unshared(model, *image_batch_of(QWEN, TWICE)) == TOLD_APART


def change_deep_features(decoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    levels = given["deepstack_visual_embeds"]
    return args, {**given, "deepstack_visual_embeds": [levels[0], after_each_place(decoder, levels[1])]}


# What stands between the ids and the decoder.


def a_hook(model: Any) -> None:
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: after_each_place(module, output))


def noise(model: Any) -> None:
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + torch.rand_like(output))


def a_tower_that_draws(model: Any) -> None:
    """Not in its trial, as a tower that draws seldom."""
    model.model.multi_modal_projector.register_forward_hook(
        position_wise(lambda module, args, output: nn.functional.dropout(output, 0.5 * torch.is_grad_enabled()))
    )


@pytest.mark.parametrize("change", [a_hook, noise, a_tower_that_draws])
def test_what_tells_equal_tokens_apart_before_the_decoder(change: Callable[[Any], None]) -> None:
    model = LLAVA.build().train()
    change(model)
    assert unshared(model, *image_batch_of(LLAVA, TWICE)) == TOLD_APART


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


# Waits.


@position_wise
class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers that are read, and copies to the host."""

    OPS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.OPS:
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


def waits_of(model: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the waits of a call, after one that has made what a model makes once."""
    model(**inputs, use_cache=False)
    copies: list[Any] = []
    real = Tensor.cpu
    with monkeypatch.context() as patched, Waits() as waits:
        patched.setattr(Tensor, "cpu", lambda self, *args: (copies.append(self), real(self, *args))[1])
        model(**inputs, use_cache=False)
    return len(waits.ops) + len(copies)


@pytest.mark.parametrize("name", ["LLaVA", "Qwen3-VL", "Gemma 3", "Gemma 4", "Idefics3"])
def test_a_plain_lookup_needs_ids_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without images waits no more often than one of its text decoder, which gets ids."""
    inputs = {**TEXT, "attention_mask": torch.ones(2, 3).long()}

    def further(part_of: Callable[[Any], Any], change: Callable[[Any], Any]) -> int:
        """Count the waits that sharing adds."""
        ordinary, model = (part_of(change(KINDS[name].build().train())) for _ in range(2))
        waits = waits_of(ordinary, inputs, monkeypatch)
        further = waits_of(share_prefixes(model, min_ratio=0.0), inputs, monkeypatch) - waits
        assert sharing_report(model).num_shared == 2
        return further

    of_text = further(lambda model: model.model.get_decoder(), lambda model: model)
    assert further(lambda model: model, lambda model: model) <= of_text
    assert further(lambda model: model, doubled) > of_text, "after a hook the bits are compared"


def doubled(model: Any) -> Any:
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)
    return model


# Gradients at the embeddings.


def keep_gradient(x: Tensor, kept: list[Tensor]) -> None:
    x.retain_grad()
    kept.append(x)


def hook_gradient(x: Tensor, kept: list[Tensor]) -> None:
    x.register_hook(kept.append)


TEXT = {"input_ids": torch.tensor([[7, 8, 9], [7, 8, 10]])}
IMAGES = {name: x.float() if x.is_floating_point() else x for name, x in image_batch_of(LLAVA, TWICE)[0].items()}


@pytest.mark.parametrize("reader", [keep_gradient, hook_gradient])
@pytest.mark.parametrize("inputs", [TEXT, IMAGES], ids=["text", "images"])
def test_a_gradient_read_where_ids_are_embedded(inputs: dict[str, Tensor], reader: Callable[..., Any]) -> None:
    """Known before the decoder runs, so that the call is not shared; else the backward pass is refused."""
    model, seen, embedded = LLAVA.build().train(), list[Tensor](), list[Tensor]()
    embedding = model.get_input_embeddings()
    early = embedding.register_forward_hook(lambda module, args, output: reader(output, seen))
    shared(model)(**inputs, use_cache=False).logits.sum().backward()
    assert list(sharing_report(model).not_shared) == [READS_GRADIENT] and seen
    early.remove()
    embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    logits = model(**inputs, use_cache=False).logits
    reader(embedded[0], seen)  # later ones are of the trial of the model
    with pytest.raises(UserError, match="a gradient is read at inputs_embeds"):
        logits.sum().backward()


@pytest.mark.parametrize("part", ["multi_modal_projector", "language_model.embed_tokens"])
def test_a_backward_hook_before_the_decoder(part: str) -> None:
    """It gets the gradients of the untouched model."""
    found = []
    for share in (lambda model: model, shared):
        torch.manual_seed(0)
        model, seen = LLAVA.build().train().double(), list[Tensor]()
        module = model.model.get_submodule(part)
        module.register_full_backward_hook(lambda module, inner, outer, seen=seen: seen.append(outer[0]))
        inputs, kept = image_batch_of(LLAVA, TWICE)
        share(model)(**inputs, use_cache=False).logits[kept].log_softmax(-1)[:, ::3].mean().backward()
        found.append(seen)
    assert len(found[0]) == len(found[1]) and list(sharing_report(model).not_shared) == [READS_GRADIENT]
    assert all(map(torch.equal, *found))


def test_a_gradient_asked_of_autograd_where_ids_are_embedded() -> None:
    model, embedded = LLAVA.build().train(), list[Tensor]()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: embedded.append(output))
    loss = shared(model)(**TEXT, use_cache=False).logits.sum()
    with pytest.raises(UserError, match="a gradient is read at inputs_embeds"):
        torch.autograd.grad(loss, embedded)


def test_an_image_that_is_longer_than_its_window() -> None:
    """Of the unified Gemma 4, whose images of 16 tokens see each other beyond 15."""
    kind = KINDS["Gemma 4 unified"]
    settings = {**kind.settings, "text_config": {**kind.settings["text_config"], "sliding_window": 15}}
    assert unshared(replace(kind, settings=settings).build(), *image_batch_of(kind, TWICE)) == OTHER_MASK


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
        test_the_position_on_each_axis,
    ),
    "deep features are not compared": (
        *(Causes, "check_bits", no_bits_of("deepstack_visual_embeds")),
        test_deep_features_that_differ_are_seen,
    ),
    "embeddings are not compared": (
        *(Causes, "check_bits", no_bits_of("inputs_embeds")),
        lambda: test_what_tells_equal_tokens_apart_before_the_decoder(a_hook),
    ),
    "images that are not seen are ids": (
        *(causes, "OF_PICTURES", returning(())),
        test_a_tower_that_is_not_seen,
    ),
    "a tower's draws are those of the distinct images": (
        *(pictures, "has_drawn", returning(False)),
        lambda: test_what_tells_equal_tokens_apart_before_the_decoder(a_tower_that_draws),
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
        lambda: test_a_gradient_read_where_ids_are_embedded(IMAGES, keep_gradient),
    ),
    "no one asks autograd": (
        *(causes, "_is_wanted", returning(False)),
        test_a_gradient_asked_of_autograd_where_ids_are_embedded,
    ),
    "masks are not compared": (
        *(Causes, "_is_within", returning(True)),
        test_an_image_that_is_longer_than_its_window,
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    *planted, check = MISTAKES[what]
    plant(monkeypatch, *planted)
    with pytest.raises(SEEN):
        check()


def test_every_embedding_is_compared_if_its_lookup_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of `test_a_plain_lookup_needs_ids_only`: to take every lookup for one that is not plain."""
    plant(monkeypatch, causes, "is_plain", returning(False))
    with pytest.raises(AssertionError):
        test_a_plain_lookup_needs_ids_only("LLaVA", monkeypatch)
