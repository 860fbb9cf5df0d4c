"""Loss weights from a file to the optimizer step."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError
from tests.support.runs import write_rows

N = -100
ROWS = [
    {"input_ids": [7, 8, 9], "labels": [N, 8, 9], "loss_weights": [0, 3, -0.5]},
    {"input_ids": [7, 8, 5], "mask": [0, 1, 1], "weights": [0, 1, 2]},
    {"input_ids": [4, 6], "mask": [0, 1]},
    {"input_ids": [4, 6, 7], "mask": [0, 1, 1]},
]


@pytest.fixture
def data(shop: Path, tmp_path: Path) -> Any:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)

    def build(**options: Any) -> SFTData:
        files = {"train_file": str(path), "predict_file": str(path), "model_name_or_path": str(shop / "model")}
        return SFTData(**files, shuffle_dataset=False, dataloader_num_workers=0, **options)

    return build


def step_of(data: SFTData, stage: str = "fit") -> Any:
    data.setup(stage)
    [step] = data.train_dataloader() if stage == "fit" else data.predict_dataloader()
    return step


def targets(step: Any) -> list[tuple[int, float]]:
    [batch] = step.micro_batches
    return sorted(zip(batch["shift_labels"][0].tolist(), batch["radix"].loss_weights.tolist(), strict=True))


@pytest.mark.parametrize("dedup", [True, False])
def test_every_label_has_its_weight(data: Any, dedup: bool) -> None:
    """And `predict` lists every label, whatever its weight."""
    step = step_of(data(dedup=dedup))
    assert targets(step) == [(5, 2.0), (6, 1.0), (6, 1.0), (7, 1.0), (8, 1.0), (8, 3.0), (9, -0.5)]
    assert step.num_labels == 7
    [batch] = step_of(data(dedup=dedup), "predict").micro_batches
    assert sorted(label for label in batch["shift_labels"].flatten().tolist() if label != N) == [5, 6, 6, 7, 8, 8, 9]
    assert batch["radix"].loss_weights[0] == 1.0


def test_weights_stay_with_their_tokens(data: Any) -> None:
    """In a truncated row, and in what `verify` compares with Hugging Face."""
    step = step_of(data(max_length=2, excess_length_strategy="truncate"))
    assert targets(step) == [(6, 1.0), (6, 1.0), (8, 1.0), (8, 3.0)]
    module = data()
    module.setup("fit")
    found = [feature.get("loss_weights") for feature in module.features_of_step(0)]
    assert [None if weights is None else weights.tolist() for weights in found] == [[0, 3, -0.5], [0, 1, 2], None, None]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_a_precision_that_would_round_them(data: Any, precision: Any) -> None:
    module = data()
    module.trainer = L.Trainer(precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False)
    module.setup("fit")
    if precision == "bf16-true":
        with pytest.raises(UserError, match=r"rows\.jsonl:1: trainer\.precision bf16-true would round"):
            module.train_dataloader()
    else:
        [step] = module.train_dataloader()
        converted = module.trainer.precision_plugin.convert_input(step)
        assert targets(converted) == targets(step)
    module.setup("predict")
    assert len(module.predict_dataloader()) == 1
