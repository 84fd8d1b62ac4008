import json
import shutil
import socket
import sys
import tempfile

import numpy as np
import pytest
import tensorflow_datasets as tfds
from absl.testing import flagsaver

from cope_jax import tasks
from cope_jax.cli import exits
from cope_jax.commands import export
from cope_jax.corpora.corpus_files import SAMPLES
from cope_jax.data import pipeline, tfds_builder
from cope_jax.errors import ConfigError
from cope_jax.tasks import text as text_task
from cope_jax.tasks.synthetic import SyntheticTask


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


def test_a_dataset_from_before_an_option_has_its_default(tmp_path, monkeypatch):
    whole = type(create()).example_options

    def fewer(task):
        return {name: value for name, value in whole(task).items() if name != "num_variables"}

    monkeypatch.setattr(type(create()), "example_options", fewer)
    tfds_builder.write(create(), tmp_path, {"train": 2})
    monkeypatch.undo()
    assert len(tfds_builder.read(create(), tmp_path, "train")) == 2
    with pytest.raises(ConfigError, match="num_variables is 1 there and 3 here"):
        tfds_builder.read(create(num_variables=3), tmp_path, "train")


@pytest.mark.parametrize(("split", "size"), [("train", 7), ("pass_10", 3)])
def test_reads_back_the_fixed_split_in_order(written, split, size):
    assert_holds(
        tfds_builder.read(create(), written, split, seed=2), create().dataset(split, size, seed=2)
    )


def test_an_incomplete_dataset_is_to_be_deleted(written):
    (written / "counting/1.0.0/dataset_info.json").unlink()
    for call in (
        lambda: tfds_builder.write(create(), written, {"train": 7, "pass_10": 3}, seed=2),
        lambda: tfds_builder.read(create(), written, "train", seed=2),
    ):
        with pytest.raises(
            ConfigError,
            match=r"1.0.0 is incomplete: delete it, then write it with `cope-jax export`",
        ):
            call()


@pytest.mark.parametrize("name", ["dataset_info.json", "metadata.json", "features.json"])
def test_a_damaged_file_of_a_dataset_is_one_line(name, written):
    path = written / "counting/1.0.0" / name
    for text in ("{", "{}", "[]", "7", '{"whole": 5}', '{"name": 5}', ""):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"counting/1.0.0.* (is damaged|older version)[^\n]*again$"
        ):
            tfds_builder.read(create(), written, "train", seed=2)


def test_nothing_else_stays(tmp_path, monkeypatch):
    data, temporary = tmp_path / "data", tmp_path / "temporary"
    abandoned = data / f".partial-{socket.gethostname()}-x"
    for folder in (abandoned, temporary):
        folder.mkdir(parents=True)
    (abandoned / ".lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = tfds_builder.write(create(), data, {"train": 7})
    assert [*temporary.iterdir(), *data.iterdir(), *path.parent.iterdir()] == [
        data / "counting",
        path,
    ]


def test_any_task_that_draws_can_be_written(tmp_path):
    for name in (
        name for name in tasks.names() if issubclass(tasks.TASKS.get(name), SyntheticTask)
    ):
        task = tasks.create(name)
        tfds_builder.write(task, tmp_path, {split: 2 for split in task.splits})
        for split in task.splits:
            assert_holds(tfds_builder.read(task, tmp_path, split), task.dataset(split, 2))


@pytest.mark.newest
def test_tfds_itself_reads_it_by_name(written):
    assert_holds(
        tfds.data_source("counting", split="train", data_dir=written),
        create().dataset("train", 7, seed=2),
    )


def test_folder_is_returned_and_written_once(written):
    path = written / "counting" / "1.0.0"
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert str(tfds_builder.write(create(), written, {"train": 7, "pass_10": 3}, seed=2)) == str(
        path
    )
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_missing_data_says_how_to_write_it(tmp_path):
    with pytest.raises(
        ConfigError, match=r"holds no data of counting: write it with `cope-jax export`"
    ):
        tfds_builder.read(create(), tmp_path, "train")


def test_data_of_another_task_does_not_serve(written):
    with pytest.raises(ConfigError, match="holds no data of flip_flop"):
        tfds_builder.read(tasks.create("flip_flop"), written, "train", seed=2)


@pytest.mark.parametrize(
    ("options", "seed", "message"),
    [
        (
            {"num_variables": 3},
            2,
            r"holds other data of counting \(num_variables is 1 there and 3 here\): choose",
        ),
        (
            {"ood_pass_weights": (10,)},
            2,
            r"ood_pass_weights is \[100.0, 10.0\] there and \[10.0\] here\)",
        ),
        ({}, 4, r"seed is 2 there and 4 here\)"),
    ],
)
def test_other_options_or_seeds_do_not_serve(written, options, seed, message):
    with pytest.raises(ConfigError, match=message):
        tfds_builder.read(create(**options), written, "train", seed=seed)
    with pytest.raises(ConfigError, match=message):
        tfds_builder.write(create(**options), written, {"train": 7}, seed=seed)


def test_missing_split_lists_those_there(written):
    with pytest.raises(
        ConfigError, match=r"unknown split .* 'in_distribution': choose from pass_10, train"
    ):
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


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_text_is_written_whole_and_trains_from_there(tmp_path, packing, monkeypatch):
    monkeypatch.setattr(tfds_builder, "_CHUNK", 50)
    options = {"corpus": "3*wikitext-2+files", "vocab_size": 300, "length": 16, "packing": packing}
    task = tasks.create("text", **options)
    folder = tfds_builder.write(task, tmp_path, {})
    assert (folder / "tokenizer.json").read_text() == task.saved_files()["tokenizer.json"]
    for split in task.splits:
        assert_holds(
            tfds_builder.read(task, tmp_path, split), task.dataset(split, task.size(split))
        )
    seeds = {"examples": None, "data_seed": 0, "shuffle_seed": 1}
    memory = pipeline.train_iterator(task, batch_size=4, **seeds)
    fresh = tasks.create("text", **options)
    monkeypatch.setattr(fresh.tokenizer, "encode", None)  # what was written is not made again
    disk = pipeline.train_iterator(fresh, batch_size=4, data_dir=str(tmp_path), **seeds)
    for _ in range(60):
        ours, theirs = next(disk), next(memory)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
    with pytest.raises(ConfigError, match=r"length is 16 there and 8 here\)"):
        tfds_builder.read(tasks.create("text", **options | {"length": 8}), tmp_path, "train")


def test_what_an_older_version_wrote_is_refused_in_one_line(tmp_path):
    folder = tfds_builder.write(create(), tmp_path, {"train": 2})
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["whole"]
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(
        ConfigError,
        match=r"was written by an older version of this package: delete it and write it",
    ):
        tfds_builder.read(create(), tmp_path, "train")


@pytest.fixture
def corpus(tmp_path):
    """A folder of texts that can be changed."""
    return shutil.copytree(SAMPLES / "files", tmp_path / "corpora" / "files").parent


def rewrite(corpus):
    """The same words the other way round."""
    for file in sorted((corpus / "files").glob("*.txt")):
        file.write_text(" ".join(file.read_text().split()[::-1]) + "\n")


def text(corpus, **options):
    text_task._trained.cache_clear()
    return tasks.create(
        "text",
        **{"data_dir": str(corpus), "corpus": "files", "vocab_size": 300, "length": 16} | options,
    )


def test_text_is_not_read_under_another_tokenizer(corpus, tmp_path):
    folder = tfds_builder.write(text(corpus), tmp_path, {})
    # What a run takes from its folder is the same tokenizer by another name.
    tfds_builder.read(
        text(corpus, vocab=str(folder / "tokenizer.json"), vocab_size=None), tmp_path, "test"
    )
    rewrite(corpus)
    with pytest.raises(
        ConfigError, match=r"holds other data of text \(.*tokenizer.json differs\): choose"
    ):
        tfds_builder.read(text(corpus), tmp_path, "test")


def test_text_of_another_corpus_is_not_read_though_its_tokenizer_is_the_same(corpus, tmp_path):
    tfds_builder.write(text(corpus, tokenizer="bytes", vocab_size=None), tmp_path, {})
    elsewhere = corpus.rename(tmp_path / "elsewhere")
    tfds_builder.read(text(elsewhere, tokenizer="bytes", vocab_size=None), tmp_path, "test")
    rewrite(elsewhere)
    with pytest.raises(
        ConfigError, match=r"holds other data of text \(corpus.json differs\): choose"
    ):
        tfds_builder.read(text(elsewhere, tokenizer="bytes", vocab_size=None), tmp_path, "test")


def test_a_tokenizer_that_was_not_written_to_its_end_is_written_anew(corpus, tmp_path):
    file = tfds_builder.write(text(corpus), tmp_path, {}) / "tokenizer.json"
    whole = file.read_text()
    file.write_text(whole[:99])
    tfds_builder.write(text(corpus), tmp_path, {})
    assert file.read_text() == whole
    file.unlink()
    tfds_builder.write(text(corpus), tmp_path, {})
    assert file.read_text() == whole


def test_fields_of_other_kinds_are_written_too(tmp_path):
    task = tasks.create("spam", vocab_size=300)
    tfds_builder.write(task, tmp_path, {"test": 2})
    assert_holds(tfds_builder.read(task, tmp_path, "test"), task.dataset("test", 2))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "words",
            {"test": 2},
            "^words is one long text, which cannot be exported: choose a task of separate examples$",
        ),
        (
            "spam",
            {"test": 10_000},
            "^the split 'test' of spam has [0-9]+ examples, not 10000: ask for fewer$",
        ),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, name, sizes, message):
    with pytest.raises(ConfigError, match=message):
        tfds_builder.write(tasks.create(name), tmp_path, sizes)
    assert not list(tmp_path.iterdir())


def run_export(**flags):
    with flagsaver.flagsaver(**{"options": "", "data_seed": 0} | flags):
        with exits.clear_errors():
            export.main()


def test_command_writes_what_the_function_writes(tmp_path, capsys):
    options = "max_operations=8,block_length=16,ood_pass_weights=(5,)"
    run_export(
        task="counting", options=options, sizes="train=4,pass_5=2", data_seed=9, out=str(tmp_path)
    )
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "counting" / "1.0.0")
    task = create(ood_pass_weights=(5,))
    assert_holds(
        tfds_builder.read(task, tmp_path, "pass_5", seed=9), task.dataset("pass_5", 2, seed=9)
    )


def test_command_writes_all_of_a_text(tmp_path):
    run_export(task="text", options="vocab_size=300,length=16", sizes="", out=str(tmp_path))
    task = tasks.create("text", vocab_size=300, length=16)
    assert_holds(tfds_builder.read(task, tmp_path, "test"), task.dataset("test", task.size("test")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task": "counting", "sizes": ""}, "no split to write: give sizes for some of train"),
        ({"task": "count"}, "unknown task 'count': did you mean 'counting'?"),
        ({"options": "3"}, "--options must look like name=value,name=value, got '3'"),
        ({"options": "a=)"}, "--options must look like"),
        ({"options": "max_value=f(2)"}, "--options must look like"),
        ({"sizes": "train=4x"}, "--sizes must look like"),
    ],
)
def test_command_names_the_mistake_and_exits_with_2(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        run_export(**{"task": "counting", "sizes": "train=4", "out": str(tmp_path)} | flags)
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        (
            "features.json",
            "tensorflow_datasets.core.features.tensor_feature.Tensor",
            "antigravity.Tensor",
            "the class 'an",
        ),
        (
            "features.json",
            '"pythonClassName"',
            '"python\\u005fclass_name": "antigravity.Tensor", "pythonClassName"',
            "cla",
        ),
        (
            "dataset_info.json",
            "{DATASET}-{SPLIT}",
            "../../{DATASET}-{SPLIT}",
            "names files that are elsewhere",
        ),
        (
            "dataset_info.json",
            "{DATASET}-{SPLIT}",
            "/etc/{DATASET}-{SPLIT}",
            "names files that are elsewhere",
        ),
        ("features.json", "{", "[", "is damaged"),
    ],
)
def test_nothing_else_is_imported_or_read(tmp_path, file, old, new, message):
    task = tasks.create("counting")
    path = tfds_builder.write(task, tmp_path, {"train": 2})
    (path / file).write_text((path / file).read_text().replace(old, new))
    sys.modules.pop("antigravity", None)
    with pytest.raises(ConfigError, match=message):
        tfds_builder.read(task, tmp_path, "train")
    assert "antigravity" not in sys.modules


def test_data_of_a_version_without_an_option_have_its_default(written):
    file = written / "counting" / "1.0.0" / "metadata.json"
    metadata = json.loads(file.read_text())
    assert metadata["options"].pop("held_out") == 0.0
    file.write_text(json.dumps(metadata))
    assert len(tfds_builder.read(create(), written, "train", seed=2)) == 7
    with pytest.raises(ConfigError, match=r"\(held_out is 0.0 there and 0.2 here\)"):
        tfds_builder.read(create(held_out=0.2), written, "train", seed=2)
