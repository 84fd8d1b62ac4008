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


IMPORT = "import sys, cope_jax.torch as cj"


def test_an_import_imports_no_jax():
    modules = "print(sorted({'jax', 'flax', 'transformers'} & sys.modules.keys()))"
    assert python(f"{IMPORT}; {modules}") == ["[]"]


@pytest.mark.slow
def test_the_first_call_starts_the_cpu_alone():
    first = "cj.Encoding('alibi', num_heads=2, head_dim=4)"
    assert python(f"{IMPORT}; {first}; {STARTED}") == ["['cpu']"]


def test_a_missing_package_is_one_line():
    code = "import sys; sys.modules['torch'] = None\ntry: import cope_jax.torch\n"
    code += "except ModuleNotFoundError as error: print(error)"
    assert python(code) == ["cope_jax.torch: torch is not installed: pip install 'cope-jax[torch]'"]
