"""A tiny BERT with random parameters, a ragged batch for it, and the oracle's view."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings import EncodingConfig
from cope_jax.models.bert import Bert, BertConfig
from cope_jax.models.encoder import bert_block
from tests.encodings.cases import rule_of
from tests.oracle import bert as oracle
from tests.oracle.encodings import Rule, Sizes

VOCAB, LENGTH = 17, 9
LAYERS, WIDTH, HEADS = 2, 8, 2
LENGTHS = (9, 5, 7)  # of the rows of the batch: real tokens


def config(
    encoding: str = "learned", dtype: str = "float32", dropout: float = 0.0, **options: Any
) -> BertConfig:
    """Two layers of width 8."""
    block = bert_block(WIDTH, HEADS, mlp_dim=12, dropout=dropout, compute_dtype=dtype)
    sizes = {"vocab_size": VOCAB, "max_length": 11, "num_layers": LAYERS, "block": block}
    return BertConfig(**(sizes | options), encoding=EncodingConfig.parse(encoding))


def random_state(
    model: Any, seed: int = 0, dtype: Any = np.float64, scale: float = 0.4
) -> tuple[Any, nnx.State]:
    """The structure of `model()`, and parameters that are all random and matter."""
    graphdef, state = nnx.split(nnx.eval_shape(model))
    rng = np.random.default_rng(seed)

    def fill(leaf: Any) -> Any:
        return np.asarray(rng.normal(scale=scale, size=leaf.shape), dtype)

    nnx.replace_by_pure_dict(state, jax.tree.map(fill, nnx.to_pure_dict(state)))
    return graphdef, state


def build(config: BertConfig, seed: int = 0, dtype: Any = np.float64) -> tuple[Any, nnx.State]:
    """A `Bert`, taken apart."""
    return random_state(lambda: Bert(config, rngs=nnx.Rngs(0)), seed, dtype)


def batch(seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Ragged rows of two segments, some tokens to predict, and padding of random numbers."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), LENGTH)
    real = np.arange(LENGTH)[None] < np.array(LENGTHS)[:, None]
    weights = np.zeros(shape, dtype)
    for row, indices in enumerate([(1, 4, 6), (2,), (3, 6)]):
        weights[row, list(indices)] = 1
    return {
        # Not 0: PyTorch gives no gradient to the padding's row of a table.
        "inputs": rng.integers(1, VOCAB, shape, dtype=np.int32),
        "segments": np.where(np.arange(LENGTH)[None] >= np.array([[4], [2], [7]]), 1, 0).astype(
            np.int32
        ),
        "mask": real.astype(np.int32),
        "targets": rng.integers(0, VOCAB, shape, dtype=np.int32),
        "weights": weights,
        "next": np.array([0, 1, 1], np.int32),
    }


def named(state: Any) -> dict[str, np.ndarray]:
    """The parameters by path, in float64."""
    return {
        "/".join(map(str, path)): np.asarray(leaf[...], np.float64)
        for path, leaf in nnx.to_flat_state(state)
    }


def expected_states(
    config: BertConfig, params: dict[str, np.ndarray], row: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """The oracle's states of every layer, of one row of a batch without its padding."""
    length = int(row["mask"].sum())
    encoder = {
        path.removeprefix("encoder/"): value
        for path, value in params.items()
        if path.startswith("encoder/")
    }
    layers = [
        {
            path.removeprefix("blocks/"): value[layer]
            for path, value in encoder.items()
            if path.startswith("blocks/")
        }
        for layer in range(config.num_layers)
    ]
    shared, each = config.encoding.split("layer")
    sizes = Sizes(HEADS, HEADS, WIDTH // HEADS, WIDTH, config.max_length)

    def rule(encoding: EncodingConfig, values: dict[str, np.ndarray]) -> Rule:
        if not encoding.parts:
            return Rule()
        (name, options) = encoding.parts[0]
        spec = f"{name}({','.join(f'{option}={value}' for option, value in options.items())})"
        bare = {
            path.removeprefix("encoding/"): value
            for path, value in values.items()
            if path.startswith("encoding/")
        }
        return rule_of(spec, bare, sizes)

    rules = [rule(each, layer) for layer in layers]
    return oracle.encoder(
        row["inputs"][:length],
        row["segments"][:length],
        encoder,
        layers,
        HEADS,
        rule(shared, encoder),
        rules,
    )


def expected_measures(
    config: BertConfig, params: dict[str, Array], fields: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The oracle's (sum, weight) of each measure of a batch."""
    mlm, nsp, mlm_wrong, nsp_wrong = 0.0, 0.0, 0, 0
    for number in range(len(fields["inputs"])):
        row = {name: value[number] for name, value in fields.items()}
        top = expected_states(config, params, row)[-1]
        for index in np.flatnonzero(row["weights"]):
            logits = oracle.masked_logits(top[index], params)
            mlm += oracle.cross_entropy(logits, row["targets"][index])
            mlm_wrong += int(np.argmax(logits) != row["targets"][index])
        logits = oracle.dense(oracle.pool(top[0], params), params, "next_sentence")
        nsp += oracle.cross_entropy(logits, row["next"])
        nsp_wrong += int(np.argmax(logits) != row["next"])
    count, rows = float(fields["weights"].sum()), float(len(fields["inputs"]))
    sums = {"mlm_loss": (mlm, count), "mlm_error": (mlm_wrong, count), "nsp_loss": (nsp, rows)}
    return sums | {"nsp_error": (nsp_wrong, rows)}
