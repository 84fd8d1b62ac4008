"""Tasks: what a model learns. One file per task; `names()` lists the tasks, and `create(name, **options)` makes a task.

>>> import numpy as np
>>> create("counting", num_variables=3).sample(np.random.default_rng(0), 64)["inputs"].shape
(64, 512)
"""

from typing import Any

from cope_jax.registry import configure
from cope_jax.tasks import addition as addition
from cope_jax.tasks import bilm as bilm
from cope_jax.tasks import counting as counting
from cope_jax.tasks import flip_flop as flip_flop
from cope_jax.tasks import masked_lm as masked_lm
from cope_jax.tasks import navigation as navigation
from cope_jax.tasks import selective_copy as selective_copy
from cope_jax.tasks import spam as spam
from cope_jax.tasks import tagging as tagging
from cope_jax.tasks import text as text
from cope_jax.tasks import words as words
from cope_jax.tasks import zipf as zipf
from cope_jax.tasks.task import TASKS, Batch, Task

__all__ = ["TASKS", "Batch", "Task", "create", "names"]


def names() -> tuple[str, ...]:
    """The names of all tasks, sorted."""
    return TASKS.names()


def create(name: str, **options: Any) -> Task:
    """The task called `name` with `options`, which are fields of the task's Config.

    Raises:
      ConfigError: the task or an option is unknown, or a value is out of range.
    """
    task: Any = TASKS.get(name)
    return task(configure(task.Config, options, name))
