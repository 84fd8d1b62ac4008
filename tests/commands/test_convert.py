"""The command that copies models into other formats, from a run and back to one."""

import dataclasses
import json
import os
import re
import shlex
import shutil

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.exchange import formats
from cope_jax.generation.text_model import load
from cope_jax.runs import warm_start
from cope_jax.runs.load import load_run
from cope_jax.tokenizers import loading
from cope_jax.training import config_files, from_config
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.pretrained import write_run
from tests.exchange.exchange_cases import LLAMA, VOCAB, tensors, write

pytestmark = pytest.mark.xdist_group("convert")
SHORT = ("--config.training.steps=4", "--config.training.evaluate_every=4")
TINY = (
    *SHORT[:1],
    *(
        "--config.training.steps_per_dispatch=2",
        "--config.training.evaluate_every=0",
        "--config.evaluation.examples=4",
    ),
    *(
        "--config.training.checkpoint_every=4",
        "--config.training.batch_size=4",
        "--config.optimizer.warmup_steps=2",
    ),
    *("--config.task.options.length=8", "--config.job.mesh.data=1"),
)


def test_help_names_every_format(start):
    words = re.findall(r"[\w-]+", start("convert", "--help").wait().out)
    assert set(formats.FORMATS) - set(words) == set()


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run of a decoder with absolute positions."""
    workdir = tmp_path_factory.mktemp("convert") / "run"
    whole = config_files.config(str(config))
    training = dataclasses.replace(whole.training, steps=4, evaluate_every=4)
    write_run(workdir, dataclasses.replace(whole, encoding="learned", training=training), step=4)
    return workdir


@pytest.mark.slow
def test_a_run_becomes_a_gpt2_and_goes_on_with_cope(start, config, run, tmp_path):
    done = start("convert", f"--model={run}", f"--out={tmp_path / 'gpt2'}", "--format=gpt2").wait()
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    further = tmp_path / "gpt2" / "train.py"
    assert lines == [
        f"{tmp_path / 'gpt2'}: decoder, 1,048 parameters, in the format gpt2",
        f"to train it further: cope-jax train --config={further} --workdir=runs/NAME",
    ]
    assert json.loads((tmp_path / "gpt2" / "config.json").read_text())["model_type"] == "gpt2"
    # A default.
    assert "examples=" not in further.read_text() and "beta1" not in further.read_text()
    whole, original = config_files.config(str(further)), config_files.config(str(config))
    assert (whole.encoding, whole.training.max_position) == ("learned", 8)
    assert (
        dataclasses.replace(whole.training, start=None, max_position=None)
        == load_run(run).experiment.training
    )
    assert (whole.task, whole.optimizer, whole.evaluation) == (
        original.task,
        original.optimizer,
        original.evaluation,
    )
    flags = (
        f"--config={further}",
        "--config.encoding=learned+cope(npos_max=4)",
        "--config.job.mesh.data=1",
        *SHORT,
    )
    done = start("train", *flags, f"--workdir={tmp_path / 'on'}").wait()
    assert done.status == 0, done.err
    assert (
        f"start: decoder of {tmp_path / 'gpt2'}; new: blocks.encoding.cope.table; left out: nothing"
        in done.out
    )
    assert "computes something else" not in done.err
    assert load_run(tmp_path / "on").params()["blocks"]["encoding"]["cope"]["table"].shape == (
        1,
        4,
        4,
    )


def test_a_run_becomes_a_folder_of_ours_with_the_same_parameters(start, run, tmp_path):
    done = start("convert", f"--model={run}", f"--out={tmp_path / 'own'}", "--seed=0").wait()
    assert done.status == 0, done.err
    choices, params = formats.load(tmp_path / "own")
    original = load_run(run)
    assert choices.block == original.config.block and choices.encoding == original.config.encoding
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(original.params()))
    copy = load_run(tmp_path / "own")
    assert (copy.experiment, copy.seeds, copy.step) == (
        original.experiment,
        original.seeds,
        original.step,
    )
    assert copy.environment == original.environment != {}
    results = []
    for folder in (run, copy.folder):
        done = start("evaluate", f"--model={folder}").wait()
        assert done.status == 0, done.err
        records = json.loads((folder / "evaluation.json").read_text())["records"]
        results.append([record["value"] for record in records])
    assert results[0] == results[1] != []
    flags = (
        f"--config={copy.folder / 'train.py'}",
        "--config.job.mesh.data=1",
        f"--workdir={copy.folder}",
    )
    done = start("train", *flags).wait()
    assert (done.status, "holds a model of cope-jax convert" in done.error) == (2, True), done.err


def test_a_folder_of_hugging_face_takes_its_vocabulary_along_and_is_started_from(
    start, tmp_path, capsys
):
    options = {"vocab_size": 300, "length": 8}
    text = tasks.create("text", **options)
    arrays = {
        name: np.zeros((300, 8), np.float32) if len(array) == VOCAB else array
        for name, array in tensors(LLAMA, np.float32).items()
    }
    folder = write(tmp_path / "llama", LLAMA | {"vocab_size": 300}, arrays)
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(text.saved_files()["tokenizer.json"]), indent=2)
    )
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_text("")
    out = tmp_path / "own"
    done = start("convert", f"--model={folder}", f"--out={out}").wait()
    assert done.status == 0, done.err
    assert done.out.endswith(
        f"--config={out / 'train.py'} --config.task.options.data_dir=DATA --workdir=runs/NAME\n"
    )
    further = config_files.config(str(out / "train.py"))
    assert further.task.options["tokenizer"] == "bpe" and further.task.options["vocab"] == str(out)
    names = sorted(path.name for path in out.iterdir())
    assert names == [
        "config.json",
        "encoder.json",
        "model.safetensors",
        "tokenizer.json",
        "train.py",
        "vocab.bpe",
    ]
    # RoPE has no table: whatever the length of what follows, the parameters are the same.
    assert further.training.max_position is None and further.encoding == "rope(base=100.0)"
    task = tasks.create("text", vocab=str(out), length=8)
    learner = dataclasses.replace(
        from_config.create_learner(
            ExperimentConfig.from_mapping({"task": {"name": "text", "options": options}}), task
        ),
        model=formats.load(out)[0],
    )
    assert warm_start.start(out, learner, task)
    other = tasks.create("text", **options, corpus="files")
    with pytest.raises(
        ConfigError, match=r"the vocabulary of \S+own is not the task's: use the vocabulary of"
    ):
        warm_start.start(out, learner, other)
    assert not capsys.readouterr().err
    for name in ("encoder.json", "tokenizer.json", "vocab.bpe"):
        (out / name).unlink()
    warm_start.start(out, learner, other)
    expected = f"warning: {out} has no vocabulary, so it was not compared with the task's\n"
    assert capsys.readouterr().err == expected


def text_model(folder, vocab_size=300, surplus=0, **values):
    """A Llama with byte-pair encoding beside it, whose tables have `surplus` rows more."""
    text = tasks.create("text", vocab_size=vocab_size, length=8)
    size = vocab_size + surplus
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=(size, 8)).astype(np.float32) if len(array) == VOCAB else array
        for name, array in tensors(LLAMA, np.float32).items()
    }
    write(folder, LLAMA | {"vocab_size": size} | values, arrays)
    (folder / "tokenizer.json").write_text(text.saved_files()["tokenizer.json"])
    return folder


@pytest.mark.parametrize(
    "form, beside",
    [("cope_jax", False), ("llama", True)],
    ids=["in config.json", "in generation_config.json"],
)
def test_the_token_that_begins_a_text_goes_along(form, beside, start, tmp_path):
    ids = {"bos_token_id": 7, "eos_token_id": [5, 6]}
    folder = text_model(tmp_path / "theirs", **dict.fromkeys(ids) if beside else ids)
    if beside:
        (folder / "generation_config.json").write_text(json.dumps(ids))
    done = start(
        "convert", f"--model={folder}", f"--out={tmp_path / 'new'}", f"--format={form}"
    ).wait()
    assert done.status == 0, done.err
    for codec in (load(folder).codec, load(tmp_path / "new").codec):
        assert (codec.begin, codec.ends) == ((7,), (5, 6))
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids


def test_generation_ends_at_each_end_token_of_a_published_model(start, tmp_path):
    folder = text_model(tmp_path / "model", eos_token_id=list(range(300)))
    done = start("generate", f"--model={folder}", "--prompt=lamp", "--max_new_tokens=9").wait()
    assert (done.status, done.out, done.err.splitlines()[-1]) == (0, "lamp\n", "1 tokens"), done.err


def test_a_tokenizer_must_have_a_text_for_what_the_model_says(tmp_path):
    folder = text_model(tmp_path / "padded", surplus=4, bos_token_id=None)
    codec = load(folder).codec
    assert codec.begin == (loading.find(folder).end,)
    assert codec.size == 300
    with pytest.raises(ConfigError, match="token 303 is outside of the vocabulary of 300 tokens"):
        codec.decode(np.array([65, 303, 66]))
    (folder / "words.txt").write_text("<unk>\n<eos>\nlamp\n")
    with pytest.raises(
        ConfigError, match=r"the tokenizer of \S+ has 3 tokens, but the model has 304: restore"
    ):
        load(folder)
    for begin in (304, -1, [3]):
        folder = text_model(tmp_path / "begin", bos_token_id=begin)
        with pytest.raises(
            ConfigError, match=r"bos_token_id=\S+ of \S+ is not one of the model's 300 tokens: set"
        ):
            load(folder)
    for end in (304, [4, -1]):
        folder = text_model(tmp_path / "end", eos_token_id=end)
        with pytest.raises(
            ConfigError,
            match=r"eos_token_id=\S+ of \S+ is not one of the model's 300 tokens: set .* end",
        ):
            load(folder)


@pytest.mark.slow
def test_a_converted_model_of_text_trains_further_by_the_command_as_it_stands(start, tmp_path):
    """With its own vocabulary, not one of the config file's text; rows for no token are left out."""
    folder = text_model(tmp_path / "padded", surplus=4)
    done = start("convert", f"--model={folder}", f"--out={tmp_path / 'own'}").wait()
    assert done.status == 0, done.err
    flags = shlex.split(done.out.splitlines()[1])[6:]
    flags[1:] = [*TINY, "--config.task.options.sweep=()", f"--workdir={tmp_path / 'on'}"]
    done = start("train", *flags).wait()
    assert done.status == 0, done.err
    assert (
        f"start: left out the last 4 tokens of {tmp_path / 'own'}, which are not in its vocabulary"
        in done.out
    )
    assert "computes something else" not in done.err and "no vocabulary" not in done.err
    assert load_run(tmp_path / "on").params()["embedding"]["embedding"].shape == (300, 8)


def test_rows_for_no_token_are_left_out_where_the_vocabulary_shows_them(tmp_path, capsys):
    folder = text_model(tmp_path / "padded", surplus=4)
    config, params = formats.load(folder)
    options = {"vocab": str(folder), "length": 8}
    task = tasks.create("text", **options)
    learner = from_config.create_learner(
        ExperimentConfig.from_mapping({"task": {"name": "text", "options": options}}), task
    )
    learner = dataclasses.replace(learner, model=dataclasses.replace(config, vocab_size=300))
    start = warm_start.start(folder, learner, task)
    assert "the last 4 tokens of" in capsys.readouterr().out
    np.testing.assert_array_equal(
        start["embedding"]["embedding"], params["embedding"]["embedding"][:300]
    )
    np.testing.assert_array_equal(start["out"]["kernel"], params["out"]["kernel"][:, :300])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"embedding\.embedding is 304×8 in \S+ and 300×8 in this model: use"
    ):
        warm_start.start(folder, learner, task)


def test_wrong_input_is_one_line(start, run, tmp_path):
    folder = write(tmp_path / "llama", LLAMA, tensors(LLAMA, np.float32))
    beside = shutil.copytree(folder, tmp_path / "beside")
    os.mkfifo(beside / "tokenizer.model")
    new = f"--out={tmp_path / 'new'}"
    cases = [
        (
            (f"--model={run}", f"--out={folder}"),
            f"{folder} is not an empty folder: choose another --out",
        ),
        (("--model=nowhere", new), "there is no folder nowhere"),
        (
            (f"--model={tmp_path}", new),
            "holds no model: give a folder with the checkpoints of a run, with config.json and",
        ),
        ((f"--model={run}", new, "--seed=3"), "holds no seed 3: choose from 0"),
        ((f"--model={folder}", new, "--seed=0"), "holds one model, not a run: omit the seed"),
        (
            (f"--model={run}", new, "--format=llama"),
            "the format llama cannot represent encoding='learned'",
        ),
        (
            (f"--model={run}", new, "--format=bert"),
            "the format bert is for a bert, but this is a decoder",
        ),
        (
            (f"--model={run}", new, "--format=onnx"),
            "unknown --format 'onnx': choose from bert, cope_jax",
        ),
        ((new,), "missing --model"),
        (
            (f"--model={beside}", new),
            f"{beside / 'tokenizer.model'} is not a file: delete it, or put the right one there",
        ),
    ]
    running = [(start("convert", *flags), message) for flags, message in cases]
    for command, message in running:
        done = command.wait()
        assert done.status == 2
        assert message in done.error
    assert not (tmp_path / "new").exists()
