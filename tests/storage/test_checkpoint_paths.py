"""Checkpoints can be read on any path; only a folder with the name of a step is one."""

import gc
import os
import tempfile

import jax
import pytest

from cope_jax.errors import ConfigError, StorageError
from cope_jax.storage import checkpoint_folder
from cope_jax.storage.checkpoints import Checkpoints
from tests.storage.test_checkpoints import LEFTOVERS, PROGRESS, create, load, save, steps_in
from tests.training import tiny


@pytest.mark.parametrize(
    "name",
    ["lr[1e-3]", *(pytest.param(n, marks=pytest.mark.slow) for n in ("a*b", "**", "a\\b\udcff"))],
)
def test_the_path_of_a_run_is_not_a_pattern(name, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for other in ("lr1", "axb"):
        save(tmp_path / other / "checkpoints", 1, 3)
    for step in (2, 4):  # begun, and resumed
        with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
            checkpoints.restore(jax.eval_shape(create))
            checkpoints.save(step, create(step), PROGRESS)
    assert steps_in(tmp_path / name / "checkpoints") == [2, 4]
    step, state, _ = load(tmp_path / name / "checkpoints")
    assert (step, tiny.contents(state)) == (4, tiny.contents(create(4)))
    (tmp_path / "axb").rename(tmp_path / f"{name}2")
    assert load(tmp_path / f"{name}2" / "checkpoints", read_only=True)[0] == 3
    assert not list((tmp_path / "tmp").iterdir())
    (tmp_path / name).rename(tmp_path / "plain")
    assert load(tmp_path / "plain" / "checkpoints")[0] == 4


def test_a_pattern_that_cannot_be_avoided_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "t[mp]").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t[mp]"))
    with pytest.raises(
        ConfigError,
        match=r"t\[mp\]/cope_jax-link-\w+ has a sign of a pattern in its path: set TMPDIR",
    ):
        save(tmp_path / "a[b]", 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"a\[b\] has a sign of a pattern in its path: rename it for a run of sev"
    ):
        checkpoint_folder.CheckpointFolder(tmp_path / "a[b]")


@LEFTOVERS
def test_a_checkpoint_that_cannot_be_read_back_ends_the_run(tmp_path, monkeypatch):
    save(tmp_path / "lr[1]", 1)
    # Orbax writes what it cannot read.
    monkeypatch.setattr(checkpoint_folder, "_is_pattern", lambda path: False)
    with pytest.raises(
        StorageError,
        match=r"/2 was written but cannot be read \([^\n]*\): earlier [^\n]*--workdir$",
    ):
        with Checkpoints(tmp_path / "lr[1]", keep=1) as checkpoints:
            for step in (2, 3):
                checkpoints.save(step, create(step), PROGRESS)
    assert steps_in(tmp_path / "lr[1]") == [1, 2]
    gc.collect()


def test_only_the_first_checkpoint_of_a_command_is_read_back_and_only_its_single_arrays(
    tmp_path, monkeypatch
):
    seen = []
    load = checkpoint_folder.CheckpointFolder.load
    monkeypatch.setattr(
        checkpoint_folder.CheckpointFolder,
        "load",
        lambda store, step, like, partial: (
            seen.append((step, {*like})),
            load(store, step, like, partial),
        )[1],
    )
    save(tmp_path, 2, 4, 6)
    assert seen == [(2, {"step", "half", "key"})]


def test_what_is_not_named_by_a_step_is_no_checkpoint(tmp_path):
    save(tmp_path, 5)
    for name in ("007", "²", "٣", "6-2", "9" * 200, "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").touch()
    os.mkfifo(tmp_path / "9")
    assert load(tmp_path)[0] == 5
