"""Two processes under torchrun's environment: each shares inside its own micro-batches, and nothing else changes.

Every trainer runs untouched and shared on the same two processes. Logged numbers are compared, what the trainer reduces
over processes among them, and the gradient of each step after it was averaged; the bars are those of one process.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DataLoaderConfiguration
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig
from preference_bars import BETA, differences
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW
from torch.utils.data import DataLoader, IterableDataset
from trainer_harness import BAR, Comparison, GradientKeeper, Share, compare, differences_of, run, settings
from trainer_loop import padded_batches
from trainers_on_two_ranks import NUM_RANKS, on_two_ranks
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from radixtrain import RadixCollator, prepare_model, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside, with_rows
from radixtrain.verification.oracle import float64_throughout

NUM_ROWS = 22  # three micro-batches of 4 on each rank: the second accumulation over two is not full
PROMPT = list(range(30, 42))
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")

Row = dict[str, list[int]]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Answers of 2 to 12 tokens to one prompt: micro-batches differ in their number of labels, and so do ranks."""
    rng = np.random.default_rng(0)
    return [row_of(rng.integers(50, 250, length).tolist()) for length in rng.integers(2, 13, NUM_ROWS)]


@pytest.fixture(scope="module")
def equally_long_rows() -> list[Row]:
    """Accelerate joins what it dispatches, so batches must have one length; numbers of labels differ all the same.

    An answer begins as the one before it, for 0 to 5 tokens.
    """
    rng = np.random.default_rng(1)
    answers = [rng.integers(50, 250, 10).tolist()]
    for same in rng.integers(0, 6, NUM_ROWS - 1):
        answers.append(answers[-1][:same] + rng.integers(50, 250, 10 - same).tolist())
    rows = [row_of(answer) for answer in answers]
    for row, without in zip(rows, rng.integers(0, 8, NUM_ROWS), strict=True):
        row["labels"][: len(PROMPT) + without] = [-100] * (len(PROMPT) + without)
    return rows


def row_of(answer: list[int]) -> Row:
    return {"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer}


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


@pytest.fixture
def trainer(tokenizer, tmp_path) -> Callable[..., Trainer]:
    """`trainer(model, rows, collator, **settings)`: Hugging Face's, with its stock collator if none is given."""

    def build(model: Any, rows: Any, collator: Any = None, **others: Any) -> Trainer:
        given = {name: others.pop(name) for name in ("compute_metrics",) if name in others}
        return Trainer(
            model,
            TrainingArguments(**settings(tmp_path, **others)),
            data_collator=collator or DataCollatorForSeq2Seq(tokenizer),
            train_dataset=rows,
            eval_dataset=rows,
            **given,
        )

    return build


def every_call_shared(model: Any) -> Any:
    """Also the last one of an epoch, whose rows may be only one on a rank."""
    return share_prefixes(model, min_ratio=0)


def compare_on_two_ranks(build: Callable[[Share], Trainer], **options: Any) -> list[Comparison]:
    """By rank, what `harness.compare` found. Both ranks log the same, apply the same gradient, and see other rows."""

    def work(rank: int) -> tuple[Comparison, list[Tensor]]:
        seen: list[Tensor] = []
        found = compare(lambda share: build(lambda model: watched(share(model), seen)), **options)
        assert distributed.get_world_size() == NUM_RANKS
        return found, seen

    (first, seen), (second, seen_by_second) = on_two_ranks(work)
    assert first.shared.entries == second.shared.entries
    assert all(map(torch.equal, first.shared.gradients, second.shared.gradients))
    assert not torch.equal(seen[0], seen_by_second[0])
    return [first, second]


def watched(model: Any, seen: list[Tensor]) -> Any:
    """Keeps the ids that the backbone is called with."""

    def hook(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"])

    backbone_of(model_inside(model)).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return model


@pytest.mark.parametrize("across_devices", [True, False])
def test_trainer(model, trainer, rows, table, across_devices):
    others = {"average_tokens_across_devices": across_devices, "include_num_input_tokens_seen": "non_padding"}
    found = compare_on_two_ranks(lambda share: trainer(share(model()), rows, **others), evaluate=True)
    assert {"eval_loss", "num_input_tokens_seen"} <= found[0].worst.keys()
    table(f"2 ranks: Trainer, across devices {across_devices}", found[0])


@pytest.mark.parametrize(
    ("name", "data", "config"),
    [
        ("stream", Stream, {"dispatch_batches": False}),
        ("stream, dispatched", Stream, {}),
        ("stream, split", Stream, {"split_batches": True}),
        ("dispatched", list, {"dispatch_batches": True}),
        ("dispatched, split", list, {"dispatch_batches": True, "split_batches": True}),
        ("split", list, {"split_batches": True}),
    ],
)
def test_batches_that_accelerate_spreads(model, trainer, equally_long_rows, table, name, data, config):
    """A rank gets part of a batch that rank 0 has read, or of its own; it shares inside that part."""

    def build(share: Share) -> Trainer:
        return trainer(share(model()), data(equally_long_rows), accelerator_config=config)

    table(f"2 ranks: Trainer, {name}", compare_on_two_ranks(build, share=every_call_shared, evaluate=True)[0])


def test_metrics_on_whole_logits(model, trainer, rows, table):
    """Logits of both ranks, `[B, L, V]`, are padded to one length and gathered; the places of the last, too."""

    def metrics(seen: EvalPrediction) -> dict[str, float]:
        logits, labels = torch.tensor(seen.predictions)[:, :-1], torch.tensor(seen.label_ids)[:, 1:]
        logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        assert len(labels) == NUM_ROWS
        return {"logp": float(logps[labels != -100].mean())}

    build = lambda share: trainer(share(model()), rows, max_steps=1, compute_metrics=metrics)  # noqa: E731
    found, _ = compare_on_two_ranks(build, evaluate=True)
    assert "eval_logp" in found.worst
    table("2 ranks: Trainer, compute_metrics", found)


@pytest.mark.parametrize("across_devices", [True, False])
@pytest.mark.parametrize(("data", "config"), [(list, {}), (Stream, {"dispatch_batches": False})])
def test_the_collator(model, trainer, rows, data, config, across_devices):
    """`RadixCollator`: its batches have other shapes, and the trainer counts the same labels in them."""
    others = {"average_tokens_across_devices": across_devices, "accelerator_config": config}

    def work(rank: int) -> dict[str, float]:
        stock = run(lambda share: trainer(model(), data(rows), **others), share_prefixes, evaluate=True)
        radix = run(
            lambda share: trainer(share(model()), data(rows), RadixCollator(), **others), prepare_model, evaluate=True
        )
        return differences_of(stock, radix, {})

    for worst in on_two_ranks(work):
        assert {"loss", "eval_loss"} <= worst.keys()


@pytest.mark.parametrize(
    ("data", "config"), [(Stream, {}), (Stream, {"split_batches": True}), (list, {"dispatch_batches": True})]
)
def test_a_radix_batch_that_is_dispatched_is_refused(model, trainer, rows, data, config):
    """On rank 0, which reads the batches; the other one waits for it."""

    def work(rank: int) -> None:
        trainer(prepare_model(model()), data(rows), RadixCollator(), accelerator_config=config).train()

    with pytest.raises(AssertionError, match=r'(?s)rank 0: .*accelerator_config=\{"dispatch_batches": False\}'):
        on_two_ranks(work)


@pytest.mark.parametrize("collated", [False, True])
def test_gradients_in_float64(model, trainer, rows, collated):
    """Of one optimizer step over two micro-batches on each rank, whose numbers of labels differ."""

    def gradient(share: Callable[[Any], Any], collator: Any) -> Tensor:
        base = share(model())
        keeper = GradientKeeper()
        with float64_throughout(base):
            built = trainer(base, rows, collator, max_steps=1)
            built.add_callback(keeper)
            built.train()
        (found,) = keeper.gradients
        return found

    def work(rank: int) -> float:
        truth = gradient(lambda model: model, None)
        other = gradient(prepare_model, RadixCollator()) if collated else gradient(share_prefixes, None)
        return float((other - truth).norm() / truth.norm())

    assert max(on_two_ranks(work)) <= 1e-12


@pytest.mark.parametrize("share", [every_call_shared, share_prefixes])
def test_a_rank_that_shares_nothing(model, trainer, rows, share):
    """Its calls run as they are, or on all of their tokens, while the other rank shares."""
    tokens = np.random.default_rng(2).integers(50, 250, (len(rows), 4)).tolist()
    alone = [{"input_ids": four, "labels": four} for four in tokens]
    batches = [part for n in range(0, 12, 4) for part in (alone[n : n + 4], rows[n : n + 4])]  # by rank, in turns

    def work(rank: int) -> tuple[int, int]:
        kept: list[Any] = []

        def build(share: Share) -> Trainer:
            kept.append(share(model()))
            return trainer(kept[-1], [row for batch in batches for row in batch], train_sampling_strategy="sequential")

        differences_of(run(build, lambda model: model, False), run(build, share, False), {})
        report = sharing_report(kept[-1])
        return report.num_tokens - report.num_unique_tokens, sum(report.not_shared.values())

    (saved, unshared), (saved_by_second, unshared_by_second) = on_two_ranks(work)
    assert saved < saved_by_second
    assert (unshared, unshared_by_second) == (0 if share is every_call_shared else 5, 0), "5 micro-batches each"


@pytest.mark.parametrize("config", [{}, {"dispatch_batches": False}, {"dispatch_batches": True, "split_batches": True}])
def test_accelerate(model, tokenizer, equally_long_rows, config):
    """A loop of your own over a stream, with `accelerator.accumulate`, which leaves out the reduction in between."""

    def history(share: Share) -> list[tuple[float, float]]:
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(**config)
        )
        policy = share(model()).train()
        loader = DataLoader(Stream(equally_long_rows), 4, collate_fn=DataCollatorForSeq2Seq(tokenizer))
        policy, optimizer, loader = accelerator.prepare(policy, AdamW(policy.parameters(), lr=1e-4), loader)
        found = []
        for batch in loader:
            with accelerator.accumulate(policy):
                loss = policy(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(policy.parameters(), 1.0) if accelerator.sync_gradients else 0.0
                optimizer.step()
                optimizer.zero_grad()
            found.append((float(accelerator.reduce(loss.detach(), "mean")), float(norm)))
        return found

    def work(rank: int) -> list[list[tuple[float, float]]]:
        return [history(share) for share in (lambda model: model, every_call_shared)]

    first, second = on_two_ranks(work)
    assert first == second
    np.testing.assert_allclose(first[1], first[0], rtol=BAR)
    assert sum(norm > 0 for _, norm in first[0]) >= 2


@pytest.mark.parametrize("min_ratio", [0, 2])
def test_fsdp2(model, min_ratio):
    """Sharded as Accelerate shards, by its own function: itself it takes FSDP to other devices than CPUs only.

    The second rank has nothing to share but its padding; with a `min_ratio` of 2 its call is left as it is.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True
    )

    def gradient(share: Share, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        policy = share(model(tie_word_embeddings=False))
        with float64_throughout(policy):
            sharded = fsdp2_prepare_model(accelerator, policy.train())
            sharded(**batch).loss.backward()
            whole = [parameter.grad.full_tensor().flatten() for parameter in sharded.parameters()]
        return torch.cat(whole), policy

    def work(rank: int) -> tuple[float, int, int]:
        distributed.init_process_group("gloo")
        (batch,) = padded_batches("left", seed=rank, steps=1)
        if rank == 1:
            batch["input_ids"] = torch.randint(50, 250, batch["input_ids"].shape)
        truth, _ = gradient(lambda model: model, batch)
        other, policy = gradient(partial(share_prefixes, min_ratio=min_ratio), batch)
        report = sharing_report(policy)
        assert isinstance(policy, FSDPModule) and truth.dtype == torch.float64
        return (
            float((other - truth).norm() / truth.norm()),
            report.num_tokens - report.num_unique_tokens,
            report.num_shared,
        )

    (error, saved, _), (error_of_second, _, num_shared) = on_two_ranks(work)
    assert error == error_of_second <= 1e-12
    assert saved > 0 and num_shared == (min_ratio == 0)


@pytest.mark.parametrize("adapters", [False, True])
def test_sft(model, tokenizer, preferences, tmp_path, table, adapters):
    """TRL's counts of tokens, entropy and accuracy are gathered; activation checkpointing as TRL has it by default."""
    prompts = preferences.rename_column("chosen", "completion").remove_columns("rejected")
    arguments = settings(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})

    def build(share: Share) -> Trainer:
        return SFTTrainer(
            share(model()),
            SFTConfig(**arguments),
            train_dataset=prompts,
            eval_dataset=prompts.select(range(6)),
            processing_class=tokenizer,
            peft_config=LORA if adapters else None,
        )

    found, _ = compare_on_two_ranks(build, evaluate=True)
    assert {"num_tokens", "entropy", "mean_token_accuracy", "eval_loss"} <= found.worst.keys()
    table(f"2 ranks: SFTTrainer{', LoRA' * adapters}", found)


@pytest.mark.parametrize("adapters", [False, True])
def test_dpo(model, tokenizer, preferences, tmp_path, table, adapters):
    """With a reference, which Accelerate prepares for evaluation, or with the policy's adapters turned off."""

    def build(share: Share) -> Trainer:
        return DPOTrainer(
            share(model(0)),
            None if adapters else share(model(1)),
            DPOConfig(**settings(tmp_path, beta=BETA, learning_rate=1e-3 if adapters else 1e-4)),
            train_dataset=preferences,
            eval_dataset=preferences.select(range(6)),
            processing_class=tokenizer,
            peft_config=LORA if adapters else None,
        )

    found, _ = compare_on_two_ranks(build, evaluate=True, differences={**differences(), **differences("eval_")})
    assert "eval_rewards/margins" in found.worst
    table(f"2 ranks: DPOTrainer{', LoRA' * adapters}", found)


def test_a_gradient_that_one_rank_loses_is_found(model, trainer, rows):
    """Each rank sees it, in the gradient that both have averaged."""

    def scaled(model: Any) -> Any:
        def hook(backbone: Any, args: Any, kwargs: Any, output: Any) -> Any:
            hidden = output[0] + (output[0] - output[0].detach()) * 1e-4 * distributed.get_rank()
            return with_rows(output, hidden)

        share_prefixes(model)
        backbone_of(model).register_forward_hook(hook, with_kwargs=True)
        return model

    def work(rank: int) -> str:
        with pytest.raises(AssertionError) as caught:
            compare(lambda share: trainer(share(model()), rows, max_steps=1), share=scaled)
        return str(caught.value)

    assert all("grad_norm, entry 0" in said for said in on_two_ranks(work))
