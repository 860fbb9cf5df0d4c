"""The rungs of the ladder: independent of each other, in the precision they name, with the model unchanged after."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from radixtrain.verification.oracle import (
    float64_throughout,
    float64_truth,
    gradients_of,
    ordinary_one_by_one,
    ordinary_padded,
    weights_in,
)
from tests.support.models import tiny_qwen3
from tests.support.steps import same

ROWS = [([7, 8, 9, 1, 2], 1), ([7, 8, 9, 3], 3), ([5], 0), ([6, 7], 2)]
FEATURES = [{"input_ids": ids, "labels": [-100] * start + ids[start:]} for ids, start in ROWS]


def test_the_loss_is_the_mean_over_labelled_tokens() -> None:
    """Written out by hand: log-softmax of the model's logits, picked and averaged over the five labels."""
    model, picked = tiny_qwen3(), []
    with float64_throughout(model):
        for feature in FEATURES:
            logprobs = model(input_ids=torch.tensor([feature["input_ids"]])).logits[0].log_softmax(-1)
            labels = list(enumerate(feature["labels"]))[1:]
            picked += [logprobs[place - 1, label].item() for place, label in labels if label != -100]
        assert len(picked) == 5
        for arm in (ordinary_one_by_one, ordinary_padded):
            loss = gradients_of(model, lambda arm=arm: arm(model, FEATURES)).loss
            assert loss == pytest.approx(-sum(picked) / 5, rel=1e-12)


def test_two_ordinary_ways_agree_in_float64() -> None:
    """Also if positions jump: without a mask that starts another document."""
    features = [{**f, "position_ids": [2 * p + 3 for p in range(len(f["input_ids"]))]} for f in FEATURES]
    model = tiny_qwen3()
    truth = float64_truth(model, features)
    assert {tensor.dtype for tensor in truth.tensors.values()} == {torch.float64}
    with float64_throughout(model):
        same(truth, gradients_of(model, lambda: ordinary_padded(model, features)))


@pytest.mark.filterwarnings("error")
def test_stored_rows_are_only_read(request: pytest.FixtureRequest) -> None:
    """As those of a token store, whose arrays cannot be written to: torch warns of tensors on them, by default once."""
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)
    stored = [{name: np.array(values) for name, values in feature.items()} for feature in FEATURES]
    for feature in stored:
        for values in feature.values():
            values.flags.writeable = False
    for ordinary in (ordinary_one_by_one, ordinary_padded):
        assert [loss.item() for loss in ordinary(tiny_qwen3(), stored)]


class _SeesDtypes(TorchDispatchMode):
    """The dtype of every floating-point tensor that an operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.dtypes |= {tensor.dtype for tensor in tensors}
        return out


def test_nothing_is_cast_to_float32() -> None:
    model = tiny_qwen3()
    with float64_throughout(model), _SeesDtypes() as seen:
        gradients_of(model, lambda: ordinary_one_by_one(model, FEATURES))
    assert seen.dtypes == {torch.float64}
    with weights_in(model, torch.float64), _SeesDtypes() as seen:
        gradients_of(model, lambda: ordinary_one_by_one(model, FEATURES))
    assert torch.float32 in seen.dtypes, "Hugging Face casts nothing, so nothing was tested"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_stays_in_float64(use_reentrant: bool) -> None:
    """So does what the backward pass recomputes, and a backward pass inside a backward pass."""
    model = tiny_qwen3().train()
    plain = float64_truth(model, FEATURES)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    same(plain, float64_truth(model, FEATURES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_come_back(dtype: torch.dtype) -> None:
    """Bit for bit, in the same `nn.Parameter` objects, buffers in their own dtype, and tied if they were."""
    model = tiny_qwen3().to(dtype)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
    state = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: tensor.clone() for name, tensor in state.items()}
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    with pytest.raises(RuntimeError, match="on the way"), float64_throughout(model):
        assert model.lm_head.weight.dtype == torch.float64
        raise RuntimeError("on the way")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor is state[name] and tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flash_attention_is_sdpa_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn is not needed: the model only has its name."""
    model = tiny_qwen3()
    truth = float64_truth(model, FEATURES)
    set_name = lambda name: setattr(model.config, "_attn_implementation_internal", name)  # noqa: E731
    monkeypatch.setattr(model, "set_attn_implementation", set_name)
    set_name("flash_attention_2")
    assert float64_truth(model, FEATURES).loss == truth.loss
    assert model.config._attn_implementation == "flash_attention_2"
