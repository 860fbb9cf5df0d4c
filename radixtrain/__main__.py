"""`python -m radixtrain <command>`. The commands are in the table of `radixtrain/commands/__init__.py`.

Exit codes: 0 done, 1 what the user can fix (data, model, a request that cannot be met), 2 usage (an unknown key, a
wrong type); 143, 129 and 130 ended by SIGTERM, SIGHUP or Ctrl-C, after a checkpoint was written if there was a step.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from radixtrain import __version__
from radixtrain.commands import COMMANDS, EVALUATING
from radixtrain.cores import share_cores
from radixtrain.errors import EndedElsewhere, Stopped, UsageError, UserError, did_you_mean, handling
from radixtrain.training.devices.launcher_env import check_started, default_devices, launcher_env
from radixtrain.versions import FIT, OLDEST, check_versions

HELP = {"--help", "-h", "--help_all"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. What the user can fix is one line on stderr, not a traceback."""
    _open_screen()
    try:
        with handling(_early_handlers() if sys.argv[1:2] == ["fit"] and argv is None else {}):
            return _answer(list(sys.argv[1:] if argv is None else argv))
    except Stopped as stop:
        sys.stderr.write(f"{stop}\n" if str(stop) else "")  # as requested: not an error
        return stop.code
    finally:
        atexit.unregister(_leave)
        atexit.register(_leave)  # what is registered last is called first


def _open_screen() -> None:
    """Replace stdout and stderr if a service closed them, and write `?` for what a Windows console cannot show."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # it flushes, and a reader may be gone
                stream.reconfigure(errors="replace")


def _early_handlers() -> dict[int, Any]:
    """End with a line at SIGTERM and SIGHUP until a run handles them itself; there is nothing to save at SIGUSR1."""

    def stop(number: int, frame: object) -> None:
        line = f"stopped by {signal.Signals(number).name} before the run began; nothing was saved"
        raise Stopped(line if os.environ.get("LOCAL_RANK", "0") == "0" else "", 128 + number)

    def go_on(number: int, frame: object) -> None: ...

    return {signal.SIGTERM: stop, signal.SIGHUP: stop, signal.SIGUSR1: go_on, signal.SIGUSR2: go_on}


def _leave() -> None:
    """End the process at once, without a traceback if Ctrl-C comes too late."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not _counts_leaks(sys.modules.get("triton._C.libtriton")):
        gc.freeze()  # or Python looks for cycles in all libraries: 7 s, not 1, on two busy CPUs


def _counts_leaks(library: object) -> bool:
    """Return whether a library is built with nanobind, as Triton is since 3.9: it prints 30 lines of leaks at exit."""
    return any(type(part).__module__ == "nanobind" for part in vars(library).values()) if library else False


def _answer(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        sys.stdout.write(f"radixtrain {__version__}\n")
        return 0
    if arguments[0] not in COMMANDS:
        return _fail(UsageError(_no_command(arguments[0])))
    if arguments[0] == "run":  # needs nothing but the core, and leaves the rest of the line to the program
        return _run_program(arguments[1:])
    if not HELP & {*arguments}:
        return _run(arguments)
    from radixtrain.commands.help import help_text, topic_of  # here, since a run does not need it

    sys.stdout.write(help_text(arguments[0], topic_of(arguments[1:])))
    return 0


def _run_program(arguments: list[str]) -> int:
    from radixtrain.commands.run import run

    try:
        return run(arguments)
    except SystemExit as done:  # of argparse: --help, or a line that it has explained
        return int(done.code or 0)
    except UserError as error:
        return _fail(error)


def _run(words: list[str]) -> int:
    from radixtrain.screen import guard_logs  # here, since --help needs no imports that take time

    guard_logs()
    share_cores(os.environ)
    command = COMMANDS[words[0]]
    try:
        if words[0] != "doctor":  # which needs none of them, and says what is wrong
            check_versions(OLDEST | {name: FIT[name] for name in command.needs})
        from radixtrain.settings.read import PRINT, print_settings, read  # here, since --help needs no yaml

        settings = read(words[0], words[1:], default_devices() if command.module == "fit" else None)
    except UserError as error:
        return 1 if launcher_env().is_silent else _fail(error)
    if f"--{PRINT}" in words and command.name not in EVALUATING:
        print_settings(settings)
        return 0
    # From a kernel for 4-bit layers on a CPU, at import, and about layers that no plan for several devices names.
    for name in ("bitsandbytes", "transformers.distributed", "transformers.integrations.tensor_parallel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        check_started(words[0])
        import_module(f"radixtrain.commands.{command.module}").run(settings, words)
        return 0
    except UserError as error:
        return _fail(error)
    except EndedElsewhere:
        return 1
    except OSError as error:
        return _fail(UserError(f"{error.strerror or error}: {error.filename}" if error.filename else error))
    except KeyboardInterrupt:
        return 130 if launcher_env().is_silent else _fail(UserError("interrupted"), 130)


def _usage() -> str:
    lines = ["usage: python -m radixtrain <command> [--config FILE] [--key value ...]", ""]
    for command in COMMANDS.values():
        example = f": python -m radixtrain {command.example}" if command.example else ""
        lines.append(f"  {command.name:<10} {command.help}{example}")
    keys = "`<command> --help` lists every key; `<command> --config FILE --print_config` shows what would run."
    return "\n".join([*lines, "", keys, "`--version` prints the version.", ""])


def _no_command(name: str) -> str:
    return f"no command {name!r}{did_you_mean(name, COMMANDS, ';')} commands: {', '.join(COMMANDS)}"


def _fail(error: UserError, code: int | None = None) -> int:
    """Print a command's error. Nothing else prints one."""
    from radixtrain.screen import printable, without_passwords

    line = printable(without_passwords(str(error))).replace("\n", "\\n")
    sys.stderr.write(f"error: {line}\n")
    return code or (2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    sys.exit(main())
