"""What holds for the project as a whole."""

import ast
import importlib
import re
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import cope_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIGS = sorted((ROOT / "experiments" / "configs").glob("[!_]*.py"))
COMMANDS = sorted(set((ROOT / "experiments").rglob("*.py")) - set(CONFIGS))
MODULES = sorted((ROOT / "cope_jax").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST_MODULE = 400


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["notebooks"] + extras["test"] + extras["dev"]
    return [requirement for requirement in map(Requirement, wanted) if requirement.name != PROJECT["name"]]


def tracked_files() -> list[Path]:
    """All files that git tracks or would add."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run([git, *listing], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


@pytest.mark.newest
def test_jax_is_strict_and_has_eight_devices():
    assert len(jax.devices()) == 8
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((3, 3))
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(3, jnp.int32) + jnp.ones(3, jnp.float32)
    with pytest.raises(UserWarning, match="an error"):
        warnings.warn("warnings are an error", stacklevel=1)


def test_version_is_said_once():
    assert cope_jax.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_constraints_pin_versions_and_hold_no_address():
    for requirement in constraints():
        assert requirement.url is None, requirement
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned_once_and_allowed(python):
    pins: dict[str, Version] = {}
    for pin in constraints():
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"{name} is pinned twice"
            pins[name] = Version(next(iter(pin.specifier)).version)
    for requirement in requirements():
        pinned = pins[canonicalize_name(requirement.name)]
        assert pinned in requirement.specifier, f"{requirement} does not allow {pinned}, which was tested"


def test_every_module_says_what_it_is():
    silent = [path for path in MODULES + COMMANDS + CONFIGS if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "these need a docstring"


def test_no_module_is_too_long_to_be_read_at_once():
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES + COMMANDS + CONFIGS + TESTS}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_MODULE}


@pytest.mark.newest
def test_every_module_can_be_imported():
    for path in MODULES:
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_no_path_of_a_machine():
    path_of_a_machine = re.compile(r"(?<![\w.~$}-])/(?:home|root|Users|work|mnt)/\w")
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        lines = enumerate(text.splitlines(), start=1)
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in lines if path_of_a_machine.search(line)]
    assert not found
