"""Files of earlier code, in which parts of compositions had numbers, are read as they are."""

from typing import NamedTuple

import chex
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from cope_jax.encodings.earlier import earlier_path, earlier_tree, from_earlier
from cope_jax.errors import ConfigError
from cope_jax.exchange import formats
from cope_jax.training.checkpoints import Checkpoints
from tests.exchange.test_formats import noise
from tests.models.cases import config

SPECS = ["cope(npos_max=4)", "rope+relative+cope(npos_max=12,gate=separate_key)+learned", "kerple+t5"]


class State(NamedTuple):
    """Parameters, and moments of them in what optax keeps."""

    params: object
    opt_state: object


def saved(spec):
    model = config(spec)
    params = noise(model)[1]
    moments = optax.ScaleByAdamState(
        np.int32(3), jax.tree.map(lambda x: x + 1, params), jax.tree.map(np.square, params)
    )
    return model, State(params, (moments, optax.EmptyState()))


@pytest.mark.parametrize(
    "spec, path, earlier",
    [
        ("cope", "blocks.encoding.cope.table", "blocks.encoding.table_NK"),
        ("rope+cope", "blocks.encoding.cope.gate_key", "blocks.encoding.parts.1.gate_key_DGK"),
        ("learned+relative+cope", "blocks.encoding.relative.table", "blocks.encoding.parts.0.table_NK"),
        ("learned+relative+cope", "encoding.learned.table", "encoding.table_ND"),
        ("cope", "blocks.encoding.cope.net.table", "blocks.encoding.net.table_NK"),
        ("cope", "blocks.attention.query.kernel", "blocks.attention.query.kernel"),
    ],
)
def test_paths(spec, path, earlier):
    assert ".".join(map(str, earlier_path(tuple(path.split(".")), config(spec)))) == earlier


@pytest.mark.parametrize("spec", SPECS)
def test_checkpoints(spec, tmp_path):
    """Parameters and moments, to the last bit; and a checkpoint of today is read as it is."""
    model, state = saved(spec)
    earlier = earlier_tree(state, model)
    assert jax.tree.structure(earlier) != jax.tree.structure(state)
    chex.assert_trees_all_equal(from_earlier(state, earlier, model), state)
    for name, tree in (("earlier", earlier), ("today", state)):
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(2, jax.tree.map(jax.numpy.asarray, tree), {"seconds": 1.0})
            step, found, progress = checkpoints.restore(state, model)
        assert step == 2 and progress == {"seconds": 1.0}
        assert jax.tree.structure(found) == jax.tree.structure(state)
        chex.assert_trees_all_equal(found, state)


def test_another_model_is_still_an_error(tmp_path):
    model, state = saved("cope(npos_max=4)")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, jax.tree.map(jax.numpy.asarray, earlier_tree(state, model)), {"seconds": 1.0})
        other, wanted = saved("cope(npos_max=5)")
        with pytest.raises(ConfigError, match=r"is of another model \(params.blocks.encoding.cope.table"):
            checkpoints.restore(wanted, other)


@pytest.mark.parametrize("spec", SPECS)
def test_exports(spec, tmp_path):
    model, state = saved(spec)
    formats.save(tmp_path, model, state.params)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({".".join(map(str, earlier_path(tuple(n.split(".")), model))): x for n, x in tensors.items()}, file)
    assert load_file(file).keys() != tensors.keys()
    chex.assert_trees_all_equal(formats.load(tmp_path)[1], state.params)
