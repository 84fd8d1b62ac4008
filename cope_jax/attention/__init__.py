"""Attention for every encoding: an entry point, several implementations, and a cache to decode."""

from cope_jax.attention.attend import BACKENDS as BACKENDS
from cope_jax.attention.attend import attend as attend
from cope_jax.attention.attention_fn import AttentionFn as AttentionFn
from cope_jax.attention.blocks import BlockSizes as BlockSizes
from cope_jax.attention.blocks import KeyBlock as KeyBlock
from cope_jax.attention.blocks import QueryBlock as QueryBlock
from cope_jax.attention.blockwise import blockwise_attention as blockwise_attention
from cope_jax.attention.cache import Cache as Cache
from cope_jax.attention.cache import create_cache as create_cache
from cope_jax.attention.decode import attend_cached as attend_cached
from cope_jax.attention.flex import flex_attention as flex_attention
from cope_jax.attention.full import attention_weights as attention_weights
from cope_jax.attention.full import full_attention as full_attention
from cope_jax.attention.mask import Mask as Mask
from cope_jax.attention.request import Plan as Plan
from cope_jax.attention.request import Reason as Reason
from cope_jax.attention.request import Request as Request
from cope_jax.attention.request import prepare as prepare
