"""A run on text, from its files to its folder and back."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import source_code
from cope_jax.corpora.corpus_files import SAMPLES
from cope_jax.corpora.raw_text import documents
from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import inspect_text
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load_run
from cope_jax.runs.workdir import Workdir, check_alike
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig
from tests.commands.pretrained import write_model

pytestmark = pytest.mark.xdist_group("text")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a mixture of packed documents, whose corpora are there no more."""
    folder = tmp_path_factory.mktemp("text")
    data = folder / "data"
    for name in ("wikitext-2", "files"):
        shutil.copytree(SAMPLES / name, data / name)
    options = {
        "data_dir": str(data),
        "corpus": "wikitext-2+2*files",
        "vocab_size": 300,
        "length": 16,
        "packing": "documents",
    }
    model = {"num_layers": 1, "block": {"model_dim": 8, "num_heads": 2}}
    task = write_model(folder / "run", "text", options, model, "cope").task
    tokens = task.encode("The lamp is bright.")
    assert (folder / "run" / "corpus.json").read_text() == task.data_digest()["corpus.json"]
    shutil.rmtree(data)
    return folder / "run", tokens


def test_a_run_that_resumes_does_not_learn_its_vocabulary_again(tmp_path, monkeypatch):
    options = {"corpus": "files", "vocab_size": 300, "length": 16}
    config = ExperimentConfig.from_mapping({"task": {"name": "text", "options": options}})
    learned = Workdir(tmp_path).create_task(config)
    Workdir(tmp_path).keep_files(learned)
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    monkeypatch.setattr("cope_jax.tokenizers.loading.train", None)
    resumed = Workdir(tmp_path).create_task(config)
    assert resumed.saved_files() == learned.saved_files()
    Workdir(tmp_path).keep_files(resumed)
    given = dataclasses.replace(
        config, task=TaskConfig("text", {**options, "vocab": str(tmp_path / "another.json")})
    )
    with pytest.raises(ConfigError, match=r"there is no tokenizer at .*another.json"):
        Workdir(tmp_path).create_task(given)


def test_a_run_is_read_back_without_its_corpora(trained):
    workdir, tokens = trained
    run = load_run(workdir)
    assert run.step > 0
    np.testing.assert_array_equal(run.task.encode("The lamp is bright."), tokens)
    assert (workdir / "tokenizer.json").read_text() == run.task.saved_files()["tokenizer.json"]
    with pytest.raises(
        ConfigError, match=r"^no wikitext-2/wiki.test.tokens in .*: put the corpus there"
    ):
        pipeline.evaluation_batches(run.task, "test", examples=2, batch_size=2, seed=0)


def test_a_run_is_measured_with_its_own_tokenizer_though_the_training_text_has_changed(
    trained, start
):
    workdir, _ = trained
    data = workdir.parent / "data"

    def measure():
        done = start("evaluate", f"--model={workdir}").wait()
        assert done.status == 0, done.err
        records = json.loads((workdir / "evaluation.json").read_text())["records"]
        return {(record["split"], record["metric"]): record["value"] for record in records}

    try:
        for name in ("wikitext-2", "files"):
            shutil.copytree(SAMPLES / name, data / name)
        before = measure()
        for file in [*(data / "files").glob("*.txt"), data / "wikitext-2" / "wiki.train.tokens"]:
            text = file.read_text()
            end = len(text) * 8 // 10  # of "files" the rest holds validation and test
            file.write_text(text[:end][::-1] + text[end:])
        assert measure() == pytest.approx(before, rel=1e-6)
    finally:
        shutil.rmtree(data)


def test_windows_that_are_inspected_are_of_all_corpora_by_their_sizes():
    options = {"tokenizer": "words", "length": 8}
    mixed, *alone = (
        tasks.create("text", corpus=corpus, **options)
        for corpus in ("files+wikitext-2", "files", "wikitext-2")
    )
    codec = mixed.codec()
    whole = inspect_text.windows(mixed, codec, None, "train", 10**6)
    sizes = [len(task.token_streams("train")[0].tokens) // 8 for task in alone]
    assert whole.shape == (sum(sizes), 8)
    texts = [" ".join(text.split()) for text in documents("files", None, "train")]
    of_files = [
        any(" ".join(codec.decode(row).split()) in text for text in texts) for row in whole[:12]
    ]
    assert (
        sum(of_files) == pytest.approx(12 * sizes[0] / sum(sizes), abs=1.5)
        and 1 < sum(of_files) < 11
    )
    for count in (1, 12):
        np.testing.assert_array_equal(
            inspect_text.windows(mixed, codec, None, "train", count), whole[:count]
        )


def test_windows_of_other_texts():
    short = tasks.create("text", tokenizer="bytes", length=10**6)
    codec = short.codec()
    (row,) = inspect_text.windows(short, codec, None, "test", 3)
    np.testing.assert_array_equal(row, short.token_streams("test")[0].tokens)
    (row,) = inspect_text.windows(short, codec, "The lamp is bright.", "test", 3)
    assert (row[0], codec.decode(row[1:])) == (short.tokenizer.end, "The lamp is bright.")
    words = tasks.create("words", length=8)
    assert (
        inspect_text.windows(words, codec, None, "test", 3).tolist()
        == words.dataset("test", 3)["inputs"].tolist()
    )
    most = inspect_text.windows(words, codec, None, "test", 10**6)
    assert len(most) in (words.size("test"), words.size("test") - 1)


@pytest.mark.parametrize(
    ("command", "flags"), [("evaluate", []), ("inspect", ["--split=test"]), ("perplexity", [])]
)
def test_a_run_is_not_measured_on_another_text(trained, start, command, flags):
    workdir, _ = trained
    data = workdir.parent / "data"
    before = {path: path.read_bytes() for path in workdir.glob("*.json")}
    try:
        for name in ("wikitext-2", "files"):
            shutil.copytree(SAMPLES / name, data / name)
        test = data / "wikitext-2" / "wiki.test.tokens"
        test.write_text(test.read_text()[::-1])
        done = start(command, f"--model={workdir}", *flags).wait()
    finally:
        shutil.rmtree(data)
    error, _, _ = done.error.partition("; or give a text")
    assert error == (
        f"the data differ from the data of the run in {workdir} (corpus.json): restore the original files"
    )
    assert {path: path.read_bytes() for path in workdir.glob("*.json")} == before


def test_a_damaged_tokenizer_of_a_run_is_one_line(trained, tmp_path):
    workdir = shutil.copytree(trained[0], tmp_path / "run")
    text = (workdir / "tokenizer.json").read_text()
    (workdir / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(
        ConfigError, match=r"is not a valid tokenizer.json \(.*\): fetch it again$"
    ) as error:
        _ = load_run(workdir).task
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_a_run_that_is_only_written_otherwise_is_the_same(tmp_path):
    task = tasks.create("text", vocab_size=300, length=16)
    Workdir(tmp_path).keep_files(task)
    file = tmp_path / "tokenizer.json"
    # As another version of the library may write it.
    kept = json.dumps(json.loads(file.read_text()))
    assert kept != file.read_text()
    file.write_text(kept)
    (tmp_path / "corpus.json").unlink()  # as after an interruption
    Workdir(tmp_path).keep_files(task)
    assert file.read_text() == kept and (tmp_path / "corpus.json").exists()
    other = tasks.create("text", vocab_size=301, length=16)
    with pytest.raises(
        ConfigError, match=r"^tokenizer\.json in .* does not match the current data"
    ):
        Workdir(tmp_path).keep_files(other)


def test_processes_with_other_data_are_refused(monkeypatch):
    task = tasks.create("text", vocab_size=300, length=16)
    check_alike(task)  # alone
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    others = [task, task, tasks.create("text", vocab_size=300, length=16, corpus="files")]
    digests = []
    gather = "jax.experimental.multihost_utils.process_allgather"
    monkeypatch.setattr(gather, lambda digest: digests.append(digest) or np.stack([digest] * 3))
    for other in others:
        check_alike(other)
    monkeypatch.setattr(gather, lambda digest: np.stack(digests))
    with pytest.raises(
        ConfigError, match=r"^process 2 has other data than process 0: give all processes the same"
    ):
        check_alike(task)


@pytest.mark.parametrize(
    ("options", "origin"),
    [
        (
            {},
            "wikitext-2 from the small built-in sample (data_dir is not set): 5 documents of 2,844 bytes to train on",
        ),
        (
            {"corpus": "code+files"},
            "code+files from the small built-in sample (data_dir is not set) and the standard library of the",
        ),
        ({"data_dir": "DATA"}, "wikitext-2 from DATA: 5 documents"),
    ],
)
def test_a_summary_says_where_the_text_comes_from(options, origin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLES / "wikitext-2", tmp_path / "DATA" / "wikitext-2")
    if "code" in options.get("corpus", ""):
        monkeypatch.setattr(source_code, "standard_library", lambda: tmp_path / "library")
        (tmp_path / "library").mkdir()
        for number in range(60):
            (tmp_path / "library" / f"m{number}.py").write_text(
                f"value_{number} = {number} + {number**3}\n"
            )
    config = ExperimentConfig.from_mapping(
        {"task": {"name": "text", "options": {"tokenizer": "bytes", "length": 16, **options}}}
    )
    assert origin in " ".join(Experiment(config).summary().split())


def checked(training, **options):
    task = {"name": "text", "options": {"vocab_size": 300, "length": 16, **options}}
    Experiment.check(ExperimentConfig.from_mapping({"task": task, "training": training}))


def test_positions_are_not_sampled_where_the_batch_has_its_own():
    sampled = {"positions": "randomised", "max_position": 64}
    checked(sampled)
    checked({"positions": "floats", "max_position": 8})  # more tokens than 8
    with pytest.raises(
        ConfigError,
        match=r"^the batches of text have their own positions with these options: do not set",
    ):
        checked(sampled, packing="documents")
    with pytest.raises(ConfigError, match="does not fit below max_position=8"):
        checked({"max_position": 8}, packing="documents")
