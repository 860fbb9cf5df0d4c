"""The parts of a Hugging Face model: its backbone, its text decoder, what its layers do; and renamed names.

    PeftModel, PeftMixedModel          a wrapper
      Gemma3ForConditionalGeneration   the model: backbone and head       `pretrained_model_of`
        Gemma3Model                    the backbone, hooks sit here       `backbone_of`
          Gemma3TextModel              the text decoder, layers are here  `text_decoder_of`

In a text-only model the backbone is the text decoder. `parts_of` finds all three.

What an object shows comes before its name: a cache is a `Cache`, an argument has an annotation. So the next renaming
mostly changes nothing.

What a module does is judged by the attributes and globals that the code of its class names, and by what these globals
are. Nothing reads source text or the names of local variables, so neither a comment nor a renamed variable changes an
answer, and a class typed into a shell has one. A method that was replaced earlier is read as it is now.

A *mixer* is a module whose own code speaks the cache protocol of `recurrent.py`, so it carries a state from
token to token. None is known by name. A *layer* is a decoder layer, the element of an `nn.ModuleList`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.tree.layout import TreeLayout

logger = logging.getLogger(__name__)
NOT_TEXT = re.compile("vision|image|visual|audio")
# Names of transformers that a release has changed, the newest spelling first. Others have one spelling from 5.2 on.
CACHE = ("cache", "past_key_values", "cache_params")  # an argument of models and layers, an output; since 5.24
IMAGE_TOKEN = ("image_token_id", "image_token_index")  # a setting; some configurations have both
START_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # methods; since 5.23
STOP_CHECKPOINTING = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
OF_OLDER_MASKS = ("cache_position", "allow_torch_fix")  # keywords of a mask function; gone since 5.23
OF_ALL_MODELS = ("torch.", "transformers.modeling_utils")  # they name what a model may have, not what it has
CHECKPOINT = "_gradient_checkpointing_func"  # of a module that transformers may checkpoint
EAGER = "eager_attention_forward"  # ends the name of the eager attention of a modeling file


class Parts(NamedTuple):
    """The parts of a model, found once: the model without its wrapper, its backbone, its text decoder."""

    base: PreTrainedModel
    backbone: PreTrainedModel
    decoder: PreTrainedModel

    @property
    def name(self) -> str:
        """Return the class name of the model, for errors."""
        return type(self.base).__name__

    @property
    def head(self) -> Any:
        """Return the output embeddings; None for a bare backbone."""
        return self.base.get_output_embeddings()


def parts_of(model: nn.Module) -> Parts:
    """Find the parts of a `PreTrainedModel`, or of one wrapped by PEFT. Raises TypeError for anything else."""
    base = pretrained_model_of(model)
    backbone = backbone_of(base)
    return Parts(base, backbone, text_decoder_of(backbone))


def pretrained_model_of(model: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model inside its PEFT wrapper. Raises TypeError for anything else."""
    _check_loaded(model)
    base: Any = model
    if callable(getattr(model, "get_base_model", None)):
        base = model.get_base_model()  # type: ignore[operator]
    elif not isinstance(model, PreTrainedModel):
        base = getattr(getattr(model, "base_model", None), "model", model)  # PeftMixedModel
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"expected a transformers PreTrainedModel or a PEFT model around one, got {type(model).__name__}; "
            f"share the model before the trainer wraps it"
        )
    return base


def model_inside(model: nn.Module) -> PreTrainedModel:
    """Find the one Hugging Face model in any module, such as a value head or DDP. Raises TypeError for several."""
    _check_loaded(model)
    if isinstance(model, PreTrainedModel) or callable(getattr(model, "get_base_model", None)):
        return pretrained_model_of(model)
    found = list(_outermost_models(model))
    if len(found) != 1:
        names = ", ".join(type(each).__name__ for each in found) or "none"
        raise TypeError(
            f"expected a module with one transformers PreTrainedModel inside, and {type(model).__name__} has "
            f"{len(found)}: {names}; give each separately"
        )
    return found[0]


def _check_loaded(model: object) -> None:
    """Raise TypeError for a name, a class or nothing in place of a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model, got {type(model).__name__}: load it first, for instance with "
            f"AutoModelForCausalLM.from_pretrained"
        )


def _outermost_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the Hugging Face models of a module that are not part of another one."""
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def backbone_of(model: nn.Module) -> Any:
    """Return the module that returns `last_hidden_state`: the model without its head."""
    backbone: Any = pretrained_model_of(model).base_model
    while (
        isinstance(backbone, PreTrainedModel) and backbone.get_output_embeddings() is not None
    ):  # it has a head itself: Llama 4, Kosmos 2.5
        others = (part for part in _parts_of(backbone) if part is not backbone and isinstance(part, PreTrainedModel))
        inner = next(others, None)  # not in FSMT's decoder
        if inner is None:
            break
        backbone = inner
    decoder = getattr(backbone, "decoder", None)  # OPT's head calls the decoder inside its backbone, not the backbone
    return decoder if isinstance(decoder, PreTrainedModel) and not backbone.config.is_encoder_decoder else backbone


def _parts_of(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the places where a model may keep its backbone, Hugging Face's own rules first."""
    yield model.base_model
    yield model.get_decoder()
    yield getattr(model, "model", model)


def text_decoder_of(backbone: PreTrainedModel) -> Any:
    """Return the module that holds the decoder layers which text runs through."""
    is_multimodal = backbone.config.get_text_config() is not backbone.config
    return backbone.get_decoder() if is_multimodal else backbone


def is_text(path: str) -> bool:
    """Return whether a module, by its dotted path, belongs to the text and not to a tower for images or audio."""
    return not NOT_TEXT.search(path)


def arguments_of(backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that are None."""
    given = dict(zip(inspect.signature(backbone.forward).parameters, args, strict=False)) if args else {}
    return {name: value for name, value in {**given, **kwargs}.items() if value is not None}


def in_one_row(given: Mapping[str, Any], layout: TreeLayout) -> dict[str, Tensor]:
    """Return the unique tokens of a batch, ids or embeddings, as (1, U, ...), unless something has cut them.

    given: the arguments of a call, in which they are (B, L, ...).
    """
    found = {name: given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None}
    whole = {name: x for name, x in found.items() if tuple(x.shape[:2]) == layout.batch_shape}
    rows = {name: x.flatten(0, 1)[None, : layout.num_rows] for name, x in whole.items()}
    # Compiled code looks at what a view is of, and would be compiled again for a batch of one sequence.
    return {name: x if x.is_floating_point() else x.clone() for name, x in rows.items()}


def with_rows(output: Any, rows: Tensor) -> Any:
    """Set these hidden rows, (B, P / B, D), as the first entry of a backbone's output, a tuple or a `ModelOutput`."""
    if isinstance(output, tuple):
        return rows, *output[1:]
    output.last_hidden_state = rows
    return output


def found(owner: object, names: tuple[str, ...]) -> Any:
    """Return the first of these attributes that an object has; None if it has none."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


def is_cache(name: str, annotation: object) -> bool:
    """Return whether an argument or an output is Hugging Face's cache, by its annotation or its name."""
    return "Cache" in str(annotation) or name in CACHE


@cache
def names_in(module_class: object) -> frozenset[str]:
    """Return the attributes and globals that its methods name, inherited ones too, but not those of torch."""
    return frozenset(name for _, name in _globals(module_class))


def names_in_method(method: Any) -> tuple[str, ...]:
    """List the attributes and globals that a method names, in the order in which its code first does."""
    function = inspect.unwrap(method)
    return tuple(_names(function.__code__)) if isinstance(function, FunctionType) else ()


def attends(module_class: object) -> bool:
    """Return whether a module takes its attention from Hugging Face's AttentionInterface."""
    return bool(interfaces_of(module_class))


@cache
def interfaces_of(module_class: object) -> tuple[AttentionInterface, ...]:
    """Return the AttentionInterfaces from which its methods may take a function; nearly always only transformers'."""
    found = (space.get(name) for space, name in _globals(module_class))
    return tuple({id(each): each for each in found if isinstance(each, AttentionInterface)}.values())


@cache
def eager_slots(module_class: object) -> list[tuple[dict[str, Any], str]]:
    """List the files, as namespaces, and the names in them where its methods find their own eager attention."""
    return [(space, name) for space, name in _globals(module_class) if name.endswith(EAGER) and name in space]


def _globals(module_class: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each name that a method has, and the globals in which it would be looked up."""
    classes = (each for each in module_class.__mro__[:-1] if not each.__module__.startswith(OF_ALL_MODELS))
    for value in [value for each in classes for value in vars(each).values()]:
        method = inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(method, FunctionType):
            yield from ((method.__globals__, name) for name in _names(method.__code__))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a code object; functions inside a function come after it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


PROTOCOL = {f"{verb}_{kind}_state" for verb in ("get", "update") for kind in ("conv", "recurrent")}  # of a cache


def mixers_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """Return the mixers of the text, by path; empty for a model whose layers only attend."""
    return {path: module for path, module in decoder.named_modules() if _is_mixer(type(module)) and is_text(path)}


def layer_around(decoder: nn.Module, path: str) -> nn.Module | None:
    """Return the outermost decoder layer around the module of this path; None if there is none."""
    module = decoder
    for part in path.split("."):
        is_list = isinstance(module, nn.ModuleList)
        module = getattr(module, part)
        if is_list:
            return module
    return None


def text_layers(decoder: PreTrainedModel) -> list[nn.Module]:
    """List the decoder layers of the text in order; empty if they are not one list of num_hidden_layers."""
    num_layers = getattr(decoder.config, "num_hidden_layers", None)  # BLT's has none
    lists = [
        module
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and is_text(path) and len(module) == num_layers
    ]
    return list(lists[0]) if lists else []


def why_padding_leaks(decoder: PreTrainedModel) -> str | None:
    """Say why padding on the left changes a state in Hugging Face's own batch; None if it does not.

    The input of a mixer is 0 at padding. With a bias its projection is not, and a convolution brings that to the first
    tokens.
    """
    for path, mixer in mixers_of(decoder).items():
        for name, child in mixer.named_children():
            if (
                isinstance(child, nn.Linear)
                and child.bias is not None
                and child.in_features == decoder.config.hidden_size
            ):
                return f"left padding, which reaches the state of {type(mixer).__name__} through {path}.{name}.bias"
    return None


def num_attention_layers(decoder: PreTrainedModel) -> int:
    """Count the decoder layers that attend: all but those whose tokens meet only in a mixer or not at all.

    In Llama 3.2 Vision text skips the layers that attend to images.
    """
    config = decoder.config
    layers = config.num_hidden_layers - len(getattr(config, "cross_attention_layers", None) or ())
    if not mixers_of(decoder):
        return layers
    attending = {id(module) for layer in text_layers(decoder) for module in layer.modules() if attends(type(module))}
    return len(attending)


def _is_mixer(module_class: object) -> bool:
    return not PROTOCOL.isdisjoint(names_in(module_class))


def text_attention(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the attention modules of the text: in the same file a vision tower may get its attention elsewhere."""
    return (module for path, module in decoder.named_modules() if is_attention(module) and is_text(path))


def is_attention(module: nn.Module) -> bool:
    """Return whether a module attends: as Hugging Face's attention, or by its name, which a subclass may change."""
    return attends(type(module)) or any("Attention" in each.__name__ for each in type(module).__mro__)


def name_of(module: nn.Module) -> str:
    """Return what errors call a module of a layer."""
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def _recomputes(index: int, num_recomputed: int, num_layers: int) -> bool:
    """Return whether a layer recomputes, if that many layers do at even distances.

    The last one is the first to keep its activations: they are used as soon as the backward pass begins.
    """
    num_stored = num_layers - num_recomputed
    return (num_layers - 1 - index) * num_stored % num_layers >= num_stored


def recompute(model: Any, share: float) -> None:
    """Switch on checkpointing in a share of the decoder layers, without reentrance. It can be called again.

    model: a `PreTrainedModel`, or one wrapped by PEFT. share: from 0, which switches it off, to 1, with towers and
    nested blocks.

    UserError if the model has no checkpointing, or has no list of layers to take a share of.
    """
    base, _, decoder = parts_of(model)
    if share == 0:
        found(base, STOP_CHECKPOINTING)()
        return
    if not base.supports_gradient_checkpointing:
        raise UserError(f"model.activation_checkpointing: {type(base).__name__} has none; set it to false")
    found(base, START_CHECKPOINTING)({"use_reentrant": False})
    if share == 1:
        return
    layers: list[Any] = list(dict.fromkeys(text_layers(decoder)))
    if not layers or not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise UserError(
            f"model.activation_checkpointing {share}: the decoder layers of {type(base).__name__} are not one list, of "
            f"which a share could recompute; set it to true or false"
        )
    count = int(share * len(layers) + 0.5)  # the nearest; halves are rounded up
    for index, layer in enumerate(layers):
        for module in layer.modules() if not _recomputes(index, count, len(layers)) else ():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
    logger.info("%d of %d decoder layers recompute their activations", count, len(layers))
