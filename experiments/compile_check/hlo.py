"""Reads the text of a compiled program: computations, instructions, shapes.

The text is XLA's HLO as `jax.stages.Compiled.as_text()` and `Lowered.as_text("hlo")` print it. Only the parts that are
needed for counting are read.
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
        """The shapes that a type names: one, or those of a tuple, flat."""
        return tuple(
            cls(found["type"], tuple(int(size.strip(" <=")) for size in found["sizes"].split(",") if size.strip()))
            for found in _ARRAY.finditer(text)
        )

    @property
    def bytes(self) -> int:
        """The bytes of all entries.

        >>> Shape("bf16", (2, 3)).bytes, Shape("pred", (5,)).bytes, Shape("s4", (4,)).bytes
        (12, 5, 2)
        """
        digits = re.search(r"\d+", self.type)
        if digits is None and self.type not in _BITS:
            raise ValueError(f"unknown number of bits of type {self.type!r}")
        return -(-math.prod(self.sizes) * (int(digits[0]) if digits else _BITS[self.type]) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction."""

    name: str  # unique in its computation
    shapes: tuple[Shape, ...]  # of the result; for a tuple, of all its entries
    opcode: str  # as "dot" or "while"
    arguments: str  # the text between its parentheses
    attributes: str  # the text after them

    @classmethod
    def parse(cls, name: str, text: str) -> "Instruction":
        """The instruction that is written after `name =`."""
        shape, rest = _split(text) if text.startswith("(") else text.split(" ", 1)
        opcode = _OPCODE.match(rest)
        assert opcode is not None, text[:200]
        arguments, attributes = _split(rest[opcode.end() - 1 :])
        return cls(name, Shape.all(shape), opcode["opcode"], arguments[1:-1], attributes)

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it uses."""
        return [] if self.opcode in ("constant", "parameter") else re.findall(r"([\w.\-]+)(?:,|$)", self.arguments)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes; None if it does not match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    def calls(self) -> list[str]:
        """The computations that run as a part of it, without those that only define how to add or compare."""
        singles = re.findall(r"(?:calls|true_computation|false_computation)=%?([\w.\-]+)", self.attributes)
        lists = re.findall(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}", self.attributes)
        if self.opcode == "call":
            singles += re.findall(r"to_apply=%?([\w.\-]+)", self.attributes)
        return [*singles, *(name for names in lists for name in re.findall(r"[\w.\-]+", names))]


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order in which they run; the result of `root` is the computation's result."""

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    def inputs(self, instruction: Instruction) -> list[Shape]:
        """The shapes of an instruction's inputs."""
        return [shape for name in instruction.operands for shape in self[name].shapes]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and the name of the one that runs."""

    computations: Mapping[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    @classmethod
    def parse(cls, text: str) -> "Module":
        """The program that a text describes."""
        computations, entry, current = dict[str, Computation](), "", Computation()
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = computations[header["name"]] = Computation()
                entry = header["name"] if header["entry"] else entry
            elif match := _INSTRUCTION.match(line):
                current.instructions[match["name"]] = Instruction.parse(match["name"], match["rest"])
                current.root = match["name"] if match["root"] else current.root
            elif line.startswith("}"):
                current = Computation()  # the following text is not part of it
        return cls(computations, entry)


def _split(text: str) -> tuple[str, str]:
    """Splits a text that begins with a parenthesis after the one that closes it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: place + 1], text[place + 1 :]
    raise ValueError(f"unclosed parenthesis: {text[:200]}")
