"""Files of tensors are what the library writes and reads, and each tensor is aligned."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from radixtrain.checkpoints.tensors import digest_of_file, gathered, read_tensors, write_file, write_tensors

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64, torch.float8_e4m3fn),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
KINDS = {
    **{str(dtype): torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype) for dtype in DTYPES},
    "one number": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every second": torch.arange(10)[1::2],
    "expanded": torch.ones(1, dtype=torch.float64).expand(3, 2),
    "trained": torch.ones(2, requires_grad=True),
    'quotes " and \n': torch.ones(1),
    "ünïcödé 🙂": torch.ones(1),
}


@pytest.mark.parametrize("tensors", [KINDS, {}])
def test_every_kind_comes_back(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    assert write_tensors(path, tensors, gathered(tensors)) == digest_of_file(path).xxh3_128
    for read in (read_tensors(path), read_tensors(path, in_memory=False), load_file(path)):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            assert torch.equal(read[name].double(), tensor.double())
    with safe_open(path, "pt") as file:
        assert all(file.get_tensor(name).data_ptr() % tensors[name].element_size() == 0 for name in tensors)
    with pytest.raises(FileExistsError):
        write_tensors(path, tensors, gathered(tensors))


def test_a_digest_is_what_xxh128sum_prints(tmp_path):
    """Of an empty file; the program itself is seldom installed."""
    assert write_file(tmp_path / "x", []) == "99aa06d3014798d86001c324468d497f"


def test_they_are_what_the_library_writes(tmp_path):
    """But for the order, and its metadata."""
    plain = {name: torch.arange(4.0) for name in ("b", "a")}
    write_tensors(tmp_path / "ours", plain, gathered(plain))
    save_file(plain, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
