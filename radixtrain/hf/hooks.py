"""The hooks of a prepared model: a radix batch enters with its plan and leaves as the rows that predict.

- `before`, on the backbone, turns the `radix` of a batch into the call that reaches every layer, gives mask
  creation an empty tensor, so that no U x U mask is ever built, and refuses what would change the gradient;
- `after`, on the backbone, checks that every layer ran tree attention, gives the head the rows that predict, in a row
  for each sequence, and gives the router loss the logits of every original token;
- `before_model`, on the model, checks that the head will get all of these rows.

An ordinary batch is not changed, unless the model is one of `share_prefixes` (`radixtrain/hf/padded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import Parts, arguments_of, in_one_row, text_decoder_of, with_rows
from radixtrain.hf.dropout import generator_states, has_drawn, number_that_draws, set_generator_states
from radixtrain.hf.guards.model import forget_verdicts, why_inexact
from radixtrain.hf.guards.rules import traits_of, why_unsupported
from radixtrain.hf.image_models import types_for, with_features
from radixtrain.hf.modules import mixers_of, num_attention_layers, text_layers
from radixtrain.hf.padded.calls import is_compiled, is_generating
from radixtrain.hf.padded.fused_heads import share_fused_heads
from radixtrain.hf.padded.row_functions import MIN_SAVING
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.hf.padded.spread import NO_ROW
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.hf.progress import Progress
from radixtrain.hf.recurrent.layers import LayerHooks
from radixtrain.hf.refusals import (
    check_draws,
    check_evaluation,
    check_inputs,
    check_one_device,
    check_own_attention,
    check_pass,
    on_device_of_rows,
    own_layout,
)
from radixtrain.hf.sequence_parallel import RowSplit, SplitCall
from radixtrain.hf.sharing_report import (
    GENERATION,
    HELP_NOT_ALIKE,
    HELP_ORDINARY,
    NOT_ALIKE,
    ORDINARY,
    SharingReport,
    SharingWatch,
    is_frozen,
)
from radixtrain.hf.third_party import hooks_of, why_third_party
from radixtrain.hf.token_losses import TokenLoss, watched
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RADIX, RadixInputs
from radixtrain.versions import saying_what_was_tested

WITHOUT_THE_TREE = (
    "attended without the tree, and their gradient would be wrong; if they are not there, set num_hidden_layers of its "
    "configuration and call prepare_model again"
)


@dataclass(eq=False)
class BackboneHooks:
    """What a prepared model does around its own forward pass.

    model: the Hugging Face model, to which trainers may add adapters.
    attention, kernel, allow_dropout: as given to `prepare_model`.
    num_layers: decoder layers that attend, each of which must run tree attention; None if their list has got another
        length than the configuration says.
    mixers: modules with a recurrent state, each of which must run on the tree.
    progress: the calls that run now, for layers that pass nothing on to their mixers.
    refused: why the model cannot use a batch of a `RadixCollator`; None if it can.
    traits: of the decoder when it was judged. changed: why its calls cannot be shared any more; None if they can.
    padded: shares ordinary batches; None unless the model is one of `share_prefixes`.
    sharing: warns if nothing is shared.
    report: counts what is shared, by `padded` too.
    split: the rows of radix batches over the ranks of `sp_group`; None without one.
    drew: why no call is shared in training any more, in a program whose author did not ask for sharing.
    """

    model: PreTrainedModel
    attention: str
    kernel: str
    num_layers: int | None
    allow_dropout: tuple[str, ...]
    mixers: list[nn.Module]
    progress: Progress
    refused: str | None
    traits: Any
    padded: PaddedSharing | None
    sharing: SharingWatch
    report: SharingReport
    split: RowSplit | None
    changed: str | None = None
    drew: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> BackboneHooks:
        """Copy the hooks; a copy of the backbone only does not copy the model around it."""
        memo[id(self)] = copied = copy(self)
        copied.model, copied.traits = memo.get(id(self.model), self.model), None
        for name in ("mixers", "progress", "padded", "sharing", "report"):
            setattr(copied, name, deepcopy(getattr(self, name), memo))
        return copied

    def install(self, backbone: PreTrainedModel) -> None:
        """Register the hooks on the backbone and the model, where `remove_hooks` finds them by their owner."""
        backbone.register_forward_pre_hook(self.before, with_kwargs=True)
        options = {"with_kwargs": True, "prepend": True, "always_call": True}  # the user's see [B, L, D]
        backbone.register_forward_hook(self.after, **options)
        self.model.register_forward_pre_hook(self.before_model, with_kwargs=True)
        if self.refused is None and self.model is not backbone:
            TokenLoss.install(self.model)

    @torch.compiler.disable
    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse to keep only some of the rows. PEFT skips this hook; then labels and logits differ in number."""
        kept = kwargs.get("logits_to_keep")
        if RADIX not in kwargs:
            return
        if self.refused is not None:  # its backbone may receive no sign of it
            raise UserError(self.refused)
        if isinstance(kept, Tensor) or kept:
            raise UserError(
                "logits_to_keep cannot be used with a radix batch, whose rows are predictions already; leave it out"
            )

    @torch.compiler.disable  # dynamo cannot trace the dataclass, and would warn; it runs once a pass
    def before(self, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the layers the call that they take part in. `_ordinary` handles a batch without a plan."""
        self.progress.begin(None)  # trial calls, before the kind of call is known, are ordinary
        if kwargs.get("radix_call") is not None:  # a pass of generation
            return None
        radix = kwargs.get(RADIX)
        if radix is not None or self.padded is not None:
            self._judge_again(Parts(self.model, backbone, text_decoder_of(backbone)))
        given = self._ordinary(backbone, args, kwargs) if radix is None else self._radix(backbone, radix, args, kwargs)
        if given is None:
            return None
        call: RadixCall = given["radix_call"]
        for tensor in (given.get("input_ids"), given.get("inputs_embeds"), given.get("position_ids")):
            if tensor is not None:  # or compiled layers would be compiled again for the second batch
                torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 1 - tensor.is_floating_point())
        for tensor in (call.layout.host, call.layout.rows):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        self.progress.become(call)
        call.ordinary, call.generators = (args, kwargs), generator_states(call.layout.device)
        return (), given

    def _judge_again(self, parts: Parts) -> None:
        """Judge the model again if its settings or modules have changed, as a program may do between two calls."""
        decoder, traits = parts.decoder, traits_of(parts.decoder)
        if traits == self.traits:
            return
        forget_verdicts(decoder)
        self.changed = why_unsupported(parts, "share_prefixes")
        mixers = list(mixers_of(decoder).values())
        if not set(mixers) <= set(self.mixers):
            self.changed = f"{parts.name} has got further recurrent layers; call share_prefixes or prepare_model again"
        elif self.changed is None:
            self.mixers, self.num_layers = mixers, num_attention_layers(decoder) if text_layers(decoder) else None
        if self.padded is not None:
            self.padded.left_padding = self.padded.separates = None
        self.traits = traits  # last: until then other threads judge too

    def _radix(
        self, backbone: PreTrainedModel, radix: RadixInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments for a batch of a `RadixCollator`."""
        if reason := self.refused or self.changed:
            raise UserError(reason)
        end_watch()
        given = {name: value for name, value in arguments_of(backbone, args, kwargs).items() if name != RADIX}
        radix = on_device_of_rows(radix, given)
        layout = own_layout(radix)
        given.update(in_one_row(given, layout))
        if radix.image_rows is not None and self.split is None:  # a split batch with images is refused
            given = with_features(backbone, radix, given)
        self._check(backbone, layout, radix, given)
        predictors = _requested_rows(radix)
        self._count(backbone, radix, layout, predictors.shape[0])
        may_bind = layout.blocks is not None or window_may_bind(text_decoder_of(backbone).config, layout.max_seqlen)
        options = layout, predictors, self.attention, self.kernel, may_bind
        call = RadixCall(*options) if self.split is None else SplitCall(self.split, *options)
        call.token_loss, call.place_rows = radix.token_loss, radix.place_rows
        mask = no_mask(may_bind, layout.device, call)
        types = types_for(backbone, layout)
        return {**given, **types, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _count(self, backbone: PreTrainedModel, radix: RadixInputs, layout: TreeLayout, num_head_rows: int) -> None:
        """Count a batch of a `RadixCollator`."""
        num_own, shares = layout.num_tokens, layout.shares
        self.sharing.count(backbone, shares, HELP_NOT_ALIKE)
        self.report.num_shared += shares
        if not shares:
            self.report.not_shared[NOT_ALIKE] += 1
        num_tokens = num_own if radix.num_tokens is None else radix.num_tokens
        num_places = layout.num_sequences * layout.max_seqlen if num_tokens else 0  # B x L
        self.report.count_tokens(num_places, num_tokens, layout.num_rows)
        if self.model is not backbone:
            self.report.count_head(num_places, num_head_rows)

    def _ordinary(
        self, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the arguments for an ordinary batch on its unique tokens, after `share_prefixes`; None if unshared."""
        if self.padded is None:
            self.sharing.count(backbone, False, HELP_ORDINARY)
            is_generation = not torch.is_grad_enabled() and is_generating()
            self.report.count_unshared(GENERATION if is_generation else ORDINARY)
            return None
        given = None
        if reason := self.changed or (backbone.training and self.drew):
            self.report.count_unshared(reason)
        else:
            why = partial(why_inexact, progress=self.progress, allowed=self.allow_dropout)
            given = self.padded.call_on_unique_tokens(self.model, backbone, args, kwargs, why)
        if given is not None:
            given = self._allowed(backbone, self.padded, given)
        self.sharing.count(backbone, bool(self.padded.report.num_shared), self.padded.report)
        return given

    def _allowed(
        self, backbone: PreTrainedModel, padded: PaddedSharing, given: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Refuse what draws at random, or return None to leave the call.

        given: the arguments of the call.
        """
        try:
            check_draws(text_decoder_of(backbone), self.model.get_output_embeddings(), self.allow_dropout)
        except UserError as error:
            if not padded.leaves_refused:
                raise
            padded.report.not_shared[str(error)] += 1
            return None
        padded.count(given["radix_call"])
        return given

    def _check(
        self, backbone: PreTrainedModel, layout: TreeLayout, radix: RadixInputs, given: Mapping[str, Any]
    ) -> None:
        """Refuse what would change the gradient of this batch."""
        check_one_device(backbone)
        check_evaluation()
        decoder, head = text_decoder_of(backbone), self.model.get_output_embeddings()
        check_own_attention(type(decoder).__name__, decoder)
        if self.split is None:
            check_inputs(decoder, given, layout.num_rows)
        elif radix.split is not None:
            check_inputs(decoder, given, self.split.rows_per_rank(layout.num_rows))
        else:
            raise UserError(
                "a radix batch came to a model of prepare_model(model, sp_group=...) without having been split over "
                "its ranks: call what prepare_model got, not a part of it; let PEFT wrap the model before that"
            )
        check_pass(decoder, head, layout, radix.is_left_padded, self.allow_dropout)
        hooks = hooks_of(backbone) if self.model is backbone else None
        reason = why_third_party(self.model, self.model, hooks)
        shape, allowed = (layout.num_sequences, layout.max_seqlen), self.allow_dropout
        reason = reason or why_inexact(backbone, head, progress=self.progress, allowed=allowed, shape=shape)
        if reason:
            fix = "" if TRAIN_WITHOUT_SHARING in reason else f"; leave out what differs, or {TRAIN_WITHOUT_SHARING}"
            raise UserError(f"a batch of a RadixCollator: {reason}{fix}")

    @torch.compiler.disable
    def after(self, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Check that every layer ran tree attention, keep the rows that predict, expand router logits to all tokens."""
        self.progress.end()
        call = kwargs.get("radix_call")
        if output is None or not isinstance(call, RadixCall):
            return None
        if reason := self._why_drawn(backbone, call):
            return self._without_sharing(backbone, call, reason)
        self._check_mixers(backbone, call)
        call.check_layers(backbone, self.num_layers, WITHOUT_THE_TREE)
        self._expand_router_logits(type(backbone).__name__, output, kwargs, call)
        if call.places is not None:
            assert self.padded is not None
            return self.padded.outputs_at_places(output, call)
        if call.predictor_indices is None:
            return output
        rows = gather_rows(output[0][0], call.predictor_indices)
        if not (call.token_loss or is_compiled()):
            share_fused_heads()
            rows = watched(rows, not is_frozen(self.model), call.place_rows)
        if call.place_rows is None:
            return with_rows(output, rows[None])
        if len(rows) == call.place_rows.size:
            return with_rows(output, rows.view(*call.place_rows.shape, -1))
        counted = SharingReport()  # with the batch
        return with_rows(output, SpreadRows.of(rows, call.place_rows.clip(0), NO_ROW, counted))

    def _why_drawn(self, backbone: PreTrainedModel, call: RadixCall) -> str | None:
        """Say what a pass drew at random. Modules may hold a number that the configuration does not have."""
        if self.allow_dropout or not has_drawn(call.layout.device, call.generators):
            return None
        decoder = text_decoder_of(backbone)
        reason = why_inexact(backbone, progress=self.progress, drew=True)
        return reason and (
            f"{reason} ({number_that_draws(decoder) or 'in a layer'}), once for a shared token, but an ordinary batch "
            f"draws once per copy; set it to 0 in the modules, which read the configuration only when they are made, "
            f"or allow it by name: allow_dropout"
        )

    def _without_sharing(self, backbone: PreTrainedModel, call: RadixCall, reason: str) -> Any:
        """Refuse a pass that drew, or compute it again as an ordinary one, from the same generators."""
        self.report.num_shared -= 1
        self.report.count_unshared(reason)
        if self.padded is None or not self.padded.leaves_refused:
            raise UserError(reason)
        self.drew = reason
        set_generator_states(call.layout.device, call.generators)
        args, kwargs = call.ordinary
        with self.progress.during(None):
            return backbone.forward(*args, **kwargs)

    @saying_what_was_tested()
    def _check_mixers(self, backbone: PreTrainedModel, call: Any) -> None:
        missing = [module for module in self.mixers if id(module) not in call.mixed]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self.mixers)} recurrent layers of {type(backbone).__name__} did not run on "
                f"the tree, and their gradient would be wrong; the first is a {type(missing[0]).__name__}. If it is "
                f"among PEFT's modules_to_save, leave it out there: the model has it twice; if the model has changed, "
                f"call prepare_model again"
            )

    def _expand_router_logits(self, name: str, output: Any, kwargs: Mapping[str, Any], call: Any) -> None:
        """Expand router logits of the U unique rows to the original tokens, in place: the loss counts each token once.

        In a padded batch they go to their places, and Hugging Face's loss leaves out padding.
        """
        if isinstance(output, tuple):
            if kwargs.get("output_router_logits"):
                raise UserError(f"{name} returns its router logits in a tuple; call it with return_dict=True")
            return
        router_logits = getattr(output, "router_logits", None)
        if router_logits is None:
            return
        expanded = []
        for index, logits in enumerate(router_logits):
            rows = logits.flatten(0, -2)
            if len(rows) != call.num_rows:
                raise UserError(
                    f"{name} layer {index} returns router logits of shape {tuple(logits.shape)} for "
                    f"{call.num_rows} unique tokens, so the router loss cannot be counted by token; set "
                    f"output_router_logits to false"
                )
            if call.places is None:
                expanded.append(gather_rows(call.all_rows(rows), call.layout.inverse_indices))
            else:
                assert self.padded is not None
                expanded.append(self.padded.at_places(rows, call.places).whole().flatten(0, 1))
        output.router_logits = tuple(expanded)


def _requested_rows(radix: RadixInputs) -> Tensor:
    """Return the rows that the head gets, int64: one for each place, in order, or each once if that saves enough."""
    rows, place_rows = radix.predictor_indices, radix.place_rows
    if place_rows is not None and (is_compiled() or place_rows.size < MIN_SAVING * len(rows)):
        return rows[radix.prediction_rows]
    return rows


def remove_hooks(model: nn.Module) -> None:
    """Remove our hooks from every module."""
    for module in model.modules():
        for hooks, options in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), BackboneHooks | LayerHooks):
                    del hooks[number]
                    options.pop(number, None)
                    module._forward_hooks_always_called.pop(number, None)
