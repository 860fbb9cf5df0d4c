"""`radixtrain inspect --row`: one row of a file, from its columns to its tokens and its place in a micro-batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.files.sources import Source, UnreadRow, as_sources, open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.data.step_data import StepData
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError, UserError
from radixtrain.explain.micro_batch import micro_batches
from radixtrain.explain.tokens import marked, sample_tokens, shortened, visible

MOST_CHARS = 800  # to show of a field, or of a rendered text
STYLE_OF_ERROR = "bold red"
FORMS = {"plain": "plain text", "chat": "a whole chat", "turn": "a turn of the assistant"}
SPLITS = ("train", "validation", "test", "predict")


def show_row(data: StepData, row: int | str, full: bool = False) -> Iterator[RenderableType]:
    """Yield what happens to a row, stage after stage, so that a refused row is shown as far as it got.

    row: see `find_row`. full: shorten nothing.

    Raises UserError if there is no such row, or if the tokenizer, its template or a file cannot be read.
    """
    found = find_row(data, row)
    yield _title(f"{found.content.where}: row {found.number:,} of data.{found.split}_file")
    try:
        content = found.content.read()
        yield _show_columns(content.fields, full)
    except DataError as error:
        if isinstance(found.content.content, bytes):
            yield _indented(_shortened(found.content.content.decode("utf-8", "backslashreplace"), full))
        yield _refused(error)
        return
    encoder = data.encoder(found.split == "predict" and data.settings.predict_prompts)
    with suppress(DataError):  # of a bad row, whose draft shows it
        fields = encoder.standard(content).fields
        yield _title(f"taken as: {', '.join(fields)}")
        if content.fields | fields != content.fields:
            yield _show_columns(fields, full)
    items = encoder.drafts(content, report := EncodeReport())
    if report.unused_columns:
        yield _indented(Text(f"not read: {', '.join(sorted(report.unused_columns))}", style=STYLE_OF_ERROR))
    tokenized = encoder.tokenize([item for item in items if isinstance(item, Draft)])
    for number, item in enumerate(items, start=1):
        if not isinstance(item, DataError):
            sample = item if isinstance(item, TokenRow) else next(tokenized)
            form = FORMS[item.form] if isinstance(item, Draft) else "token ids"
            tokens = sample_tokens(sample, encoder.tokenizer)
            num_labelled = sum(token.bears_loss for token in tokens)
            num_others = int(((sample.labels != IGNORE_INDEX) & (sample.labels != sample.input_ids)).sum())
            others = f", {num_others:,} of which learn another token than their own" if num_others else ""
            yield _title(f"{form}{_of(number, len(items))}: {len(tokens):,} tokens, {num_labelled:,} with loss{others}")
            yield _indented(marked(tokens, None if full else MOST_CHARS))
    try:
        (kept,) = encoder.encode_all([content], report=report)
    except DataError as error:
        yield _refused(error)
        return
    if report.num_long_samples:
        what = f"{report.num_long_samples} of {len(items)} samples over max_length {encoder.max_length}"
        yield Text(f"{what}, with excess_length_strategy: {encoder.excess_length_strategy}", style=STYLE_OF_ERROR)
    if kept and found.split == "train":
        yield from _show_place(data, found.content.where)


def _show_columns(fields: Mapping[str, object], full: bool) -> RenderableType:
    """Show the value of each column after its name, and for a list of messages its turns."""
    written = partial(json.dumps, ensure_ascii=False, default=str)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
            text = "\n".join(map(written, value))
        else:
            text = value if isinstance(value, str) else written(value)
        table.add_row(name, _shortened(text, full))
    return _indented(table)


def _show_place(data: StepData, where: str) -> Iterator[RenderableType]:
    """Name its places in the first epoch. The other rows of the file are read for this, and may be refused."""
    yield _title("computed, in the first epoch")
    try:
        data.setup("inspect")
        conversations = data.conversations["train"]
        named = ((step, conversations[index][0].where) for step, own in enumerate(data.train_steps()) for index in own)
        step = next((step for step, other in named if other == where), None)
        parts = [] if step is None else micro_batches(data, step)
    except UserError as error:
        yield Text.assemble(("unknown, since the steps cannot be made: ", STYLE_OF_ERROR), str(error))
        return
    places = [
        f"{part.place}, sequence {sequence} of {len(part.samples)}, counted from 0"
        for part in parts
        for sequence, sample in enumerate(part.samples)
        if sample.where == where
    ]
    yield _indented(Text("\n".join(places) or "not trained: data.val_size took the row for validation"))


def _refused(error: DataError) -> Text:
    return Text.assemble(("refused: ", STYLE_OF_ERROR), str(error))


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
        files = getattr(data.settings, f"{split}_file")
        sources = as_sources(files, data.settings.columns) if files else ()
        rows = ((source, content) for source in sources for content in open_rows(source))
        for number, (source, content) in enumerate(rows, start=1):
            named = content.where == row or content.where.endswith(f"{os.sep}{row}")
            if number == int(row) if by_number else named:
                return FoundRow(split, number, source, content)
    if by_number:
        raise UserError(f"row: data.train_file has the rows 1 to {number}, got {row}")
    raise UserError(f"row: no row {row!r} in the files of the configuration; expected a number or file:line")
