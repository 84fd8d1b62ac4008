"""The command that copies models into other formats, from a run and back to one."""

import dataclasses
import json
import shlex

import jax
import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.models import model_files
from cope_jax.training.config import ExperimentConfig
from experiments import common, starting
from tests.models.exchange_cases import LLAMA, VOCAB, tensors, write

pytestmark = pytest.mark.xdist_group("convert")
SHORT = ("--config.training.steps=4", "--config.training.evaluate_every=4")


@pytest.fixture(scope="module")
def run(start, config, tmp_path_factory):
    """A run of a decoder with absolute positions."""
    workdir = tmp_path_factory.mktemp("convert") / "run"
    done = start("train", f"--config={config}", "--config.encoding=learned", *SHORT, f"--workdir={workdir}").wait()
    assert done.status == 0, done.err
    return workdir


def test_a_run_becomes_a_gpt2_and_goes_on_with_cope(start, config, run, tmp_path):
    done = start("convert", f"--from={run}", f"--to={tmp_path / 'gpt2'}", "--format=gpt2").wait()
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == f"{tmp_path / 'gpt2'}: decoder, 1,048 parameters, in the format gpt2"
    assert json.loads((tmp_path / "gpt2" / "config.json").read_text())["model_type"] == "gpt2"
    flags = shlex.split(" ".join(line.removesuffix(" \\") for line in lines[2:]))
    assert "--config.encoding=learned" in flags and "--config.training.max_position=8" in flags
    flags[flags.index("--config.encoding=learned")] = "--config.encoding=learned+cope"
    done = start("train", f"--config={config}", *flags, *SHORT, f"--workdir={tmp_path / 'on'}").wait()
    assert done.status == 0, done.err
    assert f"start: decoder of {tmp_path / 'gpt2'}; new: blocks.encoding.cope.table_NK; left out: nothing" in done.out
    assert "it is another function" not in done.err
    assert common.load_run(tmp_path / "on").params[0]["blocks"]["encoding"]["table_NK"].shape == (1, 4, 4)


def test_a_run_becomes_a_folder_of_ours_with_the_same_parameters(start, run, tmp_path):
    done = start("convert", f"--from={run}", f"--to={tmp_path / 'own'}", "--seed=0").wait()
    assert done.status == 0, done.err
    choices, params = model_files.load(tmp_path / "own")
    held = common.load_run(run)
    assert choices.block == held.learner.model.block and choices.encoding == held.learner.model.encoding
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(held.params[0]))


def test_a_folder_of_hugging_face_takes_its_vocabulary_along_and_is_started_from(start, tmp_path, capsys):
    options = {"vocab_size": 300, "length": 8}
    text = common.tasks.create("text", **options)
    arrays = {
        name: np.zeros((300, 8), np.float32) if len(array) == VOCAB else array
        for name, array in tensors(LLAMA, np.float32).items()
    }
    folder = write(tmp_path / "llama", LLAMA | {"vocab_size": 300}, arrays)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(text.artifacts()["tokenizer.json"]), indent=2))
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_text("")
    own = tmp_path / "own"
    done = start("convert", f"--from={folder}", f"--to={own}").wait()
    assert done.status == 0, done.err
    names = sorted(path.name for path in own.iterdir())
    assert names == ["config.json", "encoder.json", "model.safetensors", "tokenizer.json", "vocab.bpe"]
    # RoPE has no table: whatever the length of what follows, the parameters are the same.
    assert "max_position" not in done.out and "'--config.encoding=rope(base=100.0)'" in done.out
    task = common.tasks.create("text", vocab=str(own), length=8)
    learner = dataclasses.replace(
        common.create_learner(ExperimentConfig.from_mapping({"task": {"name": "text", "options": options}}), task),
        model=model_files.load(own)[0],
    )
    assert starting.start(own, learner, task)
    other = common.tasks.create("text", **options, corpus="files")
    with pytest.raises(ConfigError, match=r"own has another vocabulary than the task's: give the task that of"):
        starting.start(own, learner, other)
    assert not capsys.readouterr().err
    for name in ("encoder.json", "tokenizer.json", "vocab.bpe"):
        (own / name).unlink()
    starting.start(own, learner, other)
    assert capsys.readouterr().err == f"warning: no vocabulary in {own} to compare with\n"


def test_wrong_input_is_one_line(start, run, tmp_path):
    folder = write(tmp_path / "llama", LLAMA, tensors(LLAMA, np.float32))
    new = f"--to={tmp_path / 'new'}"
    cases = [
        ((f"--from={run}", f"--to={folder}"), f"there is something in {folder}: choose another --to"),
        (("--from=nowhere", new), "there is no folder nowhere"),
        ((f"--from={tmp_path}", new), "holds no model: it needs the checkpoints of a run, or config.json and"),
        ((f"--from={run}", new, "--seed=3"), "holds no seed 3: choose --seed from 0"),
        ((f"--from={folder}", new, "--seed=0"), "holds one model and no run: leave out --seed"),
        ((f"--from={run}", new, "--format=llama"), "the format of llama has no words for encoding learned, block.norm"),
        ((f"--from={run}", new, "--format=bert"), "the format of bert is that of a bert, and this is a decoder"),
        ((f"--from={run}", new, "--format=onnx"), "--format"),
        ((new,), "missing --from"),
    ]
    running = [(start("convert", *flags), message) for flags, message in cases]
    for command, message in running:
        done = command.wait()
        assert done.status == 2
        assert message in done.error
    assert not (tmp_path / "new").exists()
