"""Numbers and sentences of a report, the same on the page and in the terminal."""

from __future__ import annotations

from radixtrain.report.contents import Break, DataReport, Setting, Splitting

MINUTE, HOUR = 60, 3600


def ratio(value: float) -> str:
    """Three digits, without an exponent: `1.84`, `21`, `19.9`, `1,250`."""
    digits = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return digits if "." not in digits else digits.rstrip("0").rstrip(".")


def rounded(value: float) -> str:
    """Three significant digits of a count that is an estimate: `349,000`; an integer below 1,000 as it is."""
    return f"{round(float(f'{value:.3g}')):,}"


def duration(seconds: float) -> str:
    """`< 1 s`, `1.4 s`, `45 s`, `12 min 5 s`, `3 h 20 min`, `30 h`."""
    if seconds < 1:
        return "< 1 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < HOUR - 0.5:
        large, small, names = *divmod(round(seconds), MINUTE), ("min", "s")
    else:
        large, small, names = *divmod(round(seconds / MINUTE), 60), ("h", "min")
    parts = [f"{number:,} {name}" for number, name in zip((large, small), names, strict=True) if number]
    return " ".join(parts)


def setting_name(setting: Setting) -> str:
    """`batch_size 64, max_tokens 8,192`, and `group_by_prefix`, `activation_checkpointing 0.5` if they are on."""
    grouped = ", group_by_prefix" if setting.group_by_prefix else ""
    share = f", activation_checkpointing {setting.activation_checkpointing:g}"
    recomputed = share if setting.activation_checkpointing else ""
    return f"batch_size {setting.batch_size:,}, max_tokens {setting.max_tokens:,}{grouped}{recomputed}"


def headline(report: DataReport) -> str:
    """The data in one sentence: what an epoch holds, and what the user's own settings leave to compute."""
    num_tokens, own = report.num_epoch_tokens or report.num_tokens, report.current
    tokens = f"{num_tokens:,} tokens{' in an epoch' if report.num_epoch_tokens else ''}"
    if own.r < 1.005:
        return f"{tokens}, none of them shared within a micro-batch: r = 1"
    computed = rounded(num_tokens / own.r)
    if own.whole_r is None:
        return f"{tokens}, of which about {computed} are computed: r = {ratio(own.r)}"
    whole = round(num_tokens * report.splitting.whole_share)
    return (
        f"{whole:,} tokens as whole chats, {tokens} as the {report.splitting.turns:,} turns of which about {computed} "
        f"are computed: {both_r(own)}"
    )


def speedup(setting: Setting) -> str:
    """What a step is predicted to be, in few words: `5.2x as fast`; without a prediction, r."""
    fold = setting.least_speedup
    return f"r = {ratio(setting.least_r)}" if fold is None else f"{ratio(fold)}x as fast"


def both_r(setting: Setting) -> str:
    """r, against both baselines if chats are split."""
    if setting.whole_r is None:
        return f"r = {ratio(setting.r)}"
    of_chats = f"{ratio(setting.whole_r)} against whole chats, as TRL trains them"
    return f"r = {of_chats}, {ratio(setting.r)} against the same rows"


def split_turns(split: Splitting) -> str:
    """What splitting chats into turns buys, as a sentence; empty if none is split."""
    if not split.turns:
        return ""
    differ = f"{split.changed:,} of {split.turns:,} turns have" if split.changed else "No turn has"
    return (
        f"Chats are split, so each turn is what the model sees at inference. {differ} other tokens in the whole chat."
    )


def prediction(setting: Setting) -> str:
    """What a training step with the setting is predicted to bring, as a sentence."""
    if setting.speedup is None:
        return "The speed-up on this machine was not predicted."
    of_rows = f"{ratio(setting.speedup)}x the speed of an ordinary padded one"
    if setting.whole_speedup is None:
        return f"A training step is predicted to run at {of_rows} on this machine."
    of_chats = f"{ratio(setting.whole_speedup)}x the speed of one on whole chats"
    return f"A training step is predicted to run at {of_chats} on this machine, and {of_rows} of the same rows."


def with_others(each: Break) -> str:
    """What the fix adds to those of the other breaks, if that is not about what it saves by itself."""
    if 0.8 * each.tokens_with_others <= each.tokens_saved <= 1.25 * each.tokens_with_others:
        return ""
    return f"; {rounded(each.tokens_with_others)} once the others here are fixed"
