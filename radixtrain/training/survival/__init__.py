"""How a run survives: where it is between two steps, when it is saved, what asks it to stop, and how it goes on.

| file | what |
|---|---|
| `position.py` | three numbers that say where a run is, and Lightning's loops made from them |
| `saving.py` | when a checkpoint is written |
| `checkpoint_io.py` | that it is a folder of `radixtrain/checkpoints/` |
| `run_state.py`, `generators.py` | what else it keeps; the check that the model is the same |
| `weights.py` | its weights, whole or only adapters, into a module |
| `resume.py`, `changed_settings.py` | how a run goes on from it, and which settings may differ |
| `requests.py`, `slurm.py` | signals, request files, and a scheduler, which ask to save and to stop |
| `finite.py` | numbers that are not finite, found before they do harm |
| `failures.py` | what the machine refuses, in words |
| `run_folder.py`, `folder_lock.py` | one run in a folder, and one command at a time |
"""
