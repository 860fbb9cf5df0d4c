"""What the environment says of the other processes of a run."""

import pytest

from radixtrain.__main__ import main
from radixtrain.errors import EndedElsewhere, UserError
from radixtrain.training.devices.launcher_env import ON_SEVERAL, LauncherEnv, check_started, launcher_env

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}


pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, LauncherEnv()),
        (TORCHRUN, LauncherEnv("torchrun", 5, 8, 1, 4)),
        ({**SRUN, **TORCHRUN}, LauncherEnv("torchrun", 5, 8, 1, 4)),
        (SRUN, LauncherEnv("srun", 5, 8, 1, 4)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8"}, LauncherEnv("srun", 5, 8, 1, 8)),
        ({**SRUN, "SLURM_JOB_NAME": "interactive"}, LauncherEnv()),
        ({**SRUN, "SLURM_NTASKS": "1"}, LauncherEnv()),
        ({"SLURM_NTASKS": "4"}, LauncherEnv()),  # tasks that a job may start
    ],
)
def test_started(environment, variables, expected):
    environment(variables)
    assert launcher_env() == expected


def test_tasks_that_differ_by_machine_are_refused(environment):
    environment({**SRUN, "SLURM_TASKS_PER_NODE": "4,2(x2)"})
    with pytest.raises(UserError, match=r"SLURM_TASKS_PER_NODE=4,2\(x2\): .*the same number of tasks"):
        launcher_env()


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
def test_commands_of_one_device_refuse_copies(environment, variables):
    environment({**variables, "LOCAL_RANK": "0", "SLURM_LOCALID": "0"})
    check_started("fit")
    with pytest.raises(UserError, match="started 8 copies of `verify`, which runs on one device"):
        check_started("verify")
    environment(variables)
    with pytest.raises(EndedElsewhere):
        check_started("verify")


def test_every_command_is_asked(environment, capsys):
    environment({**TORCHRUN, "LOCAL_RANK": "0"})
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.startswith("error: torchrun started 8 copies of `doctor`, which runs on one device")


@pytest.mark.parametrize("command", [*ON_SEVERAL, "verify"])
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_copies_that_do_not_know_one_another_are_refused(environment, name, command):
    """A process that a launcher started alone, or that torchrun or srun did, is no copy."""
    environment({name: "1"})
    check_started(command)
    environment({name: "2", "RANK": "0", "LOCAL_RANK": "0"})
    with pytest.raises(UserError, match=f"^{name}=2: .* started 2 copies .* start it with torchrun or srun, or set tr"):
        check_started(command)
    for joined in (SRUN, TORCHRUN):
        environment(joined)
        check_started("fit")
