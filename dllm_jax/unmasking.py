"""Rules that choose which masked slots to unmask in a denoising step.

Pure functions of a block's masks and scores, row by row. Each rule unmasks at least one
slot of a row that has a mask, never a slot that is not masked, and breaks ties in favour
of the leftmost slot.
"""

import jax
import jax.numpy as jnp
import numpy as np


def linear_quota(step: jax.Array, block_length: int, denoising_steps: jax.Array):
    """How many slots step number `step` unmasks: the block spread evenly over the steps.

    The first `block_length % denoising_steps` steps get one more. At least 1, so that a
    block whose steps are used up still ends.

    Args:
      step: int32 `[B]`, denoising steps done in the block.
      block_length: static, or int32 `[B]`.
      denoising_steps: int32 scalar, >= 1.
    """
    base, extra = block_length // denoising_steps, block_length % denoising_steps
    return jnp.maximum(base + (step < extra).astype(jnp.int32), 1)


def reveal_schedule(steps: int, eps: float) -> np.ndarray:
    """Share of the masks that each step reveals: float32 `[steps]`, the last one 1.

    Time runs evenly from 1 to `eps`; a step from t to s reveals 1 - s / t of what is
    left. Every operation is rounded to float32, as published: the shares are made to be
    truncated, so one rounding more or less is one token more or less (specs, Dream 4.6).
    Computed on the host, because accelerators divide less exactly.
    """
    one, end = np.float32(1.0), np.float32(eps)
    stride = (end - one) / np.float32(steps)
    index = np.arange(steps + 1)
    up = one + stride * index.astype(np.float32)
    down = end - stride * (steps - index).astype(np.float32)
    time = np.where(index < (steps + 1) // 2, up, down)
    reveal = one - time[1:] / time[:-1]
    reveal[-1] = one
    return reveal


def scheduled_counts(remaining: jax.Array, reveal: jax.Array) -> jax.Array:
    """How many of the masks that are left each step would reveal: int32 `[B, S]`.

    Args:
      remaining: int32 `[B]`, masks.
      reveal: float32 `[S]`, from `reveal_schedule`.
    """
    share = remaining[:, None].astype(jnp.float32) * reveal
    return jnp.floor(share).astype(jnp.int32)


def next_useful(
    step: jax.Array, counts: jax.Array, skip: bool
) -> tuple[jax.Array, jax.Array]:
    """The step to take, and its count: int32 `[B]` each.

    Args:
      step: int32 `[B]`, steps done.
      counts: int32 `[B, S]`, how many slots each step would unmask.
      skip: static, whether to leave out steps that would unmask nothing.
    """
    if skip:
        ahead = jnp.arange(counts.shape[-1]) >= step[:, None]
        step = jnp.argmax(ahead & (counts > 0), axis=-1).astype(jnp.int32)
    last = jnp.minimum(step, counts.shape[-1] - 1)
    return step, jnp.take_along_axis(counts, last[:, None], axis=-1)[:, 0]


def top_count(score: jax.Array, masked: jax.Array, count: jax.Array) -> jax.Array:
    """The `count` best masked slots: bool `[B, T]`.

    Args:
      score: float32 `[B, T]`.
      masked: bool `[B, T]`, the candidates.
      count: int32 `[B]`; more than there are masks selects all of them.
    """
    return masked & (rank(score, masked) < count[:, None])


def rank(score: jax.Array, masked: jax.Array, rivals: jax.Array | None = None) -> jax.Array:
    """How many masked slots come before each slot: int32 `[B, T]`.

    Counted pair by pair: a block is short, and sorts are slow to compile and to run.
    `rivals` bool `[B, T, T]` says which slots count for which; all if None.
    """
    slot = jnp.arange(score.shape[-1])
    this, other = score[:, :, None], score[:, None, :]
    before = (other > this) | ((other == this) & (slot[None, :] < slot[:, None]))
    if rivals is not None:
        before &= rivals
    return jnp.sum(before & masked[:, None, :], axis=-1, dtype=jnp.int32)


def leftmost(masked: jax.Array, count: jax.Array) -> jax.Array:
    """The `count` leftmost masked slots."""
    place = jnp.cumsum(masked.astype(jnp.int32), axis=-1) - 1
    return masked & (place < count[:, None])


def above_threshold(
    confidence: jax.Array,
    masked: jax.Array,
    threshold: jax.Array,
    otherwise: jax.Array,
    at_least: jax.Array,
) -> jax.Array:
    """Masked slots with confidence > threshold; `otherwise` where they are too few.

    Args:
      confidence: float32 `[B, T]`.
      masked: bool `[B, T]`.
      threshold: float32 scalar, compared strictly, as SDAR does.
      otherwise: bool `[B, T]`, the choice of rows with fewer than `at_least` such slots.
      at_least: int32 `[B]`.
    """
    high = masked & (confidence > threshold)
    enough = jnp.sum(high, axis=-1, dtype=jnp.int32) >= at_least
    return jnp.where(enough[:, None], high, otherwise)


def best_and(
    passing: jax.Array,
    score: jax.Array,
    masked: jax.Array,
    needed: jax.Array | bool = True,
) -> jax.Array:
    """The masked slots that pass a test, and the best one whether it passes or not.

    The rule of Fast-dLLM's threshold and of dParallel's entropy threshold.

    Args:
      passing: bool `[B, T]`.
      score: float32 `[B, T]`, higher is better.
      masked: bool `[B, T]`.
      needed: bool `[B, 1]`, False for rows that may choose nothing.
    """
    return masked & (passing | ((rank(score, masked) == 0) & needed))


def best_of_runs(score: jax.Array, masked: jax.Array) -> jax.Array:
    """The best slot of every run of masked slots without a gap.

    Args:
      score: float32 `[B, T]`.
      masked: bool `[B, T]`.
    """
    run = jnp.cumsum(~masked, axis=-1)
    same = run[:, :, None] == run[:, None, :]
    return masked & (rank(score, masked, same) == 0)


def confident_together(
    confidence: jax.Array,
    masked: jax.Array,
    factor: jax.Array,
    spare_last: bool = False,
) -> jax.Array:
    """The most masked slots that are confident enough to be unmasked together.

    The n-th best confidence must be at least 1 - factor / (n + 1); the slots before the
    first that is not are chosen, the best one always. At factor 1 unmasking them together
    or one by one is the same to their joint distribution (Fast-dLLM, theorem 1).

    Args:
      confidence: float32 `[B, T]`.
      masked: bool `[B, T]`.
      factor: float32 scalar, >= 0.
      spare_last: static; never fail the last candidate, as the published script does by
        its arithmetic (specs, LLaDA 5).
    """
    place = rank(confidence, masked)
    bound = 1.0 - factor / (place.astype(jnp.float32) + 2.0)
    fails = masked & (confidence < bound) & (place > 0)
    if spare_last:
        fails &= place + 1 < jnp.sum(masked, axis=-1, keepdims=True, dtype=jnp.int32)
    first = jnp.where(fails, place, place.shape[-1])
    return masked & (place < jnp.min(first, axis=-1, keepdims=True))


def entropy_bounded(entropy: jax.Array, masked: jax.Array, bound: jax.Array) -> jax.Array:
    """The masked slots of lowest entropy whose entropies add up to less than `bound`.

    At least one. JetEngine's form of the EB-Sampler's rule (specs, SDAR 1.1), which
    itself is `jointly_certain`.

    Args:
      entropy: float32 `[B, T]`, nats.
      masked: bool `[B, T]`.
      bound: float32 scalar, nats.
    """
    place, before = _entropy_before(entropy, masked)
    return masked & ((before + entropy < bound) | (place == 0))


def jointly_certain(entropy: jax.Array, masked: jax.Array, bound: jax.Array) -> jax.Array:
    """The most masked slots whose entropies without the largest sum to at most `bound`.

    That sum bounds what the joint distribution loses when slots are drawn one by one; of
    a single slot it is 0, so one is always chosen, and at 0 only slots that are certain
    join it. The rule of the EB-Sampler (arXiv 2505.24857; specs, LEAP and KLASS 5.3).

    Args:
      entropy: float32 `[B, T]`, nats.
      masked: bool `[B, T]`.
      bound: float32 scalar, nats.
    """
    place, before = _entropy_before(entropy, masked)
    return masked & ((before <= bound) | (place == 0))


def _entropy_before(entropy, masked) -> tuple[jax.Array, jax.Array]:
    """Each slot's place by entropy, and the sum of the entropies before it."""
    place = rank(-entropy, masked)
    before = (place[:, None, :] < place[:, :, None]) & masked[:, None, :]
    return place, jnp.sum(jnp.where(before, entropy[:, None, :], 0.0), axis=-1)


def entropy_bounded_script(
    confidence: jax.Array, masked: jax.Array, bound: jax.Array
) -> jax.Array:
    """The rule that SDAR's script runs under the name entropy_bounded.

    One number for the block, -sum p log p over the confidences of all its slots, stands
    for the entropy of every slot; the leftmost slots are taken while its multiples stay
    below the bound. Kept to reproduce published traces (specs, SDAR 1.1); the sane rule
    is `entropy_bounded`.

    Args:
      confidence: float32 `[B, T]`, of decided slots too.
      masked: bool `[B, T]`.
      bound: float32 scalar, nats.
    """
    p = confidence
    terms = jnp.where(p > 0.0, p * jnp.log(jnp.maximum(p, 1e-30)), 0.0)
    total = -jnp.sum(terms, axis=-1, keepdims=True)
    multiples = total * jnp.arange(1, p.shape[-1] + 1, dtype=jnp.float32)
    in_reach = jnp.arange(p.shape[-1]) < jnp.sum(masked, axis=-1, keepdims=True)
    count = jnp.sum((multiples < bound) & in_reach, axis=-1, dtype=jnp.int32)
    return leftmost(masked, jnp.maximum(count, 1))
