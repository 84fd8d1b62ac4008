"""The compiled functions of training, shared by all runs that differ in their seeds only."""

from collections.abc import Callable
from typing import Any

import jax

from cope_jax.training.learner import Learner
from cope_jax.training.replicas import Replicas


class Program:
    """A learner compiled for `replicas.width` runs side by side.

    Attributes:
      init: seeds → state.
      train_steps: (state, batches) → (state, metrics); the state is donated.
    """

    def __init__(self, learner: Learner, replicas: Replicas):
        self.learner = learner
        self.replicas = replicas
        self.init: Callable[..., Any] = jax.jit(replicas.lift(learner.init))
        self.train_steps: Callable[..., Any] = jax.jit(replicas.lift(learner.train_steps), donate_argnums=0)
