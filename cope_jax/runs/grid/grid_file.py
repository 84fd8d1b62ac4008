"""Reads the cells that a grid file yields."""

import runpy
import traceback
from collections.abc import Iterable
from pathlib import Path

import cope_jax
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown
from cope_jax.runs.grid.cell import Cell


def find(name: str) -> str:
    """The path of a grid that is given by its name in cope_jax/grids, or by its path."""
    folder = Path(cope_jax.__file__).with_name("grids")
    known = {file.stem: str(file) for file in folder.glob("[!_]*.py")}
    if (
        name not in known
        and not Path(name).is_file()
        and "/" not in name
        and not name.endswith(".py")
    ):
        raise ConfigError(
            f"{unknown('grid', name, known)}; or give the path of a grid file, such as ./{name}.py"
        )
    return known.get(name, name)


def read(path: str) -> list[Cell]:
    """The cells that a grid file yields, unchecked. ConfigError: the file is not a grid."""
    if Path(path).is_fifo():
        raise ConfigError(f"the grid {path} is a pipe, which may never end: give a file")
    wanted = "--grid needs a Python file whose get_cells() yields cells"
    try:
        get_cells = runpy.run_path(path).get("get_cells")
        if not callable(get_cells):
            raise ConfigError(f"{wanted}, not {path} (it has none)")
        yielded = get_cells()
        if not isinstance(yielded, Iterable):
            raise ConfigError(
                f"{path} has no cells: get_cells() must yield or return them, not return {yielded!r}"
            )
        cells = list(yielded)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{wanted}, not {path} ({_reason(error)})") from error
    if not cells:
        raise ConfigError(f"{path} has no cells: get_cells() must yield at least one")
    for cell in cells:
        if not isinstance(cell, Cell):
            raise ConfigError(
                f"{path}: get_cells() must yield cells of cope_jax.runs.grid.cell, not {cell!r}"
            )
    return cells


def _reason(error: Exception) -> str:
    """The error in one line, with its line in the grid file."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    reason = getattr(error, "strerror", None) or text
    frames = traceback.extract_tb(error.__traceback__)
    lines = [str(frame.lineno) for frame in frames if frame.name == "get_cells"]
    return f"line {lines[-1]}: {reason}" if lines else str(reason)
