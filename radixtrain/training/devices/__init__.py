"""A run on several devices: which are accepted, how its processes start and find one another, and how they end.

| file | what |
|---|---|
| `settings.py` | which devices and strategies a command accepts |
| `started.py`, `slurm_tasks.py` | what has started this process, and as which rank |
| `launch.py` | starts the other processes, and makes the process group |
| `synchronising.py` | when gradients are exchanged |
| `fsdp2.py`, `sharding.py`, `gathering.py` | divided weights: the strategy, how a model is divided, and whole again |
| `board.py` | a connection of every rank to rank 0: who is gone, who reports the error |
| `watching.py` | until there is a board: processes that this one has started end with it, and it with them |
| `telling.py`, `lost_ranks.py` | one rank reports why the run ends; lost connections in words |
"""
