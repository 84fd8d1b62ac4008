"""Refused configs, and the fields that a workdir must keep."""

import dataclasses
import json
import re

import pytest

from cope_jax.errors import ConfigError
from cope_jax.layout import Layout
from cope_jax.models.decoder import DecoderOptions
from cope_jax.runs.experiment import Experiment
from cope_jax.tasks import create
from cope_jax.training import config_files
from cope_jax.training.experiment_config import (
    ExperimentConfig,
    JobConfig,
    MeshConfig,
    OptimizerConfig,
    TaskConfig,
    TrainingConfig,
)

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"job": {"mesh": {"data": -1, "fsdp": -1}}},
            "job.mesh may set only one axis to -1, .* got {'data': -1,",
        ),
        ({"job": {"mesh": {"data": 0}}}, "job.mesh.data must be at least 1, got 0"),
        ({"job": {"mesh": {"tensor": -2}}}, "job.mesh.tensor must be at least 1, got -2"),
        ({"job": {"mesh": {"model": 2}}}, "unknown option of config.job.mesh 'model'"),
        ({"job": {"mesh": {"fsdp": 2.0}}}, "config.job.mesh.fsdp must be int"),
        (
            {"job": {"on_non_finite": "ignore"}},
            "unknown config.job.on_non_finite 'ignore': choose from skip, stop",
        ),
        ({"job": {"tracker": "mlflow"}}, "unknown config.job.tracker 'mlflow'"),
        ({"job": {"keep": 0}}, "job.keep must be at least 1, got 0"),
        ({"job": {"keep_best": -1}}, "job.keep_best must be at least 0, got -1"),
        ({"job": {"peak_flops": 0.0}}, "job.peak_flops must be at least 1, got 0.0"),
        ({"training": {"accumulate": 0}}, "training.accumulate must be at least 1, got 0"),
        (
            {"training": {"batch_size": 6, "accumulate": 4}},
            "training.batch_size=6 must be a multiple of training.accumulate=4",
        ),
        ({"model": {"remat": "dot"}}, "unknown config.model.remat 'dot': did you mean 'dots'"),
        ({"model": {"remat": True}}, "unknown config.model.remat True"),
        (
            {"evaluation": {"examples": 10**12}},
            "evaluation.examples must be at most 2,147,483,647, got 1,000,000,000,000",
        ),
        ({"training": {"readers": 100_000}}, "training.readers must be at most 1,024, got 100,000"),
    ],
)
def test_a_wrong_job_is_one_clear_line(mapping, message):
    with pytest.raises(ConfigError, match=message) as error:
        ExperimentConfig.from_mapping(mapping)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            {"num_tokens": 10**8},
            {},
            "selective_copy has sequences of 200,000,512 tokens, over 16,777,216: lower its sizes",
        ),
        (
            {},
            {"training": {"batch_size": 10**8}},
            "training.batch_size=100,000,000 sequences of up to 1,024 tokens are 2³¹ tokens or more: lower it",
        ),
        (
            {},
            {"evaluation": {"batch_size": 2**21}},
            "evaluation.batch_size must be at most 65,536 with so few examples",
        ),
        (
            {},
            {"model": {"block": {"model_dim": 10**9}}},
            "block.model_dim must be at most 1,048,576, got 1,000,000,000",
        ),
        (
            {},
            {"model": {"block": {"model_dim": 2**20, "mlp_dim": 2**20}}},
            "decoder has an array of 2,199,023,255,552 parameters, over 2⁴⁰: lower its sizes",
        ),
        (
            {},
            {"model": {"block": {"num_heads": 10**9, "head_dim": 2}}},
            "block.num_heads must be at most 1,048,576, got 1,000,000,000",
        ),
        (
            {},
            {"model": {"num_layers": 10**7}},
            "decoder.num_layers must be at most 4,096, got 10,000,000",
        ),
    ],
)
def test_absurd_sizes_are_one_line_before_anything_is_allocated(task, changes, message):
    values = {"task": {"options": task}, "job": {"mesh": {"data": 1}}, "training": {}, **changes}
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Experiment.check(ExperimentConfig.from_mapping(values))


def test_a_seed_may_have_63_bits():
    assert TrainingConfig(data_seed=2**63 - 1).data_seed == 2**63 - 1


def test_choices_are_checked_in_python_too():
    with pytest.raises(ConfigError, match=r"unknown job.on_non_finite 'go on'"):
        JobConfig(on_non_finite="go on")
    with pytest.raises(ConfigError, match=r"unknown optimizer.name 'sgd'"):
        OptimizerConfig(name="sgd")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0 trains nothing"),
        ({"clip_norm": 0.0}, "optimizer.clip_norm=0 trains nothing"),
        ({"final_fraction": 1.5}, "optimizer.final_fraction must be at most 1, got 1.5"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**options)


def test_one_axis_may_have_what_remains():
    assert MeshConfig() == MeshConfig(data=-1, fsdp=1, tensor=1, sequence=1)
    MeshConfig(data=2, fsdp=-1)
    MeshConfig(data=1, sequence=-1)


def test_an_option_of_an_encoding_that_was_not_there_yet_has_its_default():
    """A run of before goes on, though its encoding has more options now."""
    before = ExperimentConfig(encoding="rope", encodings={"rope": {"base": 500.0}})
    now = dataclasses.replace(
        before, encodings={"rope": {"base": 500.0, "fraction": 1.0, "llama3": None}}
    )
    assert before.recipe() == now.recipe()
    other = dataclasses.replace(before, encodings={"rope": {"base": 500.0, "fraction": 0.5}})
    assert before.recipe() != other.recipe()


def test_an_option_of_a_task_that_was_not_there_yet_has_its_default():
    before = ExperimentConfig(TaskConfig("mqar", {"pairs": 4}))
    assert (
        before.recipe() == ExperimentConfig(TaskConfig("mqar", {"pairs": 4, "space": 8})).recipe()
    )
    assert (
        before.recipe() != ExperimentConfig(TaskConfig("mqar", {"pairs": 4, "space": 4})).recipe()
    )


def test_the_job_and_the_papers_figures_are_no_part_of_the_recipe():
    config = ExperimentConfig()
    for changes in (
        {
            "job": JobConfig(
                MeshConfig(fsdp=4),
                keep=9,
                keep_best=3,
                on_non_finite="skip",
                peak_flops=1e12,
                tracker="wandb",
            )
        },
        {"paper": {"cope": {"dense": "0"}}},
        {"encodings": {"rope": {"base": 3.0}}},
        {"training": TrainingConfig(readers=4)},
    ):
        assert dataclasses.replace(config, **changes).recipe() == config.recipe()
    for changes in (
        {"training": TrainingConfig(accumulate=2)},
        {"training": TrainingConfig(steps=2000)},
        {"encoding": "rope"},
        {"encodings": {"cope": {"npos_max": 8}}},
        {"model": dataclasses.replace(config.model, remat="full")},
        {"seeds_side_by_side": 2},
    ):
        assert dataclasses.replace(config, **changes).recipe() != config.recipe()


def test_the_decoder_has_the_layout_that_it_is_given():
    layout = Layout(("data",), "sequence", "tensor")
    config, task = ExperimentConfig(), create("flip_flop", length=8)
    assert config.model_config(task, layout) == dataclasses.replace(
        config.model_config(task), layout=layout
    )
    assert config.model_config(task).layout == Layout()


def test_an_error_within_a_model_is_not_taken_for_one_of_the_task(monkeypatch):
    """A missing attribute of a task is one line; one of a model's code has a traceback."""
    monkeypatch.setattr(DecoderOptions, "complete", lambda *_: object().nothing)
    with pytest.raises(AttributeError, match="'object' object has no attribute 'nothing'"):
        ExperimentConfig().model_config(create("selective_copy"))


@pytest.mark.parametrize("name", ["quick", "tagger", "bert", "abilities:recall", "wikitext2"])
def test_the_config_of_a_run_is_a_config(name, tmp_path):
    """Also with a field that is None, which no flag can say."""
    config = config_files.config(name)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, clip_norm=None)
    )
    (path := tmp_path / "config.json").write_text(
        json.dumps({"config": config.recipe(), "seeds": [0]})
    )
    assert config_files.config(path).recipe() == config.recipe()
    assert config_files.config(path, training={"steps": 10**6}).training.steps == 10**6


@pytest.mark.parametrize(
    "content", ['{"training": null}', '{"config": {"task": 3}}', '{"config": {"model": {}}}', "[]"]
)
def test_another_json_file_is_no_config(content, tmp_path):
    (path := tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"config\.json is (damaged|not the config of a run) \(.*\): give "
    ) as error:
        config_files.named(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainin": {}}, "unknown option of config 'trainin': did you mean 'training'?"),
        ({"training": {"stepz": 3}}, "unknown option of config.training 'stepz'"),
        ({"task": {"name": "selective_copy", "options": {"size": 3}}}, 'Key "size" does not exist'),
        ({"encodings": {"rope": {"bas": 3}}}, 'Key "bas" does not exist'),
    ],
)
def test_an_unknown_field_of_a_run_is_one_short_line(change, message, tmp_path):
    (path := tmp_path / "config.json").write_text(
        json.dumps({"config": config_files.config("quick").recipe() | change})
    )
    with pytest.raises(ConfigError, match=rf"{path} is not the .* \({re.escape(message)}") as error:
        config_files.named(str(path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_an_unknown_field_in_a_config_file_is_one_short_line(tmp_path):
    (path := tmp_path / "file.py").write_text(
        "from cope_jax.training.config_files import experiment\n\n\n"
        "def get_config():\n    return experiment('selective_copy', trainin={})\n"
    )
    with pytest.raises(ConfigError, match=r'KeyError: Key "trainin" does not exist\)$'):
        config_files.named(str(path))


def test_a_program_that_is_no_config_does_not_run(tmp_path):
    (path := tmp_path / "program.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"program\.py \(it has no such function\)$"):
        config_files.named(str(path))
    assert not (tmp_path / "ran").exists()


def test_a_config_without_variants_is_named(tmp_path):
    (run := tmp_path / "config.json").write_text(
        json.dumps({"config": config_files.config("quick").recipe()})
    )
    for name in ("quick", run):
        message = f"^config {name} has no variants: omit :foo$"
        with pytest.raises(ConfigError, match=message):
            config_files.named(f"{name}:foo")


def test_the_path_of_a_config_may_have_colons(tmp_path):
    (folder := tmp_path / "a:b").mkdir()
    counting = config_files.families()["counting"].read_text()
    (folder / "c.py").write_text(counting)
    (folder / "c:d.py").write_text(counting)
    config = config_files.config("quick")
    (folder / "config.json").write_text(json.dumps({"config": config.recipe()}))
    assert config_files.config(folder / "config.json").recipe() == config.recipe()
    for name in ("c.py", "c:d.py"):
        assert config_files.named(f"{folder}/{name}") == config_files.named("counting")
        assert config_files.named(f"{folder}/{name}:3") == config_files.named("counting:3")


def test_a_variant_names_what_the_title_of_a_run_needs():
    block = {"mixer": "delta", "negative_eigenvalues": True, "model_dim": 32}
    assert (
        ExperimentConfig.from_mapping({"model": {"block": block}}).variant
        == "mixer=delta, negative_eigenvalues"
    )
    assert ExperimentConfig().variant == ""


def test_a_sampler_of_positions_is_known():
    message = "unknown position sampler 'float': did you mean 'floats'?"
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainingConfig(positions="float")
