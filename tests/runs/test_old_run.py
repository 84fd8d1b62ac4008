"""A run, its checkpoint and an export that commit 66f7da06 wrote remain readable.

`old_run.tar.xz` has a run of selective copy with cope+rope, stopped after its checkpoint of step 8
of 12; `expected.json`, which has the logits of that checkpoint and the results of step 12, both by
the code of that commit; and shards of 40 documents.
"""

import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).with_name("old_run.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return json.loads((folder / "expected.json").read_text())


def test_its_checkpoint_gives_the_same_logits(folder, expected):
    run = load(folder / "run")
    assert (run.name, run.step, run.seeds) == ("decoder", 8, (0,))
    logits_BLV = run.model()(jnp.arange(12).reshape(2, 6) % 5)
    np.testing.assert_allclose(logits_BLV, expected["logits"], rtol=0, atol=1e-5)


def test_it_goes_on_to_the_same_results(folder, expected):
    records = Experiment(load(folder / "run").experiment).train(folder / "run", [0])
    results = {f"{record['split']} {record['metric']}": record["value"] for record in records}
    assert results == pytest.approx(expected["records"], abs=1e-4)


def test_its_shards_hold_the_documents(folder):
    task = tasks.create(
        "sharded_text", folders=(str(folder / "shards"),), length=16, tokenizer="bytes"
    )
    rows = task.take("test", np.arange(task.size("test")))
    text = "".join(task.decode(row) for row in rows["inputs"])
    assert "says that key" in text and text.count("opens door") == 7
