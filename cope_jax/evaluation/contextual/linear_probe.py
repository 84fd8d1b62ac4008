"""Multinomial logistic regression on frozen vectors of a layer, or on a learned mix of layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The options of the training of a probe."""

    epochs: int = 20  # passes over the vectors
    batch_size: int = 512  # vectors per step
    learning_rate: float = 5e-3  # initial rate of Adam; it falls to 0 along a cosine
    weight_decay: float = 1e-2  # λ of the decoupled weight decay of W
    seed: int = 0  # seed of the order of vectors

    def __post_init__(self):
        check_fields(self, "probe")
        check_at_least(1, "probe", epochs=self.epochs, batch_size=self.batch_size)
        check_at_least(0, "probe", learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        check_at_least(0, "probe", 2**63 - 1, seed=self.seed)


DEFAULT = ProbeConfig()


@dataclasses.dataclass(frozen=True)
class Probe:
    """A trained probe on a mix of layers: p(y | x) = softmax(W Σ_j s_j (x_j − μ_j)/σ_j + b)."""

    kernel_DV: np.ndarray  # W, transposed
    bias_V: np.ndarray  # b
    mix_J: np.ndarray  # s, positive with sum 1
    mean_JD: np.ndarray  # μ over the training vectors
    std_JD: np.ndarray  # σ; 1 where a coordinate never changes

    def predict(self, x_NJD: np.ndarray, block: int = 8192) -> np.ndarray:
        """The predicted class of each vector, `[N]`."""
        classes = []
        for start in range(0, len(x_NJD), block):
            x = (x_NJD[start : start + block].astype(np.float32) - self.mean_JD) / self.std_JD
            mixed = np.einsum("njd,j->nd", x, self.mix_J)
            classes.append(np.argmax(mixed @ self.kernel_DV + self.bias_V, axis=1))
        return np.concatenate(classes) if classes else np.zeros(0, np.int64)

    def accuracy(self, x_NJD: np.ndarray, labels_N: np.ndarray) -> float:
        """The share of vectors whose predicted class is correct."""
        return float(np.mean(self.predict(x_NJD) == labels_N))


def fit_probe(
    x_NJD: np.ndarray, labels_N: np.ndarray, classes: int, config: ProbeConfig = DEFAULT
) -> Probe:
    """Trains a probe with Adam for a fixed number of epochs; the same input gives the same probe.

    All parameters start at 0, so the layers start with equal shares. With one layer this is plain
    logistic regression. Vectors of any float type are standardised batch by batch, so float16 saves
    memory. Labels are from 0 to `classes` − 1. Raises ConfigError if shapes or labels do not fit.
    """
    x_NJD, labels_N = np.asarray(x_NJD), np.asarray(labels_N)
    if x_NJD.ndim != 3 or labels_N.shape != x_NJD.shape[:1] or not x_NJD.size:
        raise ConfigError(
            f"a probe needs vectors [N, J, D] and labels [N], got {x_NJD.shape} and {labels_N.shape}"
        )
    if labels_N.min() < 0 or labels_N.max() >= classes:
        raise ConfigError(
            f"labels must be in [0, {classes}), got {labels_N.min()} to {labels_N.max()}"
        )
    mean_JD, std_JD = _moments(x_NJD)
    size = min(config.batch_size, len(x_NJD))
    rng = np.random.default_rng(config.seed)
    steps = len(x_NJD) // size  # per epoch; the few vectors left over differ from epoch to epoch
    shuffles = (rng.permutation(len(x_NJD))[: steps * size] for _ in range(config.epochs))
    order_TB = np.concatenate([order.reshape(steps, size) for order in shuffles])
    numbers = labels_N.astype(np.int32), order_TB.astype(np.int32)
    params = _train(jnp.asarray(x_NJD), *numbers, mean_JD, std_JD, classes=classes, config=config)
    kernel, bias, mix = (np.asarray(params[name]) for name in ("kernel", "bias", "mix"))
    mix_J = np.exp(mix - mix.max())
    return Probe(kernel, bias, mix_J / mix_J.sum(), mean_JD, std_JD)


@functools.partial(jax.jit, static_argnames=("classes", "config"))
def _train(
    x_NJD: Array,
    labels_N: Any,
    order_TB: Any,
    mean_JD: Any,
    std_JD: Any,
    *,
    classes: int,
    config: ProbeConfig,
) -> dict[str, Array]:
    layers, width = mean_JD.shape
    shapes = {"kernel": (width, classes), "bias": (classes,), "mix": (layers,)}
    params = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    schedule = optax.cosine_decay_schedule(config.learning_rate, len(order_TB))
    decayed = {"kernel": True, "bias": False, "mix": False}
    optimizer = optax.adamw(schedule, weight_decay=config.weight_decay, mask=decayed)

    def loss(params: dict[str, Array], x_BJD: Array, labels_B: Array) -> Array:
        x_BJD = (x_BJD.astype(jnp.float32) - mean_JD[None]) / std_JD[None]
        mixed_BD = jnp.einsum("bjd,j->bd", x_BJD, jax.nn.softmax(params["mix"]))
        logits_BV = mixed_BD @ params["kernel"] + params["bias"][None]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BV, labels_B))

    def step(state: Any, rows_B: Array) -> tuple[Any, None]:
        params, memory = state
        gradients = jax.grad(loss)(params, x_NJD[rows_B], labels_N[rows_B])
        with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
            updates, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), memory), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), order_TB)
    return params


def _moments(x_NJD: np.ndarray, block: int = 8192) -> tuple[np.ndarray, np.ndarray]:
    """The mean and standard deviation of each coordinate in float64, `block` vectors at a time.

    The function reads the vectors twice, because a single pass loses precision. If a coordinate
    never changes, 1 replaces its standard deviation.
    """
    blocks = range(0, len(x_NJD), block)
    sums = [x_NJD[i : i + block].sum(axis=0, dtype=np.float64) for i in blocks]
    mean = np.sum(sums, axis=0) / len(x_NJD)
    squares = [((x_NJD[i : i + block] - mean) ** 2).sum(axis=0) for i in blocks]
    std = np.sqrt(np.sum(squares, axis=0) / len(x_NJD))
    std = np.where(std > 1e-6 * (1 + np.abs(mean)), std, 1)
    return mean.astype(np.float32), std.astype(np.float32)
