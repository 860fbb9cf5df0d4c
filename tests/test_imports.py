"""What an import loads, in fresh processes, and which module may import which.

A *room* is a folder or a file directly in `radixtrain/`; a *floor* is a list of rooms. The two links are followed once:
`kernels/` and `collators/` are the rooms `radixtrain.kernels` and `radixtrain.collators`. Every import counts, inside
functions and under `TYPE_CHECKING` too.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. A module imports from its own floor and those below.
FLOORS = [
    ["kernels", "loss", "errors", "redaction", "versions"],
    ["tree", "checkpoints", "distributed"],
    ["attention", "collators"],
    ["hf", "data"],
    ["verification", "generation"],
    ["bench", "inspection", "report", "training", "testing"],
    ["commands"],
    ["__main__"],
]
DOOR = "radixtrain"  # its lazy table names modules of every floor; no other module imports names from it
# The others are folders.
FILES = {"__main__", "attention", "distributed", "errors", "loss", "redaction", "testing", "versions"}
# Attributes of our classes that Hugging Face's models and configurations have too, so that we may look for them there.
HUGGING_FACE = {
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "model",
    "num_hidden_layers",
    "num_key_value_heads",
    "q_lora_rank",
    "v_head_dim",
    "value",
    "weight",
}
# Modules that import by a name which they compute.
BY_NAME = {
    DOOR: "its lazy table",
    "radixtrain.__main__": "the table of commands",
    "radixtrain.kernels.triton_runtime": "Triton, which is optional",
    "radixtrain.training.answers.metrics": "a function of the user",
}
Sources = Mapping[str, str]  # module name -> source


@cache
def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh process after `statement`."""
    code = (
        f"{statement}\nimport json, sys; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import radixtrain", {"torch", "triton", "transformers", "lightning", "numpy"}),
        ("import radixtrain.tree.plan", {"torch", "triton", "transformers", "lightning"}),
        ("import radixtrain.errors", {"torch", "triton", "transformers", "lightning", "numpy"}),
        ("import radixtrain.attention", {"transformers", "lightning", "triton"}),
        ("import radixtrain.__main__", {"torch", "triton", "transformers", "lightning", "numpy", "jsonargparse"}),
    ],
)
def test_import_leaves_out(statement: str, heavy: set[str]) -> None:
    baseline = loaded_by("pass")  # an installed .pth file may import things of its own
    assert not (loaded_by(statement) - baseline) & heavy


def test_public_names_are_found() -> None:
    """And a heavy import is seen, which one of them needs."""
    statement = "import radixtrain\nfor name in radixtrain.__all__: getattr(radixtrain, name)"
    assert {"torch", "radixtrain"} <= loaded_by(statement)


def test_unknown_name_is_an_attribute_error() -> None:
    loaded_by("import radixtrain\ntry: radixtrain.nothing\nexcept AttributeError: pass")


def source_files() -> list[Path]:
    """Every source file once, under its real path."""
    folders = [ROOT / "radixtrain", ROOT / "kernels", ROOT / "collators"]
    own = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted({path for path in own if path.resolve() == path})


def module_of(path: Path) -> str:
    """`kernels/rows.py` -> `radixtrain.kernels.rows`; an `__init__.py` has the name of its folder."""
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "radixtrain"]
    return ".".join(["radixtrain", *parts]).removesuffix(".__init__")


SOURCES = {module_of(path): path.read_text(encoding="utf-8") for path in source_files()}


def room_of(module: str) -> str:
    return module.split(".")[1]


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def names_imported(source: str) -> Iterator[str]:
    """Dotted names that a source imports, anywhere in it: `a.b` for `import a.b` and for `from a import b`."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def imports_of(module: str, sources: Sources) -> set[str]:
    """The modules that an import of this one runs: those it names, and the `__init__.py` of each folder on the way."""
    found = set()
    for name in (module, *names_imported(sources[module])):
        parts = name.split(".")
        found |= {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
    return {name for name in found if name in sources and name != module}


def graph_of(sources: Sources) -> dict[str, set[str]]:
    return {module: imports_of(module, sources) for module in sources if module != DOOR}


def misplaced(sources: Sources, floors: list[list[str]], files: set[str]) -> set[str]:
    """Rooms on no floor or on two, rooms that do not exist, and files that should be folders, or the reverse."""
    rooms = {room_of(module) for module in sources if module != DOOR}
    folders = {room_of(module) for module in sources if module.count(".") > 1}
    placed = [room for floor in floors for room in floor]
    twice = {room for room in placed if placed.count(room) > 1}
    return rooms.symmetric_difference(placed) | twice | (rooms - folders).symmetric_difference(files)


def upward(sources: Sources, floors: list[list[str]]) -> list[str]:
    """Imports from a higher floor."""
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    return [
        f"{module} imports {name}"
        for module, names in graph_of(sources).items()
        for name in sorted(names)
        if floor_of[room_of(name)] > floor_of[room_of(module)]
    ]


def circle(sources: Sources) -> list[str]:
    """Modules that import one another in a circle; empty if none do."""
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def through_the_door(sources: Sources) -> list[str]:
    """Modules inside that import a name from `radixtrain` and not from its own module; its version is defined there."""
    own = {*sources, f"{DOOR}.__version__"}
    inside = ((module, source) for module, source in sources.items() if module != DOOR)
    return [
        f"{module} imports {name}"
        for module, source in inside
        for name in names_imported(source)
        if name == DOOR or (name.rpartition(".")[0] == DOOR and name not in own)
    ]


def unseen(sources: Sources) -> list[str]:
    """Imports that this file cannot follow: relative ones, and calls with a name that is ours or is computed."""
    relative = [
        f"{module} imports {name}"
        for module, source in sources.items()
        for name in names_imported(source)
        if name.startswith(".")
    ]
    by_name = [
        f"{module} calls {ast.unparse(node)}"
        for module, source in sources.items()
        if module not in BY_NAME
        for node in nodes_of(source)
        if isinstance(node, ast.Call) and last_name(node.func).endswith(("import_module", "__import__"))
        if not isinstance(node.args[0], ast.Constant) or node.args[0].value.startswith(DOOR)
    ]
    return relative + by_name


def last_name(function: ast.expr) -> str:
    """`c` of `a.b.c`, empty for what is not called by a name."""
    return getattr(function, "attr", getattr(function, "id", ""))


def attributes_of(source: str) -> set[str]:
    """What instances of a source's classes have: methods, fields, and what is set on `self`."""
    found = set()
    for kind in (node for node in nodes_of(source) if isinstance(node, ast.ClassDef)):
        found |= {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
        found |= {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
        attributes = (node for node in ast.walk(kind) if isinstance(node, ast.Attribute))
        found |= {n.attr for n in attributes if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"}
    return {name for name in found if not name.startswith("__")}


def asked_whether_it_has(sources: Sources) -> list[str]:
    """`hasattr(x, "name")` and `getattr(x, "name", default)` for what only a class of another room has.

    So a module uses a room above it, or one it shall not know, without an import.
    """
    rooms: dict[str, set[str]] = {}
    for module, source in sources.items():
        for name in attributes_of(source) - HUGGING_FACE:
            rooms.setdefault(name, set()).add(room_of(module))
    return [
        f"{module}: {ast.unparse(question)}"
        for module, source in sources.items()
        for question, name in questions_of(source)
        if name in rooms and room_of(module) not in rooms[name]
    ]


def questions_of(source: str) -> Iterator[tuple[ast.Call, str]]:
    """Calls of `hasattr`, and of `getattr` with a default, and the attribute that they look for, if it is a literal."""
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))
            if asks and isinstance(node.args[1], ast.Constant):
                yield node, node.args[1].value


def test_every_module_is_on_a_floor() -> None:
    assert len(FLOORS) <= 8
    assert not misplaced(SOURCES, FLOORS, FILES)


def test_every_arrow_points_down() -> None:
    assert not upward(SOURCES, FLOORS)


def test_no_circle() -> None:
    assert not circle(SOURCES)


def test_nothing_inside_uses_the_public_door() -> None:
    assert not through_the_door(SOURCES)


def test_no_import_is_hidden() -> None:
    assert not unseen(SOURCES)
    assert not asked_whether_it_has(SOURCES)


def test_the_names_of_hugging_face_are_all_looked_for() -> None:
    assert {name for source in SOURCES.values() for _, name in questions_of(source)} >= HUGGING_FACE


class TestTheChecks:
    """Each of them fails on a made-up package of two floors."""

    FLOORS: ClassVar = [["low"], ["high"]]
    GOOD: ClassVar = {
        "radixtrain": "from radixtrain.high.a import f",
        "radixtrain.low": "",
        "radixtrain.high": "",
        "radixtrain.high.a": "import numpy\nfrom radixtrain import low\nfrom radixtrain.high.b import g",
        "radixtrain.high.b": "def g():\n    import radixtrain.low",
    }

    def test_they_pass_a_good_one(self) -> None:
        assert graph_of(self.GOOD)["radixtrain.high.a"] == {"radixtrain.high", "radixtrain.low", "radixtrain.high.b"}
        checks = (circle, through_the_door, unseen, asked_whether_it_has)
        assert not upward(self.GOOD, self.FLOORS) and not any(check(self.GOOD) for check in checks)
        assert not misplaced(self.GOOD, self.FLOORS, {"low"})

    @pytest.mark.parametrize(
        ("changed", "floors", "files"),
        [
            ({"radixtrain.attic": ""}, FLOORS, {"low", "attic"}),
            ({"radixtrain.attic.a": ""}, FLOORS, {"low"}),
            ({}, [*FLOORS, ["attic"]], {"low"}),
            ({}, [*FLOORS, ["low"]], {"low"}),
            ({"radixtrain.attic": ""}, [*FLOORS, ["attic"]], {"low"}),
            ({"radixtrain.low.a": ""}, FLOORS, {"low"}),
        ],
    )
    def test_a_room_out_of_place(self, changed: dict[str, str], floors: list[list[str]], files: set[str]) -> None:
        assert misplaced({**self.GOOD, **changed}, floors, files) in ({"attic"}, {"low"})

    @pytest.mark.parametrize(
        "source",
        [
            "import radixtrain.high.b",
            "from radixtrain.high.b import g",
            "from radixtrain.high import b",
            "def f():\n    from radixtrain.high import b",
            "if TYPE_CHECKING:\n    from radixtrain.high.b import g",
        ],
    )
    def test_an_arrow_that_points_up(self, source: str) -> None:
        bad = {**self.GOOD, "radixtrain.low": source}
        assert "radixtrain.low imports radixtrain.high.b" in upward(bad, self.FLOORS)

    @pytest.mark.parametrize(
        ("module", "source", "members"),
        [
            ("radixtrain.high.b", "def g():\n    from radixtrain.high.a import f", 2),
            ("radixtrain.high.b", "if TYPE_CHECKING:\n    from radixtrain.high import a", 2),
            ("radixtrain.low", "from radixtrain.high.b import g", 2),
            ("radixtrain.high", "from radixtrain.high.a import f", 2),
        ],
    )
    def test_a_circle(self, module: str, source: str, members: int) -> None:
        found = circle({**self.GOOD, module: source})
        assert module in found and len(set(found)) >= members

    @pytest.mark.parametrize("source", ["from radixtrain import f", "import radixtrain"])
    def test_a_name_through_the_door(self, source: str) -> None:
        assert through_the_door({**self.GOOD, "radixtrain.high.b": source})

    def test_the_version_is_defined_at_the_door(self) -> None:
        assert not through_the_door({**self.GOOD, "radixtrain.high.b": "from radixtrain import __version__"})

    @pytest.mark.parametrize(
        "source",
        ["from . import a", "from .a import f", "import_module('radixtrain.low')", "importlib.import_module(name)"],
    )
    def test_an_import_that_cannot_be_followed(self, source: str) -> None:
        assert unseen({**self.GOOD, "radixtrain.high.b": source})

    @pytest.mark.parametrize("question", ["hasattr(x, 'rates')", "getattr(x, 'rates', None)"])
    @pytest.mark.parametrize(
        "kind",
        [
            "class A:\n    def rates(self): ...",
            "class A:\n    rates: int",
            "class A:\n    def __init__(self): self.rates = 1",
            "class A:\n    def __init__(self): self.rates: int = 1",
        ],
    )
    def test_a_question_that_hides_an_import(self, kind: str, question: str) -> None:
        assert asked_whether_it_has({**self.GOOD, "radixtrain.high.b": kind, "radixtrain.low": question})
        assert not asked_whether_it_has({**self.GOOD, "radixtrain.high.b": f"{kind}\n{question}"})
