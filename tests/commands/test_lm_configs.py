import dataclasses
import re
import shutil

import pytest

from cope_jax import tasks
from cope_jax.configs import lm
from cope_jax.corpora.export_sources import Corpus
from cope_jax.corpora.shards import read_manifest
from cope_jax.data.shard_export import Vocabulary, export
from cope_jax.data.shard_writer import Options
from cope_jax.errors import ConfigError
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import load_run
from cope_jax.training import config_files
from tests.commands.shrink import load, shrink

TABLE = {"lm:125m": 64 * 64, "lm:1b": 64 * 128, "lm:8b": 64 * 128}
# The published models' own counts. GPT-2 has a table of 1024 positions besides.
PUBLISHED = {
    "lm:125m": 124_439_808 - 1024 * 768,
    "lm:1b": 50_304 * 2048 + 24 * (12 * 2048**2 + 13 * 2048) + 2 * 2048,
    "lm:8b": 8_030_261_248,
}


def experiment(name, monkeypatch):
    """The experiment without its data."""
    monkeypatch.setattr("cope_jax.runs.experiment.Evaluator", lambda *arguments, **options: None)
    return Experiment(load(f"{name}_noise"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_parameters_of_their_namesakes_and_one_table(name, monkeypatch):
    assert experiment(name, monkeypatch).parameters() == PUBLISHED[name] + TABLE[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_loss_to_expect_is_the_entropy_of_the_tokens(name):
    config = load(f"{name}_noise")
    documented = re.search(rf"([\d.]+) nats\s+for\s+{name[3:]}\b", lm.__doc__)
    task = tasks.create(config.task.name, **config.task.options)
    assert f"{task.entropy():.2f}" == documented[1]


@pytest.mark.parametrize("name", [*PUBLISHED, "wikitext103", "code"])
def test_shards_change_nothing_but_the_text(name):
    other = config_files.named(f"{name}_noise" if name in PUBLISHED else name).to_dict()
    shards = config_files.named(name if name in PUBLISHED else f"{name}:shards").to_dict()
    options = shards.pop("task")["options"]
    assert options["length"] == other.pop("task")["options"]["length"]
    assert shards == other
    with pytest.raises(ConfigError, match=r"sharded_text.folders is empty: name the folders that"):
        tasks.create("sharded_text", **options)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_run_on_shards_resumes_and_is_read_back_without_them(tmp_path, packing):
    export(
        Corpus("wikitext-2"), tmp_path / "shards", Vocabulary("bpe", size=300), Options(24, packing)
    )
    config = shrink(
        config_files.config("lm:1b", task={"options": {"folders": (str(tmp_path / "shards"),)}})
    )
    experiment = Experiment(config)
    whole = experiment.train(tmp_path / "whole")
    assert {record["metric"] for record in whole} >= {"perplexity", "bits_per_byte", "loss"}
    assert tasks.create("sharded_text", **config.task.options).vocab_size == 384  # 300, rounded up
    shutil.rmtree(tmp_path / "whole/checkpoints/2")
    (tmp_path / "whole/result.json").unlink()
    again = experiment.train(tmp_path / "whole")
    assert [record["value"] for record in again] == [record["value"] for record in whole]
    manifest = read_manifest(tmp_path / "shards")
    (tmp_path / "shards/manifest.json").write_text(
        dataclasses.replace(manifest, length=24, words=False).text
    )
    with pytest.raises(
        ConfigError, match=r"corpus.json does not match the current data: restore the original data"
    ):
        Experiment(config, task=tasks.create("sharded_text", **config.task.options)).train(
            tmp_path / "whole"
        )
    shutil.rmtree(tmp_path / "shards")
    run = load_run(tmp_path / "whole")
    assert run.task.decode(run.task.encode("The lamp")) == "The lamp"
    with pytest.raises(ConfigError, match=r"shards has no manifest.json"):
        run.task.size("test")
