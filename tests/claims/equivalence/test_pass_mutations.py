"""The tests of a step in passes are tested: each mistake below leaves a gradient wrong, and the float64 bar sees it.

Many of them leave the loss as it is: the forward pass is right, and the gradient of the kept rows is not.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from same_step import BAR, step_in_float64

import radixtrain.hf.step_losses
from radixtrain import step_losses
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.step_rows import StepRows
from radixtrain.collators.steps import Pass, Step, StepCollator
from radixtrain.hf.pass_cache import LayerRows, PassCache
from radixtrain.kernels.cpu_loops import TorchCPUKernel
from radixtrain.tree.context import ContextLayout
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import with_radix
from radixtrain.verification.report import Rung

PROMPT = [7, 8, 9, 10, 11]
# Two levels of kept rows, labels on kept rows and at every border; one micro-batch has context on two branches.
FEATURES = [
    {"input_ids": [*PROMPT, 1, 2, 3, 4, 5], "labels": [-100, 8, 9, 10, 11, 1, 2, 3, 4, 5]},
    {"input_ids": [*PROMPT, 1, 2, 3, 6, 9], "labels": [-100, -100, 9, 10, 11, 1, -100, 3, 6, 9]},
    {"input_ids": [*PROMPT, 20, 21, 22, 23, 4], "labels": [-100, 8, 9, -100, 11, 20, 21, 22, 23, 4]},
    {"input_ids": [*PROMPT, 20, 21, 22, 31, 7], "labels": [-100, 8, 9, -100, -100, 20, 21, -100, 31, 7]},
]
Patch = pytest.MonkeyPatch


def step_of(**options: Any) -> Step:
    return StepCollator(max_tokens=5, share_across_micro_batches=True, **options)(FEATURES)


def rung_of(model: Any, step: Step | None = None, attention: str = "cascade") -> Rung:
    return step_in_float64(model, FEATURES, partial(step_losses, step=step or step_of()), attention=attention)


def is_seen(rung: Rung, in_the_loss: bool) -> None:
    assert rung.worst.radix > 1e-6, f"the bar of {BAR} lets it through: {rung.worst}"
    assert (rung.loss_error > BAR) == in_the_loss, rung.loss_error


@pytest.mark.parametrize("attention", ["cascade", "path"])
@pytest.mark.parametrize("holds_graph", [False, True])
def test_without_a_mutation(tiny_qwen3: Callable[..., Any], attention: str, holds_graph: bool) -> None:
    step = step_of(holds_graph=holds_graph)
    assert [len(batch["radix"].sources) for batch in step.micro_batches].count(0) == 1, "one pass begins all"
    contexts = [batch["radix"].layout.context for batch in step.micro_batches]
    assert sum(not trains for _, trains in step.passes) == 3, "kept rows on two levels, and on two branches"
    assert max(len(context.bounds) for context in contexts if context) == 3
    rung = rung_of(tiny_qwen3(), step, attention)
    assert rung.worst.radix <= BAR and rung.loss_error <= BAR and not rung.dead


# Mistakes of the collator ------------------------------------------------------------------------------------------


def kept_labels_left_out(patch: Patch) -> None:
    kept = StepRows.kept_predictions

    def none(rows: StepRows, place: int) -> Any:
        found = kept(rows, place)
        return type(found)(*(column[:0] for column in found))

    patch.setattr(StepRows, "kept_predictions", none)


def a_label_at_the_border_twice(patch: Patch) -> None:
    """The first new token of a sequence is predicted in the kept pass, and in its own micro-batch from itself too."""
    own = RadixCollator.collate_pass

    def twice(collator: Any, step: StepRows, spans: Any, kept_as: int | None = None, *args: Any) -> Any:
        batch = own(collator, step, spans, kept_as, *args)
        if kept_as is None and spans[0].start:
            label = step.packed.labels[step.tokens_of(spans)][0]
            zero, one = torch.tensor([0]), torch.tensor([1])
            batch["shift_labels"] = torch.cat([torch.tensor([[max(label, 0)]]), batch["shift_labels"]], 1)
            rows, weights = batch["radix"].prediction_rows, batch["radix"].loss_weights
            batch = with_radix(batch, prediction_rows=torch.cat([zero, rows]), loss_weights=torch.cat([one, weights]))
        return batch

    patch.setattr(RadixCollator, "collate_pass", twice)


def a_kept_label_by_one_sequence_only(patch: Patch) -> None:
    """As if each row of a kept pass were one labelled token, however many sequences continue it."""
    kept = StepRows.kept_predictions

    def once(rows: StepRows, place: int) -> Any:
        found = kept(rows, place)
        places = np.unique(np.stack(found[:2]), axis=1, return_index=True)[1]
        return type(found)(*(column[places] for column in found))

    patch.setattr(StepRows, "kept_predictions", once)


def positions_from_0_in_a_later_pass(patch: Patch) -> None:
    own = RadixCollator.collate_pass

    def from_0(*args: Any, **options: Any) -> Any:
        batch = own(*args, **options)
        return {**batch, "position_ids": batch["position_ids"] - batch["position_ids"].min()}

    patch.setattr(RadixCollator, "collate_pass", from_0)


def a_context_a_row_short(patch: Patch) -> None:
    """The last context row of every micro-batch is seen by no query."""
    own = ContextLayout.of

    def short(*args: Any) -> ContextLayout:
        layout = own(*args)
        *bounds, (q0, q1, k0, k1) = layout.bounds
        return replace(layout, bounds=(*bounds, *([(q0, q1, k0, k1 - 1)] if k1 - 1 > k0 else [])))

    patch.setattr(ContextLayout, "of", short)


def a_context_that_every_query_sees(patch: Patch) -> None:
    """Right for a prompt that all share; wrong in a micro-batch with context of two branches."""
    own = ContextLayout.of

    def everything(plan: Any, rows: Any, context: Any, ends: Any) -> ContextLayout:
        return replace(own(plan, rows, context, ends), bounds=((0, plan.num_unique_tokens, 0, len(context)),))

    patch.setattr(ContextLayout, "of", everything)


def sources_in_another_order(patch: Patch) -> None:
    """As many rows, from the same passes."""
    own = StepRows.context_of

    def turned(rows: StepRows, spans: Any) -> Any:
        context, sources, paths = own(rows, spans)
        return context, sources[::-1], paths

    patch.setattr(StepRows, "context_of", turned)


# Mistakes of the loop ----------------------------------------------------------------------------------------------


def later_passes_after_the_kept_one(patch: Patch) -> None:
    """Kept passes go backward in forward order, before those that continue them; and nothing refuses that."""
    refusing = LayerRows.add

    def add(rows: LayerRows, *args: Any) -> None:
        rows.joined.clear()
        refusing(rows, *args)

    patch.setattr(LayerRows, "add", add)

    def forward_order(step: Step, loss_sum: Any) -> Any:
        kept: dict[int, LayerRows] = {}
        first = [Pass(place, False) for place, trains in step.passes if not trains]
        for place, trains in [*first, *(Pass(place, True) for place in range(len(step.micro_batches)))]:
            if not trains:
                kept[place] = LayerRows()
            batch = step.micro_batches[place]
            context = [(kept[source], start, end) for source, start, end in batch["radix"].sources]
            with torch.set_grad_enabled(trains):
                loss = loss_sum(with_radix(batch, cache=PassCache(kept.get(place), context)))
            if trains:
                yield loss

    patch.setattr(radixtrain.hf.step_losses, "loss_sums", forward_order)


# Mistakes of the gradients -----------------------------------------------------------------------------------------


def keys_without_gradient(patch: Patch) -> None:
    patch.setattr(LayerRows, "add", lambda rows, layer, start, end, gradients: None)


def values_without_gradient(patch: Patch) -> None:
    own = LayerRows.add

    def only_keys(rows: LayerRows, layer: int, start: int, end: int, gradients: Any) -> None:
        own(rows, layer, start, end, [gradients[0], torch.zeros_like(gradients[1])])

    patch.setattr(LayerRows, "add", only_keys)


def only_the_first_later_pass(patch: Patch) -> None:
    own = LayerRows.add

    def first(rows: LayerRows, layer: int, start: int, end: int, gradients: Any) -> None:
        seen = rows.__dict__.setdefault("seen", set())
        if (layer, start, end) not in seen:
            seen.add((layer, start, end))
            own(rows, layer, start, end, gradients)

    patch.setattr(LayerRows, "add", first)


def only_the_last_later_pass(patch: Patch) -> None:
    own = LayerRows.add

    def written(rows: LayerRows, layer: int, start: int, end: int, gradients: Any) -> None:
        for total in rows.gradients.get(layer, ()):
            total[start:end] = 0
        own(rows, layer, start, end, gradients)

    patch.setattr(LayerRows, "add", written)


def gradients_on_the_wrong_rows(patch: Patch) -> None:
    """Of two neighbouring rows each gets that of the other."""
    own = LayerRows.add

    def turned(rows: LayerRows, layer: int, start: int, end: int, gradients: Any) -> None:
        own(rows, layer, start, end, [gradient.roll(1, 0) for gradient in gradients])

    patch.setattr(LayerRows, "add", turned)


def the_own_gradients_of_a_kept_pass_forgotten(patch: Patch) -> None:
    own = LayerRows.join

    def later(rows: LayerRows, layer: int, gradients: Any) -> Any:
        return own(rows, layer, [torch.zeros_like(gradient) for gradient in gradients])

    patch.setattr(LayerRows, "join", later)


def rows_by_the_order_of_the_layers(patch: Patch) -> None:
    """One entry for all layers, as if a layer were known without its id."""
    keys = PassCache.keys_and_values
    patch.setattr(PassCache, "keys_and_values", lambda cache, layer, *heads: keys(cache, 0, *heads))


def _in_context_pieces(patch: Patch, name: str, changed: Callable[..., Any]) -> None:
    """Change a function of the kernel for the calls onto a context, which `ContextLayout.pieces` makes.

    changed: called with the function as it was, and its arguments.
    """
    pieces, own = ContextLayout.pieces, getattr(TorchCPUKernel, name)
    calls: list[Any] = []

    def remembered(layout: ContextLayout, device: torch.device) -> Any:
        made = pieces(layout, device)
        calls.extend(piece.ragged for piece in made)
        return made

    def function(kernel: Any, *args: Any) -> Any:
        is_ours = any(args[-2] is ragged for ragged in calls)
        return changed(own, kernel, *args) if is_ours else own(kernel, *args)

    patch.setattr(ContextLayout, "pieces", remembered)
    patch.setattr(TorchCPUKernel, name, function)


def dq_of_context_pieces_forgotten(patch: Patch) -> None:
    def changed(own: Any, *args: Any) -> Any:
        dq, dk, dv = own(*args)
        return torch.zeros_like(dq), dk, dv

    _in_context_pieces(patch, "backward", changed)


def log_sum_exp_of_a_context_piece_off(patch: Patch) -> None:
    def changed(own: Any, *args: Any) -> Any:
        out, lse = own(*args)
        return out, lse + 0.01

    _in_context_pieces(patch, "forward", changed)


def log_sum_exp_of_a_context_piece_off_in_the_backward(patch: Patch) -> None:
    """The forward pass is right."""

    def changed(own: Any, *args: Any) -> Any:
        *before, lse, ragged, scoring = args
        return own(*before, lse + 0.01, ragged, scoring)

    _in_context_pieces(patch, "backward", changed)


SEEN_IN_THE_LOSS = [
    kept_labels_left_out,
    a_label_at_the_border_twice,
    a_kept_label_by_one_sequence_only,
    positions_from_0_in_a_later_pass,
    a_context_a_row_short,
    a_context_that_every_query_sees,
    sources_in_another_order,
    rows_by_the_order_of_the_layers,
    log_sum_exp_of_a_context_piece_off,
]
ONLY_IN_THE_GRADIENT = [
    later_passes_after_the_kept_one,
    keys_without_gradient,
    values_without_gradient,
    only_the_first_later_pass,
    only_the_last_later_pass,
    gradients_on_the_wrong_rows,
    the_own_gradients_of_a_kept_pass_forgotten,
    dq_of_context_pieces_forgotten,
    log_sum_exp_of_a_context_piece_off_in_the_backward,
]


@pytest.mark.parametrize("mutate", [*SEEN_IN_THE_LOSS, *ONLY_IN_THE_GRADIENT], ids=lambda mutate: mutate.__name__)
def test_a_mistake_is_seen(tiny_qwen3: Callable[..., Any], monkeypatch: Patch, mutate: Callable[[Patch], None]) -> None:
    mutate(monkeypatch)
    is_seen(rung_of(tiny_qwen3()), in_the_loss=mutate in SEEN_IN_THE_LOSS)


@pytest.mark.parametrize("short", [True, False], ids=["a row short", "another row"])
def test_a_mistake_in_the_paths_is_seen(tiny_qwen3: Callable[..., Any], monkeypatch: Patch, short: bool) -> None:
    """Of `path`, which gathers the context: the last row of it missing, or one before it in its place."""
    own = TreeLayout.after

    def after(layout: TreeLayout, context: Any, plan: Any, paths: Any) -> TreeLayout:
        return own(layout, context, plan, [path[:-1] if short else np.append(path[:-1], path[:1]) for path in paths])

    monkeypatch.setattr(TreeLayout, "after", after)
    is_seen(rung_of(tiny_qwen3(), attention="path"), in_the_loss=True)
