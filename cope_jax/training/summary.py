"""Summarises a run before it starts: every parameter, its sharding, and what a step costs."""

import io
import math
from collections.abc import Sequence
from typing import Any

import jax
import rich.box
import rich.console
import rich.table

from cope_jax.array_types import PyTree
from cope_jax.training import checksum


def parameter_table(params: PyTree) -> rich.table.Table:
    """Every parameter: name, shape, type, the mesh axes that split its axes, its bytes on one device, its size.

    Args:
      params: nested dicts of arrays or of `jax.ShapeDtypeStruct`; without a sharding, a parameter is not split. The
        first axis of stacked parameters, such as those of layers, is an axis like any other.
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
            table.add_row(checksum.name(path), shape, str(leaf.dtype), _split(leaf), *_amount([leaf]))
        if len(leaves) > 1:
            table.add_row(f"{name}, all", "", "", "", *_amount(module), style="bold")
            table.add_section()
    table.add_section()
    table.add_row("total", "", "", "", *_amount(params), style="bold")
    return table


def job_table(
    state: PyTree, mesh: jax.sharding.Mesh, *, batch_size: int, length: int, flops_per_token: float
) -> rich.table.Table:
    """Devices, mesh, memory of the training state, batch, and model FLOPs.

    `state` has the shapes of all arrays kept between steps; `batch_size` counts sequences over all devices and seeds.
    """
    devices = list(mesh.devices.flat)
    processes = len({device.process_index for device in devices})
    tokens = batch_size * length
    table = rich.table.Table.grid(padding=(0, 2))
    facts = {
        "devices": f"{len(devices)} × {devices[0].device_kind}, {processes} process{'es' if processes > 1 else ''}",
        "mesh": " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        "state": f"{_bytes(bytes_a_device(state))} a device: parameters, optimizer, random key",
        "batch": f"{batch_size:,} sequences of {length:,} tokens, {tokens:,} tokens a step",
        "model FLOPs": f"{_si(flops_per_token)}FLOPs a token, {_si(flops_per_token * tokens)}FLOPs a step",
    }
    for label, text in facts.items():
        table.add_row(label, text)
    return table


def summarise(params: PyTree, *parts: rich.console.RenderableType) -> str:
    """The table of parameters, followed by `parts`, as plain text.

    >>> print(summarise({"out": {"kernel": jax.ShapeDtypeStruct((64, 16), "float32")}}))
    parameter    shape    type      split over   a device   number
    ──────────────────────────────────────────────────────────────
    out.kernel   64, 16   float32   whole         4.0 KiB    1,024
    <BLANKLINE>
    total                                         4.0 KiB    1,024
    """
    text = io.StringIO()
    rich.console.Console(file=text, width=120, color_system=None).print(parameter_table(params), *parts, sep="\n")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def bytes_a_device(tree: PyTree) -> int:
    """The bytes of arrays, or of their shapes, on one device; all bytes if there is no sharding."""
    return sum(math.prod(_local_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


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
