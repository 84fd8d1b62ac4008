"""Tasks, a file each; `names()` lists them, and `create(name, **options)` makes one.

>>> import numpy as np
>>> create("counting", num_variables=3).sample(np.random.default_rng(0), 64)["inputs"].shape
(64, 512)
"""

from typing import Any

from cope_jax.registry import configure, unknown
from cope_jax.tasks import addition as addition
from cope_jax.tasks import bilm as bilm
from cope_jax.tasks import chomsky as chomsky
from cope_jax.tasks import copying as copying
from cope_jax.tasks import counting as counting
from cope_jax.tasks import dyck as dyck
from cope_jax.tasks import flip_flop as flip_flop
from cope_jax.tasks import group_words as group_words
from cope_jax.tasks import indirect_indexing as indirect_indexing
from cope_jax.tasks import lego as lego
from cope_jax.tasks import masked_lm as masked_lm
from cope_jax.tasks import mqar as mqar
from cope_jax.tasks import mqrar as mqrar
from cope_jax.tasks import navigation as navigation
from cope_jax.tasks import needle_keys as needle_keys
from cope_jax.tasks import probes as probes
from cope_jax.tasks import scan as scan
from cope_jax.tasks import selective_copy as selective_copy
from cope_jax.tasks import sharded_text as sharded_text
from cope_jax.tasks import sorting as sorting
from cope_jax.tasks import spam as spam
from cope_jax.tasks import tagging as tagging
from cope_jax.tasks import text as text
from cope_jax.tasks import variable_tracking as variable_tracking
from cope_jax.tasks import words as words
from cope_jax.tasks import zipf as zipf
from cope_jax.tasks.task import ABILITIES, TASKS, Batch, Task

__all__ = ["ABILITIES", "TASKS", "Batch", "Task", "create", "names"]


def names(ability: str | None = None) -> tuple[str, ...]:
    """The names of all tasks, or of those that measure an ability, sorted.

    >>> "navigation" in names("steps")
    True

    Raises:
      ConfigError: the ability is not one of `ABILITIES`.
    """
    if ability is None:
        return TASKS.names()
    if ability not in ABILITIES:
        raise unknown("ability", ability, ABILITIES)
    return tuple(name for name in TASKS if ability in TASKS.get(name).abilities)


def create(name: str, **options: Any) -> Task:
    """The task called `name` with `options`, which are fields of the task's Config.

    Raises:
      ConfigError: the task or an option is unknown, or a value is out of range.
    """
    task: Any = TASKS.get(name)
    return task(configure(task.Config, options, name))
