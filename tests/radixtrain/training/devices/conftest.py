"""The environment that a launcher gives to its processes."""

from collections.abc import Callable, Mapping

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from radixtrain.training.devices.launcher_env import PARENT

VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", PARENT),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_NAME"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """`environment(variables)` sets variables of a launcher. Those of the launcher of the tests are hidden.

    A trainer that a test makes as rank 1 of them leaves this process no loggers: its rank is put back, too.
    """
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def put(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put
