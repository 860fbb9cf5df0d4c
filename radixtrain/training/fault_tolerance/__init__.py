"""Fault tolerance: where a run is between two steps, when it is saved, what stops it, and how it resumes.

| file | what |
|---|---|
| `saving.py` | when a checkpoint is written |
| `run_state.py` | what a checkpoint holds of a run; how it resumes, and which settings may differ |
| `signals.py` | requests to save and to stop: signals, and SLURM |
| `nonfinite_guard.py` | NaN and Inf in losses, gradients and weights, before they do harm |
| `failures.py` | errors of the machine and of lost ranks in one line, with a remedy |
| `run_folder.py` | one run in a folder, and one command at a time |
"""
