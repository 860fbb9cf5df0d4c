"""`python -m radixtrain <command>`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from radixtrain.errors import UserError

USAGE = """usage: python -m radixtrain <command> [--config FILE] [--key value ...]

  fit        fine-tune: python -m radixtrain fit --config configs/sft.yaml
  validate   loss on data.validation_file
  test       loss on data.test_file
  predict    log-probability of every labelled token of data.predict_file
  verify     is the gradient that of ordinary Hugging Face, on this model and data?
  export     a checkpoint as a Hugging Face folder
  bench      time and memory of a step on this machine, with and without deduplication

`<command> --help` lists every key; `<command> --config FILE --print_config` shows what would run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. What a user can mend is one line on stderr, not a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    from jsonargparse import ArgumentError  # after --help: Lightning takes seconds to import

    try:
        return _run(arguments)
    except UserError as error:
        return _fail(str(error), 1)
    except ArgumentError as error:
        return _fail(_usage_message(str(error)), 2)
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 1)
    except UnicodeDecodeError as error:
        return _fail(f"a configuration file is not UTF-8: {error}", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except SystemExit as stop:
        return _stopped(stop)


def _run(arguments: list[str]) -> int:
    if arguments[0] == "export":
        from radixtrain.commands.export import run as run_export

        run_export(arguments[1:])
        return 0
    if arguments[0] == "bench":
        from radixtrain.commands.bench import run as run_bench

        run_bench(arguments[1:])
        return 0
    from radixtrain.commands.lightning import COMMANDS, run

    if arguments[0] not in COMMANDS:
        return _fail(f"no command {arguments[0]!r}; commands: {', '.join((*COMMANDS, 'export', 'bench'))}", 2)
    run(arguments)
    return 0


def _stopped(stop: SystemExit) -> int:
    """Lightning turns signals into exits of its own: SIGTERM into one without a code, SIGINT into 1."""
    if type(stop).__name__ == "SIGTERMException":
        return _fail("terminated; resume with --ckpt_path <output_dir>/checkpoints/interrupted.ckpt", 143)
    if isinstance(stop.__context__, KeyboardInterrupt):
        return _fail("interrupted", 130)
    raise stop


def _usage_message(text: str) -> str:
    """jsonargparse's message on one line, and of a refused import only that."""
    refused = re.search(r"Importing '([^']+)' is not allowed", text)
    if refused:
        return (
            f"class_path {refused[1]!r} is not imported: a configuration may name classes of radixtrain, lightning, "
            f"torch and transformers alone. For others call radixtrain from a script of your own"
        )
    return " ".join(text.split())


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
