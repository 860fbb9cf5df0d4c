"""The hooks of a shared model, the same for both kinds of batch: those of a `RadixCollator`, and ordinary ones.

- `before`, on the backbone, turns a batch into the call on unique tokens that reaches every layer, gives mask creation
  an empty tensor, so that no U x U mask is ever built, or leaves an ordinary batch as it is;
- `after` checks that every layer ran tree attention, and gives the router loss the logits of every original token;
- `before_model`, on the model, checks that the head will get all rows of a `RadixCollator`'s batch.

A batch of a `RadixCollator` has its plan, and the rows that predict, which the head gets. What would change its
gradient is refused: it has no other form in which it could run. How an ordinary batch is read, and what the head gets
of it, is in `padded/sharing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import Parts, arguments_of, in_one_row, text_decoder_of, with_rows
from radixtrain.hf.guards.batch import check_batch, check_evaluation, on_device_of_rows, own_layout
from radixtrain.hf.guards.draws import generator_states, has_drawn, set_generator_states, why_refused
from radixtrain.hf.guards.model import look
from radixtrain.hf.guards.rules import EntryPoint
from radixtrain.hf.padded.calls import LEARNS_NOTHING, is_compiled
from radixtrain.hf.padded.causes import with_made_masks
from radixtrain.hf.padded.row_functions import share_fused_heads
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.hf.pictures import compute_every_picture, compute_pictures_once
from radixtrain.hf.progress import Upstream, running
from radixtrain.hf.recurrent import LayerHooks
from radixtrain.hf.sequence_parallel import SplitCall, SplitModel
from radixtrain.hf.sharing_report import HELP_NOT_ALIKE, NOT_ALIKE, SharingReport, SharingWatch, is_frozen
from radixtrain.hf.token_losses import TokenLoss, watched
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RADIX, RadixInputs
from radixtrain.versions import untested

WITHOUT_THE_TREE = (
    "attended without the tree, and their gradient would be wrong; if they are not there, set num_hidden_layers of its "
    "configuration and call share_prefixes again"
)


@dataclass(eq=False)
class BackboneHooks:
    """What a shared model does around its own forward pass.

    model: the Hugging Face model, to which trainers may add adapters.
    padded: shares ordinary batches. It has the options.
    watch: warns if nothing is shared. report: counts what is shared.
    refused: why it takes no batch of a `RadixCollator`; None if it does.
    split: spreads these over the ranks of `sp_group`; None without one.
    rules: that apply if the model has changed; None if it is shared for one call, to which they applied.
    """

    model: PreTrainedModel
    padded: PaddedSharing
    watch: SharingWatch
    report: SharingReport
    refused: str | None
    split: SplitModel | None
    rules: EntryPoint | None

    def __deepcopy__(self, memo: dict[int, Any]) -> BackboneHooks:
        """Copy the hooks; a copy of the backbone only does not copy the model around it."""
        memo[id(self)] = copied = copy(self)
        copied.model = memo.get(id(self.model), self.model)
        for name in ("padded", "watch", "report", "split"):
            setattr(copied, name, deepcopy(getattr(self, name), memo))
        return copied

    def install(self, backbone: PreTrainedModel) -> None:
        """Register the hooks on the backbone and the model, where `remove_hooks` finds them by their owner."""
        # Or the model would run code that was compiled for one of its class without hooks.
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        backbone.register_forward_pre_hook(self.before, with_kwargs=True)
        options = {"with_kwargs": True, "prepend": True, "always_call": True}  # the user's see [B, L, D]
        backbone.register_forward_hook(self.after, **options)
        decoder = text_decoder_of(backbone)
        if decoder is not backbone:
            decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True)
            decoder.register_forward_hook(self.after, **options)
            backbone.get_input_embeddings().register_forward_hook(self.after_embedding)
            compute_pictures_once(backbone)
        self.model.register_forward_pre_hook(self.before_model, with_kwargs=True)
        if self.refused is None and self.model is not backbone:
            TokenLoss.install(self.model)

    @torch.compiler.disable
    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse to keep only some of the rows. PEFT skips this hook; then labels and logits differ in number."""
        if RADIX not in kwargs:
            return
        if self.refused is not None:  # its backbone may receive no sign of it
            raise UserError(self.refused)
        to_keep = kwargs.get("logits_to_keep")
        if isinstance(to_keep, Tensor) or to_keep:
            raise UserError(
                "logits_to_keep cannot be used with a radix batch, whose rows are predictions already; leave it out"
            )

    @torch.compiler.disable  # dynamo cannot trace the dataclass, and would warn; it runs once a pass
    def before(self, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the layers the call that they take part in; None leaves a call as it is."""
        running.begin(None)  # trial calls, before the kind of call is known, are ordinary
        if kwargs.get("radix_call") is not None:  # a pass of generation
            return None
        if kwargs.get(RADIX) is not None:
            given = self._of_collated(backbone, arguments_of(backbone, args, kwargs))
            return self._begun(backbone, given, args, kwargs)
        call = self.padded.begin(self.model, backbone, args, kwargs)
        if call is None:
            self.watch.count(backbone, bool(self.report.num_shared), self.report)
            return None
        if call.decoder is backbone:
            return self._shared(call, args, kwargs)
        running.become(call)
        return (), {**call.given, "input_ids": call.held_by_ids()}

    @torch.compiler.disable
    def before_decoder(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Share an ordinary batch at the text decoder of a backbone that is more than this."""
        outer, call = running.call, running.upstream()
        running.begin(None if isinstance(outer, Upstream) else outer)
        if call is None or call.decoder is not decoder:
            return None
        return self._shared(call, args, kwargs) or ((), with_made_masks(arguments_of(decoder, args, kwargs)))

    @torch.compiler.disable
    def after_embedding(self, embedding: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the embedding returned, where a gradient might be read."""
        call = running.upstream()
        if call is not None and call.backbone.get_input_embeddings() is embedding:
            call.embedded.append(output)

    def _shared(self, call: Upstream, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the decoder gets in place of args and kwargs; None if the call is not shared."""
        given = self.padded.arguments(call, args, kwargs)
        self.watch.count(call.backbone, bool(self.report.num_shared), self.report)
        return None if given is None else self._begun(call.decoder, given, args, kwargs)

    def _begun(
        self, module: PreTrainedModel, given: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Begin a call on unique tokens of this module, and return its arguments. args, kwargs: of the ordinary one."""
        call: RadixCall = given["radix_call"]
        for tensor in (given.get("input_ids"), given.get("inputs_embeds"), given.get("position_ids")):
            if tensor is not None:  # or compiled layers would be compiled again for the second batch
                torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 1 - tensor.is_floating_point())
        for tensor in (call.layout.host, call.layout.rows):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        running.become(call)
        call.module, call.ordinary = module, (args, kwargs)
        call.generators = generator_states(call.layout.device)
        return (), given

    def _of_collated(self, backbone: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call that computes the unique tokens of a `RadixCollator`'s batch.

        given: the arguments of the backbone. Raises UserError if it would be inexact.
        """
        if self.refused is not None:
            raise UserError(self.refused)
        end_watch()
        check_evaluation()
        radix = on_device_of_rows(given.pop(RADIX), given)
        layout = own_layout(radix)
        given.update(in_one_row(given, layout))
        options, allowed = self.padded.options, self.padded.options.allow_dropout
        parts, head = Parts(self.model, backbone, text_decoder_of(backbone)), self.model.get_output_embeddings()
        share = None if self.split is None else self.split.rows.share
        check_batch(parts, head, radix, layout, given, share, allowed)
        shape = layout.num_sequences, layout.max_seqlen
        verdict = look(parts, head, rules=self.rules, allowed=allowed, outer=[backbone])
        if (reason := verdict.why_not(backbone, head, allowed, shape)) is not None:
            fix = "" if TRAIN_WITHOUT_SHARING in reason else f"; leave out what differs, or {TRAIN_WITHOUT_SHARING}"
            raise UserError(f"a batch of a RadixCollator: {reason}{fix}")
        predictors = radix.predictor_indices
        if radix.place_rows is not None:
            predictors = predictors[radix.prediction_rows]
        self._count_collated(backbone, radix, layout, len(predictors))
        may_bind = window_may_bind(parts.decoder.config, layout.max_seqlen)
        how = layout, predictors, options.attention, options.kernel, may_bind, None, verdict
        call = RadixCall(*how) if self.split is None else SplitCall(self.split.rows, *how)
        call.token_loss, call.place_rows = radix.token_loss, radix.place_rows
        mask = no_mask(may_bind, layout.device, call)
        return {**given, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _count_collated(
        self, backbone: PreTrainedModel, radix: RadixInputs, layout: TreeLayout, num_predictors: int
    ) -> None:
        """Count a batch of a `RadixCollator`."""
        num_own, shares = layout.num_tokens, layout.shares
        self.report.num_shared += shares
        if not shares:
            self.report.not_shared[NOT_ALIKE] += 1
        num_tokens = num_own if radix.num_tokens is None else radix.num_tokens
        num_places = layout.num_sequences * layout.max_seqlen if num_tokens else 0  # B x L
        self.report.count_tokens(num_places, num_tokens, layout.num_rows)
        if num_predictors and self.model is not backbone:
            self.report.count_head(num_places, num_predictors)
        self.watch.count(backbone, shares, HELP_NOT_ALIKE)

    def _predicting(self, output: Any, call: RadixCall) -> Any:
        """Return the rows that predict in place of the backbone's, (1, U, D).

        In a row for each sequence, one for each label; or in one row, if the loss is not the model's own.
        """
        assert call.predictor_indices is not None
        rows = gather_rows(output[0][0], call.predictor_indices)
        learns = torch.is_grad_enabled() and (rows.requires_grad or not is_frozen(self.model))
        if learns and not call.token_loss and not is_compiled():
            share_fused_heads()
            rows = watched(rows, call.place_rows)
        shape = (1, len(rows)) if call.place_rows is None else call.place_rows.shape
        return with_rows(output, rows.view(*shape, rows.shape[1]))

    @torch.compiler.disable
    def after(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """End a call of the backbone or its decoder, and finish it where the unique tokens began."""
        ended, call = running.end(), kwargs.get("radix_call")
        if isinstance(ended, Upstream):
            ended.given = {}  # autograd keeps the ids, which hold the call, until the backward pass
        if output is None or not isinstance(call, RadixCall) or call.module is not module:
            return None
        return self._finished(call, kwargs, output)

    def _finished(self, call: RadixCall, kwargs: dict[str, Any], output: Any) -> Any:
        """Check that every layer ran tree attention, and return the output as the head gets it."""
        module = call.module
        if has_drawn(call.layout.device, call.generators) and (reason := self._why_drawn(call)):
            is_refused = call.places is None or not self.padded.leaves_refused
            if not is_refused:
                call.verdict.reason = reason
            return self._without_sharing(call, reason, is_refused)
        if call.places is not None and call.places.are_unwatched(output[0]):
            return self._without_sharing(call, LEARNS_NOTHING)
        call.ordinary = (), {}
        _check_mixers(call)
        call.check_layers(module, call.verdict.num_layers, WITHOUT_THE_TREE)
        if kwargs.get("output_router_logits") or getattr(output, "router_logits", None) is not None:
            expand = _of_every_token if call.places is None else self.padded.of_every_token
            _expand_router_logits(type(module).__name__, output, call, expand)
        return self._predicting(output, call) if call.places is None else self.padded.outputs(output, call)

    def _why_drawn(self, call: RadixCall) -> str | None:
        """Say what a pass has drawn at random, unless it was allowed or changes nothing."""
        allowed = self.padded.options.allow_dropout
        reason = call.verdict.if_drawn.why_not(call.module, allowed=allowed)
        return reason and why_refused(reason, text_decoder_of(call.module), allowed)

    def _without_sharing(self, call: RadixCall, reason: str, is_refused: bool = False) -> Any:
        """Compute a pass again as an ordinary one, from the same generators, or refuse it."""
        self.report.num_shared -= 1
        self.report.count_unshared(reason)
        if is_refused:
            raise UserError(reason)
        set_generator_states(call.layout.device, call.generators)
        args, kwargs = call.ordinary
        with running.during(None):
            return call.module.forward(*args, **with_made_masks(kwargs))


def _check_mixers(call: RadixCall) -> None:
    """Raise RuntimeError unless every recurrent layer ran on the tree."""
    mixers: dict[int, str] = call.verdict.mixers
    missing = [name for number, name in mixers.items() if number not in call.mixed]
    if missing:
        raise RuntimeError(
            f"{len(missing)} of {len(mixers)} recurrent layers of {type(call.module).__name__} did not run on "
            f"the tree, and their gradient would be wrong; the first is a {missing[0]}. If it is "
            f"among PEFT's modules_to_save, leave it out there: the model has it twice; if the model has changed, "
            f"call share_prefixes again{untested()}"
        )


def _of_every_token(rows: Tensor, call: RadixCall) -> Tensor:
    """Return (T, W), the rows of the original tokens, of those of this process, (u, W)."""
    return gather_rows(call.all_rows(rows), call.layout.inverse_indices)


def _expand_router_logits(
    name: str, output: Any, call: RadixCall, expand: Callable[[Tensor, RadixCall], Tensor]
) -> None:
    """Expand router logits of the U unique rows to the original tokens, in place: the loss counts each token once.

    In a padded batch they go to their places, and Hugging Face's loss leaves out padding.
    """
    if isinstance(output, tuple):
        raise UserError(f"{name} returns its router logits in a tuple; call it with return_dict=True")
    expanded = []
    for index, logits in enumerate(output.router_logits):
        rows = logits.flatten(0, -2)
        if len(rows) != call.num_rows:
            raise UserError(
                f"{name} layer {index} returns router logits of shape {tuple(logits.shape)} for "
                f"{call.num_rows} unique tokens, so the router loss cannot be counted by token; set "
                f"output_router_logits to false"
            )
        expanded.append(expand(rows, call))
    output.router_logits = tuple(expanded)


def remove_hooks(model: nn.Module) -> None:
    """Remove our hooks from every module."""
    for module in model.modules():
        compute_every_picture(module)
        for hooks, options in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), BackboneHooks | LayerHooks):
                    del hooks[number]
                    options.pop(number, None)
                    module._forward_hooks_always_called.pop(number, None)
