"""What every rank holds a part of is written as the whole, by one rank, with the help of the others."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from radixtrain.checkpoints.folder import Checkpoint, help_to_write, read_checkpoint, write_checkpoint
from radixtrain.checkpoints.tensors import part_like, part_of, whole
from tests.support.processes import on_ranks
from tests.support.runs import a_run

# Rows for every rank, unequal parts, fewer rows than ranks, a single row, none.
SHAPES = {"even": (4, 3), "uneven": (5, 2), "few": (3,), "one": (1, 2), "none": (0, 2)}
WHOLE = {name: torch.arange(torch.Size(shape).numel()).reshape(shape) + 0.5 for name, shape in SHAPES.items()}


def sharded(tensor: torch.Tensor, size: int) -> DTensor:
    """As `fully_shard` leaves it: a part in memory that would hold the largest one."""
    placed = distribute_tensor(tensor, init_device_mesh("cpu", (size,)), [Shard(0)], src_data_rank=None)
    held = placed.to_local()
    rows = -(-tensor.shape[0] // size)
    padded = held.new_zeros(rows, *held.shape[1:])
    padded[: len(held)] = held
    return DTensor.from_local(
        padded[: len(held)], placed.device_mesh, [Shard(0)], run_check=False, shape=placed.shape, stride=placed.stride()
    )


def test_a_checkpoint_of_four_ranks_is_that_of_one(tmp_path: Path) -> None:
    def of(tensors: dict[str, torch.Tensor]) -> Checkpoint:
        """Weights, moments, and a count of steps that every rank has."""
        moments = {"few.exp_avg": tensors["few"] * 2, "few.step": torch.tensor(3.0), "one.exp_avg": tensors["one"] * 2}
        return Checkpoint(tensors, moments, a_run())

    def work(rank: int) -> None:
        found = of({name: sharded(tensor, 4) for name, tensor in WHOLE.items()})
        if rank == 0:
            write_checkpoint(tmp_path / "of four" / "x", found)
        else:
            help_to_write(found)
        for name, tensor in WHOLE.items():  # what a checkpoint holds is put back into parts
            part = part_like(tensor, found.weights[name])
            assert part_of(part).data_ptr() != tensor.data_ptr() or not tensor.numel()
            assert torch.equal(part_of(part), part_of(found.weights[name])) and torch.equal(whole(part), tensor)

    on_ranks(4, work)
    write_checkpoint(tmp_path / "of one" / "x", of(WHOLE))
    for path in (tmp_path / "of one" / "x").iterdir():
        assert (tmp_path / "of four" / "x" / path.name).read_bytes() == path.read_bytes(), path.name
    found = read_checkpoint(tmp_path / "of four" / "x", in_memory=False)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in WHOLE.items())
    found.weights["even"] += 1  # mapped, and nothing is written back
    assert torch.equal(read_checkpoint(tmp_path / "of four" / "x").weights["even"], WHOLE["even"])
    assert part_like(WHOLE["even"], WHOLE["even"]) is WHOLE["even"]
