"""What frameworks read as the size of a batch: that of an ordinary one."""

from accelerate.utils import find_batch_size as of_accelerate
from lightning.pytorch.utilities.data import extract_batch_size
from transformers.trainer_pt_utils import find_batch_size

from radixtrain import RadixCollator


def test_frameworks_find_the_number_of_sequences() -> None:
    """Lightning weights its epoch means by it."""
    batch = RadixCollator()([{"input_ids": [7, 8, n, n], "labels": [-100, -100, n, n]} for n in range(5)])
    assert [read(batch) for read in (extract_batch_size, find_batch_size, of_accelerate)] == [5, 5, 5]
    assert batch["input_ids"].numel() == 5 * 4
