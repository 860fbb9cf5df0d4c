"""The claim: loss and every gradient are those of ordinary Qwen3 on each sequence alone. And the test of the test."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import radixtrain.model
from radixtrain import RadixCollator, verify_equivalence
from radixtrain.attention import tree_attention
from radixtrain.equivalence import EquivalenceReport, TensorError
from radixtrain.layout import TreeLayout

STRATEGIES = ("cascade", "path", "expand", "reference")
BRANCHING = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [-100, 8, 9, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [-100, -100, 9, 3]},
    {"input_ids": [7, 8, 5, 6], "labels": [-100, 8, 5, 6]},
    {"input_ids": [7, 8, 5, 6, 4, 4], "labels": [-100, -100, 5, -100, 4, 4]},
    {"input_ids": [30, 31], "labels": [30, 31]},
]
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def labelled_tries(draw):
    """Nested tries: sequences that fork from prefixes of earlier ones, labels anywhere, shared tokens included."""
    vocabulary = draw(st.sampled_from([2, 4, 50]))
    tokens = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=8)
    sequences = [draw(tokens)]
    for _ in range(draw(st.integers(1, 6))):
        trunk = draw(st.sampled_from(sequences))
        sequences.append(trunk[: draw(st.integers(0, len(trunk)))] + draw(tokens))
    features = []
    for ids in sequences:
        bears_loss = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        features.append({"input_ids": ids, "labels": [t if b else -100 for t, b in zip(ids, bears_loss, strict=True)]})
    alive = [1, 0, 1, 1, 0, 0, 1, 0]  # so that no gradient is dead
    return [*features, {"input_ids": alive, "labels": alive}]


@SETTINGS
@given(features=labelled_tries(), min_shared_tokens=st.integers(1, 5), multiple=st.sampled_from([None, 4]))
@pytest.mark.parametrize("attention", STRATEGIES)
def test_generated_tries_in_float32(tiny_qwen3, attention, features, min_shared_tokens, multiple):
    collator = RadixCollator(min_shared_tokens=min_shared_tokens, pad_to_multiple_of=multiple)
    report = verify_equivalence(tiny_qwen3(), features, attention=attention, collator=collator)
    assert report.passed and report.conclusive, str(report)


@pytest.mark.parametrize("attention", STRATEGIES)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}, {"attention_bias": True}]
)
def test_variants_of_the_model(tiny_qwen3, attention, changes):
    report = verify_equivalence(tiny_qwen3(**changes), BRANCHING, attention=attention)
    assert report.passed and report.conclusive, str(report)


def test_with_activation_checkpointing(tiny_qwen3):
    model = tiny_qwen3().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert verify_equivalence(model, BRANCHING).passed


def test_with_lora(tiny_qwen3):
    peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    report = verify_equivalence(peft.get_peft_model(tiny_qwen3(), config), BRANCHING)
    assert len(report.gradients) == 28
    assert report.passed and report.conclusive, str(report)


def test_custom_positions(tiny_qwen3):
    features = [{**feature, "position_ids": [p + 3 for p in range(len(feature["input_ids"]))]} for feature in BRANCHING]
    assert verify_equivalence(tiny_qwen3(), features).passed


def test_the_model_comes_back_as_it_was(tiny_qwen3):
    model = tiny_qwen3()
    verify_equivalence(model, BRANCHING)
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_prepared_model_stays_prepared(tiny_qwen3):
    model = radixtrain.model.prepare_model(tiny_qwen3(), attention="path")
    assert verify_equivalence(model, BRANCHING, attention="cascade").passed
    assert radixtrain.model.prepared_options(model)["attention"] == "path"
    assert torch.isfinite(model(**RadixCollator()(BRANCHING)).loss)


def test_a_fresh_lora_passes_and_is_not_conclusive(tiny_qwen3):
    peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    report = verify_equivalence(
        peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(target_modules="all-linear")), BRANCHING
    )
    assert report.passed
    assert {tensor.name.split(".")[-3] for tensor in report.dead} == {"lora_A"}


def test_sixteen_bit_models_are_refused(tiny_qwen3):
    with pytest.raises(ValueError, match="needs float32 or float64 weights"):
        verify_equivalence(tiny_qwen3().bfloat16(), BRANCHING)


def test_nothing_alive_is_no_pass():
    report = EquivalenceReport(1.0, 1.0, (TensorError("w", norm=0.0, difference=0.0),), 5e-6)
    assert not report.passed


def test_features_without_loss_are_refused(tiny_qwen3):
    with pytest.raises(ValueError, match="no token of these features bears loss"):
        verify_equivalence(tiny_qwen3(), [{"input_ids": [1, 2], "labels": [-100, -100]}])


class TestTheTestItself:
    """Every mutation below is a mistake that some system of the field has made. Each must be seen."""

    def verdict(self, model, collate):
        return verify_equivalence(model, BRANCHING, collator=collate)

    def test_unmutated(self, tiny_qwen3):
        assert self.verdict(tiny_qwen3(), RadixCollator()).passed

    def test_a_dropped_branch_label(self, tiny_qwen3):
        def collate(features):
            batch = RadixCollator()(features)
            rows = batch["radix_predictor_indices"]
            first_of_branch = int(np.flatnonzero(np.diff(rows.numpy()) == 0)[0])
            for name in ("labels", "shift_labels"):
                batch[name][0, first_of_branch] = -100
            return batch

        assert not self.verdict(tiny_qwen3(), collate).passed

    def test_an_unweighted_shared_label(self, tiny_qwen3):
        def collate(features):
            batch = RadixCollator()(features)
            pairs = torch.stack([batch["radix_predictor_indices"], batch["shift_labels"][0]])
            distinct = pairs.unique(dim=1)
            assert distinct.shape[1] < pairs.shape[1]
            return {
                **batch,
                "radix_predictor_indices": distinct[0],
                "labels": distinct[1:],
                "shift_labels": distinct[1:],
            }

        assert not self.verdict(tiny_qwen3(), collate).passed

    def test_an_off_by_one_position(self, tiny_qwen3):
        def collate(features):
            batch = RadixCollator()(features)
            batch["position_ids"][0, batch["radix_inverse_indices"][3]] += 1
            return batch

        assert not self.verdict(tiny_qwen3(), collate).passed

    def test_positions_that_count_rows(self, tiny_qwen3):
        def collate(features):
            batch = RadixCollator()(features)
            return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

        assert not self.verdict(tiny_qwen3(), collate).passed

    @pytest.mark.parametrize(
        "name", ["a sibling leak", "a branch that forgets its prompt", "one level of a nested trie"]
    )
    def test_a_wrong_mask(self, tiny_qwen3, monkeypatch, name):
        def mutated(query, key, value, layout, **options):
            ends = layout.subtree_ends.clone()
            if name == "a sibling leak":
                ends[:] = layout.num_rows
            elif name == "a branch that forgets its prompt":
                ends = layout.segment_starts[1:].clone()
            else:
                nested = layout.segment_starts[:-1] > 0
                ends[nested] = layout.segment_starts[1:][nested]
            wrong = replace(layout, subtree_ends=ends)
            return tree_attention(query, key, value, wrong, **{**options, "attention": "reference"})

        monkeypatch.setattr(radixtrain.model, "tree_attention", mutated)
        assert not self.verdict(tiny_qwen3(), RadixCollator()).passed

    def test_stock_sdpa_on_a_radix_batch(self, tiny_qwen3, monkeypatch):
        """The silent failure of the field: positions that jump are read as packed documents."""

        def ordinary(query, key, value, layout, scale, **options):
            heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads_first, is_causal=True, scale=scale, enable_gqa=True
            )
            return out[0].transpose(0, 1)

        monkeypatch.setattr(radixtrain.model, "tree_attention", ordinary)
        assert not self.verdict(tiny_qwen3(), RadixCollator()).passed

    def test_dead_attention(self, tiny_qwen3):
        """Equal because nothing flows: zero gradients prove nothing."""
        model = tiny_qwen3()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
        report = self.verdict(model, RadixCollator())
        assert report.passed
        assert not report.conclusive
        assert "dead     model.layers.0.self_attn.q_proj.weight: zero in both" in str(report)


def test_isolation(tiny_qwen3):
    """A token changed in one branch leaves every other branch's logits bit-equal."""
    model = radixtrain.model.prepare_model(tiny_qwen3().eval())
    shared, kept = [7, 8, 9, 10], [1, 2, 3]

    def logits_of_kept(other):
        features = [{"input_ids": shared + kept}, {"input_ids": shared + other}]
        batch = RadixCollator()(features)
        rows = batch["radix_inverse_indices"][: len(shared) + len(kept)]
        plan = {
            name: value
            for name, value in batch.items()
            if name not in ("labels", "shift_labels", "radix_predictor_indices")
        }
        with torch.no_grad():
            return model(**plan).logits[0, rows]

    assert torch.equal(logits_of_kept([20, 21, 22]), logits_of_kept([20, 40, 22]))


def test_layouts_of_equal_plans_are_equal():
    """The plan that a worker builds does not depend on anything but the features."""
    first, second = (TreeLayout.from_batch(RadixCollator()(BRANCHING)) for _ in range(2))
    assert torch.equal(first.path_keys, second.path_keys)
    assert first.levels == second.levels
