"""Paired verification of a draft: a mask copy a drafted slot, one target forward (SimSD).

Specs, SimSD 2 and 5.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax import layouts, sampling
from dllm_jax.cache import KVCache
from dllm_jax.decoding import canvas
from dllm_jax.decoding.acceptance import accept_prefix
from dllm_jax.decoding.base import ModelFns
from dllm_jax.decoding.simsd_round import (
    DRAWS,
    UNDRAFTED,
    UNIFORMS,
    Draft,
    OpenBlocks,
    SimSDState,
    Verdict,
    count,
    row_keys,
    run_model,
)


def verify(
    fns: ModelFns,
    settings: Any,
    state: SimSDState,
    rows: jax.Array,
    window: OpenBlocks,
) -> tuple[Verdict, KVCache, jax.Array]:
    """One target forward over [open blocks with the draft | mask copies of its slots].

    Args:
      fns: the target.
      settings: resolved `simsd.SimSDSettings`.
      state: its draft's `order` is the drafter's step in the slot's block.
      rows: bool `[B]`, which rows take part.
      window: the open blocks.

    Returns:
      The verdict, the target's cache, and the row's tokens, int32 `[B]`.
    """
    length, draft = settings.block_length, state.draft
    masked, order, width = window.masked, draft.order, window.index.shape[1]
    role = jnp.where(masked, layouts.DATA, layouts.KNOWN)
    copies = window.index
    if settings.ablation == "own_positions":
        copies = copies + count(masked)[:, None]
    if settings.ablation == "reversed_order":
        order = jnp.where(order == UNDRAFTED, order, length - 1 - order)
    fields = layouts.simsd_pairs(
        jnp.concatenate([window.index, copies], axis=1),
        jnp.concatenate([role, jnp.full_like(role, layouts.MASK)], axis=1),
        jnp.concatenate([window.index // length] * 2, axis=1),
        jnp.concatenate([order, order], axis=1),
        length,
        jnp.concatenate([jnp.ones_like(masked), masked], axis=1),
        data_sees_masks=settings.ablation != "blind_data",
    )
    data = window.filled(draft)
    tokens = jnp.concatenate([data, jnp.full_like(data, fns.config.mask_id)], axis=1)
    hidden, cache, stored = run_model(
        fns, state, state.cache, rows, tokens, fields, settings
    )
    hidden = hidden[:, width:]
    examined = window.drafted
    if settings.acceptance == "greedy_match":
        target = canvas.propose_with_keys(fns, settings, hidden, state.rng_key)
        # What an early stop left is the target's to say.
        examined |= masked & (settings.draft_steps_per_block > 0)
        agrees = (target.token == draft.token) | (masked & ~window.drafted)
        bonus = drafted = target
    else:
        number = state.forwards.verify
        agrees, drafted, bonus = _rejection_sampling(
            fns,
            settings,
            hidden,
            draft,
            jax.vmap(lambda key: jax.random.uniform(key, (width,)))(
                row_keys(state, number, UNIFORMS)
            ),
            row_keys(state, number, DRAWS),
        )
    accepted, first = accept_prefix(agrees, examined)
    tokens = sampling.Proposal(
        *(jnp.where(first, b, d) for b, d in zip(bonus, drafted, strict=True))
    )
    verdict = Verdict(
        tokens=tokens,
        chosen=accepted | first,
        examined=window.drafted & (accepted | first),
        accepted=window.drafted & accepted,
        place=jnp.cumsum(examined.astype(jnp.int32), axis=-1) - 1,
        steps=jnp.zeros_like(state.step),
    )
    return verdict, cache, width + count(masked) + stored


def judge_by_ratio(
    token: jax.Array, drafter: jax.Array, target: jax.Array, uniform: jax.Array
) -> jax.Array:
    """Whether each drafted token is kept: u < q / p (SimSD, equation 2).

    Args:
      token: int32 `[..., T]`.
      drafter: p, float32 `[..., T, V]`.
      target: q, float32 `[..., T, V]`.
      uniform: u, float32 `[..., T]` in [0, 1).
    """
    p, q = (
        jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0] for x in (drafter, target)
    )
    return (p > 0.0) & (uniform * p < q)


def residual_of_rejection(
    token: jax.Array, drafter: jax.Array, target: jax.Array
) -> jax.Array:
    """What to draw a rejected slot's token from, as `sampling.residual`.

    All of q where the drafter gave its token no probability (specs, SimSD 5).
    """
    p = jnp.take_along_axis(drafter, token[..., None], axis=-1)
    return jnp.where(p > 0.0, sampling.residual(target, drafter), target)


def _rejection_sampling(fns, settings, hidden, draft: Draft, uniform, keys):
    """Which drafted tokens are kept, with their probabilities; and what replaces one.

    Both distributions are after temperature and filters, and without the mask token.
    """

    def distribution(model: ModelFns, states: jax.Array) -> jax.Array:
        logits = model.logits(states)
        is_mask = jnp.arange(logits.shape[-1]) == fns.config.mask_id
        logits = jnp.where(is_mask, jnp.finfo(jnp.float32).min, logits)
        return sampling.distribution(logits, settings.knobs, True, settings.filtered)

    p, q = distribution(fns.draft, draft.hidden), distribution(fns, hidden)
    agrees = judge_by_ratio(draft.token, p, q, uniform)
    left = residual_of_rejection(draft.token, p, q)
    drawn = jax.vmap(lambda key, w: jax.random.categorical(key, jnp.log(w)))(keys, left)
    drawn = drawn.astype(jnp.int32)

    def proposal(token: jax.Array) -> sampling.Proposal:
        share = jnp.take_along_axis(q, token[..., None], axis=-1)[..., 0]
        return sampling.Proposal(token, share, jnp.zeros_like(share))

    return agrees, proposal(draft.token), proposal(drawn)
