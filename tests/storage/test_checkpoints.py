import gc
import itertools
import math
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cope_jax.errors import ConfigError, StorageError
from cope_jax.storage import checkpoint_folder, checkpoint_io
from cope_jax.storage.checkpoints import Checkpoints
from tests.training import tiny

PROGRESS = {
    "data": [
        {
            "next_index": 2**60 + 1,
            "inner": {"epochs": [1, 2], "name": "shuffle", "none": None, "on": True},
        },
        {},
    ],
    "seconds": 1.2345678901234567,
}


def create(seed=0, **changes):
    params = {"kernel": jnp.arange(6.0).reshape(2, 3) / 7 * seed, "bias": jnp.full((3,), jnp.nan)}
    return {
        "step": jnp.int32(seed),
        "params": params,
        "half": jnp.bfloat16(seed / 3),
        "key": jax.random.key(seed),
    } | changes


def save(folder, *steps, scores=(), **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step, score in itertools.zip_longest(steps, scores):
            checkpoints.save(step, create(step), PROGRESS | {"seconds": step / 3}, score)


def load(folder, like=None, **options):
    with Checkpoints(folder, **options) as checkpoints:
        return checkpoints.restore(like or jax.eval_shape(create))


def steps_in(folder):
    return sorted(int(step.name) for step in folder.iterdir())


def test_what_is_loaded_is_what_was_saved_to_the_last_bit(tmp_path):
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(5, create(3), PROGRESS)
        checkpoints.wait()
        assert checkpoints.latest() == 5
    step, state, progress = load(tmp_path / "new" / "folder")
    assert step == 5
    assert tiny.contents(state) == tiny.contents(create(3))
    assert jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key)
    assert progress == PROGRESS
    assert isinstance(progress["data"][0]["next_index"], int)
    assert {device for leaf in jax.tree.leaves(state) for device in leaf.devices()} == {
        jax.devices()[0]
    }


def test_where_nothing_was_saved_nothing_is_restored(tmp_path):
    assert load(tmp_path) is None


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path):
    save(tmp_path, 2, 4, 6, 10, keep=2)
    assert steps_in(tmp_path) == [6, 10]
    step, state, progress = load(tmp_path)
    assert (step, int(state["step"]), progress["seconds"]) == (10, 10, 10 / 3)


def test_the_best_are_kept_beside_the_newest_by_a_score_that_outlives_the_run(tmp_path):
    save(tmp_path, 2, 4, 6, 8, scores=[0.5, 0.25, 0.75, None], keep=1, keep_best=2)
    assert steps_in(tmp_path) == [2, 4, 8]
    save(tmp_path, 10, 12, 14, scores=[0.3, -math.inf, 0.9], keep=1, keep_best=2)
    assert steps_in(tmp_path) == [4, 10, 14]


def test_a_step_is_saved_once(tmp_path):
    save(tmp_path, 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, create(9), PROGRESS)
    assert int(load(tmp_path)[1]["step"]) == 4


@pytest.mark.parametrize("read_only", [False, True])
def test_a_checkpoint_whose_folder_was_renamed_is_not_taken_for_another_step(
    read_only, tmp_path, capfd
):
    save(tmp_path / "run", 2, 4)
    (tmp_path / "run" / "4").rename(tmp_path / "run" / "8")
    assert load(tmp_path / "run", read_only=read_only)[0] == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "run/8 cannot be read (its folder was renamed, it is of step 4): " in line
    assert line.endswith("; using that of step 2")


def test_a_checkpoint_half_written_is_not_seen_and_only_a_run_removes_it(tmp_path):
    save(tmp_path, 4, 6)
    half = (tmp_path / "6").rename(tmp_path / "6.orbax-checkpoint-tmp")
    assert load(tmp_path, read_only=True)[0] == 4
    assert half.exists()
    save(tmp_path, 8)
    assert steps_in(tmp_path) == [4, 8]


def test_saving_returns_while_writing_goes_on_and_waiting_waits(tmp_path, monkeypatch):
    written = threading.Event()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, create(2), PROGRESS)
        monkeypatch.setattr(checkpoints._writing, "result", lambda: written.wait(60))
        waiting = threading.Thread(target=checkpoints.wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        written.set()
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_state_may_be_donated_as_soon_as_saving_returns(tmp_path):
    spoil = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    state = {"kernel": jnp.arange(2.0**20), "step": jnp.int32(0)}
    spoil(state)
    assert state["kernel"].is_deleted()
    with Checkpoints(tmp_path) as checkpoints:
        for step in (2, 4):
            state = {"kernel": jnp.arange(2.0**20) * step, "step": jnp.int32(step)}
            expected = tiny.contents(state)
            checkpoints.save(step, state, PROGRESS)
            spoiled = spoil(state)
    assert not spoiled["kernel"].any()
    assert tiny.contents(load(tmp_path, jax.eval_shape(lambda: spoiled))[1]) == expected


def test_an_error_of_a_write_is_raised_by_what_comes_next(tmp_path, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, create(2), PROGRESS)
    monkeypatch.setattr(checkpoints._writing, "result", fail)
    with pytest.raises(StorageError, match=r"cannot write to .* \(No space left on device\)"):
        checkpoints.save(4, create(4), PROGRESS)
    assert checkpoints.latest() is None
    checkpoints.wait()


def split(devices):
    mesh = jax.make_mesh(
        (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    specs = {"kernel": P("data"), "key": P()}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def draw():
    return {"kernel": jax.random.normal(jax.random.key(1), (16, 3)), "key": jax.random.key(2)}


@pytest.mark.parametrize("devices", [4, 1])
def test_what_eight_devices_saved_is_read_by_fewer(devices, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, jax.jit(draw, out_shardings=split(8))(), PROGRESS)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(draw),
        split(devices),
    )
    state = load(tmp_path, like)[1]
    assert tiny.contents(state) == tiny.contents(draw())
    assert state["kernel"].sharding == split(devices)["kernel"]


def remove(path):
    path.unlink()


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :: 8] = bytes(255 - byte for byte in content[len(content) // 2 :: 8])
    path.write_bytes(content)


# When a load fails, Orbax leaves the tasks of the other arrays behind unawaited, to be collected
# before the test ends.
LEFTOVERS = pytest.mark.filterwarnings(
    "ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def flip(path):
    content = bytearray(path.read_bytes())
    if content:  # one file only says by its name what the folder is
        content[len(content) // 2] ^= 4
    path.write_bytes(content)


SLOW = pytest.mark.slow


@pytest.fixture
def impatient(monkeypatch):
    """Without the wait for what threads print."""
    monkeypatch.setattr(checkpoint_folder.time, "sleep", lambda seconds: None)


@LEFTOVERS
@pytest.mark.parametrize(
    ("damage", "every"),
    [
        (flip, False),
        *(pytest.param(damage, True, marks=SLOW) for damage in (flip, remove, halve, scramble)),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_used(
    damage, every, tmp_path, impatient, capfd
):
    """One file of each folder is damaged, or every file in turn."""
    save(tmp_path / "whole", 4, 6)
    damaged = 0
    files = [path for path in sorted((tmp_path / "whole" / "6").rglob("*")) if path.is_file()]
    files = files if every else list({path.parent: path for path in files}.values())
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / file.relative_to(tmp_path / "whole"))
        capfd.readouterr()
        # Some files are not needed; what must not happen is another state, or another error.
        step, state, progress = load(folder)
        assert tiny.contents(state) == tiny.contents(create(step)), file
        assert progress == PROGRESS | {"seconds": step / 3}, file
        if step == 4:
            damaged += 1
            aside = tmp_path / f"{number}-damaged" / "6"
            warning = capfd.readouterr().err
            assert warning.startswith(f"warning: checkpoint {folder / '6'} cannot be read (")
            assert f"moved to {aside}; using that of step 4\n" in warning
            assert steps_in(folder) == [4] and aside.is_dir()
    assert damaged >= (6 if every else 3)
    gc.collect()


def test_a_part_of_the_state_is_read_alone(tmp_path, monkeypatch):
    save(tmp_path, 3)
    read = checkpoint_folder.ocp.load_checkpointables
    asked = []
    monkeypatch.setattr(
        checkpoint_folder.ocp,
        "load_checkpointables",
        lambda path, like: asked.append(like["state"]) or read(path, like),
    )
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        step, state, progress = checkpoints.restore(
            {"params": jax.eval_shape(create)["params"]}, partial=True
        )
        assert [[*like] for like in asked] == [["params"]]
        with pytest.raises(
            ConfigError, match=r"is of another model \(params.bias: float32\[3\], not nothing\)"
        ):
            checkpoints.restore({"params": {"kernel": jnp.zeros((2, 3))}}, partial=True)
    assert tiny.contents(state) == tiny.contents({"params": create(3)["params"]})
    assert (step, progress["seconds"]) == (3, 1.0)


def largest(folder):
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


@LEFTOVERS
def test_a_single_bit_of_an_array_is_noticed(tmp_path, impatient, capfd):
    states = {
        step: {"kernel": jax.random.normal(jax.random.key(step), (100, 100))} for step in (4, 6)
    }
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, PROGRESS)
    flip(largest(tmp_path / "run" / "6"))  # the library reads this without an error
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.restore(jax.eval_shape(lambda: states[4]), partial=True)[0] == 4
    assert load(tmp_path / "run", jax.eval_shape(lambda: states[4]))[0] == 4
    assert "(the array kernel does not match its checksum)" in capfd.readouterr().err
    gc.collect()


@pytest.mark.slow
@LEFTOVERS
def test_the_step_of_a_damaged_checkpoint_is_written_again_and_damaged_again(tmp_path, impatient):
    folder = tmp_path / "run"
    save(folder, 4, 6)
    for _ in range(2):
        halve(largest(folder / "6"))
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.restore(jax.eval_shape(create))[0] == 4
            checkpoints.save(6, create(6), PROGRESS)
        assert steps_in(folder) == [4, 6]
    assert load(folder)[0] == 6
    assert sorted(path.name for path in (tmp_path / "run-damaged").iterdir()) == ["6", "6-2"]
    gc.collect()


@LEFTOVERS
def test_damage_is_one_line_on_stderr(tmp_path, capfd):
    save(tmp_path / "run", 4, 6)
    remove(largest(tmp_path / "run" / "6"))
    assert load(tmp_path / "run")[0] == 4
    gc.collect()
    assert len(capfd.readouterr().err.splitlines()) == 1


@LEFTOVERS
def test_who_only_reads_moves_nothing(tmp_path, impatient, capfd):
    save(tmp_path / "run", 4, 6)
    halve(largest(tmp_path / "run" / "6"))
    assert load(tmp_path / "run", read_only=True)[0] == 4
    assert "left in place; using that of step 4" in capfd.readouterr().err
    assert steps_in(tmp_path / "run") == [4, 6]
    gc.collect()


def test_who_reads_while_the_run_rotates_its_checkpoints_gets_the_newest(tmp_path, impatient):
    save(tmp_path / "run", 4)
    with Checkpoints(tmp_path / "run", read_only=True) as reader:
        save(tmp_path / "run", 6, 8)
        assert steps_in(tmp_path / "run") == [6, 8]
        assert reader.restore(jax.eval_shape(create))[0] == 8


def test_a_disk_that_refuses_a_move_is_no_damage():
    error = StorageError("the disk is full")
    with pytest.raises(StorageError, match="the disk is full"):
        checkpoint_io.in_all_processes(lambda: (_ for _ in ()).throw(error))


@pytest.mark.slow
@LEFTOVERS
def test_where_no_checkpoint_can_be_read_nothing_is_moved(tmp_path, impatient):
    save(tmp_path / "run", 4, 6)
    for step in ("4", "6"):
        halve(largest(tmp_path / "run" / step))
    with pytest.raises(
        ConfigError, match=r"no checkpoint in .*run can be read \(6: .*; 4: .*\): restore"
    ) as error:
        load(tmp_path / "run")
    assert "\n" not in str(error.value)
    assert steps_in(tmp_path / "run") == [4, 6]
    gc.collect()


@pytest.mark.parametrize(
    ("like", "difference"),
    [
        (
            create(params={"kernel": jnp.zeros((2, 4)), "bias": jnp.zeros(3)}),
            "float32[2, 3], not float32[2, 4]",
        ),
        (create(params={"kernel": jnp.zeros((2, 3))}), "bias: float32[3], not nothing"),
        (create(half=jnp.float32(0)), "half: bfloat16[], not float32[]"),
        (create(more=jnp.zeros(1)), "more: nothing, not float32[1]"),
    ],
    ids=["shape", "fewer", "type", "more"],
)
def test_a_checkpoint_of_another_model_is_an_error_before_an_array_is_read(
    like, difference, tmp_path, monkeypatch
):
    save(tmp_path, 2, 4)
    monkeypatch.setattr(checkpoint_folder.ocp, "load_checkpointables", None)
    with pytest.raises(
        ConfigError, match=rf"checkpoint .*4 is of another model .*{re.escape(difference)}"
    ) as error:
        load(tmp_path, like)
    assert "\n" not in str(error.value)
    assert steps_in(tmp_path) == [2, 4]
