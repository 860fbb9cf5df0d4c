"""An overview of a run, printed after tokenising and before the first step, for people to check before hours pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from radixtrain.collators.prefix_sampler import batches_of
from radixtrain.data.columns import choices_of, standard_row
from radixtrain.data.files.sources import as_sources, open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.data.steps import (
    Arrangement,
    conversation_groups,
    epoch_size,
    expected_r,
    grouped_order,
    text_of_copies,
)
from radixtrain.data.tokens.store import Corpus
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import DataError, bytes_text
from radixtrain.explain.sharing import length_quantiles, num_shared_prompts
from radixtrain.explain.tokens import marked, sample_tokens
from radixtrain.screen import screen
from radixtrain.settings.data import DataSettings
from radixtrain.settings.fields import changed_keys
from radixtrain.settings.model import ModelSettings
from radixtrain.settings.trainer import TrainerSettings
from radixtrain.training.devices.fabric import is_sharded
from radixtrain.training.optimizer import moment_bytes, num_steps_of_run
from radixtrain.training.start.loading import num_parameters
from radixtrain.tree.groups import PrefixGroups

if TYPE_CHECKING:
    from radixtrain.data.datamodule import SFTData

MOST_CONVERSATIONS = 20_000
"""Conversations to search for prompts, drawn by the seed: it takes 0.5 s, however many there are."""
SAMPLE_CHARS = 800
ROWS_LOOKED_AT = 32  # per source, in search of a common system prompt

LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora")
FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")
SCORES = ("scores", "next_tokens", "normalize_embeddings", "generate")
SHARING = ("attention", "kernel", "allow_dropout")
STOCK = ("attn_implementation",)
COLLATING = ("min_shared_tokens", "pad_to_multiple_of")
CHATS = ("split_turns", "assistant_only_loss", "chat_template_path", "chat_template_kwargs")
VALIDATING = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches")

Entry = tuple[str, str]
"""Name and text of a line."""


def print_overview(
    trainer: Any, module: object, data: SFTData, config: object, written: int, evaluates: str = ""
) -> None:
    """Print the overview, coloured on a terminal.

    module, data: a `RadixModule` with its model, and an `SFTData` with its rows. config: of the trainer, as set.
    written: bytes, see `check_room`. evaluates: what is generated after each validation; empty for nothing.
    """
    corpus, report, settings = data.conversations["train"], data.reports["train"], data.hparams
    entries = [
        *data_entries(corpus, report, settings.max_length, unused_keys(module, data, config)),
        *sharing_entries(data),
        *([("answers", evaluates)] if evaluates else []),
        *model_entries(module, trainer, data.steps_per_epoch, written),
    ]
    sample, tokenizer = corpus[0][0], load_tokenizer(settings.model_name_or_path, settings.chat_template_path)
    text = Text.assemble(
        f"{sample.where}, loss on what is in ⟦ ⟧:\n", marked(sample_tokens(sample, tokenizer), SAMPLE_CHARS)
    )
    console = screen(soft_wrap=True, highlight=False, markup=False)
    lines: list[tuple[str, str | Text]] = [*entries, ("sample", text)]
    for name, line in lines:
        console.print(Text.assemble((f"{name:<12} ", "bold"), line))


def steps_between_logs(trainer: Any, data: SFTData) -> int:
    """Return the configured number, or 1 for a shorter run, which would otherwise log no metrics."""
    num_steps = num_steps_of_run(trainer, data.steps_per_epoch)
    return 1 if 0 < num_steps < trainer.log_every_n_steps else trainer.log_every_n_steps


def data_entries(corpus: Corpus, report: EncodeReport, max_length: int | None, unused: Sequence[str]) -> list[Entry]:
    """Describe rows, samples and lengths; what is longer than `max_length`; columns and keys that nothing reads.

    unused: see `unused_keys`.
    """
    quantiles = ", ".join(f"{name} {value:,}" for name, value in length_quantiles(corpus.lengths).items())
    share = f", {report.num_labels / report.num_tokens:.0%} with loss" if report.num_tokens else ""
    weighted = (
        f", {epoch_size(corpus.weights):,} of them in an epoch by their weights" if corpus.weights is not None else ""
    )
    count = f"{len(corpus):,} conversations to train on{weighted}, {int(corpus.lengths.sum()):,} tokens{share}"
    entries = [("data", f"{report}, {count}"), ("lengths", f"{quantiles} tokens")]
    if report.num_long_samples:
        longest = f"the longest {report.longest:,} ({report.longest_where})"
        entries.append(("too long", f"{report.num_long_samples:,} samples over max_length {max_length:,}, {longest}"))
    if unread := report.unread():
        entries.append(("columns", f"not used: {unread}"))
    if unused:
        entries.append(("keys", f"not used: {'; '.join(unused)}"))
    return entries


def sharing_entries(data: SFTData) -> list[Entry]:
    """Describe prompts that conversations share, the expected r, and what another order would bring."""
    corpus, settings, num_groups = data.conversations["train"], data.hparams, ranks().num_groups
    drawn, seen = corpus, ""
    if len(corpus) > MOST_CONVERSATIONS:
        indices = np.random.default_rng([settings.seed, 0x5C]).choice(len(corpus), MOST_CONVERSATIONS, replace=False)
        drawn = corpus.select(np.sort(indices))
        seen = f" (in {len(drawn):,} of {len(corpus):,} conversations)"
    groups = conversation_groups(drawn)
    common = f"; {groups.common:,} tokens or more are common to all" if groups.common else ""
    entries = [("prompts", f"{num_shared_prompts(groups):,} shared by several conversations{common}{seen}")]
    if not settings.dedup:
        return [*entries, ("r", "1 or less: dedup: false is the ordinary baseline, on padded rows")]
    batches = list(batches_of(data.train_order(), settings.batch_size))
    max_tokens = settings.max_tokens * ranks().sp_size
    on_one = expected_r(corpus, batches, max_tokens)
    r = on_one.r if num_groups == 1 else expected_r(corpus, batches, max_tokens, num_groups).r
    text = f"about {r * on_one.whole_share:.1f} tokens per computed token in this order"
    if on_one.whole_share < 1:
        text += f" against whole chats, as TRL trains them, {r:.1f} against the same rows"
    if num_groups > 1:  # the groups share nothing with each other
        what = "devices" if ranks().sp_size == 1 else "groups"
        text += f" on {num_groups} {what}, {on_one.r * on_one.whole_share:.1f} on one"
    entries.append(("r", text))
    if copies := text_of_copies(drawn, settings):
        entries.append(("copies", copies))
    hint = _arrangement(data, drawn, groups, r, on_one.whole_share).hint
    return [*entries, ("advice", hint)] if hint else entries


def model_entries(module: Any, trainer: Any, steps_per_epoch: int, written: int) -> list[Entry]:
    """Describe ranks, steps, memory and disk. written: bytes, see `check_room`."""
    num_all, num_trained = num_parameters(module.model)
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in module.parameters()]
    held = sum(size * (2 if trained else 1) for size, trained in sizes) + moment_bytes(module, module.hparams)
    num_steps, num_ranks = num_steps_of_run(trainer, steps_per_epoch), ranks().size
    number = f"{num_steps:,}" if num_steps >= 0 else "without end"
    entries, divided, kept = [], "", 1 - module.hparams.activation_checkpointing
    if num_ranks > 1:
        is_divided = is_sharded(trainer.strategy)
        strategy = "FSDP2" if is_divided else "DDP"
        groups = f" in {ranks().num_groups} x {ranks().sp_size} that split each micro-batch" * (ranks().sp_size > 1)
        entries = [("devices", f"{num_ranks} ranks{groups}, {strategy}: each step is the same as on one")]
        divided = f", 1/{num_ranks} of it on each rank" if is_divided else " on each rank"
    memory = f"{bytes_text(held)} for weights, gradients and optimizer{divided}"
    return [
        *entries,
        ("trained", f"{num_trained:,} of {num_all:,} parameters"),
        ("steps", f"{number}, {steps_per_epoch:,} in an epoch; the time that is left is shown from the first one on"),
        (
            "memory",
            f"{memory}; the activations of a micro-batch come on top{f', in {kept:.0%} of the layers' * (kept < 1)}",
        ),
        ("disk", f"about {bytes_text(written)} for the model and its checkpoints"),
    ]


def _arrangement(data: SFTData, drawn: Corpus, groups: PrefixGroups, r: float, whole_share: float) -> Arrangement:
    """Estimate r of the run, and that of `group_by_prefix: true`, from a part of the conversations."""
    settings = data.hparams
    grouped = grouped_order(drawn, settings.batch_size, True, settings.seed, groups)
    if grouped is None or settings.group_by_prefix is not False or not settings.shuffle_dataset:
        return Arrangement(r, r)
    order = grouped.draw(np.arange(len(drawn)), np.random.default_rng([settings.seed, 0]))
    batches = batches_of(order, settings.batch_size)
    grouped_r = expected_r(drawn, batches, settings.max_tokens * ranks().sp_size, ranks().num_groups).r
    return Arrangement(r * whole_share, grouped_r * whole_share)


def unused_keys(model: Any, data: Any, trainer: Any) -> list[str]:
    """List keys that a run of `fit` has set and does not read: `model.lora_r (only with use_peft: true)` and so on.

    model, data: a `RadixModule` and an `SFTData`. trainer: keys of `trainer` with their values.

    A key counts as set if it differs from its default. Rows are not chats if no source begins with one.
    """
    of_model, of_data = model.hparams, data.hparams
    set_keys = {
        "model": changed_keys(ModelSettings, of_model),
        "data": changed_keys(DataSettings, of_data),
        "trainer": changed_keys(TrainerSettings, trainer),
    }
    no_warmup = "the schedule constant has no warm-up; constant_with_warmup has one"
    no_chats = bool(set_keys["data"].intersection(CHATS)) and not any(
        map(_begins_with_a_chat, as_sources(of_data.train_file, of_data.columns))
    )
    rules: list[tuple[str, tuple[str, ...], bool, str]] = [  # section, keys, whether they are unread, why
        ("model", LORA, not of_model.use_peft, "only with use_peft: true"),
        ("model", FOUR_BITS, not of_model.load_in_4bit, "only with load_in_4bit: true"),
        ("model", SHARING, not of_model.dedup, "not with dedup: false"),
        ("model", STOCK, of_model.dedup and of_model.attn_implementation != "eager", "only with dedup: false"),
        ("model", ("warmup_steps",), of_model.lr_scheduler_type == "constant", no_warmup),
        ("model", SCORES, True, "only for predict"),
        ("data", ("val_size",), bool(of_data.validation_file), "beside validation_file"),
        ("data", COLLATING, not of_data.dedup, "not with dedup: false"),
        ("data", ("excess_length_strategy",), of_data.max_length is None, "only with max_length"),
        ("data", CHATS, no_chats, "the rows are not chats"),
        ("data", ("test_file",), True, "only for test and predict"),
        ("data", ("predict_file",), True, "only for predict"),
        ("trainer", VALIDATING, not (of_data.validation_file or of_data.val_size), "there are no rows to validate on"),
    ]
    return [
        f"{section}.{name} ({reason})"
        for section, names, is_unread, reason in rules
        for name in names
        if is_unread and name in set_keys[section]
    ]


def system_prompt(data: SFTData) -> str:
    """Return the system turn with which the first rows of all training data begin; empty if these differ."""
    sources = as_sources(data.hparams.train_file, data.hparams.columns)
    chats = [chat for source in sources for chat in islice(_chats(source), ROWS_LOOKED_AT)]
    turns = [chat[0] if chat else {} for chat in chats]
    ours = data.encoder().system_prompt or None
    texts = [turn.get("content") if turn.get("role") == "system" else ours for turn in turns]
    return texts[0] if texts and isinstance(texts[0], str) and texts.count(texts[0]) == len(texts) else ""


def _begins_with_a_chat(source: object) -> bool:
    """Return whether the first row of a source is rendered by the chat template; True if it cannot be read."""
    return next(_chats(source), []) is not None


def _chats(source: Any) -> Iterator[list[dict[str, Any]] | None]:
    """Yield the messages of each row: None if it is not a chat, and no messages if it cannot be read."""
    for first in open_rows(source):
        try:
            fields = [standard_row(each).fields for each in choices_of(first.read())]
        except DataError:
            fields = []
        found = [each.get("messages") or each.get("prompt") for each in fields]
        chats = [each for each in found if isinstance(each, list)]
        yield chats[0] if chats else [] if not fields else None
