"""Weights written by hand solve their tasks at four times the trained length, and broken ones fail."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from cope_jax.layout import WHOLE
from cope_jax.models.decoder import Decoder
from experiments.by_hand import __main__ as command
from experiments.by_hand import limits, measure
from tools.publish import read_tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "can.md"

CELLS = [
    pytest.param(ability, encoding, marks=() if encoding == "cope" else pytest.mark.slow)
    for ability, names in limits.CAN.items()
    for encoding in names
]


def error(encoding: str, ability: str, times: int) -> float:
    return measure.error(encoding, ability, times, examples=8, attention="full")


@pytest.mark.parametrize(("ability", "encoding"), CELLS)
def test_weights_make_no_error_in_longer_sequences(ability, encoding):
    assert error(encoding, ability, 4) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ability", limits.CAN)
def test_weights_make_no_error_at_the_trained_length(ability):
    assert error(limits.CAN[ability][-1], ability, 1) == 0


BROKEN = [
    ("count", "fox", ("blocks", "encoding", "fox", "kernel")),
    ("ignore", "cope", ("blocks", "encoding", "cope", "table")),
    ("steps", "mapformer", ("blocks", "encoding", "mapformer", "frequencies")),
    ("occurrence", "path", ("blocks", "encoding", "path", "beta_kernel")),
    ("index", "pope", ("blocks", "encoding", "pope", "phase")),
    ("recall", "none", ("blocks", "attention", "key", "kernel")),
    ("parity", "none", ("blocks", "mlp", "outer", "kernel")),
    ("stack", "cope_signed", ("blocks", "encoding", "cope_signed", "table")),
    ("copy", "stick_breaking", ("blocks", "attention", "query", "kernel")),
]
SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in BROKEN[2:]]


@pytest.mark.parametrize(("ability", "encoding", "path"), [*BROKEN[:2], *SLOWLY])
def test_weights_fail_without_a_parameter(ability, encoding, path, monkeypatch):
    intact = measure.parameters

    def broken(*arguments):
        params = intact(*arguments)
        leaf = params
        for name in path:
            leaf = leaf[name]
        assert np.any(leaf)
        leaf[...] = 0
        return params

    monkeypatch.setattr(measure, "parameters", broken)
    assert error(encoding, ability, 1) > 0


def untrained(encoding: str, ability: str):
    settings = measure.config(encoding, ability, 1, attention="full")
    task = settings.task.create()
    return Decoder(settings.model_config(task, WHOLE), rngs=nnx.Rngs(0)), task


@pytest.mark.parametrize("encoding", sorted(x for a, x in limits.CANNOT if a == "state"))
def test_equal_tokens_have_equal_outputs(encoding):
    """So no weights solve `state`: the products of equal elements differ."""
    model, _ = untrained(encoding, "recall")
    logits_LV = np.asarray(model(np.full((1, 12), 5, np.int32)))[0]
    np.testing.assert_allclose(logits_LV, logits_LV[:1].repeat(12, axis=0), atol=1e-5)


def test_the_bit_to_recall_is_not_in_the_multiset_of_tokens():
    """So one layer without positions cannot solve `ignore`."""
    model, task = untrained("none", "ignore")
    texts = np.stack([task.encode(text) for text in ("w 0 i 1 r", "w 1 i 0 r", "w 0 i 0 r")])
    first, swapped, other = np.asarray(model(texts))[:, -1]
    np.testing.assert_allclose(first, swapped, atol=1e-5)
    assert np.abs(first - other).max() > 1e-3


def test_the_page_has_the_verdicts_and_the_learned_errors(monkeypatch):
    monkeypatch.setattr(measure, "error", lambda *_: 0.0)
    learned, text = command.errors_learned(), PAGE.read_text()
    cells = {
        (ability, encoding): shown
        for table in read_tables(f"## Tables\n{text}")["Tables"]
        for encoding, row in table.items()
        for ability, shown in row.items()
        if encoding in limits.ALL and ability != "encoding"
    }
    assert len(cells) == 110
    for (ability, encoding), shown in cells.items():
        verdict = command.verdict(encoding, ability, [64], 1)
        verdict = verdict.removesuffix(" ×13" if ability == "index" else " ×64")
        assert shown == verdict + command.bracket(learned, ability, encoding)
    counts = [sum(shown.startswith(word) for shown in cells.values()) for word in ("can", "cannot")]
    counts += [
        sum(shown.startswith(word) for shown in cells.values()) for word in ("limit", "open")
    ]
    can = counts[0] - counts[1]
    sentence = re.sub(r"\s+", " ", text)
    assert (
        f"Of 110 cells, {can} have weights, {counts[1]} cannot be solved by any, and {counts[2]} have a limit. "
        f"The other {counts[3]} are open" in sentence
    )


def run(flag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.by_hand", flag]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_help_shows_defaults():
    shown = run("--help").stdout
    assert "--examples: Number of sequences of each length.\n    (default: '1000')" in shown
    assert "(default: '1,64')" in shown


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--encodings=cpoe", "unknown encoding 'cpoe': did you mean 'cope'? Choose from alibi, "),
        ("--exmaples=9", "unknown flag --exmaples: did you mean --examples? See --help"),
    ],
)
def test_mistakes_are_one_line(flag, line):
    done = run(flag)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
