"""The laws of attention, for anybody's function: causality, documents, padding, caches, gradients.

>>> import numpy as np
>>> from cope_jax import testing
>>> def shifted(x):  # each output is the token before
...     return np.roll(x, 1, axis=1)
>>> testing.check(shifted, testing.vectors(8))["causality"].counterexample
'token 15 changes output 0 by 2...'
"""

from cope_jax.testing import caches as caches
from cope_jax.testing import comparisons as comparisons
from cope_jax.testing import gradient_laws as gradient_laws
from cope_jax.testing import laws as laws
from cope_jax.testing.checking import check as check
from cope_jax.testing.inputs import Inputs as Inputs
from cope_jax.testing.inputs import qkv as qkv
from cope_jax.testing.inputs import tokens as tokens
from cope_jax.testing.inputs import vectors as vectors
from cope_jax.testing.measures import LAWS as LAWS
from cope_jax.testing.torch_functions import from_torch as from_torch
from cope_jax.testing.verdicts import Report as Report
from cope_jax.testing.verdicts import Verdict as Verdict
