"""The attention of this library in plain jnp: the XLA path and the kernels' reference."""

import jax
import jax.numpy as jnp

from kernels_pallas.visibility import TokenFields, unpack_key_fields, visible

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


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
    cached: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attention of fresh tokens over the cached prefix and over each other.

    Args:
      q: `[B, T, N, H]` roped queries.
      k: `[B, K, T, H]` roped fresh keys; query head n reads key head `n // (N / K)`.
      v: `[B, K, T, H]` fresh values.
      fields: the fields of the fresh tokens, `[B, T]` each.
      cached: None, or `(k [B, K, S, H], v [B, K, S, H], packed fields [B, 8, S],
        length [B])`; slots at or beyond a row's length do not exist for it.

    Returns:
      `[B, T, N, H]` in the dtype of `q`. Scores and softmax are float32.
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
        cached_k, cached_v, packed, length = cached
        exists = jnp.arange(packed.shape[-1], dtype=jnp.int32) < length[:, None]
        seen_cached = _pairwise(fields, unpack_key_fields(packed)) & exists[:, None, :]
        score = jnp.concatenate([scores(cached_k), score], axis=-1)
        seen = jnp.concatenate([seen_cached, seen], axis=-1)

    # Every token sees at least itself, so no row of the softmax is empty.
    score = score.reshape(batch, num_kv_heads, group, num_tokens, -1)
    score = jnp.where(seen[:, None, None], score, _MASKED)
    weight = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    weight = weight.reshape(batch, num_kv_heads, group * num_tokens, -1)

    def mix(weights, values):
        return jnp.einsum(
            "bkms,bksh->bkmh", weights, values, preferred_element_type=jnp.float32
        )

    if cached is None:
        out = mix(weight, v)
    else:
        num_cached = cached_k.shape[2]
        out = mix(weight[..., :num_cached], cached_v)
        out = out + mix(weight[..., num_cached:], v)
    out = out.reshape(batch, num_kv_heads, group, num_tokens, head_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, num_tokens, num_heads, head_dim)
    return out.astype(q.dtype)
