"""Layers with a recurrent state in every mode that a model is trained in: equal to the stock model, or refused.

The truth is the stock model on each row by itself, in float64 with every cast lifted; forks are forced, because rows as
short as these pay for none.
"""

import copy
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from radixtrain import RadixCollator, prepare_model, restore_model, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.recurrent import tree_runs
from radixtrain.hf.recurrent.layers import Mixer
from radixtrain.hf.recurrent.mixers import mixers_of
from radixtrain.tree.run_choice import cheapest_runs
from radixtrain.tree.run_layout import RunLayout
from radixtrain.tree.runs import RunCost
from radixtrain.verification.oracle import (
    float64_throughout,
    float64_truth,
    gradients_of,
    ordinary_one_by_one,
    ordinary_padded,
    radix_batch,
)

Build = Callable[..., Any]
KINDS = ["Qwen3.5", "Bamba", "LFM2"]
BAR = 1e-12
FORKS = RunCost(call=0.0, row=1.0, state=0.0)
PROMPT = [7, 8, 9, 1, 2, 3, 11, 4, 6, 5]
ROWS = [
    [*PROMPT, 4, 5, 6, 10, 21],
    [*PROMPT, 4, 5, 12, 13],
    [*PROMPT, 31],
    [*PROMPT[:6], 17, 18, 19, 20],
    [*PROMPT[:6], 17, 22],
    [30, 33, 36, 39],
]
FEATURES = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ROWS]
OTHERS = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([5, 4, 3, 2, 7, 1], [5, 4, 3, 2, 7, 9, 9], [5, 6])]


def batch_of(features: Any = FEATURES) -> dict[str, Any]:
    batch = RadixCollator(run_cost=FORKS)(features)
    assert any(call.keeps for call in RunLayout.from_batch(batch).calls), "these rows do not fork"
    return batch


def distance(found: Any, truth: Any) -> float:
    """The worst relative distance of a parameter's gradient."""
    assert found.tensors.keys() == truth.tensors.keys()
    assert all(each.norm() > 0 for each in truth.tensors.values())
    return max(float((found.tensors[name] - each).norm() / each.norm()) for name, each in truth.tensors.items())


def assert_exact(model: Any, truth: Any, arm: Callable[[], Iterator[Tensor]] | None = None) -> None:
    """A prepared model has the true gradient. arm: the terms of its loss, by default of one batch with forks."""
    with float64_throughout(model):
        found = gradients_of(model, arm or (lambda: radix_batch(model, batch_of())))
    assert distance(found, truth) <= BAR


@pytest.fixture(autouse=True)
def forks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test here may fall back to whole sequences, which are exact too and so would hide what is tried."""
    with caplog.at_level(logging.WARNING, "radixtrain"):
        yield
    said = [each.message for each in caplog.get_records("call")]
    assert not [each for each in said if "from its first token on" in each]


class PassesNothingOn(nn.Module):
    """Calls a decoder layer with nothing but its rows: no mask, none of the arguments of the model's call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return self.layer(hidden, position_embeddings=kwargs["position_embeddings"])


def gradients_by_stock_names(model: Any) -> Any:
    """Of a batch with forks, for a model whose layers were wrapped after it was prepared."""
    with float64_throughout(model):
        found = gradients_of(model, lambda: radix_batch(model, batch_of()))
    tensors = {
        re.sub(r"(?<=layers\.\d\.)(layer\.|_checkpoint_wrapped_module\.)+", "", k): x for k, x in found.tensors.items()
    }
    return replace(found, tensors=tensors)


class TestActivationCheckpointing:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_transformers(self, tiny_hybrid: Build, kind: str, use_reentrant: bool) -> None:
        """It computes a layer's `forward` again, without the layer's hooks."""
        model = tiny_hybrid(kind)
        truth = float64_truth(model, FEATURES)
        prepare_model(model).activation_checkpointing_enable({"use_reentrant": use_reentrant})
        assert_exact(model, truth)

    @pytest.mark.parametrize("implementation", CheckpointImpl)
    @pytest.mark.parametrize("kind", KINDS)
    def test_around_a_layer(self, tiny_hybrid: Build, kind: str, implementation: CheckpointImpl) -> None:
        """As FSDP and Lightning do: the whole layer runs again, its hooks too."""
        model = tiny_hybrid(kind)
        truth = float64_truth(model, FEATURES)
        prepare_model(model)
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer, implementation)
        assert distance(gradients_by_stock_names(model), truth) <= BAR

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_two_batches_before_the_backward_pass(self, tiny_hybrid: Build, use_reentrant: bool) -> None:
        """Each is computed again with its own tree, and an ordinary batch between them without one."""
        model = tiny_hybrid("Qwen3.5")
        ids = torch.tensor([PROMPT])

        def terms() -> Iterator[Tensor]:
            both = [next(radix_batch(model, batch_of(features))) for features in (FEATURES, OTHERS)]
            both.insert(1, model(input_ids=ids, labels=ids).loss)
            yield torch.stack(both).sum()

        def stock() -> Iterator[Tensor]:
            yield from ordinary_one_by_one(model, FEATURES)
            yield model(input_ids=ids, labels=ids).loss
            yield from ordinary_one_by_one(model, OTHERS)

        with float64_throughout(model):
            truth = gradients_of(model, stock)
        prepare_model(model).activation_checkpointing_enable({"use_reentrant": use_reentrant})
        assert_exact(model, truth, terms)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_layer_that_gets_nothing(self, tiny_hybrid: Build, use_reentrant: bool) -> None:
        model = tiny_hybrid("Qwen3.5")
        truth = float64_truth(model, FEATURES)
        prepare_model(model).activation_checkpointing_enable({"use_reentrant": use_reentrant})
        model.model.layers[0] = PassesNothingOn(model.model.layers[0])
        assert distance(gradients_by_stock_names(model), truth) <= BAR

    @pytest.mark.parametrize("implementation", CheckpointImpl)
    def test_around_a_layer_that_gets_nothing(self, tiny_hybrid: Build, implementation: CheckpointImpl) -> None:
        """The layer's input carries the call; reentrant checkpointing makes a new tensor, and is refused."""
        model = tiny_hybrid("Qwen3.5")
        truth = float64_truth(model, FEATURES)
        prepare_model(model)
        model.model.layers[0] = PassesNothingOn(checkpoint_wrapper(model.model.layers[0], implementation))
        if implementation is CheckpointImpl.REENTRANT:
            with pytest.raises(UserError, match=r"Qwen3_5DecoderLayer .* set use_reentrant to False"):
                model(**batch_of())
        else:
            assert distance(gradients_by_stock_names(model), truth) <= BAR


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    ids = [row + pad if side == "right" else pad + row for row, pad in zip(rows, pads, strict=True)]
    masks = [
        [1] * len(row) + pad if side == "right" else pad + [1] * len(row) for row, pad in zip(rows, pads, strict=True)
    ]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


class TestOrdinaryBatches:
    """A prepared model gives them the bits of the stock model."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded(self, tiny_hybrid: Build, kind: str, side: str) -> None:
        batch = padded(ROWS, side)
        results = []
        for model in (tiny_hybrid(kind), prepare_model(tiny_hybrid(kind))):
            logits = model(**batch).logits
            (logits.log_softmax(-1) * batch["attention_mask"][..., None]).sum().backward()
            results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
        assert all(map(torch.equal, *results))

    @pytest.mark.parametrize("kind", KINDS)
    def test_packed(self, tiny_hybrid: Build, kind: str) -> None:
        """Rows back to back with positions from 0: whatever the stock model does, its refusal included."""
        rows = ROWS[2:5]
        batch = {
            "input_ids": torch.tensor([[token for row in rows for token in row]]),
            "position_ids": torch.tensor([[n for row in rows for n in range(len(row))]]),
        }
        results = []
        for model in (tiny_hybrid(kind), prepare_model(tiny_hybrid(kind))):
            try:
                results.append(model(**batch).logits.tolist())
            except ValueError as error:
                results.append(str(error))
        assert results[0] == results[1]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("beams", [1, 2])
    def test_generation(self, tiny_hybrid: Build, kind: str, beams: int) -> None:
        """With a cache: the prompt, then token by token; before and after a radix batch."""
        model = tiny_hybrid(kind).eval()
        batch = padded([PROMPT, PROMPT[:4]], "left")
        generate = partial(
            model.generate,
            **batch,
            max_new_tokens=8,
            do_sample=False,
            num_beams=beams,
            eos_token_id=None,
            output_scores=True,
            return_dict_in_generate=True,
        )
        stock = generate()
        prepare_model(model)
        for _ in range(2):
            found = generate()
            assert torch.equal(found.sequences, stock.sequences)
            assert all(map(torch.equal, found.scores, stock.scores))
            model(**batch_of())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_after_an_exception(self, tiny_hybrid: Build, kind: str, error: type[BaseException]) -> None:
        """A pass that ends in the middle leaves nothing that an ordinary batch would read."""
        model = tiny_hybrid(kind)
        batch = padded(ROWS, "right")
        stock = model(**batch).logits
        prepare_model(model).activation_checkpointing_enable()

        def stop(*args: Any) -> None:
            raise error

        for broken in (model.model.layers[0], mixers_in(model)[0].module):
            for register in (broken.register_forward_pre_hook, broken.register_forward_hook):
                handle = register(stop)
                with pytest.raises(error):
                    model(**batch_of())
                handle.remove()
                assert error is KeyboardInterrupt or not any(mixer.call for mixer in mixers_in(model))
                assert torch.equal(model(**batch).logits, stock)
                assert not any(mixer.call for mixer in mixers_in(model))


def mixers_in(model: nn.Module) -> list[Mixer]:
    found = [getattr(module.__dict__.get("forward"), "__self__", None) for module in model.modules()]
    return [each for each in found if isinstance(each, Mixer)]


class TestFrozen:
    """Weights without gradients, whose rows and states may have none either."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "frozen",
        [r"embed_tokens|lm_head", r"layers\.0\.(linear_attn|mamba|conv)\.", r"layers\.1\.", r"^(?!.*layers\.0\.)"],
        ids=["embeddings", "mixers", "attention", "all but the mixer's layer"],
    )
    def test_frozen(self, tiny_hybrid: Build, kind: str, frozen: str) -> None:
        model = tiny_hybrid(kind, tie_word_embeddings=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(frozen, name))
        truth = float64_truth(model, FEATURES)
        assert 0 < len(truth.tensors) < len(list(model.parameters()))
        assert_exact(prepare_model(model), truth)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("use_dora", "prepared", "checkpointing"),
        [(False, "before", True), (False, "after", False), (True, "after", True)],
    )
    def test_adapters(self, tiny_hybrid: Build, kind: str, use_dora: bool, prepared: str, checkpointing: bool) -> None:
        """LoRA and DoRA on what a mixer projects, put on before or after `prepare_model`."""
        from peft import LoraConfig, get_peft_model

        targets = {"Qwen3.5": "in_proj_qkv in_proj_a out_proj", "Bamba": "in_proj", "LFM2": "in_proj out_proj"}
        config = LoraConfig(r=2, target_modules=targets[kind].split(), use_dora=use_dora, init_lora_weights=False)

        def build(prepare: str | None) -> Any:
            torch.manual_seed(0)
            model = tiny_hybrid(kind)
            if checkpointing:
                model.activation_checkpointing_enable()
                model.enable_input_require_grads()
            model = get_peft_model(prepare_model(model) if prepare == "before" else model, config)
            return prepare_model(model) if prepare == "after" else model

        truth = float64_truth(build(None), FEATURES)
        model = build(prepared)
        assert len(mixers_in(model)) == 1
        assert_exact(model, truth)


class TestPrecision:
    """Below float64 no further from the truth than an ordinary batch in the same precision."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mode", ["autocast", "bfloat16 weights"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_bfloat16(self, tiny_hybrid: Build, kind: str, mode: str, checkpointing: bool) -> None:
        stock, model = tiny_hybrid(kind), prepare_model(tiny_hybrid(kind))
        truth = float64_truth(stock, FEATURES)
        if checkpointing:
            model.activation_checkpointing_enable()
        if mode == "bfloat16 weights":
            stock, model = stock.bfloat16(), model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            ordinary = gradients_of(stock, lambda: ordinary_padded(stock, FEATURES))
            found = gradients_of(model, lambda: radix_batch(model, batch_of()))
        errors = [
            sorted(float((each.tensors[name].double() - x).norm() / x.norm()) for name, x in truth.tensors.items())
            for each in (found, ordinary)
        ]
        middle = len(truth.tensors) // 2
        assert errors[0][-1] <= 2 * errors[1][-1]
        assert errors[0][middle] <= 2 * errors[1][middle]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
    def test_without_gradients(self, tiny_hybrid: Build, kind: str, without: Callable[[], Any]) -> None:
        """The first batch of a model may be one of an evaluation; the values are those with gradients."""
        model = prepare_model(tiny_hybrid(kind))
        with without():
            found = model.eval()(**batch_of()).logits
        assert not found.requires_grad
        logits = model.train()(**batch_of()).logits
        assert torch.equal(found, logits)
        logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


class TestCopies:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_deep_copy(self, tiny_hybrid: Build, kind: str) -> None:
        """It runs on its own weights, and has its own calls."""
        model = tiny_hybrid(kind)
        truth = float64_truth(model, FEATURES)
        copied = copy.deepcopy(prepare_model(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        modules = set(copied.modules())
        assert mixers_in(copied) and all(mixer.module in modules for mixer in mixers_in(copied))
        assert_exact(copied, truth)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_deep_copy_of_the_backbone(self, tiny_hybrid: Build, kind: str) -> None:
        model = prepare_model(tiny_hybrid(kind)).eval()
        batch = batch_of()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        copied = copy.deepcopy(model.model)
        with torch.no_grad():
            stock = model.model(**inputs).last_hidden_state
            for parameter in model.parameters():
                parameter.zero_()
            assert torch.equal(copied(**inputs).last_hidden_state, stock)

    def test_pickled_for_a_fresh_process(self, tiny_hybrid: Build, tmp_path: Any) -> None:
        model = prepare_model(tiny_hybrid("Qwen3.5"))
        path = tmp_path / "model.pt"
        torch.save((model, batch_of()), path)
        code = f"import torch; m, b = torch.load({str(path)!r}, weights_only=False); print(m(**b).loss.item())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1]) == pytest.approx(model(**batch_of()).loss.item(), rel=1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_saved_is_an_ordinary_model(self, tiny_hybrid: Build, kind: str) -> None:
        assert prepare_model(tiny_hybrid(kind)).state_dict().keys() == tiny_hybrid(kind).state_dict().keys()


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def left_on(model: nn.Module) -> list[Any]:
    """Whatever `prepare_model` may have put on modules."""
    hooks = [
        dict(getattr(module, name)) for module in model.modules() for name in (*HOOKS, "_forward_hooks_always_called")
    ]
    own = [set(module.__dict__) for module in model.modules()]
    return [hooks, own, model.config._attn_implementation]


class TestPreparing:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("prepare", [prepare_model, share_prefixes])
    def test_restore_undoes_it(self, tiny_hybrid: Build, kind: str, prepare: Callable[[Any], Any]) -> None:
        model = tiny_hybrid(kind)
        model.activation_checkpointing_enable()
        before = left_on(model)
        checkpoint = model.model.layers[0]._gradient_checkpointing_func
        prepare(model)
        model(**batch_of()).loss.backward()
        restore_model(model)
        assert left_on(model) == before
        assert model.model.layers[0]._gradient_checkpointing_func is checkpoint

    @pytest.mark.parametrize("kind", KINDS)
    def test_again(self, tiny_hybrid: Build, kind: str) -> None:
        """Preparing twice, and after `share_prefixes`, is preparing once."""
        model = tiny_hybrid(kind)
        truth = float64_truth(model, FEATURES)
        for prepare in (prepare_model, prepare_model, share_prefixes, prepare_model):
            assert_exact(prepare(model), truth)
            assert all(mixer.replaced is None for mixer in mixers_in(model))
        assert "forward" not in mixers_in(model)[0].module.__dict__ or restore_model(model)
        assert not mixers_in(model)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_hooks_of_accelerate(self, tiny_hybrid: Build, kind: str, when: str) -> None:
        """They replace the `forward` of a module, as ours do, in either order; ours runs inside or outside of it."""
        from accelerate.hooks import ModelHook, add_hook_to_module

        class Counts(ModelHook):
            number = 0

            def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.number += 1
                return args, kwargs

        model, hook = tiny_hybrid(kind), Counts()
        truth = float64_truth(model, FEATURES)
        if when == "after":
            prepare_model(model)
        (path,) = mixers_of(model.model)
        mixer = model.model.get_submodule(path)
        add_hook_to_module(mixer, hook)
        replaced = mixer.forward
        if when == "before":
            prepare_model(model)
        assert_exact(model, truth)
        assert hook.number > 0
        restore_model(model)
        assert mixer.forward is replaced
        stock = tiny_hybrid(kind)
        assert torch.equal(model(**padded(ROWS, "right")).logits, stock(**padded(ROWS, "right")).logits)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_forward_that_replaces_ours_is_refused(self, tiny_hybrid: Build, kind: str) -> None:
        """As `kernelize` does, at every change between training and evaluation if `use_kernels` is set."""
        model = prepare_model(tiny_hybrid(kind))
        module = mixers_in(model)[0].module
        module.forward = type(module).forward.__get__(module)
        with pytest.raises(RuntimeError, match=r"1 of 1 recurrent layers .* call prepare_model again"):
            model(**batch_of())
        truth = float64_truth(tiny_hybrid(kind), FEATURES)
        assert_exact(prepare_model(model), truth)

    def test_a_hook_of_the_user_on_a_mixer(self, tiny_hybrid: Build) -> None:
        """It runs once, on all unique rows."""
        model = prepare_model(tiny_hybrid("Qwen3.5"))
        seen = []
        mixer = mixers_in(model)[0].module
        mixer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        batch = batch_of()
        model(**batch)
        assert seen == [(*batch["input_ids"].shape, 32)]


def preference_pairs(side: str) -> dict[str, Tensor]:
    return padded([row for rows in pairwise(ROWS[:4]) for row in rows], side)


class TestSharePrefixes:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_pairs(self, tiny_hybrid: Build, kind: str, side: str, checkpointing: bool) -> None:
        """Values and gradients of every kept token."""
        batch = preference_pairs(side)
        keep = batch["attention_mask"].bool()

        def loss() -> Iterator[Tensor]:
            yield model(**batch).logits[keep].log_softmax(-1)[:, 3].sin().sum()

        model = tiny_hybrid(kind)
        with float64_throughout(model):
            truth = gradients_of(model, loss)
        share_prefixes(model)
        if checkpointing:
            model.activation_checkpointing_enable()
        with forced():
            assert_exact(model, truth, loss)
        assert sharing_report(model).num_shared == 1

    def test_without_a_mask_and_below_the_ratio(self, tiny_hybrid: Build) -> None:
        ids = torch.tensor([[*PROMPT, 4, 5], [*PROMPT, 6, 7], [*PROMPT, 6, 8]])
        stock = tiny_hybrid("Qwen3.5")
        for least, bits in ((1.1, False), (99.0, True)):
            model = share_prefixes(tiny_hybrid("Qwen3.5"), min_ratio=least)
            logits, expected = model(input_ids=ids).logits, stock(input_ids=ids).logits
            assert torch.equal(logits, expected) if bits else (logits - expected).norm() <= 1e-5 * expected.norm()
            assert mixers_in(model)[0].call is None

    def test_generation(self, tiny_hybrid: Build) -> None:
        stock, model = (tiny_hybrid("Qwen3.5").eval() for _ in range(2))
        batch = preference_pairs("left")
        texts = [x.generate(**batch, max_new_tokens=6, do_sample=False) for x in (stock, share_prefixes(model))]
        assert torch.equal(*texts)


@contextmanager
def forced() -> Iterator[None]:
    """Runs that a model chooses itself fork wherever they can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_runs, "cheapest_runs", partial(cheapest_runs, rates=FORKS))
        yield
