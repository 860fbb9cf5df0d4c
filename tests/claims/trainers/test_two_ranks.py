"""Two processes under torchrun's environment: each shares inside its own micro-batches, and nothing else changes.

Every trainer runs untouched and shared on the same two processes. Logged numbers are compared, what the trainer reduces
over processes among them, and the gradient of each step after it was averaged; the bars are those of one process.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import _state_dict_utils
from transformers import set_seed

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.testing import assert_within_reference_error, relative_error
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_arithmetic
from tests.support import FULL
from tests.support.processes import on_ranks
from tests.support.trainers import (
    DRAWN,
    LONG,
    NUM_ROWS,
    PROMPT,
    Comparison,
    LabelledRow,
    Run,
    Share,
    Stream,
    compare,
    differences_of,
    gathered_weights,
    mean_log_probability,
    numbers,
    row_of,
    run,
)

pytestmark = FULL

NUM_RANKS = 2
STATE_DICTS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]


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
def equally_long_rows() -> list[LabelledRow]:
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


def every_call_shared(model: Any) -> Any:
    """Also the last one of an epoch, whose rows may be only one on a rank."""
    return share_prefixes(model, min_ratio=0)


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


@pytest.mark.parametrize("version", [None, 2])
@pytest.mark.parametrize("share", [every_call_shared, share_prefixes])
def test_a_rank_that_shares_nothing(model, trainer, rows, share, version):
    """Its calls run as they are, or on all of their tokens, while the other rank shares."""
    tokens = np.random.default_rng(2).integers(50, 250, (len(rows), 4)).tolist()
    alone = [{"input_ids": four, "labels": four} for four in tokens]
    batches = [part for n in range(0, 12, 4) for part in (alone[n : n + 4], rows[n : n + 4])]  # by rank, in turns

    def work(rank: int) -> tuple[int, int]:
        kept: list[Any] = []

        def build(share: Share) -> Any:
            kept.append(share(model()))
            return trainer(
                kept[-1], [row for batch in batches for row in batch], train_sampling_strategy="sequential", **how
            )

        how = sharding(version)
        differences_of(run(build, lambda model: model), run(build, share))
        report = sharing_report(kept[-1])
        return report.num_tokens - report.num_unique_tokens, sum(report.not_shared.values())

    (saved, unshared), (saved_by_second, unshared_by_second) = on_two_ranks(work)
    assert saved < saved_by_second
    assert (unshared, unshared_by_second) == (0 if share is every_call_shared else 5, 0), "5 micro-batches each"


AS_TRL_HAS_IT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SHARDED = ["Trainer", "SFT", "SFT, LoRA", "DPO", "KTO", "Reward"]  # DRAWN are GRPO and RLOO
FSDP: dict[str, tuple[int | None, dict[str, Any]]] = {  # version, others of `fsdp_config`
    "DDP": (None, {}),
    "FSDP1": (1, {}),
    "FSDP2": (2, {}),
    "FSDP1, recomputed": (1, {"activation_checkpointing": True}),  # each layer is in a wrapper of Accelerate's
    "FSDP2, recomputed": (2, {"activation_checkpointing": True}),
    "FSDP1, whole until backward": (1, {"reshard_after_forward": "shard_grad_op"}),
    "FSDP2, whole until backward": (2, {"reshard_after_forward": False}),
    "FSDP1, flat": (1, {"use_orig_params": False}),
    "FSDP2, from rank 0": (2, {"cpu_ram_efficient_loading": True}),
}
SPREAD: dict[str, dict[str, Any]] = {  # by Accelerate: a rank gets part of a batch that rank 0 has read, or its own
    "stream": {"data": Stream, "accelerator_config": {"dispatch_batches": False}},
    "stream, dispatched": {"data": Stream},
    "stream, split": {"data": Stream, "accelerator_config": {"split_batches": True}},
    "dispatched, split": {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
}
# As they are, all trainers are in `test_ten_steps`.
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, how, {}) for name in ("Trainer", "SFT, LoRA") for how, (_, config) in FSDP.items() if config),
    ("DPO", "FSDP2, recomputed", {}),
    *(("Trainer", "DDP", {"evaluate": True, **own}) for own in SPREAD.values()),
    ("Trainer", "DDP", {"evaluate": True, "average_tokens_across_devices": False}),
    ("Trainer", "DDP", {"evaluate": True, "max_steps": 1, "compute_metrics": mean_log_probability}),
    ("SFT, LoRA", "DDP", {"evaluate": True, **AS_TRL_HAS_IT}),
    *((name, "DDP", {"evaluate": True}) for name in ("DPO", "KTO", "Reward")),
]


@pytest.mark.parametrize(("name", "how", "others"), CELLS)
def test_trainers(built, table, equally_long_rows, name, how, others):
    """Each rank compares all that is logged, what the trainer gathers too, and its part of the gradients."""
    version, config = FSDP[how]
    own = {**others, **({"rows": equally_long_rows} if others.keys() & {"data", "accelerator_config"} else {})}
    evaluate = own.pop("evaluate", False)
    share = every_call_shared if "rows" in own else share_prefixes

    def work(rank: int) -> tuple[Comparison, list[Tensor]]:
        from accelerate.state import AcceleratorState

        seen: list[Tensor] = []
        settings = own | sharding(version, **config)
        found = compare(
            lambda share: built(name, lambda model: watched(share(model), seen), **settings),
            share=share,
            evaluate=evaluate,
        )
        assert distributed.get_world_size() == NUM_RANKS
        assert (str(AcceleratorState().distributed_type) == "DistributedType.FSDP") == bool(version)
        plugin = AcceleratorState().fsdp_plugin if version else None
        assert all(str(value).upper() in str(getattr(plugin, key)).upper() for key, value in config.items())
        return found, seen

    (first, seen), (second, seen_by_second) = on_two_ranks(work)
    assert first.shared.entries == second.shared.entries
    assert version or all(map(torch.equal, first.shared.gradients, second.shared.gradients))
    assert not torch.equal(seen[0], seen_by_second[0])
    assert "compute_metrics" not in own or "eval_logp" in first.worst
    table(f"2 ranks, {how}: {name}", first)


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
