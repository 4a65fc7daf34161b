"""Whether a draft is worth a verifying forward: the routing policies of S2D2.

Specs, S2D2 section 1.7. A policy looks at a draft before it is judged. From the drafter's
distributions each slot of the span gets a guess of how probably the verifier will accept
it, and their running products add up to the number of tokens that a verification can be
expected to give. The names and defaults of the settings are those of the published
function (the published scripts default to do_verify_score_threshold 0,
ssd_confidence_power 0.8 and ssd_entropy_threshold 0.1).

Each row routes for itself and remembers for itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.decoding.base import check_at_least, setting

POLICIES = (
    "mask_span_length",
    "score_threshold",
    "score_hysteresis",
    "contextual_bandit_ucb",
)
ESTIMATORS = (
    "hard_margin_threshold",
    "soft_entropy_negexp",
    "hard_entropy_threshold",
    "soft_confidence_power",
    "soft_clipped_linear_margin",
    "soft_renyi_2_entropy",
)
SCORES = ("difference_dynamic", "difference_static")
SOURCES = ("span", "masked")


@struct.dataclass
class RoutingSettings:
    """When to verify a draft."""

    do_verify_policy: str = setting(
        "mask_span_length", "which drafts are verified", choices=POLICIES
    )
    min_ssd_span_length: int = setting(
        1, "mask_span_length: verify spans of at least so many slots", traced=True
    )
    legacy_ssd_span_strategy: bool = setting(
        False,
        "mask_span_length: also verify a shorter span where fewer slots are confident",
        traced=True,
    )
    do_verify_score_threshold: float = setting(
        -1.0, "score_threshold: verify from this score on (>=)", traced=True
    )
    hysteresis_threshold_on: float = setting(
        0.0, "score_hysteresis: score above which (>) verifying begins", traced=True
    )
    hysteresis_threshold_off: float = setting(
        -1.0, "score_hysteresis: score below which (<) it ends", traced=True
    )
    do_verify_score_type: str = setting(
        "difference_dynamic",
        "score: tokens expected of a verification, less a price that is fixed (static) or "
        "grows with the slots that the threshold would unmask (dynamic)",
        choices=SCORES,
    )
    score_penalty_coef: float = setting(2.0, "that price", traced=True)
    token_acceptance_estimator: str = setting(
        "hard_margin_threshold",
        "how the drafter's distribution gives a slot's chance of acceptance",
        choices=ESTIMATORS,
    )
    ssd_confidence_margin_threshold: float = setting(
        0.05, "hard_margin_threshold: least margin of the best token (>)", traced=True
    )
    ssd_entropy_temperature: float = setting(
        1.0, "soft_entropy_negexp: factor of the entropy", traced=True
    )
    ssd_entropy_threshold: float = setting(
        0.5, "hard_entropy_threshold: entropy below which (<) it is accepted", traced=True
    )
    ssd_confidence_power: float = setting(
        1.0, "soft_confidence_power: exponent of the confidence", traced=True
    )
    ssd_confidence_margin_coef: float = setting(
        1.0, "soft_clipped_linear_margin: factor of the margin", traced=True
    )
    ucb_beta: float = setting(
        1.0, "contextual_bandit_ucb: weight of exploration", traced=True
    )
    ucb_span_length_bins: int = setting(2, "contextual_bandit_ucb: bins of span lengths")
    ucb_block_progress_bins: int = setting(2, "contextual_bandit_ucb: bins of progress")
    ucb_entropy_bins: int = setting(2, "contextual_bandit_ucb: bins of mean entropies")
    ucb_entropy_source: str = setting(
        "span", "contextual_bandit_ucb: slots whose entropy counts", choices=SOURCES
    )


def check(settings: RoutingSettings) -> None:
    """Raises ValueError for numbers that make no policy; choices are checked elsewhere."""
    anything = -float(2**31)
    check_at_least(
        settings,
        min_ssd_span_length=0,
        do_verify_score_threshold=anything,
        hysteresis_threshold_on=anything,
        hysteresis_threshold_off=anything,
        score_penalty_coef=anything,
        ssd_confidence_margin_threshold=anything,
        ssd_entropy_temperature=0.0,
        ssd_entropy_threshold=0.0,
        ssd_confidence_power=0.0,
        ssd_confidence_margin_coef=0.0,
        ucb_beta=0.0,
        ucb_span_length_bins=1,
        ucb_block_progress_bins=1,
        ucb_entropy_bins=1,
    )
    on, off = settings.hysteresis_threshold_on, settings.hysteresis_threshold_off
    if settings.do_verify_policy == "score_hysteresis" and not on > off:
        raise ValueError(
            f"hysteresis_threshold_on={on} must be above hysteresis_threshold_off={off}."
        )


@struct.dataclass
class Router:
    """What a row remembers between its decisions. N is the number of buckets."""

    verifying: Any  # [B] bool, the last decision (hysteresis)
    decisions: Any  # [B] int32, how many there were
    bucket: Any  # [B] int32, of the last decision
    count: Any  # [B, N, 2] float32, rewards of each arm: 0 skip, 1 verify
    reward: Any  # [B, N, 2] float32, their sum


class Draft(NamedTuple):
    """What a policy may look at, of the segment that a row denoises."""

    span: jax.Array  # [B, T] bool, its first run of masks
    masked: jax.Array  # [B, T] bool
    confidence: jax.Array  # [B, T] float32, of each draft token
    probability: jax.Array  # [B, T, V] float32, the drafter's distribution
    confident: jax.Array  # [B] int32, masked slots above the threshold
    progress: jax.Array  # [B] int32, decided slots


def new_router(settings: RoutingSettings, batch: int) -> Router:
    """A router that has decided nothing yet and would not verify."""
    buckets = 1
    if settings.do_verify_policy == "contextual_bandit_ucb":
        buckets = settings.ucb_span_length_bins * settings.ucb_block_progress_bins
        buckets *= settings.ucb_entropy_bins
    return Router(
        verifying=jnp.zeros((batch,), bool),
        decisions=jnp.zeros((batch,), jnp.int32),
        bucket=jnp.zeros((batch,), jnp.int32),
        count=jnp.zeros((batch, buckets, 2), jnp.float32),
        reward=jnp.zeros((batch, buckets, 2), jnp.float32),
    )


def first_run(masked: jax.Array) -> jax.Array:
    """The first run of True in each row: bool `[B, T]`."""
    begun = jnp.cumsum(masked.astype(jnp.int32), axis=-1) > 0
    ended = jnp.cumsum((begun & ~masked).astype(jnp.int32), axis=-1) > 0
    return masked & ~ended


def _entropy(probability: jax.Array) -> jax.Array:
    """Of each distribution, as a share of that of the uniform one: float32 `[B, T]`."""
    log = jnp.log(jnp.maximum(probability, 1e-12))
    size = jnp.float32(probability.shape[-1])
    return -jnp.sum(probability * log, axis=-1) / jnp.log(size)


def estimate(settings: RoutingSettings, draft: Draft) -> jax.Array:
    """How probably each draft token would be accepted: float32 `[B, T]` in [0, 1]."""
    name, p = settings.token_acceptance_estimator, draft.probability
    if name == "soft_entropy_negexp":
        chance = jnp.exp(-settings.ssd_entropy_temperature * _entropy(p))
    elif name == "hard_entropy_threshold":
        chance = (_entropy(p) < settings.ssd_entropy_threshold).astype(jnp.float32)
    elif name == "soft_confidence_power":
        chance = jnp.clip(draft.confidence, 0.0, 1.0) ** settings.ssd_confidence_power
    elif name == "soft_renyi_2_entropy":
        chance = jnp.sum(p * p, axis=-1)
    else:
        best = jax.lax.top_k(p, 2)[0]
        margin = best[..., 0] - best[..., 1]
        if name == "hard_margin_threshold":
            threshold = settings.ssd_confidence_margin_threshold
            chance = (margin > threshold).astype(jnp.float32)
        else:
            chance = settings.ssd_confidence_margin_coef * margin
    return jnp.clip(chance, 0.0, 1.0)


def score(settings: RoutingSettings, draft: Draft) -> jax.Array:
    """Expected accepted tokens less their price: float32 `[B]`, -inf for an empty span."""
    chance = jnp.where(draft.span, estimate(settings, draft), 1.0)
    up_to = jnp.cumprod(chance, axis=-1)
    expected = jnp.sum(jnp.where(draft.span, up_to, 0.0), axis=-1)
    price = settings.score_penalty_coef
    if settings.do_verify_score_type == "difference_dynamic":
        price = price * draft.confident.astype(jnp.float32)
    return jnp.where(jnp.any(draft.span, axis=-1), expected - price, -jnp.inf)


def _bucket(settings: RoutingSettings, draft: Draft) -> jax.Array:
    """Which situation of the bandit a draft is in: int32 `[B]`."""
    slots = draft.span.shape[-1]
    length = jnp.sum(draft.span, axis=-1, dtype=jnp.int32)

    def whole_bin(value, most, bins):  # of value in [0, most], in exact integers
        if bins == 1 or most == 0:
            return jnp.zeros_like(value)
        return jnp.minimum(jnp.clip(value, 0, most) * bins // most, bins - 1)

    counted = draft.span if settings.ucb_entropy_source == "span" else draft.masked
    share = jnp.where(counted, _entropy(draft.probability), 0.0)
    number = jnp.sum(counted, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    mean = jnp.sum(share, axis=-1) / jnp.maximum(number, 1.0)
    bins = settings.ucb_entropy_bins
    mean_bin = jnp.floor(jnp.clip(mean, 0.0, 1.0) * bins).astype(jnp.int32)
    of_length = whole_bin(length - 1, slots - 1, settings.ucb_span_length_bins)
    of_progress = whole_bin(draft.progress, slots, settings.ucb_block_progress_bins)
    bucket = of_length * settings.ucb_block_progress_bins + of_progress
    return bucket * bins + jnp.minimum(mean_bin, bins - 1)


def _at(table: jax.Array, bucket: jax.Array) -> jax.Array:
    """The arms of each row's bucket: `[B, 2]` of `[B, N, 2]`."""
    return jnp.take_along_axis(table, bucket[:, None, None], axis=1)[:, 0]


def decide(
    settings: RoutingSettings, router: Router, draft: Draft, rows: jax.Array
) -> tuple[jax.Array, Router]:
    """Whether each row verifies its draft, bool `[B]`; an empty span is never verified.

    Args:
      settings: resolved.
      router: what the rows remember.
      draft: what they have drafted.
      rows: bool `[B]`, which rows decide; the others verify nothing and keep their memory.
    """
    policy = settings.do_verify_policy
    length = jnp.sum(draft.span, axis=-1, dtype=jnp.int32)
    not_empty = rows & (length > 0)
    if policy == "mask_span_length":
        remaining = jnp.sum(draft.masked, axis=-1, dtype=jnp.int32)
        few = draft.confident < jnp.minimum(settings.min_ssd_span_length, remaining)
        verify = length >= settings.min_ssd_span_length
        verify |= few & settings.legacy_ssd_span_strategy
        return verify & not_empty, router
    if policy == "score_threshold":
        verify = score(settings, draft) >= settings.do_verify_score_threshold
        return verify & not_empty, router
    if policy == "score_hysteresis":
        value = score(settings, draft)
        stays = router.verifying & ~(value < settings.hysteresis_threshold_off)
        verify = stays | (~router.verifying & (value > settings.hysteresis_threshold_on))
        router = router.replace(verifying=jnp.where(rows, verify, router.verifying))
        return verify & not_empty, router
    bucket = jnp.where(not_empty, _bucket(settings, draft), router.bucket)
    decisions = router.decisions + not_empty.astype(jnp.int32)
    count, reward = _at(router.count, bucket), _at(router.reward, bucket)
    log = jnp.log(jnp.maximum(decisions, 1).astype(jnp.float32))[:, None]
    tried = jnp.maximum(count, 1.0)
    bound = reward / tried + settings.ucb_beta * jnp.sqrt(log / tried)
    bound = jnp.where(count > 0.0, bound, jnp.inf)
    verify = bound[:, 1] >= bound[:, 0]
    router = router.replace(decisions=decisions, bucket=bucket)
    return verify & not_empty, router


def learn(
    settings: RoutingSettings,
    router: Router,
    verified: jax.Array,
    unmasked: jax.Array,
    rows: jax.Array,
) -> Router:
    """What a round gave for its forwards goes to the arm that was pulled.

    Args:
      settings: resolved.
      router: with the round's bucket.
      verified: bool `[B]`, two forwards instead of one.
      unmasked: int32 `[B]`, slots that the round unmasked.
      rows: bool `[B]`, whose round has ended.
    """
    if settings.do_verify_policy != "contextual_bandit_ucb":
        return router
    gain = unmasked.astype(jnp.float32) / jnp.where(verified, 2.0, 1.0)
    buckets = jnp.arange(router.count.shape[1], dtype=jnp.int32)
    pulled = (buckets == router.bucket[:, None]) & rows[:, None]
    arm = jnp.stack([~verified, verified], axis=-1)[:, None]
    pulled = (pulled[..., None] & arm).astype(jnp.float32)
    return router.replace(
        count=router.count + pulled,
        reward=router.reward + pulled * gain[:, None, None],
    )
