"""An import of `cope_jax.torch` imports no JAX, in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
ROOT = Path(__file__).parents[2]
STARTED = "from jax._src import xla_bridge; print(sorted(xla_bridge._backends))"


def python(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_import_starts_no_backend_and_the_first_call_does():
    modules = "print(sorted({'jax', 'flax', 'transformers'} & sys.modules.keys()))"
    first = "cj.Encoding('alibi', num_heads=2, head_dim=4)"
    lines = python(f"import sys, cope_jax.torch as cj; {modules}; {first}; {STARTED}")
    assert lines == ["[]", "['cpu']"]


def test_a_missing_package_is_one_line():
    code = "import sys; sys.modules['torch'] = None\ntry: import cope_jax.torch\n"
    code += "except ModuleNotFoundError as error: print(error)"
    assert python(code) == ["cope_jax.torch: torch is not installed: pip install 'cope-jax[torch]'"]
