"""Prints a kernel of tile programs as C++: its steps, and the tables that `driver.h` reads."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention.kernels.cpu import library
from cope_jax.attention.kernels.cpu.cpp_schedule import Result, Schedule
from cope_jax.attention.kernels.cpu.cpp_text import Growing, Step
from cope_jax.attention.kernels.tile.tile_arguments import Argument, is_argument, leaves_of
from cope_jax.attention.kernels.tile.tile_graph import (
    FORMS,
    Graph,
    Node,
    Size,
    common,
    kind_of,
)
from cope_jax.attention.kernels.tile.tile_kernel import TileKernel
from cope_jax.attention.kernels.tile.tile_operations import Forms
from cope_jax.attention.kernels.tile.tile_plan import Programs
from cope_jax.attention.kernels.tile.tile_program import TileProgram
from cope_jax.attention.kernels.tile.tile_values import NotATile

STEPS = {"masked": (True, False, 1), "plain": (False, False, 1), "saturated": (False, True, 1)}
MOST = 96  # arguments, as in driver.h
ANSWER = MOST - 1  # the output of a step that asks
PART = 64  # the columns of a panel of a table that grows, as in driver.h
# Operations whose results are numbers of their operands, or the negative ones.
SELECTING = frozenset(
    "abs as concatenate entry expand max max_columns max_rows min min_columns min_rows neg select_n "
    "take transpose turn view".split()
)
HIGH, HIGHEST = ((p, (p, p)) for p in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST))
MOST_REPEATED = 2  # products that are the same for all blocks of keys, as a multiple of q·k and a·v


def _load(name: str, text: str) -> None:
    try:
        library.load_kernel(text)
    except library.Unavailable as error:
        raise NotATile(f"{name} {library.UNCOMPILED}: {error}") from None


@dataclasses.dataclass(frozen=True)
class CpuExecution:
    """Runs kernels as C++, which see all keys.

    Attributes:
      tiles: whether products may run on the CPU's matrix unit, see `library.has_tiles`.
      load: compiles and loads a kernel, or begins to; called as `load(name, text)`.
    """

    tiles: bool = False
    load: Callable[[str, str], None] = _load
    keys = 0
    halves = True

    @property
    def forms(self) -> Forms:
        return FORMS

    @contextlib.contextmanager
    def planning(self) -> Iterator["CpuExecution"]:
        """Compiles kernels side by side, while the next one is traced."""
        begun: list[Future[None]] = []
        # On two cores three kernels end sooner side by side than two and then one.
        compilers = ThreadPoolExecutor(library.cores() + 1)

        def load(name: str, text: str) -> None:
            begun.append(compilers.submit(_load, name, text))

        try:
            yield dataclasses.replace(self, load=load)
            for future in begun:
                future.result()
        finally:  # at once, also after Ctrl-C
            compilers.shutdown(wait=False, cancel_futures=True)

    def run(self, kernel: TileKernel, name: str) -> PyTree:
        """Compiles the kernel while it is traced, and calls it."""
        plan = kernel.plan
        cpp = CppKernel(kernel, self.tiles)
        self.load(name, cpp.text)
        digest = library.digest_of(cpp.text)
        shapes = [jax.ShapeDtypeStruct(x.stored_shape, cpp.type_of(x)) for x in cpp.written]
        sizes = np.array([plan.batch, plan.grid[3], plan.keys.k.array.shape[2]], np.int32)
        given = [
            x.stored if n in cpp.halves else _given(x, cpp.real)
            for n, x in enumerate(kernel.inputs)
        ]
        inputs = [jnp.asarray(sizes), plan.spans.reshape(-1), *given]
        arrays = library.call(digest, shapes, *inputs)
        known = {
            id(x): x.restored(y).astype(x.array.dtype)
            for x, y in zip(cpp.written, arrays, strict=True)
        }

        def result(x: Argument) -> Array:
            return known[id(x)] if id(x) in known else jnp.zeros(x.array.shape, x.array.dtype)

        return jax.tree.map(result, cpp.results, is_leaf=is_argument)


class CppGraph(Graph):
    """A graph in which a look-up, of the value and of the slope, is one operation.

    Numbers of type bfloat16 are float32 in memory; operation "bfloat16" rounds them. So are those of
    type float32, by operation "float32", where the kernel computes in float64.

    Args:
      program: the tile program.
      real: "float32" or "float64".
      tiles: whether products may run on the matrix unit, which multiplies bfloat16 and adds float32.
        A factor of float32 is the sum of two parts, see `matrices.h`: next to one of bfloat16, unless
        the precision is "highest", and next to another one only if it is "high".

    Attributes:
      rounded: the nodes whose numbers are exact in the narrower type.
    """

    def __init__(self, program: TileProgram, real: str = "float32", tiles: bool = False):
        self.real, self.tiles = real, tiles
        self.narrow = "bfloat16" if real == "float32" else "float32"
        self.rounded: set[Node] = set()
        super().__init__(program, real)

    def add(self, op: str, args: Sequence[Node], size: Size, kind: str, **params: Any) -> Node:
        low = kind == self.narrow
        if low and op == "convert" and args[0].kind == "float":
            rounded = args[0] in self.rounded
            return args[0] if rounded else self.add(self.narrow, args, size, kind)
        node = super().add(op, args, size, "float" if low else kind, **params)
        if node.kind == "float" and self._is_exact(node, low):
            self.rounded.add(node)
        elif low and node not in self.rounded:
            return self.add(self.narrow, [node], size, kind)
        return node

    def _is_exact(self, node: Node, low: bool) -> bool:
        """Returns whether the numbers of a node of float are exact in the narrower type; `low`: it has
        this type.
        """
        if node.op == "const":
            value = np.asarray(node.params["value"], self.real)
            with np.errstate(over="ignore"):
                return low or value.astype(jnp.dtype(self.narrow)).astype(self.real) == value
        if node.op in SELECTING:
            return all(a in self.rounded for a in node.args if a.kind == "float")
        return low and node.op in ("input", self.narrow)

    def _elementwise(self, op: str, args: Sequence[Node], kind: str) -> Node:
        if op == "div" and kind == self.narrow:
            quotient = super()._elementwise(op, args, "float")
            return self.add("convert", [quotient], quotient.size, kind)
        return super()._elementwise(op, args, kind)

    def how_to_multiply(self, x: Node, y: Node, precision: Any) -> dict[str, Any]:
        parts = tuple(1 if factor in self.rounded else 2 for factor in (x, y))
        allowed = precision in HIGH if parts == (2, 2) else precision not in HIGHEST
        return {"parts": parts if self.tiles and (parts == (1, 1) or allowed) else None}

    def _look_up(self, z: Node, p: Node) -> tuple[Node, Node]:
        size = common([z, p])[0], p.size[1]
        value, slope = (self.add("look_up", [z, p], size, "float", at=n) for n in (0, 1))
        return value, slope


def _is_table(x: Argument) -> bool:
    """Returns whether an array has more than PART columns for each query."""
    return x.side == "query" and x.spec.size[1] > PART


def _wide(dtype: Any, real: str) -> Any:
    """The type in which C++ has an array, next to numbers of type `real`: all are as wide."""
    whole = "int32" if real == "float32" else "int64"
    return jnp.dtype(real if jnp.issubdtype(dtype, jnp.floating) else whole)


def _given(x: Argument, real: str) -> Array:
    """An array as C++ reads it; conditions are -1 where true, and unsigned numbers have a sign."""
    array, dtype = x.stored, x.array.dtype
    if dtype == jnp.bool_:
        array = -array.astype(jnp.int32)
    elif dtype == jnp.uint32:
        array = jax.lax.bitcast_convert_type(array, jnp.int32)
    return array.astype(_wide(dtype, real))


class CppKernel:
    """The text of a kernel, in `text`.

    Attributes:
      results: what it returns: the results of the second half, and what is added up over keys.
      written: those of them that are not 0.
      halves: the numbers of the inputs that lie in memory as bfloat16.
    """

    def __init__(self, kernel: TileKernel, tiles: bool = False):
        self.kernel, plan = kernel, kernel.plan
        self.real = jnp.dtype(accumulator_dtype(plan.stream.queries.q.dtype)).name
        self.tiles, self.multiplies = tiles and self.real == "float32", False
        self.places = kernel.places
        self.results = kernel.halves[1][0].results, kernel.results[2]
        self.loop = leaves_of(kernel.loop)
        self.added = {id(x) for x in kernel.outputs[len(self.loop) :]}
        self.outputs = self._outputs()
        self.numbers = {id(x): n for n, x in enumerate(self.outputs)}
        returned = {id(x) for x in leaves_of(self.results)}
        self.written = [x for x in self.outputs if id(x) in returned]
        self.unfilled: set[int] = set()
        self.uses: set[int] = set()
        self.reads: set[int] = set()
        self.forms: set[tuple[int, str]] = set()
        self.memory = 0
        for x in kernel.inputs:
            kind_of(x.spec.dtype, self.real)
        if len(kernel.inputs) > MOST or len(self.outputs) >= ANSWER:
            raise NotATile(f"this kernel has more than {MOST} arguments")
        carry_args = plan.params, kernel.carry(kernel.args, kernel.loop)
        self.growing: dict[int, Growing] = {}
        self.panels: set[int] = set()
        texts = self._grow()
        for name, (half, programs) in zip(("begin", "end"), kernel.halves, strict=True):
            texts.append(self._step(name, programs, half.args, leaves_of(half.results)))
        for name, key in STEPS.items():
            if key in kernel.steps:
                args = (*kernel.args, kernel.loop)
                texts.append(self._step(name, kernel.steps[key], args, kernel.outputs))
        asks = {name: programs for name, programs in kernel.ask.items() if programs is not None}
        for name, programs in asks.items():
            texts += [self._step(f"ask_{name}", programs, carry_args, None), self._ask(name)]
        self.halves = {
            n
            for n, x in enumerate(kernel.inputs)
            if x.array.dtype == jnp.bfloat16 and n not in self.uses
            if n not in self.reads or x.side != "head"
        }
        define = ["#define DOUBLE"] if self.real == "float64" else []
        includes = [*define, '#include "driver.h"', ""]
        self.text = "\n".join([*includes, *texts, *self._tables(asks)])

    def type_of(self, x: Argument) -> Any:
        """The type in which it writes a result: bfloat16 only where it writes the heads of a token
        side by side, so not of one head.
        """
        halves = self.tiles and x.interleaved and x.array.dtype == jnp.bfloat16
        return jnp.bfloat16 if halves else _wide(x.array.dtype, self.real)

    def _grow(self) -> list[str]:
        """Finds the outputs that grow column by column; returns the functions by which they grow.

        They are tables of the queries: products with wide tables of a head, and sums as wide.
        """
        begin, programs = self.kernel.halves[0]
        arguments = programs.reads(begin.args)
        graph = CppGraph(programs.program, self.real, self.tiles)
        texts = []
        for x, node in zip(leaves_of(begin.results), graph.results, strict=True):
            if node is None or node.op != "dot" or id(x) not in self.numbers or not _is_table(x):
                continue
            factors = [arguments[a.params["number"]] for a in node.args if a.op == "input"]
            sides = [factor.side for factor in factors if factor.given]
            if sides == ["query", "head"] and node.params["x"] == node.params["y"] == 1:
                q, table = (self.places[id(factor)] for factor in factors)
                self.panels.add(table)
                self.uses.add(table)
                self.reads.add(q)
                way = f"product<{', '.join(map(str, node.params['parts'] or (0, 0)))}>"
                texts.append(self._grown(x, way, q, table, factors[0].spec.size[1]))
        returned = {id(x) for x in self.written}
        for x in leaves_of(self.kernel.results[1]):
            if id(x) in self.numbers and id(x) not in returned and _is_table(x):
                texts.append(self._grown(x, "zeros"))
        return texts

    def _grown(self, x: Argument, way: str, *more: int) -> str:
        """The function that adds columns to an output, by `grow_product` or `grow_zeros`."""
        n, (rows, columns) = self.numbers[id(x)], x.spec.size
        # Not a power of 2, so rows do not evict each other.
        distance = -(-columns // PART) * PART + 16
        self.growing[n] = Growing(columns, distance)
        self.unfilled.add(n)
        numbers = ", ".join(map(str, (n, rows, columns, distance, *more)))
        return (
            f"static __attribute__((noinline)) void grow_{n}(Tiles& t, int end) {{\n"
            f"  grow_{way}(t, end, {numbers});\n}}\n"
        )

    def _outputs(self) -> list[Argument]:
        """The arrays that its functions write; of the first half, those that another reads."""
        kernel, (end, programs) = self.kernel, self.kernel.halves[1]
        outputs = [x for x, use in zip(kernel.outputs, kernel.written, strict=True) if use]
        outputs += [x for x in kernel.used if not x.given]
        computed = zip(leaves_of(end.results), programs.program.results, strict=True)
        outputs += [x for x, spec in computed if spec is not None]
        return list({id(x): x for x in outputs}.values())

    def _step(
        self, name: str, programs: Programs, args: PyTree, results: list[Argument] | None
    ) -> str:
        """The text of a function that writes `results`, or an answer."""
        arguments = programs.reads(args)
        graph = CppGraph(programs.program, self.real, self.tiles)
        self.multiplies |= any(node.params.get("parts") for node in graph.nodes)
        if name in STEPS:
            self._check_products(graph, arguments)
        if results is None:
            rows = self.kernel.plan.sizes.queries
            (answer,) = (node for node in graph.results if node is not None)
            outputs = [Result(answer, "set", ANSWER, (rows, 1))]
        else:
            outputs = self._results(graph, arguments, results, half=name not in STEPS)
        schedule = Schedule(graph, outputs, self.growing)
        sources = {n: self._source(x) for n, x in enumerate(arguments)}
        turned = {
            n: f"t.turned[{self.places[id(x)]}]"
            for n, x in enumerate(arguments)
            if x.given
            and min(x.spec.size) > 1
            and (x.side == "key" or (x.side == "head" and x.spec.size[0] <= PART))
        }
        packed = {n: f"t.packed[{self.places[id(x)]}]" for n, x in enumerate(arguments) if x.given}
        step = Step(name, schedule, sources, turned, self.growing, packed)
        self.uses |= {self.places[id(arguments[n])] for n in step.uses}
        self.forms |= {(self.places[id(arguments[n])], form) for n, form in step.forms}
        self.reads |= {
            self.places[id(x)]
            for n, x in enumerate(arguments)
            if n in step.reads and id(x) in self.places
        }
        self.memory = max(self.memory, step.memory)
        return step.text

    def _check_products(self, graph: Graph, arguments: Sequence[Argument]) -> None:
        """Refuses programs that would take longer than XLA, which computes once what does not
        depend on the keys.
        """
        changing = {
            node
            for node, x in zip(graph.inputs, arguments, strict=True)
            if x.side == "key" or any(x is leaf for leaf in self.loop)
        }
        repeated = 0
        for node in graph.nodes:
            if any(a in changing for a in node.args):
                changing.add(node)
            elif node.op == "dot":
                repeated += node.size[0] * node.size[1] * node.args[0].size[node.params["x"]]
        stream = self.kernel.plan.stream
        widths = stream.keys.k.shape[-1] + stream.keys.v.shape[-1]
        near = max(stream.sizes.near, 32)  # so that no length refuses what its neighbours run
        if repeated > MOST_REPEATED * stream.sizes.queries * near * widths:
            raise NotATile(
                "for each block of keys, its score multiplies the queries by a long table"
            )

    def _source(self, x: Argument) -> str | int:
        """The address at which a function reads an argument, or the number of an output."""
        number = self.numbers.get(id(x))
        return f"t.in[{self.places[id(x)]}]" if number is None else number

    def _results(
        self, graph: Graph, arguments: Sequence[Argument], leaves: list[Argument], half: bool
    ) -> list[Result]:
        results = []
        inputs = {id(x): node for x, node in zip(arguments, graph.inputs, strict=True)}
        for x, node in zip(leaves, graph.results, strict=True):
            number, old = self.numbers.get(id(x)), inputs.get(id(x))
            if number is None or (node is None and (half or id(x) in self.added)):
                continue
            if half and id(x) not in self.added:
                self.unfilled.add(number)
                if number in self.growing:
                    continue
            node = graph.const(0.0, "float") if node is None else node
            if id(x) in self.added:
                results.append(Result(node, "add_to", number, x.spec.size))
            elif node is not old:
                results.append(Result(node, "set", number, x.spec.size, old))
        return results

    def _ask(self, name: str) -> str:
        rows = self.kernel.plan.sizes.queries
        return (
            f"static bool is_{name}(Tiles& t, real* memory) {{\n"
            f"  integer answer[{rows}];\n"
            f"  t.out[{ANSWER}] = (real*)answer;\n"
            f"  ask_{name}(t, memory);\n"
            f"  return std::all_of(answer, answer + {rows}, [](integer x) {{ return x != 0; }});\n"
            "}\n"
        )

    def _argument(self, x: Argument, *flags: bool, forms: str = "", halves: bool = False) -> str:
        batch, heads, _, *size = x.array.shape
        if (number := self.numbers.get(id(x))) in self.growing:
            size = [size[0], self.growing[number].distance]
        order = ("TOKEN_ROWS", "TOKEN_COLUMNS")[x.along] if x.interleaved else "BY_HEAD"
        how = [str(flag).lower() for flag in (batch > 1, *(flags or (True, False, False)))]
        how += [forms or "0", str(halves).lower()]
        return "{" + ", ".join(map(str, (x.side.upper(), order, heads, *size, *how))) + "}"

    def _tables(self, asks: dict[str, Programs]) -> list[str]:
        kernel, plan = self.kernel, self.kernel.plan
        inputs = [
            self._argument(
                x,
                n in self.reads,
                n in self.uses,
                n in self.panels,
                forms=" | ".join(f"1 << ({form})" for m, form in sorted(self.forms) if m == n),
                halves=n in self.halves,
            )
            for n, x in enumerate(kernel.inputs)
        ]
        outputs = []
        for n, x in enumerate(self.outputs):
            result = next((m for m, y in enumerate(self.written) if y is x), -1)
            filled = str(n not in self.unfilled).lower()
            halves = result >= 0 and self.type_of(x) == jnp.bfloat16
            fields = (
                self._argument(x, halves=halves),
                str(result),
                filled,
                f"real({x.fill or 0.0!r})",
            )
            outputs.append(f"{{{', '.join(fields)}}}")
        steps = [name if key in kernel.steps else "nullptr" for name, key in STEPS.items()]
        questions = [f"is_{name}" if name in asks else "nullptr" for name in ("saturated", "done")]
        by_example = str(plan.spans.shape[0] > 1).lower()
        pack = "pack_form" if self.multiplies else "nullptr"
        forms = sorted({(form, n in self.halves) for n, form in self.forms})
        packs = [
            f"  if (form == {form} && {'' if halves else '!'}halves) "
            f"pack<{1 + ('+' in form)}, {form.split()[-1]}>"
            f"((const {'uint16_t' if halves else 'float'}*)p, row, rows, columns, to);"
            for form, halves in forms
        ]
        counts = len(inputs), len(outputs), plan.heads, plan.groups, self.memory
        table = [
            "inputs",
            "outputs",
            *map(str, counts),
            by_example,
            pack,
            "begin",
            "end",
            *steps,
            *questions,
        ]
        return [
            "inline void pack_form(int form, bool halves, const void* p, long row, int rows, int columns, Words* to) {",
            *packs,
            "}",
            f"static const Argument inputs[] = {{{', '.join(inputs)}}};",
            f"static const Output outputs[] = {{{', '.join(outputs)}}};",
            f"static const Kernel kernel{{{', '.join(table)}}};",
            'extern "C" void run_kernel(void* const* in, void* const* out, Parallel parallel, void* threads, int n) {',
            "  run(kernel, in, out, parallel, threads, n);",
            "}",
            "",
        ]
