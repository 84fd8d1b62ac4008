"""Devices to compile for that this machine does not have."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from cope_jax.errors import ConfigError
from experiments.compilation.chips import Chip, find
from experiments.compilation.gpus import target_config

# Without them libtpu looks for a TPU and its metadata server, or for a process that holds one.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind.

    Attributes:
      name: as "v5e:4x4".
      devices: as a mesh takes them; they can be compiled for, and no more.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]

    @property
    def chips(self) -> int:
        """How many chips: fewer than devices where a chip has several."""
        return len(self.devices) // self.chip.devices_per_chip


def describe(name: str) -> Topology:
    """The devices of a topology; this process computes on the CPU from then on.

    To be called before JAX has computed anything.

    Raises:
      ConfigError: an unknown topology, or its compiler is not installed.
    """
    chip, shape = find(name)
    jax.config.update("jax_platforms", "cpu")
    create = _tpu if chip.platform == "tpu" else _gpu
    try:
        devices = create(name, chip, shape)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"topology {name!r}: {' '.join(str(error).split())[:300]}") from error
    return Topology(name, chip, devices)


def _tpu(name: str, chip: Chip, shape: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("compiling for TPUs needs libtpu: pip install 'cope-jax[tpu-compile]'")
    os.environ.update(_TPU_ENVIRONMENT)
    options: dict[str, Any] = dict(chip.options)
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def _gpu(name: str, chip: Chip, shape: str) -> Sequence[Any]:
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise ConfigError(
            f"compiling for GPUs needs CUDA's compiler: pip install 'jax-cuda13-plugin[with-cuda]=={jax.__version__}'"
        )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    kind = name.partition(":")[0]
    options = {"topology": f"1x1x{shape}", "target_config": target_config(kind)}
    return topologies.get_topology_desc(platform="cuda", topology_name=kind, **options).devices
