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
FOLDERS = (
    "encodings",
    "attention",
    "ops",
    "layers",
    "models",
    "exchange",
    "training",
    "generation",
    "evaluation",
)
# A module that imports one of these shows figures, and computes none.
DRAWING = {"matplotlib", "rich"}
# Calls of these only say something.
MESSAGES = {"print", "warn", "info", "debug", "warning", "error", "log"}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "logical_and", "logical_or", "allclose", "equal"}
NO_TESTS_OF = {"__repr__", "__str__", "__rich__"}

OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
PAIRS = "min/max minimum/maximum floor/ceil argmin/argmax any/all zeros/ones zeros_like/ones_like sin/cos sum/mean"
PAIRS += (
    " logical_and/logical_or cumsum/cumprod tril/triu exp/expm1 log/log1p first/last append/remove"
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
        imports = [
            node
            for node in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        if DRAWING.isdisjoint(name.split(".")[0] for name in names):
            places += faults(path.read_bytes(), str(path.relative_to(root)))
    generator = random.Random(seed)
    generator.shuffle(places)
    chosen = (generator.choice(faults_here) for faults_here in places)
    return list(
        itertools.islice(
            (fault for fault in chosen if fault.is_one((root / fault.path).read_bytes())), count
        )
    )


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
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self.expression(default, "default")
        for inner in body:
            self.statement(inner)

    def statement(self, node: ast.stmt) -> None:
        parts = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.ExceptHandler)
        ]
        cases = [case.pattern for case in node.cases] if isinstance(node, ast.Match) else []
        inner = min((stmt.lineno for stmt in [*parts, *cases]), default=math.inf)
        self.span = (
            node.lineno,
            max(node.lineno, int(min(inner - 1, node.end_lineno or node.lineno))),
        )
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
                if (
                    not isinstance(target, ast.Name | ast.Tuple)
                    or getattr(target, "id", None) in names
                ):
                    self.offer(node, "statement", ["pass"])
            case ast.AugAssign(op=op):
                others = [_changed(node, op=new()) for new in OPERATORS.get(type(op), ())]
                self.offer(node, "arithmetic", [*others, "pass"])
            case ast.Return(value=ast.expr()):
                self.offer(node, "return", ["return None"])
            case ast.If(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
                self.offer(test, "condition", [ast.UnaryOp(ast.Not(), test)])
        for name, field in ast.iter_fields(node):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.expr | ast.withitem) and name not in (
                    "annotation",
                    "target",
                    "targets",
                ):
                    self.expression(child, "constant")
        for child in ast.iter_child_nodes(node):
            for stmt in (
                child.body if isinstance(child, ast.ExceptHandler | ast.match_case) else [child]
            ):
                if isinstance(stmt, ast.stmt):
                    self.statement(stmt)

    def expression(self, node: Any, kind: str) -> None:
        match node:
            case ast.JoinedStr():
                return
            case ast.Constant(value=bool(value)):
                self.offer(node, kind, [repr(not value)])
            case ast.Constant(value=int(value)):
                self.offer(
                    node,
                    kind,
                    [repr(value + 1), f"({value - 1})" if value < 1 else repr(value - 1)],
                )
            case ast.Constant(value=float(value)) if math.isfinite(value):
                self.offer(node, kind, [repr(2 * value or 1.0)])
            case ast.Compare(ops=[op, *others]):
                self.offer(
                    node,
                    "comparison",
                    [_changed(node, ops=[new(), *others]) for new in OPERATORS[type(op)]],
                )
            case ast.BinOp(op=op) if not any(_is_text(side) for side in (node.left, node.right)):
                self.offer(
                    node,
                    "arithmetic",
                    [_changed(node, op=new()) for new in OPERATORS.get(type(op), ())],
                )
            case ast.BoolOp(op=op):
                self.offer(
                    node, "boolean", [_changed(node, op=new()) for new in OPERATORS[type(op)]]
                )
            case ast.UnaryOp(op=op, operand=operand):
                self.offer(
                    node, "dropped sign" if isinstance(op, ast.USub) else "dropped not", [operand]
                )
            case ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
                self.offer(test, "condition", [ast.UnaryOp(ast.Not(), test)])
            case ast.Call(func=ast.Name(id="isinstance"), args=args):
                return self.expression(args[0], kind)
            case ast.Call(func=func, args=args):
                if other := NAMES.get(_name(func)):
                    self.offer(
                        func,
                        "function",
                        [_changed(func, **{"id" if isinstance(func, ast.Name) else "attr": other})],
                    )
                if _name(func) not in COMMUTATIVE and not any(
                    isinstance(arg, ast.Starred) for arg in args
                ):
                    alike = [
                        i
                        for i in range(len(args) - 1)
                        if type(args[i]) is type(args[i + 1]) and not _is_text(args[i])
                    ]
                    swaps = [[*args[:i], args[i + 1], args[i], *args[i + 2 :]] for i in alike]
                    self.offer(node, "arguments", [_changed(node, args=swap) for swap in swaps])
            case ast.Subscript():
                kind = "index"
            case ast.keyword():
                kind = "keyword"
            case ast.Lambda(args=arguments, body=body):
                for default in (*arguments.defaults, *arguments.kw_defaults):
                    self.expression(default, "default")
                return self.expression(body, kind)
        for child in ast.iter_child_nodes(node) if node is not None else ():
            self.expression(child, kind)

    def offer(self, node: Any, kind: str, after: Sequence[ast.AST | str]) -> None:
        start = self.lines[node.lineno - 1] + node.col_offset
        stop = self.lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(self.source[start:stop].decode().split())
        texts = [text if isinstance(text, str) else ast.unparse(text) for text in after]
        if (
            isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp)
            or kind == "condition"
        ):
            texts = [f"({text})" for text in texts]
        if texts:
            self.places.append(
                [Fault(self.path, *self.span, kind, start, stop, before, text) for text in texts]
            )


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _changed(node: Any, **fields: Any) -> Any:
    return type(node)(**{**{name: getattr(node, name) for name in node._fields}, **fields})


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
