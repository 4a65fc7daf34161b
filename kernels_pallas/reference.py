"""The attention of this library in plain jnp: the XLA path and the kernels' reference."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.visibility import TokenFields, unpack_key_fields, visible

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class CachedKV(NamedTuple):
    """The cached prefix, read only: stacked over layers, or one layer of it.

    Slots at or beyond a row's length do not exist for it. An int8 cache has a scale for
    each key and each value; the others have None.
    """

    k: Any  # [L, B, K, S, H]
    v: Any  # [L, B, K, S, H]
    fields: Any  # [B, 8, S] int32, packed as by `pack_key_fields`
    length: Any  # [B] int32
    k_scale: Any = None  # [L, B, K, S] float32
    v_scale: Any = None  # [L, B, K, S] float32

    def of_layer(self, layer: jax.Array) -> "CachedKV":
        """One layer, int32 scalar, without the leading axis."""

        def take(stacked):
            if stacked is None:
                return None
            return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)

        return CachedKV(
            take(self.k),
            take(self.v),
            self.fields,
            self.length,
            take(self.k_scale),
            take(self.v_scale),
        )


def _pairwise(query: TokenFields, key: TokenFields) -> jax.Array:
    """Visibility of [B, T] queries against [B, S] keys: bool [B, T, S]."""
    return visible(
        TokenFields(*(field[:, :, None] for field in query)),
        TokenFields(*(field[:, None, :] for field in key)),
    )


def attend_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    fields: TokenFields,
    cached: CachedKV | tuple[jax.Array, ...] | None = None,
) -> jax.Array:
    """Attention of fresh tokens over the cached prefix and over each other.

    Args:
      q: `[B, T, N, H]` roped queries.
      k: `[B, K, T, H]` roped fresh keys; query head n reads key head `n // (N / K)`.
      v: `[B, K, T, H]` fresh values.
      fields: the fields of the fresh tokens, `[B, T]` each.
      cached: None, or one layer of a `CachedKV`, as such or as a plain tuple. Slots at or
        beyond a row's length do not exist for it, whatever they hold.

    Returns:
      `[B, T, N, H]` in the dtype of `q`; 0 for a query that sees nothing. Scores and
      softmax are float32.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # The query heads of one key head and the tokens share an axis, M = G * T: plain
    # batched matrix products, also in the backward pass.
    q = q.reshape(batch, num_tokens, num_kv_heads, group, head_dim)
    q = q.transpose(0, 2, 3, 1, 4)
    packed_q = q.reshape(batch, num_kv_heads, group * num_tokens, head_dim)

    def scores(keys):
        raw = jnp.einsum(
            "bkmh,bksh->bkms", packed_q, keys, preferred_element_type=jnp.float32
        )
        return raw * jnp.float32(head_dim**-0.5)

    score = scores(k)
    seen = _pairwise(fields, fields)
    if cached is not None:
        cached = CachedKV(*cached)
        exists = jnp.arange(cached.fields.shape[-1], dtype=jnp.int32)
        exists = exists < cached.length[:, None]
        cached_fields = unpack_key_fields(cached.fields)
        seen_cached = _pairwise(fields, cached_fields) & exists[:, None, :]
        # Values that do not exist may be anything: a weight of 0 is no protection from NaN.
        cached_v = jnp.where(exists[:, None, :, None], cached.v, 0).astype(v.dtype)
        cached_score = scores(cached.k.astype(k.dtype))
        if cached.k_scale is not None:
            cached_score = cached_score * cached.k_scale[:, :, None]
        score = jnp.concatenate([cached_score, score], axis=-1)
        seen = jnp.concatenate([seen_cached, seen], axis=-1)

    seen = seen[:, None, None]
    score = score.reshape(batch, num_kv_heads, group, num_tokens, -1)
    weight = jax.nn.softmax(jnp.where(seen, score, _MASKED), axis=-1)
    # Where nothing is seen at all, softmax gives every key the same weight.
    weight = jnp.where(seen, weight, 0.0)
    weight = weight.reshape(batch, num_kv_heads, group * num_tokens, -1)

    def mix(weights, values):
        return jnp.einsum(
            "bkms,bksh->bkmh", weights, values, preferred_element_type=jnp.float32
        )

    if cached is None:
        out = mix(weight.astype(v.dtype), v)
    else:
        num_cached = cached_v.shape[2]
        cached_weight, weight = weight[..., :num_cached], weight[..., num_cached:]
        if cached.v_scale is not None:
            scale = jnp.where(exists[:, None], cached.v_scale, 0.0)
            cached_weight = cached_weight * scale[:, :, None]
        out = mix(cached_weight.astype(v.dtype), cached_v)
        out = out + mix(weight.astype(v.dtype), v)
    out = out.reshape(batch, num_kv_heads, group, num_tokens, head_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, num_tokens, num_heads, head_dim)
    return out.astype(q.dtype)
