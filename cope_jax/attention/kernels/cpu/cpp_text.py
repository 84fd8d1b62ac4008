"""Prints a scheduled step of a tile program as a function in C++.

`tiles.h` has the functions that the text calls, for vectors and for single numbers, so that one text
serves every CPU and every width.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cope_jax.attention.kernels.cpu.cpp_formulas import area, c_type, formula, literal
from cope_jax.attention.kernels.cpu.cpp_schedule import OVER_ROWS, TILE, WHOLE, Group, Schedule
from cope_jax.attention.kernels.tile.tile_graph import COLLECTING, Node

START = {"sum": "real(0)", "max": "real(-INFINITY)", "min": "real(INFINITY)"}
ALIGNMENT = 16  # numbers
READING = ("count_below", "take")  # functions of a row's table and of something of each pair
SUMS_ROWS = ("RIGHT", "LEFT_TURNED")  # forms of factors whose rows a product sums


class Growing(NamedTuple):
    """The columns of an output that grows, and how many numbers a row is from the next one."""

    columns: int
    distance: int


class Step:
    """The text of one step.

    Args:
      name: of the function.
      schedule: the order of its operations.
      sources: for each input of the program, the C++ expression of its address, or the number of the
        output that it reads.
      turned: for inputs that also lie transposed in memory, that expression.
      packed: for inputs that also lie in memory as tiles, the expression of those of all forms.
      growing: for outputs that grow column by column, the numbers of columns, and of those from row to
        row.

    Attributes:
      text: the function `name(Tiles& t, real* memory)`.
      memory: how many numbers it needs at `memory`.
      uses: the numbers of the inputs of which it reads the transposed form.
      reads: the numbers of the inputs that it reads as they are.
      forms: the numbers of the inputs of which it reads tiles, each with the form, see `matrices.h`.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        sources: Mapping[int, str | int],
        turned: dict[int, str],
        growing: Mapping[int, Growing] | None = None,
        packed: Mapping[int, str] | None = None,
    ):
        self.schedule, self.turned, self.growing = schedule, turned, growing or {}
        self.packed = packed or {}
        self.forms: set[tuple[int, str]] = set()
        self._packs: dict[tuple[Node, int, str, str], str] = {}
        self._pairs: set[str] = set()  # what the current loop looked up
        self.memory = 0
        self.uses: set[int] = set()
        self._lines: list[str] = []
        self._address: dict[Node, tuple[str, int]] = {}  # and the distance of rows
        self._grows: dict[Node, int] = {}
        self._names: dict[Node, str] = {}  # of single numbers of the current row
        declared = self._memory(sources)
        for stage in sorted(set(schedule.stage.values())):
            if stage % 2:
                for node in schedule.order:
                    if node.op in WHOLE and schedule.stage[node] == stage:
                        self._whole(node)
            groups = (group for group in schedule.groups if group.stage == stage)
            for group in sorted(groups, key=lambda group: group.rows):
                self._rows(group)
        copies = [
            f"std::memcpy(t.out[{n.params['output']}], {self._address[n][0]}, {area(n)} * sizeof(real));"
            for n in schedule.order
            if n.op == "set" and n not in schedule.skipped and n not in schedule.into
        ]
        read = set(re.findall(r"\bi\d+\b", "\n".join(self._lines)))
        self.reads = {n.params["number"] for n in schedule.order if n.op == "input"}
        self.reads = {number for number in self.reads if f"i{number}" in read}
        grown = [
            f"if (t.known[{n}] < {self.growing[n].columns}) grow_{n}(t, {self.growing[n].columns});"
            for n in sorted(self._needed_entirely())
        ]
        lines = [*declared, *grown, *self._lines, *copies]
        body = "\n".join(f"  {line}" for line in lines)
        self.text = f"static void {name}(Tiles& t, real* memory) {{\n{body}\n}}\n"

    def _needed_entirely(self) -> set[int]:
        """The outputs that grow, of which this function needs all columns."""
        schedule, entire = self.schedule, set()
        for node in schedule.order:
            if node in schedule.skipped:
                continue
            for position, a in enumerate(node.args):
                by_column = node.op == "look_up" or (
                    node.op == "dot" and (node.params["x"] == 1 or node in schedule.added)
                )
                if a in self._grows and (position or not by_column):
                    entire.add(self._grows[a])
            output = schedule.into.get(node, node.params.get("output"))
            if output is not None and output in self.growing and node.op != "gather_up":
                entire.add(output)
        return entire

    def _need(self, node: Node) -> str:
        """The last argument of a function that reads or writes some columns."""
        n = self._grows.get(node)
        if n is None:
            return ""
        return f", [&](int end) {{ if (end > t.known[{n}]) grow_{n}(t, end); }}"

    def _memory(self, sources: Mapping[int, str | int]) -> list[str]:
        """Declares the addresses of all that lies in memory."""
        lines, schedule = [], self.schedule
        outputs: set[int] = set()

        def space(node: Node) -> None:
            address = f"b{node.number}"
            kind = c_type(node)
            lines.append(f"{kind}* __restrict {address} = ({kind}*)(memory + {self.memory});")
            self.memory += -(-area(node) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
            self._address[node] = address, node.size[1]

        for node in schedule.order:
            if node.op == "input":
                kind, number = c_type(node), node.params["number"]
                source, distance = sources[number], node.size[1]
                if isinstance(source, int):
                    if source in self.growing:
                        self._grows[node] = source
                        distance = self.growing[source].distance
                    source = f"t.out[{source}]"
                lines.append(f"const {kind}* i{number} = (const {kind}*){source};")
                self._address[node] = f"i{number}", distance
            elif node in schedule.into:
                output = schedule.into[node]
                if output not in outputs:
                    kind = c_type(node)
                    lines.append(f"{kind}* o{output} = ({kind}*)t.out[{output}];")
                    outputs.add(output)
                self._address[node] = f"o{output}", node.size[1]
                if output in self.growing:
                    self._grows[node] = output
                    self._address[node] = f"o{output}", self.growing[output].distance
        for node in schedule.order:
            if node.op == "dot" and len(node.args) == 3 and node not in schedule.into:
                space(node)
                self._address[node.args[2]] = self._address[node]
        for node in schedule.order:
            if node in self._address or node.leaf or node in schedule.skipped:
                continue
            if node.op == "turn":
                self._address[node] = self._address[node.args[0]][0], node.size[1]
            elif node.op == "view":
                base, distance = self._address[node.args[0]]
                first, column = node.params["at"]
                self._address[node] = f"({base} + {first * distance + column})", distance
            elif (
                node.op in {"set"} | WHOLE | OVER_ROWS | COLLECTING
                or schedule.kept.get(node) == TILE
            ):
                space(node)
        return lines

    def _write(self, line: str) -> None:
        self._lines.append(line)

    def _row(self, node: Node) -> str:
        """The address of the current row."""
        if node not in self._address:
            return f"r{node.number}"
        address, distance = self._address[node]
        return f"({address} + r * {distance})" if node.size[0] > 1 else address

    def _scalar(self, node: Node) -> str:
        """The number of a node with one column in the current row."""
        if node.op == "const":
            return literal(node)
        return self._names.get(node) or f"{self._row(node)}[0]"

    # Operations on entire tiles.

    def _whole(self, node: Node) -> None:
        if node.op == "concatenate":
            self._concatenate(node)
        elif node.op == "transpose":
            (x,), to = node.args, self._address[node][0]
            address, distance = self._address[x]
            self._write(
                f"transpose({address}, {distance}, {x.size[0]}, {x.size[1]}, {to}, {x.size[0]});"
            )
        elif node.op == "dot":
            self._product(node)

    def _concatenate(self, node: Node) -> None:
        at, axis, to = 0, node.params["axis"], self._address[node][0]
        for x in node.args:
            first = at * (node.size[1] if axis == 0 else 1)
            if x.op == "const":
                source = literal(x)
            else:
                address, distance = self._address[x]
                source = f"{address}[i * {distance} + j]"
            self._write(
                f"for (int i = 0; i < {x.size[0]}; i++) for (int j = 0; j < {x.size[1]}; j++) "
                f"{to}[{first} + i * {node.size[1]} + j] = {source};"
            )
            at += x.size[axis]

    def _product(self, node: Node) -> None:
        x, y = node.args[:2]
        add, parts = str(node in self.schedule.added).lower(), node.params["parts"]
        to = self._address[node][0]
        (rows, columns), summed = map(str, node.size), str(x.size[node.params["x"]])
        if x in self._grows:
            known = f"t.known[{self._grows[x]}]"
            rows, summed = (rows, known) if node.params["x"] == 1 else (known, summed)
        if parts:
            left_form = "LEFT" if node.params["x"] == 1 else "LEFT_TURNED"
            right_form = "RIGHT_TURNED" if node.params["y"] == 1 else "RIGHT"
            left = self._packed(x, parts[0], left_form, summed, rows)
            right = self._packed(y, parts[1], right_form, summed, columns)
            given = f"{add}, {rows}, {columns}, {summed}, {left}, {right}, {to}, {columns}"
            self._write(f"tile_product<{parts[0]}, {parts[1]}>({given});")
            return
        left, distance = self._address[x]
        strides = f"{distance}, 1" if node.params["x"] == 1 else f"1, {distance}"
        right, distance = self._address[y]
        if node.params["y"] == 1:
            number = y.params.get("number") if y.op == "input" else None
            if number in self.turned:
                right = self.turned[number]
                self.uses.add(number)
            else:
                address = f"(memory + {self.memory})"
                self.memory += -(-area(y) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
                self._write(
                    f"transpose({right}, {distance}, {y.size[0]}, {y.size[1]}, {address}, {y.size[0]});"
                )
                right = address
            distance = y.size[0]
        factors = f"{{{left}, {strides}}}, {right}, {distance}, {to}"
        self._write(f"product<{columns}, {add}>({rows}, {summed}, {factors});")

    def _packed(self, node: Node, parts: int, form: str, summed: str, others: str) -> str:
        """The address of a factor that is packed for tiles, in `parts` parts.

        A product sums `summed` of its rows or columns, and keeps `others`.
        """
        number: Any = node.params.get("number") if node.op == "input" else None
        most = node.size if form in SUMS_ROWS else node.size[::-1]
        if number in self.packed and (summed, others) == (str(most[0]), str(most[1])):  # entirely
            self.forms.add((number, form := f"TWO_PARTS + {form}" if parts > 1 else form))
            return f"{self.packed[number]}[{form}]"
        key = node, parts, form, summed
        if key not in self._packs or node in self._grows:
            address, distance = self._address[node]
            rows, columns = (summed, others) if form in SUMS_ROWS else (others, summed)
            self._packs[key] = f"(Words*)(memory + {self.memory})"
            self.memory += parts * -(-most[0] // 32) * 16 * -(-most[1] // 16) * 16
            given = f"{address}, {distance}, {rows}, {columns}, {self._packs[key]}"
            self._write(f"pack<{parts}, {form}>({given});")
        return self._packs[key]

    # Loops over rows.

    def _rows(self, group: Group) -> None:
        nodes, schedule = self.schedule.groups[group], self.schedule
        for node in nodes:
            if node.op in OVER_ROWS | COLLECTING and node not in schedule.into:
                start = START[node.op[:3]] if node.op in OVER_ROWS else "real(0)"
                self._write(f"std::fill_n({self._address[node][0]}, {area(node)}, {start});")
            if node.full and node in schedule.kept and node not in self._address:
                kind = c_type(node)
                self._write(f"alignas(64) {kind} r{node.number}[{-(-node.size[1] // 16) * 16}];")
        self._write(f"for (int r = 0; r < {group.rows}; r++) {{")
        self._names = {}
        for number in range(max(schedule.passes[node] for node in nodes) + 1):
            now = [node for node in nodes if schedule.passes[node] == number]
            looping = [node for node in now if self._in_loop(node)]
            for node in now:
                if node not in looping:
                    self._single(node)
            scaled = [node for node in looping if node in schedule.scaled]  # often by 1: not at all
            for together in (scaled, [node for node in looping if node not in scaled]):
                for width in sorted({_columns(node) for node in together}):
                    way = schedule.direction.get((group, number, width), "down")
                    same = [node for node in together if _columns(node) == width]
                    self._columns(group, number, width, same, way)
        self._write("}")

    def _in_loop(self, node: Node) -> bool:
        if node.op in OVER_ROWS | COLLECTING:
            return True
        if node.op.endswith("_columns") or node.op == "entry":
            return node.args[0].full and not self.schedule.direct(node)
        return node.full

    def _single(self, node: Node) -> None:
        """Computes one number of a row."""
        if node in self.schedule.skipped:
            return
        args = [self._scalar(a) if not a.full else "" for a in node.args]
        if node.op in READING:
            value = f"{node.op}<1>({self._row(node.args[0])}, {node.args[0].size[1]}, {args[1]})"
        elif node.op == "look_up":
            value = self._found(node, args[1], 1)
        elif node.op == "iota":
            value = "r" if node.size[0] > 1 else "0"
        elif self.schedule.direct(node):
            value = f"{self._row(node.args[0])}[{node.params['at']}]"
        elif node.op in ("running_sum", "entry") or node.op.endswith("_columns"):
            value = args[0]
        elif node.op == "add_to":
            row = "r" if node.size[0] > 1 else "0"
            self._write(f"  t.out[{node.params['output']}][{row}] += {args[0]};")
            return
        else:
            value = formula(node, args)
        if node.op == "set":
            self._write(f"  {self._row(node)}[0] = {value};")
            return
        self._write(f"  const {c_type(node)} v{node.number} = {value};")
        self._names[node] = f"v{node.number}"
        if self.schedule.kept.get(node) == TILE:
            self._write(f"  {self._row(node)}[0] = v{node.number};")

    def _columns(self, group: Group, number: int, width: int, nodes: list[Node], way: str) -> None:
        """Visits the columns once."""
        schedule, outside = self.schedule, self._lines
        begin: list[str] = []
        end: list[str] = []
        hoisted: dict[Node, str] = {}
        known: dict[Node, str] = {}
        self._lines, self._pairs = [], set()

        def value(node: Node) -> str:
            if node in known:
                return known[node]
            if node.op == "const":
                return f"all<{width}>({literal(node)})"
            if not node.full:
                if node not in hoisted:
                    hoisted[node] = f"h{node.number}"
                    begin.append(f"const auto h{node.number} = all<{width}>({self._scalar(node)});")
                return hoisted[node]
            if node.op == "iota":
                text = f"indices<{width}>(c)"
            elif schedule.group(node) == group and schedule.passes[node] == number:
                text = self._value(node, value, width)
            elif node in schedule.kept or (schedule.in_memory(node, group) and not again(node)):
                text = f"at<{width}>({self._row(node)} + c)"
            else:
                text = self._value(node, value, width)
            self._write(f"    const auto v{node.number} = {text};")
            known[node] = f"v{node.number}"
            return known[node]

        def again(node: Node) -> bool:
            return not node.leaf and node.op not in WHOLE and schedule.cheap(node)

        for node in nodes:
            label = node.number
            if node in schedule.skipped:
                continue
            if node.op.endswith("_columns"):
                how, x = node.op[:3], value(node.args[0])
                begin.append(f"auto a{label} = all<{width}>({START[how]});")
                self._write(
                    f"    a{label} = {f'a{label} + {x}' if how == 'sum' else f'{how}_of(a{label}, {x})'};"
                )
                end.append(f"v{label} = {how}_of_lanes(a{label});")
            elif node.op == "entry":
                x, at = value(node.args[0]), node.params["at"]
                self._write(
                    f"    if (holds<{width}>(c, {at})) v{label} = lane<{width}>({x}, {at});"
                )
            elif node.op in OVER_ROWS:
                to, x = self._address[node][0], value(node.args[0])
                old = f"at<{width}>({to} + c)"
                new = f"{old} + {x}" if node.op == "sum_rows" else f"{node.op[:3]}_of({old}, {x})"
                self._write(f"    store({to} + c, {new});")
            elif node.op in COLLECTING:
                index, x = (value(a) for a in node.args)
                add = "add_hats" if node.op == "gather_up" else "add_entries"
                given = f"{self._row(node)}, {node.size[1]}, {index}, {x}{self._need(node)}"
                self._write(f"    {add}({given});")
            elif node.op == "add_to":
                output = node.params["output"]
                apart = self.growing[output].distance if output in self.growing else width
                to = f"t.out[{output}] + {f'r * {apart} + ' if node.size[0] > 1 else ''}c"
                self._write(f"    store({to}, at<{width}>({to}) + {value(node.args[0])});")
            elif node.op == "set":
                self._write(f"    store({self._row(node)} + c, {value(node.args[0])});")
            elif node in schedule.kept or node in self._address or not schedule.cheap(node):
                if node.op == "running_sum":
                    begin.append(f"real c{label} = 0;")
                x = value(node)
                if node in schedule.kept or node in self._address:
                    self._write(f"    store({self._row(node)} + c, {x});")
        inner, self._lines = self._lines, outside
        if not inner:
            return
        for node in nodes:
            if node.op.endswith("_columns") or node.op == "entry":
                self._write(f"  {c_type(node)} v{node.number}{{}};")
                self._names[node] = f"v{node.number}"
        condition = self._is_needed(nodes)
        head = (
            f"for (int c = {width} - step<{width}>; c >= 0; c -= step<{width}>)"
            if way == "down"
            else f"for (int c = 0; c < {width}; c += step<{width}>)"
        )
        self._lines += [f"  {condition}{{", *(f"    {line}" for line in begin)]
        self._lines += [f"    UNROLL {head} {{", *(f"  {line}" for line in inner), "    }"]
        self._lines += [*(f"    {line}" for line in end), "  }"]
        for node in nodes:
            if schedule.kept.get(node) == TILE and node in self._names:
                self._write(f"  {self._row(node)}[0] = {self._names[node]};")

    def _is_needed(self, nodes: list[Node]) -> str:
        """The condition under which a loop changes anything: x·1 in the place of x does not."""
        factors = []
        for node in nodes:
            if node in self.schedule.skipped:
                continue
            numbers = [a for a in node.args if not a.full]
            if node.op != "mul" or node not in self.schedule.into or len(numbers) != 1:
                return ""
            factors.append(f"{self._scalar(numbers[0])} != 1.f")
        return f"if ({' || '.join(factors)}) " if factors else ""

    def _value(self, node: Node, value: Callable[[Node], str], width: int) -> str:
        if node.op in READING:
            z, x = node.args
            return f"{node.op}<{width}>({self._row(z)}, {z.size[1]}, {value(x)})"
        if node.op == "look_up":
            return self._found(node, value(node.args[1]), width)
        args = [value(a) for a in node.args]
        if node.op == "running_sum":
            way = "suffix" if node.params["suffix"] else "prefix"
            return f"{way}_sums({args[0]}, c{node.number})"
        return formula(node, args)

    def _found(self, node: Node, position: str, width: int) -> str:
        """The value of a row's table at a position, or its slope there."""
        z = node.args[0]
        pair = f"{self._row(z)}, {z.size[1]}, {position}{self._need(z)}"
        name = f"f{z.number}_{node.args[1].number}"
        if name not in self._pairs:
            self._write(f"    const auto {name} = look_up<{width}>({pair});")
            self._pairs.add(name)
        return f"{name}.{('value', 'slope')[node.params['at']]}"


def _columns(node: Node) -> int:
    """The columns that an operation visits."""
    inner = node.op.endswith("_columns") or node.op in {"entry"} | OVER_ROWS | COLLECTING
    return node.args[0].size[1] if inner else node.size[1]
