"""The unmasking head: proposals straight from hidden states, without logits in memory.

XLA for TPU keeps the logits of a few slots on the core, and then `sampling.propose` moves
nothing but the head's weights. More of them go to memory: written once, read three times,
and at a vocabulary of 152k those of 256 slots are a quarter of the weights of a head of
2048. From there on the vocabulary comes in chunks and only running sums are kept.
"""

import math

import jax
import jax.numpy as jnp

from dllm_jax import sampling, transformer
from dllm_jax.params import Params

CHUNK = 8192
"""Vocabulary entries of a chunk: the logits of 1024 slots still fit a TPU core's memory."""

MOST_LOGITS = 2**24
"""Logits, 64 MiB, up to which they are computed as a whole. Above, XLA does not keep them
on the core, by its memory reports for v5e."""


def propose_greedily(
    params: Params,
    hidden: jax.Array,
    mask_id: int,
    chunk: int = CHUNK,
    most_logits: int = MOST_LOGITS,
) -> sampling.Proposal:
    """The same as `sampling.propose` of `transformer.logits`, up to rounding.

    Args:
      params: the weights; the head, or the embedding table in its place.
      hidden: `[B, T, D]` after the final norm, of slots that can be unmasked.
      mask_id: static; never proposed, but with its share of the probability.
      chunk: static, vocabulary entries at a time.
      most_logits: static; as many logits are computed as a whole.

    Returns:
      The proposals; ties go to the lowest index.
    """
    tied = params.head is None
    weights = params.embed if tied else params.head
    axis = 0 if tied else 1
    vocab_size = weights.shape[axis]
    slots = math.prod(hidden.shape[:-1])
    if vocab_size <= chunk or slots * vocab_size <= most_logits:
        return sampling.propose(transformer.logits(params, hidden), mask_id)
    column = jnp.arange(chunk, dtype=jnp.int32)
    lowest = jnp.finfo(jnp.float32).min

    def absorb(carry, first):
        best, token, largest, total, weighted = carry
        # The last chunk begins early enough to be whole; what it repeats does not count.
        start = jnp.minimum(first, vocab_size - chunk)
        part = jax.lax.dynamic_slice_in_dim(weights, start, chunk, axis)
        part = params.replace(embed=part) if tied else params.replace(head=part)
        logits = transformer.logits(part, hidden)
        index = start + column
        logits = jnp.where(index < first, -jnp.inf, logits)

        allowed = jnp.where(index == mask_id, -jnp.inf, jnp.maximum(logits, lowest))
        allowed = jnp.where(index < first, -jnp.inf, allowed)
        candidate = jnp.max(allowed, axis=-1)
        at = start + jnp.argmax(allowed, axis=-1).astype(jnp.int32)
        token = jnp.where(candidate > best, at, token)

        new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
        share = jnp.exp(logits - new_largest[..., None])
        decay = jnp.exp(largest - new_largest)
        # xlogx: a logit of -inf has probability 0 and adds nothing.
        product = jnp.where(share > 0.0, share * logits, 0.0)
        total = decay * total + jnp.sum(share, axis=-1)
        weighted = decay * weighted + jnp.sum(product, axis=-1)
        best = jnp.maximum(candidate, best)
        return (best, token, new_largest, total, weighted), None

    zero = jnp.zeros(hidden.shape[:-1], jnp.float32)
    start = (
        jnp.full_like(zero, -jnp.inf),
        zero.astype(jnp.int32),
        jnp.full_like(zero, lowest),
        zero,
        zero,
    )
    with jax.named_scope("unmasking_head"):
        firsts = jnp.arange(0, vocab_size, chunk, dtype=jnp.int32)
        (best, token, largest, total, weighted), _ = jax.lax.scan(absorb, start, firsts)
        log_normaliser = largest + jnp.log(total)
    entropy = log_normaliser - weighted / total
    return sampling.Proposal(token, jnp.exp(best - log_normaliser), entropy)
