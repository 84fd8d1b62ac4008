"""The encodings that the README and a notebook print, copied as they are, keep every law of the
suites, and kernels take them on TPUs and CPUs.
"""

import inspect
import json
import math
import re
import sys
import types
from pathlib import Path

import pytest

from cope_jax.encodings import ENCODINGS
from tests.attention import (
    test_blockwise,
    test_cpp_tiles,
    test_decode,
    test_fused,
    test_generated,
    test_ring,
)
from tests.attention.test_generated import native as native
from tests.attention.test_generated import quickly as quickly
from tests.attention.test_generated import tiles as tiles
from tests.encodings import test_common, test_laws, test_ops_only
from tests.encodings.cases import CASES
from tests.oracle import encodings as oracles
from tests.oracle.rules import Rule, sigmoid

ROOT = Path(__file__).parents[2]
SUITES = (
    test_common,
    test_laws,
    test_ops_only,
    test_blockwise,
    test_decode,
    test_fused,
    test_generated,
    test_cpp_tiles,
    test_ring,
)
COSTLY = (test_blockwise, test_cpp_tiles, test_fused, test_generated, test_ring)


def logarithm(params, sizes):
    """−w_h log(1 + |i − j|)."""
    del sizes
    return oracles.of_distance(
        lambda head, q, i, j: -params["weight"][head] * math.log(1 + abs(i - j))
    )


def token_count(params, sizes, npos_max=64):
    """q·e[p], interpolated, where p sums σ(u_h·k_l) from the key to the query, at most N − 1."""

    def added(head, q, token, keys):
        gates = [sigmoid(float(params["gate"][head] @ key.k)) for key in keys]
        logits = []
        for j in range(len(keys)):
            p = min(sum(gates[j:]), npos_max - 1)
            below, above = params["table"][math.floor(p)], params["table"][math.ceil(p)]
            logits.append(float(q @ ((p % 1) * above + (1 - p % 1) * below)))
        return logits

    return Rule(added=added)


def readme(names):
    """Runs the code of README.md, which registers the encoding."""
    text = (ROOT / "README.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)), names)


def notebook(names):
    """Runs the imports and the class of the notebook; the class registers itself."""
    cells = json.loads((ROOT / "notebooks/own_encoding.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    imports = next(source for source in code if "import cope_jax as cj" in source)
    lines = [line for line in imports.splitlines() if not re.search("%|IPython|evaluation", line)]
    exec("\n".join([*lines, next(source for source in code if "(Encoding):" in source)]), names)


@pytest.fixture(autouse=True, scope="module")
def printed():
    """Both encodings have modules, names and oracles while these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ENCODINGS, "_entries", dict(ENCODINGS._entries))
        for page, oracle in ((readme, logarithm), (notebook, token_count)):
            module = types.ModuleType(f"cope_jax.encodings.{oracle.__name__}")
            patch.setitem(sys.modules, module.__name__, module)
            patch.setitem(oracles.ORACLES, oracle.__name__, oracle)
            page(vars(module))
        yield


def first_case(law):
    """The other arguments of a test that runs for almost every encoding; None for another test."""
    arguments, number = {}, 0
    for mark in getattr(law, "pytestmark", []):
        if mark.name == "parametrize":
            names, cases = mark.args
            names = re.findall(r"\w+", names) if isinstance(names, str) else names
            first = next(iter(cases))
            values = (
                first.values if hasattr(first, "marks") else first if len(names) > 1 else [first]
            )
            arguments |= dict(zip(names, values, strict=True))
            number = len(list(cases)) if "spec" in names else number
    return arguments if number > len(CASES) / 2 else None


LAWS = [
    pytest.param(
        law,
        id=f"{suite.__name__.rpartition('.')[2]}-{name}",
        marks=[pytest.mark.slow] if suite in COSTLY else [],
    )
    for suite in SUITES
    for name, law in vars(suite).items()
    if name.startswith("test_") and first_case(law) is not None
]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "spec", ["logarithm", pytest.param("token_count(npos_max=4)", marks=pytest.mark.slow)]
)
def test_it_keeps(law, spec, request):
    given = first_case(law) | {"spec": spec}
    names = inspect.signature(law).parameters
    law(**{name: given[name] if name in given else request.getfixturevalue(name) for name in names})


def test_every_suite_has_a_law():
    assert {law.values[0].__module__ for law in LAWS} == {suite.__name__ for suite in SUITES}
