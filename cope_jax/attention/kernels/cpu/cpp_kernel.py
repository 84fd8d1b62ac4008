"""Prints a kernel of tile programs as a file in C++: its steps, and the tables that `driver.h` reads."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.kernels.cpu import library
from cope_jax.attention.kernels.cpu.cpp_schedule import Result, Schedule
from cope_jax.attention.kernels.cpu.cpp_text import Step
from cope_jax.attention.kernels.tile.tile_arguments import Argument, is_argument
from cope_jax.attention.kernels.tile.tile_graph import FORMS, Graph, kind_of
from cope_jax.attention.kernels.tile.tile_kernel import TileKernel
from cope_jax.attention.kernels.tile.tile_operations import Forms
from cope_jax.attention.kernels.tile.tile_plan import Programs
from cope_jax.attention.kernels.tile.tile_values import NotATile

STEPS = {"masked": (True, False, 1), "plain": (False, False, 1), "saturated": (False, True, 1)}
MOST = 96  # arguments, as in driver.h
ANSWER = MOST - 1  # the output of a step that asks
MOST_REPEATED = 2  # products that are the same for all blocks of keys, as a multiple of q·k and a·v


@dataclasses.dataclass(frozen=True)
class CpuExecution:
    """Runs kernels as C++.

    Attributes:
      keys: the number of keys.
    """

    keys: int

    @property
    def forms(self) -> Forms:
        return FORMS

    def run(self, kernel: TileKernel, name: str) -> PyTree:
        """Compiles the kernel while it is traced, and calls it."""
        plan = kernel.plan
        try:
            digest = library.load_kernel(CppKernel(kernel).text)
        except library.Unavailable as error:
            raise NotATile(f"{name} {library.UNCOMPILED}: {error}") from None
        written = [x for x, use in zip(kernel.outputs, kernel.written, strict=True) if use]
        shapes = [jax.ShapeDtypeStruct(x.stored_shape, x.spec.dtype) for x in written]
        sizes = np.array([plan.batch, plan.grid[3], plan.keys.k.array.shape[2]], np.int32)
        inputs = [jnp.asarray(sizes), plan.spans.reshape(-1), *map(_given, kernel.inputs)]
        arrays = iter(library.call("Generate", shapes, *inputs, digest=digest))
        results = [
            x.restored(next(arrays)) if use else jnp.zeros(x.array.shape, x.spec.dtype)
            for x, use in zip(kernel.outputs, kernel.written, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(kernel.results, is_leaf=is_argument), results)


def _given(x: Argument) -> Array:
    """An array as C++ reads it; conditions are -1 where true."""
    return -x.stored.astype(jnp.int32) if x.array.dtype == jnp.bool_ else x.stored


class CppKernel:
    """The text of a kernel, in `text`."""

    def __init__(self, kernel: TileKernel):
        self.kernel, plan = kernel, kernel.plan
        self.places = {id(x): n for n, x in enumerate(kernel.inputs)}
        numbers = iter(range(len(kernel.outputs)))
        self.numbers = [next(numbers) if use else None for use in kernel.written]
        self.loop = jax.tree.leaves(kernel.loop, is_leaf=is_argument)
        self.uses: set[int] = set()
        self.reads: set[int] = set()
        self.memory = 0
        for x in kernel.inputs:
            kind_of(x.spec.dtype)
        if len(kernel.inputs) > MOST or len(kernel.outputs) >= ANSWER:
            raise NotATile(f"this kernel has more than {MOST} arguments")
        step_args = jax.tree.leaves((*kernel.args, kernel.loop), is_leaf=is_argument)
        carry = plan.params, kernel.carry(kernel.args, kernel.loop)
        carry_args = jax.tree.leaves(carry, is_leaf=is_argument)
        texts = [
            self._step(name, kernel.steps[key], step_args, self._results)
            for name, key in STEPS.items()
            if key in kernel.steps
        ]
        asks = {name: programs for name, programs in kernel.ask.items() if programs is not None}
        for name, programs in asks.items():
            texts += [
                self._step(f"ask_{name}", programs, carry_args, self._answer),
                self._ask(name),
            ]
        self.text = "\n".join(['#include "driver.h"', "", *texts, *self._tables(asks)])

    def _step(self, name: str, programs: Programs, args: Sequence[Argument], results: Any) -> str:
        given = [x for x, use in zip(args, programs.program.used, strict=True) if use]
        arguments = [*programs.constants, *given]
        graph = Graph(programs.program)
        self._check_products(graph, arguments)
        schedule = Schedule(graph, results(graph, arguments))
        sources = {n: self._source(x) for n, x in enumerate(arguments)}
        turned = {
            n: f"t.turned[{self.places[id(x)]}]"
            for n, x in enumerate(arguments)
            if x.side == "key" and min(x.spec.size) > 1
        }
        step = Step(name, schedule, sources, turned)
        self.uses |= {self.places[id(arguments[n])] for n in step.uses}
        self.reads |= {
            self.places[id(x)]
            for n, x in enumerate(arguments)
            if n in step.reads and id(x) in self.places
        }
        self.memory = max(self.memory, step.memory)
        return step.text

    def _check_products(self, graph: Graph, arguments: Sequence[Argument]) -> None:
        """Refuses programs that would take longer than XLA, which computes once what does not depend on
        the keys.
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
        if repeated > MOST_REPEATED * stream.sizes.queries * stream.sizes.near * widths:
            raise NotATile(
                "for each block of keys, its score multiplies the queries by a long table"
            )

    def _source(self, x: Argument) -> str:
        """The address at which a step reads an argument; what passes from block to block lies in the output."""
        for n, leaf in enumerate(self.loop):
            if leaf is x:
                return f"t.out[{self.numbers[n]}]"
        return f"t.in[{self.places[id(x)]}]"

    def _results(self, graph: Graph, arguments: Sequence[Argument]) -> list[Result]:
        results = []
        inputs = {id(x): node for x, node in zip(arguments, graph.inputs, strict=True)}
        for n, node in enumerate(graph.results):
            x, number = self.kernel.outputs[n], self.numbers[n]
            if number is None:
                continue
            if n < len(self.loop):
                old = inputs.get(id(self.loop[n]))
                node = graph.const(0.0, kind_of(x.spec.dtype)) if node is None else node
                if node is not old:
                    results.append(Result(node, "set", number, x.spec.size, old))
            elif node is not None:
                results.append(Result(node, "add_to", number, x.spec.size))
        return results

    def _answer(self, graph: Graph, arguments: Sequence[Argument]) -> list[Result]:
        node: Any = graph.results[0]
        return [Result(node, "set", ANSWER, (self.kernel.plan.sizes.queries, 1))]

    def _ask(self, name: str) -> str:
        rows = self.kernel.plan.sizes.queries
        return (
            f"static bool is_{name}(Tiles& t, float* memory) {{\n"
            f"  int32_t answer[{rows}];\n"
            f"  t.out[{ANSWER}] = (float*)answer;\n"
            f"  ask_{name}(t, memory);\n"
            f"  return std::all_of(answer, answer + {rows}, [](int32_t x) {{ return x != 0; }});\n"
            "}\n"
        )

    def _argument(self, x: Argument, plain: bool = True, turned: bool = False) -> str:
        batch, heads, _, *size = x.array.shape
        order = ("TOKEN_ROWS", "TOKEN_COLUMNS")[x.along] if x.interleaved else "BY_HEAD"
        flags = [str(flag).lower() for flag in (batch > 1, plain, turned)]
        return "{" + ", ".join(map(str, (x.side.upper(), order, heads, *size, *flags))) + "}"

    def _tables(self, asks: dict[str, Programs]) -> list[str]:
        kernel, plan = self.kernel, self.kernel.plan
        inputs = [
            self._argument(x, n in self.reads, n in self.uses) for n, x in enumerate(kernel.inputs)
        ]
        outputs = []
        for n, x in enumerate(kernel.outputs):
            if self.numbers[n] is None:
                continue
            leaf = self.loop[n] if n < len(self.loop) else None
            how = "TOTAL" if leaf is None else "LOOP"
            start = -1 if leaf is None or leaf.fill is not None else self.places[id(leaf)]
            fill = 0.0 if leaf is None or leaf.fill is None else leaf.fill
            outputs.append(f"{{{self._argument(x)}, {how}, {start}, {fill!r}f}}")
        steps = [name if key in kernel.steps else "nullptr" for name, key in STEPS.items()]
        questions = [f"is_{name}" if name in asks else "nullptr" for name in ("saturated", "done")]
        flags = str(plan.boundary).lower(), str(plan.spans.shape[0] > 1).lower()
        counts = len(inputs), len(outputs), plan.heads, plan.groups, self.memory
        fields = ["inputs", "outputs", *map(str, counts), *flags, *steps, *questions]
        return [
            f"static const Argument inputs[] = {{{', '.join(inputs)}}};",
            f"static const Output outputs[] = {{{', '.join(outputs)}}};",
            f"static const Kernel kernel{{{', '.join(fields)}}};",
            'extern "C" void run_kernel(void* const* in, void* const* out, Parallel parallel, void* threads) {',
            "  run(kernel, in, out, parallel, threads);",
            "}",
            "",
        ]
