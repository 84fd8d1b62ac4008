"""Attention for every encoding: one entry point, several implementations, and a cache for decoding."""

from cope_jax.attention.attend import IMPLEMENTATIONS as IMPLEMENTATIONS
from cope_jax.attention.attend import attend as attend
from cope_jax.attention.attend import choose as choose
from cope_jax.attention.attention_fn import AttentionFn as AttentionFn
from cope_jax.attention.blockwise import blockwise_attention as blockwise_attention
from cope_jax.attention.cache import Cache as Cache
from cope_jax.attention.cache import create_cache as create_cache
from cope_jax.attention.decode import attend_cached as attend_cached
from cope_jax.attention.full import attention_weights as attention_weights
from cope_jax.attention.full import full_attention as full_attention
from cope_jax.attention.fused import fused_attention as fused_attention
from cope_jax.attention.inputs import Inputs as Inputs
from cope_jax.attention.inputs import prepare as prepare
from cope_jax.attention.mask import Mask as Mask
from cope_jax.attention.tiles import BlockSizes as BlockSizes
