"""Operations on each entry, and numbers, as expressions in C++."""

from typing import Any

import numpy as np

from cope_jax.attention.kernels.tile.tile_graph import Node
from cope_jax.attention.kernels.tile.tile_values import NotATile

OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|"}
FUNCTIONS = frozenset(
    "abs bfloat16 cos eq erf exp float32 floor ge gt is_finite le log log1p logistic lt max min ne rsqrt "
    "sign sin sqrt tanh".split()
)


def area(node: Node) -> int:
    """The number of entries."""
    return node.size[0] * node.size[1]


def c_type(node: Node) -> str:
    """The type of the entries in memory."""
    return "real" if node.kind == "float" else "integer"


def literal(node: Node) -> str:
    """A number in C++."""
    value: Any = node.params["value"]
    if node.kind == "bool":
        return f"integer({-int(value)})"
    if node.kind != "float":
        return f"integer({np.int64(value).astype(np.int32)})"
    if not np.isfinite(value):
        value = "NAN" if np.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    return f"real({value})"


def formula(node: Node, args: list[str]) -> str:
    """An operation on each entry, of vectors or of single numbers."""
    op = node.op
    if op in OPERATORS:
        text = f"({args[0]} {OPERATORS[op]} {args[1]})"
        return f"wrapped{text}" if node.kind in ("int", "uint") else text
    if op == "ge" and node.args[0].kind == "uint":
        return f"unsigned_ge({', '.join(args)})"
    if (
        op in ("max", "min")
        and node.args[1].op == "const"
        and not np.isnan(node.args[1].params["value"])
    ):
        return f"{'at_least' if op == 'max' else 'at_most'}({', '.join(args)})"
    if op in FUNCTIONS:
        return f"{op}_of({', '.join(args)})"
    if op == "div":
        return f"({args[0]} / {args[1]})"
    if op == "neg":
        return f"(-{args[0]})"
    if op == "not":
        return f"(~{args[0]})"
    if op == "select_n":
        return f"choose({args[0]}, {args[2]}, {args[1]})"
    if op == "power":
        exponent = node.params["exponent"]
        product = f"({' * '.join([args[0]] * abs(exponent))})"
        return product if exponent > 0 else f"(1.f / {product})"
    if op == "convert":
        return f"{node.args[0].kind}_to_{node.kind}({args[0]})"
    if op in ("expand", "as", "set", "add_to"):
        return args[0]
    if op == "threefry":
        return f"threefry<{node.params['at']}>({', '.join(args)})"
    raise NotATile(f"this kernel has no {op}")
