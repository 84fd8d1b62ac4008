"""A tile program as a graph of operations on rows and columns, for backends that print their own code.

A node has size 1 along an axis of equal entries, so broadcasts and reshapes vanish. Equal nodes are
one node.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from cope_jax.attention.kernels.tile.tile_operations import REDUCTIONS
from cope_jax.attention.kernels.tile.tile_program import IDENTITIES, INLINED, TileProgram, needed
from cope_jax.attention.kernels.tile.tile_values import NotATile
from cope_jax.ops import tile

Size = tuple[int, int]
ELEMENTWISE = frozenset(
    "abs add and cos div eq erf exp floor ge gt is_finite le log log1p logistic lt max min mul ne neg not or rsqrt "
    "select_n sign sin sqrt sub tanh".split()
)
FACTORS = ("float", "bfloat16")  # of products, whose sums are float
COLLECTING = frozenset(("gather_up", "add_rows", "add_table"))
"""Operations that add each entry to a place that an index gives."""


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation.

    Attributes:
      number: in the order of computation.
      op: its name; "input" and "const" have no arguments.
      args: its operands.
      size: the numbers of rows and columns.
      kind: "float", "bfloat16", "int", "uint" or "bool"; "float32" where "float" is float64.
      params: what else it depends on.
    """

    number: int
    op: str
    args: tuple["Node", ...]
    size: Size
    kind: str
    params: dict[str, Any]

    @property
    def leaf(self) -> bool:
        """Returns whether it needs no computation."""
        return self.op in ("input", "const")

    @property
    def full(self) -> bool:
        """Returns whether it has several columns."""
        return self.size[1] > 1


Value = tuple[
    Node, tuple[int, ...]
]  # of a traced function: the node, and the shape with all entries


KINDS = {"int32": "int", "uint32": "uint", "bool": "bool"}
# By the type of a kernel's own numbers.
MORE_KINDS = {
    "float32": {"float32": "float", "bfloat16": "bfloat16"},
    "float64": {"float64": "float", "float32": "float32"},
}


def kind_of(dtype: Any, real: str = "float32") -> str:
    """The kind of the entries of an array; "float" if they have type `real`, float32 or float64."""
    kinds, name = KINDS | MORE_KINDS[real], jnp.dtype(dtype).name
    if name not in kinds:
        raise NotATile(f"this kernel has no type {name}")
    return kinds[name]


FORMS: dict[Any, Callable[..., Any]] = {p: p.bind for p in tile.PRIMITIVES} | {
    tile.add_table_p: lambda indices, dy, *, size: tile.add_table_p.bind(
        indices, dy, size=size
    ).reshape(1, size)
}
"""The operations of `cope_jax.ops`, which remain operations of the graph."""


class Graph:
    """The operations of one tile program, in the order of computation.

    Args:
      program: the tile program.
      real: the type of numbers of kind "float".

    Attributes:
      inputs: the nodes of the constants and of the arguments that the program uses.
      results: the nodes of its results; None for a result that is 0.
    """

    def __init__(self, program: TileProgram, real: str = "float32"):
        self.kind_of = functools.partial(kind_of, real=real)
        self.nodes: list[Node] = []
        self._known: dict[Any, Node] = {}
        jaxpr, sizes = program.two_axes, program.sizes
        self.inputs = [
            self.add("input", (), size, self.kind_of(dtype), number=n)
            for n, (size, dtype) in enumerate(sizes)
        ]
        values = [(node, size) for node, (size, _) in zip(self.inputs, sizes, strict=True)]
        computed = iter(self._run(jaxpr.jaxpr, jaxpr.consts, values))
        self.results = [None if spec is None else next(computed)[0] for spec in program.results]

    def add(self, op: str, args: Sequence[Node], size: Size, kind: str, **params: Any) -> Node:
        """The node of an operation, which may be there already."""
        key = op, tuple(a.number for a in args), size, kind, tuple(sorted(params.items()))
        if key not in self._known:
            node = Node(len(self.nodes), op, tuple(args), size, kind, params)
            self.nodes.append(node)
            self._known[key] = node
        return self._known[key]

    def const(self, value: Any, kind: str) -> Node:
        """The node of a number that is known."""
        return self.add("const", (), (1, 1), kind, value=np.asarray(value).item())

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        env |= {v: self._number(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}

        def read(var: Any) -> Value:
            if isinstance(var, Literal):
                aval: Any = var.aval
                return self._number(np.asarray(var.val, aval.dtype))
            return env[var]

        live = needed(jaxpr)
        for eqn in jaxpr.eqns:
            if any(var in live for var in eqn.outvars):
                results = self._apply(eqn, [*map(read, eqn.invars)])
                env.update(zip(eqn.outvars, results, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _number(self, x: Any) -> Value:
        if np.ndim(x):
            raise NotATile("a nested function closes over an array")
        return self.const(x, self.kind_of(x.dtype)), ()

    def _apply(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        out: Any = eqn.outvars[0].aval
        nodes = [node for node, _ in values]
        if name in INLINED:
            inner = params[INLINED[name]]
            return self._run(inner.jaxpr, inner.consts, values)
        if name in IDENTITIES:
            return values
        if name in ELEMENTWISE or name == "add_any":
            return [
                (
                    self._elementwise(name.removesuffix("_any"), nodes, self.kind_of(out.dtype)),
                    out.shape,
                )
            ]
        if name in REDUCTIONS:
            return [(self._reduce(name.removeprefix("reduce_"), values, params["axes"]), out.shape)]
        if name in COLLECTING:
            args, size = [self._sized(node, values[0][1]) for node in nodes], (1, *out.shape)[-2:]
            return [(self.add(name, args, size, "float"), out.shape)]
        if name == "look_up":
            return [(node, out.shape) for node in self._look_up(nodes[0], nodes[1])]
        if name == "threefry2x32":
            size = common(nodes)
            return [(self.add("threefry", nodes, size, "uint", at=n), out.shape) for n in (0, 1)]
        handler = getattr(self, f"_{name}", None)
        if handler is None:
            raise NotATile(f"this kernel has no {name}")
        return [(handler(out, values, **params), out.shape)]

    def _elementwise(self, op: str, args: Sequence[Node], kind: str) -> Node:
        known = [a.args[0] if a.op == "expand" else a for a in args]
        values = [a.params["value"] if a.op == "const" else None for a in known]
        if (op in ("add", "sub") and values[1] == 0) or (op == "mul" and values[1] == 1):
            return self._sized(args[0], common(args))
        if (op == "add" and values[0] == 0) or (op == "mul" and values[0] == 1):
            return self._sized(args[1], common(args))
        if op == "select_n" and args[1] is args[2]:
            return self._sized(args[1], common(args))
        if op == "div" and kind != "float":  # in C++, a division by 0 ends the process
            raise NotATile("this kernel has no division of integers")
        if op == "div":
            exact = self._reciprocal(args[1])
            if exact is not None:
                op, args = "mul", (args[0], exact)
        if {"uint"} & {a.kind for a in args} and op not in ("ge", "select_n"):
            raise NotATile(f"this kernel has no {op} of unsigned integers")
        return self.add(op, args, common(args), kind)

    def _sized(self, node: Node, size: Any) -> Node:
        """The same entries with all rows and columns."""
        return node if node.size == size else self.add("expand", [node], size, node.kind)

    def _reciprocal(self, node: Node) -> Node | None:
        """1/x where it is exact: of powers of two, and of choices between them."""
        if node.op == "const":
            value = float(node.params["value"])
            exact = value != 0 and abs(np.frexp(value)[0]) == 0.5
            return self.const(1 / value, "float") if exact else None
        if node.op == "select_n":
            cases = [self._reciprocal(case) for case in node.args[1:]]
            if all(case is not None for case in cases):
                args: Any = (node.args[0], *cases)
                return self.add("select_n", args, node.size, "float")
        return None

    def _convert_element_type(self, out: Any, values: list[Value], **_: Any) -> Node:
        node, kind = values[0][0], self.kind_of(out.dtype)
        if {node.kind, kind} <= {"int", "uint"}:
            return node if node.kind == kind else self.add("as", [node], node.size, kind)
        return node if node.kind == kind else self.add("convert", [node], node.size, kind)

    def _integer_pow(self, out: Any, values: list[Value], *, y: int) -> Node:
        node = values[0][0]
        return self.add("power", [node], node.size, node.kind, exponent=y)

    def _square(self, out: Any, values: list[Value]) -> Node:
        return self._integer_pow(out, values, y=2)

    def _broadcast_in_dim(
        self, out: Any, values: list[Value], *, broadcast_dimensions: Sequence[int], **_: Any
    ) -> Node:
        node, shape = values[0]
        if len(shape) == 1 and len(out.shape) == 2 and node.size[1 - broadcast_dimensions[0]] > 1:
            return self.add("turn", [node], node.size[::-1], node.kind)
        return node

    def _reshape(self, out: Any, values: list[Value], **_: Any) -> Node:
        node = values[0][0]
        if len(out.shape) == 2 and any(
            n > 1 and n != m for n, m in zip(node.size, out.shape, strict=True)
        ):
            return self.add("turn", [node], out.shape, node.kind)
        return node

    _squeeze = _expand_dims = _reshape

    def _transpose(self, out: Any, values: list[Value], **_: Any) -> Node:
        node = values[0][0]
        size, params = node.size[::-1], node.params
        if size == (1, 1):
            return node
        if node.op == "dot":  # einsum often has the factors in the other order
            swapped = {"x": params["y"], "y": params["x"]}
            if parts := params.get("parts"):
                swapped["parts"] = parts[::-1]
            return self.add("dot", node.args[::-1], size, node.kind, **{**params, **swapped})
        return self.add("turn" if 1 in size else "transpose", [node], size, node.kind)

    def _reduce(self, how: str, values: list[Value], axes: Sequence[int]) -> Node:
        node, shape = values[0]
        if node.kind != "float":
            raise NotATile(f"this kernel has no {how} of integers")
        for axis in sorted(axes, reverse=True):
            along = axis if len(shape) == 2 else int(node.size[1] > 1)
            if node.size[along] > 1:
                left = (1, node.size[1]) if along == 0 else (node.size[0], 1)
                node = self.add(f"{how}_{('rows', 'columns')[along]}", [node], left, node.kind)
            elif how == "sum" and shape[axis] > 1:
                count = self.const(float(shape[axis]), node.kind)
                node = self.add("mul", [node, count], node.size, node.kind)
        return node

    def _iota(self, out: Any, values: list[Value], *, dimension: int, **_: Any) -> Node:
        size = (out.shape[0], 1) if dimension == 0 and len(out.shape) == 2 else (1, out.shape[-1])
        node = self.add("iota", (), size, "int")
        return (
            node if self.kind_of(out.dtype) == "int" else self.add("convert", [node], size, "float")
        )

    def _slice(
        self, out: Any, values: list[Value], *, start_indices: Any, limit_indices: Any, strides: Any
    ) -> Node:
        node = values[0][0]
        if (strides is not None and set(strides) != {1}) or len(out.shape) != 2:
            raise NotATile("this kernel has no slice with strides")
        first, end = (
            tuple(n if size > 1 else other for n, size in zip(indices, node.size, strict=True))
            for indices, other in ((start_indices, 0), (limit_indices, 1))
        )
        size = end[0] - first[0], end[1] - first[1]
        if size == node.size:
            return node
        if size == (node.size[0], 1):
            return self.add("entry", [node], size, node.kind, at=first[1])
        return self.add("view", [node], size, node.kind, at=first)

    def _concatenate(self, out: Any, values: list[Value], *, dimension: int) -> Node:
        parts = [self._sized(node, shape) for node, shape in values]
        return self.add("concatenate", parts, out.shape, self.kind_of(out.dtype), axis=dimension)

    def _dot_general(
        self,
        out: Any,
        values: list[Value],
        *,
        dimension_numbers: Any,
        precision: Any = None,
        **_: Any,
    ) -> Node:
        (x_axis,), (y_axis,) = dimension_numbers[0]
        x, y = (self._sized(node, shape) for node, shape in values)
        if self.kind_of(out.dtype) != "float" or not {x.kind, y.kind} <= {*FACTORS}:
            raise NotATile(f"this kernel has no product of type {out.dtype}")
        if x.kind != y.kind:  # as in the gradient of a gate that has a key of its own
            x, y = (
                node if node.kind == "float" else self.add("convert", [node], node.size, "float")
                for node in (x, y)
            )
        how = self.how_to_multiply(x, y, precision)
        return self.add("dot", [x, y], out.shape, "float", x=x_axis, y=y_axis, **how)

    def how_to_multiply(self, x: Node, y: Node, precision: Any) -> dict[str, Any]:
        """Returns the other facts on which a product depends."""
        del x, y, precision
        return {}

    def _running_sum(self, out: Any, values: list[Value], *, suffix: bool) -> Node:
        return self.add(
            "running_sum", [self._sized(values[0][0], out.shape)], out.shape, "float", suffix=suffix
        )

    def _look_up(self, z: Node, p: Node) -> tuple[Node, Node]:
        """The number that z has at p, between its entries below and above, and the slope there."""
        floor = self.add("floor", [p], p.size, "float")
        index = self.add("convert", [floor], p.size, "int")
        after = self.add("add", [index, self.const(1, "int")], p.size, "int")
        above = self.add("min", [after, self.const(z.size[1] - 1, "int")], p.size, "int")
        size = common([z, p])[0], p.size[1]
        low, high = (self.add("take", [z, n], size, "float") for n in (index, above))
        w = self.add("sub", [p, floor], p.size, "float")
        slope = self.add("sub", [high, low], size, "float")
        y = self.add("add", [low, self.add("mul", [w, slope], size, "float")], size, "float")
        zero = self.const(0.0, "float")
        inside = self.add("gt", [w, zero], w.size, "bool")
        return y, self.add("select_n", [inside, zero, slope], size, "float")

    def _spread(self, out: Any, values: list[Value], **_: Any) -> Node:
        p, z = (node for node, _shape in values)
        return self._look_up(z, p)[0]

    def _take_rows(self, out: Any, values: list[Value]) -> Node:
        (index, _), (z, shape) = values
        z = self._sized(z, (z.size[0], shape[-1]))
        return self.add("take", [z, index], (max(index.size[0], z.size[0]), index.size[1]), z.kind)

    _take_table = _take_rows

    def _count_below(self, out: Any, values: list[Value]) -> Node:
        (z, shape), (x, _) = values
        z = self._sized(z, (z.size[0], shape[-1]))
        return self.add("count_below", [z, x], (max(x.size[0], z.size[0]), x.size[1]), "int")


def common(nodes: Sequence[Node]) -> Size:
    """The size of the result of an operation on each entry."""
    rows, columns = (max(node.size[axis] for node in nodes) for axis in (0, 1))
    return rows, columns
