"""Denoising losses: block diffusion on paired rows, and masked diffusion.

Both noise only a window of the row, so that a prompt stays as it is at decoding time.
"""

import jax
import jax.numpy as jnp
import optax

from dllm_jax import layouts, transformer
from dllm_jax.config import ModelConfig
from dllm_jax.params import Params


def mask_blocks(
    rng_key: jax.Array,
    position: jax.Array,
    block_length: jax.Array,
    eligible: jax.Array,
) -> jax.Array:
    """Chooses masks block by block: in each block a uniform share of its tokens.

    The key is consumed. A block with anything eligible has at least one mask, so a block
    of length 1 is always masked and the loss is then that of autoregression in place.

    Args:
      rng_key: a key.
      position: int32 `[B, U]`, consecutive in each row.
      block_length: int32 `[B]`.
      eligible: bool `[B, U]`, tokens that may be masked.

    Returns:
      bool `[B, U]`.
    """
    share_key, token_key = jax.random.split(rng_key)
    block = position // block_length[:, None]
    first = block[:, :1]
    # One share a block: drawn for every slot, read at the slot of the block's number.
    shares = jax.random.uniform(share_key, position.shape)
    share = jnp.take_along_axis(shares, block - first, axis=1)
    draw = jnp.where(eligible, jax.random.uniform(token_key, position.shape), 2.0)
    same_block = block[:, :, None] == block[:, None, :]
    lowest = jnp.min(jnp.where(same_block, draw[:, None, :], 2.0), axis=-1)
    return eligible & ((draw < share) | (draw == lowest))


def _weighted_nll(logit, target, weight):
    nll = optax.softmax_cross_entropy_with_integer_labels(logit, target)
    return jnp.sum(nll * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def block_diffusion_loss(
    params: Params,
    config: ModelConfig,
    batch: dict[str, jax.Array],
    rng_key: jax.Array,
    window: int,
) -> jax.Array:
    """Cross-entropy of masked tokens given earlier clean blocks and their own block.

    One forward over [clean row | noisy window] under `layouts.training_pairs`. The key is
    consumed.

    Args:
      params: float32 parameters.
      config: the model.
      batch: `tokens` int32 `[B, T]`, `start` int32 `[B]` (prompt length), `weight`
        float32 `[B, T]` (0 outside the answer), `block_length` int32 `[B]`.
      rng_key: a key.
      window: how many positions to noise, from the block in which the answer starts. The
        last block may be cut, and what lies beyond the window is not noised.

    Returns:
      Mean over masked tokens, nats.
    """
    tokens, block_length = batch["tokens"], batch["block_length"]
    num_rows, length = tokens.shape
    clean_position = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32), (num_rows, length)
    )
    begin = batch["start"] // block_length * block_length
    position = begin[:, None] + jnp.arange(window, dtype=jnp.int32)
    inside = position < length
    index = jnp.minimum(position, length - 1)
    target = jnp.take_along_axis(tokens, index, axis=1)
    eligible = inside & (position >= batch["start"][:, None])
    masked = mask_blocks(rng_key, position, block_length, eligible)
    noisy = jnp.where(masked, config.mask_id, target)
    fields = layouts.training_pairs(
        clean_position, position, block_length, clean_position >= 0, inside
    )
    hidden = transformer.forward(
        params, config, jnp.concatenate([tokens, noisy], axis=1), fields
    ).hidden
    logit = transformer.logits(params, hidden[:, length:])
    weight = jnp.take_along_axis(batch["weight"], index, axis=1)
    return _weighted_nll(logit, target, jnp.where(masked, weight, 0.0))


def masked_diffusion_loss(
    params: Params,
    config: ModelConfig,
    batch: dict[str, jax.Array],
    rng_key: jax.Array,
) -> jax.Array:
    """Cross-entropy of masked answer tokens given the rest of the row, bidirectionally.

    The key is consumed. Arguments as `block_diffusion_loss`. What is behind a revealed
    prefix is one block; half of the rows have no such prefix, the others have one of
    random length, which is what decoding block by block meets.
    """
    tokens = batch["tokens"]
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    whole = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    prefix_key, mask_key = jax.random.split(rng_key)
    share = jnp.maximum(2 * jax.random.uniform(prefix_key, whole.shape) - 1, 0)
    answer_length = jnp.sum(batch["weight"] >= 1, axis=1)
    prefix = batch["start"] + (share * answer_length).astype(jnp.int32)
    eligible = position >= prefix[:, None]
    masked = mask_blocks(mask_key, position, whole, eligible)
    noisy = jnp.where(masked, config.mask_id, tokens)
    fields = layouts.bidirectional(position)
    hidden = transformer.forward(params, config, noisy, fields).hidden
    logit = transformer.logits(params, hidden)
    return _weighted_nll(logit, tokens, jnp.where(masked, batch["weight"], 0.0))
