"""Laws of all registered tasks, and of all with levels, at their default options."""

import importlib
import pathlib
import re
import subprocess
import sys
import zlib

import numpy as np
import pytest

import cope_jax.tasks
from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.tasks.synthetic import SyntheticTask


@pytest.fixture(
    params=[name for name in tasks.names() if issubclass(tasks.TASKS.get(name), SyntheticTask)]
)
def task(request):
    return tasks.create(request.param)


def all_splits(task):
    return (*task.splits, *(split for _, split in task.sweep))


def test_every_file_is_registered():
    folder = pathlib.Path(cope_jax.tasks.__file__).parent
    registering = {
        path.stem for path in folder.glob("*.py") if "@TASKS.register(" in path.read_text()
    }
    assert registering == set(tasks.names()), "import the new file in cope_jax/tasks/__init__.py"


def test_tasks_do_without_jax():
    code = "import sys, cope_jax.tasks; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_name_is_the_registered_one():
    assert [tasks.create(name).name for name in tasks.names()] == list(tasks.names())


def test_an_ability_is_known():
    for name in tasks.names():
        assert set(tasks.TASKS.get(name).abilities) <= set(tasks.ABILITIES)
    for ability in tasks.ABILITIES:
        measuring = [name for name in tasks.names() if ability in tasks.create(name).abilities]
        assert measuring and list(tasks.names(ability)) == measuring
    with pytest.raises(ConfigError, match="unknown ability 'counting': did you mean 'count'"):
        tasks.names("counting")


def test_states_its_splits_and_metric(task):
    assert task.splits[:2] == ("train", "in_distribution")
    assert task.evaluation_splits == task.splits[1:]
    assert task.metric in ("token_error", "sequence_error", "f1_error", "normalised_error")
    assert len(set(task.vocabulary)) == task.vocab_size


def test_shapes_types_and_ranges(task):
    for split in all_splits(task):
        batch = task.sample(np.random.default_rng(0), 3, split)
        shape = (3, task.length(split))
        assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
            "inputs": (shape, np.int32),
            "targets": (shape, np.int32),
            "weights": (shape, np.float32),
            **({"valid": ((*shape, task.vocab_size), np.float32)} if "valid" in batch else {}),
        }
        for key in ("inputs", "targets"):
            assert batch[key].min() >= 0
            assert batch[key].max() < task.vocab_size


def test_max_length_is_the_longest(task):
    assert task.max_length == max(task.length(split) for split in all_splits(task))


def test_each_row_is_weighted_by_ones(task):
    weights = task.sample(np.random.default_rng(0), 8)["weights"]
    assert set(np.unique(weights)) <= {0, 1}
    assert weights.any(axis=1).all()


def test_targets_are_the_next_inputs(task):
    if not task.continues:
        with pytest.raises(ConfigError, match="has no text to continue"):
            task.codec()
        return
    batch = task.sample(np.random.default_rng(0), 8)
    length = batch["inputs"].shape[1]
    last_weighted = length - 1 - np.argmax(batch["weights"][:, ::-1], axis=1)
    before = np.arange(length - 1) < last_weighted[:, None]
    np.testing.assert_array_equal(batch["targets"][:, :-1][before], batch["inputs"][:, 1:][before])


def test_same_seed_same_data(task):
    for key, value in task.dataset("train", 4, seed=3).items():
        np.testing.assert_array_equal(task.dataset("train", 4, seed=3)[key], value)


def test_seeds_and_splits_draw_different_data(task):
    seen = {
        task.dataset(split, 8, seed)["inputs"].tobytes() for split in task.splits for seed in (0, 1)
    }
    assert len(seen) == 2 * len(task.splits)


def test_no_draws_at_all_is_an_empty_batch(task):
    assert task.sample(np.random.default_rng(0), 0)["inputs"].shape == (0, task.length("train"))


def test_vocabulary_round_trip(task):
    tokens = task.sample(np.random.default_rng(0), 1)["inputs"][0]
    encoded = task.encode(task.decode(tokens))
    np.testing.assert_array_equal(encoded, tokens)
    assert encoded.dtype == np.int32


def test_sweep_grows_and_spans_the_splits(task):
    levels = [task.level(split) for _, split in task.sweep]
    assert len(levels) >= 4
    assert levels == sorted(set(levels))
    assert levels[0] == min(task.level(split) for split in task.splits)
    assert levels[-1] == max(task.level(split) for split in task.splits)
    assert [value for value, _ in task.sweep] == sorted(value for value, _ in task.sweep)
    assert task.sweep_label


def test_split_by_level_is_the_split_by_name(task):
    for split in task.splits:
        by_level = f"{task.axis}={task.level(split):g}"
        assert task.length(by_level) == task.length(split)
        named, levelled = (
            task.sample(np.random.default_rng(0), 2, s)["inputs"] for s in (split, by_level)
        )
        np.testing.assert_array_equal(named, levelled)


@pytest.mark.parametrize("split", ["dence", "train=1", "{axis}", "{axis}="])
def test_unknown_splits_list_the_choices(task, split):
    split = split.format(axis=task.axis)
    choices = ", ".join(sorted([*task.splits, f"{task.axis}=<number>"]))
    with pytest.raises(
        ConfigError, match=rf"^unknown split of {task.name} '{split}': .*[Cc]hoose from {choices}$"
    ):
        task.sample(np.random.default_rng(0), 1, split)


@pytest.mark.parametrize("level", ["x", "nan", "inf", "-1"])
def test_levels_without_meaning_are_refused(task, level):
    split = f"{task.axis}={level}"
    with pytest.raises(
        ConfigError,
        match=rf"^split '{split}' of {task.name} has no valid level: use one like '.*'$",
    ):
        task.length(split)


def test_mistakes_are_loud(task):
    with pytest.raises(ConfigError, match="number of examples must be at least 0"):
        task.sample(np.random.default_rng(0), -1)
    with pytest.raises(ConfigError, match="seed"):
        task.dataset("train", 1, seed=-1)
    with pytest.raises(ConfigError, match=f"unknown token of {task.name} 'zz'"):
        task.encode("zz")
    with pytest.raises(ConfigError, match=f"unknown option of {task.name} 'nonsense'"):
        tasks.create(task.name, nonsense=1)


def test_unknown_task_lists_the_choices():
    with pytest.raises(ConfigError, match=re.escape(f"Choose from {', '.join(tasks.names())}")):
        tasks.create("count")


@pytest.mark.newest
def test_data_is_the_same_on_every_machine(task):
    """A change means that equal seeds no longer see the data of older runs: see the changelog."""
    crc = 0
    for split in task.splits:
        for value in task.dataset(split, 16, seed=1).values():
            crc = zlib.crc32(value.astype(value.dtype.newbyteorder("<")).tobytes(), crc)
    written = getattr(importlib.import_module(f"tests.tasks.test_{task.name}"), "CHECKSUM", None)
    assert crc == written, (
        f"write CHECKSUM = {crc} in tests/tasks/test_{task.name}.py if the task is new; "
        f"if it had {written}, earlier runs trained on other data"
    )
