"""Reads the text of a compiled program: computations, instructions, shapes.

The text is XLA's HLO, as from `jax.stages.Compiled.as_text()` or `Lowered.as_text("hlo")`. This
module reads only what is needed to count costs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)")
_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<sizes>[\d,<=\s]*)\]")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The type and sizes of one array."""

    type: str
    sizes: tuple[int, ...]

    @classmethod
    def all(cls, text: str) -> tuple["Shape", ...]:
        """All shapes in the text of a type: one shape, or the shapes of a tuple as a flat sequence."""
        return tuple(
            cls(match["type"], tuple(map(int, re.findall(r"\d+", match["sizes"]))))
            for match in _ARRAY.finditer(text)
        )

    @property
    def bytes(self) -> int:
        """The bytes of all entries.

        >>> Shape("bf16", (2, 3)).bytes, Shape("pred", (5,)).bytes, Shape("s4", (4,)).bytes
        (12, 5, 2)
        """
        digits = re.search(r"\d+", self.type)
        if digits is None and self.type not in _BITS:
            raise ValueError(f"unknown number of bits of type {self.type!r}: add the type to _BITS")
        return -(-math.prod(self.sizes) * (int(digits[0]) if digits else _BITS[self.type]) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str  # unique in its computation
    shapes: tuple[Shape, ...]  # shape of the result, or shapes of all entries of a tuple
    opcode: str  # such as "dot" or "while"
    arguments: str  # the text between the parentheses
    attributes: str  # the text after the parentheses

    @classmethod
    def parse(cls, name: str, text: str) -> "Instruction":
        """Reads the instruction from the text after `name =`."""
        shape, rest = _split(text) if text.startswith("(") else text.split(" ", 1)
        opcode = _OPCODE.match(rest)
        assert opcode is not None, text[:200]
        arguments, attributes = _split(rest[opcode.end() - 1 :])
        return cls(name, Shape.all(shape), opcode["opcode"], arguments[1:-1], attributes)

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the instructions whose results this instruction uses."""
        if self.opcode in ("constant", "parameter"):
            return []
        return re.findall(r"([\w.\-]+)(?:,|$)", self.arguments)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes; None if the expression does
        not match.
        """
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def calls(self) -> list[str]:
        """Names of the computations that this instruction runs, without computations that only add
        or compare.
        """
        single, several = "calls|true_computation|false_computation", "branch_computations"
        single += "|to_apply" if self.opcode == "call" else ""
        names = re.findall(rf"(?:{single})=%?([\w.\-]+)", self.attributes)
        lists = rf"(?:{several}|called_computations|calls)=\{{([^}}]*)\}}"
        return names + re.findall(r"[\w.\-]+", " ".join(re.findall(lists, self.attributes)))


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order in which they run.

    The result of `root` is the computation's result.
    """

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    def inputs(self, instruction: Instruction) -> list[Shape]:
        """The shapes of an instruction's inputs."""
        return [shape for name in instruction.operands for shape in self[name].shapes]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and the name of its main computation, the
    entry.
    """

    computations: Mapping[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Reads a program from its text."""
        computations, entry, current = dict[str, Computation](), "", Computation()
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = computations[header["name"]] = Computation()
                entry = header["name"] if header["entry"] else entry
            elif match := _INSTRUCTION.match(line):
                name = match["name"]
                current.instructions[name] = Instruction.parse(name, match["rest"])
                current.root = match["name"] if match["root"] else current.root
            elif line.startswith("}"):
                current = Computation()  # the text that follows is not part of a computation
        return cls(computations, entry)


def _split(text: str) -> tuple[str, str]:
    """Splits a text that begins with "(", right after the matching ")"."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    raise ValueError(f"unclosed parenthesis: give the complete program, not {text[:200]!r}")
