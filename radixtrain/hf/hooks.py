"""The hooks of a prepared model: a radix batch goes in as flat entries and comes out as the rows that predict.

- `before`, on the backbone, turns the `radix_` entries of a batch into one object that reaches every layer, gives mask
  creation an empty tensor, so that no U x U mask is ever built, and refuses what would change the gradient;
- `after`, on the backbone, checks that every layer ran tree attention, gives the head the rows that predict,
  `[1, P, D]`, and gives the router loss the logits of every original token;
- `at_head`, on the head, checks that the head gets all of these rows.

An ordinary batch passes through untouched. `radixtrain/hf/prepare.py` installs the hooks.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.adapters import check_adapters
from radixtrain.hf.attention import ATTENTION_NAME, EAGER_NAME, RadixCall, register_attention
from radixtrain.hf.backbone import text_decoder_of, with_rows
from radixtrain.hf.evaluation import check_evaluation
from radixtrain.hf.refusals import check_pass
from radixtrain.hf.trainers import check_not_cut
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.cost_model import CHOICES
from radixtrain.tree.layout import PREFIX, TreeLayout

__all__ = ["BackboneHooks", "HeadCheck"]

logger = logging.getLogger(__name__)

# Arguments of a forward pass that do not fit a radix batch, and what to do instead; others by pattern.
NO_ROOM_FOR = {
    "^attention_mask$": "a radix batch has no padding: take the mask out, and train prompt or prefix tuning without it",
    "^past_key_values$": "a cache, or prefix tuning, puts keys in front of every row: use an ordinary batch",
    "token_type_ids$": "they are not part of a radix batch: use an ordinary batch",
    "pixel|image|video|audio|^input_features": "radix batches are text: use an ordinary batch for such rows",
}
# Outputs that would come back by unique token, not by row.
RETURNED_PER_TOKEN = ("output_hidden_states", "output_attentions")


@dataclass(eq=False)
class HeadCheck:
    """Whether the head of a prepared model gets all rows that predict.

    An object of its own, since a copy of the head, as PEFT makes one, copies what the head's hooks hold.
    """

    in_model: bool = False  # the backbone runs inside the model's forward pass, so that the head comes next
    num_predicting: int | None = None  # rows that the head is about to get

    @torch.compiler.disable
    def enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """The model's own forward pass begins. PEFT skips this hook; then a cut of the rows is a shape error."""
        self.in_model = True

    @torch.compiler.disable
    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It ends: whoever calls the head directly may give it any rows."""
        self.in_model, self.num_predicting = False, None

    @torch.compiler.disable
    def at_head(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse a head that gets only some of the rows."""
        wanted, self.num_predicting = self.num_predicting, None
        if wanted is not None and args and isinstance(args[0], Tensor) and args[0].shape[-2] != wanted:
            raise UserError(
                f"the head gets {args[0].shape[-2]} of the {wanted} rows that predict: logits_to_keep cannot be used "
                f"with a radix batch, whose rows are predictions already; leave it out"
            )


@dataclass(eq=False)
class BackboneHooks:
    """What a prepared model does around its own forward pass.

    model: the Hugging Face model, to which trainers may add adapters.
    attention, kernel, allow_dropout: as given to `prepare_model`.
    num_layers: decoder layers, each of which must run tree attention.
    """

    model: PreTrainedModel
    attention: str
    kernel: str
    num_layers: int
    allow_dropout: tuple[str, ...]
    choices: set[tuple[str, int | None]] = field(default_factory=set)
    head: HeadCheck = field(default_factory=HeadCheck)

    def __deepcopy__(self, memo: dict[int, Any]) -> BackboneHooks:
        """A copy of the backbone by itself does not copy the model around it."""
        model = memo.get(id(self.model), self.model)
        copied = replace(self, model=model, choices=set(self.choices), head=deepcopy(self.head, memo))
        memo[id(self)] = copied
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A prepared model that is unpickled in a fresh process needs the attention functions there."""
        self.__dict__.update(state)
        register_attention()

    @torch.compiler.disable  # dynamo cannot trace the dataclass, and would warn; it runs once a pass
    def before(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turn the flat entries into one object for the layers. An ordinary batch is not changed."""
        self.head.num_predicting = None
        entries = {name: value for name, value in kwargs.items() if name.startswith(PREFIX)}
        if not entries:
            return None
        layout = _layout(entries)
        check_not_cut(backbone, layout)
        check_evaluation(backbone)
        check_adapters((self.model, backbone), self.allow_dropout)
        decoder = text_decoder_of(backbone)
        given = dict(zip(_parameters_of(backbone), args, strict=False))
        given.update((name, value) for name, value in kwargs.items() if name not in entries)
        _check_in_force(decoder)
        rows = _check_inputs(given, layout)
        _check_no_more(decoder, given)
        head = self.model.get_output_embeddings()
        check_pass(decoder, head, layout, f"{PREFIX}left_padded" in entries, self.allow_dropout)
        may_bind = window_may_bind(decoder.config, layout)
        predictor_indices = entries.get(f"{PREFIX}predictor_indices")
        call = RadixCall(layout, predictor_indices, self.attention, self.kernel, may_bind, self._chosen(entries))
        mask = no_mask(may_bind, rows.device, call)
        return (), {**given, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _chosen(self, entries: Mapping[str, Any]) -> str | None:
        """The strategy that the collator's `step_cost` chose, logged the first time; None if it chose none."""
        place = entries.get(f"{PREFIX}strategy")
        if place is None or self.attention != "auto":
            return None
        choice = CHOICES[place], entries.get(f"{PREFIX}min_shared_tokens")
        if choice not in self.choices:
            self.choices.add(choice)
            logger.info("a batch is fastest with attention=%s, min_shared_tokens=%s", *choice)
        return choice[0]

    def after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Check that every layer ran tree attention, keep the rows that predict, expand router logits to all tokens."""
        call = kwargs.get("radix_call")
        if call is None:
            return None
        # DiffLlama calls its attention twice a layer; a model that runs one layer twice has fewer modules than layers
        if self.num_layers not in (len(call.calls), len(set(call.calls))):
            raise RuntimeError(
                f"radix attention ran in {len(set(call.calls))} of {self.num_layers} layers of "
                f"{type(backbone).__name__}: the others attended without the tree, and their gradient would be wrong; "
                f"if they are not there, set num_hidden_layers of its configuration and call prepare_model again"
            )
        _expand_router_logits(type(backbone).__name__, output, kwargs, call.layout)
        if call.predictor_indices is None:
            return output
        hidden = output[0]
        predicting = gather_rows(hidden[0], call.predictor_indices)[None]
        self.head.num_predicting = predicting.shape[1] if self.head.in_model else None
        return with_rows(output, predicting)


def _parameters_of(backbone: nn.Module) -> list[str]:
    return list(inspect.signature(backbone.forward).parameters)


def _layout(entries: Mapping[str, Any]) -> TreeLayout:
    try:
        return TreeLayout.from_batch(entries)
    except KeyError as missing:
        raise UserError(
            f"the batch lost its entry {missing}: keep every key of the collator (remove_unused_columns does not "
            f"touch them)"
        ) from None


def _check_in_force(decoder: Any) -> None:
    name = decoder.config._attn_implementation
    if name not in (ATTENTION_NAME, EAGER_NAME):
        raise UserError(
            f"a radix batch needs attn_implementation={ATTENTION_NAME!r}, but it is now {name!r}: the tree would "
            f"be ignored; call prepare_model again"
        )


def _check_inputs(given: Mapping[str, Any], layout: TreeLayout) -> Tensor:
    """The unique tokens of the batch, as ids or as embeddings. Refuses a batch that lost some, or their positions."""
    rows = given.get("input_ids")
    rows = given.get("inputs_embeds") if rows is None else rows
    if rows is None or tuple(rows.shape[:2]) != (1, layout.num_rows):
        came = None if rows is None else tuple(rows.shape)
        raise UserError(
            f"a radix batch of {layout.num_rows} unique tokens needs input_ids [1, {layout.num_rows}], got {came}; "
            f"something on the way cut the batch or added tokens to it (prompt tuning does)"
        )
    positions = given.get("position_ids")
    if positions is None or positions.shape[-1] != layout.num_rows:
        came = None if positions is None else tuple(positions.shape)
        raise UserError(
            f"a radix batch of {layout.num_rows} unique tokens needs its position_ids [1, {layout.num_rows}], got "
            f"{came}: without them a token after a shared prefix would get the position of its row; keep every key of "
            f"the collator"
        )
    return rows


def _check_no_more(decoder: Any, given: Mapping[str, Any]) -> None:
    """Refuse inputs and outputs that do not fit a batch of unique tokens."""
    for name, value in given.items():
        reason = next((reason for pattern, reason in NO_ROOM_FOR.items() if re.search(pattern, name)), None)
        if reason and isinstance(value, Tensor | Cache):
            raise UserError(f"a radix batch came with {name}; {reason}")
    for name in RETURNED_PER_TOKEN:
        wanted = given.get(name)
        if getattr(decoder.config, name, False) if wanted is None else wanted:
            raise UserError(
                f"{name} would come back by unique token, not by row; turn it off, or give the model an ordinary batch"
            )


def _expand_router_logits(name: str, output: Any, kwargs: Mapping[str, Any], layout: TreeLayout) -> None:
    """Router logits of the U unique rows -> of the T original tokens, in place: the loss counts each once."""
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
        if len(rows) != layout.num_rows:
            raise UserError(
                f"{name} layer {index} returns router logits of shape {tuple(logits.shape)} for {layout.num_rows} "
                f"unique tokens, so the router loss cannot be counted by token; set output_router_logits to false"
            )
        expanded.append(gather_rows(rows, layout.inverse_indices))
    output.router_logits = tuple(expanded)
