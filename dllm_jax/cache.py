"""The key/value cache: one static allocation, head-major and stacked over layers.

This layout lives in a `while_loop` carry without copies on TPU. Slots at or beyond a
row's `length` do not exist, so undoing a write is lowering `length`, and a write that is
not followed by an advance leaves no trace.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.config import ModelConfig
from kernels_pallas import NUM_CACHED_FIELDS, TokenFields, pack_key_fields


@struct.dataclass
class KVCache:
    """Keys and values of committed tokens, row by row."""

    k: Any  # [L, B, K, S, H]
    v: Any  # [L, B, K, S, H]
    fields: Any  # [B, 8, S] int32, packed as by `pack_key_fields`
    length: Any  # [B] int32, slots in use
    k_scale: Any = None  # [L, B, K, S] float32 of int8 keys, else None
    v_scale: Any = None  # [L, B, K, S] float32 of int8 values, else None


def cache_slots(tokens: int) -> int:
    """Slots to allocate for `tokens`: whole tiles of 128.

    With another number of slots XLA for TPU keeps the cache in another layout inside the
    loop, which costs a second cache in memory and two copies of it.
    """
    return -(-tokens // 128) * 128


def init_cache(config: ModelConfig, batch: int, slots: int, dtype: Any) -> KVCache:
    """An empty cache with room for `slots` tokens in each of `batch` rows.

    Of `dtype` int8 it has a float32 scale for each key and each value, and is approximate:
    a number is off by at most half a 127th of the largest of its vector.
    """
    shape = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)

    def scale():
        int8 = jnp.dtype(dtype) == jnp.int8
        return jnp.zeros(shape[:-1], jnp.float32) if int8 else None

    return KVCache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        fields=jnp.zeros((batch, NUM_CACHED_FIELDS, slots), jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
        k_scale=scale(),
        v_scale=scale(),
    )


def _stored(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Fresh keys or values `[..., H]` as a cache of `dtype` keeps them, and the scales."""
    if jnp.dtype(dtype) != jnp.int8:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    safe = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    return jnp.round(x / safe[..., None]).astype(jnp.int8), scale


def append(
    cache: KVCache,
    k: jax.Array,
    v: jax.Array,
    fields: TokenFields,
    count: jax.Array,
) -> KVCache:
    """Writes fresh tokens behind each row's length and keeps the first `count` of them.

    Every row writes all T tokens; a row with `count` 0 is thereby unchanged, for what
    lies beyond its length does not exist. The caller allocates T slots of slack:
    `dynamic_update_slice` would otherwise clamp the start and overwrite good keys.

    Args:
      cache: the cache.
      k: `[L, B, K, T, H]` roped fresh keys.
      v: `[L, B, K, T, H]` fresh values.
      fields: `[B, T]` each.
      count: int32 `[B]`, how many of the T tokens to keep.
    """

    def write(axis, batch_axis):
        """Writes `[.., T, ..]` into `[.., S, ..]` along an axis that counts rows out."""

        def one(buffer, fresh, start):
            at = [0] * buffer.ndim
            at[axis] = start
            return jax.lax.dynamic_update_slice(buffer, fresh, at)

        rows = jax.vmap(one, (batch_axis, batch_axis, 0), batch_axis)
        return lambda buffer, fresh: rows(buffer, fresh, cache.length)

    k, k_scale = _stored(k, cache.k.dtype)
    v, v_scale = _stored(v, cache.v.dtype)
    into_layers, into_fields = write(2, 1), write(1, 0)
    return cache.replace(
        k=into_layers(cache.k, k),
        v=into_layers(cache.v, v),
        fields=into_fields(cache.fields, pack_key_fields(fields)),
        length=cache.length + count,
        k_scale=None if k_scale is None else into_layers(cache.k_scale, k_scale),
        v_scale=None if v_scale is None else into_layers(cache.v_scale, v_scale),
    )


def refill(
    cache: KVCache,
    k: jax.Array,
    v: jax.Array,
    fields: TokenFields,
    rows: jax.Array,
    count: jax.Array,
) -> KVCache:
    """Replaces all that some rows have stored; the others stay as they are.

    Args:
      cache: the cache, of at least T slots.
      k: `[L, B, K, T, H]` roped fresh keys.
      v: `[L, B, K, T, H]` fresh values.
      fields: `[B, T]` each.
      rows: bool `[B]`, which rows to refill.
      count: int32 `[B]`, how many of the T tokens they keep.
    """

    def put(buffer, fresh, axis, batch_axis):
        """Fresh values in front along `axis`, in the given rows."""
        if buffer is None:
            return None
        kept = jax.lax.slice_in_dim(buffer, 0, fresh.shape[axis], axis=axis)
        which = rows.reshape([-1 if a == batch_axis else 1 for a in range(buffer.ndim)])
        new = jnp.where(which, fresh, kept)
        return jax.lax.dynamic_update_slice(buffer, new, (0,) * buffer.ndim)

    k, k_scale = _stored(k, cache.k.dtype)
    v, v_scale = _stored(v, cache.v.dtype)
    return KVCache(
        k=put(cache.k, k, 3, 1),
        v=put(cache.v, v, 3, 1),
        fields=put(cache.fields, pack_key_fields(fields), 2, 0),
        length=jnp.where(rows, count, cache.length),
        k_scale=put(cache.k_scale, k_scale, 3, 1),
        v_scale=put(cache.v_scale, v_scale, 3, 1),
    )
