"""The models. Each model is defined in a file that is imported below.

>>> config = MODELS.get("rnn_lm").Config(vocab_size=8, embed_dim=4, hidden_dim=4)
>>> type(create("rnn_lm", config, rngs=nnx.Rngs(0))).__name__
'RNNLM'
"""

from typing import Any

from flax import nnx

from cope_jax.models import bert as bert
from cope_jax.models import bert_heads as bert_heads
from cope_jax.models import decoder as decoder
from cope_jax.models import elmo as elmo
from cope_jax.models import rnn_lm as rnn_lm
from cope_jax.models import tagger as tagger
from cope_jax.models.model import MODELS as MODELS
from cope_jax.models.model import Ability as Ability
from cope_jax.models.model import Model as Model
from cope_jax.registry import checked


def names() -> tuple[str, ...]:
    """The names of all models, sorted."""
    return MODELS.names()


def able(ability: Ability) -> tuple[str, ...]:
    """The names of the models that have this ability, see `Ability`."""
    return tuple(name for name in MODELS if ability in MODELS.get(name).abilities)


def create(name: str, config: Any, *, rngs: nnx.Rngs) -> Any:
    """Creates the model `name` from its `MODELS.get(name).Config`; ConfigError: another config."""
    model = MODELS.get(name)
    return model(
        checked(config, model.Config, f"the config of {name}"), rngs=checked(rngs, nnx.Rngs, "rngs")
    )
