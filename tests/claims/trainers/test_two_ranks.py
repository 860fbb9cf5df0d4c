"""Two processes under torchrun's environment: each shares inside its own micro-batches, and nothing else changes.

Every trainer runs untouched and shared on the same two processes. Logged numbers are compared, what the trainer reduces
over processes among them, and the gradient of each step after it was averaged; the bars are those of one process.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import on_ranks
from rollouts import Reward, arguments, compare_rollouts, policy_of, tokenizer
from rollouts import prompts as drawn_from
from tiers import FULL
from tiny_models import tiny_qwen3
from torch import Tensor, distributed
from torch.distributed.fsdp import _state_dict_utils
from torch.nn.parallel import DistributedDataParallel
from trainer_harness import (
    Comparison,
    Run,
    Share,
    compare,
    differences_of,
    gathered_weights,
    mean_log_probability,
    numbers,
    run,
    settings,
)
from trainer_loop import Loop, Stream, own_loss, padded_batches
from transformers import set_seed

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.testing import assert_within_reference_error, relative_error
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_arithmetic, float64_throughout

pytestmark = FULL

NUM_RANKS = 2
LONG = 10  # optimizer steps
NUM_ROWS = 22  # three micro-batches of 4 on each rank: the second accumulation over two is not full
PROMPT = list(range(30, 42))
DRAWN = ("GRPO", "RLOO")
STATE_DICTS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]

Row = dict[str, list[int]]


def on_two_ranks(work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returned on each, by rank. Its trainer makes the process group, from the environment."""
    from accelerate.state import AcceleratorState

    def run(rank: int) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)  # it may know the process that tests
        result = work(rank)
        if distributed.is_initialized():
            distributed.barrier()  # rank 0 keeps what the ranks meet at
        return result

    return on_ranks(NUM_RANKS, run, has_group=False)


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


@pytest.fixture
def trainer(tokenizer, tmp_path) -> Callable[..., Any]:
    """`trainer(model, rows, collator, **settings)`: Hugging Face's, with its stock collator if none is given."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    def build(model: Any, rows: Any, collator: Any = None, compute_metrics: Any = None, **others: Any) -> Trainer:
        return Trainer(
            model,
            TrainingArguments(**settings(tmp_path, **others)),
            data_collator=collator or DataCollatorForSeq2Seq(tokenizer),
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=compute_metrics,
        )

    return build


def every_call_shared(model: Any) -> Any:
    """Also the last one of an epoch, whose rows may be only one on a rank."""
    return share_prefixes(model, min_ratio=0)


def compare_on_two_ranks(build: Callable[[Share], Any], **options: Any) -> Comparison:
    """What `harness.compare` found on rank 0. Both ranks log the same, apply the same gradient, and see other rows."""

    def work(rank: int) -> tuple[Comparison, list[Tensor]]:
        seen: list[Tensor] = []
        found = compare(lambda share: build(lambda model: watched(share(model), seen)), **options)
        assert distributed.get_world_size() == NUM_RANKS
        return found, seen

    (first, seen), (second, seen_by_second) = on_two_ranks(work)
    assert_reduced(first, second)
    assert not torch.equal(seen[0], seen_by_second[0])
    return first


def assert_reduced(first: Comparison, second: Comparison) -> None:
    """Once, for both."""
    assert first.shared.entries == second.shared.entries
    assert all(map(torch.equal, first.shared.gradients, second.shared.gradients))


def watched(model: Any, seen: list[Tensor]) -> Any:
    """Keeps the ids that the backbone is called with."""

    def hook(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["input_ids"])

    backbone_of(model_inside(model)).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return model


def shard_on_cpus() -> None:
    """Accelerate shards where the processes have an accelerator each; its own functions shard on CPUs as well."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    own = PartialState.__init__

    def init(state: Any, *args: Any, **others: Any) -> None:
        own(state, *args, **others)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU
            state.device = torch.device("cpu")  # without a number, as its weights

    PartialState.__init__ = init  # type: ignore[method-assign]
    gather = _state_dict_utils._common_unshard_pre_state_dict_hook

    def without_a_move(*args: Any, offload_to_cpu: bool, **others: Any) -> None:
        gather(*args, offload_to_cpu=False, **others)  # from the CPU to the CPU FSDP1 frees what it hands out

    _state_dict_utils._common_unshard_pre_state_dict_hook = without_a_move


def sharding(version: int | None, **config: Any) -> dict[str, Any]:
    """The settings of a Trainer whose models FSDP shards by layers; none for DistributedDataParallel.

    config: others of its `fsdp_config`.
    """
    if version is None:
        return {}
    shard_on_cpus()
    layers = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "use_orig_params": True}
    loading = {"cpu_ram_efficient_loading": False, "sync_module_states": False}
    return {"fsdp": True, "fsdp_config": {"fsdp_version": version, **layers, **loading, **config}}


@pytest.mark.parametrize("across_devices", [True, False])
def test_trainer(model, trainer, rows, table, across_devices):
    others = {"average_tokens_across_devices": across_devices, "include_num_input_tokens_seen": "non_padding"}
    found = compare_on_two_ranks(lambda share: trainer(share(model()), rows, **others), evaluate=True)
    assert {"eval_loss", "num_input_tokens_seen"} <= found.worst.keys()
    table(f"2 ranks: Trainer, across devices {across_devices}", found)


@pytest.mark.parametrize(
    ("name", "data", "config"),
    [
        ("stream", Stream, {"dispatch_batches": False}),
        ("stream, dispatched", Stream, {}),
        ("stream, split", Stream, {"split_batches": True}),
        ("dispatched, split", list, {"dispatch_batches": True, "split_batches": True}),
    ],
)
def test_batches_that_accelerate_spreads(model, trainer, equally_long_rows, table, name, data, config):
    """A rank gets part of a batch that rank 0 has read, or of its own; it shares inside that part."""

    def build(share: Share) -> Any:
        return trainer(share(model()), data(equally_long_rows), accelerator_config=config)

    table(f"2 ranks: Trainer, {name}", compare_on_two_ranks(build, share=every_call_shared, evaluate=True))


def test_metrics_on_whole_logits(model, trainer, rows, table):
    """Logits of both ranks, `[B, L, V]`, are padded to one length and gathered; the places of the last, too."""

    build = lambda share: trainer(share(model()), rows, max_steps=1, compute_metrics=mean_log_probability)  # noqa: E731
    found = compare_on_two_ranks(build, evaluate=True)
    assert "eval_logp" in found.worst
    assert any(entry.get("eval_rows") == NUM_ROWS for entry in found.shared.entries)
    table("2 ranks: Trainer, compute_metrics", found)


@pytest.mark.parametrize(
    ("data", "config", "across_devices", "version"),
    [
        (list, {}, True, None),
        (Stream, {"dispatch_batches": False}, False, None),
        pytest.param(list, {}, True, 1, id="FSDP1"),
        pytest.param(list, {}, True, 2, id="FSDP2"),
    ],
)
def test_the_collator(model, trainer, rows, data, config, across_devices, version):
    """`RadixCollator`: its batches have other shapes, and the trainer counts the same labels in them."""
    own = {"average_tokens_across_devices": across_devices, "accelerator_config": config}

    def work(rank: int) -> dict[str, float]:
        others = own | sharding(version)
        stock = run(lambda share: trainer(share(model()), data(rows), **others), lambda model: model, evaluate=True)
        radix = run(
            lambda share: trainer(share(model()), data(rows), RadixCollator(), **others), share_prefixes, evaluate=True
        )
        return differences_of(stock, radix)

    for worst in on_two_ranks(work):
        assert {"loss", "eval_loss"} <= worst.keys()


def test_a_radix_batch_that_is_dispatched_is_refused(model, trainer, rows):
    """On rank 0, which reads the batches; the other one waits for it."""

    def work(rank: int) -> None:
        trainer(share_prefixes(model()), Stream(rows), RadixCollator()).train()

    with pytest.raises(AssertionError, match=r'(?s)rank 0: .*accelerator_config=\{"dispatch_batches": False\}'):
        on_two_ranks(work)


@pytest.mark.parametrize("share", [every_call_shared, share_prefixes])
def test_a_rank_that_shares_nothing(model, trainer, rows, share):
    """Its calls run as they are, or on all of their tokens, while the other rank shares."""
    tokens = np.random.default_rng(2).integers(50, 250, (len(rows), 4)).tolist()
    alone = [{"input_ids": four, "labels": four} for four in tokens]
    batches = [part for n in range(0, 12, 4) for part in (alone[n : n + 4], rows[n : n + 4])]  # by rank, in turns

    def work(rank: int) -> tuple[int, int]:
        kept: list[Any] = []

        def build(share: Share) -> Any:
            kept.append(share(model()))
            return trainer(kept[-1], [row for batch in batches for row in batch], train_sampling_strategy="sequential")

        differences_of(run(build, lambda model: model), run(build, share))
        report = sharing_report(kept[-1])
        return report.num_tokens - report.num_unique_tokens, sum(report.not_shared.values())

    (saved, unshared), (saved_by_second, unshared_by_second) = on_two_ranks(work)
    assert saved < saved_by_second
    assert (unshared, unshared_by_second) == (0 if share is every_call_shared else 5, 0), "5 micro-batches each"


def test_a_loop_with_ddp(tiny_qwen3):
    """grad_norm is that of the gradient which DDP averaged over both."""

    def work(rank: int) -> list[dict[str, float]]:
        distributed.init_process_group("gloo")

        def build(share: Share) -> Loop:
            return Loop(DistributedDataParallel(share(tiny_qwen3())), padded_batches("left", seed=rank), own_loss)

        return compare(build).shared.entries

    first, second = on_two_ranks(work)
    for one, other in zip(first, second, strict=True):
        assert one["grad_norm"] == other["grad_norm"] and one["loss"] != other["loss"]


@pytest.mark.parametrize(("min_ratio", "casts"), [(0, False), (2, False), (0, True)])
def test_fsdp2(model, min_ratio, casts):
    """Sharded as Accelerate shards, by its own function: itself it takes FSDP to other devices than CPUs only.

    The second rank has nothing to share but its padding; with a `min_ratio` of 2 its call is left as it is. In mixed
    precision FSDP casts the arguments of every layer, and copies every dataclass among them.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.float64) if casts else None,
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
        return relative_error(other, truth), report.num_tokens - report.num_unique_tokens, report.num_shared

    (error, saved, _), (error_of_second, _, num_shared) = on_two_ranks(work)
    assert error == error_of_second <= 1e-12
    assert saved > 0 and num_shared == (min_ratio == 0)


def test_sft(model, trl_trainer, prompts, lora, table):
    """TRL's counts of tokens, entropy and accuracy are gathered; activation checkpointing as TRL has it by default."""
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    given = {"peft_config": lora()}
    build = lambda share: trl_trainer("SFT", share(model()), rows=prompts, given=given, **checkpointing)  # noqa: E731
    found = compare_on_two_ranks(build, evaluate=True)
    assert {"num_tokens", "entropy", "mean_token_accuracy", "eval_loss"} <= found.worst.keys()
    table("2 ranks: SFTTrainer, LoRA", found)


def test_dpo(model, trl_trainer, preferences, table):
    """With a reference, which Accelerate prepares for evaluation."""
    build = lambda share: trl_trainer("DPO", share(model(0)), share(model(1)), rows=preferences)  # noqa: E731
    found = compare_on_two_ranks(build, evaluate=True)
    assert "eval_rewards/margins" in found.worst
    table("2 ranks: DPOTrainer", found)


@pytest.mark.parametrize("name", ["KTO", "Reward"])
def test_answers_and_scores(name, model, scorer, trl_trainer, preferences, prompts, table):
    """KTO's estimate of the KL term is gathered from both."""
    rows = prompts.add_column("label", [True, False] * (len(prompts) // 2)) if name == "KTO" else preferences
    make = [scorer] if name == "Reward" else [partial(model, 0), partial(model, 1)]
    build = lambda share: trl_trainer(name, *(share(each()) for each in make), rows=rows)  # noqa: E731
    table(f"2 ranks: {name}Trainer", compare_on_two_ranks(build, evaluate=True))


@pytest.mark.parametrize(("kind", "others"), [("GRPO", {"beta": 0.1}), ("RLOO", {})])
def test_rollouts(kind, others, reference, tmp_path, table):
    """Each rank generates for its own prompts; advantages are of groups that lie on both."""
    import trl

    config, trainer = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")

    def work(rank: int) -> Comparison:
        return compare_rollouts(trainer, arguments(config, tmp_path / str(rank), **others), reference, evaluate=True)

    first, second = on_two_ranks(work)
    assert_reduced(first, second)
    assert first.counts != second.counts
    table(f"2 ranks: {kind}Trainer", first)


@pytest.fixture
def built(model, scorer, trainer, trl_trainer, rows, prompts, preferences, lora, reference, tmp_path) -> Any:
    """`built(name, share, collator=None, times=0, seed=0, **settings)`: a trainer by its name.

    times: so often it has 16 of its rows, which leave no micro-batch smaller than others; 0 for all of them, once.
    seed: of the weights that are trained.
    """
    from datasets import Dataset, concatenate_datasets

    answers = prompts.add_column("label", [True, False] * (len(prompts) // 2))
    labelled = Dataset.from_list(rows).select(range(16))
    data = {"DPO": preferences, "Reward": preferences, "KTO": answers, "SFT, labels": labelled}

    def build(name: str, share: Share, collator: Any = None, times: int = 0, seed: int = 0, **how: Any) -> Any:
        if name == "Trainer":
            return trainer(share(model(seed)), rows[:16] * times or rows, collator, **how)
        if name in DRAWN:
            return rollout_trainer(name, share, reference, tmp_path, seed, **how)
        kind, _, extra = name.partition(", ")
        makers = [scorer] if kind == "Reward" else [model]
        models = [share(make(0 if extra == "LoRA" else seed)) for make in makers]
        models += [share(model(1))] if name in ("DPO", "KTO") else []  # of adapters the reference is the model without
        torch.manual_seed(seed)  # for adapters
        given = {"peft_config": lora()} if extra == "LoRA" else {}
        given |= {"data_collator": collator} if collator else {}
        own = concatenate_datasets([data.get(name, data.get(kind, prompts))] * max(1, times))
        return trl_trainer(kind, *models, rows=own, given=given, **how)

    return build


def rollout_trainer(name: str, share: Share, reference: Any, folder: Any, seed: int, **how: Any) -> Any:
    """GRPO or RLOO with a reference, both shared; `LONG` steps are one epoch, since TRL 1.16.0 continues a later one in
    the order of the first.
    """
    import trl
    from datasets import concatenate_datasets

    rows = concatenate_datasets([drawn_from()] * (LONG // 2))
    args = arguments(getattr(trl, f"{name}Config"), folder, beta=0.1, **how)
    policy = share(policy_of(reference, lambda _: tiny_qwen3(seed)))
    trainer = getattr(trl, f"{name}Trainer")(policy, Reward(), args, rows, processing_class=tokenizer())
    share(trainer.ref_model)
    return trainer


@pytest.mark.parametrize("version", [None, 1, 2])
def test_sft_with_the_collator(built, version):
    """`RadixCollator` in TRL's SFT, which counts the tokens that it is given: the unique ones."""

    def work(rank: int) -> dict[str, float]:
        build = partial(built, "SFT, labels", max_length=None, **sharding(version))
        stock = run(build, lambda model: model, evaluate=True)
        radix = run(partial(build, collator=RadixCollator()), share_prefixes, evaluate=True)
        return differences_of(stock, radix, skipped=["num_tokens", "eval_num_tokens"])

    for worst in on_two_ranks(work):
        assert {"loss", "grad_norm", "eval_loss"} <= worst.keys()


@pytest.fixture
def sharded(built) -> Callable[..., Any]:
    """`sharded(name, version, config)`: what both ranks found of a trainer whose models FSDP shards by layers.

    version, config: as for `sharding`.
    """

    def work(rank: int, name: str, version: int, config: dict[str, Any]) -> Comparison:
        from accelerate.state import AcceleratorState

        how = sharding(version, **config)
        found = compare(lambda share: built(name, share, **how))
        assert str(AcceleratorState().distributed_type) == "DistributedType.FSDP"
        plugin = AcceleratorState().fsdp_plugin
        assert all(str(value).upper() in str(getattr(plugin, key)).upper() for key, value in config.items())
        return found

    return lambda name, version, config: on_two_ranks(partial(work, name=name, version=version, config=config))


SHARDED = ["Trainer", "SFT", "SFT, LoRA", "DPO", "KTO", "Reward"]  # GRPO and RLOO: in `test_ten_steps`
FSDP: dict[str, tuple[int, dict[str, Any]]] = {  # version, others of `fsdp_config`
    "FSDP1": (1, {}),
    "FSDP2": (2, {}),
    "FSDP1, recomputed": (1, {"activation_checkpointing": True}),  # each layer is in a wrapper of Accelerate's
    "FSDP2, recomputed": (2, {"activation_checkpointing": True}),
    "FSDP1, whole until backward": (1, {"reshard_after_forward": "shard_grad_op"}),
    "FSDP2, whole until backward": (2, {"reshard_after_forward": False}),
    "FSDP1, flat": (1, {"use_orig_params": False}),
    "FSDP2, from rank 0": (2, {"cpu_ram_efficient_loading": True}),
}
CELLS = [
    *((name, how) for name in SHARDED for how in ("FSDP1", "FSDP2")),
    *((name, how) for name in ("Trainer", "SFT, LoRA") for how, (_, config) in FSDP.items() if config),
    ("DPO", "FSDP2, recomputed"),
]


@pytest.mark.parametrize(("name", "how"), CELLS)
def test_trainers_that_shard(sharded, table, name, how):
    """By Accelerate and its FSDP: each rank compares all that is logged, and its part of the gradients."""
    first, second = sharded(name, *FSDP[how])
    assert first.shared.entries == second.shared.entries
    table(f"2 ranks, {how}: {name}", first)


AS_SET: dict[str, Any] = {  # what people set beside a run on several ranks
    "eval_on_start": True,
    **{"eval_strategy": "steps", "eval_steps": 1, "eval_accumulation_steps": 1},
    **{"save_strategy": "steps", "save_steps": 1, "max_steps": 6},
    **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True},
    **{"max_grad_norm": 0.1, "label_smoothing_factor": 0.1, "optim": "adamw_torch_fused"},
    **{"train_sampling_strategy": "group_by_length", "dataloader_drop_last": True},
}


@pytest.mark.parametrize("version", [None, 2])
def test_many_settings_at_once(trainer, model, rows, tmp_path, version):
    """Evaluated before and between steps, saved after each, clipped; predicts with the best checkpoint, and trains on.

    The last checkpoint has the least loss, so "best" is the first, and the weights go back to it.
    """

    def trained(share: Share, folder: str) -> Run:
        set_seed(0)
        with float64_arithmetic():
            built = trainer(share(model().double()), rows, **AS_SET, **sharding(version))
            built.args.output_dir = str(tmp_path / folder)
            built.train()
            logits, labels, _ = built.predict(rows)
            weights = torch.cat([each.flatten() for each in gathered_weights(built.model)])
            if version is None:  # accelerate 1.15.0 shards the model of a trainer only once
                built.train()
        assert built.state.best_model_checkpoint.endswith("checkpoint-1")
        assert share is not every_call_shared or sharing_report(built).num_shared
        predicted = torch.from_numpy(logits[:, :-1][labels[:, 1:] != -100])
        return Run([numbers(entry) for entry in built.state.log_history], [weights, predicted.flatten()])

    def work(rank: int) -> dict[str, float]:
        return differences_of(trained(lambda model: model, "plain"), trained(every_call_shared, "shared"))

    for worst in on_two_ranks(work):
        assert {"loss", "grad_norm", "eval_loss"} <= worst.keys()


DOORS: dict[str, tuple[Share, Callable[[], Any]]] = {
    "share_prefixes": (share_prefixes, lambda: None),
    "RadixCollator": (share_prefixes, RadixCollator),
}


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("door", DOORS)
def test_a_rank_without_a_label(trainer, model, rows, door, version):
    """It has rows in every micro-batch, and a label only in the last ones; nobody waits for it."""
    (share, collator), mute = DOORS[door], [{**row, "labels": [-100] * len(row["labels"])} for row in rows]
    batches = [part for n in (0, 4, 8) for part in (rows[n : n + 4], mute[n : n + 4])]  # by rank, in turns
    data = [row for batch in (*batches, rows[:4], rows[4:8]) for row in batch]

    def work(rank: int) -> dict[str, float]:
        how = {"train_sampling_strategy": "sequential", **sharding(version)}
        if door == "share_prefixes":
            return compare(lambda share: trainer(share(model()), data, **how)).worst
        stock = run(lambda share: trainer(share(model()), data, **how), lambda model: model)
        return differences_of(stock, run(lambda share: trainer(share(model()), data, collator(), **how), share))

    for worst in on_two_ranks(work):
        assert {"loss", "grad_norm"} <= worst.keys()


@pytest.mark.parametrize("reduced", ["in bfloat16", "in float32"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "door"), [("Trainer", "share_prefixes"), ("Trainer", "RadixCollator"), ("SFT", "share_prefixes")]
)
def test_mixed_precision_of_fsdp(built, print_after, name, door, version, reduced):
    """Layers compute with weights in bfloat16: gradients and losses are as near to float64 as untouched ones are.

    Reduced in bfloat16 is what `bf16=True` asks of Accelerate, together with autocast.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    share, collator = DOORS[door]
    own = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    policy = (MixedPrecision, MixedPrecisionPolicy)[version - 1]

    def trained(share: Share, collator: Any = None, dtype: torch.dtype = torch.float32) -> Run:
        is_mixed, kept = dtype == torch.float32, list[Any]()
        how = own | sharding(version) | {"bf16": is_mixed and reduced == "in bfloat16"}

        def build(share: Share) -> Any:
            trainer, draw = built(name, share, collator, **how), np.random.default_rng(0)
            for weight in trainer.model.parameters():  # the same in float64 as in float32
                drawn = draw.normal(loc=weight.ndim == 1, scale=0.2, size=weight.shape)
                weight.data.copy_(torch.from_numpy(drawn.astype(np.float32)))
            if is_mixed and reduced == "in float32":
                plugin = trainer.accelerator.state.fsdp_plugin
                plugin.mixed_precision_policy = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            kept.append(trainer)
            return trainer

        found = run(build, share, dtype=dtype)
        assert share is not share_prefixes or sharing_report(kept[0]).num_shared
        return found

    def work(rank: int) -> float:
        truth = trained(lambda model: model, dtype=torch.float64)
        ordinary, shared = trained(lambda model: model), trained(share, collator())
        arms = [gradients_of(each) for each in (truth, ordinary, shared)]
        rung = compare_gradients("bfloat16", *arms)
        assert not rung.failed, rung.reason
        exact, one, other = (torch.cat(each.gradients) for each in (truth, ordinary, shared))
        assert_within_reference_error(other, one, exact)
        assert 1e-3 < relative_error(one, exact) < 0.1
        return relative_error(other, exact) / relative_error(one, exact)

    print_after(
        "error against float64, shared / ordinary",
        f"FSDP{version}, reduced {reduced}: {name}, {door} " + "{:.2f} {:.2f}".format(*on_two_ranks(work)),
    )


def gradients_of(found: Run) -> Gradients:
    """Those of each step, and the mean of the losses."""
    losses = [entry["loss"] for entry in found.entries if "loss" in entry]
    return Gradients(sum(losses) / len(losses), {f"step {n}": each for n, each in enumerate(found.gradients)})


@pytest.mark.parametrize(
    ("name", "door", "version", "kept"),
    [
        *(("Trainer", door, version, kept) for door in DOORS for version in (1, 2) for kept in STATE_DICTS),
        ("SFT, LoRA", "share_prefixes", 2, "FULL_STATE_DICT"),
        *(
            (name, "share_prefixes", version, "SHARDED_STATE_DICT")
            for name in (*SHARDED[1:], "DPO, LoRA", "KTO, LoRA", *DRAWN)
            for version in (None, 2)
        ),
        *((name, "share_prefixes", 1, None) for name in (*SHARDED[1:], *DRAWN)),
        ("Trainer", "share_prefixes", None, "SHARDED_STATE_DICT"),
        *(("SFT, labels", "RadixCollator", version, "SHARDED_STATE_DICT") for version in (None, 2)),
        ("Trainer", "RadixCollator", None, "SHARDED_STATE_DICT"),
    ],
)
def test_ten_steps(built, tmp_path, print_after, name, door, version, kept):
    """As one process takes them, untouched: what is logged, and the weights at the end.

    kept: a second trainer, with other weights, takes the last five from a checkpoint of the first, of this kind if FSDP
    writes it; None for no checkpoint. With FSDP1 the optimizer has no state: of AdamW's accelerate 1.15.0 reads none
    from a SHARDED_STATE_DICT, and torch 2.13.0 writes a wrong one of weights on a CPU into a FULL_STATE_DICT. Adapters
    under FSDP1 are not continued, since accelerate writes none. A rank draws its own completions, so the untouched run
    of GRPO and RLOO is one of two ranks, and all that is logged is compared; a checkpoint has each rank's generator.
    """
    share, collator = DOORS[door]
    own = {"optim": "sgd", "learning_rate": 0.05} if version == 1 else {}
    own |= {"max_length": None} if name == "SFT, labels" else {}
    half, is_drawn = LONG // 2, name in DRAWN

    def trained(share: Share, collator: Any = None, checkpoint: str | None = None, **how: Any) -> Run:
        set_seed(0 if checkpoint is None else 1)
        with float64_arithmetic():
            trainer = built(name, lambda model: share(model.double()), collator, times=2, max_steps=LONG, **own, **how)
            if name.startswith("KTO") and not distributed.is_initialized():
                take_both_ranks_rows(trainer)
            trainer.train(resume_from_checkpoint=checkpoint)
        assert share is not share_prefixes or sharing_report(trainer).num_shared
        weights = torch.cat([each.flatten() for each in gathered_weights(trainer.model)])
        *entries, _ = trainer.state.log_history  # the last one is a mean over the steps of this process
        return Run([numbers(entry) for entry in entries], [weights])

    def work(rank: int) -> list[Run]:
        how = sharding(version, state_dict_type=kept or "FULL_STATE_DICT")
        found = [trained(lambda model: model, **how)] if is_drawn else []
        if kept is None:
            return [*found, trained(share, collator(), **how)]
        found += [trained(share, collator(), save_strategy="steps", save_steps=half, **how)]
        return [*found, trained(share, collator(), str(tmp_path / f"checkpoint-{half}"), seed=1, **how)]

    untouched = [] if is_drawn else [trained(lambda model: model, gradient_accumulation_steps=2 * NUM_RANKS)]
    one, *others = untouched + on_two_ranks(work)[0]
    of_a_process = set() if is_drawn else one.entries[0].keys() - {"loss", "grad_norm"}  # or a mean of micro-batches
    for found in others:
        worst = differences_of(one, found, skipped=of_a_process)
        assert len(found.entries) == LONG and {"loss", "grad_norm"} <= worst.keys()
        what = f"FSDP{version or ': none'}: {name}, {door}, {kept}: {max(worst.values()):.1e}"
        print_after("ten steps of two ranks", what)


def take_both_ranks_rows(trainer: Any) -> None:
    """KTO's estimate of the KL term is a mean over the rows that all ranks have at a time, clamped at 0.

    Set only now, since TRL draws the mismatched answers of that term among the rows of a rank.
    """
    trainer.args.gradient_accumulation_steps //= NUM_RANKS
    trainer.args.per_device_train_batch_size *= NUM_RANKS
    trainer._train_batch_size *= NUM_RANKS
