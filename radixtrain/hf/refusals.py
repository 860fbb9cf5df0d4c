"""What cannot be exact is refused, by an error that names the layer, the reason and the mend.

Once, when a model is prepared, by what its configuration and its modules say (`check_attention`, `check_dropout`,
`check_choice`); and on every radix batch, by what depends on the batch or has come since (`check_pass`): a trainer
adds adapters with dropout, or noise on the embeddings, to a model that was prepared without. What a layer asks its
attention function for is seen there alone, in `radixtrain/hf/attention.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from radixtrain.attention import STRATEGIES, choose_attention
from radixtrain.errors import UserError
from radixtrain.hf.windows import only_full_attention

__all__ = ["check_attention", "check_choice", "check_dropout", "check_pass"]

EXACT_LAYERS = ("full_attention", "sliding_attention")
NOT_COMPUTED = {"index_topk": "sparse attention (an indexer picks keys)", "keep_window_size": "a dynamic mask"}
Dropout = nn.modules.dropout._DropoutNd


def check_attention(base: PreTrainedModel, backbone: Any) -> None:
    """Refuse attention layers that are not understood, by what the configuration and the modules say."""
    config = backbone.config
    name = type(base).__name__
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_hidden_layers"):
        raise UserError(f"{name} is not a plain decoder (one stack of num_hidden_layers); train it with dedup: false")
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise UserError(
            f"{type(backbone).__name__} does not take position_ids, so a token behind a shared prefix would get the "
            f"position of its row; train it with dedup: false"
        )
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in EXACT_LAYERS:
            raise UserError(
                f"{name} layer {index} is {layer_type!r}: only {' and '.join(EXACT_LAYERS)} compute a shared prefix "
                f"once; train it with dedup: false"
            )
    for key, what in NOT_COMPUTED.items():
        if getattr(config, key, None):
            raise UserError(
                f"{name} has {what} ({key}={getattr(config, key)}), which tree attention does not compute; train it "
                f"with dedup: false"
            )
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"{name} has attention_dropout={config.attention_dropout}: a shared token would draw one mask where an "
            f"ordinary batch draws one per copy; set attention_dropout to 0"
        )


def check_dropout(base: PreTrainedModel, allowed: tuple[str, ...]) -> None:
    """Refuse what draws at random: settings of the model that name it, and dropout modules wherever they are."""
    for name, value in base.config.get_text_config().to_dict().items():
        random = re.search(r"drop(out|$)|pdrop|layerdrop|jitter", name) and not re.search("classifier|summary", name)
        if random and isinstance(value, float) and value > 0 and name not in allowed:
            raise UserError(
                f"{type(base).__name__} has {name}={value}: a shared token would draw once where an ordinary batch "
                f"draws once per copy; set it to 0, or allow it by name: allow_dropout=[{name!r}]"
            )
    for module in _dropouts(base, allowed):
        raise _dropout_refused(base, module)


def check_choice(backbone: Any, attention: str, kernel: str) -> None:
    """Unknown names at once. Whether a kernel runs is known where the model is when the first batch comes."""
    if attention not in ("auto", *STRATEGIES) or kernel != "auto":
        parameter = next(backbone.parameters())
        softcap = getattr(backbone.config, "attn_logit_softcapping", None) is not None
        where = parameter.device, parameter.dtype, _head_dim(backbone.config)
        try:
            choose_attention(attention, kernel, *where, softcap=softcap)
        except ValueError as error:
            raise UserError(str(error)) from None


def check_pass(backbone: Any, max_seqlen: int, allowed: tuple[str, ...]) -> None:
    """Refuse what makes this forward pass inexact, though the model could be prepared.

    max_seqlen: longest sequence of the batch, in tokens. allowed: as `allow_dropout` of `prepare_model`.
    """
    chunk = getattr(backbone.config, "attention_chunk_size", None)
    if chunk and chunk < max_seqlen and not only_full_attention(backbone.config):
        raise UserError(
            f"{type(backbone).__name__} attends within chunks of {chunk} tokens (attention_chunk_size), and this "
            f"batch has a sequence of {max_seqlen}; set max_length to {chunk} or less, where the chunks change nothing"
        )
    _check_rope(backbone, max_seqlen)
    noise = getattr(backbone.get_input_embeddings(), "neftune_noise_alpha", None)
    if noise and backbone.training and "neftune" not in allowed:
        raise UserError(
            f"NEFTune (neftune_noise_alpha={noise}) draws one noise for a shared token where an ordinary batch "
            f"draws one per copy; remove it, or prepare_model(..., allow_dropout=['neftune'])"
        )
    for module in _dropouts(backbone, allowed):
        if module.training:  # its own: PEFT's are born in training mode, whatever the model around them is in
            raise _dropout_refused(backbone, module)


def _check_rope(backbone: Any, max_seqlen: int) -> None:
    """Rotary embeddings whose frequencies follow the longest sequence of a batch: a prefix has no states of its own."""
    parameters = getattr(backbone.config, "rope_parameters", None) or {}
    kinds = [parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))]  # one, or a layer type's
    for rope in kinds:
        original = rope.get("original_max_position_embeddings") or getattr(
            backbone.config, "original_max_position_embeddings", None
        )
        limit = original or backbone.config.max_position_embeddings
        if rope.get("rope_type") in ("dynamic", "longrope") and max_seqlen > limit:
            raise UserError(
                f"{type(backbone).__name__} has {rope['rope_type']} rotary embeddings, whose frequencies change with "
                f"the longest sequence of a batch once it passes {limit} tokens, and this batch has one of "
                f"{max_seqlen}; set max_length to {limit} or less"
            )


def _dropouts(root: nn.Module, allowed: tuple[str, ...]) -> Iterator[Dropout]:
    """The dropout modules with p > 0 that no name on their path allows.

    A walk at every pass: for 28 layers with LoRA (2,385 modules) 0.3 ms of one core, and `len(list(root.modules()))`,
    which would not see an adapter in another's place or a `p` that was changed, takes 1.0 ms.
    """
    row = [root]
    while row:
        yield from [module for module in row if isinstance(module, Dropout) and module.p > 0]
        inner = [module._modules for module in row if module._modules]
        row = [child for named in inner for name, child in named.items() if name not in allowed and child is not None]


def _dropout_refused(root: nn.Module, module: Dropout) -> UserError:
    path = next(path for path, other in root.named_modules() if other is module)
    return UserError(
        f"dropout p={module.p} at {path!r}: a shared token would draw one mask where an ordinary batch draws one per "
        f"copy; set it to 0 (LoRA: lora_dropout), or allow it by name: allow_dropout=[{_short_name(path)!r}]"
    )


def _short_name(path: str) -> str:
    """`...q_proj.lora_dropout.default` -> `lora_dropout`."""
    parts = path.split(".")
    return next((part for part in reversed(parts) if "drop" in part), parts[-1])


def _head_dim(config: Any) -> int:
    """The one that tree attention runs with: of queries or of values, whichever is wider."""
    latent = (getattr(config, name, None) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    scored = sum(latent) or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(scored, getattr(config, "v_head_dim", None) or 0)
