"""The commands of `python -m radixtrain`: each is a row of this table, run by a module of this folder.

`radixtrain/__main__.py` makes the usage, the dispatch and the error for an unknown command from it. A module's
`run(settings, words)` gets the settings and the command line that they were read from, that of `run` its arguments. The
table imports none of these modules, so `--help` is instant.
"""

from typing import NamedTuple

from radixtrain.versions import FIT


class Command(NamedTuple):
    """A command.

    name: as typed. module: the file in this folder that runs it. example: shown in the usage. needs: packages of
    `versions.FIT`, without which it cannot start.
    """

    name: str
    module: str
    help: str
    example: str = ""
    needs: tuple[str, ...] = tuple(FIT)


FOR_ROWS = ("datasets", "pydantic", "rich")
TABLE = (
    Command("fit", "fit", "fine-tune", example="fit --config configs/sft.yaml"),
    Command("validate", "fit", "loss on data.validation_file, and a metric of the answers to it"),
    Command("test", "fit", "loss on data.test_file"),
    Command(
        "predict",
        "fit",
        "log-probabilities of the answers in data.predict_file, or new answers to its rows",
    ),
    Command("report", "explain", "what the data share, and the gain predicted for this machine", "", FOR_ROWS),
    Command("verify", "fit", "is the gradient that of ordinary Hugging Face, on this model and data?"),
    Command("inspect", "explain", "a micro-batch, or one row of a file, as text with its loss marked", "", FOR_ROWS),
    Command("export", "export", "a checkpoint as a Hugging Face folder"),
    Command(
        "run",
        "run",
        "any training program, with its models sharing prefixes",
        example="run -- trl sft --config sft.yaml",
    ),
    Command("doctor", "doctor", "can training run here? versions, devices, kernels, and what is missing", needs=()),
)
COMMANDS = {command.name: command for command in TABLE}
EVALUATING = ("validate", "test", "predict")  # they may read settings of the run that trained the model
