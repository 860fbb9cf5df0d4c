"""Errors of connections between ranks in words, and no others."""

import pytest
import torch.distributed as dist

from radixtrain.training.devices.lost_ranks import lost_rank

PAIR = "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:408: Connection reset by peer. This is typically"
BUFFER = "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(PAIR),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:2"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shut"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2.27"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    ],
)
def test_a_rank_is_gone(error):
    assert lost_rank(error, lambda: "rank 1 was killed by SIGKILL") == "rank 1 was killed by SIGKILL"
    assert "another rank is gone" in lost_rank(error, str)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(BUFFER),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistStoreError("Timed out after 5 seconds waiting for clients. 1/2 clients joined."),
    ],
)
def test_a_rank_does_not_answer(error):
    assert "within ddp_timeout" in lost_rank(error, lambda: "rank 1 is gone")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ConnectionResetError(104, "Connection reset by peer"),  # of a hub, or of a logger
        TimeoutError("timed out"),
        dist.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected"),
    ],
)
def test_others_are_left_alone(error):
    assert lost_rank(error, lambda: "rank 1 is gone") is None
