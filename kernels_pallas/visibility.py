"""Which token may look at which: one rule for every attention pattern.

Each token of a forward pass carries a few int32 fields. Block diffusion, plain
autoregression, bidirectional denoising, padding and the paired data/mask rows of the
speculative methods differ only in the values of these fields (`dllm_jax.layouts`).

The rule is written with compares, `&` and `|` alone, so that the same Python function
runs inside a Mosaic kernel, in XLA and in NumPy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FOREVER = 2**31 - 1
"""`visible_until` of a key that never expires."""

NEVER = 2**31 - 1
"""`visible_from` of a key that nobody but itself sees (padding)."""

CACHED_KEY = -1
"""`slot` of every key that comes from the cache: no fresh token has this identity."""

NUM_CACHED_FIELDS = 8
"""Rows of the packed key fields: three are used, eight fill one sublane tile."""


class TokenFields(NamedTuple):
    """The fields of a row of tokens; every leaf is int32 and of one shape.

    A query at moment `time` sees a key during `[visible_from, visible_until)`.
    """

    position: Any  # [B, T] RoPE index: the slot of the text that the token stands for
    time: Any  # [B, T] the moment at which the token looks, as a query
    visible_from: Any  # [B, T] first moment at which it is seen, as a key
    visible_until: Any  # [B, T] first moment at which it is seen no more
    slot: Any  # [B, T] identity within the fresh row, >= 0; CACHED_KEY in the cache


def visible(query: TokenFields, key: TokenFields) -> Any:
    """Returns where `query` sees `key`; the fields broadcast against each other.

    A token sees itself, never another copy of its own position, and any other key
    during that key's life.
    """
    return (key.slot == query.slot) | (
        (key.position != query.position)
        & (key.visible_from <= query.time)
        & (query.time < key.visible_until)
    )


def pack_key_fields(fields: TokenFields) -> jax.Array:
    """Packs what a key needs into one operand, a field a sublane: [B, T] -> [B, 8, T]."""
    used = jnp.stack([fields.position, fields.visible_from, fields.visible_until], axis=1)
    spare = NUM_CACHED_FIELDS - used.shape[1]
    return jnp.pad(used, ((0, 0), (0, spare), (0, 0)))


def unpack_key_fields(packed: jax.Array) -> TokenFields:
    """The fields of cached keys, each [B, S], from `packed` [B, 8, S]."""
    position, visible_from, visible_until = packed[:, 0], packed[:, 1], packed[:, 2]
    # A cached key is never a query, so its moment does not matter.
    return TokenFields(
        position=position,
        time=jnp.zeros_like(position),
        visible_from=visible_from,
        visible_until=visible_until,
        slot=jnp.full_like(position, CACHED_KEY),
    )
