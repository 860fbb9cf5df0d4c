"""What is refused before a row is read, and what a command writes: never over a file of the user, and as typed."""

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import read_run
from radixtrain.commands import preflight
from radixtrain.commands.preflight import check_room, defaults_of_model, num_stored_parameters
from radixtrain.errors import UserError
from tests.support.runs import rows_in, write_rows

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
    rows = [{"messages": row["messages"][1:]} for row in rows_in(shop / "train.jsonl")]
    model = tmp_path / "model"
    shutil.copytree(shop / "model", model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{%- if note is defined %}{%- endif %}" + template)
    given = {"system_prompt": PROMPTS, "chat_template_kwargs": {"note": "password: x y"}}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"data": given}))
    paths = {"data__train_file": write_rows(tmp_path / "rows.jsonl", rows), "model__model_name_or_path": model}
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


LENGTH = b"\x02\0\0\0\0\0\0\0"  # of the header
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    return tmp_path


def sharded(folder, *names):
    weight_map = {f"w{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class TestWeights:
    def test_they_are_counted_by_their_headers(self, folder):
        assert num_stored_parameters(str(folder)) == 22
        save_file({"c": torch.zeros(2, 2)}, folder / "one.safetensors")
        (folder / "model.safetensors").rename(folder / "two.safetensors")
        assert num_stored_parameters(str(sharded(folder, "one.safetensors", "two.safetensors"))) == 26

    def test_a_missing_shard(self, tmp_path):
        save_file({"c": torch.zeros(2, 2)}, tmp_path / "one.safetensors")
        sharded(tmp_path, "one.safetensors", "two.safetensors", "three.safetensors")
        with pytest.raises(
            UserError, match=r"2 of 3 files of the weights are missing, three\.safetensors is the first"
        ):
            num_stored_parameters(str(tmp_path))

    def test_a_file_that_is_damaged(self, folder):
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        for content in (*(whole[:-cut] for cut in (1, 60, 200)), b"", b"abc", b"\xff" * 100, LENGTH + b"[]"):
            path.write_bytes(content)
            with pytest.raises(UserError, match=f"^{path}: the weights cannot be read, the file is incomplete or dam"):
                num_stored_parameters(str(folder))

    def test_another_format(self, tmp_path):
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(UserError, match=r"no weights .*; pytorch_model\.bin is of another format: convert it"):
            num_stored_parameters(str(tmp_path))

    def test_a_folder_with_only_an_adapter(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        assert num_stored_parameters(str(tmp_path)) is None

    def test_a_name_that_was_never_downloaded(self, monkeypatch):
        monkeypatch.setattr(preflight.constants, "HF_HUB_OFFLINE", True)
        for name in ("nobody/nothing", "nothing"):
            with pytest.raises(UserError, match="no downloaded weights of that name, and HF_HUB_OFFLINE forbids"):
                num_stored_parameters(name)
        monkeypatch.setattr(preflight.constants, "HF_HUB_OFFLINE", False)
        assert num_stored_parameters("nobody/nothing") is None


class TestRoom:
    FULL = SimpleNamespace(dtype="float32", use_peft=False, optimizer="adamw")
    MUON = SimpleNamespace(dtype="float32", use_peft=False, optimizer="muon")
    IN_8_BITS = SimpleNamespace(dtype="bfloat16", use_peft=False, optimizer="adamw_8bit")
    LORA = SimpleNamespace(dtype="bfloat16", use_peft=True, optimizer="adamw")

    @pytest.mark.parametrize(
        ("settings", "copies", "needed"),
        [
            *((FULL, 3, 4000 * 10), (FULL, 0, 4000), (LORA, 3, 2000)),
            *((MUON, 3, 4000 * 7), (IN_8_BITS, 3, 2000 * 7)),
        ],
    )
    def test_what_a_run_writes(self, tmp_path, settings, copies, needed):
        assert check_room(tmp_path / "a" / "b", 1000, settings, copies) == needed
        assert not (tmp_path / "a").exists()

    def test_a_full_disk(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 << 30, 1 << 30, 1 << 30))
        said = r"at least 2\.61 GiB, a model and 2 checkpoints of about 1\.12 GiB, and 1 GiB are free"
        with pytest.raises(UserError, match=said):
            check_room(tmp_path, 10**8, self.FULL, 2)
        check_room(tmp_path, None, self.FULL, 2)


def test_weights_that_this_user_may_not_read(tmp_path, monkeypatch):
    """The reason is named: safetensors says that there is no such file."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        UserError, match=r"model\.safetensors: the weights cannot be read: Permission denied; let this user"
    ):
        num_stored_parameters(str(tmp_path))
