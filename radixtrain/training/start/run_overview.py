"""An overview of a run, printed after tokenising and before the first step, for people to check before hours pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from radixtrain.collators.prefix_sampler import batches_of
from radixtrain.data.sample import EncodeReport
from radixtrain.data.steps import epoch_size, expected_r
from radixtrain.data.tokens.store import Corpus
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import ranks
from radixtrain.errors import bytes_text
from radixtrain.explain.tokens import marked, sample_tokens
from radixtrain.screen import screen
from radixtrain.training.devices.fabric import is_sharded
from radixtrain.training.optimizer import moment_bytes, num_steps_of_run
from radixtrain.training.start.loading import num_parameters

if TYPE_CHECKING:
    from radixtrain.data.datamodule import SFTData

SAMPLE_CHARS = 800
Entry = tuple[str, str]
"""Name and text of a line."""


def print_overview(trainer: Any, module: object, data: SFTData, written: int, evaluates: str = "") -> None:
    """Print the overview, coloured on a terminal.

    module, data: a `RadixModule` with its model, and an `SFTData` with its rows. written: bytes, see `check_room`.
    evaluates: what is generated after each validation; empty for nothing.
    """
    corpus, report, settings = data.conversations["train"], data.reports["train"], data.hparams
    entries = [
        *data_entries(corpus, report, settings.max_length),
        sharing_entry(data),
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


def data_entries(corpus: Corpus, report: EncodeReport, max_length: int | None) -> list[Entry]:
    """Describe rows and samples; what is longer than `max_length`; columns that nothing reads."""
    share = f", {report.num_labels / report.num_tokens:.0%} with loss" if report.num_tokens else ""
    weighted = (
        f", {epoch_size(corpus.weights):,} of them in an epoch by their weights" if corpus.weights is not None else ""
    )
    count = f"{len(corpus):,} conversations to train on{weighted}, {int(corpus.lengths.sum()):,} tokens{share}"
    entries = [("data", f"{report}, {count}")]
    if report.num_long_samples:
        longest = f"the longest {report.longest:,} ({report.longest_where})"
        entries.append(("too long", f"{report.num_long_samples:,} samples over max_length {max_length:,}, {longest}"))
    if unread := report.unread():
        entries.append(("columns", f"not used: {unread}"))
    return entries


def sharing_entry(data: SFTData) -> Entry:
    """Describe how many tokens there are per computed token in the order of the run, also of whole chats."""
    corpus, settings, num_groups = data.conversations["train"], data.hparams, ranks().num_groups
    if not settings.dedup:
        return "r", "1 or less: dedup: false is the ordinary baseline, on padded rows"
    batches = list(batches_of(data.train_order(), settings.batch_size))
    max_tokens = settings.max_tokens * ranks().sp_size
    r, whole_share = expected_r(corpus, batches, max_tokens, num_groups)
    text = f"about {r * whole_share:.1f} tokens per computed token in this order"
    if whole_share < 1:
        text += f" against whole chats, as TRL trains them, {r:.1f} against the same rows"
    if num_groups > 1:  # the groups share nothing with each other
        what = "devices" if ranks().sp_size == 1 else "groups"
        on_one = expected_r(corpus, batches, max_tokens).r * whole_share
        text += f" on {num_groups} {what}, {on_one:.1f} on one"
    return "r", text


def model_entries(module: Any, trainer: Any, steps_per_epoch: int, written: int) -> list[Entry]:
    """Describe ranks, steps, memory and disk. written: bytes, see `check_room`."""
    num_all, num_trained = num_parameters(module.model)
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in module.parameters()]
    held = sum(size * (2 if trained else 1) for size, trained in sizes) + moment_bytes(module, module.hparams)
    num_steps, num_ranks = num_steps_of_run(trainer, steps_per_epoch), ranks().size
    number = f"{num_steps:,}" if num_steps >= 0 else "without end"
    entries, divided, stored = [], "", 1 - module.hparams.activation_checkpointing
    of_layers = f", in {stored:.0%} of the layers" if stored < 1 else ""
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
        ("memory", f"{memory}; the activations of a micro-batch come on top{of_layers}"),
        ("disk", f"about {bytes_text(written)} for the model and its checkpoints"),
    ]
