"""Fused attention: the algorithm of blockwise attention as two kernels of the backend, one forward and one backward.

On TPUs the encoding's own hooks are traced into the kernels, so they run any encoding whose hooks use only what a tile
program can do (see `kernels.tile`). On CPUs the kernels are C++, and on NVIDIA GPUs Triton, for what
`Encoding.native_score` can express.
"""

from collections.abc import Sequence
from typing import Any

import jax

from cope_jax.array_types import Array
from cope_jax.attention import placement
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.kernels.cpu import cpu_attention
from cope_jax.attention.kernels.gpu import gpu_attention
from cope_jax.attention.kernels.tpu import tpu_attention
from cope_jax.attention.tiles import BlockSizes
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError

CPU = "cpu"
FASTER = (CPU, *tpu_attention.CHIPS)  # the kinds of devices where the kernels are known to be faster


def fused_attention(
    encoding: Encoding,
    inputs: Inputs,
    blocks: BlockSizes | None = None,
    *,
    head_axis: str | None = None,
    resident: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes the result of `blockwise_attention` with kernels.

    Args:
      encoding: the encoding.
      inputs: see `prepare`.
      blocks: the sizes of blocks on TPUs. Blocks of keys have the size `far` where all rows are saturated, else
        `near`. If None, the sizes are those of the chip.
      head_axis: the axis of the current mesh that splits the heads; None if none does.
      resident: how many keys are in fast memory at a time. If None, the number is that of the chip.
      interpret: run the kernels on any backend, slowly.

    Returns:
      out_BLHK, in the type of the values.

    Raises:
      ConfigError: there is no kernel for this device, or for this encoding or these inputs.
    """
    reason = why_not(encoding, inputs, blocks, head_axis=head_axis, resident=resident, interpret=interpret)
    if reason is not None:
        raise ConfigError(f"implementation='fused' is not possible, because {reason}: choose 'auto' or 'blockwise'")
    device = placement.current_device()
    if not interpret and (native := _native(device)):
        return native.attention(encoding, inputs, device)
    return tpu_attention.attention(
        encoding, inputs, blocks, head_axis=head_axis, resident=resident, interpret=interpret
    )


def why_not(
    encoding: Encoding,
    inputs: Inputs,
    blocks: BlockSizes | None = None,
    *,
    batch_axes: Sequence[str] = (),
    head_axis: str | None = None,
    resident: int | None = None,
    interpret: bool = False,
) -> str | None:
    """Returns why `fused_attention` cannot run; None if it can. The axes are as in `attend`."""
    device = placement.current_device()
    native = None if interpret else _native(device)
    if native is None:
        options: Any = {"head_axis": head_axis, "resident": resident, "interpret": interpret}
        return tpu_attention.why_not(encoding, inputs, blocks, batch_axes=batch_axes, **options)
    if blocks is not None:
        return "sizes of blocks are given, and the kernels of this device have their own"
    if head_axis is not None and jax.sharding.get_abstract_mesh().shape.get(head_axis, 1) > 1:
        return f"axis {head_axis!r} of the mesh splits the heads, and the kernels of this device cannot"
    return placement.why_undivided(batch_axes, None, 1) or native.why_not(encoding, inputs, device)


def _native(device: str) -> Any:
    """Returns the module of hand-written kernels for a device, or None."""
    if device == CPU:
        return cpu_attention
    return gpu_attention if device.startswith("NVIDIA") else None
