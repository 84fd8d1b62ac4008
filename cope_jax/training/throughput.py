"""Measures a run's speed, FLOPs utilisation and memory; lists the peak FLOP/s of devices."""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from tqdm import tqdm

PEAK_FLOPS: dict[str, float | None] = {
    # Cloud TPU's pages; a device is a chip, except in v2, v3 and 7x, where it is one of a chip's
    # two cores.
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    # NVIDIA's data sheets; half of what they state with sparsity.
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H100": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200": 989.5e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA RTX 6000 Ada": 364.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4090 Laptop": None,  # slower; how much depends on the maker
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5090 Laptop": None,
}
"""Peak FLOP/s of a device, dense bfloat16 with float32 sums, by the beginning of `device_kind`."""


class Throughput:
    """A stopwatch for dispatches of training steps.

    Call `dispatched` after each dispatch. The first dispatch, which compiles, is not counted. Call
    `start` after anything that is not training, such as evaluation or a checkpoint, so that its
    time is not counted either.

    Args:
      tokens_per_step: number of tokens of a step, over all devices.
      flops_per_token: model FLOPs of one token, as `flops_per_token` of the model's config counts
        them.
      devices: all devices of the run, including those of other processes.
      peak: peak FLOP/s of a device. If None, the table `PEAK_FLOPS` gives the peak of this kind of
        device.
      clock: returns the time in seconds.

    >>> ticks = iter([0.0, 60.0, 60.5])
    >>> throughput = Throughput(1000, 6e6, jax.devices()[:2], peak=1e12, clock=lambda: next(ticks))
    >>> throughput.dispatched(10)
    {}
    >>> throughput.dispatched(10)
    {'tokens_per_second': 20000.0, 'step_seconds': 0.05, 'mfu': 0.06}
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        devices: Iterable[jax.Device],
        peak: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        devices = list(devices)
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._devices = len(devices)
        self._here = [device for device in devices if device.process_index == jax.process_index()]
        self._peak = peak_flops(devices[0].device_kind) if peak is None else peak
        self._clock = clock
        self._began = clock()
        self._compiled = False

    def start(self) -> None:
        """Restarts the clock: the time since the last dispatch is not counted."""
        self._began = self._clock()

    def dispatched(self, steps: int) -> dict[str, float]:
        """Reads and restarts the clock. Call this when results of a dispatch of `steps` arrive.

        Returns:
          `tokens_per_second` and `step_seconds`, and `mfu` in [0, 1] if the peak is known. If the
          devices report their memory, `memory_gib` is the memory in use now, and `memory_peak_gib`
          is the highest memory use so far. Both are maxima over the devices of this process. The
          result for the first dispatch has only the memory.
        """
        now = self._clock()
        seconds, self._began = now - self._began, now
        numbers = {}
        if self._compiled:
            speed = steps * self._tokens_per_step / seconds
            numbers = {"tokens_per_second": speed, "step_seconds": seconds / steps}
            if self._peak is not None:
                numbers["mfu"] = mfu(speed, self._flops_per_token, self._devices, self._peak)
        self._compiled = True
        return numbers | _memory(self._here)


def describe(numbers: Mapping[str, float]) -> str:
    """Formats the result of `Throughput.dispatched` for a progress bar.

    >>> describe({"tokens_per_second": 123456.7, "step_seconds": 0.5, "mfu": 0.4321, "memory_peak_gib": 12.34})
    '123k tok/s, MFU 43 %, 12.3 GiB'
    """
    formats = {"mfu": "MFU {:.0%}", "memory_peak_gib": "{:.1f} GiB"}
    parts = [form.format(numbers[name]) for name, form in formats.items() if name in numbers]
    if "tokens_per_second" in numbers:
        parts.insert(0, f"{tqdm.format_sizeof(numbers['tokens_per_second'])} tok/s")
    return ", ".join(parts).replace("%", " %")


def peak_flops(device_kind: str) -> float | None:
    """The peak FLOP/s of the longest key of `PEAK_FLOPS` that begins the kind; None if unknown.

    Keys match whole words: an A1000 is not an A100.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("TPU v5 lite"), peak_flops("cpu")
    (989500000000000.0, 197000000000000.0, None)
    """
    begun = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    kinds = [kind for kind in begun if not device_kind[len(kind) :][:1].isalnum()]
    return PEAK_FLOPS[max(kinds, key=len)] if kinds else None


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float) -> float:
    """Model FLOPs utilisation: the fraction of the devices' peak that the model's FLOPs use.

    >>> mfu(tokens_per_second=1000, flops_per_token=8e9, devices=4, peak=10e12)
    0.2
    """
    return tokens_per_second * flops_per_token / (devices * peak)


def peak_memory(devices: Iterable[Any]) -> float:
    """The peak memory of a device, in GiB; on a CPU, which reports none, of this process."""
    memory = _memory(device for device in devices if device.process_index == jax.process_index())
    unit = 1024 if sys.platform == "darwin" else 1
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return memory.get("memory_peak_gib", kibibytes / 2**20)


def _memory(devices: Iterable[Any]) -> dict[str, float]:
    statistics = [stats for device in devices if (stats := device.memory_stats())]  # a CPU has None
    names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
    return {
        name: max(stats[key] for stats in statistics) / 2**30
        for name, key in names.items()
        if statistics and all(key in stats for stats in statistics)
    }
