"""A round of SimSD as its parts see it: the open blocks, their draft, the verdict on it.

`settings` is everywhere `simsd.SimSDSettings`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, sampling
from dllm_jax.cache import KVCache, append
from dllm_jax.decoding import canvas
from dllm_jax.decoding.base import DecodeState, ModelFns
from kernels_pallas import TokenFields

UNDRAFTED = -1
"""`order` of a slot that the drafter did not unmask."""

UNIFORMS, DRAWS = 0, 1
"""Streams of random numbers of a forward."""


@struct.dataclass
class Draft:
    """What a round has of its draft, and what all rounds so far have shown."""

    cache: KVCache  # the drafter's
    token: Any  # [B, T] int32, drafted tokens of the open blocks
    order: (
        Any  # [B, T] int32, when each was drafted, or UNDRAFTED: the drafter's step in its
    )
    #   block, or for exact verification how many slots were drafted before it
    hidden: Any  # [B, T, D] the drafter's, when it drafted the token
    block: Any  # [B] int32, which of the open blocks is being drafted
    ready: Any  # [B] bool, the draft is complete
    block_step: Any  # [B] int32, the target's own steps in the open block (exact)
    own_steps: Any  # [B] int32, steps the target alone would have needed so far
    examined: Any  # [B, T] int32, drafted tokens judged, by their place in the draft
    accepted: Any  # [B, T] int32, of these the accepted ones
    rounds: Any  # [B] int32, verifications


@struct.dataclass
class SimSDState(DecodeState):
    """A batch between two steps; its cache is the target's."""

    draft: Draft


class OpenBlocks(NamedTuple):
    """The open blocks of each row, as one window of T slots."""

    index: jax.Array  # [B, T] int32
    token: jax.Array  # [B, T] int32, as committed
    masked: jax.Array  # [B, T] bool, of blocks that the row needs
    drafted: jax.Array  # [B, T] bool, masked and with a drafted token
    number: jax.Array  # [T] int32, which of the open blocks

    def filled(self, draft: Draft) -> jax.Array:
        """Tokens with the draft: int32 `[B, T]`."""
        return jnp.where(self.drafted, draft.token, self.token)


def open_blocks(fns: ModelFns, settings: Any, state: SimSDState) -> OpenBlocks:
    """The open blocks of each row."""
    length = settings.block_length
    offsets = jnp.arange(settings.draft_blocks * length, dtype=jnp.int32)
    index = state.cursor[:, None] + offsets
    token = canvas.read(state.canvas, index)
    last = (state.end + length - 1) // length * length
    masked = (token == fns.config.mask_id) & (index < last[:, None])
    drafted = masked & (state.draft.order != UNDRAFTED)
    return OpenBlocks(index, token, masked, drafted, offsets // length)


class Verdict(NamedTuple):
    """What a verification commits; of examined slots the accepted ones come first."""

    tokens: sampling.Proposal  # [B, T] each
    chosen: jax.Array  # [B, T] bool, to be committed
    examined: jax.Array  # [B, T] bool, drafted and judged
    accepted: jax.Array  # [B, T] bool, of these the accepted
    place: jax.Array  # [B, T] int32, place of a slot in the order of judging
    steps: jax.Array  # [B] int32, the target's own steps that this is worth


def run_model(
    fns: ModelFns,
    state: SimSDState,
    cache: KVCache,
    rows: jax.Array,
    tokens: jax.Array,
    fields: TokenFields,
    settings: Any,
) -> tuple[jax.Array, KVCache, jax.Array]:
    """One forward of a model, which also stores what it lacks before the cursor.

    Args:
      fns: the model.
      state: whose canvas and cursor count.
      cache: the model's.
      rows: bool `[B]`, which rows take part.
      tokens: int32 `[B, W]`, of the open blocks, W at least the window's.
      fields: `[B, W]` each.
      settings: resolved.

    Returns:
      Hidden states `[B, W, D]` of `tokens`, the cache, and how many tokens were stored,
      int32 `[B]`.
    """
    length = settings.block_length
    width = settings.draft_blocks * length
    lacking = jnp.where(rows, state.cursor - cache.length, 0)
    offsets = jnp.arange(width, dtype=jnp.int32)
    position = cache.length[:, None] + offsets
    stored = layouts.block_causal(position, length, offsets < lacking[:, None])

    def with_stored():
        row = jnp.concatenate([canvas.read(state.canvas, position), tokens], axis=1)
        out = fns.forward(row, layouts.join(stored, fields), cache)
        return out.hidden[:, width:], out.k[..., :width, :], out.v[..., :width, :]

    def alone():
        out = fns.forward(tokens, fields, cache)
        return out.hidden, out.k[..., :width, :], out.v[..., :width, :]

    hidden, k, v = jax.lax.cond(jnp.any(lacking > 0), with_stored, alone)
    return hidden, append(cache, k, v, stored, lacking), lacking


def row_keys(state: SimSDState, count: jax.Array, stream: int) -> jax.Array:
    """A key a row for its forward number `count` int32 `[B]`; equal in every batch."""
    return jax.vmap(lambda key, n: jax.random.fold_in(jax.random.fold_in(key, n), stream))(
        state.rng_key, count
    )


def count(slots: jax.Array) -> jax.Array:
    """How many of bool `[..., T]`: int32 `[...]`."""
    return jnp.sum(slots, axis=-1, dtype=jnp.int32)
