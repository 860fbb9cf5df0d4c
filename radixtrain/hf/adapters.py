"""Refuses PEFT adapters that do not compute each token independently.

A radix batch is one line of the unique tokens of all sequences, each computed once. An adapter that looks along this
line, averages over the batch or draws at random computes something else there than in an ordinary batch. `EXACT` lists
the kinds that were measured: their gradient is that of each sequence alone. Every other kind is refused by name,
including those that a later version of PEFT adds.

PEFT is not imported in a forward pass: the configurations that it leaves on the model say enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import pretrained_model_of

# Name of a `PeftType` -> its settings that create an `nn.Dropout`, which `radixtrain/hf/dropout.py` checks.
EXACT: dict[str, tuple[str, ...]] = {
    "ADALORA": ("lora_dropout",),
    "ADAMSS": (),
    "ADAPTION_PROMPT": (),  # every query attends to the learned prompt in a separate softmax
    "BEFT": (),
    "BOFT": (),
    "C3A": (),
    "DEFT": ("deft_dropout",),
    "DELORA": ("module_dropout",),
    "FOURIERFT": (),
    "FROD": ("frod_dropout",),
    "GLORA": (),
    "GRALORA": ("gralora_dropout",),
    "HIRA": ("hira_dropout",),
    "HRA": (),
    "IA3": (),
    "LN_TUNING": (),
    "LOHA": (),
    "LOKR": (),
    "LORA": ("lora_dropout",),
    "MISS": ("miss_dropout",),
    "OFT": (),
    "OSF": (),
    "PEANUT": (),
    "PSOFT": ("psoft_dropout",),
    "RANDLORA": ("randlora_dropout",),
    "ROAD": (),
    "SHIRA": (),
    "SUPERTUNING": ("lora_dropout",),
    "TINYLORA": ("tinylora_dropout",),
    "TRAINABLE_TOKENS": (),
    "UNILORA": ("unilora_dropout",),
    "VBLORA": ("vblora_dropout",),
    "VERA": ("vera_dropout",),
    "WAVEFT": (),
}

VIRTUAL_TOKENS = "puts tokens of its own in front of every sequence"
VIRTUAL_KEYS = "puts keys and values of its own in front of every sequence"
NOT_EXACT = {
    "CARTRIDGE": VIRTUAL_KEYS,
    "CPT": VIRTUAL_TOKENS,
    "LILY": "mixes its experts by their mean over all tokens of a batch",
    "MULTITASK_PROMPT_TUNING": VIRTUAL_TOKENS,
    "POLY": "draws a mixture of skills for the task of each sequence",
    "PREFIX_TUNING": VIRTUAL_KEYS,
    "PROMPT_TUNING": VIRTUAL_TOKENS,
    "PVERA": "draws noise for every token, once for a shared one, but an ordinary batch draws once per copy",
    "P_TUNING": VIRTUAL_TOKENS,
    "SHADOW": "runs a second network beside the model, which would attend without the tree",
    "XLORA": "runs the model once more, for the hidden states of every original token",
}

# Settings that make an exact kind inexact, and what to do.
BREAKING = {
    "alora_invocation_tokens": "PEFT looks for these tokens once in the whole batch, not in each sequence; leave it "
    "out",
    "layer_replication": "the copied layers have a configuration of their own, so tree attention does not reach them; "
    "leave it out",
}


def check_adapters(holders: Iterable[nn.Module], allowed: tuple[str, ...]) -> None:
    """Refuse adapters, active or not, that would give a radix batch a different gradient.

    holders: modules that may hold PEFT configurations: `model.modules()` when a model is shared. In a forward pass
        the Hugging Face model and its backbone, where PEFT leaves every configuration but those of prompt learning
        and adaption prompts. The check takes 10 us, so it runs in every pass and finds what a trainer added.
    allowed: as `allow_dropout` of `share_prefixes`; names settings that may draw at random.

    Raises UserError, naming the adapter, its kind or setting, the reason and the fix.
    """
    for holder in holders:
        for name, config in (getattr(holder, "peft_config", None) or {}).items():
            _check_kind(name, config)
            _check_settings(name, config)
            _check_draws(name, config, holder, allowed)


def check_not_shared(model: nn.Module) -> None:
    """Refuse an adapter on a matrix that two modules share: it would be merged into both of them.

    model: wrapped by PEFT.

    Raises UserError that names both modules.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = dict(pretrained_model_of(model).named_modules())
    holders = [(path, p) for path, module in modules.items() for p in module._parameters.values()]
    for path, layer in modules.items():
        weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, BaseTunerLayer) else None
        if weight is not None:
            others = [holder for holder, p in holders if p is weight and not f"{holder}.".startswith(f"{path}.")]
            if others:
                raise UserError(
                    f"model.lora_target_modules: {path} shares its weight with {others[0]} (tie_word_embeddings), so "
                    f"merging the adapter would change both; leave it out, or train a checkpoint that does not share it"
                )


def draws_in_adapters(model: nn.Module, setting: str) -> bool:
    """Return whether an adapter draws at random by this setting, in its layers and not in a dropout module."""
    configs = (getattr(model, "peft_config", None) or {}).values()
    return any(getattr(config, setting, None) and setting not in EXACT.get(_kind(config), ()) for config in configs)


def _check_kind(name: str, config: object) -> None:
    kind = _kind(config)
    if kind not in EXACT:
        reason = NOT_EXACT.get(kind, "is not known to compute each token from that token only")
        raise UserError(
            f"adapter {name!r} is of PEFT's kind {kind}, which {reason}: on unique tokens it would have a different "
            f"gradient. Use another kind, such as LORA, or {TRAIN_WITHOUT_SHARING}, on the "
            f"batches of an ordinary collator"
        )


def _check_settings(name: str, config: object) -> None:
    for setting, reason in BREAKING.items():
        value = getattr(config, setting, None)
        if value:
            raise UserError(f"adapter {name!r} ({_kind(config)}) has {setting}={value}: {reason}")
    projection = getattr(getattr(config, "velora_config", None), "init_type", "random")
    if projection != "random":
        raise UserError(
            f"adapter {name!r} ({_kind(config)}) has a velora_config of init_type={projection!r}, an average over the "
            f"tokens of a batch, in which a shared token would count once instead of once per copy; set init_type to "
            f"'random'"
        )


def _check_draws(name: str, config: object, holder: nn.Module, allowed: tuple[str, ...]) -> None:
    """Refuse settings by which layers draw without an `nn.Dropout`, unless all of them are in evaluation mode."""
    in_modules = EXACT[_kind(config)]
    for setting, value in vars(config).items():
        draws = setting == "monteclora_config" and value is not None
        draws |= "drop" in setting and isinstance(value, float) and value > 0 and setting not in in_modules
        if draws and setting not in allowed and _in_training(holder):
            raise UserError(
                f"adapter {name!r} ({_kind(config)}) has {setting}={value}, which draws at random in every forward "
                f"pass, so no two passes have the same gradient; leave it out, or allow it by name: "
                f"allow_dropout=[{setting!r}]"
            )


def _kind(config: Any) -> str:
    """Return the name of the configuration's `PeftType`."""
    kind = config.peft_type
    return str(getattr(kind, "value", kind))


def _in_training(holder: nn.Module) -> bool:
    """Return whether a PEFT layer is in training mode, in which it starts whatever the mode of the model."""
    return any(layer.training for layer in holder.modules() if type(layer).__module__.startswith("peft."))
