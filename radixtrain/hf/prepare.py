"""Hugging Face models on unique tokens: `prepare_model` and `share_prefixes` install hooks, `restore_model` undoes it.

No class of a model is changed. Its layers call their attention by name, and find ours around it
(`attention_interface.py`); hooks on the backbone and head turn a radix batch into what the layers need (`hooks.py`).
Whatever would change the gradient is refused, here and at every batch (`refusals.py`). A radix batch on any other
attention would train silently with a wrong mask: Hugging Face reads a jump in the positions as the start of a new
packed document. So the hooks check that every layer ran ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from radixtrain.collators.misuse_guard import PREPARED
from radixtrain.errors import UserError
from radixtrain.hf.backbone import Parts, backbone_of, model_inside, parts_of, pretrained_model_of
from radixtrain.hf.dropout import check_dropout
from radixtrain.hf.guards.rules import check_supported, traits_of, why_unsupported
from radixtrain.hf.hooks import BackboneHooks, remove_hooks
from radixtrain.hf.modules import mixers_of, num_attention_layers
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.hf.progress import Progress
from radixtrain.hf.recurrent.layers import install_mixers, remove_mixers
from radixtrain.hf.refusals import check_choice
from radixtrain.hf.sequence_parallel import SplitModel
from radixtrain.hf.sharing_report import SharingReport, SharingWatch
from radixtrain.hf.token_losses import TokenLoss
from radixtrain.tree.runs import RunCost

STATE = "_radixtrain_state"
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class _State:
    """What `restore_model` needs.

    options: attention, kernel and allow_dropout, as given. report: what was shared, at either entry point.
    sharing: None for a model of `prepare_model` only. split: None without `sp_group`.
    """

    options: dict[str, Any]
    report: SharingReport
    sharing: PaddedSharing | None
    split: SplitModel | None


def prepare_model(
    model: ModelT,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    allow_dropout: Iterable[str] = (),
    sp_group: object = None,
) -> ModelT:
    """Make a model accept the batches of a `RadixCollator`, and still the ordinary ones. Returns the same model.

    model: a `PreTrainedModel` for causal language modelling, its bare backbone, or one wrapped by PEFT. In a multimodal
        model the text decoder is prepared: text shares, ordinary batches with images run as before. Preparing again
        replaces the earlier choice; a model of `share_prefixes` goes on sharing.
    attention: `auto`, `cascade`, `path`, `expand`, `reference` or `tree`; see `radixtrain.attention`.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3`, `flash_attn_4`, `cudnn`, `efficient` or `eager`.
    allow_dropout: names of what may draw at random: a dropout module or a module around it, by one part of its path
        without dots (such as `lora_dropout`), or a setting of the model or of an adapter. A shared token then draws
        once, while an ordinary batch draws once per copy: still dropout, but no longer the same gradient.
    sp_group: a process group of torch.distributed whose n ranks compute each radix batch together (sequence
        parallelism): a rank holds U / n rows, and n ranks have room for n times the tokens. Every rank of the group
        gets the same batch, without `merge_labels`, and calls the model that was prepared, PEFT's wrapper included. The
        loss is that of the whole batch on every rank, the logits are those of the rank's own predictions. The average
        of the gradients over all ranks, as DDP and FSDP take it, is the gradient. n divides the number of query heads.

    Soft-capping, sinks, sliding windows, latent attention and router losses (`output_router_logits`) are computed
    exactly.

    Raises UserError, with the reason, for a class whose head or loss does not predict next tokens, for sparse
    attention, for attention dropout, for positions that are not counted from 0, for a dropout > 0 that draws and is not
    allowed, and for an attention or kernel that cannot run. Whether the model and its adapters compute each token the
    same when it is shared is tried in the first radix batch, which is refused if they do not. So is what depends on the
    batch.
    """
    parts = parts_of(model)
    options = _options(attention, kernel, allow_dropout)
    _check(model, parts, options, any_head=False)
    earlier = getattr(parts.base, STATE, None)
    sharing = earlier and earlier.sharing
    if sharing is not None:
        sharing = replace(sharing, attention=attention, kernel=kernel, report=SharingReport())
    _install(parts, options, sharing, None if sp_group is None else SplitModel(model, parts, sp_group))
    return model


def share_prefixes(
    model: ModelT,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    min_shared_tokens: int = 1,
    min_ratio: float = 1.1,
    allow_dropout: Iterable[str] = (),
) -> ModelT:
    """Make a model compute the tokens that the rows of a padded batch share only once. Returns the same model.

    For trainers that make their batches themselves: preference pairs, groups of samples, rerankers, distillation, a
    loop of your own. Nothing else changes: every call with padded `[B, L]` ids that wants no cache runs on its unique
    tokens and returns `[B, L, D]`, with the same values and the same gradient. A language-model head that gets these
    computes every row once too.

    model: a `PreTrainedModel` with any head, one wrapped by PEFT, or a module that has one Hugging Face model inside.
        The batches of a `RadixCollator` work too if the head predicts next tokens. Calling it again replaces the
        options.
    attention, kernel, allow_dropout: see `prepare_model`.
    min_shared_tokens: a branch point that saves fewer tokens gets no branch.
    min_ratio: a batch with a smaller B x L / U runs as it is.

    A call that cannot be shared exactly runs as if nothing had been installed, and `sharing_report(model)` counts it
    with the reason: a cache, `inputs_embeds`, `output_attentions`, video, a mask with holes, left padding without
    `position_ids` in a model with learned positions, third-party code in a layer, a model or an adapter that computes
    something else on unique tokens. Hidden states of padding are those of another token. If a loss reads them, the
    backward pass raises a UserError; without gradients nothing warns.

    Raises UserError as `prepare_model`, except that any head is allowed; TypeError for a module without exactly one
    Hugging Face model.
    """
    parts = parts_of(model_inside(model))
    options = _options(attention, kernel, allow_dropout)
    _check_sharing(min_shared_tokens, min_ratio)
    _check(model, parts, options, any_head=True)
    generates = parts.base.can_generate() or parts.base is parts.backbone  # any head may use a bare backbone
    run_cost = RunCost() if mixers_of(parts.decoder) else None
    _install(parts, options, PaddedSharing(attention, kernel, min_shared_tokens, min_ratio, generates, run_cost))
    return model


def sharing_report(model: Any) -> SharingReport:
    """Report how many calls of a model shared tokens, how many did not and why, and what that saved.

    model: of `prepare_model` or `share_prefixes`; or a trainer: its reference or teacher is named if it shares nothing.

    Raises UserError for any other model.
    """
    trainer, shared = (None, model) if isinstance(model, nn.Module) else (model, getattr(model, "model", model))
    state = _state_of(shared)
    if state is None:
        raise UserError(
            f"{type(shared).__name__} shares nothing: call share_prefixes(model) first, or prepare_model(model) for a "
            f"RadixCollator"
        )
    others = other_models(trainer)
    state.report.unshared_models = [name for name, other in others.items() if _state_of(other) is None]
    return state.report


def other_models(trainer: object) -> dict[str, nn.Module]:
    """Return the reference and the teacher of a trainer, by the names of its attributes."""
    others = {name: getattr(trainer, name, None) for name in ("ref_model", "teacher_model")}
    return {name: other for name, other in others.items() if isinstance(other, nn.Module)}


def leave_refused_calls(model: nn.Module) -> None:
    """Let calls run unshared, and counted, that a model of `share_prefixes` would refuse, as for a dropout that draws.

    For programs whose author did not ask for sharing.
    """
    state = _state_of(model)
    assert state is not None and state.sharing is not None
    state.sharing.leaves_refused = True


def _state_of(model: nn.Module) -> _State | None:
    state: _State | None = getattr(model_inside(model), STATE, None)
    return state


def prepared_options(model: nn.Module) -> dict[str, Any] | None:
    """Return attention, kernel and allow_dropout of a prepared model, as given; None if it is not prepared."""
    state = getattr(pretrained_model_of(model), STATE, None)
    return None if state is None else state.options


def restore_model(model: ModelT) -> ModelT:
    """Undo `prepare_model` and `share_prefixes`: remove their hooks. Returns the same model.

    Do not call it between the forward and the backward pass of a model with activation checkpointing, which runs its
    layers again. Any other model is not changed.
    """
    base = model_inside(model)
    state = getattr(base, STATE, None)
    if state is not None:
        remove_hooks(base)
        remove_mixers(base)
        if state.split is not None:
            state.split.remove()
        TokenLoss.remove(base)
        delattr(base, STATE)
        delattr(backbone_of(base), PREPARED)
    return model


def _check(model: nn.Module, parts: Parts, options: dict[str, Any], any_head: bool) -> None:
    """Refuse a model that cannot compute unique tokens exactly, and a choice that cannot run."""
    check_supported(parts, "share_prefixes" if any_head else "prepare_model")
    check_dropout(parts, options["allow_dropout"])
    check_choice(parts.decoder, options["attention"], options["kernel"])


def _options(attention: str, kernel: str, allow_dropout: Iterable[str]) -> dict[str, Any]:
    if isinstance(allow_dropout, str) or not isinstance(allow_dropout, Iterable):
        raise UserError(f"allow_dropout must be a list of names, got {allow_dropout!r}")
    return {"attention": attention, "kernel": kernel, "allow_dropout": tuple(allow_dropout)}


def _check_sharing(min_shared_tokens: int, min_ratio: float) -> None:
    if type(min_shared_tokens) is not int or min_shared_tokens < 1:
        raise UserError(f"min_shared_tokens must be a whole number from 1 on, got {min_shared_tokens!r}")
    if type(min_ratio) not in (int, float) or not min_ratio >= 0:
        raise UserError(f"min_ratio must be a number from 0 on, got {min_ratio!r}")


def _install(
    parts: Parts, options: dict[str, Any], sharing: PaddedSharing | None, split: SplitModel | None = None
) -> None:
    """Set the hooks, replacing those that the model has."""
    restore_model(parts.base)
    if hasattr(parts.backbone, PREPARED):  # two sets of hooks would run
        raise UserError(
            f"{type(parts.backbone).__name__} is prepared already, alone or inside another model; call "
            f"restore_model with what was prepared first"
        )
    report = SharingReport() if sharing is None else sharing.report
    progress = Progress()
    mixers = install_mixers(parts.decoder, progress)
    hooks = BackboneHooks(
        parts.base,
        num_layers=num_attention_layers(parts.decoder),
        mixers=mixers,
        progress=progress,
        refused=why_unsupported(parts, "prepare_model"),
        traits=traits_of(parts.decoder),
        padded=sharing,
        sharing=SharingWatch(parts.name),
        report=report,
        split=None if split is None else split.rows,
        **options,
    )
    hooks.install(parts.backbone)
    if split is not None:
        split.install(len(mixers))
    setattr(parts.base, STATE, _State(options, report, sharing, split))
    setattr(parts.backbone, PREPARED, True)
