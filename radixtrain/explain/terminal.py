"""A report in the terminal: what is saved, the rows, the top of the tree, what breaks sharing, and what would help."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixtrain.data.tokens.decode import shortened
from radixtrain.explain.contents import DataReport
from radixtrain.screen import screen

TREE_LINES, BREAKS = 4, 2
MAX_TEXT = 60  # characters of a run


def print_report(report: DataReport, console: Console | None = None) -> None:
    """Print the report. Texts of the data are never shown as markup or control codes."""
    console = console or screen(highlight=False)
    console.print(Text(f"{report.title}, for {report.model}", style="bold"), overflow="ellipsis", no_wrap=True)
    for sentence in report.summary:
        console.print(Text(sentence))
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, text in report.facts.items():
        facts.add_row(Text(name, style="dim"), Text(text))
    console.print("", facts)
    console.print(Text(f"\nThe prefix tree{report.tree_sample}"))
    for line in report.tree.lines(TREE_LINES):
        title = f"{'  ' * line.depth}{line.num_sequences:,} x {line.num_tokens:,} tokens"
        branches = f"  then {line.num_hidden:,} branches" if line.num_hidden > 1 else ""
        text = shortened(" ".join(line.text.split()), MAX_TEXT)
        _line(console, Text.assemble((f"{title}  ", "cyan"), text, (branches, "dim")))
    console.print(Text("\nWhat breaks sharing" if report.breaks else "\nNothing was found that breaks sharing."))
    for cause in report.breaks[:BREAKS]:
        _line(console, Text(f"  {cause.cause}, in {cause.num_sequences:,} samples"))
        for each in cause.examples[:1]:
            shown = f"{each.where}: ...{each.before[-24:]}[{shortened(each.value, MAX_TEXT)}]{each.after}"
            _line(console, Text(f"    {' '.join(shown.split())}", style="dim"))
    _list(console, "What would help", report.hints)
    _list(console, "Notes", report.notes)
    console.print(Text("\nTo train:"))
    console.print(Text(f"  {report.command}", style="bold"), soft_wrap=True)


def _line(console: Console, text: Text) -> None:
    console.print(text, overflow="ellipsis", no_wrap=True)


def _list(console: Console, title: str, sentences: tuple[str, ...]) -> None:
    if sentences:
        console.print(Text("\n".join([f"\n{title}", *(f"- {sentence}" for sentence in sentences)])))
