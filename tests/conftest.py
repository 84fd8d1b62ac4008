"""Strict JAX on eight fake devices, for every test and doctest."""

import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

# Before jax is imported, for it reads these once. Processes that a test starts inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}".strip()
)
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Most of a test's time is compilation of programs that run once.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"  # large ones take half
    if sys.version_info < (3, 12):  # the newest XLA, which needs Python 3.12, has no such flag
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels for GPUs run on the CPU
os.environ.setdefault("COPE_JAX_NATIVE", "0")  # C++ is compiled where a test asks for it
os.environ["MPLBACKEND"] = "agg"

import jax
import numpy as np
import pytest
from absl import flags
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Tracing leaves millions of objects in caches; going through them at Python's usual pace takes 4 %
# of the time.
gc.set_threshold(100_000, 20, 100)

# JAX makes a context of MLIR for each program that it lowers, with all dialects: a fifth of the
# time. One of a thread serves them all.
make_context = mlir.make_ir_context
context_of = functools.cache(lambda thread: make_context())
mlir.make_ir_context = lambda: context_of(threading.get_ident())

# Processes that a test starts inherit that SIGINT is ignored, as in the background job of a script.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules that read flags are imported here without absl's app.run.
flags.FLAGS.mark_as_parsed()


@pytest.fixture
def rng() -> np.random.Generator:
    """The same NumPy generator for every test."""
    return np.random.default_rng(0)


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for one test, where results are compared with an oracle to the last digits."""
    with jax.enable_x64(True):
        yield


SLOW_EXAMPLES = (
    "evaluation.gates.maps.inspect",
    "generation.decoding.generate",
    "generation.decoding.generate_stream",
    "layers.char_cnn.CharCNN",
    "models.bert.Bert",
    "models.elmo.Elmo",
)
"""Examples in docstrings that take three seconds or more."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow examples, which have no line for a mark; `pytest tests cope_jax` reads this."""
    for item in items:
        if item.name.removeprefix("cope_jax.") in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)
