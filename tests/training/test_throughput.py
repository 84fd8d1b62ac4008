import dataclasses
from typing import Any

import jax
import pytest

from cope_jax.training.throughput import Throughput, describe


@dataclasses.dataclass
class Device:
    device_kind: str = "TPU v5 lite"
    process_index: int = 0
    stats: dict[str, Any] | None = None

    def memory_stats(self):
        return self.stats


@dataclasses.dataclass
class Clock:
    now: float = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def running(clock, devices, *, tokens=10, flops=5.0, **options):
    """A meter behind its first dispatch."""
    throughput = Throughput(tokens, flops, devices, clock=clock, **options)
    throughput.start()
    clock.now += 60
    throughput.dispatched(3)
    return throughput


def test_the_first_dispatch_compiles_and_has_no_speed(clock):
    throughput = Throughput(10, 5.0, [Device()], clock=clock)
    throughput.start()
    clock.now += 60
    assert throughput.dispatched(3) == {}
    clock.now += 1.5
    assert throughput.dispatched(3)["step_seconds"] == 0.5


def test_speed_is_that_of_one_dispatch(clock):
    throughput = running(clock, [Device("cpu")])
    clock.now += 4
    assert throughput.dispatched(2) == {"tokens_per_second": 5.0, "step_seconds": 2.0}
    clock.now += 1
    assert throughput.dispatched(2) == {"tokens_per_second": 20.0, "step_seconds": 0.5}


def test_what_passes_before_start_is_not_counted(clock):
    throughput = running(clock, [Device("cpu")])
    clock.now += 1000
    throughput.start()
    clock.now += 4
    assert throughput.dispatched(2) == {"tokens_per_second": 5.0, "step_seconds": 2.0}


def test_mfu_is_of_all_devices_in_all_processes(clock):
    throughput = running(clock, [Device(process_index=i % 2) for i in range(4)], flops=197e12)
    clock.now += 25
    # 20 tokens of 197e12 FLOPs in 25 seconds, by four devices of 197e12 FLOP/s
    assert throughput.dispatched(2)["mfu"] == pytest.approx(20 / 25 / 4)


@pytest.mark.parametrize(
    ("kind", "peak", "expected"), [("cpu", 10.0, 0.5), ("TPU v4", 10.0, 0.5), ("cpu", None, None)]
)
def test_a_given_peak_counts_and_without_any_there_is_no_mfu(clock, kind, peak, expected):
    throughput = running(clock, [Device(kind)], peak=peak)
    clock.now += 20
    assert throughput.dispatched(2).get("mfu") == expected


def test_memory_is_that_of_the_fullest_device_of_this_process(clock):
    gib = 2**30
    stats = [
        {"bytes_in_use": 2 * gib, "peak_bytes_in_use": 4 * gib},
        {"bytes_in_use": 3 * gib, "peak_bytes_in_use": 3 * gib},
    ]
    devices = [Device(stats=memory) for memory in stats]
    elsewhere = Device(
        process_index=1, stats={"bytes_in_use": 99 * gib, "peak_bytes_in_use": 99 * gib}
    )
    throughput = Throughput(1, 1.0, [*devices, elsewhere], clock=clock)
    assert throughput.dispatched(1) == {"memory_gib": 3.0, "memory_peak_gib": 4.0}


def test_devices_may_tell_nothing_or_half_of_their_memory(clock):
    assert Throughput(1, 1.0, jax.devices()).dispatched(1) == {}
    half = Device(stats={"bytes_in_use": 2**29})
    assert Throughput(1, 1.0, [half], clock=clock).dispatched(1) == {"memory_gib": 0.5}


def test_text_has_what_is_known():
    assert describe({}) == ""
    assert describe({"tokens_per_second": 12.0, "step_seconds": 1.0}) == "12.0 tok/s"
    assert describe({"memory_gib": 1.0, "memory_peak_gib": 2.0}) == "2.0 GiB"
