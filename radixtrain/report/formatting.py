"""Numbers and sentences of a report, the same on the page and in the terminal."""

from __future__ import annotations

from radixtrain.report.contents import DataReport, Setting

__all__ = ["bytes_text", "duration", "headline", "prediction", "ratio", "rounded", "setting_name"]

MINUTE, HOUR = 60, 3600


def ratio(value: float) -> str:
    """Three digits, without an exponent: `1.84`, `21`, `19.9`, `1,250`."""
    digits = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return digits if "." not in digits else digits.rstrip("0").rstrip(".")


def rounded(value: float) -> str:
    """Three significant digits of a count that is an estimate: `349,000`; an integer below 1,000 as it is."""
    return f"{round(float(f'{value:.3g}')):,}"


def duration(seconds: float) -> str:
    """`< 0.01 ms`, `0.88 ms`, `0.4 s`, `45 s`, `12 min 5 s`, `3 h 20 min`, `30 h`."""
    if seconds < 1e-5:
        return "< 0.01 ms" if seconds > 0 else "0 s"
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < HOUR - 0.5:
        large, small, names = *divmod(round(seconds), MINUTE), ("min", "s")
    else:
        large, small, names = *divmod(round(seconds / MINUTE), 60), ("h", "min")
    parts = [f"{number:,} {name}" for number, name in zip((large, small), names, strict=True) if number]
    return " ".join(parts)


def bytes_text(number: float) -> str:
    """`512 MiB` below one GiB, else `1.23 GiB`."""
    return f"{number / 2**20:,.0f} MiB" if number < 2**30 else f"{ratio(number / 2**30)} GiB"


def setting_name(setting: Setting) -> str:
    """`batch_size 64, max_tokens 8,192`, with `, group_by_prefix` if it is on."""
    grouped = ", group_by_prefix" if setting.group_by_prefix else ""
    return f"batch_size {setting.batch_size:,}, max_tokens {setting.max_tokens:,}{grouped}"


def headline(report: DataReport) -> str:
    """The data in one sentence: what an epoch holds, and what the user's own settings leave to compute."""
    num_tokens = report.num_epoch_tokens or report.num_tokens
    tokens = f"{num_tokens:,} tokens{' in an epoch' if report.num_epoch_tokens else ''}"
    if report.current.r < 1.005:
        return f"{tokens}, none of them shared within a micro-batch: r = 1"
    computed = rounded(num_tokens / report.current.r)
    return f"{tokens}, of which about {computed} are computed: r = {ratio(report.current.r)}"


def prediction(setting: Setting) -> str:
    """What a training step with the setting is predicted to bring, as a sentence."""
    if setting.speedup is None:
        return "The speed-up on this machine was not predicted."
    times = f"{ratio(setting.speedup)}x"
    return f"A training step is predicted to run at {times} the speed of an ordinary padded one on this machine."
