"""A loop of the user's own under `share_prefixes`: every kind of padding, and what users do to a model around it.

The loop calls the model as its author wrote it: nothing is said about a cache, and loss is computed from labels or from
logits. Under autocast the error to a float64 truth is compared instead, at most twice that of the ordinary run.
"""

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trainer_harness import BAR, compare
from trainer_loop import EOS, IGNORED, PROMPT, Batch, Loop, Metrics, own_loss, padded, padded_batches
from trainers_on_two_ranks import on_two_ranks

from radixtrain import restore_model, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout, gradients_of

BACKENDS = ["eager", "aot_eager"] if os.environ.get("RADIXTRAIN_FAMILIES") == "all" else ["aot_eager"]

SIDES = ["right", "left", "both"]


def head_on_every_position(model: Any, batch: Batch) -> Metrics:
    """Backbone and head called by themselves; the loss leaves padding out."""
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return {"loss": next_token_loss(model.lm_head(hidden), batch["labels"])}


def logits_that_are_kept(model: Any, batch: Batch) -> Metrics:
    """The last three positions only, which left padding makes tokens of every row."""
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=4)
    assert output.logits.shape[1] == 4
    return {"loss": next_token_loss(output.logits, batch["labels"][:, -4:])}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


class TestPadding:
    @pytest.mark.parametrize("pad", [0, EOS])
    @pytest.mark.parametrize("side", SIDES)
    def test_default_call(self, tiny_qwen3, table, side, pad):
        """The model keeps a cache by default, and nothing in the call says otherwise."""

        def build(share: Callable[[Any], Any]) -> Loop:
            model = share(tiny_qwen3())
            assert model.config.use_cache
            return Loop(model, padded_batches(side, pad), own_loss)

        found = compare(build)
        assert found.r > 2
        table(f"plain loop, {side} padding{', pad == eos' * (pad == EOS)}", found)

    @pytest.mark.parametrize(("step", "side"), [(head_on_every_position, "both"), (logits_that_are_kept, "left")])
    def test_own_use_of_the_head(self, tiny_qwen3, table, step, side):
        found = compare(lambda share: Loop(share(tiny_qwen3()), padded_batches(side), step))
        table(f"plain loop, {step.__name__.replace('_', ' ')}", found)

    @pytest.mark.parametrize("side", SIDES)
    def test_gradient_of_every_parameter_in_float64(self, tiny_qwen3, side):
        model, (batch,) = tiny_qwen3(), padded_batches(side, steps=1)
        with float64_throughout(model):
            plain = gradients_of(model, lambda: [own_loss(model, batch)["loss"]])
            shared = gradients_of(share_prefixes(model), lambda: [own_loss(model, batch)["loss"]])
            assert sharing_report(model).num_shared == 1
        assert shared.loss == pytest.approx(plain.loss, rel=1e-12)
        for name, gradient in plain.tensors.items():
            assert relative_error(shared.tensors[name], gradient) <= 1e-12, name

    def test_hidden_states_are_those_of_every_row(self, tiny_qwen3):
        """At padding stands something finite, whatever a loss computes from it before it is masked."""
        model, (batch,) = tiny_qwen3().train(), padded_batches("both", steps=1)
        by_position, kept = (batch["input_ids"], batch["attention_mask"]), batch["attention_mask"].bool()
        plain = model.model(*by_position).last_hidden_state
        shared = share_prefixes(model).model(*by_position).last_hidden_state
        assert sharing_report(model).num_shared == 1
        assert shared.shape == plain.shape and (shared / shared.norm(dim=-1, keepdim=True)).isfinite().all()
        torch.testing.assert_close(shared[kept], plain[kept], rtol=1e-5, atol=1e-5)


class TestLossThatReadsPadding:
    def test_labels_on_padding(self, tiny_qwen3):
        """Hugging Face's own loss, with labels that nobody masked."""
        model, (batch,) = share_prefixes(tiny_qwen3().train()), padded_batches("right", steps=1)
        loss = model(**{**batch, "labels": batch["input_ids"]}).loss
        with pytest.raises(UserError, match="that attention_mask hides"):
            loss.backward()

    def test_first_label_after_padding_on_the_left(self, tiny_qwen3):
        """Labels on every token: the first one of a row is predicted from the padding before it."""
        model, (batch,) = share_prefixes(tiny_qwen3().train()), padded_batches("left", steps=1)
        labels = batch["input_ids"].where(batch["attention_mask"].bool(), IGNORED)
        with pytest.raises(UserError, match="padding on the left also the label of the first token"):
            model(**{**batch, "labels": labels}).loss.backward()

    def test_mean_over_all_positions(self, tiny_qwen3):
        """Pooling that forgets the mask."""
        model, (batch,) = share_prefixes(tiny_qwen3().train()), padded_batches("left", steps=1)
        hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        with pytest.raises(UserError, match="that attention_mask hides"):
            hidden.mean(dim=1).square().sum().backward()

    def test_a_label_on_the_first_padding_reads_the_last_token(self, tiny_qwen3):
        """Its prediction comes from the token before it, which is computed; nothing else of the padding is read."""
        rows = [[*PROMPT, 20, 21, 22], [*PROMPT, 30, 31], [*PROMPT, 40, 41, 42]]
        batch = padded(rows, [[*row, 7][:15] for row in rows], "right", pad=7)
        assert (batch["labels"][batch["attention_mask"] == 0] == 7).all()
        compare(lambda share: Loop(share(tiny_qwen3()), [batch], own_loss))

    def test_without_padding_every_position_may_be_read(self, tiny_qwen3):
        ids = torch.tensor([[3, 1, 4, 1, 5], [3, 1, 4, 9, 9]])
        model = share_prefixes(tiny_qwen3().train())
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        assert sharing_report(model).num_unique_tokens == 7


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestAround:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing(self, tiny_qwen3, table, reentrant):
        def build(share: Callable[[Any], Any]) -> Loop:
            model = share(tiny_qwen3())
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            return Loop(model, padded_batches(), own_loss)

        table(f"plain loop, checkpointing, use_reentrant={reentrant}", compare(build))

    @pytest.mark.full
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_compile(self, tiny_qwen3, backend, fresh_dynamo):
        """The untouched model is compiled too. `eager`, the first half of `aot_eager`, runs in `make test-full`."""

        def build(share: Callable[[Any], Any]) -> Loop:
            model = share(tiny_qwen3(num_hidden_layers=1))
            return Loop(torch.compile(model, backend=backend), padded_batches(), own_loss)

        compare(build)

    def test_autocast_in_bfloat16(self, tiny_qwen3):
        ratios = []
        for seed in range(5):
            model, (batch,) = tiny_qwen3(seed), padded_batches("both", seed=seed, steps=1)
            with float64_throughout(model):
                truth = flat_gradient(model, batch)
            with torch.autocast("cpu", torch.bfloat16):
                ordinary = flat_gradient(model, batch)
                shared = flat_gradient(share_prefixes(model), batch)
            assert sharing_report(model).num_shared == 1
            ordinary_error = relative_error(ordinary, truth)
            assert 1e-3 < ordinary_error < 0.1, "it was bfloat16"
            ratios.append(relative_error(shared, truth) / ordinary_error)
        assert max(ratios) <= 2, ratios


def flat_gradient(model: Any, batch: Batch) -> Tensor:
    tensors = gradients_of(model, lambda: [own_loss(model, batch)["loss"]]).tensors
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


class TestLife:
    """Before, after and beside training."""

    def test_a_model_in_eval_mode_keeps_its_cache(self, tiny_qwen3):
        """As `from_pretrained` returns it: a loop that forgot `train()` runs as ever, and the report says why."""
        model, (batch,) = share_prefixes(tiny_qwen3().eval()), padded_batches(steps=1)
        assert model(**batch).past_key_values is not None
        (reason,) = sharing_report(model).not_shared
        assert sharing_report(model).num_shared == 0 and "use_cache" in reason
        model(**batch, use_cache=False).loss.backward()
        assert sharing_report(model).num_shared == 1

    @pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "num_beams": 2}, {"use_cache": False}])
    def test_generation_between_steps(self, tiny_qwen3, sampling):
        """The same tokens as the untouched model after the same steps."""
        texts = []
        for share in (lambda model: model, share_prefixes):
            loop = Loop(share(tiny_qwen3()), padded_batches("left"), own_loss, learning_rate=1e-2)
            texts.append([])
            for batch in padded_batches("left"):
                loop.batches = [batch]
                loop.train()
                torch.manual_seed(0)
                prompts = {"input_ids": batch["input_ids"][:, :-4], "attention_mask": batch["attention_mask"][:, :-4]}
                loop.model.eval()
                texts[-1].append(loop.model.generate(**prompts, max_new_tokens=8, pad_token_id=0, **sampling).tolist())
                loop.model.train()
        assert texts[0] == texts[1]
        assert sharing_report(loop.model).num_shared == 3, "training steps only"

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_shares_by_itself(self, tiny_qwen3, duplicate):
        model, (batch,) = share_prefixes(tiny_qwen3()), padded_batches(steps=1)
        twin = duplicate(model)
        with torch.no_grad():
            twin.model.embed_tokens.weight.zero_()
        assert own_loss(model, batch)["loss"] != own_loss(twin, batch)["loss"]
        own_loss(twin, batch)["loss"].backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        counted = [sharing_report(each).num_shared for each in (model, twin)]
        assert counted == [1, 2]

    def test_saved_as_if_never_shared(self, tiny_qwen3, tmp_path):
        for name, model in (("plain", tiny_qwen3()), ("shared", share_prefixes(tiny_qwen3()))):
            model.save_pretrained(tmp_path / name)
        for path in (tmp_path / "plain").iterdir():
            assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes(), path.name

    def test_restored(self, tiny_qwen3):
        untouched, (batch,) = tiny_qwen3(), padded_batches("left", steps=1)
        model = restore_model(share_prefixes(tiny_qwen3()))
        assert model.config._attn_implementation == untouched.config._attn_implementation
        hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
        assert not hooks
        outputs = [each(**batch) for each in (model, untouched)]
        assert torch.equal(outputs[0].logits, outputs[1].logits) and outputs[0].past_key_values is not None


def test_ddp_on_two_processes(tiny_qwen3):
    """grad_norm is that of the gradient which DDP averaged over both."""

    def work(rank: int) -> list[list[dict[str, float]]]:
        torch.distributed.init_process_group("gloo")
        histories = []
        for share in (lambda model: model, share_prefixes):
            model = share(tiny_qwen3())
            loop = Loop(DistributedDataParallel(model), padded_batches("left", seed=rank), own_loss)
            loop.train()
            histories.append(loop.state.log_history)
        assert sharing_report(model).num_shared == 3
        return histories

    results = on_two_ranks(work)
    for plain, shared in results:
        for one, other in zip(plain, shared, strict=True):
            assert other == pytest.approx(one, rel=BAR)
    norms, losses = ([[entry[name] for entry in shared] for _, shared in results] for name in ("grad_norm", "loss"))
    assert norms[0] == norms[1] and losses[0] != losses[1]
