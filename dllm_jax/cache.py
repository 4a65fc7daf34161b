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


def cache_slots(tokens: int) -> int:
    """Slots to allocate for `tokens`: whole tiles of 128.

    With another number of slots XLA for TPU keeps the cache in another layout inside the
    loop, which costs a second cache in memory and two copies of it.
    """
    return -(-tokens // 128) * 128


def init_cache(config: ModelConfig, batch: int, slots: int, dtype: Any) -> KVCache:
    """An empty cache with room for `slots` tokens in each of `batch` rows."""
    shape = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
    return KVCache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        fields=jnp.zeros((batch, NUM_CACHED_FIELDS, slots), jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
    )


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

    def write(buffer, fresh, start):  # [L, K, S, H], [L, K, T, H]
        return jax.lax.dynamic_update_slice(buffer, fresh, (0, 0, start, 0))

    def write_fields(buffer, fresh, start):  # [8, S], [8, T]
        return jax.lax.dynamic_update_slice(buffer, fresh, (0, start))

    rows = jax.vmap(write, in_axes=(1, 1, 0), out_axes=1)
    return KVCache(
        k=rows(cache.k, k.astype(cache.k.dtype), cache.length),
        v=rows(cache.v, v.astype(cache.v.dtype), cache.length),
        fields=jax.vmap(write_fields)(cache.fields, pack_key_fields(fields), cache.length),
        length=cache.length + count,
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

    def put(buffer, fresh):  # [L, B, K, S, H], [L, B, K, T, H]
        kept = buffer[..., : fresh.shape[3], :]
        new = jnp.where(rows[:, None, None, None], fresh.astype(buffer.dtype), kept)
        return jax.lax.dynamic_update_slice(buffer, new, (0,) * buffer.ndim)

    packed = pack_key_fields(fields)
    kept = cache.fields[..., : packed.shape[-1]]
    packed = jnp.where(rows[:, None, None], packed, kept)
    return KVCache(
        k=put(cache.k, k),
        v=put(cache.v, v),
        fields=jax.lax.dynamic_update_slice(cache.fields, packed, (0, 0, 0)),
        length=jnp.where(rows, count, cache.length),
    )
