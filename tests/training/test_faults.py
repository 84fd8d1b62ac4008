"""Disks that are full or read-only, and several processes of which one has a fault."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from cope_jax.errors import StorageError, clear_storage_errors, storage_reason
from cope_jax.storage import checksum
from cope_jax.storage.checkpoints import Checkpoints
from tests.training import faulty

ROOT = Path(__file__).parents[2]
LINE = "cannot write to {} ({}): complete files are intact; free space and rerun the command"


def begin(*arguments, devices=1, within=()):
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    flags = f"{flags} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [*within, sys.executable, "-m", "tests.training.faulty", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, timeout=300):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it hangs:\n{out}\n{err}") from None
    return process.returncode, out, err


def results(*processes):
    """The last line of each, which follows those of Gloo."""
    ended = [end(process) for process in processes]
    assert [status for status, _, _ in ended] == [0] * len(ended), ended
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def result(process):
    return results(process)[0]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(name, folder):
    """Starts two processes of four devices each."""
    port = free_port()
    return [begin(name, folder, port, 2, index, devices=4) for index in range(2)]


def mounted(folder, mount):
    """A prefix for a command, which then finds a file system of its own in the folder."""
    within = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'cd "{folder}" && {mount} && exec "$@"',
        "sh",
    )
    try:
        subprocess.run([*within, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    return within


def small(folder, size):
    return mounted(folder, f"mount -t tmpfs -o size={size} tmpfs .")


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line_and_earlier_checkpoints_stay_whole(tmp_path):
    report = result(begin("fill", tmp_path, within=small(tmp_path, "1m")))
    assert report["message"] == LINE.format(tmp_path / "checkpoints", "No space left on device")
    assert report["whole"] and report["restored"] == report["steps"][-1] >= 2


@pytest.mark.slow
def test_a_file_too_large_is_one_clear_line_and_earlier_checkpoints_stay_whole(tmp_path):
    report = result(begin("small_files", tmp_path))
    assert report["message"] == LINE.format(tmp_path / "checkpoints", "File too large")
    assert (report["steps"], report["restored"], report["whole"]) == ([1], 1, True)


@pytest.mark.slow
def test_metrics_on_a_full_disk_are_one_clear_line_and_what_was_written_is_read(tmp_path):
    report = result(begin("fill_metrics", tmp_path, within=small(tmp_path, "256k")))
    assert re.fullmatch(
        re.escape(LINE.format("PATH", "No space left on device")).replace("PATH", ".*"),
        report["message"],
    )
    assert report["written"] <= report["read"] <= report["written"] + 1 and report["written"] > 10


@pytest.mark.slow
def test_a_read_only_folder_is_one_clear_line_and_can_be_read(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, faulty.create(1), faulty.PROGRESS)
    within = mounted(tmp_path, "mount --bind . . && mount -o remount,bind,ro .")
    report = result(begin("fill", tmp_path, within=within))
    assert "(Read-only file system): complete files are intact" in report["message"]
    assert (report["steps"], report["restored"], report["whole"]) == ([1], 1, True)
    assert (
        "Read-only file system" in result(begin("fill_metrics", tmp_path, within=within))["message"]
    )


def test_only_errors_of_the_disk_become_storage_errors():
    with pytest.raises(ValueError, match=r"^no space between words$"), clear_storage_errors("here"):
        raise ValueError("no space between words")
    with pytest.raises(PermissionError), clear_storage_errors("here"):
        raise PermissionError(13, "Permission denied")
    with pytest.raises(StorageError, match=r"^cannot write to there \(No space left on device\)"):
        with clear_storage_errors("here"), clear_storage_errors("there"):
            try:
                raise OSError(28, "full")
            except OSError as error:
                raise ValueError("cannot save") from error
    assert storage_reason(ValueError("DATA_LOSS: [os_error_code='2']")) is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together") / "checkpoints"
    ended = [end(process) for process in together("save_together", folder)]
    assert [status for status, _, _ in ended] == [0, 0], ended
    return folder


@pytest.fixture
def checkpoints(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def expected(step):
    return checksum.of_arrays(faulty.create(step))


@pytest.mark.slow
def test_two_processes_restore_what_they_saved(checkpoints):
    for report in results(*together("restore_together", checkpoints)):
        assert report == {"step": 4, "fingerprint": expected(4), "progress": faulty.PROGRESS}
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["4", "6"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_one_process_restores_what_two_saved(devices, checkpoints):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    with Checkpoints(checkpoints) as store:
        step, state, _ = store.restore(faulty.like(mesh))
    assert (step, checksum.of_arrays(state)) == (4, expected(4))
    assert len(state["params"]["kernel"].sharding.device_set) == devices


@pytest.mark.slow
def test_two_processes_go_back_together_where_the_newest_is_damaged(checkpoints):
    for file in checkpoints.glob("4/state/ocdbt.process_1/d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    ended = [end(process) for process in together("restore_together", checkpoints)]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert [json.loads(out.splitlines()[-1])["fingerprint"] for _, out, _ in ended] == [
        expected(2)
    ] * 2
    assert [err.count("warning: checkpoint") for _, _, err in ended] == [1, 0]
    assert (checkpoints.with_name("checkpoints-damaged") / "4").is_dir()
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["4", "6"]  # written again


@pytest.mark.slow
def test_a_process_that_cannot_read_makes_all_go_back(checkpoints):
    for report in results(*together("fail_in_second", checkpoints)):
        assert report == {"step": 2, "fingerprint": expected(2), "left": [2]}


@pytest.mark.slow
def test_two_processes_end_where_the_disk_is_full(tmp_path):
    within = small(tmp_path, "1m")
    first, second = result(
        begin("pair", "fill_together", tmp_path, free_port(), devices=4, within=within)
    )
    assert 4 in (first["status"], second["status"]) and 0 not in (first["status"], second["status"])
    assert "No space left on device): complete files are intact" in first["error"] + second["error"]
