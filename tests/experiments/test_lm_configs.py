import re
import runpy

import pytest

from cope_jax import tasks
from cope_jax.runs.experiment import Experiment
from tests.experiments.shrink import CONFIGS, load

PATHS = {path.stem: path for path in CONFIGS if path.stem.startswith("lm_")}
TABLE = {"lm_125m": 64 * 64, "lm_1b": 64 * 128, "lm_8b": 64 * 128}
# The published models' own counts. GPT-2 has a table of 1024 positions besides.
PUBLISHED = {
    "lm_125m": 124_439_808 - 1024 * 768,
    "lm_1b": 50_304 * 2048 + 24 * (12 * 2048**2 + 13 * 2048) + 2 * 2048,
    "lm_8b": 8_030_261_248,
}


def experiment(name, monkeypatch):
    """The experiment without its data."""
    monkeypatch.setattr("cope_jax.runs.experiment.Evaluator", lambda *arguments, **options: None)
    return Experiment(load(PATHS[name]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_parameters_of_their_namesakes_and_one_table(name, monkeypatch):
    assert experiment(name, monkeypatch).parameters() == PUBLISHED[name] + TABLE[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_loss_to_expect_is_the_entropy_of_the_tokens(name):
    config = load(PATHS[name])
    documented = re.search(r"falls to ([\d.]+) nats", runpy.run_path(str(PATHS[name]))["__doc__"])
    task = tasks.create(config.task.name, **config.task.options)
    assert f"{task.entropy():.2f}" == documented[1]
