"""The accelerators that steps are compiled for: their devices, and public numbers of memory, clocks
and links.

Peaks are in `cope_jax.training.throughput.PEAK_FLOPS`. TPUs: https://cloud.google.com/tpu/docs/v4,
/v5e, /v5p, /v6e and /tpu7x; GPUs: NVIDIA's data sheets, and compute capability 9.0 in NVIDIA's CUDA
programming guide.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from cope_jax.errors import ConfigError

GB, GIB = 1e9, 2.0**30
_FLAT = tuple("1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split())
_CUBES = tuple("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split())
_COUNTS = tuple("1 2 4 8".split())


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator. All numbers are for one JAX device."""

    platform: str  # "tpu" or "cuda"
    hbm_bytes: float  # memory
    hbm_bandwidth: float  # bytes/s
    # Bytes/s sent in a ring; on a TPU, over both directions of one axis of the torus.
    ring_bandwidth: float
    shapes: tuple[str, ...]  # the common slices, as text
    # Cycles per second: peak FLOPs / FLOPs of the matrix units in a cycle. None: the compiler does
    # not count cycles.
    clock: float | None = None
    devices_per_chip: int = 1
    cores: int = 1  # of a device; they share the programs of a kernel
    # More options for `get_topology_desc`.
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""  # name of a GPU, for its compiler


CHIPS = {
    # Two cores appear as one device, as on Cloud TPU; without this option, as two devices.
    "v4": Chip(
        *("tpu", 32 * GIB, 1200 * GB, 100 * GB, _CUBES, 1.05e9),
        cores=2,
        options={"chip_config_name": "megacore"},
    ),
    "v5e": Chip("tpu", 16 * GIB, 800 * GB, 100 * GB, _FLAT, 1.5e9),
    "v5p": Chip("tpu", 95 * GIB, 2765 * GB, 200 * GB, _CUBES, 1.75e9, cores=2),
    "v6e": Chip("tpu", 32 * GIB, 1600 * GB, 200 * GB, _FLAT, 1.75e9),
    "tpu7x": Chip("tpu", 96 * GIB, 3690 * GB, 200 * GB, _CUBES, 2.2e9, devices_per_chip=2),
    "h100": Chip("cuda", 80 * GIB, 3350 * GB, 450 * GB, _COUNTS, name="NVIDIA H100 80GB HBM3"),
    "h200": Chip("cuda", 141 * GB, 4800 * GB, 450 * GB, _COUNTS, name="NVIDIA H200"),
}

# Without these variables libtpu looks for a TPU and its metadata server, or for a process that
# holds one.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# XLA's description of a GPU, a `GpuTargetConfigProto` as text.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory:.0f}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


class Topology(NamedTuple):
    """Devices of one kind that form a mesh, such as "v5e:4x4".

    Programs can be compiled for them, but not run.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]


def known() -> str:
    """The text that lists the known topologies, for the command's help and errors."""
    return "; ".join(f"{name}:{'|'.join(chip.shapes)}" for name, chip in CHIPS.items())


def find(topology: str) -> tuple[Chip, str]:
    """The chip and the shape in the name of a topology, such as "v5e:4x4".

    The shape need not be a common one.
    """
    name, _, shape = topology.partition(":")
    sizes = shape.split("x")
    if name not in CHIPS or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ConfigError(f"unknown topology {topology!r}: choose one of {known()}")
    chip = CHIPS[name]
    axes = len(chip.shapes[0].split("x"))
    if len(sizes) != axes:
        raise ConfigError(
            f"topology {topology!r} does not exist: give a shape of {axes} numbers, as in {name}:{chip.shapes[-1]}"
        )
    return chip, shape


def describe(name: str) -> Topology:
    """The devices of a topology. Call this before JAX computes anything; afterwards JAX computes on
    the CPU.

    Raises ConfigError if the topology is unknown or its compiler is not installed.
    """
    chip, shape = find(name)
    jax.config.update("jax_platforms", "cpu")
    options: dict[str, Any] = {"topology_name": name, **chip.options}
    if chip.platform == "tpu":
        _need("TPUs", "libtpu", "'cope-jax[tpu-compile]'", "libtpu")
        os.environ.update(_TPU_ENVIRONMENT)
    else:
        plugin = f"'jax-cuda13-plugin[with-cuda]=={jax.__version__}'"
        _need("GPUs", "CUDA's compiler", plugin, "jax_plugins", "jax_plugins.xla_cuda13")
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        options = {"topology_name": name.partition(":")[0], "topology": f"1x1x{shape}"}
        options["target_config"] = target_config(chip)
    try:
        devices = topologies.get_topology_desc(platform=chip.platform, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"cannot create topology {name!r} ({reason}): choose another --topology"
        ) from error
    return Topology(name, chip, devices)


def _need(devices: str, compiler: str, package: str, *modules: str) -> None:
    """Raises ConfigError if a module of a compiler is not installed."""
    if not all(importlib.util.find_spec(module) for module in modules):
        raise ConfigError(f"compiling for {devices} needs {compiler}: run pip install {package}")


def target_config(chip: Chip) -> str:
    """The description of a GPU that XLA needs to compile for this GPU on a machine without a GPU."""
    return _HOPPER.format(name=chip.name, memory=chip.hbm_bytes, bandwidth=chip.hbm_bandwidth)
