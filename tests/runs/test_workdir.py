import dataclasses
import errno
import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from absl import flags

from cope_jax.cli import exits, interrupts
from cope_jax.cli import run as running
from cope_jax.errors import ConfigError, NonFiniteError, StorageError
from cope_jax.runs.workdir import (
    Workdir,
    check_encoding_files,
    read_records,
    replace_records,
    write_files,
    write_json,
)
from cope_jax.training.experiment_config import ExperimentConfig

ROOT = Path(__file__).parents[2]
HOLDS = """
import sys, time
from pathlib import Path
from cope_jax.runs.workdir import Workdir
with Workdir(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the workdir."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_bucket_is_no_workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ConfigError, match="gs:/bucket/run is not a folder"),
        Workdir(Path("gs://bucket/run")).locked(),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_second_run_in_a_workdir_is_refused_with_the_name_of_the_first(holder, tmp_path):
    with (
        pytest.raises(ConfigError, match="is in use by process") as error,
        Workdir(tmp_path / "run").locked(),
    ):
        pass
    assert f"process {holder.pid} on {socket.gethostname()}: wait until it ends" in str(error.value)
    with Workdir(tmp_path / "another").locked():
        pass


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_lock(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    for _ in range(2):
        with Workdir(tmp_path / "run").locked():
            assert (
                tmp_path / "run" / ".lock"
            ).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Workdir(tmp_path).locked():
        pass
    assert capsys.readouterr().err == (
        f"warning: {tmp_path} cannot be locked (No locks available): start only one run in it\n"
    )


def test_a_folder_that_is_read_only_is_refused_though_its_lock_is_not(tmp_path, monkeypatch):
    (tmp_path / ".lock").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    message = rf"^cannot write to {tmp_path} \(Permission denied\): choose another --workdir$"
    with pytest.raises(ConfigError, match=message), Workdir(tmp_path).locked():
        pass


def test_a_disk_that_is_read_only_is_a_storage_error(tmp_path, monkeypatch):
    with Workdir(tmp_path).locked():
        Workdir(tmp_path).open(ExperimentConfig(), seeds=(0,))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    read_only = os.statvfs_result([*[*os.statvfs(tmp_path)][:8], os.ST_RDONLY, 255])
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    message = rf"^cannot write to {tmp_path} \(Read-only file system\)"
    with pytest.raises(StorageError, match=message), Workdir(tmp_path).locked():
        pass
    with pytest.raises(StorageError, match=message):
        Workdir(tmp_path).open(ExperimentConfig(), seeds=(0,))
    Workdir(tmp_path).check(ExperimentConfig(), seeds=(0,))


def test_records_replace_their_like_and_what_was_written_meanwhile_stays(tmp_path):
    path = tmp_path / "found.json"
    assert read_records(path) == []
    replace_records(path, {"a": 1}, [{"a": 1, "b": 1}])
    path.write_text(json.dumps({"records": [*read_records(path), {"a": 2, "b": 2}]}))
    replace_records(path, {"a": 1}, [{"a": 1, "b": 3}])
    assert read_records(path) == [{"a": 2, "b": 2}, {"a": 1, "b": 3}]


@pytest.mark.parametrize("content", ['{"records": 5}', '{"records": [1]}', "[]"])
def test_records_of_another_shape_are_one_line(content, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(
        ConfigError,
        match=r"result.json is damaged \(.*\): delete it, and rerun the command that wrote it$",
    ):
        read_records(path)


def test_a_value_that_was_not_finite_is_nan_again(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"records": [{"value": math.inf}, {"value": 0.5}], "environment": {}})
    assert json.loads(path.read_text())["records"] == [{"value": None}, {"value": 0.5}]
    first, second = read_records(path)
    assert math.isnan(first["value"]) and second["value"] == 0.5


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="it is a file"), Workdir(tmp_path / "run").locked():
        pass


def test_checkpoints_are_a_folder_in_a_possible_path(tmp_path):
    assert not Workdir(tmp_path).has_checkpoints()
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ConfigError, match="checkpoints is a file, not a folder"):
        Workdir(tmp_path).has_checkpoints()
    for target in ("checkpoints", "gone"):
        (tmp_path / "checkpoints").unlink()
        (tmp_path / "checkpoints").symlink_to(target)
        with pytest.raises(ConfigError, match="checkpoints is a broken link, not a folder"):
            Workdir(tmp_path).has_checkpoints()
    with pytest.raises(ConfigError, match="File name too long"):
        Workdir(tmp_path / ("x" * 300)).has_checkpoints()


def test_more_steps_are_another_run_that_starts_from_it(tmp_path):
    config = ExperimentConfig()
    Workdir(tmp_path).open(config, [0])
    longer = dataclasses.replace(config.training, steps=2 * config.training.steps)
    with pytest.raises(
        ConfigError, match=r"start another run from it: --config\.training\.start\)"
    ):
        Workdir(tmp_path).open(dataclasses.replace(config, training=longer), [0])
    other = dataclasses.replace(longer, batch_size=config.training.batch_size + 1)
    changes = r"config\.training\.steps \([^)]*\), config\.training\.batch_size \([^)]*\): .* the same config$"
    with pytest.raises(ConfigError, match=changes):
        Workdir(tmp_path).open(dataclasses.replace(config, training=other), [0])


@pytest.mark.parametrize("seeds", [None, [0]])
def test_checkpoints_without_settings_are_no_new_run(seeds, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(
        ConfigError, match=r"has checkpoints but no config\.json: restore it, or choo"
    ):
        Workdir(tmp_path).open(ExperimentConfig(), seeds)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("seeds", ["[]", "5", "null", "[[0]]", "[-1]", "[0.5]", '["0"]', "[true]"])
def test_seeds_are_a_list_of_whole_numbers(seeds, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"config": {{}}, "seeds": {seeds}}}')
    with pytest.raises(
        ConfigError, match=r"config.json is damaged \(seeds are .*\): write the seeds of the run"
    ):
        Workdir(tmp_path).settings()


@pytest.mark.parametrize("name", ["mine", "rop"])
def test_a_run_names_the_file_of_its_encoding(name, tmp_path):
    """Also where the encoding is like another."""
    config = dataclasses.replace(ExperimentConfig(), encoding=name)
    settings = {
        "config": dataclasses.asdict(config),
        "seeds": [0],
        "encoding_files": {"own.py": "0"},
    }
    write_json(tmp_path / "config.json", settings)
    for check in (
        lambda: check_encoding_files(settings, config, tmp_path),
        lambda: Workdir(tmp_path).check(ExperimentConfig(), [0]),
    ):
        with pytest.raises(ConfigError, match=r"is from own\.py: give --encoding=own\.py"):
            check()
    with pytest.raises(ConfigError, match=f"^unknown encoding '{name}'"):
        check_encoding_files({}, config, tmp_path)


def test_digests_of_encodings_are_an_object(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {}, "encoding_files": [1]}')
    with pytest.raises(ConfigError, match=r"is damaged \(encoding_files are \[1\]\): write"):
        Workdir(tmp_path).settings()


def test_a_json_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*config.json \(Is a directory\)"):
        Workdir(tmp_path).settings()


@pytest.mark.parametrize(
    ("name", "message"), [("", "is empty, as with an unset"), ("~/runs", "does not replace ~ in")]
)
def test_folders_that_a_shell_has_not_filled_in_are_refused(name, message, monkeypatch):
    values = flags.FlagValues()
    flags.DEFINE_string("out", name, "A folder.", flag_values=values)
    values(["x"])
    monkeypatch.setattr(running.flags, "FLAGS", values)
    with pytest.raises(ConfigError, match=rf"--out.* {message}|shell {message}"):
        running._check_folders()


def test_the_environment_is_that_of_the_last_start(tmp_path):
    config = ExperimentConfig.from_mapping(
        {"encoding": "rope", "task": {"name": "flip_flop", "options": {"length": 8}}}
    )
    for commit in ("first", "second"):
        Workdir(tmp_path).open(config, [0], {"commit": commit})
        assert json.loads((tmp_path / "environment.json").read_text()) == {"commit": commit}
    Workdir(tmp_path).open(config, [0])
    assert json.loads((tmp_path / "environment.json").read_text()) == {"commit": "second"}


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("wrong"), 2, "error: wrong"),
        (NonFiniteError("step 3"), 3, "error: step 3"),
        (StorageError("full"), 4, "error: full"),
        (
            MemoryError("Unable to allocate 8.00 TiB"),
            2,
            "error: the command needs more memory than there is (Unable to allocate 8.00 TiB): lower its sizes",
        ),
        (
            jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 655360000000 bytes."),
            2,
            "error: the command needs more memory than there is (INTERNAL: Out of memory allocating 655360000000 "
            "bytes.): lower its sizes",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "x/y"),
            4,
            "error: cannot write to x/y (Read-only file system): "
            "complete files are intact; choose a folder that can be written to and rerun the command",
        ),
        (KeyboardInterrupt(), 130, "interrupted; rerun the same command to resume"),
        (interrupts.Terminated(), 143, "interrupted; rerun the same command to resume"),
    ],
)
def test_each_kind_of_error_has_its_line_and_status(error, status, line, capsys):
    with pytest.raises(SystemExit) as left, exits.clear_errors():
        raise error
    assert left.value.code == status
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    "error", [ValueError("a defect"), FileNotFoundError(2, "No such file"), RuntimeError("backend")]
)
def test_a_defect_keeps_its_traceback(error):
    with pytest.raises(type(error)), exits.clear_errors():
        raise error


def test_of_several_processes_only_the_first_speaks_without_its_number(monkeypatch, capsys):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.process_index", lambda: 3)
    with pytest.raises(SystemExit), exits.clear_errors():
        raise ConfigError("wrong")
    assert capsys.readouterr().err == "process 3: error: wrong\n"


@pytest.mark.parametrize("platform", ["foo", pytest.param("cuda", marks=pytest.mark.slow)])
def test_an_unknown_backend_is_one_clear_line(platform):
    code = "from cope_jax.cli.run import run; import jax; run(lambda: print(jax.devices()))"
    done = run(code, JAX_PLATFORMS=platform)
    if done.returncode == 0:
        pytest.skip(f"there is a {platform} here")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: JAX cannot start its backend, JAX_PLATFORMS is {platform} ("
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_a_command_begins_is_one_line(number):
    code = f"""
import signal, sys
class Signal:
    def find_spec(name, *_):
        if name == "absl":
            signal.raise_signal({int(number)})
sys.meta_path.insert(0, Signal)
from cope_jax.__main__ import main
main()
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (128 + number, f"{interrupts.LINE}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_obeyed_while_c_code_computes(number):
    code = f"""
import hashlib, os, threading
from cope_jax.cli import interrupts
interrupts.PATIENCE = 0.1
interrupts.install()
threading.Timer(0.1, os.kill, (os.getpid(), {int(number)})).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # for minutes, without a look at signals
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (128 + number, f"{interrupts.LINE}\n")


def test_a_signal_to_a_forked_process_ends_nothing_else():
    code = """
import os, signal, time
from cope_jax.cli import interrupts
interrupts.PATIENCE = 0.1
interrupts.install()
child = os.fork()
if not child:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.4)
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


def test_importing_the_commands_changes_no_hook():
    done = run("import sys, cope_jax.__main__; print(sys.excepthook is sys.__excepthook__)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_after_ctrl_c_nothing_runs_on_while_the_interpreter_is_taken_down():
    code = """
import atexit
from cope_jax.cli import exits
atexit.register(print, "late")
print("early")
with exits.no_late_words(), exits.clear_errors():
    raise KeyboardInterrupt
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (130, "early\n")
    assert done.stderr == "interrupted; rerun the same command to resume\n"


def run(code, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )


def test_files_of_a_run_are_written_once_and_never_changed(tmp_path):
    write_files(tmp_path, {"vocab.txt": "a\nb\n"})
    write_files(tmp_path, {"vocab.txt": "a\nb\n"})
    with pytest.raises(ConfigError, match=r"vocab\.txt does not match the current data"):
        write_files(tmp_path, {"vocab.txt": "b\na\n"})
    assert (tmp_path / "vocab.txt").read_text() == "a\nb\n"
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.txt"]


def test_ctrl_c_in_a_callback_that_drops_exceptions_is_not_lost():
    code = """
import gc
from cope_jax.cli import interrupts
interrupts.install()
def interrupt(phase, info):
    raise KeyboardInterrupt
gc.callbacks.append(interrupt)
gc.collect()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{interrupts.LINE}\n")


@pytest.mark.parametrize(
    ("module", "status"), [("jax._src.compiler", 130), ("importlib._bootstrap", 130), ("jaxy", 0)]
)
def test_ctrl_c_inside_jax_never_becomes_an_exception(module, status):
    code = f"""
import signal
from cope_jax.cli import interrupts
interrupts.install()
scope = {{"__name__": {module!r}}}
exec("def call(function):\\n try: function()\\n except KeyboardInterrupt: print('raised')", scope)
scope["call"](lambda: signal.raise_signal(signal.SIGINT))
"""
    done = run(code)
    expected = (130, "", f"{interrupts.LINE}\n") if status else (0, "raised\n", "")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_a_shell_that_ignores_ctrl_c_for_a_job_is_obeyed():
    code = """
import signal
from cope_jax.cli import interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.install()
signal.raise_signal(signal.SIGINT)
print("went on")
"""
    assert run(code).stdout == "went on\n"
