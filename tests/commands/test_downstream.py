"""Taggers and classifiers on pretrained models, and language models side by side, on the built-in
samples.
"""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.cli.flag_values import with_options
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.runs import warm_start
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load as load_model
from cope_jax.runs.load import load_run
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.shrink import load, shrink

pytestmark = pytest.mark.xdist_group("contextual_commands")  # what its fixtures train is shared
SYSTEMS = ("majority", "words+characters+elmo", "bert_frozen", "bert_fine_tuned")
TINY = (
    "--config.training.steps=2",
    "--config.training.steps_per_dispatch=2",
    "--config.training.batch_size=4",
    "--config.training.evaluate_every=0",
    "--config.training.checkpoint_every=2",
    "--config.optimizer.warmup_steps=1",
    "--config.job.mesh.data=1",
)


def text_config(name):
    return shrink(load(name))


@pytest.fixture(scope="module")
def tagged(trained, start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tag")
    bert = [flag.replace("--config", "--bert_config") for flag in TINY]
    small = (
        "--config.model.recurrent=(4,)",
        "--config.model.word_dim=4",
        "--config.task.options.length=16",
    )
    pieces = ("--bert_config.task.options.length=16", "--bert_config.task.options.max_pieces=24")
    models = f"--models={trained / 'elmo'},{trained / 'bert'}"
    flags = (
        *TINY,
        *bert,
        *small,
        *pieces,
        models,
        f"--systems={','.join(SYSTEMS)}",
        f"--workdir={workdir}",
    )
    done = start("tag", *flags).wait()
    assert done.status == 0, done.err
    return workdir, flags, done


@pytest.mark.slow
def test_every_system_tags_and_the_floor_is_that_of_the_task(tagged, trained):
    workdir, _, done = tagged
    task = tasks.create("tagging", length=16)
    rows = dict(
        line.strip("| ").split(" | ", 1)
        for line in (workdir / "table.md").read_text().splitlines()[4:]
    )
    assert list(rows) == list(SYSTEMS)
    assert (
        rows["majority"]
        == f"{100 * task.majority('validation'):.2f} | {100 * task.majority('test'):.2f}"
    )
    for record in json.loads((workdir / "results.json").read_text())["records"]:
        if record["metric"] == "token_error" and record["split"] == "test":
            assert rows[record["system"]].endswith(f" | {100 * (1 - record['value']):.2f}")
    for label in ("words+characters+elmo", "bert_frozen"):
        assert f"{label} weights the layers 0: 0.3" in done.out
        assert (workdir / f"mix_{label.replace('+', '_')}.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_frozen_encoder_stays_as_it_was_and_another_does_not(tagged, trained):
    workdir, _, _ = tagged
    before = load_run(trained / "bert").params()["encoder"]
    for system, same in (("bert_frozen", True), ("bert_fine_tuned", False)):
        after = load_run(workdir / "cells" / system / "seed_0").params()["encoder"]
        assert np.array_equal(before["words"]["embedding"], after["words"]["embedding"]) == same
        assert starting_text(before) == starting_text(after)


def starting_text(params):
    return {
        jax.tree_util.keystr(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@pytest.mark.slow
def test_vectors_are_the_embedders_own_and_are_made_once(tagged, trained, tmp_path):
    workdir, _, _ = tagged
    folder = workdir / "vectors" / "elmo"
    task = tasks.create("tagging", length=16)
    made = np.load(folder / "validation.npy")
    sentences = task.sentences("validation")
    theirs = np.concatenate(pretrained.load(str(trained / "elmo"))(sentences), axis=1).swapaxes(
        0, 1
    )
    np.testing.assert_allclose(made, theirs, atol=2e-3)  # float16
    stamp = (folder / "train.npy").stat().st_mtime_ns
    config = text_config("tagger")
    assert pretrained.write_vectors(str(trained / "elmo"), config, folder, "ELMo") == folder
    assert (folder / "train.npy").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="contains vectors of another model: choose"):
        pretrained.write_vectors(str(trained / "rnn"), config, folder, "ELMo")
    (tmp_path / "tags.csv").write_text(
        "text,label\n" + "".join(f"dogs {n} run,N M N\n" for n in range(60))
    )
    other = with_options(config, file=str(tmp_path / "tags.csv"))
    with pytest.raises(ConfigError, match="contains vectors of other sentences: choose"):
        pretrained.write_vectors(str(trained / "elmo"), other, folder, "ELMo")


@pytest.mark.slow
def test_vectors_of_another_kind_are_not_taken_for_an_elmo(trained, tmp_path):
    with pytest.raises(
        ConfigError, match="bert does not contain ELMo: choose a run or a published model of ELMo"
    ):
        pretrained.write_vectors(
            str(trained / "bert"), text_config("tagger"), tmp_path / "vectors", "ELMo"
        )
    assert not (tmp_path / "vectors").exists()


@pytest.mark.slow
def test_a_finished_tagging_is_shown_again_and_trains_nothing(tagged, trained, start):
    workdir, flags, _ = tagged
    results = (workdir / "results.json").read_text()
    done = start("tag", *flags).wait()
    assert done.status == 0, done.err
    assert "step" not in done.err
    assert (workdir / "results.json").read_text() == results


@pytest.mark.slow
def test_figures_of_another_config_are_not_shown_as_new(tagged, trained, start):
    _, flags, _ = tagged
    done = start("tag", *flags, "--config.model.dropout=0.1").wait()
    assert done.status == 2
    assert "holds a run with other settings, config.model.dropout (0.5, not 0.1)" in done.error


@pytest.mark.slow
def test_spam_is_told_apart_on_the_same_folds_by_all(trained, start, tmp_path):
    flags = (
        *TINY,
        "--config.task.options.folds=2",
        "--config.task.options.length=24",
        "--config.task.options.length=16",
        f"--workdir={tmp_path}",
    )
    systems = "majority,svm_words,bert_fine_tuned"
    done = start("classify", f"--model={trained / 'bert'}", f"--systems={systems}", *flags).wait()
    assert done.status == 0, done.err
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert list(scores) == systems.split(",")
    folds = [tasks.create("spam", folds=2, fold=fold, length=16) for fold in range(2)]
    floor = np.mean([np.mean(fold.labels("test") == 0) for fold in folds])  # ham is more frequent
    assert scores["majority"]["accuracy"]["mean"] == pytest.approx(floor)
    assert scores["svm_words"]["accuracy"]["mean"] > floor
    # What the table has of a system is what its runs measured on the test messages themselves.
    errors = []
    for fold in range(2):
        cell = tmp_path / "cells" / f"bert_fine_tuned_repeat_0_fold_{fold}" / "seed_0"
        records = json.loads((cell / "result.json").read_text())["records"]
        errors += [
            r["value"] for r in records if r["metric"] == "sequence_error" and r["split"] == "test"
        ]
    assert scores["bert_fine_tuned"]["accuracy"]["mean"] == pytest.approx(1 - np.mean(errors))


@pytest.mark.slow
def test_language_models_are_read_at_equal_steps_and_time(start, trained, tmp_path):
    names = ("a", "b")
    for number, name in enumerate(names):
        folder = tmp_path / name
        folder.mkdir()
        settings = json.loads((trained / "rnn" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings))
        steps, seconds = (4, 40.0) if number == 0 else (8, 20.0)
        record = {"task": "words", "encoding": "", "seed": 0, "parameters": 7, "metric": "loss"}
        record |= {"step": steps, "wall_seconds": seconds}
        records = [{**record, "split": split, "value": 2.0} for split in ("validation", "test")]
        (folder / "result.json").write_text(json.dumps({"records": records}))
        rows = [
            {"step": step, "seed": 0, "split": "validation", "loss": 5.0 - step / 4}
            for step in range(2, steps + 1, 2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = start(
        "language_models", f"--models={tmp_path / 'a'},{tmp_path / 'b'}", f"--workdir={tmp_path}"
    ).wait()
    assert done.status == 0, done.err
    a, b = json.loads((tmp_path / "language_models.json").read_text())["models"]
    assert (a["test"], a["equal_steps"], b["equal_steps"]) == pytest.approx(
        (math.exp(2), math.exp(4), math.exp(4))
    )
    # After 20 seconds a has done 2 steps and b all 8.
    assert (a["equal_time"], b["equal_time"]) == pytest.approx((math.exp(4.5), math.exp(3)))
    assert (tmp_path / "curves.png").stat().st_size > 1000
    (folder / "result.json").write_text(json.dumps({"records": records[:1]}))
    done = start("language_models", f"--models={folder}", f"--workdir={tmp_path / 'new'}").wait()
    assert done.status == 2 and "is damaged (it has no loss on test): delete it" in done.error


@pytest.mark.slow
def test_models_are_not_tested_on_a_table_that_has_changed(start, trained, tmp_path):
    table = tmp_path / "films.csv"
    rows = [f"good {n},yes\nbad {n},no\n" for n in range(20)]
    flags = (
        *TINY,
        "--config.task.options.folds=2",
        "--config.task.options.length=24",
        f"--input={table}",
        f"--model={trained / 'bert'}",
        "--systems=bert_frozen",
        f"--workdir={tmp_path / 'run'}",
    )
    for some, status in ((rows[:-1], 0), (rows, 2)):
        table.write_text("text,label\n" + "".join(some))
        done = start("classify", *flags).wait()
        assert done.status == status, done.err
    assert "the data differ from the data of the run in" in done.error


@pytest.mark.slow
def test_taggers_are_not_shown_with_a_table_that_has_changed(start, tmp_path):
    table, rows = tmp_path / "tags.csv", [f"dogs {n} run,N M N\n" for n in range(60)]
    flags = (*TINY, "--config.task.options.length=8", "--systems=words", "--seeds=1")
    for some, status in ((rows[:-1], 0), (rows, 2)):
        table.write_text("text,label\n" + "".join(some))
        done = start("tag", *flags, f"--input={table}", f"--workdir={tmp_path / 'run'}").wait()
        assert done.status == status, done.err
    assert "the data differ from the data of the run in" in done.error


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("tag", ("--systems=words,wrods",), "unknown system 'wrods': did you mean 'words'"),
        (
            "tag",
            ("--systems=bert_frozen",),
            "no system of --systems can be compared: give their ELMo or BERT in --models",
        ),
        ("tag", ("--systems=bert_frozen", "--models=nowhere"), "there is no folder nowhere"),
        ("tag", ("--corpora_dir=nowhere",), "nowhere"),
        ("classify", ("--corpora_dir=nowhere",), "nowhere"),
        ("classify", ("--systems=bert_frozen",), "no system of --systems can be tested"),
        ("language_models", ("--models=nowhere",), "nowhere contains no finished run"),
    ],
)
def test_wrong_input_is_one_line(name, flags, message, start, tmp_path):
    done = start(name, *flags, f"--workdir={tmp_path / 'new'}").wait()
    assert done.status == 2
    assert message in done.error
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_start_of_other_sizes_or_another_vocabulary_is_one_line(trained, tmp_path):
    config = pretrained.on_encoder(
        text_config("tagger:bert"), str(trained / "bert"), frozen=False, vocabulary="pieces"
    )
    experiment = Experiment(config)
    assert list(warm_start.start(config.training.start, experiment.learner, experiment.task)) == [
        "encoder"
    ]
    wider = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, block=dataclasses.replace(config.model.block, model_dim=12)
        ),
    )
    with pytest.raises(
        ConfigError, match=r"encoder\.\S+ is \S*8\S* in \S+ and \S*12\S* in this model: use"
    ):
        Experiment(wider).train(tmp_path / "wider")
    vocabulary = (trained / "bert" / "vocab.txt").read_text().splitlines()
    other = tmp_path / "vocab.txt"
    other.write_text("\n".join([*vocabulary[:-2], vocabulary[-1], vocabulary[-2]]) + "\n")
    options = config.task.options | {"pieces": str(other)}
    foreign = dataclasses.replace(config, task=dataclasses.replace(config.task, options=options))
    with pytest.raises(ConfigError, match=r"the vocabulary of .* is not the task's"):
        Experiment(foreign).train(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="shares no modules with bert_tagger"):
        warm_start.start(trained / "rnn", experiment.learner, experiment.task)
    assert isinstance(config, ExperimentConfig)


@pytest.mark.slow
def test_models_in_our_format_give_the_same_vectors(trained, start, tmp_path):
    sentences = [["in", "spring", "the", "snow", "melts"]]
    done = start("convert", f"--model={trained / 'bert'}", f"--out={tmp_path / 'bert'}").wait()
    assert done.status == 0, done.err
    before, after = (
        pretrained.load(str(folder / "bert"))(sentences)[0] for folder in (trained, tmp_path)
    )
    np.testing.assert_array_equal(after, before)
    assert json.loads((tmp_path / "bert" / "tokenizer_config.json").read_text()) == {
        "do_lower_case": True
    }
    assert load_model(tmp_path / "bert").config.block == load_model(trained / "bert").config.block
