"""Attention patterns as choices of token fields, one function a pattern.

Each returns the fields that make `kernels_pallas.visible` give the pattern.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import FOREVER, NEVER, TokenFields


def _fields(position, time, visible_from, visible_until, valid=None) -> TokenFields:
    """Fields of one shape; padding (`valid` False) is seen by nobody but itself."""
    if valid is not None:
        visible_from = jnp.where(valid, visible_from, NEVER)
    slot = jnp.arange(position.shape[-1], dtype=jnp.int32)
    whole = [position, time, visible_from, visible_until, slot]
    return TokenFields(
        *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), position.shape) for x in whole)
    )


def block_causal(
    position: jax.Array, block_length: int, valid: jax.Array | None = None
) -> TokenFields:
    """Blocks in order, all-to-all inside a block (SDAR, LLaDA2, Fast-dLLM v2).

    Args:
      position: int32 `[B, T]`; the block of position p is `p // block_length`.
      block_length: 1 gives causal attention.
      valid: bool `[B, T]`, False for padding.
    """
    block = position // block_length
    return _fields(position, block, block, FOREVER, valid)


def causal(position: jax.Array, valid: jax.Array | None = None) -> TokenFields:
    """Plain autoregression; `position` int32 `[B, T]`."""
    return block_causal(position, 1, valid)


def bidirectional(position: jax.Array, valid: jax.Array | None = None) -> TokenFields:
    """Everything sees everything (LLaDA, Dream); `position` int32 `[B, T]`."""
    return _fields(position, 0, 0, FOREVER, valid)


def causal_then_blocks(
    position: jax.Array,
    block_length: int,
    causal_until: jax.Array,
    valid: jax.Array | None = None,
) -> TokenFields:
    """Tokens before `causal_until` see what is not behind them, the rest whole blocks.

    With `causal_until` 0 this is `block_causal`, with a large one `causal`; a block that
    it cuts has decided tokens in front that do not look at the masks behind them (S2D2's
    draft_ver). The moments leave room for `mask_copies`: the token at p looks at 2p + 1
    if it is causal, else at the last such moment of its block.

    Args:
      position: int32 `[B, T]`.
      block_length: of the blocks.
      causal_until: int32 `[B]`, a position.
      valid: bool `[B, T]`, False for padding.
    """
    until = causal_until[:, None]
    first = position // block_length * block_length
    causal_token = position < until
    # No causal token looks this late, and every other token of the block does.
    opens = 2 * jnp.maximum(first, until) + 1
    own = 2 * position + 1
    return _fields(
        position,
        jnp.where(causal_token, own, 2 * (first + block_length) - 1),
        jnp.where(causal_token, own, opens),
        FOREVER,
        valid,
    )


def mask_copies(position: jax.Array, valid: jax.Array | None = None) -> TokenFields:
    """Masks that each predict their slot as if it came next (S2D2's verifier).

    The mask at p sees the tokens before p of `causal_then_blocks`, and no other mask; no
    token sees a mask.

    Args:
      position: int32 `[B, T]`.
      valid: bool `[B, T]`, False for padding.
    """
    return _fields(position, 2 * position, 2 * position, 2 * position + 1, valid)


def choose(rows: jax.Array, one: TokenFields, other: TokenFields) -> TokenFields:
    """`one` for the given rows, bool `[B]`, `other` for the rest."""
    return jax.tree.map(lambda x, y: jnp.where(rows[:, None], x, y), one, other)


def join(*parts: TokenFields) -> TokenFields:
    """Parts of a row, `[B, ...]` each, one behind the other."""
    joined = TokenFields(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)))
    slot = jnp.arange(joined.slot.shape[1], dtype=jnp.int32)
    return joined._replace(slot=jnp.broadcast_to(slot, joined.slot.shape))


def training_pairs(
    clean_position: jax.Array,
    noisy_position: jax.Array,
    block_length: jax.Array,
    clean_valid: jax.Array,
    noisy_valid: jax.Array,
) -> TokenFields:
    """[clean row | noisy row] of block-diffusion training, in one forward.

    A noisy token of block b sees the clean tokens of earlier blocks and the noisy tokens
    of its own; clean tokens see clean tokens block-causally. A clean token of the own
    block is born one moment after the noisy tokens look, so nothing leaks.

    Args:
      clean_position: int32 `[B, T]`.
      noisy_position: int32 `[B, U]`, any subset of the blocks; of a block that is cut, only
        the noisy tokens that are there see each other.
      block_length: int32 `[B]`, may differ from row to row.
      clean_valid: bool `[B, T]`.
      noisy_valid: bool `[B, U]`.
    """
    clean_block = clean_position // block_length[:, None]
    noisy_block = noisy_position // block_length[:, None]
    clean_time, noisy_time = 2 * clean_block + 1, 2 * noisy_block
    forever = jnp.full_like(clean_time, FOREVER)
    return _fields(
        jnp.concatenate([clean_position, noisy_position], axis=1),
        jnp.concatenate([clean_time, noisy_time], axis=1),
        jnp.concatenate([clean_time, noisy_time], axis=1),
        jnp.concatenate([forever, noisy_time + 1], axis=1),
        jnp.concatenate([clean_valid, noisy_valid], axis=1),
    )
