"""Several real processes whose run is in a bucket, against a server on this machine."""

import signal
from pathlib import Path

import pytest

from cope_jax.storage.bucket import Bucket
from cope_jax.storage.mirror import mirrored
from tests.commands.several import Processes
from tests.storage.saving import URL, complete
from tools.torture.__main__ import differences
from tools.torture.tortured import CONFIG

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture
def launch(server, tmp_path):
    """Starts two processes with one device each: (workdir, *flags)."""
    variables = {"TENSORSTORE_GCS_HTTP_URL": server.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}

    def begin(workdir, *flags):
        given = [
            f"--config={CONFIG}",
            "--config.encoding=cope",
            f"--workdir={workdir}",
            "--config.job.mesh.fsdp=2",
        ]
        given += ["--config.training.steps=24", "--config.job.mesh.data=1", *flags]
        return Processes(tmp_path / "compiled", 2, 1, *given, variables=variables)

    return begin


@pytest.mark.slow
def test_a_stopped_run_in_a_bucket_ends_as_one_on_a_disk_that_was_not_stopped(
    launch, server, tmp_path
):
    straight = launch(tmp_path / "straight")
    assert [done.status for done in straight.wait()] == [0, 0]
    running = launch(URL)
    running.signal_when(lambda: 4 in complete(server), 1, signal.SIGTERM)
    ended = running.wait()
    assert [done.status for done in ended] == [143, 143], ended
    assert not any("Traceback" in done.err for done in ended)
    (step,) = {max(complete(server))}
    assert 4 <= step < 24
    ended = launch(URL).wait()
    assert [done.status for done in ended] == [0, 0], ended
    assert f"resumes from step {step}" in ended[0].err
    with mirrored(URL) as folder:
        assert differences(tmp_path / "straight", Path(folder)) == []
    names = Bucket(URL).names("checkpoints/24/")
    pieces = [name for name in names if "params.embedding.embedding/c/" in name]
    assert len(pieces) == 2 and len([name for name in names if "/.written/" in name]) == 2
    assert ".lock" not in Bucket(URL).names()


@pytest.mark.slow
def test_a_comparison_of_two_processes_in_a_bucket_is_trained_once(server, tmp_path):
    variables = {"TENSORSTORE_GCS_HTTP_URL": server.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}
    flags = [
        f"--config={CONFIG}",
        "--encodings=cope,rope",
        "--seeds=1",
        f"--workdir={URL}",
        "--config.training.steps=8",
    ]
    flags += [
        "--config.training.evaluate_every=4",
        "--config.job.mesh.fsdp=2",
        "--config.job.mesh.data=1",
    ]
    printed = []
    for _ in range(2):
        cache = tmp_path / "compiled"
        ended = Processes(cache, 2, 1, *flags, command="compare", variables=variables).wait()
        assert [done.status for done in ended] == [0, 0], ended
        printed.append(ended[0].err)
    assert "8/8" in printed[0] and "8/8" not in printed[1]
    names = Bucket(URL).names()
    assert {
        "results.json",
        "table.md",
        "cells/cope/seed_0/result.json",
        "cells/rope/seed_0/result.json",
    } <= {*names}
    assert not [name for name in names if name.endswith(".lock")]
