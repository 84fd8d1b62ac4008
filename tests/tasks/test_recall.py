"""Targets that a model of text can recall from its window, and losses by block of the text."""

import csv
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import cope_jax as cj
from cope_jax import tasks
from cope_jax.corpora.packing import repeated_pairs
from cope_jax.ops.losses import token_measures
from cope_jax.runs.records import select, write_results
from tests.oracle import text_losses

SHARE = 0.005
"""Of the pairs of the built-in sample; a good part of the repeated pairs are as rare."""


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_marked_are_rare_pairs_that_the_window_has_had(packing):
    options = {"tokenizer": "bytes", "length": 96, "packing": packing}
    task = tasks.create("text", recall=SHARE, **options)
    (train,) = (entries.tokens for entries in task.token_streams("train"))
    for split in ("train", "test", "length=192"):
        indices = np.arange(min(10, task.size(split)))
        batch = task.take(split, indices)
        marks_BL = batch.pop("repeated")
        assert marks_BL.dtype == np.float32
        counted = batch["weights"] > 0
        expected = text_losses.repeated(batch, train, SHARE)
        np.testing.assert_array_equal(marks_BL[counted], expected[counted])
        without = text_losses.repeated(batch)
        assert 0 < expected[counted].sum() < without[counted].sum()
        plain = tasks.create("text", **options).take(split, indices)
        assert plain.keys() == batch.keys()
        for name, field in plain.items():
            np.testing.assert_array_equal(field, batch[name])


def test_pairs_of_other_documents_and_rows_do_not_count(rng):
    batch = {name: rng.integers(0, 3, (4, 9), dtype=np.int32) for name in ("inputs", "targets")}
    apart = batch | {"segments": np.repeat(np.arange(3, dtype=np.int32), 3)[None].repeat(4, 0)}
    counts = []
    for fields in (batch, apart):
        marked = repeated_pairs(fields)
        np.testing.assert_array_equal(marked, text_losses.repeated(fields))
        counts.append(marked.sum())
    assert 0 < counts[1] < counts[0]


def test_losses_of_repeated_pairs_and_of_others(rng):
    logits = rng.normal(scale=3, size=(2, 4, 5))
    batch = {
        "targets": rng.integers(0, 5, (2, 4), dtype=np.int32),
        "weights": np.array([[1, 0, 2, 1], [1, 1, 0, 1]], np.float32),
    }
    marks = np.array([[1, 1, 0, 0], [0, 1, 1, 1]], np.float32)
    inputs = jnp.asarray(logits, jnp.float32), batch["targets"], batch["weights"]
    measures = token_measures(*inputs, repeated_BL=marks)
    for name, chosen in (("repeated", marks), ("other", 1 - marks), ("", np.ones((2, 4)))):
        measured = measures[f"{name}_loss".removeprefix("_")]
        np.testing.assert_allclose(measured, text_losses.losses(logits, batch, chosen), rtol=1e-6)
    assert "repeated_loss" not in token_measures(*inputs)


def test_a_share_out_of_range_is_one_line():
    for share in (-1.0, 1.5):
        message = rf"^text\.recall must lie in \[0, 1\], got {share}$"
        with pytest.raises(cj.errors.ConfigError, match=message):
            tasks.create("text", recall=share)


@pytest.fixture(scope="module")
def measured():
    """The records of an untrained model, with and without blocks, and the task."""
    options = {
        "vocab_size": 400,
        "length": 16,
        "sweep": (16, 32),
        "recall": SHARE,
        "data_dir": None,
    }
    config = cj.config(
        "wikitext2",
        encoding="rope",
        task={"options": options},
        evaluation={"examples": 9, "sweep_examples": 3, "batch_size": 2},
        job={"blocks": True, "mesh": {"data": 1}},
    )
    experiment = cj.Experiment(config)
    params = experiment.learner.init(np.int32(0)).params
    records = experiment.records([0], params, 0, 1.0)
    job = dataclasses.replace(config.job, blocks=False)
    plain = cj.Experiment(dataclasses.replace(config, job=job), experiment.task)
    return records, plain.records([0], params, 0, 1.0), experiment.task


def test_blocks_are_the_batches_of_the_evaluation(measured):
    records, plain, task = measured
    assert plain == [
        {name: value for name, value in row.items() if name != "blocks"} for row in records
    ]
    for split, batches, rows in (("test", 5, 9), ("length=16", 3, 6), ("length=32", 2, 3)):
        by_metric = {row["metric"]: row for row in select(records, split=split)}
        assert {name for name, row in by_metric.items() if "blocks" in row} == {
            *("loss", "repeated_loss", "other_loss")
        }
        examples = task.take(split, np.arange(rows))
        for row in by_metric.values():
            if "blocks" in row:
                means, weights = np.array(row["blocks"]).T
                # Means are rounded to four decimals.
                np.testing.assert_allclose(weights @ means / weights.sum(), row["value"], atol=1e-4)
        loss, marked = by_metric["loss"]["blocks"], by_metric["repeated_loss"]["blocks"]
        assert len(loss) == batches
        assert sum(weight for _, weight in loss) == examples["weights"].sum()
        assert (
            sum(weight for _, weight in marked)
            == (examples["weights"] * examples["repeated"]).sum()
        )


def test_tables_of_records_have_no_blocks(measured, tmp_path):
    records, _, _ = measured
    results, table = write_results(tmp_path, records, {})
    assert "blocks" in json.loads(results.read_text())["records"][0]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert "blocks" not in rows[0] and float(rows[0]["value"]) == records[0]["value"]
