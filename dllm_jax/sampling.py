"""Proposals: which token a masked slot would take, and how sure the model is of it.

Everything here is float32, and ties go to the lowest index.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Proposal(NamedTuple):
    """What the model proposes for each slot."""

    token: jax.Array  # int32 [B, T]
    confidence: jax.Array  # float32 [B, T] probability of `token`
    entropy: jax.Array  # float32 [B, T] of the whole distribution, nats


class SamplingKnobs(NamedTuple):
    """Traced sampling values, so that a sweep does not recompile."""

    temperature: jax.Array  # float32 scalar, > 0 where anything is sampled
    top_k: jax.Array  # int32 scalar, 0 = off
    top_p: jax.Array  # float32 scalar, 1 = off


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets to -inf what top-k, then top-p, exclude (the order of the published scripts).

    Args:
      logits: `[..., V]`, already divided by the temperature.
      top_k: int32 scalar; logits tied with the k-th are kept; 0 keeps all.
      top_p: float32 scalar; a token is kept while the probability of those before it is
        at most `top_p`, so the most probable one always is. Ties are in order of index.
    """
    vocab_size = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    kth = jnp.take(ordered, count - 1, axis=-1)[..., None]
    ordered = jnp.where(ordered < kth, -jnp.inf, ordered)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = (before <= top_p) | (top_p >= 1.0)
    ordered = jnp.where(kept, ordered, -jnp.inf)
    return jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), axis=-1)


def divide_by_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """`logits / temperature` up to a constant that softmax does not see.

    Shifted first: however small the temperature is, the largest stay finite.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - best) / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)


def propose(
    logits: jax.Array,
    mask_id: int,
    rng_keys: jax.Array | None = None,
    knobs: SamplingKnobs | None = None,
    filtered: bool = False,
) -> Proposal:
    """Proposes a token for every slot; never the mask token.

    Greedy without keys, sampled with them. The confidence is the token's probability
    under softmax(logits / temperature) before top-k and top-p: after them `top_k=1` would
    make every token certain. The mask token cannot be proposed, but keeps its share of
    the probability, as in the published code.

    Args:
      logits: float32 `[B, T, V]`.
      mask_id: static.
      rng_keys: None, or keys `[B]`, one a row and consumed; row i depends on key i alone.
      knobs: temperature, top-k and top-p; needed with keys.
      filtered: static; whether top-k or top-p is on (they cost a sort of the vocabulary).

    Returns:
      The proposals.
    """
    chex.assert_type(logits, jnp.float32)
    sampled = rng_keys is not None
    if sampled:
        logits = divide_by_temperature(logits, knobs.temperature)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    is_mask = jnp.arange(logits.shape[-1], dtype=jnp.int32) == mask_id
    # Whatever the other logits are, even -inf, the mask token ranks below them.
    finite = jnp.maximum(logits, jnp.finfo(logits.dtype).min)
    allowed = jnp.where(is_mask, -jnp.inf, finite)
    if sampled:
        choice = filter_logits(allowed, knobs.top_k, knobs.top_p) if filtered else allowed
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(
            rng_keys
        )
        token = jnp.argmax(choice + noise, axis=-1).astype(jnp.int32)
    else:
        token = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    log_probability = logits - log_normaliser[..., None]
    # xlogx: a logit of -inf has probability 0 and adds nothing.
    share = jnp.exp(log_probability)
    entropy = -jnp.sum(jnp.where(share > 0.0, share * log_probability, 0.0), axis=-1)
    return Proposal(token, jnp.exp(chosen - log_normaliser), entropy)


def top_tokens(logits: jax.Array, mask_id: int, count: int) -> tuple[jax.Array, jax.Array]:
    """The most probable tokens of every slot but the mask token, best first.

    One pass over the vocabulary a token: a sort of it would cost more than a few.

    Args:
      logits: float32 `[B, T, V]`.
      mask_id: static; it keeps its share of the probability.
      count: static, how many; a few.

    Returns:
      Tokens int32 and probabilities float32, `[B, T, count]` each.
    """
    chex.assert_type(logits, jnp.float32)
    column = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    share = jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    share = jnp.where(column == mask_id, -1.0, share)
    tokens, shares = [], []
    for _ in range(count):
        token = jnp.argmax(share, axis=-1).astype(jnp.int32)
        tokens.append(token)
        shares.append(jnp.max(share, axis=-1))
        share = jnp.where(column == token[..., None], -1.0, share)
    return jnp.stack(tokens, axis=-1), jnp.maximum(jnp.stack(shares, axis=-1), 0.0)


def margin(logits: jax.Array, mask_id: int) -> jax.Array:
    """Lead of the most probable token over the second: float32 `[B, T]`."""
    _, probability = top_tokens(logits, mask_id, 2)
    return probability[..., 0] - probability[..., 1]


def distribution(
    logits: jax.Array,
    knobs: SamplingKnobs,
    tempered: bool = False,
    filtered: bool = False,
) -> jax.Array:
    """The probabilities that drafts are judged with: float32 `[..., V]`.

    Args:
      logits: float32 `[..., V]`.
      knobs: temperature, top-k and top-p.
      tempered: static; whether to divide by the temperature, which then is above 0.
      filtered: static; whether top-k or top-p is on.
    """
    chex.assert_type(logits, jnp.float32)
    if tempered:
        logits = divide_by_temperature(logits, knobs.temperature)
    if filtered:
        logits = filter_logits(logits, knobs.top_k, knobs.top_p)
    return jax.nn.softmax(logits, axis=-1)


def residual(verifier: jax.Array, drafter: jax.Array) -> jax.Array:
    """What to draw a rejected token from: max(q - p, 0), or q where nothing is left.

    Not normalised. A token drawn from p, kept with probability min(1, q / p) and else
    replaced by a draw from here is distributed as q (speculative sampling).

    Args:
      verifier: q, float32 `[..., V]`.
      drafter: p, float32 `[..., V]`.
    """
    left = jnp.maximum(verifier - drafter, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where((mass > 0.0) & jnp.isfinite(mass), left, verifier)


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """One token by inverse distribution function: the first whose share of it exceeds u.

    Args:
      weights: float32 `[..., V]`, not negative and not all 0; need not sum to 1.
      uniform: float32 `[...]` in [0, 1).

    Returns:
      int32 `[...]`.
    """
    up_to = jnp.cumsum(weights, axis=-1)
    total = up_to[..., -1:]
    # Rounding must not push the draw past the last token that has weight.
    target = jnp.minimum(uniform[..., None] * total, jnp.nextafter(total, 0.0 * total))
    return jnp.argmax(up_to > target, axis=-1).astype(jnp.int32)
