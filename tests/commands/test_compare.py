import csv
import importlib.metadata
import json
import shutil
import signal

import pytest

pytestmark = pytest.mark.xdist_group("compare")  # what `straight` trains is shared

RECORD = {
    "task",
    "encoding",
    "seed",
    "split",
    "metric",
    "value",
    "step",
    "parameters",
    "wall_seconds",
    "memory_gib",
}
ENVIRONMENT = {
    "python",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "cope_jax",
    "commit",
    "backend",
    "device_kind",
}
SPLITS = ["in_distribution", "dense", "sparse"]
SWEEP = ["blanks=1", "blanks=2", "blanks=3", "blanks=4"]
METRICS = ["loss", "token_error", "sequence_error"]


def read_records(workdir):
    return json.loads((workdir / "results.json").read_text())["records"]


def measured(workdir):
    """The records without what differs from run to run."""
    return [
        {name: record[name] for name in record.keys() - {"wall_seconds", "memory_gib"}}
        for record in read_records(workdir)
    ]


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_results_have_the_promised_form(straight):
    workdir, _ = straight
    results = json.loads((workdir / "results.json").read_text())
    assert results.keys() == {"records", "environment"}
    assert [(r["encoding"], r["seed"], r["split"], r["metric"]) for r in results["records"]] == [
        (encoding, seed, split, metric)
        for encoding in ("cope", "rope")
        for seed in (0, 1)
        for split in SPLITS + SWEEP
        for metric in METRICS
    ]
    for record in results["records"]:
        assert record.keys() >= RECORD
        assert (record["task"], record["step"]) == ("selective_copy", 24)
        assert record["wall_seconds"] > 0
        assert record["metric"] == "loss" or 0 <= record["value"] <= 1
    assert results["environment"].keys() >= ENVIRONMENT
    assert results["environment"]["jax"] == importlib.metadata.version("jax")
    parameters = {record["encoding"]: record["parameters"] for record in results["records"]}
    assert parameters["cope"] == parameters["rope"] + 4 * 4  # the table: npos_max · head width


def test_seeds_and_encodings_differ(straight):
    values = {}
    for record in read_records(straight[0]):
        values.setdefault((record["encoding"], record["seed"]), []).append(record["value"])
    assert len(set(map(tuple, values.values()))) == 4


def test_the_same_is_written_as_csv_table_and_plots(straight):
    workdir, done = straight
    with (workdir / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    records = read_records(workdir)
    assert [row["encoding"] for row in rows] == [record["encoding"] for record in records]
    assert [float(row["value"]) for row in rows] == [record["value"] for record in records]
    kinds = {
        (row["split"], row["kind"], row["level"], row["examples"], row["learning_rate"])
        for row in rows
    }
    assert {("dense", "split", "", "6", "0.001"), ("blanks=3", "sweep", "3", "2", "0.001")} <= kinds
    table = (workdir / "table.md").read_text()
    assert "`cope`" in table and "`rope`" in table and "24 steps, 2 seeds" in table
    plots = sorted(workdir.glob("*.png"))
    assert len(plots) >= 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    for path in [
        workdir / "results.json",
        workdir / "results.csv",
        workdir / "table.md",
        workdir / "table.tex",
        *plots,
    ]:
        assert str(path) in done.out
    assert "selective_copy: sequence error" in done.out
    run = workdir / "cells" / "cope" / "seed_0"
    train = f"cope-jax train --config={run}/config.json --seed=0 --workdir={run}"
    assert f'"command":"{train}"' in (workdir / "report.html").read_text()
    assert done.out.splitlines()[-1] == f"next: cope-jax inspect --model={run}"


def test_run_again_it_trains_nothing_and_shows_the_same(straight, compare):
    workdir, first = straight
    before = snapshot(workdir / "cells")
    done = compare(workdir).wait()
    assert (done.status, done.out) == (0, first.out)
    assert snapshot(workdir / "cells") == before


@pytest.mark.slow
def test_encodings_and_seeds_can_be_added(straight, compare, tmp_path):
    workdir = tmp_path / "grows"
    shutil.copytree(straight[0], workdir)
    before = snapshot(workdir / "cells")
    done = compare(workdir, encodings="none,rope", seeds=3).wait()
    assert done.status == 0, done.err
    records = read_records(workdir)
    assert {(r["encoding"], r["seed"]) for r in records} == {
        (e, s) for e in ("none", "rope") for s in range(3)
    }
    after = snapshot(workdir / "cells")
    assert {path: after[path] for path in before} == before
    old = [record for record in read_records(straight[0]) if record["encoding"] == "rope"]
    assert [
        record for record in records if record["encoding"] == "rope" and record["seed"] < 2
    ] == old


@pytest.mark.slow
def test_interrupted_by_kill_and_by_ctrl_c_it_ends_with_the_same_numbers(
    straight, compare, tmp_path
):
    first, last = tmp_path / "cells/cope/seed_0", tmp_path / "cells/rope/seed_1"
    command = compare(tmp_path)
    command.signal_when((first / "checkpoints" / "8").exists, signal.SIGKILL)
    assert command.wait().status == -signal.SIGKILL
    assert not (first / "result.json").exists()
    command = compare(tmp_path)
    command.signal_when((last / "checkpoints" / "8").exists, signal.SIGINT)
    done = command.wait()
    assert done.status == 130
    assert "then saving; press Ctrl-C again" in done.err and "Traceback" not in done.err
    assert done.err.splitlines()[-1].endswith("of 24; rerun the same command to resume")
    assert done.err.splitlines()[-2] == f"3 of 4 cells in {tmp_path} are finished"
    assert f"all results as a page: {tmp_path}/report.html" in done.out
    assert (tmp_path / "table.md").read_text().count("rope") and "seed_1" not in done.out
    assert [
        r["seed"] for r in read_records(tmp_path) if r["metric"] == "loss" and r["split"] == "dense"
    ] == [0, 1, 0]
    done = compare(tmp_path).wait()
    assert done.status == 0, done.err
    assert measured(tmp_path) == measured(straight[0])
    for cell in ("cope/seed_0", "rope/seed_1"):
        ours, theirs = (
            folder / "cells" / cell / "metrics.jsonl" for folder in (tmp_path, straight[0])
        )
        assert ours.read_bytes() == theirs.read_bytes()
