"""What a model generates, before and after `share_prefixes`."""

from typing import Any

import torch

from radixtrain import share_prefixes, sharing_report

__all__ = ["PROMPTS", "assert_generates_the_same", "generated"]

IDS = torch.tensor([[0, 0, 7, 8, 9, 1], [7, 8, 9, 1, 2, 3], [0, 7, 8, 9, 1, 2]])
PROMPTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


def generated(model: Any, **options: Any) -> Any:
    """Tokens and scores of eight new tokens."""
    torch.manual_seed(0)
    prompts = {name: x[:1, 2:] for name, x in PROMPTS.items()} if "prompt_lookup_num_tokens" in options else PROMPTS
    fixed = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    return model.generate(**prompts, **fixed, eos_token_id=None, disable_compile=True, **options)


def assert_generates_the_same(model: Any, **options: Any) -> None:
    """The same tokens and scores, bit for bit, and no call shared."""
    plain = generated(model, **options)
    shared = generated(share_prefixes(model, min_ratio=0.0), **options)
    report = sharing_report(model)
    assert report.num_shared == 0 and report.num_generating > 0, f"{report.num_shared} calls shared: {report}"
    assert torch.equal(plain.sequences, shared.sequences)
    assert all(map(torch.equal, plain.scores, shared.scores))
