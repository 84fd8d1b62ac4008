"""Rules of the project as a whole."""

import ast
import collections
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
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
from cope_jax.encodings import ENCODINGS
from cope_jax.models import MODELS
from cope_jax.tasks import TASKS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIGS = sorted((ROOT / "cope_jax" / "configs").glob("[!_]*.py"))
COMMANDS = sorted((ROOT / "cope_jax" / "commands").rglob("*.py"))
TOOLS = [
    path for folder in ("experiments", "tools") for path in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = sorted(set((ROOT / "cope_jax").rglob("*.py")) - {*CONFIGS, *COMMANDS})
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST_MODULE = 480  # lines of 100 columns
HOMES: dict[str, set[str]] = collections.defaultdict(set)
for registry in (ENCODINGS, TASKS, MODELS):
    for registered in registry:
        HOMES[registered].add(registry.get(registered).__module__)
ORDINARY_WORDS = {"none", "spam", "text", "words"}
"""Names with other meanings: they count only where a name is looked up or compared."""
MAY_NAME = {
    "cope_jax/grids/": "a grid chooses what it compares",
    "cope_jax/exchange/": "a published format is that of one model and of its encoding",
    "cope_jax/models/encoder.py": "the encoder is BERT's, and has its encoding by default",
    "cope_jax/training/experiment_config.py": "the default experiment; what has no attention has the encoding `none`",
    "cope_jax/commands/classify.py": "the systems of one comparison",
    "cope_jax/commands/language_models.py": "a perplexity by words is that of one task",
    "cope_jax/commands/tag.py": "the systems of one comparison",
    "experiments/reproductions.py": "a setting of a paper is that of a task and a model",
    "experiments/by_hand/": "weights written by hand are those of an encoding and of a task",
    "tools/": "a tool names what it measures, or tries to break",
}
"""Files, or how their paths begin, that name an encoding, task or model, with the reason."""
SAME_NAME = {"__init__.py", "__main__.py"}
STANDARD_NAME = {"inspect.py"}


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    wanted = (
        PROJECT["dependencies"]
        + extras["lab"]
        + extras["notebooks"]
        + extras["test"]
        + extras["dev"]
    )
    return [
        requirement
        for requirement in map(Requirement, wanted)
        if requirement.name != PROJECT["name"]
    ]


def tracked_files() -> list[Path]:
    """All files that git tracks or would add."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        [git, *listing], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
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


def test_nothing_stands_at_the_top_that_does_not_belong_there():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no clone")
    tracked = subprocess.run(
        [git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    folders = {".ci", ".github", "cope_jax", "docs", "experiments", "notebooks", "tests", "tools"}
    pages = {"AGENTS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md"}
    settings = {
        ".gitignore",
        ".pre-commit-config.yaml",
        "MANIFEST.in",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
    }
    allowed = folders | pages | settings | {"pyproject.toml", "setup.py"}
    assert {path.partition("/")[0] for path in filter(None, tracked)} <= allowed


def test_version_is_said_once():
    assert cope_jax.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_make_refuses_a_variable_that_it_does_not_have():
    make = shutil.which("make") or pytest.skip("no make")
    # Within `make test`, a make of its own would inherit flags, and print the folders that it
    # enters.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    def dry_run(variable: str) -> subprocess.CompletedProcess[str]:
        command = [make, "-n", "compare", variable]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    done = dry_run("SEED=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"\S+ \*\*\* there is no variable SEED: choose from PYTHON .* SEEDS .*\n", done.stderr
    )
    assert not dry_run("SEEDS=3").stderr


def test_constraints_pin_versions_and_hold_no_address():
    for requirement in constraints():
        assert requirement.url is None, requirement
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement


LISTED, UNLISTED = (f"https://index/absl_py-2.5.1-{tag}-none-any.whl" for tag in ("py3", "other"))


def test_every_pin_has_the_hash_of_a_file():
    lines = [
        line.split("  ") for line in (ROOT / ".ci" / "constraints.sha256").read_text().splitlines()
    ]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest, _ in lines)
    listed = {
        canonicalize_name(file[:end]) + file[end:]
        for _, file in lines
        for end in [file.index("-") if file.endswith(".whl") else file.rindex("-")]
    }
    for pin in constraints():
        start = f"{canonicalize_name(pin.name)}-{next(iter(pin.specifier)).version}"
        assert any(file.startswith((f"{start}-", f"{start}.")) for file in listed), (
            f"no hash of {pin}"
        )


@pytest.mark.parametrize(
    "urls, digest, status, refused",
    [
        ([LISTED], "0" * 64, 1, "does not have the SHA-256"),
        ([LISTED], None, 0, ""),  # None: the listed one
        ([UNLISTED], "0" * 64, 3, "does not list absl_py-2.5.1-other-none-any.whl (SHA-256 0000"),
        ([UNLISTED, LISTED], "0" * 64, 1, "does not have the SHA-256"),
        (["file:///wheels/absl_py-2.5.1-py3-none-any.whl"], "0" * 64, 0, ""),
    ],
)
def test_a_package_with_another_hash_is_refused(urls, digest, status, refused, tmp_path):
    lines = (
        line.split("  ") for line in (ROOT / ".ci" / "constraints.sha256").read_text().splitlines()
    )
    digest = digest or next(digest for digest, file in lines if urls[0].endswith(file))
    downloads = [{"url": url, "archive_info": {"hashes": {"sha256": digest}}} for url in urls]
    report = tmp_path / "installed.json"
    packages = [
        {"metadata": {"name": "absl-py"}, "download_info": download} for download in downloads
    ]
    report.write_text(json.dumps({"install": packages}))
    command = [sys.executable, "-I", "-S", ROOT / ".ci" / "hashes", report]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, refused in done.stderr) == (status, True), done.stderr
    assert ("index that the project was tested with" in done.stderr) == (status == 1)


@pytest.mark.parametrize("status, made, kept", [(0, 0, True), (1, 2, False), (3, 2, True)])
def test_make_removes_an_environment_only_if_a_hash_differs(status, made, kept, tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o700)
    (tmp_path / "rule").write_text(f"probe: ; @$(call COMPARE_HASHES,{python.parent})\n")
    make = shutil.which("make") or pytest.skip("no make")
    done = subprocess.run(
        [make, "-f", "Makefile", "-f", tmp_path / "rule", "probe"], cwd=ROOT, capture_output=True
    )
    assert (done.returncode, python.exists()) == (made, kept), done.stderr


def test_actions_are_pinned_by_commit():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (?!\./)(\S+)", workflow.read_text()):
            assert re.fullmatch(r"\S+@[0-9a-f]{40}", action), f"{workflow.name}: {action}"


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
        assert pinned in requirement.specifier, (
            f"{requirement} does not allow {pinned}, which was tested"
        )


def test_every_module_says_what_it_is():
    silent = [
        path
        for path in MODULES + COMMANDS + TOOLS + CONFIGS
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, "these need a docstring"


def test_docstrings_name_parameters_that_exist():
    strange = []
    for path in MODULES + COMMANDS + TOOLS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                strange += [(path, node.name, name) for name in named(node) - parameters(node)]
    assert not strange


def named(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The names that "Args:" of a docstring has."""
    listed = re.search(r"(?m)^Args:\n((?:  .*\n?|\n)+)", ast.get_docstring(node) or "")
    lines = re.findall(r"(?m)^  (\S[^:]*):\s", listed[1]) if listed else []
    return {name.strip().lstrip("*") for line in lines for name in line.split(",")}


def parameters(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The parameters of a function, or of a class's first method, which creates or calls it."""
    if isinstance(node, ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        return parameters(methods[0]) if methods else set()
    return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}


def test_no_module_is_too_long_to_be_read_at_once():
    lengths = {
        path: len(path.read_text().splitlines())
        for path in MODULES + COMMANDS + TOOLS + CONFIGS + TESTS
    }
    assert not {path: length for path, length in lengths.items() if length > LONGEST_MODULE}


EXTRAS = {
    "cope_jax/torch": "torch",
    "cope_jax/attention/kernels/gpu/triton_operations.py": "triton",
}


@pytest.mark.newest
def test_every_module_can_be_imported():
    for path in MODULES:
        needed = [extra for start, extra in EXTRAS.items() if path.is_relative_to(ROOT / start)]
        if not all(map(importlib.util.find_spec, needed)):
            continue
        importlib.import_module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )


def test_no_path_of_a_machine():
    path_of_a_machine = re.compile(r"(?<![\w.~$}-])/(?:home|root|Users|work|mnt)/\w")
    places = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        lines = enumerate(text.splitlines(), start=1)
        places += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in lines
            if path_of_a_machine.search(line)
        ]
    assert not places


def test_files_have_names_of_their_own():
    """Configs are left out: they are named after what they train, and chosen by path."""
    counts = collections.Counter(path.name for path in [*MODULES, *COMMANDS, *TOOLS])
    assert {name for name, count in counts.items() if count > 1} <= SAME_NAME
    standard = {f"{name}.py" for name in sys.stdlib_module_names}
    assert set(counts) & standard <= STANDARD_NAME, (
        "beside a script it would hide the standard library's"
    )


def test_nothing_else_names_an_encoding_a_task_or_a_model():
    """Adding one changes its file and the line that imports it: there are no ladders of cases."""
    spoken_in, excused = {}, set()
    for path in [*MODULES, *COMMANDS, *TOOLS]:
        name = str(path.relative_to(ROOT))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        spoken = (
            set() if path.name == "__init__.py" else names_in(ast.parse(path.read_text()), module)
        )
        reasons = {start for start in MAY_NAME if name.startswith(start)}
        excused |= reasons if spoken else set()
        if spoken and not reasons:
            spoken_in[name] = sorted(spoken)
    assert not spoken_in
    assert excused == set(MAY_NAME), "these name nothing any more"


def names_in(tree: ast.Module, module: str) -> set[str]:
    """The registered names that a module writes, and imported modules of registered classes."""
    nodes = list(ast.walk(tree))
    silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    asked = {id(child) for node in nodes if looks_up(node) for child in ast.walk(node)}
    spoken = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            modules = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            spoken |= modules & set().union(*HOMES.values()) - {module}
        elif isinstance(node, ast.Constant) and node.value in HOMES and id(node) not in silent:
            if module not in HOMES[node.value] and (
                id(node) in asked or node.value not in ORDINARY_WORDS
            ):
                spoken.add(node.value)
    return spoken


def looks_up(node: ast.AST) -> bool:
    """True if it compares the name of something, or asks a registry for one."""
    if isinstance(node, ast.Compare):
        return any(
            isinstance(side, (ast.Attribute, ast.Subscript, ast.Call))
            for side in [node.left, *node.comparators]
        )
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("create", "get")
    )


@pytest.mark.parametrize(
    "code, spoken",
    [
        ("from cope_jax.models.bert import Bert", {"cope_jax.models.bert"}),
        ("from cope_jax.models import elmo", {"cope_jax.models.elmo"}),
        ("if name != 'decoder': pass", {"decoder"}),
        ("if task.name == 'words': pass", {"words"}),
        ("if task.name in ('words', 'other'): pass", {"words"}),
        ("if record.get('task') == 'words': pass", {"words"}),
        ("tasks.create('text')", {"text"}),
        ("'cope'\nkind = 'words'\nprint('copes')", set()),
        ("def f():\n  'cope'\n  return kind == 'none'", set()),
    ],
)
def test_a_name_is_seen_where_it_is_spoken(code, spoken):
    assert names_in(ast.parse(code), "elsewhere") == spoken
