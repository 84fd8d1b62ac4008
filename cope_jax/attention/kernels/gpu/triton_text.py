"""Prints operations of a tile program as statements in Triton, whose values are tiles, `[rows, columns]`.

Sizes in Triton are powers of two. What lies beyond the size of a node is undefined, except that it
is 0 in what is read from memory.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from cope_jax.attention.kernels.tile.tile_graph import Node, Size
from cope_jax.attention.kernels.tile.tile_values import NotATile

TYPES = {
    "float": "tl.float32",
    "bfloat16": "tl.bfloat16",
    "int": "tl.int32",
    "uint": "tl.uint32",
    "bool": "tl.int1",
}
OPERATORS = {
    "add": "+", "and": "&", "div": "/", "eq": "==", "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "mul": "*",
    "ne": "!=", "or": "|", "sub": "-",
}  # fmt: skip
FUNCTIONS = {name: f"tl.{name}" for name in "abs cos erf exp floor log rsqrt sin sqrt".split()} | {
    "logistic": "tl.sigmoid", "log1p": "log1p", "sign": "sign",
    "tanh": "tanh", "transpose": "tl.trans", "turn": "tl.trans",
}  # fmt: skip
NEUTRAL = {"sum": "0.0", "max": "float('-inf')", "min": "float('inf')"}
LEAST = 16  # numbers along an axis that a product on tensor cores sums over
MOST = 2**15  # numbers of a tile that the registers of a program hold
MOST_TAKEN = 2**12  # numbers of a table, of which Triton keeps copies in shared memory


def padded(size: Size) -> Size:
    """The numbers of rows and columns in Triton."""
    rows, columns = map(_extent, size)
    if rows * columns > MOST:
        raise NotATile(f"a tile of {size[0]} × {size[1]} numbers does not fit in registers")
    return rows, columns


def _extent(count: int) -> int:
    return 1 if count == 1 else max(LEAST, 1 << (count - 1).bit_length())


def index(size: Size, axis: int) -> str:
    """The numbers of the rows, as a column, or those of the columns, as a row."""
    return f"tl.arange(0, {_extent(size[axis])}){('[:, None]', '[None, :]')[axis]}"


def offsets(size: Size, strides: Sequence[int]) -> str:
    """The distances of the entries of a tile from its first."""
    return f"{index(size, 0)} * {strides[0]} + {index(size, 1)} * {strides[1]}"


def inside(size: Size) -> str:
    """The condition that an entry in Triton is one of the tile; "True" if all are."""
    axes = [axis for axis in (0, 1) if padded(size)[axis] > size[axis]]
    return " & ".join(f"({index(size, axis)} < {size[axis]})" for axis in axes) or "True"


def zeros(size: Size, kind: str, value: float = 0.0) -> str:
    """A tile of equal numbers."""
    return f"tl.full({list(padded(size))}, {literal(value)}, {TYPES[kind]})"


def literal(value: float) -> str:
    """A number."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(float(np.float32(value)) if isinstance(value, float) else int(value))


@dataclasses.dataclass(frozen=True)
class Source:
    """The place of an input of a program.

    Attributes:
      tile: the variable that contains it; empty if it lies in memory.
      base: the address of its first entry.
      strides: the distances in memory of rows and of columns.
      by_block: whether it lies elsewhere for each block of keys.
    """

    tile: str = ""
    base: str = ""
    strides: tuple[int, int] = (0, 0)
    by_block: bool = False


class Body:
    """The statements for one block of keys.

    Args:
      prefix: of the names of variables.
      sources: of the inputs of the program.
      outside: variables that are the same for all blocks of keys, with their formulas; this adds
        some.
      precision: of products of float32.

    Attributes:
      lines: the statements.
    """

    def __init__(
        self, prefix: str, sources: Sequence[Source], outside: dict[str, str], precision: str
    ):
        self.lines: list[str] = []
        self._prefix, self._sources, self._outside = prefix, sources, outside
        self._precision = precision
        self._names: dict[Node, str] = {}
        self._words: dict[tuple[Node, ...], str] = {}

    def value(self, node: Node) -> str:
        """The variable that contains a node, after the statements that compute it."""
        if node not in self._names:
            padded(node.size)
            if node.op == "input":
                self._names[node] = self._read(node, (0, 0), node.size)
            else:
                text = self._formula(node)
                self._names[node] = f"{self._prefix}{node.number}"
                self.lines.append(f"{self._names[node]} = {text}")
        return self._names[node]

    def whole(self, node: Node | None, size: Size, kind: str = "float") -> str:
        """The variable with all entries, in the type of a result."""
        if node is None:
            return zeros(size, kind)
        value = self.value(node)
        if node.kind != kind:
            value = f"{value}.to({TYPES[kind]})"
        if padded(node.size) != padded(size):
            value = f"tl.broadcast_to({value}, {list(padded(size))})"
        return value

    def add_to(self, address: str, strides: tuple[int, int], node: Node, size: Size) -> None:
        """Adds a node to memory; where only some cells of a row change, to these."""
        rows = f"{address} + {index(size, 0)} * {strides[0]}"
        for term in terms(node):
            if term.op in ("gather_up", "add_rows"):
                line = f"collect_to({rows}, {self._collected(term)})"
            elif (column := single_column(term)) is not None:
                at, entries = column
                line = f"add_to({rows} + {at}, {self.whole(entries, (size[0], 1))}, True)"
            else:
                entries_of = self.whole(term, size)
                line = f"add_to({address} + {offsets(size, strides)}, {entries_of}, {inside(size)})"
            self.lines += [line, "tl.debug_barrier()"]

    def _formula(self, node: Node) -> str:
        handler = getattr(self, f"_{node.op}", None)
        if handler is None:
            args = [self.value(x) for x in node.args]
            if node.op in OPERATORS:
                return f" {OPERATORS[node.op]} ".join(args)
            if node.op in FUNCTIONS:
                return f"{FUNCTIONS[node.op]}({', '.join(args)})"
            raise NotATile(f"this kernel has no {node.op}")
        text: str = handler(node)
        return text

    def _const(self, node: Node) -> str:
        return zeros((1, 1), node.kind, node.params["value"])

    def _neg(self, node: Node) -> str:
        return f"-{self.value(node.args[0])}"

    def _is_finite(self, node: Node) -> str:
        return f"tl.abs({self.value(node.args[0])}) < float('inf')"

    def _select_n(self, node: Node) -> str:
        condition, no, yes = map(self.value, node.args)
        return f"tl.where({condition}, {yes}, {no})"

    def _max(self, node: Node) -> str:
        x, y = map(self.value, node.args)
        return f"tl.{node.op}imum({x}, {y}, propagate_nan=tl.PropagateNan.ALL)"

    _min = _max

    def _as(self, node: Node) -> str:
        return f"{self.value(node.args[0])}.to({TYPES[node.kind]}, bitcast=True)"

    def _not(self, node: Node) -> str:
        value = self.value(node.args[0])
        return f"{value} == 0" if node.kind == "bool" else f"~{value}"

    def _power(self, node: Node) -> str:
        exponent = node.params["exponent"]
        product = " * ".join([self.value(node.args[0])] * abs(exponent))
        return product if exponent > 0 else f"1.0 / ({product})"

    def _convert(self, node: Node) -> str:
        value = self.value(node.args[0])
        return f"{value} != 0" if node.kind == "bool" else f"{value}.to({TYPES[node.kind]})"

    def _expand(self, node: Node) -> str:
        return f"tl.broadcast_to({self.value(node.args[0])}, {list(padded(node.size))})"

    def _iota(self, node: Node) -> str:
        return index(node.size, int(node.size[1] > 1))

    def _reduce(self, node: Node) -> str:
        how, _, along = node.op.partition("_")
        axis = int(along == "columns")
        return f"tl.{how}({self._clean(node.args[0], axis, NEUTRAL[how])}, {axis}, keep_dims=True)"

    _sum_rows = _max_rows = _min_rows = _sum_columns = _max_columns = _min_columns = _reduce

    def _running_sum(self, node: Node) -> str:
        value = self._clean(node.args[0], 1, "0.0")
        return f"tl.cumsum({value}, 1, reverse={node.params['suffix']})"

    def _dot(self, node: Node) -> str:
        (x, y), axes = node.args, (node.params["x"], node.params["y"])
        left, right = self._clean(x, axes[0], "0.0"), self._clean(y, axes[1], "0.0")
        left = left if axes[0] == 1 else f"tl.trans({left})"
        right = right if axes[1] == 0 else f"tl.trans({right})"
        return f"tl.dot({left}, {right}, input_precision='{self._precision}')"

    def _threefry(self, node: Node) -> str:
        if node.args not in self._words:
            words = f"{self._prefix}w{node.number}"
            args = ", ".join(map(self.value, node.args))
            self.lines.append(f"{words}_0, {words}_1 = threefry({args})")
            self._words[node.args] = words
        return f"{self._words[node.args]}_{node.params['at']}"

    def _count_below(self, node: Node) -> str:
        address = self._rows_at(node.args[0])
        if address is None:
            raise NotATile("this kernel has no search in a table that it computes")
        return f"count_below({address[0]}, {self.whole(node.args[1], node.size)}, {address[1]})"

    def _rows_at(self, z: Node) -> tuple[str, str] | None:
        """The addresses of rows in memory, with the distance and number of entries; None if they are
        elsewhere.
        """
        count = z.size[1]
        z = z.args[0] if z.op == "expand" else z
        if z.op != "input" or self._source(z).tile:
            return None
        address, (row, column) = self._address(z)
        address = f"{address} + {index(z.size, 0)} * {row}" if z.size[0] > 1 else address
        return address, f"{column}, {count}"

    def _take(self, node: Node) -> str:
        z, number = node.args[0], self.value(node.args[1])
        if (address := self._rows_at(z)) is not None:
            return f"take({address[0]}, {number}, {address[1]})"
        count = z.size[1]
        rows, columns = padded((node.size[0], count))
        if rows * columns > MOST_TAKEN:
            raise NotATile(
                f"a table of {node.size[0]} × {count} numbers does not fit in shared memory"
            )
        z = z.args[0] if z.op == "expand" else z
        values = self.whole(z, (node.size[0], count), z.kind)
        number = self.whole(node.args[1], node.size, "int")
        return f"take_from({values}, {number}, {count})"

    def _entry(self, node: Node) -> str:
        x, at = node.args[0], node.params["at"]
        if x.op == "input" and not self._source(x).tile:
            return self._read(x, (0, at), node.size)
        chosen = f"tl.where({index(x.size, 1)} == {at}, {self.value(x)}, 0)"
        return f"tl.sum({chosen}, 1, keep_dims=True).to({TYPES[node.kind]})"

    def _view(self, node: Node) -> str:
        x = node.args[0]
        if x.op != "input" or self._source(x).tile:
            raise NotATile("this kernel has no slice of what it computes")
        return self._read(x, node.params["at"], node.size)

    def _concatenate(self, node: Node) -> str:
        text, first, axis = zeros(node.size, node.kind), 0, node.params["axis"]
        for x in node.args:
            if x.size[axis] != 1:
                raise NotATile("this kernel joins only rows or columns")
            text = f"tl.where({index(node.size, axis)} == {first}, {self.value(x)}, {text})"
            first += 1
        return text

    def _collect(self, node: Node) -> str:
        return f"collect({self._collected(node)}, {padded((1, node.size[1]))[1]})"

    _gather_up = _add_rows = _collect

    def _add_table(self, node: Node) -> str:
        return f"tl.sum({self._collect(node)}, 0, keep_dims=True)"

    def _collected(self, node: Node) -> str:
        """The arguments of functions that collect."""
        number, x = node.args
        value = self._clean(x, 1, "0.0")
        return f"{self.value(number)}, {value}, {node.size[1]}, {node.op == 'gather_up'}"

    def _clean(self, node: Node, axis: int, neutral: str) -> str:
        """A node that has a neutral number beyond its size along an axis."""
        value, size = self.value(node), node.size
        read = node.op == "input" and not self._source(node).tile and neutral == "0.0"
        if read or padded(size)[axis] == size[axis]:
            return value
        return f"tl.where({index(size, axis)} < {size[axis]}, {value}, {neutral})"

    def _source(self, node: Node) -> Source:
        return self._sources[node.params["number"]]

    def define(self, by_block: bool, name: str, text: str) -> str:
        """A variable for what is the same for all blocks of keys, or for one of them."""
        if not by_block:
            self._outside[name] = text
        elif f"{name} = {text}" not in self.lines:
            self.lines.append(f"{name} = {text}")
        return name

    def _address(self, node: Node) -> tuple[str, tuple[int, int]]:
        source = self._source(node)
        name = f"at_{source.base.partition(' ')[0]}"
        return self.define(source.by_block, name, source.base), source.strides

    def _read(self, node: Node, at: Sequence[int], size: Size) -> str:
        """Reads some rows and columns of an input."""
        source = self._source(node)
        if source.tile:
            return source.tile
        address, strides = self._address(node)
        first = at[0] * strides[0] + at[1] * strides[1]
        mask = inside(size)
        how = "" if mask == "True" else f", mask={mask}, other=0"
        text = f"tl.load({address} + {first} + {offsets(size, strides)}{how})"
        if node.kind == "bool":
            text = f"{text} != 0"
        if node.kind == "uint":
            text = f"{text}.to(tl.uint32, bitcast=True)"
        name = f"x_{address}_{at[0]}_{at[1]}_{size[0]}_{size[1]}"
        return self.define(source.by_block, name, text)


def terms(node: Node) -> list[Node]:
    """The terms of a sum."""
    return [x for a in node.args for x in terms(a)] if node.op == "add" else [node]


def single_column(node: Node) -> tuple[int, Node] | None:
    """The number and the entries of the only column that is not 0; None if there may be others."""
    if node.op != "select_n" or node.args[0].op != "eq":
        return None
    condition, zero, column = node.args
    numbers, chosen, constant = *condition.args, ("iota", "const", "const")
    if (numbers.op, chosen.op, zero.op) != constant or zero.params["value"] != 0:
        return None
    return (chosen.params["value"], column) if column.size[1] == 1 else None


def collects(node: Node | None) -> bool:
    """Returns whether a node adds to some cells of each row."""
    return node is not None and any(x.op in ("gather_up", "add_rows") for x in terms(node))
