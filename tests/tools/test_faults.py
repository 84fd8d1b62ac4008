import ast
import types
from pathlib import Path

import pytest

from tools.mutants.faults import draw, faults
from tools.mutants.generated import wrapped
from tools.mutants.text_faults import emitted, places

ROOT = Path(__file__).parents[2]
SOURCE = b'''
def f(x: int = 3, *, axis: "2" = -1) -> "a < b":
    """A docstring with 1 < 2 and not 3."""
    y: list[int] = [x + 1]
    if x < 2 and not y:
        raise ValueError(f"{x + 1} is less than {2}")
    print(x - 5)
    return max(y[0], axis)
'''


def test_what_is_changed_and_what_is_not():
    changes = {
        (fault.before, fault.after)
        for faults_here in faults(SOURCE, "f.py")
        for fault in faults_here
    }
    expected = {
        ("3", "4"),
        ("-1", "(1)"),
        ("x + 1", "(x - 1)"),
        ("x < 2", "(x <= 2)"),
        ("x < 2 and not y", "(x < 2 or not y)"),
        ("not y", "(y)"),
        ('raise ValueError(f"{x + 1} is less than {2}")', "pass"),
        ("max", "min"),
        ("0", "1"),
        ("return max(y[0], axis)", "return None"),
    }
    assert expected <= changes
    assert not any(text in before for before, _ in changes for text in ("5", "docstring", "list"))


HEADER = """#include "a + b.h"
template <int n = 2>
INLINE float f(float* x, float y) {  // y < 3
  for (int i = 0; i < n; i++) y += x[i] * -2.5f;
  return y == 0.f ? std::min(y, x[0]) : y;
}
"""


def test_what_is_changed_in_a_header():
    changes = [(fault.first, fault.before, fault.after) for fault in places(HEADER, "f.h")]
    of_line = [(4, "0", "1"), (4, "<", ">="), (4, "++", "--"), (4, "+=", "-="), (4, "*", "/")]
    of_line.append((4, "2.5f", "5.0f"))
    last = [(5, "==", "!="), (5, "0.f", "1.0f"), (5, "std::min", "std::max"), (5, "0", "1")]
    assert changes == of_line + last
    source = HEADER.encode()
    changed = next(fault for fault in places(HEADER, "f.h") if fault.before == "2.5f").apply(source)
    assert changed == source.replace(b"2.5f", b"5.0f")


PRINTER = '''
"""A docstring with 1 < 2."""
NAMES = {"add": "+"}


def text(n):
    """Another with 1 + 2."""
    if n < 3:
        raise ValueError("not 4 > 5")
    return f"for (int i = 0; i < {n + 1}; i++) ü = {n} * 2.5f;", "tl.min(a)"
'''


def test_what_is_changed_in_the_text_that_is_emitted():
    given = [*emitted(PRINTER, "f.py")]
    of_line = [("0", "1"), ("<", ">="), ("++", "--"), ("*", "/"), ("2.5f", "5.0f")]
    assert [(fault.before, fault.after) for fault in given] == [*of_line, ("tl.min", "tl.max")]
    assert {fault.first for fault in given} == {10}
    source = PRINTER.encode()
    assert given[4].apply(source) == source.replace(b"2.5f", b"5.0f")


def test_an_operation_is_negated_where_its_text_is_returned(tmp_path):
    path = tmp_path / "cope_jax/attention/kernels/cpu/cpp_formulas.py"
    path.parent.mkdir(parents=True)
    source = "def formula(node, args):\n    return f'{node.op}({args})'\n"
    path.write_text(source)
    negated = "'-' + text if node.op == 'exp' else text"
    module = types.ModuleType("printer")
    exec(wrapped(tmp_path, "cpu", "exp", negated).apply(source.encode()), vars(module))
    assert module.formula(types.SimpleNamespace(op="exp"), 1) == "-exp(1)"
    assert module.formula(types.SimpleNamespace(op="log"), 1) == "log(1)"


@pytest.mark.slow
def test_every_fault_compiles_and_changes_code_alone():
    for fault in draw(ROOT, 20, seed=0):
        source = (ROOT / fault.path).read_bytes()
        old, new = ast.parse(source), ast.parse(fault.apply(source))
        compile(new, fault.path, "exec")
        assert ast.dump(old) != ast.dump(new)
        assert _documented(old) == _documented(new)


def _documented(tree):
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    notes = [
        ast.unparse(n.annotation)
        for n in ast.walk(tree)
        if isinstance(n, ast.arg | ast.AnnAssign) and n.annotation
    ]
    return [ast.get_docstring(function) for function in functions], notes
