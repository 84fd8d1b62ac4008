import dataclasses
import json
import math
import runpy

import jax
import pytest

from cope_jax import encodings, tasks
from cope_jax.errors import ConfigError
from cope_jax.runs.experiment import Experiment
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig, JobConfig, MeshConfig
from cope_jax.training.from_config import create_learner, create_program
from cope_jax.training.metrics import read_metrics
from tests.commands.shrink import CONFIGS, SETTINGS, SYNTHETIC, load, shrink

PAPER = ("selective_copy", "flip_flop", "counting")


def synthetic(*few):
    """Parametrizes a test by the configs of synthetic tasks, slow unless they are of a few."""
    marks = {name: () if name in few else pytest.mark.slow for name in SYNTHETIC}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in SYNTHETIC]
    )


@synthetic("quick")
def test_every_config_is_sound_with_every_encoding_of_the_comparison(name):
    config = load(name)
    for encoding in ("cope", "rope", "relative", "learned"):
        Experiment.check(dataclasses.replace(config, encoding=encoding))


@pytest.mark.parametrize("name", [*filter(SETTINGS.match, config_files.names())])
def test_every_setting_of_a_config_is_sound(name):
    config = config_files.config(name, encoding="cope")
    create_learner(config, tasks.create(config.task.name, **config.task.options))


def test_an_unknown_variant_lists_the_choices():
    for name in (
        "abilities:recal",
        "published:mqa",
        "counting:2",
        "lm:1b_nois",
        "wikitext103:shard",
    ):
        with pytest.raises(
            ConfigError, match=r"^unknown variant of \w+ '\w+': (did you mean '|choose from)"
        ):
            config_files.named(name)
    with pytest.raises(
        ConfigError, match=r"^unknown config 'counting_3': did you mean 'counting:3'\?"
    ):
        config_files.named("counting_3")


def test_a_default_is_a_variant_too():
    for name, path in config_files.families().items():
        file = runpy.run_path(str(path))
        for variant in file.get("VARIANTS", ()):
            assert config_files.named(f"{name}:{variant}").task, variant
        default = config_files.named(name)
        assert "VARIANTS" not in file or any(
            default == config_files.named(f"{name}:{v}") for v in file["VARIANTS"]
        )


@synthetic("counting", "published", "selective_copy:mapformer")
def test_every_config_fits_a_mesh_of_all_axes(name):
    """Its sizes divide, and every device has a part of every matrix."""
    config = load(name)
    tensor = 1 if config.model.block.num_heads == 1 else 2
    config = dataclasses.replace(
        config, job=JobConfig(MeshConfig(data=1, fsdp=2, tensor=tensor, sequence=2))
    )
    program = create_program(config, tasks.create(config.task.name, **config.task.options))
    for path_of_leaf, leaf in jax.tree_util.tree_leaves_with_path(program.state_shapes().params):
        name, share = (
            jax.tree_util.keystr(path_of_leaf),
            math.prod(leaf.sharding.shard_shape(leaf.shape)),
        )
        if name.endswith("['kernel']") and "out" not in name.split("['")[1]:
            assert share * 2 * tensor == leaf.size, name


def test_speeds_count_the_tokens_of_training():
    """Whose sequences are shorter than those of a split or of the sweep."""
    config = shrink(load("selective_copy"))
    experiment = Experiment(config)
    length, batch = experiment.task.length("train"), config.training.batch_size
    assert length < experiment.task.max_length
    assert (
        f"{batch} sequences of {length} tokens, {batch * length} tokens a step"
        in experiment.summary()
    )
    assert experiment.throughput()._tokens_per_step == batch * length


# The others differ in tasks and sizes; the tests of each task read its batches.
@synthetic("counting:small")
def test_every_config_trains_once_shrunk(name, tmp_path):
    config = shrink(load(name))
    experiment = Experiment(config)
    records = experiment.train(tmp_path)
    splits = (*experiment.task.evaluation_splits, *(split for _, split in experiment.task.sweep))
    metrics = ("loss", "token_error", "sequence_error")
    assert [(r["split"], r["metric"]) for r in records] == [
        (split, metric) for split in dict.fromkeys(splits) for metric in metrics
    ]
    for record in records:
        assert math.isfinite(record["value"]) and record["value"] >= 0
        assert (record["task"], record["encoding"], record["seed"], record["step"]) == (
            config.task.name,
            "cope",
            0,
            2,
        )
        assert record["parameters"] == experiment.parameters() and record["wall_seconds"] > 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "split" not in row] == [1, 2]
    assert {row["split"] for row in rows if "split" in row} == set(
        experiment.task.evaluation_splits
    )
    # Logits of variance 1 that know nothing yet: ln V + 1/2 on average, here over as few as two
    # tokens.
    assert rows[0]["loss"] == pytest.approx(math.log(experiment.task.vocab_size) + 0.5, abs=2.5)


def decoder_parameters(vocabulary, width, layers, *, tied, final_norm):
    """A GPT-2 block with biases: four attention matrices, two feed-forward ones, two norms."""
    block = (
        4 * (width**2 + width)
        + (width * 4 * width + 4 * width)
        + (4 * width * width + width)
        + 2 * 2 * width
    )
    return (
        vocabulary * width * (1 if tied else 2) + layers * block + (2 * width if final_norm else 0)
    )


@pytest.mark.parametrize(
    ("name", "plain", "cope", "learned"),
    [
        # plain model; CoPE: layers · N · head width; learned: longest sequence · width
        pytest.param(
            "selective_copy",
            decoder_parameters(16, 64, 2, tied=False, final_norm=True),
            2 * 769 * 32,
            1024 * 64,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flip_flop",
            decoder_parameters(5, 256, 4, tied=False, final_norm=True),
            4 * 64 * 64,
            511 * 256,
            marks=pytest.mark.slow,
        ),
        (
            "counting",
            decoder_parameters(18, 256, 4, tied=True, final_norm=False),
            4 * 513 * 64,
            511 * 256,
        ),
    ],
)
def test_models_of_the_papers_recipes_have_as_many_parameters_as_counted_by_hand(
    name, plain, cope, learned
):
    config = load(name)
    for encoding, added in {"none": 0, "rope": 0, "cope": cope, "learned": learned}.items():
        assert parameters(dataclasses.replace(config, encoding=encoding)) == plain + added, encoding


def test_the_papers_counting_has_the_blocks_and_norms_of_the_released_code():
    for name in ("counting", "counting:3", "counting:5"):
        config = load(name)
        assert tasks.create(config.task.name, **config.task.options).length("train") == 511, (
            "512 with the answer"
        )
        assert config.model.block.norm_epsilon == 1e-5


def parameters(config):
    config = dataclasses.replace(
        config,
        evaluation=dataclasses.replace(
            config.evaluation, examples=1, sweep_examples=0, batch_size=1
        ),
        job=JobConfig(MeshConfig(data=1)),
    )
    return Experiment(config).parameters()


def test_papers_figures_are_of_splits_and_encodings_that_exist():
    for name in PAPER:
        config = load(name)
        splits = tasks.create(config.task.name, **config.task.options).evaluation_splits
        assert config.paper, name
        for encoding, figures in config.paper.items():
            assert encoding in encodings.names()
            assert set(figures) <= set(splits)


def test_a_config_survives_being_kept_in_a_file():
    for name in CONFIGS:
        config = load(name)
        kept = json.dumps(config.to_dict())
        assert json.dumps(ExperimentConfig.from_mapping(json.loads(kept)).to_dict()) == kept


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"trainin": {}}, "unknown option of config 'trainin': did you mean 'training'"),
        (
            {"training": {"step": 3}},
            "unknown option of config.training 'step': did you mean 'steps'",
        ),
        ({"training": {"steps": "3"}}, "config.training.steps must be int, got '3' of type str"),
        ({"training": {"steps": 3.0}}, "config.training.steps must be int"),
        ({"training": {"steps": True}}, "config.training.steps must be int"),
        ({"training": {"examples": "all"}}, "config.training.examples must be int or None"),
        ({"training": 3}, "config.training must be TrainingConfig"),
        ({"encoding": None}, "config.encoding must be str"),
        ({"model": {"block": {"dropout": "high"}}}, "config.model.block.dropout must be float"),
        ({"model": {"block": {"dropout": 1.0}}}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"model": {"block": {"model_dim": 9}}}, "model_dim=9 is not a multiple of num_heads=2"),
        (
            {"model": {"block": {"activation": "tanh"}}},
            "unknown config.model.block.activation 'tanh': .*relu",
        ),
        (
            {"model": {"encoding_sharing": "head"}},
            "unknown config.model.encoding_sharing 'head': .*layer, model",
        ),
        ({"optimizer": {"name": "sgd"}}, "unknown config.optimizer.name 'sgd': .*adam, adamw"),
        (
            {"optimizer": {"schedule": "step"}},
            "unknown config.optimizer.schedule 'step': .*constant, cosine, linear",
        ),
        ({"training": {"steps": 0}}, "training.steps must be at least 1, got 0"),
        ({"training": {"batch_size": 0}}, "training.batch_size must be at least 1, got 0"),
        (
            {"training": {"steps_per_dispatch": 0}},
            "training.steps_per_dispatch must be at least 1, got 0",
        ),
        ({"training": {"examples": 0}}, "training.examples must be at least 1, got 0"),
        ({"training": {"data_seed": -1}}, "training.data_seed must be at least 0, got -1"),
        ({"training": {"max_position": 0}}, "training.max_position must be at least 1, got 0"),
        (
            {"training": {"checkpoint_every": -10}},
            "training.checkpoint_every must be at least 1, got -10",
        ),
        (
            {"training": {"evaluate_every": -10}},
            "training.evaluate_every must be at least 0, got -10",
        ),
        (
            {"training": {"steps": 15}},
            "training.steps=15 must be a multiple of training.steps_per_dispatch=10: choose one",
        ),
        ({"training": {"evaluate_every": 5}}, "training.evaluate_every=5 must be a multiple"),
        ({"training": {"checkpoint_every": 5}}, "training.checkpoint_every=5 must be a multiple"),
        ({"evaluation": {"examples": 0}}, "evaluation.examples must be at least 1, got 0"),
        (
            {"evaluation": {"curve_examples": 0}},
            "evaluation.curve_examples must be at least 1, got 0",
        ),
        ({"evaluation": {"batch_size": 0}}, "evaluation.batch_size must be at least 1, got 0"),
        (
            {"evaluation": {"sweep_examples": -1}},
            "evaluation.sweep_examples must be at least 0, got -1",
        ),
        ({"seeds_side_by_side": -1}, "seeds_side_by_side must be at least 0, got -1"),
        ({"model": None}, "config.model must be options by name, got None"),
        ({"model": "decoder"}, "config.model must be options by name, got 'decoder'"),
        ({"model": []}, r"config.model must be options by name, got \[\]"),
        ({"encodings": {"cope": 5}}, "config.encodings.cope must be options by name, got 5"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(mapping, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ExperimentConfig.from_mapping(mapping)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": "ropee"}, "unknown encoding 'ropee': did you mean 'rope'"),
        ({"encoding": "cope(,rope"}, r"cannot read the encoding 'cope\(,rope': a \) is missing"),
        ({"encoding": "cope()) "}, r"cannot read the encoding 'cope\(\)\) ': a \( is missing"),
        ({"encoding": "cope)("}, r"cannot read the encoding 'cope\)\(': write name, name\(option"),
        ({"encoding": "cope(gate=neither)"}, "neither"),
        ({"encodings": {"cope": {"p_max": 3}}}, "unknown option of cope 'p_max'"),
        ({"encoding": "learned(max_length=4)"}, "max_length"),
        ({"task": {"name": "flip_flap"}}, "unknown task 'flip_flap': did you mean 'flip_flop'"),
        (
            {"task": {"name": "flip_flop", "options": {"size": 3}}},
            "unknown option of flip_flop 'size'",
        ),
        (
            {"task": {"name": "flip_flop", "options": {"length": 7}}},
            "flip_flop.length must be even",
        ),
        (
            {"training": {"positions": "ofset", "max_position": 20}},
            "unknown position sampler 'ofset': did you mean 'offset'",
        ),
        (
            {"training": {"positions": "offset"}},
            "training.positions=offset samples .*: set training.max_position",
        ),
        (
            {"training": {"positions": "floats"}, "encoding": "learned"},
            "learned has a table with a row for each whole number, but positions are float32",
        ),
        (
            {"training": {"max_position": 4}},
            "does not fit below max_position=4: raise max_position",
        ),
        (
            {"job": {"mesh": {"data": 16}}},
            "job.mesh data=16 × fsdp=1 × tensor=1 × sequence=1 asks for 16 devices, but there are 8",
        ),
        (
            {"job": {"mesh": {"data": 4, "tensor": 4}}},
            "tensor=4 × sequence=1 asks for 16 devices, but there are 8",
        ),
        (
            {"training": {"batch_size": 12}},
            "training.batch_size / accumulate=12 cannot be split evenly over the 8 devices of job.mesh data × fsdp",
        ),
        (
            {"training": {"batch_size": 16, "accumulate": 4}},
            "training.batch_size / accumulate=4 cannot be split evenly over the 8 devices",
        ),
        (
            {"evaluation": {"batch_size": 4}},
            "evaluation.batch_size=4 cannot be split evenly over the 8 devices",
        ),
        (
            {"job": {"mesh": {"data": 1, "tensor": 4}}},
            "model.block.num_heads=2 must be a multiple of job.mesh.tensor=4",
        ),
        (
            {
                "job": {"mesh": {"data": 1, "fsdp": 3}},
                "training": {"batch_size": 48},
                "evaluation": {"batch_size": 48},
            },
            "kernel must be a multiple of job.mesh.fsdp=3",
        ),
        (
            {"evaluation": {"batch_size": 10**8}},
            "evaluation.batch_size must be at most 65,536 .* got 100,000,000",
        ),
        (
            {"optimizer": {"warmup_steps": 1000}},
            "optimizer.warmup_steps=1000 must be less than training.steps=1000",
        ),
    ],
)
def test_mistakes_show_before_anything_is_compiled(changes, message):
    mapping = {"task": {"name": "flip_flop", "options": {"length": 8}}} | changes
    with pytest.raises(ConfigError, match=message) as caught:
        Experiment.check(ExperimentConfig.from_mapping(mapping))
    assert "\n" not in str(caught.value)


def test_decoders_measure_which_tokens_may_come_next():
    experiment = Experiment(shrink(config_files.config("abilities:stack", encoding="rope")))
    records = experiment.records([0], experiment.program.init([0]).params, 0, 0.0)
    assert {"f1_error", "invalid_error", "valid_error"} <= {record["metric"] for record in records}
