import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.training.experiment_config import OptimizerConfig
from cope_jax.training.optimizer import applied_rate, create_optimizer, create_schedule

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.0, 0.5, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [0.0, 0.5, 2.0, 1.6, 1.2, 0.4, 0.4]),
        # 2·(0.2 + 0.8·(1 + cos(π·t/8))/2) at t = 0, 2, 4, 8
        ("cosine", [0.0, 0.5, 2.0, 2 * (0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2), 1.2, 0.4, 0.4]),
    ],
)
def test_schedules_have_the_values_worked_out_by_hand(schedule, expected):
    config = OptimizerConfig(
        learning_rate=2.0, schedule=schedule, warmup_steps=4, final_fraction=0.2
    )
    rate = create_schedule(config, 12)
    np.testing.assert_allclose(
        [rate(step) for step in (0, 1, 4, 6, 8, 12, 20)], expected, rtol=1e-6
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_without_warmup_the_first_step_has_the_full_rate(schedule):
    rate = create_schedule(
        OptimizerConfig(learning_rate=0.3, schedule=schedule, warmup_steps=0), 10
    )
    np.testing.assert_allclose(rate(0), 0.3, rtol=1e-6)


def test_warmup_must_leave_steps_for_the_decay():
    with pytest.raises(
        ConfigError, match=r"optimizer.warmup_steps=5 must be less than training.steps=5"
    ):
        create_schedule(OptimizerConfig(warmup_steps=5), 5)
    create_schedule(OptimizerConfig(warmup_steps=5, schedule="constant"), 5)


def numpy_adam(gradients, params, rate, beta1, beta2, epsilon, weight_decay):
    """Algorithm 1 of Kingma and Ba; weight decay as in algorithm 2 of Loshchilov and Hutter."""
    m, v = np.zeros_like(params), np.zeros_like(params)
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        step = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
        params = params - rate * (step + weight_decay * params)
    return params


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_updates_equal_adam_in_numpy(name, rng):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.5,
        beta1=0.8,
        beta2=0.9,
        epsilon=1e-3,
        clip_norm=None,
    )
    gradients, params = rng.normal(size=(3, 4)), rng.normal(size=4)
    expected = numpy_adam(gradients, params, 0.1, 0.8, 0.9, 1e-3, 0.5 if name == "adamw" else 0.0)
    np.testing.assert_allclose(apply(config, gradients, params), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("clip_norm", "gradient"), [(1.0, [0.6, 0.8]), (5.0, [3.0, 4.0]), (None, [3.0, 4.0])]
)
def test_gradients_are_clipped_to_the_global_norm(clip_norm, gradient):
    # With ε = 1 the size of the gradient (3, 4) shows in Adam's first step: −g/(|g| + 1).
    config = OptimizerConfig(
        name="adam",
        learning_rate=1.0,
        schedule="constant",
        warmup_steps=0,
        epsilon=1.0,
        clip_norm=clip_norm,
    )
    expected = [-g / (g + 1) for g in gradient]
    np.testing.assert_allclose(apply(config, [[3.0, 4.0]], [0.0, 0.0]), expected, rtol=1e-5)


def test_the_schedule_counts_the_steps():
    config = OptimizerConfig(
        name="adam", learning_rate=1.0, schedule="linear", warmup_steps=1, epsilon=1e-30
    )
    # Gradients of 1 make Adam's step the rate itself: 0, 1, 1/2, 0.
    params = [apply(config, [[1.0]] * steps, [0.0], steps=3)[0] for steps in range(5)]
    # 1 − 0.999^t, by which Adam divides, has 5 digits in float32.
    np.testing.assert_allclose(params, [0.0, 0.0, -1.0, -1.5, -1.5], rtol=1e-4)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_rate_to_report_is_that_of_the_next_update(name, clip_norm):
    config = OptimizerConfig(
        name=name, learning_rate=3.0, schedule="linear", warmup_steps=3, clip_norm=clip_norm
    )
    optimizer, schedule = create_optimizer(config, 6), create_schedule(config, 6)
    params = np.zeros(2, np.float32)
    update = jax.jit(lambda state: optimizer.update(params + 1, state, params)[1])
    state, rates = jax.jit(optimizer.init)(params), []
    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        for _ in range(6):
            rates.append(float(applied_rate(schedule, state)))
            state = update(state)
    np.testing.assert_allclose(rates, [0, 1, 2, 3, 2, 1], rtol=1e-6)


def apply(config, gradients, params, steps=10):
    """Parameters after an update by each gradient; two arrays, to show that a norm is global."""
    optimizer = create_optimizer(config, steps)
    tree = [jnp.asarray([p], jnp.float32) for p in params]
    state = optimizer.init(tree)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        for gradient in gradients:
            updates, state = optimizer.update(
                [jnp.asarray([g], jnp.float32) for g in gradient], state, tree
            )
            tree = jax.tree.map(jnp.add, tree, updates)
    return [float(leaf[0]) for leaf in tree]


@pytest.mark.parametrize("decayed", ["all", "weights"])
def test_decay_is_of_all_or_of_weights_alone(decayed):
    """Without a gradient only what decays moves."""
    config = OptimizerConfig(weight_decay=0.1, decayed=decayed, warmup_steps=0, schedule="constant")
    optimizer, leaf = create_optimizer(config, 4), jnp.ones(2)
    layer = {
        "bias_table": {"kernel": leaf, "bias": leaf},
        "mix": {"weights": leaf},
        "norm": {"scale": leaf},
    }
    layer["mixer"] = {"log_rate": leaf, "key_convolution": leaf}
    params = {"blocks": layer}
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer
        updates, _ = optimizer.update(
            jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
        )
    moved = jax.tree.map(lambda update: bool(update.any()), updates)
    every = decayed == "all"
    assert moved["blocks"] == {
        "bias_table": {"kernel": True, "bias": every},
        "mix": {"weights": every},
        "norm": {"scale": every},
        "mixer": {"log_rate": every, "key_convolution": every},
    }
