"""`share_prefixes(model)`: a Hugging Face model computes tokens that rows share once, and nothing else changes.

The model keeps its weights, its outputs and what it saves. Its layers call their attention by name, and find ours
around it (`attention_interface.py`); hooks on the backbone turn a batch into what the layers need (`hooks.py`).
Whatever would change the gradient is refused, here and at every batch, or runs unshared (`guards`). Unique tokens on
any other attention would train silently with a wrong mask: Hugging Face reads a jump in the positions as the start of
a new packed document. So the hooks check that every layer ran ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from radixtrain.collators.misuse_guard import SHARED
from radixtrain.errors import UserError
from radixtrain.hf.backbone import Parts, backbone_of, model_inside, parts_of, pretrained_model_of
from radixtrain.hf.guards.batch import Options, check_choice
from radixtrain.hf.guards.rules import EntryPoint, check_supported, why_unsupported
from radixtrain.hf.hooks import BackboneHooks, remove_hooks
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.hf.recurrent import install_mixers, remove_mixers
from radixtrain.hf.sequence_parallel import SplitModel
from radixtrain.hf.sharing_report import SharingReport, SharingWatch
from radixtrain.hf.token_losses import TokenLoss

HOOKS = "_radixtrain_hooks"  # the attribute of a shared model
ModelT = TypeVar("ModelT", bound=nn.Module)


def share_prefixes(
    model: ModelT,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    min_shared_tokens: int = 1,
    min_ratio: float = 1.1,
    allow_dropout: Iterable[str] = (),
    sp_group: object = None,
) -> ModelT:
    """Make a model compute the tokens that the rows of a batch share only once. Returns the same model.

    It takes two kinds of batch. Ordinary ones, of any trainer: every call with padded `[B, L]` ids that wants no cache
    runs on its unique tokens and returns `[B, L, D]`, with the same values and the same gradient. A language-model head
    that gets these computes every row once too. And those of a `RadixCollator`, if the head predicts next tokens.

    model: a `PreTrainedModel` with any head, one wrapped by PEFT, or a module that has one Hugging Face model inside.
        In a multimodal model the text decoder is shared. Calling it again replaces the options.
    attention: `auto`, `cascade`, `path`, `expand`, `reference` or `tree`; see `tree_attention`. One by name raises
        UserError where it cannot be exact, such as `cascade` with a window that binds; `auto` takes another.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3`, `flash_attn_4`, `cudnn`, `efficient` or `eager`.
    min_shared_tokens: merge branches that would save fewer tokens; a `RadixCollator` has its own.
    min_ratio: an ordinary batch with a smaller B x L / U runs as it is.
    allow_dropout: names of what may draw at random: a dropout module or a module around it, by one part of its path
        without dots (such as `lora_dropout`), or a number that a module holds (such as `residual_dropout`). A shared
        token then draws once, while an ordinary batch draws once per copy: still dropout, but no longer the same
        gradient. Any other call that draws is refused.
    sp_group: a process group of torch.distributed whose n ranks compute each batch of a `RadixCollator` together
        (sequence parallelism): a rank holds U / n rows, and n ranks have room for n times the tokens. Every rank of the
        group gets the same batch, without `merge_labels`, and calls the model that was shared, PEFT's wrapper included.
        The loss is that of the whole batch on every rank, the logits are those of the rank's own predictions. The
        average of the gradients over all ranks, as DDP and FSDP take it, is the gradient of the batch. n divides the
        number of query heads.

    An ordinary batch that cannot be shared exactly runs as if nothing had been installed, and `sharing_report(model)`
    counts it with the reason: a cache, `inputs_embeds`, `output_attentions`, video, a mask with holes, left padding
    without `position_ids` in a model with learned positions, third-party code in a layer, a model or an adapter that
    computes something else on unique tokens. A batch of a `RadixCollator` is refused. Hidden states of padding are
    those of another token. If a loss reads them, the backward pass raises a UserError; without gradients nothing warns.

    Soft-capping, sinks, sliding windows, latent attention and router losses (`output_router_logits`) are computed
    exactly.

    Whether the model and its adapters compute each token the same when it is shared is tried in the first call that
    shares. If they do not, the call is one that cannot be shared exactly.

    Raises UserError, with the reason, for sparse attention, for attention dropout, for positions that are not counted
    from 0, and for an attention or kernel that cannot run. What depends on the batch, draws at random or is added later
    is refused at the first batch that it would change. Raises TypeError for a module without exactly one Hugging Face
    model.

    >>> model = share_prefixes(model)  # or share_prefixes(trainer.model), before trainer.train()
    >>> input_ids = torch.tensor([[7, 8, 9], [7, 8, 5]])
    >>> model(input_ids=input_ids, labels=input_ids).loss.backward()
    >>> sharing_report(model).num_tokens, sharing_report(model).num_unique_tokens
    (6, 4)
    """
    parts = parts_of(model_inside(model) if sp_group is None else model)
    options = Options.checked(
        attention=attention,
        kernel=kernel,
        min_shared_tokens=min_shared_tokens,
        min_ratio=min_ratio,
        allow_dropout=allow_dropout,
    )
    check_supported(parts, "share_prefixes" if sp_group is None else "RadixCollator")
    check_choice(parts.decoder, attention, kernel)
    split = None if sp_group is None else SplitModel(model, parts, sp_group)
    _install(parts, options, split, "share_prefixes", why_unsupported(parts, "RadixCollator"))
    return model


def check_takes_collated(model: nn.Module) -> None:
    """Raise UserError for a model that cannot use the batches of a `RadixCollator`, with the reason and the fix."""
    check_supported(parts_of(model), "RadixCollator")


def sharing_report(model: Any) -> SharingReport:
    """Report how many calls of a model shared tokens, how many did not and why, and what that saved.

    model: a shared one; or a trainer: its reference or teacher is named if it shares nothing.

    Returns a `SharingReport`, which prints as a summary. Raises UserError for any other model.

    >>> model = share_prefixes(model)
    >>> model(**RadixCollator()(rows)).loss.backward()
    >>> report = sharing_report(model)
    >>> report.num_shared, report.compression_ratio
    (1, 1.5)
    """
    trainer, shared = (None, model) if isinstance(model, nn.Module) else (model, getattr(model, "model", model))
    hooks = _hooks_of(shared)
    if hooks is None:
        raise UserError(f"{type(shared).__name__} shares nothing: call share_prefixes(model) first")
    others, report = other_models(trainer), hooks.report
    report.unshared_models = [name for name, other in others.items() if _hooks_of(other) is None]
    return report


def other_models(trainer: object) -> dict[str, nn.Module]:
    """Return the reference and the teacher of a trainer, by the names of its attributes."""
    others = {name: getattr(trainer, name, None) for name in ("ref_model", "teacher_model")}
    return {name: other for name, other in others.items() if isinstance(other, nn.Module)}


def leave_refused_calls(model: nn.Module) -> None:
    """Let ordinary calls run unshared, and counted, that would be refused, as for a dropout that draws.

    For programs whose author did not ask for sharing.
    """
    hooks = _hooks_of(model)
    assert hooks is not None
    hooks.padded.leaves_refused = True


def _hooks_of(model: nn.Module) -> BackboneHooks | None:
    hooks: BackboneHooks | None = getattr(model_inside(model), HOOKS, None)
    return hooks


@contextmanager
def shared_to_score(parts: Parts) -> Iterator[None]:
    """Share a model that is not shared, and restore it afterwards. Raises UserError if it cannot score completions."""
    check_supported(parts, "score_completions")
    is_shared = _hooks_of(parts.base) is not None
    if not is_shared:
        _install(parts, Options("auto", "auto", 1, 1.1, ()), None, rules=None, refused=None)
    try:
        yield
    finally:
        if not is_shared:
            restore_model(parts.base)


def options_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the options of a shared model, as given, without its `sp_group`; None if it is not shared."""
    hooks = _hooks_of(pretrained_model_of(model))
    return None if hooks is None else hooks.padded.options._asdict()


def restore_model(model: ModelT) -> ModelT:
    """Undo `share_prefixes`: remove its hooks. Returns the same model.

    model: a shared one; any other is returned unchanged.

    Do not call it between the forward and the backward pass of a model with activation checkpointing, which runs its
    layers again.

    >>> restore_model(share_prefixes(model)) is model
    True
    """
    base = model_inside(model)
    hooks = _hooks_of(base)
    if hooks is not None:
        remove_hooks(base)
        remove_mixers(base)
        if hooks.split is not None:
            hooks.split.remove()
        TokenLoss.remove(base)
        delattr(base, HOOKS)
        delattr(backbone_of(base), SHARED)
    return model


def _install(
    parts: Parts, options: Options, split: SplitModel | None, rules: EntryPoint | None, refused: str | None
) -> None:
    """Set the hooks, replacing those that the model has.

    rules: as `BackboneHooks` has them. refused: why it takes no batch of a `RadixCollator`.
    """
    restore_model(parts.base)
    if hasattr(parts.backbone, SHARED):  # two sets of hooks would run
        raise UserError(
            f"{type(parts.backbone).__name__} is shared already, alone or inside another model; call restore_model "
            f"with what was shared first"
        )
    mixers = install_mixers(parts.decoder)
    generates = parts.base.can_generate() or parts.base is parts.backbone  # any head may use a bare backbone
    report = SharingReport()
    padded = PaddedSharing(options, generates, report)
    hooks = BackboneHooks(parts.base, padded, SharingWatch(parts.name), report, refused, split, rules)
    hooks.install(parts.backbone)
    if split is not None:
        split.install(len(mixers))
    setattr(parts.base, HOOKS, hooks)
    setattr(parts.backbone, SHARED, True)
