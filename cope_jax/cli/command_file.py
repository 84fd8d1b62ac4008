"""Finds the commands, and runs the file of one up to its flags, so that help and mistakes need no
JAX.

A command imports what it needs at its top, as every module does. `load` imports at once what the
flags use; what only functions use follows when the flags are right.
"""

import __future__

import ast
import pkgutil
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import CodeType, ModuleType

COMMANDS = Path(__file__).parents[1] / "commands"
"""The folder of the commands: each is a module with `main`."""
MORE = (
    "cope-jax list shows all commands, configs, grids, encodings, tasks, models and trained models."
)


def command_names() -> tuple[str, ...]:
    """The names of all commands."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(COMMANDS)])))


def overview() -> str:
    """All commands, with one line for each."""
    return f"cope-jax NAME FLAGS runs a command:\n\n{', '.join(command_names())}\n\n{MORE}"


def load(name: str) -> tuple[ModuleType, Callable[[], None]]:
    """Runs the file of a command, without the imports that only functions use.

    Returns:
      The module, and a function that runs these imports; call it before a function of the module.
    """
    path = COMMANDS / f"{name}.py"
    body: list[ast.stmt] = []
    imports: list[ast.Import | ast.ImportFrom] = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            imports += [ast.Import([alias]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]
        else:
            body.append(node)

    def code(statements: list[ast.stmt]) -> CodeType:
        # Annotations stay text, as they may name what is not imported yet.
        module = ast.fix_missing_locations(ast.Module(statements, []))
        return compile(module, path, "exec", __future__.annotations.compiler_flag)

    flags = code(body)
    first: list[ast.stmt] = []
    later: list[ast.stmt] = []
    for node in imports:
        bound = node.names[0].asname or node.names[0].name.partition(".")[0]
        (first if bound in flags.co_names else later).append(node)
    module_name = f"{__package__.rpartition('.')[0]}.commands.{name}"
    spec = util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = sys.modules[module_name] = util.module_from_spec(spec)
    for statements in (code(first), flags):
        exec(statements, vars(module))
    return module, lambda: exec(code(later), vars(module))
