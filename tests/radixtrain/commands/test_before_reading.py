"""What a command writes: never over a file of the user's, and texts that are read again as they were typed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_run
from radixtrain.commands.preflight import defaults_of_model

Arguments = Callable[..., list[str]]
ONE_STEP = {"trainer__max_steps": 1, "trainer__max_epochs": None}
NOT_OURS = "is there and radixtrain did not write it: move it away"
# Everyday sentences that hold what a search for secrets takes for one.
PROMPTS = """\
Reply with JSON: {"pass": true, "signature": "initials"}
For each word print token: tag
Use the header Authorization: Bearer <token>.
Contact us at https://me:x@example.com
api_key: read it from the environment"""


@pytest.mark.parametrize(("logger", "record"), [("none", "fit.yaml"), ("csv", "*/*/fit.yaml")])
def test_a_configuration_of_the_user_stays_and_the_record_runs_again(
    logger: str, record: str, arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = dict(word.removeprefix("--").split("=", 1) for word in arguments(**ONE_STEP, output_dir=".")[1:])
    text = "# mine\n" + "".join(f"{name}: {value}\n" for name, value in values.items())
    own = Path("config.yaml")
    own.write_text(text)
    assert main(["fit", "--config=config.yaml", f"--trainer.logger={logger}"]) == 0
    assert own.read_text() == text
    (written,) = Path().glob(record)
    assert main(["fit", f"--config={written}", "--output_dir=again"]) == 0


@pytest.mark.parametrize(
    ("command", "name", "flags"),
    [
        ("fit", "loss.png", {}),
        ("fit", "summary.json", {"overwrite": "true"}),
        ("fit", "fit.yaml", {"trainer__logger": "none"}),
        ("fit", "model/config.json", {"overwrite": "true"}),
        ("predict", "predictions.jsonl", {"trainer__max_epochs": None}),
        ("report", "report.html", {"max_seconds": 0, "trainer__max_epochs": None}),
        ("export", "config.json", {}),
    ],
)
def test_no_command_replaces_a_file_of_the_user(
    command: str, name: str, flags: dict[str, Any], arguments: Arguments, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(shop / "model", mine / "model")  # as it was downloaded
    if command == "export":
        assert main(arguments(**ONE_STEP)) == 0
        line, mine = ["export", f"--ckpt_path={tmp_path / 'out'}", f"--output_dir={mine / 'model'}"], mine / "model"
    else:
        of_file = {"data__train_file": None, "data__predict_file": shop / "train.jsonl"} if command == "predict" else {}
        line = arguments(command, output_dir=mine, **of_file, **flags)
    if not (mine / name).exists():
        shutil.rmtree(mine / "model", ignore_errors=True)
        (mine / name).write_text("mine")
    before = (mine / name).read_bytes()
    assert main(line) == 1
    said = NOT_OURS if name not in ("model/config.json", "config.json") else "holds files that are not a model"
    assert said in capsys.readouterr().err
    assert (mine / name).read_bytes() == before


def test_what_is_read_again_is_as_it_was_typed(arguments: Arguments, shop: Path, tmp_path: Path) -> None:
    """The system prompt in every record of a run, and what `predict` makes of it."""
    rows = [json.loads(line)["messages"][1:] for line in (shop / "train.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows))
    model = tmp_path / "model"
    shutil.copytree(shop / "model", model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{%- if note is defined %}{%- endif %}" + template)
    given = {"system_prompt": PROMPTS, "chat_template_kwargs": {"note": "password: x y"}}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"data": given}))
    paths = {"data__train_file": tmp_path / "rows.jsonl", "model__model_name_or_path": model}
    line = arguments(**paths, **ONE_STEP)
    assert main([*line, f"--config={tmp_path / 'given.yaml'}"]) == 0
    out = tmp_path / "out"
    assert main(["export", f"--ckpt_path={out}", f"--output_dir={tmp_path / 'exported'}"]) == 0
    (record,) = out.rglob("fit.yaml")
    settings = [yaml.safe_load(path.read_text())["data"] for path in (record, *tmp_path.rglob("radixtrain.yaml"))]
    for found in (*settings, read_run(out / "checkpoints" / "last")["data"]):
        assert given.items() <= found.items()
    assert len(settings) == 3
    assert defaults_of_model(str(out / "model"))["data.system_prompt"] == PROMPTS
