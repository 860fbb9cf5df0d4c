"""Read wheels of flash-attn-4 without importing them: does what `FlashAttn4Kernel` passes exist, and mean the same?

    pip download --no-deps flash-attn-4==4.0.0b36
    python recipes/flash4/signatures.py flash_attn_4-*.whl

For each wheel: which arguments of ours it lacks, its order of tensors, how many values it returns, what it refuses of
varlen calls, what our windows become, which GPUs and head dims it takes, and what a query without a key gets.
"""

import ast
import re
import sys
import zipfile
from typing import Any

INTERFACE, SOFTMAX = "flash_attn/cute/interface.py", "flash_attn/cute/softmax.py"
SHARED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "softcap"}
SHARED |= {"window_size_left", "window_size_right"}
# Function -> the tensors that we pass by place, and all that we pass by name.
CALLS = {
    "_flash_attn_fwd": (["q", "k", "v"], SHARED | {"num_splits", "return_lse"}),
    "_flash_attn_bwd": (["q", "k", "v", "out", "dout", "lse"], SHARED | {"deterministic"}),
}
# What we pass as causal, left and right -> causal, local, left and right as the kernels must see them.
WINDOWS = {
    (True, -1, -1): (True, False, None, None),
    (False, -1, -1): (False, False, None, None),
    (True, 0, 0): (False, True, 0, 0),
    (True, 99, 0): (False, True, 99, 0),
}
HEAD_DIMS = (8, 12, 64, 72, 96, 128, 160, 192, 256, 264)


def main(wheels: list[str]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as files:
            interface, softmax = (files.read(name).decode() for name in (INTERFACE, SOFTMAX))
        print(f"{wheel}\n" + "\n".join(f"  {line}" for line in [*facts(interface), lse_of(softmax)]))


def facts(source: str) -> list[str]:
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    lines = []
    for name, (tensors, named) in CALLS.items():
        arguments = [argument.arg for argument in functions[name].args.args]
        lacking = sorted(named - set(arguments)) or "nothing"
        placed = "as ours" if arguments[: len(tensors)] == tensors else f"NOT OURS: {arguments[: len(tensors)]}"
        segment = ast.get_source_segment(source, functions[name]) or ""
        majors = re.findall(r"arch // 10 in (\[[\d, ]+\]), \"Unsupported", segment)
        texts = {str(node.value) for node in ast.walk(functions[name]) if isinstance(node, ast.Constant)}
        refused = [text for text in sorted(texts) if re.fullmatch(r".*varlen.* not .*", text, re.IGNORECASE)]
        lines += [
            f"{name}: lacks {lacking}; tensors {placed}; returns {returned(functions[name])}",
            f"{name}: compute capabilities {majors}; refuses {refused or 'no varlen call'}",
        ]
    resolve, validate = (run(functions[name]) for name in ("_resolve_causal_local_window", "_validate_head_dims"))
    wrong = [given for given, expected in WINDOWS.items() if tuple(resolve(*given)) != expected]
    lines.append(f"windows: {'as ours' if not wrong else f'NOT OURS: {wrong}'}")
    for major in (9, 10):
        lines.append(f"head dims on {major}.x, 16 bits: {[dim for dim in HEAD_DIMS if takes(validate, dim, major)]}")
    return lines


def returned(function: ast.FunctionDef) -> str:
    """The lengths of the tuples that it returns."""
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return " or ".join(sorted({str(len(value.elts)) for value in values if isinstance(value, ast.Tuple)}))


def run(function: ast.FunctionDef) -> Any:
    """The function by itself: those that are asked here compute with plain numbers."""
    function.decorator_list = []
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), INTERFACE, "exec"), names)  # noqa: S102
    return names[function.name]


def takes(validate: Any, head_dim: int, major: int) -> bool:
    try:
        validate(head_dim, head_dim, major, 8)
    except AssertionError:
        return False
    return True


def lse_of(softmax: str) -> str:
    natural = re.search(r"LN2 = math.log\(2.0\)\n.*?else (\S+)\n", softmax, re.DOTALL)
    return f"log-sum-exp: {f'natural, {natural[1]} without a key' if natural else 'NOT FOUND'}"


if __name__ == "__main__":
    main(sys.argv[1:])
