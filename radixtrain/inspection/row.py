"""One row of a file through every stage: what was read, rendered, tokenised, masked, and where it is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.datamodule import SFTData
from radixtrain.data.formats import Row, UnreadRow
from radixtrain.data.rows.columns import standard_row
from radixtrain.data.rows.trajectories import plain_rows
from radixtrain.data.sample import Sample
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError, UserError
from radixtrain.inspection.cells import token_cells
from radixtrain.inspection.found import FoundRow, find_row
from radixtrain.inspection.marks import marked, visible
from radixtrain.inspection.picture import named_rows
from radixtrain.inspection.place import Place, places_of
from radixtrain.inspection.tokens import sample_tokens

__all__ = ["row_stages"]

MOST_CHARS = 800  # of a field, and of a rendered text
REFUSED = "bold red"


def row_stages(data: SFTData, row: int | str, full: bool = False) -> Iterator[RenderableType]:
    """What happens to a row, a stage after the other, so that a row that is refused is shown as far as it got.

    row: see `find_row`. full: nothing is shortened.

    Raises UserError if there is no such row, if the tokenizer or its template cannot be read, or a file cannot.
    """
    found = find_row(data, row)
    yield _title(f"{found.where}: row {found.number:,} of data.{found.split}_file")
    content = found.content.read() if isinstance(found.content, UnreadRow) else found.content
    if isinstance(content, DataError):
        yield from _unread(found, content, full)
        return
    yield _fields(content, full)
    encoder = data.encoder(found.split == "predict" and data.hparams.predict_unlabelled)
    yield from _taken_as(content, encoder, full)
    items = encoder.drafts(content)
    for number, item in enumerate(items, start=1):
        yield from _rendered(item, _of(number, len(items)), full)
    tokenized = encoder.tokenize([item for item in items if isinstance(item, Draft)])
    for number, item in enumerate(items, start=1):
        if not isinstance(item, DataError):
            sample = item if isinstance(item, Sample) else next(tokenized)
            yield from _tokenised(sample, encoder, _of(number, len(items)), full)
    try:
        kept = encoder.encode(content)
    except DataError as error:
        yield _refused(error)
        return
    yield from _cut(kept, len(items), encoder)
    if kept and found.split == "train":
        yield from _computed(data, found.where)


def _unread(found: FoundRow, error: DataError, full: bool) -> Iterator[RenderableType]:
    if isinstance(found.content, UnreadRow):
        line = found.content.line.decode("utf-8", "backslashreplace")
        yield _indented(_shortened(line, full))
    yield _refused(error)


def _fields(row: Row, full: bool) -> RenderableType:
    """The columns, and for a list of messages its turns."""
    return _named({name: _as_text(value) for name, value in row.fields.items()}, full)


def _taken_as(row: Row, encoder: ChatEncoder, full: bool) -> Iterator[RenderableType]:
    """What the columns mean, and which of them nothing reads. A row that is refused here is refused as a draft too."""
    try:
        sequences = plain_rows(row)
        standard = [standard_row(each, encoder.answered) for each in sequences]
    except DataError:
        return
    for number, each in enumerate(standard, start=1):
        yield _title(f"taken as{_of(number, len(standard))}: {', '.join(each.fields)}")
        if sequences[number - 1].fields | each.fields != row.fields:
            yield _named({name: _as_text(value) for name, value in each.fields.items()}, full)
    unused = sorted({*row.unused, *(name for each in standard for name in each.unused)})
    if unused:
        yield _indented(Text(f"nothing reads: {', '.join(unused)}", style=REFUSED))


def _named(texts: Mapping[str, str], full: bool) -> RenderableType:
    """A line or more for each text, with its name before it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in texts.items():
        table.add_row(name, _shortened(text, full))
    return _indented(table)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
        return "\n".join(_json(turn) for turn in value)
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _rendered(item: Draft | Sample | DataError, which: str, full: bool) -> Iterator[RenderableType]:
    """What the template, or the format, made of the row; nothing for a row of tokens."""
    if not isinstance(item, Draft):
        return
    what = {"plain": "plain text", "chat": "a whole chat", "turn": "a turn of the assistant"}[item.form]
    yield _title(f"rendered{which}: {what}")
    texts = {"prompt": item.prompt, "target": item.target}
    yield _named({name: text for name, text in texts.items() if text}, full)


def _tokenised(sample: Sample, encoder: ChatEncoder, which: str, full: bool) -> Iterator[RenderableType]:
    tokens = sample_tokens(sample, encoder.tokenizer)
    num_labelled = sum(token.bears_loss for token in tokens)
    yield _title(f"tokens{which}: {len(tokens):,}, {num_labelled:,} with loss")
    yield _indented(marked(tokens, None if full else MOST_CHARS))
    yield _indented(token_cells(sample, encoder.tokenizer, full))


def _cut(kept: list[Sample], num_samples: int, encoder: ChatEncoder) -> Iterator[RenderableType]:
    """What `excess_length_strategy` left of the samples."""
    if len(kept) < num_samples:
        yield Text(f"dropped for their length: {num_samples - len(kept)} of {num_samples} samples", style=REFUSED)
    cut = sum(len(sample.input_ids) == encoder.max_length for sample in kept)
    if cut and encoder.excess_length_strategy == "truncate":
        yield Text(f"cut to max_length, {encoder.max_length} tokens: {cut} of {num_samples} samples", style=REFUSED)


def _computed(data: SFTData, where: str) -> Iterator[RenderableType]:
    """Its rows of the first epoch. The other rows of the file are read for this, and may be refused."""
    yield _title("computed, in the first epoch")
    try:
        data.setup("inspect")
        places = places_of(data, where)
    except UserError as error:
        yield Text.assemble(("not known: the steps cannot be made: ", REFUSED), str(error))
        return
    if not places:
        yield _indented(Text("not trained: data.val_size took the row for validation"))
    for place in places:
        part = place.part
        yield _indented(
            f"step {part.step} of {part.num_steps}, micro-batch {part.index} of {part.num_micro_batches}, sequence "
            f"{place.sequence} of {len(part.samples)}, counted from 0"
        )
        yield _indented(_indented(_shared(place)))


def _shared(place: Place) -> Table:
    """A line for each run of rows: how many tokens, and who shares them."""
    table = Table.grid(padding=(0, 2))
    for shared in place.shared:
        first, end = shared.rows
        others = f"shared with {len(shared.others)}: {named_rows(shared.others)}" if shared.others else "its own"
        table.add_row(f"rows {first}-{end - 1}", f"{end - first:,} tokens", others)
    return table


def _refused(error: DataError) -> Text:
    return Text.assemble(("refused: ", REFUSED), str(error))


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _of(number: int, count: int) -> str:
    return f" {number} of {count}" if count > 1 else ""


def _shortened(text: str, full: bool) -> Text:
    """Visible, and shortened in the middle."""
    if full or len(text) <= MOST_CHARS:
        return Text(visible(text).removesuffix("\n"))
    half = MOST_CHARS // 2
    gap = (f" ⋯ {len(text) - 2 * half:,} characters ⋯ ", "dim")
    return Text.assemble(visible(text[:half]), gap, visible(text[-half:]).removesuffix("\n"))
