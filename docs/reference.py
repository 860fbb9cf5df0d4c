"""Write the reference: the signature and docstring of each name that docs/reference.md links to, read from its source.

Nothing is imported, so the site is built without torch. mkdocstrings does not follow the links from radixtrain/ to
kernels/ and collators/, and does not read a column of `name: meaning`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

NAME = re.compile(r"^- \[(\w+)\]\((\S+\.py)\)$", re.MULTILINE)
ENTRY = re.compile(r"^([a-z]\w*(?:, (?:or )?[a-z]\w*)*): ", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> (?:.+\n)+", re.MULTILINE)
Definition = ast.ClassDef | ast.FunctionDef


def with_reference(page: str, folder: Path) -> str:
    """Replace each item that is only a link from a name to its source by what the source says about the name."""
    names = {name for name, _ in NAME.findall(page)}
    return NAME.sub(lambda item: "\n\n".join([*section(item[1], item[2], folder, names), ""]), page)


def section(name: str, link: str, folder: Path, names: set[str]) -> Iterator[str]:
    """The parts of a section. Of a class with fields, which holds results or options, the methods are left out."""
    source = (folder / link).read_text(encoding="utf-8")
    lines = source.splitlines()
    [node] = [part for part in ast.parse(source).body if isinstance(part, Definition) and part.name == name]
    yield from (f"### {name}", signature(node, lines), prose(node, names - {name}))
    public = [part for part in node.body if isinstance(part, ast.FunctionDef) and is_public(part)]
    properties = [method for method in public if is_property(method)]
    if properties:
        yield "Properties:"
        yield "\n".join(f"- `{method.name}`: {prose(method, names)}" for method in properties)
    yield f"[Source]({link})"
    if not any(isinstance(part, ast.AnnAssign) for part in node.body):
        for method in public:
            if method not in properties:
                yield from (f"#### {name}.{method.name}", signature(method, lines), prose(method, names))


def is_public(node: Definition) -> bool:
    return not node.name.startswith("_") and bool(ast.get_docstring(node))


def is_property(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)


def signature(node: Definition, lines: list[str]) -> str:
    """The lines of a definition up to its docstring; of a class, its fields and its `__init__` as well."""
    parts = [head(node)]
    if isinstance(node, ast.ClassDef):
        parts += [(part.lineno, part.end_lineno) for part in node.body if isinstance(part, ast.AnnAssign)]
        parts += [head(part) for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    shown = [line[node.col_offset :] for first, last in parts for line in lines[first - 1 : last]]
    return "\n".join(["```python", *shown, "```"])


def head(node: Definition) -> tuple[int, int]:
    """The first and last line of what stands before a body."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.body[0].lineno - 1


def prose(node: Definition, names: set[str]) -> str:
    """A docstring as Markdown: its columns as lists, its examples as code to copy, the names as links to sections."""
    text = re.sub(r"^(?=(?:Returns|Raises)\b)", "\n", f"{ast.get_docstring(node)}\n", flags=re.MULTILINE)
    text = re.sub(r"`(\w+)`", lambda code: f"[{code[0]}](#{code[1].lower()})" if code[1] in names else code[0], text)
    text = ENTRY.sub(lambda entry: "- " + re.sub(r"\b(?!or\b)\w+", r"`\g<0>`", entry[1]) + ": ", text)
    return EXAMPLE.sub(as_code, text).strip()


def as_code(example: re.Match[str]) -> str:
    """An example without its prompts; what it prints becomes a comment."""
    lines = [line[4:] if line[:4] in (">>> ", "... ") else f"# {line}" for line in example[0].splitlines()]
    return "\n".join(["```python", *lines, "```", ""])
