"""Run the notebooks from the first cell to the last and store the output of each cell. Takes five minutes on two cores.

python recipes/notebooks/run.py sft grpo report
"""

import argparse
import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", help="notebooks in this folder, without their suffix")
    os.chdir(FOLDER)
    for name in parser.parse_args().names:
        path = FOLDER / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run([cell for cell in notebook["cells"] if cell["cell_type"] == "code"])
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def run(cells: list[dict[str, Any]]) -> None:
    """Run the cells and store their output, without the path of the folder for temporary files."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate(cells, 1):
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)  # noqa: S102 - our own notebooks
        text = printed.getvalue().replace(f"{names['folder'].parent}{os.sep}", "")
        output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell.update(execution_count=count, outputs=[output] if text else [])


if __name__ == "__main__":
    main()
