"""How a run survives: where it is between two steps, when it is saved, what asks it to stop, and how it goes on.

| file | what |
|---|---|
| `position.py` | three numbers that say where a run is, and Lightning's loops made from them |
| `saving.py` | when a checkpoint is written |
| `checkpoint_io.py` | that it is a folder of `radixtrain/checkpoints/` |
| `resume.py` | what else it keeps, and which settings may differ when a run goes on |
| `requests.py`, `slurm.py` | signals, request files, and a scheduler, which ask to save and to stop |
| `finite.py` | numbers that are not finite, found before they do harm |
| `failures.py` | what the machine refuses, in words |
| `run_folder.py`, `folder_lock.py` | one run in a folder, and one command at a time |
"""
