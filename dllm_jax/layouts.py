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


def shadowed(
    position: jax.Array,
    shadow_position: jax.Array,
    valid: jax.Array,
    shadow_valid: jax.Array,
) -> TokenFields:
    """[canvas | shadows] of WINO: copies of some slots that look at them and are not seen.

    Canvas tokens see the canvas. A shadow sees every shadow and the canvas, except for the
    slot that it stands for: it predicts that slot from all that surrounds it.

    Args:
      position: int32 `[B, T]`.
      shadow_position: int32 `[B, U]`, the slots that the shadows stand for.
      valid: bool `[B, T]`.
      shadow_valid: bool `[B, U]`.
    """
    moments = jnp.concatenate(
        [jnp.zeros_like(position), jnp.ones_like(shadow_position)], axis=1
    )
    return _fields(
        jnp.concatenate([position, shadow_position], axis=1),
        moments,
        moments,
        FOREVER,
        jnp.concatenate([valid, shadow_valid], axis=1),
    )


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
