"""Lists commands, configs, grids, encodings, tasks, models and trained models of the package, with
one line for each.

cope-jax list
cope-jax list --only=configs
"""

import ast
import json
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

import cope_jax
from cope_jax.cli import command_file, common_flags
from cope_jax.training import config_files

KINDS = ("commands", "configs", "grids", "encodings", "tasks", "models", "trained")
PACKAGE = Path(cope_jax.__file__).parent

_ONLY = flags.DEFINE_list("only", list(KINDS), f"What to list: any of {', '.join(KINDS)}.")


def main() -> None:
    """Prints a list for each kind; it reads files, and imports none of them but those of configs."""
    common_flags.check_names("--only", _ONLY.value, KINDS)
    blocks = []
    for kind in _ONLY.value:
        if kind == "trained":
            runs = {path.parent.name: path for path in sorted(PACKAGE.glob("trained/*/run.json"))}
            texts = {name: _title(json.loads(path.read_bytes())) for name, path in runs.items()}
        elif kind == "grids":
            paths = sorted((PACKAGE / "grids").glob("[!_]*.py"))
            texts = _documents({path.stem: path for path in paths})
        elif kind == "configs":
            documents = _documents(config_files.families())
            texts = {name: with_variants(name, text) for name, text in documents.items()}
        elif kind == "commands":
            names = command_file.command_names()
            texts = _documents({name: command_file.COMMANDS / f"{name}.py" for name in names})
        else:
            texts = _registered(PACKAGE / kind)
        width = 2 + max(map(len, texts))
        columns, margin = shutil.get_terminal_size().columns, " " * (width + 2)
        rows = (f"  {name:{width}}{first_sentence(text)}" for name, text in texts.items())
        filled = (textwrap.fill(row, columns, subsequent_indent=margin) for row in rows)
        blocks.append("\n".join([kind, *filled]))
    print("\n\n".join(blocks))


def with_variants(name: str, text: str) -> str:
    """The first sentence of a config file, and its variants, the default first."""
    variants = config_files.variants_of(name)
    return first_sentence(text) + (f"; variants: {', '.join(variants)}" if variants else "")


def _documents(files: Mapping[str, Path]) -> dict[str, str]:
    """Reads the docstring of each file without running the file."""
    trees = {name: ast.parse(path.read_bytes()) for name, path in files.items()}
    return {name: ast.get_docstring(tree) or "" for name, tree in trees.items()}


def _registered(folder: Path) -> dict[str, str]:
    """The docstrings of the classes in a package, by the names that `register` gives them.

    The file of a class counts if `__init__.py` imports it: without that line nothing registers it.
    """
    documents = {}
    body = ast.parse((folder / "__init__.py").read_bytes()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports for alias in node.names}
    for path in (path for path in folder.glob("*.py") if path.stem in imported):
        classes = (
            node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.ClassDef)
        )
        for node in classes:
            for decorator in map(ast.unparse, node.decorator_list):
                if name := re.search(r"\.register\('(\w+)'\)", decorator):
                    documents[name[1]] = ast.get_docstring(node) or ""
    return dict(sorted(documents.items()))


def _title(run: Mapping[str, Any]) -> str:
    """A description of a trained model in one line, as `LoadedRun.title` gives it."""
    config = run["config"]
    names = filter(None, (config["task"]["name"], config["encoding"], config.get("variant")))
    return f"{', '.join(names)}, seed {run['seeds'][0]}, step {run['step']:,}"


def first_sentence(text: str) -> str:
    r"""The first sentence of a docstring, on one line.

    >>> first_sentence("RNNs\nof words. By Elman.\n\nMore.")
    'RNNs of words'
    """
    line = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"\.(?: |$)", line)[0]
