"""The statements of the two kernels of `triton_kernel`: softmax, masks, segments, windows and groups of
heads are in the tile programs and their spans, so these know only loops and addresses.
"""

from collections.abc import Sequence
from typing import Any

from cope_jax.array_types import PyTree
from cope_jax.attention.kernels.gpu.triton_text import (
    Body,
    Source,
    collects,
    inside,
    offsets,
    zeros,
)
from cope_jax.attention.kernels.tile.tile_arguments import Argument, leaves_of
from cope_jax.attention.kernels.tile.tile_graph import Graph, kind_of
from cope_jax.attention.kernels.tile.tile_kernel import TileKernel
from cope_jax.attention.kernels.tile.tile_plan import Programs

PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H100
MASKED, PLAIN, SATURATED = (True, False, 1), (False, False, 1), (False, True, 1)
PREFIXES = {MASKED: "m", PLAIN: "u", SATURATED: "t", "saturated": "a", "done": "d"}
Printed = tuple[int, str, list[str]]  # how many programs, the arguments, the statements


class TritonPrograms:
    """A `TileKernel` as text.

    Names in the text: b, h and g are the example, the head and the key head; s, n and c the block of
    queries, the block of keys and the chunk of keys; `p` inputs, `q` results, `o` their values.

    Attributes:
      loop: the arguments that pass from block to block.
      totals, on_keys: the numbers of the other results of the first and of the second kernel.
      in_memory: the numbers of those totals that are in memory, as only some of their cells change.
      strips: the number of blocks of queries.
      chunk, chunks: the blocks of keys of a chunk, and the number of chunks.
    """

    def __init__(self, kernel: TileKernel, precision: str):
        self.kernel, self.plan, self.precision = kernel, kernel.plan, precision
        self.loop = leaves_of(kernel.loop)
        by_key: dict[Any, Programs | None] = {**kernel.steps, **kernel.ask}
        self.graphs = {key: Graph(x.program) for key, x in by_key.items() if x is not None}
        first, last = kernel.counts[0], sum(kernel.counts[:2])
        written = [n for n, use in enumerate(kernel.written) if use]
        self.totals = [n for n in written if first <= n < last]
        self.on_keys = [n for n in written if n >= last]
        steps = [self.graphs[key] for key in kernel.steps]
        self.in_memory = [
            n
            for n in self.totals
            if kernel.outputs[n].side == "query" and any(collects(g.results[n]) for g in steps)
        ]
        self.strips, blocks = self.plan.grid[3], self.plan.keys.k.array.shape[2]
        most = max(1, PROGRAMS // (self.plan.batch * self.plan.groups)) if self.loop else blocks
        self.chunk = -(-blocks // min(most, blocks))
        self.chunks = -(-blocks // self.chunk)

    def of_queries(self) -> Printed:
        """The kernel of blocks of queries. Of a head, those with most keys start first."""
        plan, strips, outside = self.plan, self.strips, dict[str, str]()
        loop, results = range(len(self.loop)), [*range(len(self.loop)), *self.totals]
        begins = f"if (n == end - 1) | (n % {self.chunk} == {self.chunk - 1}):"
        states = [_store(self._state(n, f"n // {self.chunk}"), self.loop[n], n) for n in loop]
        before = [begins, *indented(states)] if self.on_keys and self.loop else []
        visit = self._visit(outside, self.totals, before)
        in_tiles = [n for n in results if n not in self.in_memory]
        lines = [
            f"item = tl.program_id(0) // {strips}",
            f"s = ({strips - 1} - tl.program_id(0) % {strips}).to(tl.int64)",
            f"b, h = (item // {plan.heads}).to(tl.int64), (item % {plan.heads}).to(tl.int64)",
            f"g = h // {plan.heads // plan.groups}",
            *self._span(),
            "n = end - 1",
            *_definitions(outside),
            *(self._start(n) for n in in_tiles),
            *visit,
            *(self._write(n) for n in in_tiles),
        ]
        states = []
        if self.on_keys:
            lines.append(f"tl.store({self._end()}, n + 1)")
            states = ["ends", *(f"c{n}" for n in loop)]
        arguments = self._arguments(["spans"], results, states)
        return plan.batch * plan.heads * strips, arguments, lines

    def of_keys(self) -> Printed:
        """The kernel of chunks of keys.

        Where nothing passes from block to block, a chunk is a block, whose sums are variables.
        """
        plan, outside, chunks = self.plan, dict[str, str](), self.chunks
        repeats = plan.heads // plan.groups
        of_heads = [self.kernel.outputs[n].array.shape[1] == plan.heads > 1 for n in self.on_keys]
        start: dict[bool, list[str]] = {True: [], False: []}
        finish: dict[bool, list[str]] = {True: ["n = c"], False: ["n = c"]}
        if self.loop:
            visit = self._visit(outside, self.on_keys, [])
            states = [_load(self._state(n, "c"), x, n) for n, x in enumerate(self.loop)]
            of_strip = [
                *self._span(),
                f"first = tl.maximum(tl.load({self._end()}), c * {self.chunk})",
                f"n = tl.minimum(end, (c + 1) * {self.chunk}) - 1",
                "if n >= first:",
                *indented([*_definitions(outside), *states, *visit]),
            ]
        else:
            step = self._step(MASKED, outside, self.on_keys)
            of_strip = ["n = c", *_definitions(outside), *step]
            for n, by_head in zip(self.on_keys, of_heads, strict=True):
                start[by_head].append(self._start(n))
                finish[by_head].append(self._write(n))
        of_head = [
            f"h = g * {repeats} + r",
            *start[True],
            "for s in range(low, high):",
            *indented(of_strip),
            *finish[True],
        ]
        lines = [
            f"item = tl.program_id(0) // {chunks}",
            f"c = (tl.program_id(0) % {chunks}).to(tl.int64)",
            f"b, g = (item // {plan.groups}).to(tl.int64), (item % {plan.groups}).to(tl.int64)",
            f"strips = strips_of_chunks + ({self._example()} * {chunks} + c) * 2",
            "low, high = tl.load(strips).to(tl.int64), tl.load(strips + 1).to(tl.int64)",
            *start[False],
            f"for r in range({repeats}):",
            *indented(of_head),
            *finish[False],
        ]
        states = ["ends", *(f"c{n}" for n in range(len(self.loop)))]
        arguments = self._arguments(["spans", "strips_of_chunks", *states], self.on_keys, [])
        return plan.batch * plan.groups * chunks, arguments, lines

    def _visit(
        self, outside: dict[str, str], results: Sequence[int], before: Sequence[str]
    ) -> list[str]:
        """Visits the blocks n … first of keys as `streaming_softmax.over_blocks` does; `before` is
        done before each.
        """
        asked = {name: self._ask(name, outside) for name in ("saturated", "done")}
        lines = [
            *asked["done"],
            "near = tl.where((n >= full) & (full < full_end), tl.maximum(first, full_end), first)",
            "inner = tl.maximum(first, full)",
        ]

        def loop(to: str, key: Any, *names: str) -> None:
            step = [*before, *self._step(key, outside, results), "n -= 1"]
            questions = [name for name in names if asked[name]]
            # Triton overlaps iterations of `for` with loads, but not with loads that need a product.
            if questions or any("take(" in line for line in step):
                conditions = "".join(f" & ({name} == 0)" for name in questions)
                step += [line for name in questions for line in asked[name]]
                head = f"while (n >= {to}){conditions}:"
            else:
                head = f"for _ in range(n + 1 - {to}):"
            lines.extend([head, *indented(step)])

        loop("near", MASKED, "done")
        lines.extend(asked["saturated"])
        loop("inner", PLAIN, "saturated", "done")
        if SATURATED in self.kernel.steps:
            loop("inner", SATURATED, "done")
        if self.plan.boundary:
            loop("first", MASKED, "done")
        return lines

    def _step(self, key: Any, outside: dict[str, str], results: Sequence[int]) -> list[str]:
        """Adds a block of keys to the loop and to these results."""
        kernel, names, values = self.kernel, list[str](), list[str]()
        body = self._body(key, kernel.steps[key], (*kernel.args, kernel.loop), outside)
        for n in (*range(len(self.loop)), *results):
            x, node = kernel.outputs[n], self.graphs[key].results[n]
            if n < len(self.loop):
                value = body.whole(node, x.spec.size, kind_of(x.spec.dtype))
            elif node is None:
                continue
            elif n in self.in_memory or (n in self.on_keys and self.loop):
                address, strides = self._address(x, f"q{n}")
                name = body.define(x.side == "key", f"to_q{n}", address)
                body.add_to(name, strides, node, x.spec.size)
                continue
            else:
                value = f"o{n} + {body.whole(node, x.spec.size)}"
            if value != f"o{n}":
                names.append(f"o{n}")
                values.append(value)
        return [*body.lines, f"{', '.join(names)} = {', '.join(values)}"] if names else body.lines

    def _ask(self, name: str, outside: dict[str, str]) -> list[str]:
        """Computes whether all rows are `saturated` or `done`; no line if no row ever is."""
        programs = self.kernel.ask[name]
        if programs is None:
            return []
        args = (self.plan.params, self.kernel.carry(self.kernel.args, self.kernel.loop))
        body = self._body(name, programs, args, outside)
        rows = body.whole(self.graphs[name].results[0], (self.plan.sizes.queries, 1), "bool")
        return [*body.lines, f"{name} = every({rows})"]

    def _body(self, key: Any, programs: Programs, args: PyTree, outside: dict[str, str]) -> Body:
        sources = [self._source(x) for x in programs.reads(args)]
        return Body(PREFIXES[key], sources, outside, self.precision)

    def _source(self, x: Argument) -> Source:
        for n, leaf in enumerate(self.loop):
            if leaf is x:
                return Source(tile=f"o{n}")
        return Source("", *self._address(x, f"p{self.kernel.places[id(x)]}"), x.side == "key")

    # Addresses.

    def _address(self, x: Argument, name: str) -> tuple[str, tuple[int, int]]:
        """The address of the block of a program, and the distances of rows and of columns."""
        block = {"query": "s", "key": "n", "head": "0"}[x.side]
        (heads, blocks), (rows, columns) = x.array.shape[1:3], x.spec.size
        head = "0" if heads == 1 else "h" if heads == self.plan.heads else "g"
        example = "b" if x.array.shape[0] > 1 else "0"
        if x.interleaved:
            _, tokens, _, width = x.stored_shape
            size = x.spec.size[x.along]
            at = f"(({example} * {tokens} + {block} * {size}) * {heads} + {head}) * {width}"
            return f"{name} + {at}", (heads * width, 1) if x.along == 0 else (1, heads * width)
        if x.side == "head" and name[0] == "q":  # a share of each block of queries
            block, blocks = "s", self.strips
        at = f"(({example} * {heads} + {head}) * {blocks} + {block}) * {rows * columns}"
        return f"{name} + {at}", (columns, 1)

    def _state(self, n: int, chunk: str) -> tuple[str, tuple[int, int]]:
        rows, columns = self.loop[n].spec.size
        at = f"((b * {self.plan.heads} + h) * {self.strips} + s) * {self.chunks} + {chunk}"
        return f"c{n} + ({at}) * {rows * columns}", (columns, 1)

    def _end(self) -> str:
        return f"ends + (b * {self.plan.heads} + h) * {self.strips} + s"

    def _example(self) -> str:
        return "b" if self.plan.spans.shape[0] > 1 else "0"

    def _span(self) -> list[str]:
        names = ("first", "end", "full", "full_end")
        return [
            f"span = spans + ({self._example()} * {self.strips} + s) * 4",
            *(f"{name} = tl.load(span + {n}).to(tl.int64)" for n, name in enumerate(names)),
        ]

    def _start(self, n: int) -> str:
        """The value of a variable before the first block of keys."""
        x, leaf = self.kernel.outputs[n], self.loop[n] if n < len(self.loop) else None
        if leaf is not None and leaf.fill is None:
            return _load(self._address(leaf, f"p{self.kernel.places[id(leaf)]}"), leaf, n)
        fill = 0.0 if leaf is None or leaf.fill is None else leaf.fill
        return f"o{n} = {zeros(x.spec.size, kind_of(x.spec.dtype), fill)}"

    def _write(self, n: int) -> str:
        x = self.kernel.outputs[n]
        return _store(self._address(x, f"q{n}"), x, n)

    def _arguments(self, first: Sequence[str], results: Sequence[int], last: Sequence[str]) -> str:
        inputs = (f"p{n}" for n in range(len(self.kernel.inputs)))
        return ", ".join([*first, *inputs, *(f"q{n}" for n in results), *last])


def _load(address: tuple[str, tuple[int, int]], x: Argument, n: int) -> str:
    size = x.spec.size
    return f"o{n} = tl.load({address[0]} + {offsets(size, address[1])}, mask={inside(size)})"


def _store(address: tuple[str, tuple[int, int]], x: Argument, n: int) -> str:
    size = x.spec.size
    return f"tl.store({address[0]} + {offsets(size, address[1])}, o{n}, mask={inside(size)})"


def _definitions(variables: dict[str, str]) -> list[str]:
    return [f"{name} = {text}" for name, text in variables.items()]


def indented(lines: Sequence[str]) -> list[str]:
    """Statements in a loop or under a condition."""
    return [f"    {line}" for line in lines]
