"""Files of tensors: the library reads them, and writing them copies nothing."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from radixtrain.checkpoints.tensors import CHUNK, DTYPES, digest_of_file, read_tensors, write_tensors

KINDS = {
    **{str(dtype): torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype) for dtype in DTYPES},
    "one number": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every second": torch.arange(10)[1::2],
    "expanded": torch.ones(1, dtype=torch.float64).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
    "trained": torch.ones(2, requires_grad=True),
    'quotes " and \n': torch.ones(1),
    "ünïcödé 🙂": torch.ones(1),
    "": torch.ones(1),
}


def test_every_kind_comes_back(tmp_path):
    path = tmp_path / "x.safetensors"
    assert write_tensors(path, KINDS) == digest_of_file(path)
    for read in (read_tensors(path), load_file(path)):
        assert read.keys() == KINDS.keys()
        for name, tensor in KINDS.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            assert torch.equal(read[name].to(torch.complex64), tensor.to(torch.complex64))


def test_they_are_what_the_library_writes(tmp_path):
    """But for the order, and its metadata."""
    plain = {name: torch.arange(4.0).to(dtype) for name, dtype in (("b", torch.float32), ("a", torch.float32))}
    write_tensors(tmp_path / "ours", plain)
    save_file(plain, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_tensor_is_aligned(tmp_path):
    odd = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(3)}
    write_tensors(tmp_path / "x", odd)
    with safe_open(tmp_path / "x", "pt") as file:
        assert all(file.get_tensor(name).data_ptr() % odd[name].element_size() == 0 for name in odd)


def test_one_that_is_longer_than_a_chunk_and_memory_of_its_own(tmp_path):
    long = torch.arange(CHUNK + 5).to(torch.uint8)
    write_tensors(tmp_path / "x", {"long": long})
    read = read_tensors(tmp_path / "x")["long"]
    assert torch.equal(read, long)
    read.add_(1)
    assert torch.equal(read_tensors(tmp_path / "x")["long"], long)


def test_no_tensors_and_a_file_that_is_there_is_not_written_over(tmp_path):
    write_tensors(tmp_path / "x", {})
    assert read_tensors(tmp_path / "x") == {}
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", KINDS)
