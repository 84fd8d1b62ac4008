"""A laboratory for position encodings in JAX: Contextual Position Encoding (CoPE) and its rivals.

`import cope_jax as cj` gives the thirteen names that most people need. Each name is imported on first
use, so the import itself costs nothing and does not start JAX.

>>> import cope_jax as cj
>>> cj.encodings.names()[:3]
('alibi', 'cable', 'carope')
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cope_jax import encodings as encodings
    from cope_jax import models as models
    from cope_jax import tasks as tasks
    from cope_jax import testing as testing
    from cope_jax.attention import attend as attend
    from cope_jax.attention import flex_attention as flex_attention
    from cope_jax.evaluation.gates.maps import inspect as inspect
    from cope_jax.generation.decoding import generate as generate
    from cope_jax.runs.experiment import Experiment as Experiment
    from cope_jax.runs.grid.grid import Grid as Grid
    from cope_jax.runs.load import load as load
    from cope_jax.training.config_files import config as config
    from cope_jax.training.experiment_config import ExperimentConfig as ExperimentConfig

__version__ = "0.1.0"

_PLACES = {
    "attend": "cope_jax.attention",
    "flex_attention": "cope_jax.attention",
    "encodings": "cope_jax.encodings",
    "tasks": "cope_jax.tasks",
    "models": "cope_jax.models",
    "config": "cope_jax.training.config_files",
    "ExperimentConfig": "cope_jax.training.experiment_config",
    "Experiment": "cope_jax.runs.experiment",
    "Grid": "cope_jax.runs.grid.grid",
    "load": "cope_jax.runs.load",
    "generate": "cope_jax.generation.decoding",
    "inspect": "cope_jax.evaluation.gates.maps",
    "testing": "cope_jax.testing",
}
"""Maps public names to their modules; `encodings`, `tasks`, `models` and `testing` are packages themselves."""

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_PLACES[name])
    except ModuleNotFoundError as error:
        from cope_jax.errors import not_installed

        if line := not_installed(error):
            raise ModuleNotFoundError(f"cope_jax.{name}: {line}", name=error.name) from None
        raise
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_PLACES, "__version__"]
