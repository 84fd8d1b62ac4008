"""Small faults in the functions of the library: a changed operator, constant, argument, condition
or statement.
"""

import ast
import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "cope_jax"
FOLDERS = tuple(
    "encodings attention ops layers models exchange training generation evaluation".split()
)
# A module that imports one of these shows figures, and computes none.
DRAWING = {"matplotlib", "rich"}
# Calls of these only say something.
MESSAGES = {"print", "warn", "info", "debug", "warning", "error", "log"}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "logical_and", "logical_or", "allclose", "equal"}
NO_TESTS_OF = {"__repr__", "__str__", "__rich__"}

OPERATORS = {
    old: new.split(",")
    for old, _, new in (
        pair.partition(":")
        for pair in (
            "Lt:LtE,Gt LtE:Lt,GtE Gt:GtE,Lt GtE:Gt,LtE Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is "
            "In:NotIn NotIn:In Add:Sub Sub:Add Mult:Div Div:Mult FloorDiv:Mult Mod:FloorDiv "
            "Pow:Mult BitAnd:BitOr BitOr:BitAnd And:Or Or:And"
        ).split()
    )
}
"""By the name of an operator in `ast`, the operators that may take its place."""
PAIRS = (
    "min/max minimum/maximum floor/ceil argmin/argmax any/all zeros/ones zeros_like/ones_like "
    "sin/cos sum/mean logical_and/logical_or cumsum/cumprod tril/triu exp/expm1 log/log1p "
    "first/last append/remove"
)
NAMES = {a: b for pair in PAIRS.split() for a, b in (pair.split("/"), pair.split("/")[::-1])}


@dataclasses.dataclass(frozen=True)
class Fault:
    """In the file `path`, the bytes from `start` to `stop` become `after`.

    Whoever executes one of the lines from `first` to `last`, those of the statement, may notice.
    """

    path: str
    first: int
    last: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.first}: {self.kind}: {self.before} -> {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.stop :]

    def is_one(self, source: bytes) -> bool:
        """True if the changed text is Python with another meaning."""
        try:
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Random places of the library, and at each of them a random fault."""
    places: list[list[Fault]] = []
    for path in sorted(
        path for folder in FOLDERS for path in (root / PACKAGE / folder).rglob("*.py")
    ):
        source = path.read_bytes()
        nodes = [*ast.walk(ast.parse(source))]
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        if DRAWING.isdisjoint(name.split(".")[0] for name in names):
            places += faults(source, str(path.relative_to(root)))
    generator = random.Random(seed)
    generator.shuffle(places)
    chosen = (generator.choice(faults_here) for faults_here in places)
    real = (fault for fault in chosen if fault.is_one((root / fault.path).read_bytes()))
    return list(itertools.islice(real, count))


def faults(source: bytes, path: str) -> list[list[Fault]]:
    """The places of a file that can be changed, and the faults that each can have."""
    finder = _Finder(source, path)
    finder.scope(ast.parse(source).body)
    return finder.places


class _Finder:
    def __init__(self, source: bytes, path: str):
        self.source, self.path, self.places = source, path, list[list[Fault]]()
        self.lines = [0, *(offset + 1 for offset, byte in enumerate(source) if byte == ord("\n"))]
        self.span = (0, 0)  # of the statement

    def scope(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                self.function(node)
            elif isinstance(node, ast.ClassDef):
                self.scope(node.body)

    def function(self, node: ast.FunctionDef) -> None:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if node.name in NO_TESTS_OF or not body:
            return
        self.span = (body[0].lineno, body[0].lineno)
        self.defaults(node.args)
        for inner in body:
            self.statement(inner)

    def statement(self, node: ast.stmt) -> None:
        inner = [
            getattr(child, "pattern", child).lineno
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)
        ]
        last = min([line - 1 for line in inner] or [node.end_lineno or node.lineno])
        self.span = (node.lineno, max(node.lineno, last))
        match node:
            case ast.FunctionDef():
                return self.function(node)
            case ast.Assert() | ast.ClassDef() | ast.Expr(value=ast.Constant() | ast.Yield()):
                return
            case ast.Expr(value=ast.Call(func=func)) if _name(func) in MESSAGES:
                return
            case ast.Raise():  # what it says is nobody's concern
                return self.offer(node, "statement", ["pass"])
            case ast.Expr() | ast.Break() | ast.Continue() | ast.Delete():
                self.offer(node, "statement", ["pass"])
            case ast.Assign(targets=[target], value=value):
                names = [stmt.id for stmt in ast.walk(value) if isinstance(stmt, ast.Name)]
                whole = isinstance(target, ast.Name | ast.Tuple)
                if not whole or getattr(target, "id", None) in names:
                    self.offer(node, "statement", ["pass"])
            case ast.AugAssign(op=op):
                others = [_changed(node, op=other) for other in _others(op)]
                self.offer(node, "arithmetic", [*others, "pass"])
            case ast.Return(value=ast.expr()):
                self.offer(node, "return", ["return None"])
            case ast.If(test=test):
                self.condition(test)
        for name, field in ast.iter_fields(node):
            if name not in ("annotation", "target", "targets"):
                for child in field if isinstance(field, list) else [field]:
                    if isinstance(child, ast.expr | ast.withitem):
                        self.expression(child, "constant")
        for child in ast.iter_child_nodes(node):
            nested = isinstance(child, ast.ExceptHandler | ast.match_case)
            for stmt in child.body if nested else [child]:
                if isinstance(stmt, ast.stmt):
                    self.statement(stmt)

    def expression(self, node: Any, kind: str) -> None:
        match node:
            case ast.JoinedStr():
                return
            case ast.Constant(value=bool(value)):
                self.offer(node, kind, [repr(not value)])
            case ast.Constant(value=int(value)):
                less = f"({value - 1})" if value < 1 else repr(value - 1)
                self.offer(node, kind, [repr(value + 1), less])
            case ast.Constant(value=float(value)) if math.isfinite(value):
                self.offer(node, kind, [repr(2 * value or 1.0)])
            case ast.Compare(ops=[op, *others]):
                self.swap(node, "comparison", "ops", [[other, *others] for other in _others(op)])
            case ast.BinOp(op=op) if not (_is_text(node.left) or _is_text(node.right)):
                self.swap(node, "arithmetic", "op", _others(op))
            case ast.BoolOp(op=op):
                self.swap(node, "boolean", "op", _others(op))
            case ast.UnaryOp(op=op, operand=operand):
                name = "dropped sign" if isinstance(op, ast.USub) else "dropped not"
                self.offer(node, name, [operand])
            case ast.IfExp(test=test):
                self.condition(test)
            case ast.Call(func=ast.Name(id="isinstance"), args=args):
                return self.expression(args[0], kind)
            case ast.Call(func=func, args=args):
                if other := NAMES.get(_name(func)):
                    name = "id" if isinstance(func, ast.Name) else "attr"
                    self.swap(func, "function", name, [other])
                starred = any(isinstance(arg, ast.Starred) for arg in args)
                if _name(func) not in COMMUTATIVE and not starred:
                    swaps = [
                        [*args[:i], second, first, *args[i + 2 :]]
                        for i, (first, second) in enumerate(itertools.pairwise(args))
                        if type(first) is type(second) and not _is_text(first)
                    ]
                    self.swap(node, "arguments", "args", swaps)
            case ast.Subscript():
                kind = "index"
            case ast.keyword():
                kind = "keyword"
            case ast.Lambda(args=arguments, body=body):
                self.defaults(arguments)
                return self.expression(body, kind)
        for child in ast.iter_child_nodes(node):
            self.expression(child, kind)

    def defaults(self, arguments: ast.arguments) -> None:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.expression(default, "default")

    def condition(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):
            self.offer(test, "condition", [ast.UnaryOp(ast.Not(), test)])

    def swap(self, node: Any, kind: str, field: str, values: Sequence[Any]) -> None:
        self.offer(node, kind, [_changed(node, **{field: value}) for value in values])

    def offer(self, node: Any, kind: str, after: Sequence[ast.AST | str]) -> None:
        start = self.lines[node.lineno - 1] + node.col_offset
        stop = self.lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(self.source[start:stop].decode().split())
        texts = [text if isinstance(text, str) else ast.unparse(text) for text in after]
        operation = isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp)
        if operation or kind == "condition":
            texts = [f"({text})" for text in texts]
        where = (self.path, *self.span, kind, start, stop, before)
        if texts:
            self.places.append([Fault(*where, text) for text in texts])


def _others(operator: ast.AST) -> list[ast.AST]:
    """The operators that may take the place of one."""
    return [getattr(ast, name)() for name in OPERATORS.get(type(operator).__name__, ())]


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _changed(node: Any, **fields: Any) -> Any:
    return type(node)(**{**{name: getattr(node, name) for name in node._fields}, **fields})


def _is_text(node: ast.AST) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)
