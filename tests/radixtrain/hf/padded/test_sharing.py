"""A padded call -> its unique tokens -> outputs in `[B, L]`: the options, the outputs, the counts."""

from unittest.mock import patch

import pytest
import torch

import radixtrain.hf.attention_interface as interface
from radixtrain import share_prefixes, sharing_report
from radixtrain.errors import UserError
from tests.support.batches import padded

BATCH = padded([[7, 8, 9, 1, 2], [7, 8, 9, 3], [7, 8, 5]], "right")  # 15 places, 12 tokens, 7 unique


class TestOptions:
    @pytest.mark.parametrize(("min_ratio", "shared"), [(0, 1), (15 / 7 - 1e-9, 1), (15 / 7 + 1e-9, 0), (100.0, 0)])
    def test_min_ratio(self, tiny_qwen3, min_ratio, shared):
        """B x L over U: 15 / 7. A later call replaces the options."""
        model = share_prefixes(share_prefixes(tiny_qwen3()), min_ratio=min_ratio)
        model(**BATCH)
        report = sharing_report(model)
        assert report.num_shared == shared
        assert shared or set(report.not_shared) == {f"less than min_ratio = {min_ratio} to save"}

    @pytest.mark.parametrize(("min_shared_tokens", "unique"), [(1, 7), (2, 8), (5, 12)])
    def test_min_shared_tokens(self, tiny_qwen3, min_shared_tokens, unique):
        """The branch after 9 saves 1 token, the one after 8 saves 2 for either of two sequences."""
        model = share_prefixes(tiny_qwen3(), min_shared_tokens=min_shared_tokens)
        model(**BATCH)
        assert sharing_report(model).num_unique_tokens == unique

    @pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
    @pytest.mark.usefixtures("without_the_trial")
    def test_a_named_attention_is_kept(self, tiny_qwen3, attention):
        with patch.object(interface, "tree_attention", wraps=interface.tree_attention) as attend:
            share_prefixes(tiny_qwen3(), attention=attention)(**BATCH)
        assert {call.kwargs["attention"] for call in attend.call_args_list} == {attention}


class TestOutputs:
    def test_a_head_that_reads_padding_of_a_layer_below_those_that_are_trained(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3().train())
        model.get_input_embeddings().requires_grad_(False)
        embedded = model.model(**BATCH, output_hidden_states=True).hidden_states[0]
        with pytest.raises(UserError, match="the loss reads 3 places that attention_mask hides"):
            (embedded @ torch.ones(32, 1, requires_grad=True)).sum().backward()
