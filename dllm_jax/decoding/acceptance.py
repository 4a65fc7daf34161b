"""Which of a draft's tokens a verifier keeps, and what it puts where it stops.

Specs, S2D2 section 1.5. The tokens of a span are judged from left to right and kept up to
the first that fails; that slot then gets a token of the verifier's. Two rules:

    stochastic  token t passes with probability min(1, (q(t) / p(t)) ** tempering); the
                slot that fails draws from max(q - p, 0). Where drafts are draws from p and
                tempering is 1, every slot is distributed as q.
    greedy      a token passes if it is the verifier's most probable one, which is also
                what the slot that fails gets. Nothing is random.

The published code knows the stochastic rule only, and follows it even where drafts are
the drafter's most probable tokens; what comes out is then distributed as neither.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import sampling
from dllm_jax.decoding.base import check_at_least, setting

RULES = ("stochastic", "greedy")


@struct.dataclass
class AcceptanceSettings:
    """What a verification keeps."""

    acceptance: str = setting(
        "stochastic",
        "stochastic: keep tokens with probability q / p, as published; greedy: keep them "
        "while they are the verifier's most probable (deterministic)",
        choices=RULES,
    )
    ssd_ratio_tempering_factor: float = setting(
        1.0, "stochastic: exponent of q / p", traced=True
    )
    allow_resample: bool = setting(
        True,
        "put a token of the verifier's where a draft is rejected; otherwise the draft is "
        "kept after all (logits in place) or the slot left masked (shifted), as published",
        traced=True,
    )
    ssd_ratio_threshold: float = setting(
        -1.0,
        "also keep later draft tokens whose q / p is at least this; below 0 is off",
        traced=True,
    )
    ssd_threshold_all_spans: bool = setting(
        False,
        "ssd_ratio_threshold: in all masked slots, not in the verified span alone",
        traced=True,
    )
    # Derived: what is written where allow_resample is off.
    write_rejected: bool = struct.field(pytree_node=False, default=True)


def check(settings: AcceptanceSettings) -> None:
    """Raises ValueError for numbers that make no rule; choices are checked elsewhere."""
    check_at_least(settings, ssd_ratio_tempering_factor=0.0, ssd_ratio_threshold=-1.0)


class Noise(NamedTuple):
    """Uniform numbers in [0, 1) for one round of drafting and verifying: float32."""

    draft: jax.Array  # [B, T], of each sampled draft token
    accept: jax.Array  # [B, T], of each judged token
    resample: jax.Array  # [B], of the slot that is rejected
    bonus: jax.Array  # [B], of the slot behind a draft that was kept whole


class Verdict(NamedTuple):
    """What a verification writes."""

    written: jax.Array  # [B, T] bool
    token: jax.Array  # [B, T] int32
    confidence: jax.Array  # [B, T] float32: p of a draft's token, q of the verifier's
    kept: jax.Array  # [B, T] bool, the span up to its first rejection


def pick(
    settings: AcceptanceSettings, weights: jax.Array, mask_id: int, uniform: jax.Array
) -> jax.Array:
    """The verifier's token: the heaviest, or drawn with `uniform`; never the mask.

    Args:
      settings: the rule.
      weights: float32 `[..., V]`, not negative.
      mask_id: static.
      uniform: float32 `[...]` in [0, 1).

    Returns:
      int32 `[...]`.
    """
    is_mask = jnp.arange(weights.shape[-1], dtype=jnp.int32) == mask_id
    if settings.acceptance == "greedy":
        return jnp.argmax(jnp.where(is_mask, -1.0, weights), axis=-1).astype(jnp.int32)
    return sampling.draw(jnp.where(is_mask, 0.0, weights), uniform)


def accept_prefix(agrees: jax.Array, examined: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The examined places before the first that does not agree, and that one.

    Args:
      agrees: bool `[B, T]`.
      examined: bool `[B, T]`; the others are passed over.

    Returns:
      bool `[B, T]` each.
    """
    fails = examined & ~agrees
    before = jnp.cumsum(fails.astype(jnp.int32), axis=-1)
    return examined & (before == 0), fails & (before == 1)


def judge(
    settings: AcceptanceSettings,
    mask_id: int,
    span: jax.Array,
    masked: jax.Array,
    token: jax.Array,
    confidence: jax.Array,
    verifier: jax.Array,
    drafter: Any,
    noise: Noise,
) -> Verdict:
    """Judges a batch of drafts.

    Args:
      settings: the rule.
      mask_id: static; never written.
      span: bool `[B, T]`, the run of masks that is judged; empty in rows without a draft.
      masked: bool `[B, T]`, all masks.
      token: int32 `[B, T]`, the draft.
      confidence: float32 `[B, T]`, p of each draft token.
      verifier: float32 `[B, T, V]`, q.
      drafter: int32 `[B]` slots -> float32 `[B, V]`, p there: asked for one slot a row.
      noise: what the stochastic rule draws with.
    """

    def at(values, slot):  # [B, T, ...] -> [B, ...]
        index = slot.reshape(-1, *([1] * (values.ndim - 1)))
        return jnp.take_along_axis(values, index, axis=1)[:, 0]

    quality = jnp.take_along_axis(verifier, token[..., None], axis=-1)[..., 0]
    ratio = quality / jnp.maximum(confidence, 1e-12)
    ratio = jnp.minimum(ratio**settings.ssd_ratio_tempering_factor, 1.0)
    if settings.acceptance == "greedy":
        passes = token == pick(settings, verifier, mask_id, noise.accept)
    else:
        passes = noise.accept < ratio
    kept, here = accept_prefix(passes, span)
    slot = jnp.argmax(here, axis=-1).astype(jnp.int32)
    q = at(verifier, slot)
    weights = q
    if settings.acceptance == "stochastic":
        left = sampling.residual(q, drafter(slot))
        # Nothing but the mask may be left, which is never written.
        others = jnp.sum(left, axis=-1) - left[:, mask_id] > 0.0
        weights = jnp.where(others[:, None], left, q)
    new = pick(settings, weights, mask_id, noise.resample)
    probability = jnp.take_along_axis(q, new[:, None], axis=-1)
    replaced = here & settings.allow_resample
    token = jnp.where(replaced, new[:, None], token)
    confidence = jnp.where(replaced, probability, confidence)
    written = kept | (here if settings.write_rejected else replaced)
    threshold = settings.ssd_ratio_threshold
    eligible = span | (masked & settings.ssd_threshold_all_spans)
    eligible &= jnp.any(span, axis=-1, keepdims=True) & (threshold >= 0.0)
    written |= eligible & (ratio >= threshold)
    return Verdict(written, token, confidence, kept)
