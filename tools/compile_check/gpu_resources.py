"""Compiles the attention kernels for GPUs without a GPU, and reads from the machine code what they
need.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.attention import Reason, prepare
from cope_jax.attention.kernels.gpu import gpu_attention
from cope_jax.attention.kernels.gpu.triton_kernel import Launch
from cope_jax.errors import ConfigError
from tools.compile_check.kernel_cycles import Problem

WARP = 32  # threads


def count(problem: Problem, kind: str) -> dict[str, Any]:
    """The registers and the bytes of stack of a thread, and the bytes of shared memory of a
    program, of every kernel.

    Registers that do not suffice spill to the stack, which is slow memory.

    Args:
      problem: the attention.
      kind: the kind of GPU, such as "NVIDIA H200".

    Raises:
      ConfigError: there is no kernel for the problem, or Triton is not installed.
    """
    if problem.blocks is not None:
        raise ConfigError(
            "--blocks is for TPUs: the kernels for GPUs have their own sizes; leave it out"
        )
    launches: dict[str, tuple[Launch, list[Any]]] = {}

    def record(launch: Launch, *arrays: Any) -> Any:
        launches[launch.name] = launch, [jax.typeof(x) for x in (*arrays, *launch.results)]
        return [jnp.zeros(x.shape, x.dtype) for x in launch.results]

    def attention(encoding: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
        request = prepare(q, k, v, encoding=encoding, x=x, embedded=True)
        plan = gpu_attention.plan(encoding, request, device=kind, launch=record)
        if isinstance(plan, Reason):
            raise ConfigError(f"there is no kernel for {problem.encoding}: {plan.why}")
        return plan.run()

    step, arguments = problem.step(attention)
    jax.eval_shape(step, *arguments)
    kernels = {name: compiled(launch, avals) for name, (launch, avals) in launches.items()}
    return {"kind": kind, "kernels": kernels}


def compiled(launch: Launch, avals: Sequence[Any]) -> dict[str, Any]:
    """The resources of one kernel, for arguments and results of these shapes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"float32": "*fp32", "bfloat16": "*bf16", "int32": "*i32"}
    names = launch.function.arg_names
    signature = {name: types[x.dtype.name] for name, x in zip(names, avals, strict=True)}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(names))}  # as XLA's arrays are
    source = ASTSource(launch.function, signature, {}, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    options["enable_fp_fusion"] = True
    target = GPUTarget("cuda", launch.capability, WARP)
    kernel = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK"))
    resources = {"blocks": launch.blocks, "registers": registers, "stack": stack}
    return resources | {"shared": kernel.metadata.shared}
