"""Selective counting counts what it names, its answer is an input only if given, and settings train."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.runs.experiment import Experiment
from cope_jax.tasks import TASKS
from cope_jax.training.experiment_config import ExperimentConfig, JobConfig, MeshConfig
from experiments import reproductions, selective_counting

TASK = selective_counting.SelectiveCounting


def words(given, split="train"):
    """Rows of 200 sequences: the words of the inputs, and the answer."""
    task = TASK(TASK.Config(length=20, given=given))
    batch = task.dataset(split, 200)
    assert (np.flatnonzero(batch["weights"].any(0)) == batch["inputs"].shape[1] - 1).all()
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        yield task.decode(inputs).split(), task.vocabulary[targets[-1]]


@pytest.mark.parametrize("split", ["train", "longer"])
@pytest.mark.parametrize("given", [False, True])
def test_the_answer_is_how_many_listed_tokens_are_named(given, split):
    pairs = set()
    for inputs, answer in words(given, split):
        assert len(inputs) == (20 if split == "train" else 40)
        head, listed = inputs[: inputs.index(":")], inputs[inputs.index(":") + 1 :]
        assert head[:2] == ["<", "count"] and head[3:4] in ([], ["and"])
        kinds = {word for word in head[2:] if word != "and"}
        pairs.add(len(kinds))
        assert listed[-2:] == ["=", answer] if given else listed[-1] == "="
        assert answer == str(sum(word in kinds for word in listed))
    assert pairs == {1, 2}


def test_half_of_the_listed_tokens_are_of_a_kind():
    listed = [word for inputs, _ in words(False) for word in inputs[inputs.index(":") + 1 : -1]]
    kinds = [word for word in listed if word.startswith("k")]
    assert abs(len(kinds) / len(listed) - 0.5) < 0.03
    assert set(listed) == {f"{letter}{n}" for letter in "kn" for n in range(10)}


def test_few_answers_of_longer_sequences_were_seen():
    once, often = selective_counting.seen(128, 400, (1, 10), draws=2)
    assert once[0] > 97 and 35 < once[1] < 65
    assert (often < once).all()


@pytest.mark.parametrize("file", [reproductions, selective_counting])
def test_every_setting_is_sound(file, monkeypatch):
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))  # without its task for others
    for setting in file.VARIANTS:
        config = ExperimentConfig.from_mapping(file.get_config(setting).to_dict())
        Experiment.check(dataclasses.replace(config, job=JobConfig(MeshConfig(data=1))))


@pytest.mark.parametrize("given", [False, True])
def test_a_sequence_has_room_for_a_listed_token(given):
    shortest = 9 if given else 8
    batch = TASK(TASK.Config(length=shortest, given=given)).dataset("train", 50)
    assert batch["inputs"].shape == (50, shortest)
    message = f"selective_counting.length must be at least {shortest}, got {shortest - 1}"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        TASK.Config(length=shortest - 1, given=given)
    with pytest.raises(ConfigError, match=r"^selective_counting.kinds must be at least 2, got 1$"):
        TASK.Config(kinds=1)


def test_the_command_has_no_flags():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.selective_counting", "--length=3"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (2, "error: unknown flag --length; see --help\n")
