import numpy as np
import pytest
import tensorflow_datasets as tfds
from absl.testing import flagsaver

from cope_jax import tasks
from cope_jax.data import tfds_builder
from cope_jax.errors import ConfigError
from experiments import entry, export

pytestmark = pytest.mark.newest


def create(**options):
    return tasks.create("counting", **({"max_operations": 8, "block_length": 16} | options))


@pytest.fixture
def written(tmp_path):
    tfds_builder.write(create(), tmp_path, {"train": 7, "pass_10": 3}, seed=2)
    return tmp_path


def assert_holds(source, batch):
    assert len(source) == len(batch["inputs"])
    for i in range(len(source)):
        row = source[i]
        assert row.keys() == batch.keys()
        for key in batch:
            np.testing.assert_array_equal(row[key], batch[key][i])
            assert row[key].dtype == batch[key].dtype


@pytest.mark.parametrize(("split", "size"), [("train", 7), ("pass_10", 3)])
def test_reads_back_the_fixed_split_in_order(written, split, size):
    assert_holds(tfds_builder.read(create(), written, split, seed=2), create().dataset(split, size, seed=2))


def test_any_task_can_be_written(tmp_path):
    for name in tasks.names():
        task = tasks.create(name)
        tfds_builder.write(task, tmp_path, {split: 2 for split in task.splits})
        for split in task.splits:
            assert_holds(tfds_builder.read(task, tmp_path, split), task.dataset(split, 2))


def test_tfds_itself_reads_it_by_name(written):
    assert_holds(tfds.data_source("counting", split="train", data_dir=written), create().dataset("train", 7, seed=2))


def test_folder_is_returned_and_written_once(written):
    path = written / "counting" / "1.0.0"
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert str(tfds_builder.write(create(), written, {"train": 7, "pass_10": 3}, seed=2)) == str(path)
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_missing_data_says_how_to_write_it(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no data of counting: write it with `python -m experiments.export`"):
        tfds_builder.read(create(), tmp_path, "train")


def test_data_of_another_task_does_not_serve(written):
    with pytest.raises(ConfigError, match="holds no data of flip_flop"):
        tfds_builder.read(tasks.create("flip_flop"), written, "train", seed=2)


@pytest.mark.parametrize(
    ("options", "seed", "message"),
    [
        ({"num_variables": 3}, 2, "holds other data of counting: num_variables is 1 there and 3 here$"),
        ({"ood_pass_weights": (10,)}, 2, r"ood_pass_weights is \[100.0, 10.0\] there and \[10.0\] here$"),
        ({}, 4, "seed is 2 there and 4 here$"),
    ],
)
def test_other_options_or_seeds_do_not_serve(written, options, seed, message):
    with pytest.raises(ConfigError, match=message):
        tfds_builder.read(create(**options), written, "train", seed=seed)
    with pytest.raises(ConfigError, match=message):
        tfds_builder.write(create(**options), written, {"train": 7}, seed=seed)


def test_missing_split_lists_those_there(written):
    with pytest.raises(ConfigError, match=r"unknown split .* 'in_distribution': Choices: pass_10, train"):
        tfds_builder.read(create(), written, "in_distribution", seed=2)


@pytest.mark.parametrize(
    ("sizes", "seed", "message"),
    [
        ({}, 2, "no split to write"),
        ({"tran": 3}, 2, "unknown split of counting 'tran': did you mean 'train'"),
        ({"pass=3": 3}, 2, "unknown split of counting 'pass=3'"),
        ({"train": 0}, 2, "whole number of at least 1, got 0"),
        ({"train": "7"}, 2, "whole number of at least 1, got '7'"),
        ({"train": 7}, -1, "seed must be at least 0, got -1"),
        ({"train": 8}, 2, "in other sizes"),
    ],
)
def test_mistakes_in_writing_are_one_clear_line(written, sizes, seed, message):
    with pytest.raises(ConfigError, match=message):
        tfds_builder.write(create(), written, sizes, seed)


def run_export(**flags):
    with flagsaver.flagsaver(**{"options": "", "seed": 0} | flags):
        with entry.clear_errors():
            export.main()


def test_command_writes_what_the_function_writes(tmp_path, capsys):
    options = "max_operations=8,block_length=16,ood_pass_weights=(5,)"
    run_export(task="counting", options=options, sizes="train=4,pass_5=2", seed=9, data_dir=str(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "counting" / "1.0.0")
    task = create(ood_pass_weights=(5,))
    assert_holds(tfds_builder.read(task, tmp_path, "pass_5", seed=9), task.dataset("pass_5", 2, seed=9))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task": "count"}, "unknown task 'count': did you mean 'counting'?"),
        ({"options": "3"}, "--options must look like name=value,name=value, got '3'"),
        ({"options": "a=)"}, "--options must look like"),
        ({"options": "max_value=f(2)"}, "--options must look like"),
        ({"sizes": "train=4x"}, "--sizes must look like"),
    ],
)
def test_command_names_the_mistake_and_exits_with_2(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        run_export(**{"task": "counting", "sizes": "train=4", "data_dir": str(tmp_path)} | flags)
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())
