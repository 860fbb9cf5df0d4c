"""`radixtrain inspect --row`: one row of a file, from its columns to its tokens and its place in a micro-batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row, Source, UnreadRow, as_sources, open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.data.splits import encoder_for
from radixtrain.data.step_data import StepData
from radixtrain.data.tokens.decode import shortened
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError, UserError
from radixtrain.explain.micro_batch import MicroBatch, micro_batches, named_rows
from radixtrain.explain.tokens import marked, sample_tokens, visible
from radixtrain.explain.tree import run_tree
from radixtrain.settings.fields import value_of

MOST_CHARS = 800  # to show of a field, or of a rendered text
REFUSED = "bold red"
SPLITS = ("train", "validation", "test", "predict")


def show_row(data: StepData, row: int | str, full: bool = False) -> Iterator[RenderableType]:
    """Yield what happens to a row, stage after stage, so that a refused row is shown as far as it got.

    row: see `find_row`. full: shorten nothing.

    Raises UserError if there is no such row, or if the tokenizer, its template or a file cannot be read.
    """
    found = find_row(data, row)
    yield _title(f"{found.where}: row {found.number:,} of data.{found.split}_file")
    try:
        content = found.content.read()
        yield _named(content.fields, full)
    except DataError as error:
        if isinstance(found.content.content, bytes):
            yield _indented(_shortened(found.content.content.decode("utf-8", "backslashreplace"), full))
        yield _refused(error)
        return
    encoder = encoder_for(found.source, data.encoder(found.split == "predict" and data.settings.predict_prompts))
    yield from _taken_as(content, encoder, full)
    items = encoder.drafts(content)
    tokenized = encoder.tokenize([item for item in items if isinstance(item, Draft)])
    for number, item in enumerate(items, start=1):
        if isinstance(item, Draft):
            what = {"plain": "plain text", "chat": "a whole chat", "turn": "a turn of the assistant"}[item.form]
            yield _title(f"rendered{_of(number, len(items))}: {what}")
            texts = {"prompt": item.prompt, "target": item.target}
            yield _named({name: text for name, text in texts.items() if text}, full)
        if not isinstance(item, DataError):
            sample = item if isinstance(item, TokenRow) else next(tokenized)
            tokens = sample_tokens(sample, encoder.tokenizer)
            num_labelled = sum(token.bears_loss for token in tokens)
            num_others = int(((sample.labels != IGNORE_INDEX) & (sample.labels != sample.input_ids)).sum())
            others = f", {num_others:,} of which learn another token than their own" if num_others else ""
            yield _title(f"tokens{_of(number, len(items))}: {len(tokens):,}, {num_labelled:,} with loss{others}")
            yield _indented(marked(tokens, None if full else MOST_CHARS))
    try:
        kept = encoder.encode(content)
    except DataError as error:
        yield _refused(error)
        return
    if len(kept) < len(items):
        yield Text(f"dropped for their length: {len(items) - len(kept)} of {len(items)} samples", style=REFUSED)
    cut = sum(len(sample.input_ids) == encoder.max_length for sample in kept)
    if cut and encoder.excess_length_strategy == "truncate":
        yield Text(f"cut to max_length, {encoder.max_length} tokens: {cut} of {len(items)} samples", style=REFUSED)
    if kept and found.split == "train":
        yield from _computed(data, found.where)


def _taken_as(row: Row, encoder: ChatEncoder, full: bool) -> Iterator[RenderableType]:
    """Show what the columns mean, and which are not read. Skips a bad row, whose draft shows the error."""
    try:
        standard = encoder.standard(row)
    except DataError:
        return
    for number, each in enumerate(standard, start=1):
        yield _title(f"taken as{_of(number, len(standard))}: {', '.join(each.fields)}")
        if row.fields | each.fields != row.fields:
            yield _named(each.fields, full)
    encoder.drafts(row, report := EncodeReport())
    if report.unused_columns:
        yield _indented(Text(f"not read: {', '.join(sorted(report.unused_columns))}", style=REFUSED))


def _named(fields: Mapping[str, object], full: bool) -> RenderableType:
    """Show the value of each column after its name, and for a list of messages its turns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
            text = "\n".join(map(_json, value))
        else:
            text = value if isinstance(value, str) else _json(value)
        table.add_row(name, _shortened(text, full))
    return _indented(table)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _computed(data: StepData, where: str) -> Iterator[RenderableType]:
    """Show the rows of the first epoch. The other rows of the file are read for this, and may be refused."""
    yield _title("computed, in the first epoch")
    try:
        data.setup("inspect")
        locations = sample_locations(data, where)
    except UserError as error:
        yield Text.assemble(("unknown, since the steps cannot be made: ", REFUSED), str(error))
        return
    if not locations:
        yield _indented(Text("not trained: data.val_size took the row for validation"))
    for part, sequence in locations:
        yield _indented(f"{part.place}, sequence {sequence} of {len(part.samples)}, counted from 0")
        table = Table.grid(padding=(0, 2))
        for first, last, names in shared_rows(part, sequence):
            others = f"shared with {len(names)}: {named_rows(names)}" if names else "its own"
            table.add_row(f"tokens {first}-{last}", f"{last + 1 - first:,}", others)
        yield _indented(_indented(table))


def _refused(error: DataError) -> Text:
    return Text.assemble(("refused: ", REFUSED), str(error))


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _of(number: int, count: int) -> str:
    return f" {number} of {count}" if count > 1 else ""


def _shortened(text: str, full: bool) -> Text:
    """Make a text visible, and shorten it in the middle."""
    return Text(visible(text if full else shortened(text, MOST_CHARS)).removesuffix("\n"))


class FoundRow(NamedTuple):
    """A row of a split. number: counted from 1 over all of the split's sources; bad rows count too."""

    split: str
    number: int
    source: Source
    content: UnreadRow

    @property
    def where(self) -> str:
        return self.content.where


def find_row(data: StepData, row: int | str) -> FoundRow:
    """Find the row, whether or not it can be used. Files are read up to it.

    row: N for the N-th row of `train_file`; or `file:line` or `file:row N` as errors name it, with or without the
        folders, of any file of the configuration.

    Raises UserError if there is no such row, or from `open_rows`.
    """
    if not data.settings.train_file:
        raise UserError("data.train_file is missing: name the file that the row is in")
    by_number, number = isinstance(row, int) or row.isdigit(), 0
    for split in SPLITS[:1] if by_number else SPLITS:
        files = value_of(data.settings, f"{split}_file")
        sources = as_sources(files, data.settings.columns) if files else ()
        rows = ((source, content) for source in sources for content in open_rows(source))
        for number, (source, content) in enumerate(rows, start=1):
            named = content.where == row or content.where.endswith(f"{os.sep}{row}")
            if number == int(row) if by_number else named:
                return FoundRow(split, number, source, content)
    if by_number:
        raise UserError(f"row: data.train_file has the rows 1 to {number}, got {row}")
    raise UserError(f"row: no row {row!r} in the files of the configuration; expected a number or file:line")


def sample_locations(data: StepData, where: str) -> list[tuple[MicroBatch, int]]:
    """Find the samples of a row in the first epoch, each by micro-batch and index; none if it is not trained.

    data: after `setup("inspect")`. where: `file:line` of the row.
    """
    conversations = data.conversations["train"]
    conversation = next((i for i in range(len(conversations)) if conversations[i][0].where == where), None)
    step = next((number for number, members in enumerate(data.train_steps()) if conversation in members), None)
    if step is None:
        return []
    return [
        (part, sequence)
        for part in micro_batches(data, step)
        for sequence, sample in enumerate(part.samples)
        if sample.where == where
    ]


def shared_rows(part: MicroBatch, sequence: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield first and last of neighbouring rows of a sample, and the sequences that share them, by `file:line`."""
    for run in run_tree(part.paths)[0]:
        if sequence in run.sequences:
            others = [part.samples[other].where for other in run.sequences if other != sequence]
            yield run.start, run.end - 1, others
