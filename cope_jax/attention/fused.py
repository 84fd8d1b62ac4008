"""Fused attention: the algorithm of blockwise attention as kernels of the device.

The encoding's own hooks are traced into the kernels, so they run any encoding whose hooks use only
what a tile program can do (see `kernels.tile`). A TPU runs them by Pallas, an NVIDIA GPU by generated
Triton, a CPU by generated C++.
"""

from cope_jax.attention import placement
from cope_jax.attention.kernels.cpu import cpp_attention
from cope_jax.attention.kernels.gpu import gpu_attention
from cope_jax.attention.kernels.tpu import tpu_attention
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.encodings import Encoding

CPU = "cpu"
# The kinds of devices where the kernels are known to be faster.
FASTER = (CPU, *tpu_attention.CHIPS)


def plan(encoding: Encoding, request: Request) -> Plan | Reason:
    """Returns the plan of the kernels of the current device, or the reason why they cannot run."""
    device = placement.current_device()
    if device == CPU:
        return cpp_attention.plan(encoding, request)
    if device.startswith("NVIDIA"):
        return gpu_attention.plan(encoding, request)
    return tpu_attention.plan(encoding, request)
