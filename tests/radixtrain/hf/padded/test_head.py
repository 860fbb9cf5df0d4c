"""The head computes every row once if what it gets is a view of what the backbone returned, and else what it is given.

Every case is compared with the untouched model, in float64: logits at kept tokens, and the gradient of every parameter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from radixtrain import share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.padded.head import SharedHead, keep_places, places_of_view
from radixtrain.hf.padded.report import SharingReport
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout, gradients_of

IDS = torch.tensor([[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4, 0], [7, 8, 9, 5, 0, 0], [7, 8, 9, 5, 6, 0]])
MASK = (IDS != 0).long()
LABELS = IDS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": IDS, "attention_mask": MASK}
LEFT = {name: value.flip(1) for name, value in BATCH.items()}
FIRST_THREE = slice(None), slice(3)


def hidden_of(model: Any, batch: dict[str, Tensor] = BATCH) -> Tensor:
    return model.model(**batch, use_cache=False).last_hidden_state


def cross_entropy(logits: Tensor, labels: Tensor = LABELS) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def some(logits: Tensor) -> Tensor:
    """A number that every one of these logits has a part in."""
    return logits.log_softmax(-1)[..., 3].sin().sum()


def counted(model: Any) -> tuple[int, int]:
    report = sharing_report(model)
    return report.num_head_rows, report.num_head_places


def both(make: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> tuple[int, int]:
    """Asserts the same loss and gradients, shared and not. Returns the rows that the head computed, and of how many."""
    model = make()
    with float64_throughout(model):
        expected = gradients_of(model, lambda: [loss_of(model)])
        found = gradients_of(share_prefixes(model), lambda: [loss_of(model)])
    assert sharing_report(model).num_shared
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    gradients = [torch.cat([each.flatten() for each in arm.tensors.values()]) for arm in (found, expected)]
    assert relative_error(*gradients) <= 1e-12
    return counted(model)


class TestShares:
    @pytest.mark.parametrize(
        ("loss_of", "rows_and_places"),
        [
            (lambda model: model(**BATCH, labels=LABELS).loss, (10, 24)),
            (lambda model: cross_entropy(model.lm_head(hidden_of(model))), (10, 24)),
            (lambda model: some(model.lm_head(hidden_of(model)[FIRST_THREE])), (3, 12)),
            (lambda model: some(model.lm_head(hidden_of(model)[:, 0])), (1, 4)),
            (lambda model: cross_entropy(model.lm_head(hidden_of(model).transpose(0, 1)).transpose(0, 1)), (10, 24)),
            (lambda model: some(model.lm_head(hidden_of(model)[:, :4].reshape(2, 2, 4, -1))), (5, 16)),
            (lambda model: some(model.lm_head(hidden_of(model)[:1, :2].expand(5, 2, -1))), (2, 10)),
            (lambda model: some(model.lm_head(hidden_of(model).unfold(1, 2, 1).mT[:, :2])), (3, 16)),
        ],
        ids=["labels", "whole", "slice", "column", "transposed", "4 axes", "expanded", "overlapping"],
    )
    def test_views(self, tiny_qwen3, loss_of, rows_and_places):
        """24 places, 9 unique rows and padding."""
        assert both(tiny_qwen3, loss_of) == rows_and_places

    @pytest.mark.parametrize("keep", [1, 2, torch.tensor([3, 4])], ids=["last", "last two", "selected"])
    def test_logits_to_keep(self, tiny_qwen3, keep):
        """The ends of rows differ, so that there is nothing to save; what is selected by indices is copied."""
        assert both(tiny_qwen3, lambda model: some(model(**LEFT, logits_to_keep=keep).logits[0])) == (0, 0)

    def test_logits_to_keep_of_rows_that_end_alike(self, tiny_qwen3):
        ids = torch.tensor([[5, 7, 8], [5, 7, 8], [5, 7, 8]])
        assert both(tiny_qwen3, lambda model: some(model(input_ids=ids, logits_to_keep=2).logits)) == (2, 6)

    def test_two_calls_before_the_heads(self, tiny_qwen3):
        """As a preference loss that runs the backbone on both answers first."""

        def loss_of(model: Any) -> Tensor:
            chosen, rejected = hidden_of(model), hidden_of(model, {k: v.roll(1, 0) for k, v in BATCH.items()})
            return cross_entropy(model.lm_head(chosen)) - 0.3 * cross_entropy(
                model.lm_head(rejected), LABELS.roll(1, 0)
            )

        assert both(tiny_qwen3, loss_of) == (20, 48)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_in_a_checkpoint_by_chunks(self, tiny_qwen3, reentrant):
        """The hidden states are gone, and another call came, when the head runs again: CheckpointError once."""

        def chunk_loss(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(model.lm_head(hidden), labels)

        def loss_of(model: Any) -> Tensor:
            total = torch.zeros(())
            for batch, labels in ((BATCH, LABELS), ({k: v.flip(0) for k, v in BATCH.items()}, LABELS.flip(0))):
                hidden = hidden_of(model, batch)
                for chunk in (slice(2), slice(2, 4)):
                    rows = hidden[chunk], labels[chunk]
                    total = total + checkpoint(chunk_loss, model, *rows, use_reentrant=reentrant)
            return total

        rows, places = both(tiny_qwen3, loss_of)
        assert rows < places / 1.5

    def test_without_gradients(self, tiny_qwen3):
        model = tiny_qwen3().double().eval()
        expected = model(**BATCH).logits
        share_prefixes(model)
        with torch.no_grad():
            found = model(**BATCH, use_cache=False).logits
        assert counted(model) == (10, 24)
        torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()])


class TestLeavesAlone:
    @pytest.mark.parametrize(
        "loss_of",
        [
            lambda model: some(model.lm_head(hidden_of(model)[MASK.bool()])),
            lambda model: cross_entropy(model.lm_head(hidden_of(model) * 2)),
            lambda model: cross_entropy(model.lm_head(hidden_of(model).clone())),
            lambda model: cross_entropy(model.lm_head(hidden_of(model).detach())),
            lambda model: cross_entropy(model.lm_head(hidden_of(model).mul_(torch.arange(1.0, 5)[:, None, None]))),
            lambda model: cross_entropy(model.lm_head(changed_after_a_view(hidden_of(model)))),
            lambda model: some(model.lm_head(hidden_of(model)[0, 0])),
            lambda model: some(model.lm_head(input=hidden_of(model)[FIRST_THREE])),
            lambda model: some(model.lm_head(hidden_of(model)[:, :2].flatten(1).unfold(1, 32, 16))),
        ],
        ids=["selected", "scaled", "cloned", "detached", "in place", "a base in place", "a vector", "by name", "cut"],
    )
    def test_what_is_no_view(self, tiny_qwen3, loss_of):
        assert both(tiny_qwen3, loss_of) == (0, 0)

    def test_inference_mode(self, tiny_qwen3):
        """Such tensors do not know whether they were changed."""
        model = share_prefixes(tiny_qwen3().eval())
        with torch.inference_mode():
            hidden = hidden_of(model)
            hidden[1] *= 2
            logits = model.lm_head(hidden)
        assert counted(model) == (0, 0)
        assert not torch.allclose(logits[0, 0], logits[1, 0])

    def test_memory_that_was_used_before(self):
        """Another tensor at the place of one that is gone."""
        head = SharedHead(SharingReport())
        hidden = torch.ones(6, 4)
        keep_places(hidden, torch.zeros(6, dtype=torch.int64).numpy(), 1)
        assert head.before(nn.Linear(4, 2), (hidden.view(2, 3, 4),)) is not None
        assert head.before(nn.Linear(4, 2), (hidden.view(2, 3, 4).double(),)) is None
        other = torch.empty(0).set_(hidden.untyped_storage(), 0, (2, 3, 4))
        assert head.before(nn.Linear(4, 2), (other,)) is None

    def test_a_copy_of_the_head(self, tiny_qwen3):
        """As PEFT makes for `modules_to_save`."""
        from copy import deepcopy

        model = share_prefixes(tiny_qwen3())
        head = deepcopy(model.lm_head)
        hidden = hidden_of(model)
        torch.testing.assert_close(head(hidden), model.lm_head(hidden))


def changed_after_a_view(hidden: Tensor) -> Tensor:
    """The view was taken before the memory changed."""
    view = hidden[:]
    with torch.no_grad():
        hidden[1:] *= 2
    return view


class TestPadding:
    @pytest.mark.parametrize("frozen", [False, True], ids=["", "the backbone is frozen"])
    def test_labels_there(self, tiny_qwen3, frozen):
        model = share_prefixes(tiny_qwen3(tie_word_embeddings=False).train())
        model.model.requires_grad_(not frozen)
        with pytest.raises(UserError, match=r"the loss reads \d places that attention_mask hides"):
            model(**BATCH, labels=IDS).loss.backward()

    def test_what_cancels_in_a_sum(self, tiny_qwen3):
        """+x at one padding place and -x at another: the gradient of the head's row of padding is zero."""
        model = share_prefixes(tiny_qwen3().train())
        logits = model(**BATCH).logits
        with pytest.raises(UserError, match="the loss reads 2 places"):
            (logits[2, 4] - logits[2, 5]).sum().backward()

    def test_a_head_of_the_users_own(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3().train())
        head = nn.Linear(32, 1)
        with pytest.raises(UserError, match="the loss reads 4 places"):
            head(hidden_of(model)).square().mean().backward()


class TestPlacesOfView:
    WHOLE = torch.zeros(6, 4)

    @pytest.mark.parametrize(
        ("view", "places"),
        [
            (lambda x: x, [0, 1, 2, 3, 4, 5]),
            (lambda x: x.view(2, 3, 4)[:, 1:], [1, 2, 4, 5]),
            (lambda x: x.view(2, 3, 4).transpose(0, 1), [0, 3, 1, 4, 2, 5]),
            (lambda x: x[2:3].expand(3, 4), [2, 2, 2]),
            (lambda x: x[::2], [0, 2, 4]),
            (lambda x: x.view(3, 2, 1, 4)[1:, 1], [3, 5]),
        ],
    )
    def test_literal(self, view, places):
        assert places_of_view(view(self.WHOLE)).tolist() == places

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x[0],
            lambda x: x[:, :2],
            lambda x: x[:4].t(),
            lambda x: x.view(3, 8),
            lambda x: x.view(-1)[2:22].view(5, 4),
            lambda x: x.view(-1).as_strided((4, 4), (2, 1)),
        ],
        ids=["a vector", "columns", "turned", "wide", "shifted", "overlapping"],
    )
    def test_through_a_row(self, view):
        assert places_of_view(view(self.WHOLE)) is None
