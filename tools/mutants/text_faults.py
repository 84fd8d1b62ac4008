"""Small faults in text: in the C++ of headers, and in the strings of Python that are C++ or Triton."""

import ast
import re
from collections.abc import Iterator

from tools.mutants.faults import Fault

PAIRS = (
    "+/- *// </>= >/<= ==/!= &/| &&/|| <</>> +=/-= ++/-- std::min/std::max low/high 0/1 false/true "
    "tl.minimum/tl.maximum tl.min/tl.max"
)
SWAPS = {
    before: after
    for pair in PAIRS.split()
    for names in [re.split("(?<=.)/(?=.)", pair, maxsplit=1)]
    for before, after in (names, names[::-1])
}
"""The replacements of operators, names and numbers. Other numbers are doubled."""
TOKEN = re.compile(
    r'"(?:\\.|[^"])*"|//.*|\d[\w.]*(?:e[-+]\d+f?)?|[a-zA-Z_][\w:.]*|[-+*/<>=!&|]+', re.ASCII
)


def in_text(text: str) -> Iterator[tuple[int, str, str]]:
    """The places in a line of C++ or Triton, each with the token and its replacement."""
    for match in TOKEN.finditer(text):
        before = match[0]
        after = SWAPS.get(before) or _doubled(before)
        spaced = text[match.start() - 1 : match.start()] == " " == text[match.end() :][:1]
        if after and (spaced or before[0].isalnum() or before in ("++", "--")):
            yield match.start(), before, after


def _doubled(token: str) -> str | None:
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[-+]?\d+)?)(f?)", token)
    if match is None:
        return None
    number = match[1]
    twice = (
        str(2 * int(number))
        if number.isdigit() and not match[2]
        else repr(2 * float(number) or 1.0)
    )
    return twice + match[2]


def places(source: str, path: str) -> Iterator[Fault]:
    """The faults that a header can have, in its order."""
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        if not line.lstrip().startswith(("#", "//", "template", "typedef", "alignas")):
            for column, before, after in in_text(line):
                at = start + len(line[:column].encode())
                stop = at + len(before.encode())
                yield Fault(path, number, number, line.strip(), at, stop, before, after)
        start += len(line.encode())


def emitted(source: str, path: str) -> Iterator[Fault]:
    """The faults that the strings of a file in Python can have, without docstrings and errors."""
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    spared = {n for node in nodes for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        # What a formatted string computes is Python.
        blank = re.sub(r"\{[^{}]+\}", lambda match: "x" * len(match[0]), line)
        texts = re.finditer(r'"((?:[^"\\]|\\.)*)"', blank) if number not in spared else ()
        for text in texts:
            for column, before, after in in_text(text[1]):
                at = start + len(line[: text.start(1) + column].encode())
                stop = at + len(before.encode())
                yield Fault(path, number, number, line.strip(), at, stop, before, after)
        start += len(line.encode())
