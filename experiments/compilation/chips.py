"""The accelerators that steps are compiled for: what is public of their memory, clocks and links.

Peaks are in `cope_jax.training.flops.PEAK_FLOPS`. TPUs: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and
/tpu7x; GPUs: NVIDIA's data sheets.
"""

import dataclasses

from cope_jax.errors import ConfigError

GB, GIB = 1e9, 2.0**30
_FLAT = tuple("1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split())
_CUBES = tuple("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split())
_COUNTS = tuple("1 2 4 8".split())


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator; all figures are of one JAX device.

    Attributes:
      platform: "tpu" or "cuda".
      hbm_bytes: memory.
      hbm_bandwidth: bytes/s.
      ring_bandwidth: bytes/s that a device sends in a ring; on a TPU, over both directions of one axis of the torus.
      shapes: the common slices, as text.
      clock: Hz in which the compiler counts cycles: the peak over the FLOPs of the matrix units in a cycle. None: the
        compiler counts none.
      devices_per_chip: JAX devices in a chip.
      options: what `get_topology_desc` wants besides the shape.
    """

    platform: str
    hbm_bytes: float
    hbm_bandwidth: float
    ring_bandwidth: float
    shapes: tuple[str, ...]
    clock: float | None = None
    devices_per_chip: int = 1
    options: dict[str, str] = dataclasses.field(default_factory=dict)


CHIPS = {
    # Two cores that appear as one device, as on Cloud TPU; libtpu would show two by itself.
    "v4": Chip("tpu", 32 * GIB, 1200 * GB, 100 * GB, _CUBES, 1.05e9, options={"chip_config_name": "megacore"}),
    "v5e": Chip("tpu", 16 * GIB, 800 * GB, 100 * GB, _FLAT, 1.5e9),
    "v5p": Chip("tpu", 95 * GIB, 2765 * GB, 200 * GB, _CUBES, 1.75e9),
    "v6e": Chip("tpu", 32 * GIB, 1600 * GB, 200 * GB, _FLAT, 1.75e9),
    "tpu7x": Chip("tpu", 96 * GIB, 3690 * GB, 200 * GB, _CUBES, 2.2e9, devices_per_chip=2),
    "h100": Chip("cuda", 80 * GIB, 3350 * GB, 450 * GB, _COUNTS),
    "h200": Chip("cuda", 141 * GB, 4800 * GB, 450 * GB, _COUNTS),
}


def known() -> str:
    """The topologies that the command's help and errors list.

    >>> known().split("; ")[1]
    'v5e:1x1|2x2|2x4|4x4|4x8|8x8|8x16|16x16'
    """
    return "; ".join(f"{name}:{'|'.join(chip.shapes)}" for name, chip in CHIPS.items())


def find(topology: str) -> tuple[Chip, str]:
    """The chip and the shape that a topology names, as "v5e:4x4"; other shapes than the common ones pass too.

    >>> find("v5p:2x4x4")[1]
    '2x4x4'

    Raises:
      ConfigError: not of that form, or an unknown chip.
    """
    name, _, shape = topology.partition(":")
    sizes = shape.split("x")
    if name not in CHIPS or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ConfigError(f"unknown topology {topology!r}; known are {known()}")
    chip = CHIPS[name]
    axes = len(chip.shapes[0].split("x"))
    if len(sizes) != axes:
        raise ConfigError(f"topology {topology!r}: {name} has shapes of {axes} numbers, as {name}:{chip.shapes[-1]}")
    return chip, shape
