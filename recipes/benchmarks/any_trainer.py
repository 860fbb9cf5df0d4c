"""Compare trainers with and without `share_prefixes`: are their steps equal, how much faster is one, and what is ideal?

    python recipes/benchmarks/any_trainer.py
    python recipes/benchmarks/any_trainer.py --trainers dpo grpo --repeats 5 --hidden 512
    python recipes/benchmarks/any_trainer.py --ranges               # speed-up / r of each entry point, in CPU time
    python recipes/benchmarks/any_trainer.py --nothing_shared       # the cost of a call that shares nothing
    python recipes/benchmarks/any_trainer.py --every_token          # loss on every token, a vocabulary of 151,936

pip install 'trl>=1.10'. Nothing is downloaded: a Qwen3 with random weights, and random words of one token each. Every
row has 512 shared tokens and 64 of its own, a question and an answer. A group of GRPO or RLOO is 8
completions of up to 64 tokens to a prompt of 512.

A step is the trainer's loss of one micro-batch and its backward pass, without generation, rewards and
the optimizer. The untouched trainer and the shared one alternate on the same batch and the same weights.

The ideal is the ratio of floating-point operations, ordinary to unique. It counts the layers in every call of every
model, without padding: once for a forward pass without gradients, three times for one with gradients. It also counts
the head, which scores every position of the batch, or each unique token once if they are shared.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from flops import costs_of, ordinary_flops, unique_flops
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.kto import KTOConfig, KTOTrainer

from radixtrain import RadixCollator, build_prefix_plan, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.tree.plan import PrefixPlan

SHARED, QUESTION, ANSWER, GENERATIONS = 512, 16, 48, 8
VOCAB_SIZE, LARGE_VOCABULARY = 4096, 151_936
Share = Callable[[Any], Any]
Step = Callable[[], Tensor]  # the loss of one micro-batch
Build = Callable[["Bench", Share], tuple[Step, nn.Module]]


@dataclass
class Calls:
    """The plans of all calls of the models of a step, and whether gradients were wanted."""

    plans: list[tuple[PrefixPlan, int, bool]] = field(default_factory=list)

    def watch(self, model: nn.Module) -> Any:
        """Keep the plan of every call without a cache. Returns the same model."""

        def keep(backbone: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            ids = given.get("input_ids", args[0] if args else None)
            if given.get("past_key_values") is None and not given.get("use_cache"):
                kept = given["attention_mask"].bool()
                bounds = np.append(0, kept.sum(1).cumsum(0).numpy())
                plan = build_prefix_plan(ids[kept].numpy(), bounds)
                self.plans.append((plan, ids.numel(), torch.is_grad_enabled()))

        backbone_of(model_inside(model)).register_forward_pre_hook(keep, with_kwargs=True)
        return model

    def ideal(self, config: Any, has_head: bool) -> float:
        """How many times fewer operations the unique tokens take. has_head: whether one scores tokens."""
        costs, before, after = costs_of(config), 0.0, 0.0
        for plan, places, trains in self.plans:
            passes = 3 if trains else 1
            before += passes * ordinary_flops(costs, plan, places * has_head).total
            after += passes * unique_flops(costs, plan, plan.num_rows * has_head).total
        return before / after

    @property
    def compression_ratio(self) -> float:
        return sum(plan.num_tokens for plan, *_ in self.plans) / sum(plan.num_rows for plan, *_ in self.plans)


@dataclass
class Bench:
    """Where the model is, and its rows. rows: of a micro-batch. shared: words that all of them begin with."""

    folder: Path
    rows: int
    tokenizer: PreTrainedTokenizerFast
    shared: int = SHARED

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "output_dir": str(self.folder / "out"),
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        }

    def language_model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder)

    def score_model(self) -> Any:
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=1)

    def texts(self) -> list[dict[str, str]]:
        """`prompt`, `chosen`, `rejected`, one for each row: words that all share, a question, two answers."""
        rng = np.random.default_rng(0)
        shared = words(rng, self.shared)
        rows = [(words(rng, QUESTION), words(rng, ANSWER - 1), words(rng, ANSWER - 1)) for _ in range(self.rows)]
        return [{"prompt": f"{shared} {q}", "chosen": f" {a}", "rejected": f" {b}"} for q, a, b in rows]


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(f"w{number}" for number in rng.integers(3, VOCAB_SIZE, count))


def step_of(trainer: Trainer, generates: bool = False) -> tuple[Step, nn.Module]:
    """The loss of the trainer's first micro-batch, computed anew at every call.

    generates: a call generates new completions, and scores them as the trainer does, too.
    """
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = trainer._prepare_inputs(batch)
    if isinstance(trainer, GRPOTrainer | RLOOTrainer):
        trainer.current_gradient_accumulation_steps = 1
    if generates:
        return lambda: trainer.compute_loss(trainer.model, dict(trainer._prepare_inputs(batch))), trainer.model
    return lambda: trainer.compute_loss(trainer.model, dict(inputs)), trainer.model


def sft(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in bench.texts()]
    config = SFTConfig(**bench.settings, max_length=None)
    return step_of(SFTTrainer(share(bench.language_model()), config, train_dataset=Dataset.from_list(rows)))


def dpo(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    config = DPOConfig(**{**bench.settings, "per_device_train_batch_size": bench.rows // 2}, max_length=None)
    policy, reference = share(bench.language_model()), share(bench.language_model())
    return step_of(DPOTrainer(policy, reference, config, train_dataset=Dataset.from_list(bench.texts())))


def collator(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    """Hugging Face's Trainer, whose collator is a `RadixCollator` if the model shares."""
    tokenized = bench.tokenizer([row["prompt"] + row["chosen"] for row in bench.texts()])["input_ids"]
    asked = bench.shared + QUESTION
    rows = [{"input_ids": ids, "labels": [-100] * asked + ids[asked:]} for ids in tokenized]
    model = share(bench.language_model())
    collate = RadixCollator() if share is share_prefixes else DataCollatorForSeq2Seq(bench.tokenizer)
    arguments = TrainingArguments(**bench.settings)
    return step_of(Trainer(model, arguments, train_dataset=Dataset.from_list(rows), data_collator=collate))


def kto(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0}
        for n, row in enumerate(bench.texts())
    ]
    config = KTOConfig(**bench.settings, max_length=None)
    policy, reference = share(bench.language_model()), share(bench.language_model())
    return step_of(
        KTOTrainer(
            policy, reference, args=config, train_dataset=Dataset.from_list(rows), processing_class=bench.tokenizer
        )
    )


def reward(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    config = RewardConfig(**{**bench.settings, "per_device_train_batch_size": bench.rows // 2}, max_length=None)
    return step_of(RewardTrainer(share(bench.score_model()), config, train_dataset=Dataset.from_list(bench.texts())))


def grpo(
    bench: Bench, share: Share, trainer: Any = GRPOTrainer, config: Any = GRPOConfig, generates: bool = False
) -> tuple[Step, nn.Module]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    prompts = Dataset.from_list([{"prompt": words(rng, bench.shared)} for _ in range(4)])
    sizes = {"per_device_train_batch_size": GENERATIONS, "num_generations": GENERATIONS}
    args = config(**{**bench.settings, **sizes}, max_completion_length=QUESTION + ANSWER)

    def likes_small(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(np.mean(ids)) for ids in completion_ids]

    return step_of(trainer(share(bench.language_model()), likes_small, args, prompts), generates)


def rloo(bench: Bench, share: Share, generates: bool = False) -> tuple[Step, nn.Module]:
    return grpo(bench, share, RLOOTrainer, RLOOConfig, generates)


def classification(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    """Hugging Face's Trainer, a score for each row."""
    rows = bench.tokenizer([row["prompt"] + row["chosen"] for row in bench.texts()])
    data = Dataset.from_dict({**rows, "labels": [float(n % 2) for n in range(bench.rows)]})
    model = share(bench.score_model())
    return step_of(
        Trainer(model, TrainingArguments(**bench.settings), train_dataset=data, processing_class=bench.tokenizer)
    )


def plain_loop(bench: Bench, share: Share) -> tuple[Step, nn.Module]:
    """`model(**batch, labels=...)`."""
    batch = bench.tokenizer([row["prompt"] + row["chosen"] for row in bench.texts()], return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[:, : bench.shared + QUESTION] = -100
    model = share(bench.language_model()).train()
    return (
        lambda: model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss,
        model,
    )


# Whether there is a head that scores tokens; one that scores a row of the batch costs nothing.
TRAINERS: dict[str, tuple[Build, bool]] = {
    "sft": (sft, True),
    "dpo": (dpo, True),
    "kto": (kto, True),
    "reward": (reward, False),
    "grpo": (grpo, True),
    "rloo": (rloo, True),
    "classification": (classification, False),
    "plain_loop": (plain_loop, True),
}


# Every way in; GRPO and RLOO also with the generation of their completions.
WAYS: dict[str, Build] = {
    "`RadixCollator`": collator,
    "`share_prefixes`, SFT": sft,
    "`share_prefixes`, DPO": dpo,
    "`share_prefixes`, reward model": reward,
    "`share_prefixes`, GRPO, loss and backward": grpo,
    "`share_prefixes`, GRPO with generation": partial(grpo, generates=True),
    "`share_prefixes`, RLOO, loss and backward": rloo,
    "`share_prefixes`, RLOO with generation": partial(rloo, generates=True),
}


def ranges(layers: int, hidden: int, rows: int, repeats: int, num_shared: Sequence[int] = (512, 128)) -> Iterator[str]:
    """Lines of a table: the speed-up of each way in as a part of r, for rows that share many words and few.

    On one thread, whose CPU time counts: that is the same beside other programs. The arms take turns, and each turn
    gives a ratio: the median of them, and from which to which they are.
    """
    torch.set_num_threads(1)
    yield "| way in | " + " | ".join(f"r, {shared} shared | speed-up | of r" for shared in num_shared) + " |"
    yield "|---" * (3 * len(num_shared) + 1) + "|"
    with tempfile.TemporaryDirectory() as folder:
        _, tokenizer = made_model(Path(folder), layers, hidden)
        for name, build in WAYS.items():
            found = [part_of_r(build, Bench(Path(folder), rows, tokenizer, shared), repeats) for shared in num_shared]
            yield f"| {name} | " + " | ".join(_cells(r, folds) for r, folds in found) + " |"


def _cells(r: float, folds: list[float]) -> str:
    middle, low, high = (each(folds) for each in (statistics.median, min, max))
    return f"{r:.2f} | {middle:.2f}x | {middle / r:.2f} r ({low / r:.2f} to {high / r:.2f})"


def part_of_r(build: Build, bench: Bench, repeats: int) -> tuple[float, list[float]]:
    """r of the calls with gradients, and how many times as fast a step is, by each turn of the two arms."""
    calls = Calls()
    arms = build(bench, calls.watch), build(bench, share_prefixes)
    calls.plans.clear()  # of the first generation
    for arm in arms:
        cpu_seconds(*arm)
    plans = [plan for plan, _, has_gradients in calls.plans if has_gradients]
    r = sum(plan.num_tokens for plan in plans) / sum(plan.num_rows for plan in plans)
    times = [[cpu_seconds(*arm) for arm in arms] for _ in range(repeats)]
    return r, [before / after for before, after in times]


def cpu_seconds(step: Step, model: nn.Module) -> float:
    model.zero_grad(set_to_none=True)
    began = time.process_time()
    step().backward()
    return time.process_time() - began


# How Hugging Face's Trainer trains on every token: what is done to the model, and its collator.
EVERY_TOKEN: dict[str, tuple[Share, Any]] = {
    "untouched": (lambda model: model, DataCollatorForSeq2Seq),
    "`RadixCollator`": (share_prefixes, lambda tokenizer: RadixCollator()),
    "`share_prefixes`": (share_prefixes, DataCollatorForSeq2Seq),
}


def every_token() -> Iterator[str]:
    """Lines of a table: 32 rows of 160 shared and 16 own tokens, all labelled; 2 layers of 128, 151,936 tokens."""
    yield "| arm | CPU s of a step | peak of the process, MiB |\n|---|---|---|"
    fresh = {"max_workers": 1, "max_tasks_per_child": 1, "mp_context": get_context("spawn")}
    with ProcessPoolExecutor(**fresh) as processes:
        for name, (seconds, peak) in zip(EVERY_TOKEN, processes.map(one_of_every_token, EVERY_TOKEN), strict=True):
            yield f"| {name} | {seconds:.2f} | {peak:,.0f} |"


def one_of_every_token(name: str) -> tuple[float, float]:
    """CPU seconds, on one thread, of the second step of this process, and its peak memory in MiB."""
    torch.set_num_threads(1)
    share, collator_of = EVERY_TOKEN[name]
    rng = np.random.default_rng(0)
    shared = rng.integers(3, LARGE_VOCABULARY, 160).tolist()
    rows = [shared + rng.integers(3, LARGE_VOCABULARY, 16).tolist() for _ in range(32)]
    data = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])
    with tempfile.TemporaryDirectory() as folder:
        _, tokenizer = made_model(Path(folder), 2, 128, LARGE_VOCABULARY)
        bench = Bench(Path(folder), len(rows), tokenizer)
        arguments, model = TrainingArguments(**bench.settings), share(bench.language_model())
        step = step_of(Trainer(model, arguments, train_dataset=data, data_collator=collator_of(tokenizer)))
    seconds = [cpu_seconds(*step) for _ in range(2)][-1]
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds_and_gradient(step: Step, model: nn.Module) -> tuple[float, float, Tensor]:
    """Seconds, loss, and the gradient as one vector."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    loss = step()
    loss.backward()
    took = time.perf_counter() - began
    return took, loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(name: str, bench: Bench, config: Any, repeats: int) -> str:
    build, has_head = TRAINERS[name]
    calls = Calls()
    untouched, shared = build(bench, calls.watch), build(bench, share_prefixes)
    calls.plans.clear()  # of generation and of old log-probabilities
    (_, loss, gradient), (_, shared_loss, shared_gradient) = (seconds_and_gradient(*arm) for arm in (untouched, shared))
    ideal, r = calls.ideal(config, has_head), calls.compression_ratio
    times = [[seconds_and_gradient(*arm)[0] for arm in (untouched, shared)] for _ in range(repeats)]
    before, after = (statistics.median(arm) for arm in zip(*times, strict=True))
    assert sharing_report(shared[1]).num_shared
    off = abs(loss - shared_loss) / abs(loss) if loss else abs(shared_loss)
    gradient_off = ((gradient - shared_gradient).norm() / gradient.norm()).item()
    return (
        f"| {name} | {r:.2f} | {off:.1e} | {gradient_off:.1e} | {before * 1e3:,.0f} | {after * 1e3:,.0f} | "
        f"{before / after:.2f}x | {ideal:.2f}x | {before / after / ideal:.2f} |"
    )


def nothing_shared() -> str:
    """What `share_prefixes` costs if 16 rows of 128 tokens begin differently, beside a step of 2 layers of 128."""
    with tempfile.TemporaryDirectory() as folder:
        made_model(Path(folder), layers=2, hidden=128)
        model = share_prefixes(AutoModelForCausalLM.from_pretrained(folder).train())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB_SIZE, (16, 128), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    hook = next(iter(model.model._forward_pre_hooks.values()))
    on_thread, steps = [], []
    for _ in range(30):
        began = time.thread_time()
        hook(model.model, (), batch)
        on_thread.append(time.thread_time() - began)
        steps.append(seconds_and_gradient(lambda: model(**batch, labels=ids).loss, model)[0])
    assert not sharing_report(model).num_shared
    return f"{min(on_thread) * 1e3:.2f} ms of CPU time a call, in a step of {statistics.median(steps) * 1e3:.0f} ms"


def made_model(
    folder: Path, layers: int, hidden: int, vocab_size: int = VOCAB_SIZE
) -> tuple[Any, PreTrainedTokenizerFast]:
    """Saves a model and its tokenizer. Returns the configuration, and the tokenizer."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, VOCAB_SIZE)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch; half as many pairs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranges", action="store_true", help="measure only the speed-up / r of each entry point")
    parser.add_argument("--nothing_shared", action="store_true", help="measure only that")
    parser.add_argument(
        "--every_token", action="store_true", help="measure only loss on every token, each arm by itself"
    )
    options = parser.parse_args()
    if options.every_token:
        for line in every_token():
            print(line, flush=True)
        return
    if options.nothing_shared:
        print(nothing_shared())
        return
    if options.ranges:
        for line in ranges(options.layers, options.hidden, options.rows, options.repeats):
            print(line, flush=True)
        return
    print("| trainer | r | loss off by | gradient off by | ms | ms shared | speed-up | ideal | efficiency |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config, tokenizer = made_model(Path(folder), options.layers, options.hidden)
        bench = Bench(Path(folder), options.rows, tokenizer)
        for name in options.trainers:
            print(measure(name, bench, config, options.repeats), flush=True)


if __name__ == "__main__":
    main()
