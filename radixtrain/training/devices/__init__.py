"""A run on several devices: which devices are accepted, how processes start and find one another, and how they end.

| file | what |
|---|---|
| `launcher_env.py` | what has started this process, and as which rank |
| `launch.py` | starts the ranks, makes the process group, and lets one rank report an error |
| `fabric.py` | Lightning Fabric for a command: the devices, precision and strategies that it accepts |
| `fsdp2.py` | divided weights: the strategy, how a model is divided, and whole again |
"""
