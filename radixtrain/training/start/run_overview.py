"""What a person wants to have seen before a run takes hours: one screen, after tokenising and before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from rich.console import Console
from rich.text import Text

from radixtrain.collators.batching import share_by_unique_tokens
from radixtrain.collators.prefix_sampler import batches_of
from radixtrain.data.files.sources import as_sources
from radixtrain.data.formats import UnreadRow, open_rows
from radixtrain.data.grouping import Arrangement, Conversations, conversation_groups, expected_r, grouped_order
from radixtrain.data.report import EncodeReport
from radixtrain.data.rows.columns import standard_row
from radixtrain.data.rows.trajectories import plain_rows
from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.data.weights import epoch_size
from radixtrain.distributed import ranks
from radixtrain.errors import DataError
from radixtrain.inspection.sample import marked_text
from radixtrain.report.formatting import bytes_text
from radixtrain.report.sharing import length_quantiles, num_shared_prompts
from radixtrain.training.devices.fsdp2 import FSDP2Strategy
from radixtrain.training.optimizer import num_steps_of_run
from radixtrain.tree.groups import PrefixGroups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from radixtrain.data.datamodule import SFTData

__all__ = [
    "Entry",
    "data_entries",
    "model_entries",
    "print_overview",
    "r_of_ranks",
    "sharing_entries",
    "steps_between_logs",
    "unused_keys",
]

Entry = tuple[str, str]
"""A name and a line of text."""

MOST_CONVERSATIONS = 20_000
"""Prompts are looked for in so many conversations, drawn by the seed: 0.5 s, however many there are."""
SAMPLE_CHARS = 800


def print_overview(trainer: Any, module: Any, data: SFTData, config: Any, written: int, evaluates: str = "") -> None:
    """Print it.

    module, data: a `RadixModule` with its model, and an `SFTData` with its rows. config: of the trainer, as it was set.
    written: bytes, see `check_room`. evaluates: what is generated after each validation; empty for nothing.
    """
    corpus, report, settings = data.conversations["train"], data.reports["train"], data.hparams
    tokenizer = load_tokenizer(settings.model_name_or_path, settings.chat_template_path)
    unused = unused_keys(module, data, config)
    entries = [
        *data_entries(corpus, report, settings.max_length, unused),
        *sharing_entries(data),
        *([("answers", evaluates)] if evaluates else []),
        *model_entries(module, trainer, data.steps_per_epoch, written),
    ]
    _print(entries, _sample_text(corpus, tokenizer))


def steps_between_logs(trainer: Any, data: SFTData) -> int:
    """As configured, but 1 for a run that is shorter, which would leave no metrics."""
    num_steps = num_steps_of_run(trainer, data.steps_per_epoch)
    return 1 if 0 < num_steps < trainer.log_every_n_steps else trainer.log_every_n_steps


def data_entries(corpus: Corpus, report: EncodeReport, max_length: int | None, unused: Sequence[str]) -> list[Entry]:
    """Rows, samples and lengths; what is longer than `max_length`; columns and keys that nothing reads.

    unused: see `unused_keys`.
    """
    shown = ", ".join(f"{name} {value:,}" for name, value in length_quantiles(corpus.lengths).items())
    share = f", {report.num_labels / report.num_tokens:.0%} with loss" if report.num_tokens else ""
    weighted = (
        "" if corpus.weights is None else f", {epoch_size(corpus.weights):,} of them in an epoch by their weights"
    )
    tokens = f"{int(corpus.lengths.sum()):,} tokens{share}"
    entries = [
        ("data", f"{report}, {len(corpus):,} conversations to train on{weighted}, {tokens}"),
        ("lengths", f"{shown} tokens"),
    ]
    if report.num_long_samples:
        longest = f"the longest {report.longest:,} ({report.longest_where})"
        entries.append(("too long", f"{report.num_long_samples:,} samples over max_length {max_length:,}, {longest}"))
    if report.unused_columns:
        columns = [f"{name} ({count:,} rows)" for name, count in report.unused_columns.most_common(8)]
        entries.append(("columns", f"not used: {', '.join(columns)}"))
    return [*entries, *([("keys", f"not used: {'; '.join(unused)}")] if unused else [])]


def sharing_entries(data: SFTData) -> list[Entry]:
    """Prompts that several conversations share, the r to expect, and what another order would bring."""
    corpus, settings = data.conversations["train"], data.hparams
    part = _part(corpus, settings.seed)
    groups = conversation_groups(part)
    entries = [("prompts", _prompts(groups, len(part), len(corpus)))]
    if not settings.dedup:
        return [*entries, ("r", "1 or less: dedup: false is the ordinary baseline, on padded rows")]
    arrangement = _arrangement(data, part, groups)
    entries.append(("r", f"about {arrangement.r:.1f} tokens per computed token in this order{_on_one(data)}"))
    return [*entries, *([("advice", arrangement.hint)] if arrangement.hint else [])]


def model_entries(module: Any, trainer: Any, steps_per_epoch: int, written: int) -> list[Entry]:
    """Steps, memory and disk. written: bytes, see `check_room`."""
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in module.parameters()]
    held = sum(size for size, _ in sizes) + 3 * sum(size for size, trained in sizes if trained)
    num_steps = num_steps_of_run(trainer, steps_per_epoch)
    number = f"{num_steps:,}" if num_steps >= 0 else "without end"
    return [
        *_devices(trainer),
        ("steps", f"{number}, {steps_per_epoch:,} in an epoch; the time that is left is shown from the first one on"),
        (
            "memory",
            f"{bytes_text(held)} for weights, gradients and AdamW{_held_by(trainer)}; the activations of a micro-batch "
            f"come on top",
        ),
        ("disk", f"about {bytes_text(written)} for the model and its checkpoints"),
    ]


def _devices(trainer: Any) -> list[tuple[str, str]]:
    """Nothing for a single process."""
    if ranks().size == 1:
        return []
    strategy = type(trainer.strategy).__name__.removesuffix("Strategy")
    return [("devices", f"{ranks().size} ranks, {strategy}: each step is the same as on one")]


def _held_by(trainer: Any) -> str:
    """How that is divided among several ranks."""
    if ranks().size == 1:
        return ""
    is_divided = isinstance(trainer.strategy, FSDP2Strategy)
    return f", 1/{ranks().size} of it on each rank" if is_divided else " on each rank"


def _sample_text(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The first sample, decoded, with its loss tokens marked."""
    sample = corpus[0][0]
    return Text.assemble(f"{sample.where}, loss on what stands in ⟦ ⟧:\n", marked_text(sample, tokenizer, SAMPLE_CHARS))


def _print(entries: Sequence[Entry], sample: Text) -> None:
    """Coloured on a terminal, plain lines elsewhere."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name, text in entries:
        console.print(Text.assemble((f"{name:<12} ", "bold"), text))
    console.print(Text.assemble((f"{'sample':<12} ", "bold"), sample))


def _part(corpus: Corpus, seed: int) -> Corpus:
    if len(corpus) <= MOST_CONVERSATIONS:
        return corpus
    drawn = np.random.default_rng([seed, 0x5C]).choice(len(corpus), MOST_CONVERSATIONS, replace=False)
    return corpus.select(np.sort(drawn))


def _prompts(groups: PrefixGroups, num_seen: int, num_conversations: int) -> str:
    """How many, and what all conversations have in common."""
    of = f" (in {num_seen:,} of {num_conversations:,} conversations)" if num_seen < num_conversations else ""
    common = f"; {int(groups.depth[0]):,} tokens or more are common to all" if groups.depth[0] else ""
    return f"{num_shared_prompts(groups):,} shared by several conversations{common}{of}"


def _arrangement(data: SFTData, part: Corpus, groups: PrefixGroups) -> Arrangement:
    """r of the run, and r that `group_by_prefix: true` would reach, estimated from a part of the conversations."""
    settings, size = data.hparams, ranks().size
    r = _r_in_this_order(data, size)
    grouped = grouped_order(part, settings.batch_size, True, settings.seed, groups)
    if grouped is None or settings.group_by_prefix is not False or not settings.shuffle_dataset:
        return Arrangement(r, r)
    drawn = grouped.draw(np.arange(len(part)), np.random.default_rng([settings.seed, 0]))
    return Arrangement(r, r_of_ranks(part, batches_of(drawn, settings.batch_size), settings.max_tokens, size))


def _r_in_this_order(data: SFTData, num_ranks: int) -> float:
    batches = batches_of(data.train_order(), data.hparams.batch_size)
    return r_of_ranks(data.conversations["train"], batches, data.hparams.max_tokens, num_ranks)


def _on_one(data: SFTData) -> str:
    """What several devices cost, which share nothing with one another; nothing for a single process."""
    size = ranks().size
    return f" on {size} devices, {_r_in_this_order(data, 1):.1f} on one" if size > 1 else ""


def r_of_ranks(
    conversations: Conversations, batches: Iterable[Sequence[int]], max_tokens: int | None, num_ranks: int
) -> float:
    """r of these steps, if each is shared out among the ranks: tokens per computed token, of all ranks together.

    conversations, batches, max_tokens: as `expected_r` takes them, and it leaves out the same. So is the measured cost
    of a token, by which a run may share out otherwise.
    """
    if num_ranks == 1:
        return expected_r(conversations, batches, max_tokens)
    num_tokens = num_computed = 0
    for batch in batches:
        sequences = [sample.input_ids for index in batch for sample in conversations[index] if len(sample.input_ids)]
        num_tokens += sum(map(len, sequences))
        num_computed += sum(share_by_unique_tokens(sequences, num_ranks, max_tokens).costs)  # each unique token costs 1
    return num_tokens / num_computed if num_computed else 1.0


LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora")
FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")
SCORES = ("scores", "next_tokens", "normalize_embeddings", "generate")
SHARING = ("attention", "kernel", "allow_dropout")
COLLATING = ("min_shared_tokens", "pad_to_multiple_of")
CHATS = ("split_turns", "assistant_only_loss", "chat_template_path", "chat_template_kwargs")
VALIDATING = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "num_sanity_val_steps")


def unused_keys(model: Any, data: Any, trainer: Any) -> list[str]:
    """`model.lora_r (only with use_peft: true)` and the like, of a run of `fit`.

    model, data: a `RadixModule` and an `SFTData`. trainer: the trainer's part of the configuration.

    A key counts as set if it does not have its default. Rows are no chats if no source begins with one.
    """
    return [
        *(f"model.{text}" for text in _of_model(model.hparams, _set_keys(model))),
        *(f"data.{text}" for text in _of_data(data.hparams, _set_keys(data))),
        *(f"trainer.{text}" for text in _of_trainer(trainer, data.hparams)),
    ]


def _set_keys(owner: Any) -> set[str]:
    """Names of the arguments that do not have their default."""
    parameters = inspect.signature(type(owner).__init__).parameters
    return {name for name, value in owner.hparams.items() if name in parameters and value != parameters[name].default}


def _of_model(settings: Any, given: set[str]) -> Iterator[str]:
    if not settings.use_peft:
        yield from _each(LORA, given, "only with use_peft: true")
    if not settings.load_in_4bit:
        yield from _each(FOUR_BITS, given, "only with load_in_4bit: true")
    if not settings.dedup:
        yield from _each(SHARING, given, "not with dedup: false")
    elif settings.attn_implementation != "eager":
        yield from _each(("attn_implementation",), given, "only with dedup: false")
    if settings.lr_scheduler_type == "constant":
        yield from _each(("warmup_steps",), given, "the schedule constant has no warm-up; constant_with_warmup has one")
    yield from _each(SCORES, given, "only for predict")


def _of_data(settings: Any, given: set[str]) -> Iterator[str]:
    if settings.validation_file:
        yield from _each(("val_size",), given, "beside validation_file")
    if not settings.dedup:
        yield from _each(COLLATING, given, "not with dedup: false")
    if settings.max_length is None:
        yield from _each(("excess_length_strategy",), given, "only with max_length")
    if given.intersection(CHATS) and not any(
        map(_begins_with_a_chat, as_sources(settings.train_file, settings.columns))
    ):
        yield from _each(CHATS, given, "the rows are no chats")
    yield from _each(("test_file",), given, "only for test and predict")
    yield from _each(("predict_file",), given, "only for predict")


def _of_trainer(config: Any, data: Any) -> Iterator[str]:
    if not data.validation_file and not data.val_size:
        defaults = {parameter.name: parameter.default for parameter in inspect.signature(L.Trainer).parameters.values()}
        given = {name for name in VALIDATING if config.get(name) not in (None, defaults.get(name))}
        yield from _each(VALIDATING, given, "there are no rows to validate on")


def _begins_with_a_chat(source: Any) -> bool:
    """Whether the first row of a source is rendered by the chat template; True if it cannot be read."""
    first = next(open_rows(source))
    try:
        row = first.read() if isinstance(first, UnreadRow) else first
        if isinstance(row, DataError):
            return True
        fields = [standard_row(plain).fields for plain in plain_rows(row)]
    except DataError:
        return True
    return any("messages" in each or isinstance(each.get("prompt"), list) for each in fields)


def _each(names: tuple[str, ...], given: set[str], reason: str) -> Iterator[str]:
    yield from (f"{name} ({reason})" for name in names if name in given)
