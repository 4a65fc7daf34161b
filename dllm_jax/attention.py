"""Attention of fresh tokens over [cached prefix | fresh tokens], backend by backend."""

import jax

from dllm_jax.cache import KVCache
from kernels_pallas import TokenFields, attend_reference


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    fields: TokenFields,
    cache: KVCache | None,
    layer: jax.Array,
) -> jax.Array:
    """Attention under the visibility rule.

    Args:
      q: `[B, T, N, H]` roped queries.
      k: `[B, K, T, H]` roped fresh keys.
      v: `[B, K, T, H]` fresh values.
      fields: fields of the fresh tokens, `[B, T]` each.
      cache: the committed prefix, read only, or None.
      layer: int32 scalar, which layer of the cache to read.

    Returns:
      `[B, T, N, H]`.
    """
    if cache is None:
        return attend_reference(q, k, v, fields)
    cached_k = jax.lax.dynamic_index_in_dim(cache.k, layer, keepdims=False)
    cached_v = jax.lax.dynamic_index_in_dim(cache.v, layer, keepdims=False)
    return attend_reference(
        q, k, v, fields, (cached_k, cached_v, cache.fields, cache.length)
    )
