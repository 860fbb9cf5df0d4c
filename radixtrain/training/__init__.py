"""Training, on Lightning Fabric.

| file | does |
|---|---|
| `module.py` | a step: loss, gradient, optimizer; `optimizer.py` makes the optimizer and its schedule |
| `loop.py` | the loop of `fit`; `runner.py` is what it shares with the commands that evaluate, and these |
| `start/` | loads the model and refuses what cannot work |
| `devices/` | several processes: which are accepted, how they start, exchange gradients and end |
| `answers/` | generates answers to rows and scores them; what `predict` writes of a row |
| `fault_tolerance/` | saves, stops and resumes a run |
| `progress.py` | tokens per second, and the progress bar |
| `results/` | files and lines that a run leaves, from one record |
"""
