"""A report in the terminal: the numbers of the page, the top of the tree, and the command to paste."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixtrain.data.tokens.decode import shortened
from radixtrain.errors import bytes_text
from radixtrain.report.contents import (
    Break,
    DataReport,
    Setting,
    TreeNode,
    duration,
    headline,
    prediction,
    ratio,
    rounded,
    split_turns,
    with_others,
)
from radixtrain.screen import screen

MAX_RUNS = 14  # of the tree
WORTH_A_LINE = 0.01  # share of the tokens that the largest run saves
MAX_TEXT = 60  # characters of a run
NOTHING = "-"
NUMBERS = ("best r", "speed-\nup", "epoch", "peak\nmemory")


def print_report(report: DataReport, console: Console | None = None) -> None:
    """Print the report. Texts of the data are never shown as markup or control codes."""
    console = console or screen(highlight=False)
    console.print(Text(f"{report.title}, for {report.model}", style="bold"))
    _paragraph(console, f"{headline(report)}.")
    _paragraph(console, " ".join(filter(None, (prediction(report.current), split_turns(report.splitting)))))
    console.print()
    console.print(_data_table(report))
    console.print(_settings_table(report))
    console.print(_tree(report.tree, report.num_samples))
    _breaks(console, report.breaks)
    _list(console, "What else would help", report.hints)
    _list(console, "Notes", report.notes)
    changes = report.best is not None and report.best != report.current
    console.print(Text("The best setting, as a command:" if changes else "To train:"))
    console.print(Text(f"  {report.command}", style="bold"), soft_wrap=True)


def _data_table(report: DataReport) -> Table:
    quantiles = ", ".join(f"{name} {tokens:,}" for name, tokens in report.length_quantiles.items())
    long = f"{report.num_over_length:,} over max_length {report.max_length:,}" if report.max_length else "no max_length"
    lines = {
        "rows": f"{report.num_rows:,}, {report.num_samples:,} samples",
        "tokens": f"{report.num_tokens:,}, of which {report.num_labels:,} bear loss",
        "shared prompts": f"{report.num_prompts:,}" if report.num_prompts else "none",
        "distinct tokens": f"{report.num_unique_tokens:,}, if all rows were one batch",
        "lengths": f"{quantiles}; {long}, the longest {report.longest:,}",
    }
    if len(report.sources) > 1:
        lines["sources"] = ", ".join(f"{name}: {count:,}" for name, count in report.sources.items())
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in lines.items():
        table.add_row(Text(name, style="dim"), Text(text))
    return table


def _settings_table(report: DataReport) -> Table:
    """Make a table of all settings; the user's own and the best one are named."""
    table = _table("Settings of data, and what a step and an epoch would be")
    rs = ["r"] if report.current.whole_r is None else ["r", "r,\nrows"]
    for name in ("batch_\nsize", "max_\ntokens", "group", *rs, *NUMBERS):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for setting in report.settings:
        table.add_row(
            *map(Text, _cells(setting)),
            Text(_names(setting, report)),
            style="bold" if setting in (report.current, report.best) else "",
        )
    return table


def _cells(setting: Setting) -> list[str]:
    return [
        f"{setting.batch_size:,}",
        f"{setting.max_tokens:,}",
        "yes" if setting.group_by_prefix else "",
        *([] if setting.whole_r is None else [ratio(setting.whole_r)]),
        ratio(setting.r),
        ratio(setting.best_r),
        NOTHING if setting.least_speedup is None else f"{ratio(setting.least_speedup)}x",
        NOTHING if setting.seconds_per_epoch is None else duration(setting.seconds_per_epoch),
        NOTHING if setting.memory_bytes is None else bytes_text(setting.memory_bytes),
    ]


def _names(setting: Setting, report: DataReport) -> str:
    names = {"yours": report.current, "best": report.best}
    return ", ".join(name for name, each in names.items() if each == setting)


def _table(title: str) -> Table:
    return Table(title=f"\n{title}", title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0))


def _tree(root: TreeNode, num_samples: int) -> Tree:
    """Draw the runs that save most, level by level: at most `MAX_RUNS`, each saving `WORTH_A_LINE` or more."""
    of = "" if root.num_sequences >= num_samples else f" of {root.num_sequences:,} of the {num_samples:,} samples"
    top = Tree(Text(f"\nThe prefix tree{of}"))
    waiting, num_shown = deque([(root, top)]), 0
    least = WORTH_A_LINE * max((_saved(child) for child in root.children), default=0)
    while waiting:
        node, branch = waiting.popleft()
        worth = sorted((child for child in node.children if _saved(child) > least), key=_saved, reverse=True)
        shown = worth[: MAX_RUNS - num_shown]
        num_shown += len(shown)
        for child in shown:
            waiting.append((child, branch.add(_run(child))))
        hidden = node.num_hidden_children + len(node.children) - len(shown)
        if hidden:
            branch.add(Text(_count_of_branches(hidden, bool(shown)), style="dim"))
    return top


def _count_of_branches(number: int, are_others_shown: bool) -> str:
    return f"{number:,}{' more' if are_others_shown else ''} branch{'es' if number > 1 else ''}"


def _saved(node: TreeNode) -> int:
    """Count the tokens that sharing saves in a run and in the runs below it."""
    saved, waiting = 0, [node]
    while waiting:
        each = waiting.pop()
        saved += each.num_tokens * (each.num_sequences - 1)
        waiting += each.children
    return saved


def _run(node: TreeNode) -> Text:
    text = " ".join(node.text.split())
    title = f"{node.num_sequences:,} x {node.num_tokens:,} tokens  "
    return Text.assemble((title, "cyan"), shortened(text, MAX_TEXT))


def _breaks(console: Console, breaks: Sequence[Break]) -> None:
    console.print(Text("\nWhat breaks sharing" if breaks else "\nNothing was found that breaks sharing."))
    for cause in breaks:
        _paragraph(console, f"  {cause.cause}: {_saves(cause)}. {cause.advice}")
        for example in cause.examples[:1]:
            text = f"    {example.where}: ...{example.before}[{example.value}]{example.after}..."
            console.print(Text(" ".join(text.split()), style="dim"), soft_wrap=False)


def _saves(cause: Break) -> str:
    return f"fixing only this saves {rounded(cause.tokens_saved)} computed tokens of an epoch{with_others(cause)}"


def _list(console: Console, title: str, sentences: Iterable[str]) -> None:
    lines = list(sentences)
    if lines:
        console.print(Text(f"\n{title}"))
        for line in lines:
            _paragraph(console, f"- {line}")
    console.print()


def _paragraph(console: Console, text: str) -> None:
    console.print(Text(text))
