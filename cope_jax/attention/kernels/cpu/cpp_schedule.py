"""The order in which C++ computes the graph of a tile program, and what it keeps in memory.

A step is a list of stages. Even stages are loops over rows; odd ones are products and other
operations on entire tiles. A loop over rows has passes: within a pass, the columns are visited once,
from left to right or from right to left, so running sums and all that they depend on are one loop. A
sum along the columns ends a pass. Only values that a later pass or stage reads are stored.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from cope_jax.attention.kernels.tile.tile_graph import COLLECTING, Graph, Node, Size

WHOLE = frozenset(("dot", "transpose", "turn", "view", "concatenate"))
OVER_COLUMNS = frozenset(("sum_columns", "max_columns", "min_columns", "entry"))
OVER_ROWS = frozenset(("sum_rows", "max_rows", "min_rows"))
# What is computed again rather than stored, if it depends on little.
CHEAP = frozenset("add and eq expand ge gt iota le lt ne not or select_n sub".split())
DEEPEST = 3
TABLES = frozenset(("count_below", "look_up", "take"))  # their first operand lies in memory
TILE, ROW = "tile", "row"


class Result(NamedTuple):
    """A result of a step.

    Attributes:
      node: its value.
      how: "set" replaces the output, "add_to" adds to it.
      output: the number of the output.
      size: the size of the output.
      old: the input that reads this output; None if the step does not read it.
    """

    node: Node
    how: str
    output: int
    size: Size
    old: Node | None = None


class Group(NamedTuple):
    """A loop over `rows` rows in an even stage."""

    stage: int
    rows: int


class Schedule:
    """The order of computation of one step, and what it keeps in memory.

    Attributes:
      order: the operations, each after what it depends on.
      stage: the stage of each operation.
      groups: the operations of each loop over rows.
      passes: the pass of each operation in a loop over rows.
      direction: "down" or "up" for each (group, pass, columns) with a running sum.
      kept: `TILE` for what later stages read, `ROW` for what later passes of the row read.
      into: the number of the output that an operation writes itself.
      added: operations that add to what they write.
      scaled: operations that multiply an output by a number of each row.
      skipped: results that need no copy, as an operation writes the output.
    """

    def __init__(self, graph: Graph, results: Sequence[Result], growing: Collection[int] = ()):
        self.growing = growing
        sinks = [
            Node(len(graph.nodes) + n, r.how, (r.node,), r.size, r.node.kind, {"output": r.output})
            for n, r in enumerate(results)
        ]
        self.order = _rounded_in_tiles(_with_sums_of_products(_needed(sinks)))
        self.users: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in self.order:
            for a in node.args:
                self.users[a].append(node)
        self.into: dict[Node, int] = {}
        self.added = {node for node in self.order if node.op == "dot" and len(node.args) == 3}
        self.skipped: set[Node] = set()
        self.scaled: set[Node] = set()
        self.stage: dict[Node, int] = {}
        for node in self.order:
            self.stage[node] = self._stage_of(node)
        old = {r.output: r.old for r in results}
        for node in self.order:
            if node.op in ("set", "add_to"):
                self._write_at_once(node, old[node.params["output"]])
        self.groups: dict[Group, list[Node]] = collections.defaultdict(list)
        for node in self.order:
            if (group := self.group(node)) is not None:
                self.groups[group].append(node)
        self.passes: dict[Node, int] = {}
        self.direction: dict[tuple[Group, int, int], str] = {}
        for group, nodes in self.groups.items():
            for node in nodes:
                self._place(group, node)
        self.depth: dict[Node, int] = {}
        for node in self.order:
            self.depth[node] = self._depth_of(node)
        self.kept: dict[Node, str] = {}
        for node in self.order:
            for position, a in enumerate(node.args):
                self._keep(node, position, a)

    def group(self, node: Node) -> Group | None:
        """The loop over rows that computes a node; None for leaves and operations on entire tiles."""
        if node.leaf or node.op in WHOLE:
            return None
        return Group(self.stage[node], rows_of(node))

    def cheap(self, node: Node) -> bool:
        """Returns whether a node is computed again instead of stored."""
        return node.full and self.depth.get(node, DEEPEST + 1) <= DEEPEST

    def in_memory(self, node: Node, reader: Group | None) -> bool:
        """Returns whether a node lies in memory for an operation of the group `reader`."""
        return node.op == "input" or (not node.leaf and self.group(node) != reader)

    def _stage_of(self, node: Node) -> int:
        if node.leaf:
            return 0
        if node.op in WHOLE:
            return max((self._after(a) for a in node.args if not a.leaf), default=1)
        return max((self._earliest(node, a) for a in node.args if not a.leaf), default=0)

    def _after(self, a: Node) -> int:
        return self.stage[a] + (1 if self.stage[a] % 2 == 0 else 2)

    def _earliest(self, node: Node, a: Node) -> int:
        stage = self.stage[a]
        if stage % 2:
            return stage + 1
        if rows_of(a) != a.size[0]:  # complete after all rows
            return stage + 2
        # The loop with one row comes first.
        return stage if rows_of(a) in (1, rows_of(node)) else stage + 2

    def _write_at_once(self, sink: Node, old: Node | None) -> None:
        """Lets an operation write the output itself, where this is right."""
        (node,), output = sink.args, sink.params["output"]
        alone = self.users[node] == [sink] and node.size == sink.size
        if sink.op == "set" and old is None:
            self.into[sink] = output  # nothing here reads the output
            if alone and node.op == "dot" and len(node.args) < 3:
                self.into[node] = output
                self.skipped.add(sink)
            return
        if not alone:
            return
        if sink.op == "add_to":
            kinds = {"gather_up"} if output in self.growing else {"dot", "sum_rows"} | COLLECTING
            if node.op in kinds and len(node.args) < 3:
                self.into[node] = output
                self.added.add(node)
                self.skipped.add(sink)
            return
        # old·x, or old·x plus a product, in the place of old.
        scaled = node.args[2] if node.op == "dot" and len(node.args) == 3 else node
        alone = old is not None and all(user is scaled for user in self.users[old])
        if alone and scaled.op == "mul" and scaled.full and scaled.size == sink.size:
            if old in scaled.args and self.users[scaled] in ([node], [sink]):
                self.scaled.add(scaled)
                self.into[node] = self.into[scaled] = output
                self.skipped.add(sink)

    def _place(self, group: Group, node: Node) -> None:
        number = 0
        for position, a in enumerate(node.args):
            if self.group(a) == group:
                table = node.op in TABLES and position == 0
                ends = a.op in OVER_COLUMNS and a.args[0].full and not self.direct(a)
                # Two short loops are faster than one: more of their columns are computed at once.
                apart = node.op == "look_up" and position == 1
                later = ends or table or apart or a.op in COLLECTING
                number = max(number, self.passes[a] + later)
        if node.op == "running_sum" and node.full:
            way = "down" if node.params["suffix"] else "up"
            while self.direction.get((group, number, node.size[1]), way) != way:
                number += 1
            self.direction[group, number, node.size[1]] = way
        self.passes[node] = number

    def direct(self, node: Node) -> bool:
        """Returns whether a node is an entry of what lies in memory."""
        return node.op == "entry" and self.in_memory(node.args[0], self.group(node))

    def _depth_of(self, node: Node) -> int:
        if node.leaf or not node.full:
            return 0
        if node.op not in CHEAP or self.stage[node] % 2:
            return DEEPEST + 1
        if any(not a.leaf and self.group(a) != self.group(node) for a in node.args):
            return DEEPEST + 1
        return 1 + max((self.depth[a] for a in node.args), default=0)

    def _keep(self, node: Node, position: int, a: Node) -> None:
        """Notes that `node` reads `a`."""
        if a.leaf or a.op in WHOLE:
            return
        group, reader = self.group(a), self.group(node)
        if reader != group:
            same_rows = reader is not None and group is not None and reader.rows == group.rows
            if self.cheap(a) and same_rows and not (node.op in TABLES and position == 0):
                for operand in a.args:  # computed again, from its own operands
                    self._keep(node, -1, operand)
            else:
                self.kept[a] = TILE
        elif a.full and (
            self.passes[a] != self.passes[node] or (node.op in TABLES and not position)
        ):
            if self.cheap(a) and not (node.op in TABLES and position == 0):
                for operand in a.args:
                    self._keep(node, -1, operand)
            else:
                self.kept.setdefault(a, ROW)


def rows_of(node: Node) -> int:
    """The number of rows of the loop that computes a node."""
    return node.args[0].size[0] if node.op in OVER_ROWS | COLLECTING else node.size[0]


def _needed(sinks: Sequence[Node]) -> list[Node]:
    """The nodes that the sinks depend on, in the order of computation."""
    seen, stack = set(), list(sinks)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.args
    return sorted(seen, key=lambda node: node.number)


def _with_sums_of_products(order: Iterable[Node]) -> list[Node]:
    """Makes x + A·B one operation on A, B and x, if nothing else reads A·B and x."""
    nodes = list(order)
    uses = collections.Counter(a for node in nodes for a in node.args)
    new: dict[Node, Node] = {}
    dropped: set[Node] = set()
    for node in nodes:
        args = tuple(new[a] for a in node.args)
        changed = node if args == node.args else dataclasses.replace(node, args=args)
        for dot, x in (
            ((node.args[:2]), (node.args[1::-1])) if node.op == "add" and node.full else ()
        ):
            single = uses[dot] == uses[x] == 1 and dot.size == x.size == node.size
            if single and dot.op == "dot" and x.op == "mul":
                product = new[dot]
                changed = dataclasses.replace(
                    product, number=node.number, args=(*product.args, new[x])
                )
                dropped.add(product)
                break
        new[node] = changed
    return [node for node in new.values() if node not in dropped]


def _rounded_in_tiles(order: Iterable[Node]) -> list[Node]:
    """Drops roundings to bfloat16 of what only products on tiles read: packing rounds too."""
    nodes = list(order)
    readers = collections.defaultdict(set)
    for node in nodes:
        for position, a in enumerate(node.args):
            parts = (node.op == "dot" and node.params["parts"]) or ()
            readers[a].add(parts[position] if position < len(parts) else None)
    new: dict[Node, Node] = {}
    for node in nodes:
        args = tuple(new[a] for a in node.args)
        if node.op == "bfloat16" and readers[node] == {1}:
            new[node] = args[0]
        else:
            new[node] = node if args == node.args else dataclasses.replace(node, args=args)
    return list(dict.fromkeys(new.values()))
