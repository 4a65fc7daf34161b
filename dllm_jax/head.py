"""The unmasking head: proposals straight from hidden states, without logits in memory.

XLA for TPU keeps the logits of a few slots on the core, and then `sampling.propose` moves
nothing but the head's weights. More of them go to memory: written once, read three times,
and at a vocabulary of 152k those of 256 slots are a quarter of the weights of a head of
2048. From there on the vocabulary comes in chunks and only running sums are kept.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax import sampling, transformer
from dllm_jax.params import Params
from dllm_jax.partition import WHOLE, Partition
from dllm_jax.quantize import slice_columns

CHUNK = 8192
"""Vocabulary entries of a chunk: the logits of 1024 slots still fit a TPU core's memory."""

MOST_LOGITS = 2**24
"""Logits, 64 MiB, up to which they are computed as a whole. Above, XLA does not keep them
on the core, by its memory reports for v5e."""


class _Sums(NamedTuple):
    """What is known of some slots' logits after a part of the vocabulary: `[B, T]` each."""

    best: jax.Array  # float32, the largest logit but the mask token's
    token: jax.Array  # int32, whose it is
    largest: jax.Array  # float32, of all logits
    total: jax.Array  # float32, sum of exp(logit - largest)
    weighted: jax.Array  # float32, sum of exp(logit - largest) * logit

    def proposal(self) -> sampling.Proposal:
        """The proposal when the whole vocabulary was seen."""
        log_normaliser = self.largest + jnp.log(self.total)
        entropy = log_normaliser - self.weighted / self.total
        return sampling.Proposal(self.token, jnp.exp(self.best - log_normaliser), entropy)


def propose_greedily(
    params: Params,
    hidden: jax.Array,
    mask_id: int,
    chunk: int = CHUNK,
    most_logits: int = MOST_LOGITS,
    vocab_size: int | None = None,
    partition: Partition = WHOLE,
) -> sampling.Proposal:
    """The same as `sampling.propose` of `transformer.logits`, up to rounding.

    Args:
      params: the weights; the head, or the embedding table in its place.
      hidden: `[B, T, D]` after the final norm, of slots that can be unmasked.
      mask_id: static; never proposed, but with its share of the probability.
      chunk: static, vocabulary entries at a time.
      most_logits: static; as many logits are computed as a whole.
      vocab_size: static, of the model; needed where a partition may divide the vocabulary.
      partition: static, as in `transformer.forward`.

    Returns:
      The proposals; ties go to the lowest index.
    """
    held = params.embed.shape[0] if params.head is None else params.head.shape[1]
    divided = vocab_size not in (None, held) and partition.tensor > 1
    slots = math.prod(hidden.shape[:-1])
    if not divided and (held <= chunk or slots * held <= most_logits):
        return sampling.propose(transformer.logits(params, hidden), mask_id)
    first = partition.index("tensor") * held if divided else 0
    sums = _sum_chunks(params, hidden, mask_id - first, min(chunk, held))
    if not divided:
        return sums.proposal()
    # Each device has seen its part of the vocabulary: a few numbers a slot are exchanged.
    sums = sums._replace(token=sums.token + first)
    parts = _Sums(*(jax.lax.all_gather(x, "tensor") for x in sums))
    largest = jnp.max(parts.largest, axis=0)
    decay = jnp.exp(parts.largest - largest)
    winner = jnp.argmax(parts.best, axis=0)[None]  # the first: tokens are in order
    return _Sums(
        best=jnp.max(parts.best, axis=0),
        token=jnp.take_along_axis(parts.token, winner, axis=0)[0],
        largest=largest,
        total=jnp.sum(decay * parts.total, axis=0),
        weighted=jnp.sum(decay * parts.weighted, axis=0),
    ).proposal()


def _sum_chunks(
    params: Params, hidden: jax.Array, mask_id: jax.Array | int, chunk: int
) -> _Sums:
    """Goes through the vocabulary that is here; `mask_id` may lie outside of it."""
    tied = params.head is None
    weights, axis = (params.embed, 0) if tied else (params.head, 1)
    size = weights.shape[axis]
    column = jnp.arange(chunk, dtype=jnp.int32)
    lowest = jnp.finfo(jnp.float32).min

    def absorb(sums: _Sums, first):
        # The last chunk begins early enough to be whole; what it repeats does not count.
        start = jnp.minimum(first, size - chunk)
        part = slice_columns(weights, start, chunk, axis)
        part = params.replace(embed=part) if tied else params.replace(head=part)
        logits = transformer.logits(part, hidden)
        index = start + column
        logits = jnp.where(index < first, -jnp.inf, logits)

        allowed = jnp.where(index == mask_id, -jnp.inf, jnp.maximum(logits, lowest))
        allowed = jnp.where(index < first, -jnp.inf, allowed)
        candidate = jnp.max(allowed, axis=-1)
        at = start + jnp.argmax(allowed, axis=-1).astype(jnp.int32)

        largest = jnp.maximum(sums.largest, jnp.max(logits, axis=-1))
        share = jnp.exp(logits - largest[..., None])
        decay = jnp.exp(sums.largest - largest)
        # xlogx: a logit of -inf has probability 0 and adds nothing.
        product = jnp.where(share > 0.0, share * logits, 0.0)
        return _Sums(
            best=jnp.maximum(candidate, sums.best),
            token=jnp.where(candidate > sums.best, at, sums.token),
            largest=largest,
            total=decay * sums.total + jnp.sum(share, axis=-1),
            weighted=decay * sums.weighted + jnp.sum(product, axis=-1),
        ), None

    zero = jnp.zeros(hidden.shape[:-1], jnp.float32)
    start = _Sums(
        best=jnp.full_like(zero, -jnp.inf),
        token=zero.astype(jnp.int32),
        largest=jnp.full_like(zero, lowest),
        total=zero,
        weighted=zero,
    )
    with jax.named_scope("unmasking_head"):
        firsts = jnp.arange(0, size, chunk, dtype=jnp.int32)
        return jax.lax.scan(absorb, start, firsts)[0]
