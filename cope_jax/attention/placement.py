"""Where a program runs, and whether kernels fit there: XLA cannot split a kernel over the devices of a mesh."""

import functools
import logging
from collections.abc import Sequence

import jax
from jax.sharding import AxisType


def current_device() -> str:
    """The kind of device that a program is for: that of the current mesh, or the default device."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX adds its options when it starts
    device = jax.sharding.get_abstract_mesh().abstract_device or default
    if isinstance(device, str):  # the name of a platform
        device = jax.devices(device)[0]
    return jax.devices()[0].device_kind if device is None else device.device_kind


def why_undivided(axes: Sequence[str | None], head_axis: str | None, groups: int) -> str | None:
    """Returns why devices cannot share the work of a kernel; None if they can.

    Args:
      axes: the axes of the mesh that split the batch, and the sequence of a ring.
      head_axis: the axis that splits the heads, or None.
      groups: the number of key heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and current_device().startswith("TPU") and jax.default_backend() == "tpu" and jax.device_count() > 1:
        return "there are several devices and no mesh: call under jax.set_mesh(mesh)"
    for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        if size > 1 and kind == AxisType.Explicit:
            return f"axis {axis!r} of the mesh is of type Explicit, not Auto"
        if size > 1 and kind == AxisType.Auto and axis not in (*axes, head_axis):
            return f"axis {axis!r} of the mesh splits neither the batch nor the heads"
        if axis == head_axis and groups % size:
            return f"axis {axis!r} of the mesh does not divide {groups} key heads"
    return None


@functools.cache
def log_choice(name: str, reason: str | None) -> None:
    """Logs once which implementation runs, and why not the fused one."""
    logging.getLogger("cope_jax").info("attention: %s%s", name, f", because {reason}" if reason else "")
