"""The names of `import cope_jax as cj`, and what an import leaves alone."""

import doctest
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cope_jax as cj

ROOT = Path(__file__).parents[1]
NAMES = re.findall(r"^\| `cj\.(\w+)` \|", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE)
STATE = """
import os, signal, sys
signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
state = sys.excepthook, sys.unraisablehook, dict(os.environ), signals, list(sys.path), list(sys.meta_path)
"""
SAME = """
after = {number: signal.getsignal(number) for number in signal.valid_signals()}
now = sys.excepthook, sys.unraisablehook, dict(os.environ), after, list(sys.path), list(sys.meta_path)
names = "excepthook", "unraisablehook", "environment", "signals", "path", "meta_path"
print([name for name, old, new in zip(names, state, now) if old != new])
"""


def python(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_face_is_what_the_page_lists():
    assert NAMES == cj.__all__
    assert set(dir(cj)) == {*NAMES, "__version__"}
    with pytest.raises(AttributeError, match="module 'cope_jax' has no attribute 'attendd'"):
        _ = cj.attendd


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_example(name):
    member = getattr(cj, name)
    assert doctest.DocTestParser().get_examples(inspect.getdoc(member) or ""), (
        f"cj.{name} shows no example"
    )


def test_importing_the_package_imports_no_jax():
    code = "import sys, cope_jax; print(sorted({'jax', 'flax', 'numpy'} & sys.modules.keys()))"
    assert python(code) == "[]\n"


QUICK = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS"]}
LIGHT = """
import runpy, sys
sys.path[:0] = [{root!r}, {packages!r}]
import numpy as np
import cope_jax as cj
import jax
from flax import nnx
encoding = cj.encodings.create("cope", num_heads=2, head_dim=4, npos_max=8, rngs=nnx.Rngs(0))
q = k = v = jax.random.normal(jax.random.key(0), (1, 16, 2, 4))
for how in ("full", "blockwise", "auto"):
    total = lambda q: cj.attend(q, k, v, encoding=encoding, implementation=how).sum()
    out, gradient = jax.jit(jax.value_and_grad(total))(q)
    assert np.isfinite(out) and np.isfinite(gradient).all()
print(len(cj.encodings.names()), len(cj.tasks.names()), len(cj.models.names()))
try:
    cj.Experiment
except ModuleNotFoundError as error:
    print(error)
sys.argv = ["cope-jax", "train", "--config=quick"]
runpy.run_module("cope_jax", run_name="__main__")
"""


def test_the_core_dependencies_are_enough_for_attention(tmp_path):
    """A folder has links to the packages that `pip install cope-jax` brings, and Python sees no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, known = [Requirement(text) for text in project["dependencies"]], set()
    while waiting:
        requirement = waiting.pop()
        if requirement.name in known or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        known.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        waiting += map(Requirement, distribution.requires or [])
        for name in {
            file.parts[0]
            for file in distribution.files or []
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(distribution.locate_file(name))
    code = LIGHT.format(root=str(ROOT), packages=str(tmp_path))
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=QUICK)
    assert done.returncode == 2, done.stderr
    counts = " ".join(str(len(package.names())) for package in (cj.encodings, cj.tasks, cj.models))
    missing = r"\w+ is not installed: pip install 'cope-jax\[lab\]'\n"
    assert re.fullmatch(rf"{counts}\ncope_jax\.Experiment: {missing}", done.stdout)
    assert re.fullmatch(f"error: {missing}", done.stderr)


@pytest.mark.slow
def test_importing_everything_changes_nothing():
    """Of the libraries, those that change something when they are imported come first."""
    code = """
import importlib, jax, pathlib, pkgutil
import matplotlib.pyplot, orbax.checkpoint, tensorboardX, tensorflow_datasets
from absl.flags import FLAGS
import cope_jax, tools
if importlib.util.find_spec("torch"):
    import torch._dynamo
"""
    code += (
        STATE
        + """
config = {name: getattr(jax.config, name, None) for name in jax.config.values}
for package in (cope_jax, tools):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__") and "torch" not in module.name:
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":  # an extra, which some modules need
                    raise
            for name in list(FLAGS):  # each command is alone in its process, and several have flags of one name
                home = FLAGS.find_module_defining_flag(name)
                if home.endswith("cli.config_flags") or (home == module.name and "cli" not in home):
                    delattr(FLAGS, name)
"""
        + SAME
        + """
print([name for name, value in config.items() if getattr(jax.config, name, None) != value])
print(jax._src.xla_bridge.backends_are_initialized())
"""
    )
    assert python(code) == "[]\n[]\nFalse\n"
