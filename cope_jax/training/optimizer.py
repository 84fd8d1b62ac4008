"""Optimizers and learning-rate schedules."""

from typing import Any

import jax
import optax

from cope_jax.errors import ConfigError
from cope_jax.training.experiment_config import OptimizerConfig


def create_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Creates the schedule of the learning rate.

    The rate first rises linearly from 0 to `learning_rate`. Then it stays constant, or decays
    linearly or by a cosine to `final_fraction` of `learning_rate`.

    >>> schedule = create_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear"), 4)
    >>> [float(schedule(step)) for step in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if config.warmup_steps >= steps and config.schedule != "constant":
        raise ConfigError(
            f"optimizer.warmup_steps={config.warmup_steps} must be less than training.steps={steps}: set "
            "--config.optimizer.warmup_steps"
        )
    rest, end = max(steps - config.warmup_steps, 1), config.final_fraction
    after = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "linear": lambda: optax.linear_schedule(
            config.learning_rate, end * config.learning_rate, rest
        ),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, rest, alpha=end),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def create_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Creates an optimizer that clips gradients, then applies Adam or AdamW.

    Adam: arXiv 1412.6980. AdamW: Loshchilov and Hutter (arXiv 1711.05101).
    """
    schedule = create_schedule(config, steps)
    moments = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    update = {
        "adam": lambda: optax.adam(schedule, **moments),
        "adamw": lambda: optax.adamw(
            schedule, weight_decay=config.weight_decay, mask=_MASKS[config.decayed], **moments
        ),
    }[config.name]()
    norm = config.clip_norm
    clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
    return optax.chain(clip, update)


def _weights(params: Any) -> Any:
    """Marks parameters with weight decay: True, except for biases, norm scales, convolutions over
    a few tokens, rates of decay and parameters of `ScalarMix`.

    Decay of a `ScalarMix` would make the shares of its layers equal, and that of a rate would make
    all rates 1.
    """

    def decays(path: Any, _: Any) -> bool:
        names = [key.key for key in path if isinstance(key.key, str)]
        return "mix" not in names and not any(
            ending in names[-1] for ending in ("bias", "scale", "convolution", "log_rate")
        )

    return jax.tree_util.tree_map_with_path(decays, params)


_MASKS = {"all": None, "weights": _weights}


def applied_rate(schedule: optax.Schedule, opt_state: Any) -> Any:
    """The rate of the next update, by the number of updates, not of steps."""

    def by_schedule(path: Any, _: Any) -> bool:
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"

    return schedule(optax.tree.get(opt_state, "count", filtering=by_schedule))
