"""How fast a run trains, and the memory it takes."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from cope_jax.training.flops import mfu, peak_flops


class Throughput:
    """A stopwatch for dispatches of training steps.

    `dispatched` reads it after each. The first, which compiles, is not counted; nor is, where `start` comes after it,
    whatever is not training: evaluation, checkpoints.

    Args:
      tokens_per_step: of all devices together.
      flops_per_token: model FLOPs, as `flops_per_token` of the model's config counts them.
      devices: all devices of the run, in every process.
      peak: FLOP/s of a device; None looks it up by its kind.
      clock: seconds.

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
        """Starts the clock anew: what passed since the last dispatch is not counted."""
        self._began = self._clock()

    def dispatched(self, steps: int) -> dict[str, float]:
        """Reads the clock and starts it anew; to be called once the results of a dispatch are there.

        Args:
          steps: training steps in this dispatch.

        Returns:
          `tokens_per_second`, `step_seconds`; `mfu` in [0, 1] where the peak is known; and, where the devices tell,
          `memory_gib` in use and the highest so far, `memory_peak_gib`, of the fullest device of this process. Of the
          first dispatch, the memory only.
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
    """What `Throughput.dispatched` returned, for a progress bar.

    >>> describe({"tokens_per_second": 123456.7, "step_seconds": 0.5, "mfu": 0.4321, "memory_peak_gib": 12.34})
    '123,457 tokens/s, MFU 43.2 %, 12.3 GiB'
    """
    formats = {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}", "memory_peak_gib": "{:.1f} GiB"}
    parts = [form.format(numbers[name]) for name, form in formats.items() if name in numbers]
    return ", ".join(parts).replace("%", " %")


def _memory(devices: Iterable[Any]) -> dict[str, float]:
    found = [stats for device in devices if (stats := device.memory_stats())]  # a CPU has None
    names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
    return {
        name: max(stats[key] for stats in found) / 2**30
        for name, key in names.items()
        if found and all(key in stats for stats in found)
    }
