"""Lists commands, configs, grids, encodings, tasks, models and trained models of the package, with
one line for each.

cope-jax list
cope-jax list --only=configs
"""

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

import cope_jax
from cope_jax import encodings, models, tasks
from cope_jax.cli import run
from cope_jax.cli.flag_values import check_names
from cope_jax.runs.load import TRAINED, load_run
from cope_jax.training import config_files

KINDS = ("commands", "configs", "grids", "encodings", "tasks", "models", "trained")

_ONLY = flags.DEFINE_list("only", list(KINDS), f"What to list: any of {', '.join(KINDS)}.")


def main() -> None:
    """Prints a list for each kind."""
    check_names("--only", _ONLY.value, KINDS)
    registries: dict[str, Any] = {
        "encodings": encodings.ENCODINGS,
        "tasks": tasks.TASKS,
        "models": models.MODELS,
    }
    blocks = []
    for kind in _ONLY.value:
        if kind in registries:
            known = {name: registries[kind].get(name) for name in registries[kind]}
            texts = {name: inspect.getdoc(entry) or "" for name, entry in known.items()}
        elif kind == "trained":
            texts = {path.name: load_run(path).title() for path in sorted(TRAINED.iterdir())}
        elif kind == "grids":
            folder = Path(cope_jax.__file__).parents[1] / "experiments" / "grids"
            texts = _documents({path.stem: path for path in sorted(folder.glob("*.py"))})
        elif kind == "configs":
            documents = _documents(config_files.families())
            texts = {name: with_variants(name, text) for name, text in documents.items()}
        else:
            texts = _documents({name: run.COMMANDS / f"{name}.py" for name in run.command_names()})
        if not texts:  # an installed package has no grids
            continue
        width = 2 + max(map(len, texts))
        columns, margin = shutil.get_terminal_size().columns, " " * (width + 2)
        rows = (f"  {name:{width}}{first_sentence(text)}" for name, text in texts.items())
        filled = (textwrap.fill(row, columns, subsequent_indent=margin) for row in rows)
        blocks.append("\n".join([kind, *filled]))
    print("\n\n".join(blocks) or "nothing to list: only a checkout of the repository has grids")


def with_variants(name: str, text: str) -> str:
    """The first sentence of a config file, and its variants, the default first."""
    variants = config_files.variants_of(name)
    return first_sentence(text) + (f"; variants: {', '.join(variants)}" if variants else "")


def _documents(files: Mapping[str, Path]) -> dict[str, str]:
    """Reads the docstring of each file without running the file."""
    trees = {name: ast.parse(path.read_bytes()) for name, path in files.items()}
    return {name: ast.get_docstring(tree) or "" for name, tree in trees.items()}


def first_sentence(text: str) -> str:
    r"""The first sentence of a docstring, on one line.

    >>> first_sentence("RNNs\nof words. By Elman.\n\nMore.")
    'RNNs of words'
    """
    line = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"\.(?: |$)", line)[0]
