"""Starting from a pretrained model with another encoding: CoPE is added, and the function is the
same at step 0.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax import tasks
from cope_jax.encodings import ENCODINGS, AttentionShape
from cope_jax.errors import ConfigError
from cope_jax.exchange import formats
from cope_jax.models.decoder import Decoder
from cope_jax.runs import warm_start
from cope_jax.runs.load import load
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.from_config import create_learner
from tests.exchange.exchange_cases import CASES, tensors, tokens, write
from tests.models.cases import build, config

pytestmark = pytest.mark.xdist_group("starting")


def learner(folder, encoding, **changes):
    """A run's that starts from the folder, with the options of its model."""
    saved = load(folder).config
    model = {"block": {}}
    for name, value in (warm_start.deciding_options(saved) | changes).items():
        group, _, option = name.rpartition(".")
        (model[group] if group else model)[option] = value
    experiment = ExperimentConfig.from_mapping(
        {
            "task": {"name": "zipf", "options": {"vocab_size": saved.vocab_size, "length": 8}},
            "model": model,
            "encoding": encoding,
            "training": {"max_position": saved.max_length},
        }
    )
    task = tasks.create("zipf", vocab_size=saved.vocab_size, length=8)
    return create_learner(experiment, task), task


def logits(model_config, params):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(model_config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, params)
    return np.asarray(jax.jit(lambda state: nnx.merge(graphdef, state)(tokens()))(state))


@pytest.mark.parametrize(
    "name, encoding",
    [
        pytest.param("gpt2", "learned", marks=pytest.mark.slow),
        ("llama, grouped", "rope(base=100.0)"),
    ],
)
def test_adding_cope_changes_nothing_at_step_0_and_its_table_learns(
    name, encoding, tmp_path, capsys
):
    folder = write(tmp_path, CASES[name], tensors(CASES[name], np.float32))
    here, task = learner(folder, f"{encoding}+cope(npos_max=4)")
    start = warm_start.start(folder, here, task)
    printed = capsys.readouterr()
    assert printed.out == (
        f"start: decoder of {folder}; new: blocks.encoding.cope.table; left out: nothing; "
        f"encoding: {encoding} there, {encoding}+cope(npos_max=4) here\n"
    )
    assert not printed.err
    params = jax.jit(lambda start: here.init(0, start).params)(start)
    before, after = logits(*formats.load(folder)), logits(here.model, params)
    # The sum of no more than zeros is added to each logit of attention.
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(before).max())
    batch = task.sample(np.random.default_rng(0), 2, "train")
    gradient = jax.jit(jax.grad(lambda params: here.loss(params, batch, jax.random.key(0))[0]))(
        params
    )
    tables = [leaf for path, leaf in leaves(gradient) if "cope" in path]
    assert [np.asarray(table).shape for table in tables] == [
        (2, 4, here.model.block.attention_shape(None).head_dim)
    ]
    assert (np.abs(np.asarray(tables[0])).max(axis=(1, 2)) > 1e-5).all()


def leaves(tree):
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.fixture
def saved(tmp_path):
    """Saves a decoder of this encoding and gives its folder and parameters."""

    def save(encoding, **options):
        choices = config(encoding, **options)
        params = nnx.to_pure_dict(build(choices)[1])
        formats.save(tmp_path / "model", choices, params)
        return tmp_path / "model", params

    return save


def test_a_model_without_positions_starts_from_one_with_rope(saved, capsys):
    folder, params = saved("rope")
    here, task = learner(folder, "none")
    start = warm_start.start(folder, here, task)
    jax.tree.map(np.testing.assert_array_equal, start, params)
    printed = capsys.readouterr()
    assert "new: nothing; left out: nothing; encoding: rope there, none here" in printed.out
    assert "the encoding rope, but this model has none: it computes something else" in printed.err


def test_a_part_is_known_by_its_name_in_any_composition(saved, capsys):
    folder, params = saved("cope(npos_max=4)+learned+relative")
    here, task = learner(folder, "rope+relative+learned+cope(npos_max=4)")
    start = warm_start.start(folder, here, task)
    theirs, ours = params["blocks"]["encoding"], start["blocks"]["encoding"]
    np.testing.assert_array_equal(ours["relative"]["table"], theirs["relative"]["table"])
    np.testing.assert_array_equal(ours["cope"]["table"], theirs["cope"]["table"])
    np.testing.assert_array_equal(
        start["encoding"]["learned"]["table"], params["encoding"]["learned"]["table"]
    )
    assert (
        "new: nothing; left out: nothing; encoding: cope(npos_max=4)+learned+relative there"
        in capsys.readouterr().out
    )
    here, task = learner(folder, "cope(npos_max=4)")
    start = warm_start.start(folder, here, task)
    np.testing.assert_array_equal(
        start["blocks"]["encoding"]["cope"]["table"], theirs["cope"]["table"]
    )
    printed = capsys.readouterr()
    assert "new: nothing; left out: blocks.encoding.relative.table, encoding;" in printed.out
    assert [line.partition("with ")[2] for line in printed.err.splitlines()] == [
        "the encoding learned, but this model has cope(npos_max=4): it computes something else",
        "the encoding relative, but this model has cope(npos_max=4): it computes something else",
    ]


ZERO = {"none", "cope", "cope_signed", "cope_two_sided"}


FEW = {*ZERO, "alibi", "fox", "learned", "rope"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.slow)
        for name in ENCODINGS.names()
    ],
)
def test_what_acts_at_once_is_measured(name):
    shape = AttentionShape(num_heads=4, head_dim=4, num_kv_heads=2, model_dim=8, max_length=8)
    assert warm_start.acts_at_once(name, {}, shape) == (name not in ZERO)


def test_a_new_part_that_is_not_zero_as_drawn_is_told(saved, capsys):
    folder, _ = saved("learned")
    text = "learned + alibi + cope(npos_max=4)"
    warm_start.start(
        folder, *learner(folder, "learned+alibi+cope(npos_max=4,gate=separate_key)"), text
    )
    printed = capsys.readouterr()
    assert printed.out.endswith(f"; encoding: learned there, {text} here\n")
    assert printed.err == (
        f"warning: {folder} was trained with the encoding learned, but this model adds alibi, which is not "
        "zero-initialised: it computes something else\n"
    )


def test_equal_encodings_are_not_told(saved, capsys):
    folder, _ = saved("rope")
    warm_start.start(folder, *learner(folder, "rope"), "rope(base=10000.0)")
    assert (
        capsys.readouterr().out == f"start: decoder of {folder}; new: nothing; left out: nothing\n"
    )


def test_another_function_of_the_same_sizes_is_told(saved, capsys):
    folder, _ = saved("rope", tie_embeddings=True)
    here, task = learner(
        folder,
        "rope(base=500.0)",
        **{"block.num_heads": 4, "block.num_kv_heads": 4, "block.head_dim": 2},
    )
    warm_start.start(folder, here, task)
    warnings = capsys.readouterr().err
    assert "RoPEConfig(base=10000.0" in warnings and "has RoPEConfig(base=500.0" in warnings
    assert "with block.num_heads=2, but this model has 4: it computes something else\n" in warnings
    here, task = learner(folder, "rope", **{"block.dropout": 0.5, "block.attention": "full"})
    warm_start.start(folder, here, task)
    assert not capsys.readouterr().err


def test_what_does_not_fit_is_one_line(saved):
    folder, _ = saved("cope(npos_max=4)+rope")
    for encoding, message in [
        (
            "cope(npos_max=5)+rope",
            r"^blocks\.encoding\.cope\.table is 2×4×4 in .* and 2×5×4 in this model",
        ),
        (
            "cope(npos_max=4,gate=separate_key)",
            r"^blocks\.encoding\.cope\.gate_key is absent in .* and \S+ in this",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            warm_start.start(folder, *learner(folder, encoding))
    with pytest.raises(
        ConfigError,
        match=r"^blocks\.attention_norm\.norm\.bias is 2×8 in .* and absent in this model",
    ):
        warm_start.start(folder, *learner(folder, "cope(npos_max=4)", **{"block.norm": "rms"}))
    with pytest.raises(
        ConfigError,
        match="holds no model: give a folder with the checkpoints of a run, with config",
    ):
        load(folder.parent)
