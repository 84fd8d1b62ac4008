import csv
import json
import math

import pytest

from cope_jax.runs.records import environment, select, summarise, write_results
from cope_jax.storage.files import write_atomically

RECORD = {
    "task": "selective_copy",
    "encoding": "cope(gate=value,npos_max=8)",
    "seed": 0,
    "split": "dense",
    "metric": "loss",
    "value": 0.5,
    "step": 10,
    "parameters": 3,
    "wall_seconds": 1.5,
}


def test_summary_of_two_seeds_by_hand():
    summary = summarise([0.1, 0.4])
    assert summary.count == 2
    assert summary.mean == pytest.approx(0.25)
    # The sample deviation divides by count − 1.
    assert summary.std == pytest.approx(0.15 * math.sqrt(2))
    assert (summary.median, summary.minimum, summary.maximum) == (pytest.approx(0.25), 0.1, 0.4)


def test_a_single_seed_has_no_deviation_and_none_has_no_summary():
    assert summarise([0.3]).std is None
    assert summarise([]) is None


def test_select_needs_every_field_to_agree():
    rows = [RECORD, {**RECORD, "seed": 1}, {"split": "dense"}]
    assert select(rows, split="dense", seed=1) == [rows[1]]
    assert select(rows, split="dense") == rows


def test_results_are_read_back_as_they_were(tmp_path):
    records = [RECORD, {**RECORD, "seed": 1, "note": "a, b"}]
    paths = write_results(tmp_path / "new", records, {"jax": "1"})
    assert [path.name for path in paths] == ["results.json", "results.csv"]
    assert json.loads(paths[0].read_text()) == {"records": records, "environment": {"jax": "1"}}
    rows = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert rows[0] == {**{name: str(value) for name, value in RECORD.items()}, "note": ""}
    assert rows[1]["note"] == "a, b"


def test_a_value_that_is_not_finite_is_null(tmp_path):
    write_results(tmp_path, [{**RECORD, "value": value} for value in (math.nan, math.inf)], {})

    def fail(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads((tmp_path / "results.json").read_text(), parse_constant=fail)
    assert [record["value"] for record in read["records"]] == [None, None]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = write_atomically(tmp_path / "table.md", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"


def test_environment_says_what_the_figures_depend_on():
    facts = environment()
    assert facts["backend"] == "cpu"
    assert facts["device_count"] == 8
    for name in (
        "python",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "numpy",
        "cope_jax",
        "device_kind",
        "platform",
    ):
        assert facts[name], name
    assert facts["cpu_count"] >= 1
    assert "commit" in facts
    json.dumps(facts)
