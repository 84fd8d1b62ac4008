"""The names of `import cope_jax as cj`, and what an import leaves alone."""

import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
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
    assert doctest.DocTestParser().get_examples(inspect.getdoc(member) or ""), f"cj.{name} shows no example"


def test_importing_the_package_imports_no_jax():
    code = "import sys, cope_jax; print(sorted({'jax', 'flax', 'numpy'} & sys.modules.keys()))"
    assert python(code) == "[]\n"


def test_importing_everything_changes_nothing():
    """Of the libraries, those that change something when they are imported come first."""
    code = """
import importlib, jax, pathlib, pkgutil
import matplotlib.pyplot, orbax.checkpoint, tensorboardX, tensorflow_datasets
from absl.flags import FLAGS
import cope_jax, tools
"""
    code += (
        STATE
        + """
config = {name: getattr(jax.config, name, None) for name in jax.config.values}
for package in (cope_jax, tools):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__") and "torch" not in module.name:
            importlib.import_module(module.name)
            for name in list(FLAGS):  # each command is alone in its process, and several have flags of one name
                home = FLAGS.find_module_defining_flag(name)
                if home.endswith("cli.entry") or (home == module.name and "cli" not in home):
                    delattr(FLAGS, name)
"""
        + SAME
        + """
print([name for name, value in config.items() if getattr(jax.config, name, None) != value])
print(jax._src.xla_bridge.backends_are_initialized())
"""
    )
    assert python(code) == "[]\n[]\nFalse\n"
