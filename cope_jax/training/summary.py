"""Summarises a run before it starts: every parameter, its sharding, and the cost of a step."""

import io
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import rich.box
import rich.console
import rich.table

from cope_jax.array_types import PyTree
from cope_jax.storage import checksum


def parameter_table(params: PyTree) -> rich.table.Table:
    """Creates a table with a row for each parameter.

    The columns are name, shape, type, the mesh axes that split the parameter, bytes on one device,
    and number of elements.

    Args:
      params: nested dicts of arrays or of `jax.ShapeDtypeStruct`. A parameter without a sharding is
        not split. If the parameters of several layers are stacked, the axis of the layers is an
        axis like any other.
    """
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("parameter", "shape", "type", "split over"):
        table.add_column(name)
    for name in ("a device", "number"):
        table.add_column(name, justify="right")
    for name, module in params.items():
        leaves = jax.tree.leaves_with_path({name: module})
        for path, leaf in leaves:
            shape = ", ".join(map(str, leaf.shape))
            kind = str(leaf.dtype)
            table.add_row(checksum.name(path), shape, kind, _split(leaf), *_amount([leaf]))
        if len(leaves) > 1:
            table.add_row(f"{name}, all", "", "", "", *_amount(module), style="bold")
            table.add_section()
    table.add_section()
    table.add_row("total", "", "", "", *_amount(params), style="bold")
    return table


def job_facts(
    state: PyTree, mesh: jax.sharding.Mesh, *, batch_size: int, length: int, flops_per_token: float
) -> dict[str, str]:
    """The devices, mesh, memory of the training state, batch, and model FLOPs, as text by name.

    `state` has the shapes of all arrays kept between steps; `batch_size` counts sequences over all
    devices and seeds.
    """
    devices = list(mesh.devices.flat)
    processes = len({device.process_index for device in devices})
    tokens = batch_size * length
    return {
        "devices": f"{len(devices)} × {devices[0].device_kind}, {processes} process{'es' if processes > 1 else ''}",
        "mesh": " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        "state": f"{_bytes(bytes_a_device(state))} a device: parameters, optimizer, random key",
        "batch": f"{batch_size:,} sequences of {length:,} tokens, {tokens:,} tokens a step",
        "model FLOPs": f"{_si(flops_per_token)}FLOPs a token, {_si(flops_per_token * tokens)}FLOPs a step",
    }


def summarise(params: PyTree, facts: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """The table of parameters, followed by a line for each of `facts`, as plain text.

    >>> print(summarise({"out": {"kernel": jax.ShapeDtypeStruct((64, 16), "float32")}}))
    parameter    shape    type      split over   a device   number
    ──────────────────────────────────────────────────────────────
    out.kernel   64, 16   float32   whole         4.0 KiB    1,024
    <BLANKLINE>
    total                                         4.0 KiB    1,024
    """
    table = rich.table.Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(name, fact)
    text = io.StringIO()
    console = rich.console.Console(file=text, width=120, color_system=None)
    console.print(parameter_table(params), table, sep="\n")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def bytes_a_device(tree: PyTree) -> int:
    """Bytes on one device of arrays or shapes; without a sharding, all their bytes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(_local_shape(leaf)) * leaf.dtype.itemsize for leaf in leaves)


def _local_shape(leaf: Any) -> Sequence[int]:
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _split(leaf: Any) -> str:
    spec = getattr(leaf.sharding, "spec", ())
    axes = ["+".join((axis,) if isinstance(axis, str) else axis) if axis else "-" for axis in spec]
    return ", ".join(axes) if set(axes) - {"-"} else "whole"


def _amount(tree: PyTree) -> tuple[str, str]:
    return _bytes(bytes_a_device(tree)), f"{sum(leaf.size for leaf in jax.tree.leaves(tree)):,}"


def _bytes(number: float) -> str:
    scaled, unit = _scaled(number, 1024, ("B", "KiB", "MiB", "GiB"))
    return f"{scaled:,.1f} {unit}"


def _si(number: float) -> str:
    scaled, unit = _scaled(number, 1000, ("", "k", "M", "G", "T", "P", "E"))
    return f"{scaled:.3g} {unit}"


def _scaled(number: float, base: int, units: Sequence[str]) -> tuple[float, str]:
    for unit in units[:-1]:
        if number < base:
            return number, unit
        number /= base
    return number, units[-1]
