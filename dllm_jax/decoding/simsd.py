"""SimSD: a small model drafts a block, a large one verifies the draft in one forward.

Specs, SimSD (arXiv 2606.02544). A round works on what is still masked of the open block, or
of several (`draft_blocks`), each drafted on the drafts before it:

    draft    the drafter denoises a block step by step; the step in which it unmasked a
             slot, and the token, are kept
    verify   the target runs [block with the draft | mask copies of the drafted slots]; the
             copy of a slot has the slot's position and sees the block as it was when the
             drafter chose the token (`layouts.simsd_pairs`)
    commit   from left to right the drafted tokens that the target accepts, and at the
             first that it does not its own token; the rest is drafted again

A finished block is stored in both caches, by default together with the next forward of
each model (`fold`); what drafting and verifying compute of a block is discarded.

`verification="paired"` is an approximation: a mask copy sees masks that have seen the very
token it judges (specs, SimSD 2.2), and slots are accepted in the order of positions.
`verification="exact"` costs more tokens in the same one forward and no accuracy: the
block's successive states stand side by side, blind to each other
(`layouts.separate_states`), and the target's own decoder (`block` with the same strategy)
is replayed on their true logits. Accepted are the steps in which the target would have
unmasked just these tokens, then the target's own step: the result is `block`'s of the
target alone, token for token, whatever the drafter.

A step of the loop is one forward of one model for all rows; rows with a finished draft wait
until the others have theirs. Counters: `draft` are all forwards of the drafter, `verify`
the target's, `commit` those of the target that only store.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import KVCache, append
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import block, canvas
from dllm_jax.decoding.acceptance import accept_prefix
from dllm_jax.decoding.base import (
    DecodeInputs,
    Decoder,
    DecodeState,
    ModelFns,
    check_at_least,
    register,
    setting,
)
from kernels_pallas import TokenFields

UNDRAFTED = -1
"""`order` of a slot that the drafter did not unmask."""

STRATEGIES = ("low_confidence_static", "low_confidence_dynamic")
EXACT_STRATEGIES = (*STRATEGIES, "sequential", "entropy_bounded")


_UNIFORMS, _DRAWS = 0, 1  # streams of a verification


@struct.dataclass
class SimSDSettings(block.BlockSettings):
    """Settings of the `simsd` decoder; those of `block` are of both models' denoising."""

    remasking_strategy: str = setting(
        "low_confidence_static",
        "which slots a step unmasks; exact verification takes all of them",
        choices=EXACT_STRATEGIES,
        aliases=("remasking", "strategy"),
    )
    verification: str = setting(
        "paired",
        "paired: a mask copy a slot (the paper's, approximate); exact: every state of the "
        "block, and the target's own decoding replayed (token-identical to it)",
        choices=("paired", "exact"),
    )
    acceptance: str | None = setting(
        None,
        "paired: greedy_match (the target's most probable token), or mrs (modified "
        "rejection sampling, with temperature > 0); by the temperature if not given",
        choices=("greedy_match", "mrs"),
        aliases=("speculative_branch",),
        kind=str,
    )
    draft_blocks: int = setting(
        1, "blocks that are drafted, one on the other, for one verification (paired)"
    )
    num_draft_tokens: int = setting(
        0, "most tokens of a draft; 0 is all that is masked of its blocks", traced=True
    )
    draft_steps_per_block: int = setting(
        0,
        "most steps of a block's draft; what it leaves is the target's to say; 0 is all",
        traced=True,
    )
    share_mask_position: bool = setting(
        True, "mask copies have the positions of their slots (off: an ablation)"
    )


@struct.dataclass
class Draft:
    """What a round has of its draft, and what all rounds so far have shown."""

    cache: KVCache  # the drafter's
    token: Any  # [B, T] int32, drafted tokens of the open blocks
    order: Any  # [B, T] int32, the step of its block that drafted each, or UNDRAFTED
    hidden: Any  # [B, T, D] the drafter's, when it drafted the token
    block: Any  # [B] int32, which of the open blocks is being drafted
    ready: Any  # [B] bool, the draft is complete
    block_step: Any  # [B] int32, the target's own steps in the open block (exact)
    examined: Any  # [B, T] int32, drafted tokens judged, by their place in the draft
    accepted: Any  # [B, T] int32, of these the accepted ones
    rounds: Any  # [B] int32, verifications


@struct.dataclass
class SimSDState(DecodeState):
    """A batch between two steps; its cache is the target's."""

    draft: Draft


def resolve(settings: SimSDSettings, config: ModelConfig) -> SimSDSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    if settings.acceptance is None:
        chosen = "mrs" if settings.temperature > 0.0 else "greedy_match"
        settings = settings.replace(acceptance=chosen)
    settings = block.resolve(settings, config)
    check_at_least(settings, draft_blocks=1, num_draft_tokens=0, draft_steps_per_block=0)
    if settings.verification == "exact":
        return _resolve_exact(settings)
    if settings.remasking_strategy not in STRATEGIES:
        raise ValueError(
            f"remasking_strategy={settings.remasking_strategy!r} needs "
            f"verification='exact'; 'paired' takes {', '.join(STRATEGIES)}."
        )
    if (settings.acceptance == "mrs") != settings.sample:
        raise ValueError(
            f"acceptance={settings.acceptance!r} goes with temperature "
            f"{'> 0' if settings.acceptance == 'mrs' else '0'} (it is "
            f"{settings.temperature})."
        )
    return settings


def _resolve_exact(settings: SimSDSettings) -> SimSDSettings:
    refused = {
        "temperature": settings.sample,
        "share_mask_position": not settings.share_mask_position,
        "draft_blocks": settings.draft_blocks > 1,
        "acceptance": settings.acceptance == "mrs",
    }
    for name, given in refused.items():
        if given:
            raise ValueError(
                f"{name}={getattr(settings, name)} does not apply to "
                "verification='exact', which replays the target's greedy decoding."
            )
    return settings


def init(
    fns: ModelFns, settings: SimSDSettings, inputs: DecodeInputs, canvas_length: int
) -> SimSDState:
    """The state after each model's `block.prefill`."""
    length = settings.block_length
    width = settings.draft_blocks * length
    slots = canvas_length + width - length
    state, _ = block.prefill(fns, length, inputs, slots)
    drafter, _ = block.prefill(fns.draft, length, inputs, slots)
    batch = state.cursor.shape[0]
    shape = (batch, width)
    hidden = jax.eval_shape(
        lambda tokens, fields: fns.draft.forward(tokens, fields, None).hidden,
        jnp.zeros(shape, jnp.int32),
        layouts.block_causal(jnp.zeros(shape, jnp.int32), length),
    )
    draft = Draft(
        cache=drafter.cache,
        token=jnp.zeros(shape, jnp.int32),
        order=jnp.full(shape, UNDRAFTED, jnp.int32),
        hidden=jnp.zeros(hidden.shape, hidden.dtype),
        block=jnp.zeros((batch,), jnp.int32),
        ready=jnp.zeros((batch,), bool),
        block_step=jnp.zeros((batch,), jnp.int32),
        examined=jnp.zeros(shape, jnp.int32),
        accepted=jnp.zeros(shape, jnp.int32),
        rounds=jnp.zeros((batch,), jnp.int32),
    )
    prefilled = drafter.forwards
    state = SimSDState(**vars(state), draft=draft)
    return state.replace(
        forwards=state.forwards.replace(
            draft=prefilled.prefill,
            positions=state.forwards.positions + prefilled.positions,
        )
    )


class _Open(NamedTuple):
    """The open blocks of each row, as one window of T slots."""

    index: jax.Array  # [B, T] int32
    token: jax.Array  # [B, T] int32, as committed
    masked: jax.Array  # [B, T] bool, of blocks that the row needs
    drafted: jax.Array  # [B, T] bool, masked and with a drafted token
    number: jax.Array  # [T] int32, which of the open blocks

    def filled(self, draft: Draft) -> jax.Array:
        """Tokens with the draft: int32 `[B, T]`."""
        return jnp.where(self.drafted, draft.token, self.token)


def _open(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> _Open:
    length = settings.block_length
    offsets = jnp.arange(settings.draft_blocks * length, dtype=jnp.int32)
    index = state.cursor[:, None] + offsets
    token = canvas.read(state.canvas, index)
    last = (state.end + length - 1) // length * length
    masked = (token == fns.config.mask_id) & (index < last[:, None])
    drafted = masked & (state.draft.order != UNDRAFTED)
    return _Open(index, token, masked, drafted, offsets // length)


def _run(
    fns: ModelFns,
    state: SimSDState,
    cache: KVCache,
    rows: jax.Array,
    tokens: jax.Array,
    fields: TokenFields,
    settings: SimSDSettings,
) -> tuple[jax.Array, KVCache, jax.Array]:
    """One forward of a model, which also stores what it lacks before the cursor.

    Args:
      fns: the model.
      state: whose canvas and cursor count.
      cache: the model's.
      rows: bool `[B]`, which rows take part.
      tokens: int32 `[B, W]`, of the open blocks, W at least the window's.
      fields: `[B, W]` each.
      settings: resolved.

    Returns:
      Hidden states `[B, W, D]` of `tokens`, the cache, and how many tokens were stored,
      int32 `[B]`.
    """
    length = settings.block_length
    width = settings.draft_blocks * length
    lacking = jnp.where(rows, state.cursor - cache.length, 0)
    offsets = jnp.arange(width, dtype=jnp.int32)
    position = cache.length[:, None] + offsets
    stored = layouts.block_causal(position, length, offsets < lacking[:, None])

    def with_stored():
        row = jnp.concatenate([canvas.read(state.canvas, position), tokens], axis=1)
        out = fns.forward(row, layouts.join(stored, fields), cache)
        return out.hidden[:, width:], out.k[..., :width, :], out.v[..., :width, :]

    def alone():
        out = fns.forward(tokens, fields, cache)
        return out.hidden, out.k[..., :width, :], out.v[..., :width, :]

    hidden, k, v = jax.lax.cond(jnp.any(lacking > 0), with_stored, alone)
    return hidden, append(cache, k, v, stored, lacking), lacking


def step(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> SimSDState:
    """One forward of the batch by one of the models, or two that only store."""
    active = ~state.done
    drafting = active & ~state.draft.ready

    def work(state):
        return jax.lax.cond(
            jnp.any(drafting),
            lambda s: _draft(fns, settings, s),
            lambda s: _verify(fns, settings, s),
            state,
        )

    if settings.fold:
        return work(state)
    lacks = state.cache.length < state.cursor
    return jax.lax.cond(
        jnp.any(lacks & active), lambda s: _store(fns, settings, s), work, state
    )


def _store(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> SimSDState:
    """Stores finished blocks in both caches, and does nothing else (`fold=False`)."""
    length, draft = settings.block_length, state.draft
    offsets = jnp.arange(settings.draft_blocks * length, dtype=jnp.int32)
    index = state.cache.length[:, None] + offsets
    lacking = jnp.where(state.done, 0, state.cursor - state.cache.length)
    fields = layouts.block_causal(index, length, offsets < lacking[:, None])
    tokens = canvas.read(state.canvas, index)
    own = fns.forward(tokens, fields, state.cache)
    other = fns.draft.forward(tokens, fields, draft.cache)
    cache = append(draft.cache, other.k, other.v, fields, lacking)
    return state.replace(
        cache=append(state.cache, own.k, own.v, fields, lacking),
        draft=draft.replace(cache=cache),
        forwards=state.forwards.add(2 * lacking, commit=lacking > 0, draft=lacking > 0),
    )


def _keys(state: SimSDState, count: jax.Array, stream: int) -> jax.Array:
    """A key a row for its forward number `count` int32 `[B]`; equal in every batch."""
    return jax.vmap(lambda key, n: jax.random.fold_in(jax.random.fold_in(key, n), stream))(
        state.rng_key, count
    )


def _draft(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> SimSDState:
    """One forward of the drafter: a denoising step of rows whose draft is not complete."""
    length, draft = settings.block_length, state.draft
    rows = ~state.done & ~draft.ready
    window = _open(fns, settings, state)
    hidden, cache, stored = _run(
        fns.draft,
        state,
        draft.cache,
        rows,
        window.filled(draft),
        layouts.block_causal(window.index, length),
        settings,
    )
    keys = _keys(state, state.forwards.draft, _DRAWS)
    proposal = canvas.propose_with_keys(fns.draft, settings, hidden, keys)
    here = window.number == draft.block[:, None]
    left = window.masked & ~window.drafted & here & rows[:, None]
    chosen = _choose_draft(settings, proposal, left, state)
    width = window.index.shape[1]
    limit = jnp.where(settings.num_draft_tokens > 0, settings.num_draft_tokens, width)
    room = limit - _count(window.drafted)
    chosen = unmasking.top_count(proposal.confidence, chosen, room)
    step = state.step + rows.astype(jnp.int32)
    most = settings.draft_steps_per_block
    over = ~jnp.any(left & ~chosen, axis=-1) | ((most > 0) & (step >= most))
    behind = window.number > draft.block[:, None]
    complete = over & ~jnp.any(window.masked & behind, axis=-1)
    complete |= _count(chosen) >= room
    draft = draft.replace(
        cache=cache,
        token=jnp.where(chosen, proposal.token, draft.token),
        order=jnp.where(chosen, state.step[:, None], draft.order),
        hidden=jnp.where(chosen[..., None], hidden, draft.hidden),
        block=draft.block + (rows & over & ~complete).astype(jnp.int32),
        ready=draft.ready | (rows & complete),
    )
    # The exact verifier counts the steps of its only block.
    step = jnp.where(rows & over & ~complete, 0, step)
    positions = jnp.where(rows, width, 0) + stored
    return state.replace(
        step=step, draft=draft, forwards=state.forwards.add(positions, draft=rows)
    )


def _count(slots: jax.Array) -> jax.Array:
    return jnp.sum(slots, axis=-1, dtype=jnp.int32)


def _choose_draft(
    settings: SimSDSettings,
    proposal: sampling.Proposal,
    left: jax.Array,
    state: SimSDState,
) -> jax.Array:
    """The slots that a step of the drafter unmasks, of the masked ones `left`."""
    if settings.verification == "exact":
        # As the target would in its own decoding, or no step could ever be accepted.
        number = state.draft.block_step + state.step
        return block.choose(settings, proposal, left, number, state.rng_key)
    # Spread over the steps that are left, by what is left (specs, SimSD 4.2).
    remaining = _count(left)
    steps_left = jnp.maximum(settings.denoising_steps - state.step, 1)
    quota = (remaining + steps_left - 1) // steps_left
    best = unmasking.top_count(proposal.confidence, left, quota)
    if settings.remasking_strategy == "low_confidence_static":
        return best
    return unmasking.above_threshold(
        proposal.confidence, left, settings.threshold, best, quota
    )


class _Verdict(NamedTuple):
    """What a verification commits; of examined slots the accepted ones come first."""

    tokens: sampling.Proposal  # [B, T] each
    chosen: jax.Array  # [B, T] bool, to be committed
    examined: jax.Array  # [B, T] bool, drafted and judged
    accepted: jax.Array  # [B, T] bool, of these the accepted
    place: jax.Array  # [B, T] int32, place of a slot in the order of judging
    steps: jax.Array  # [B] int32, the target's own steps that this is worth (exact)


def _verify(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> SimSDState:
    """One forward of the target: judges all drafts, commits, and opens what is next."""
    length, draft = settings.block_length, state.draft
    rows = ~state.done
    window = _open(fns, settings, state)
    judge = _verify_exactly if settings.verification == "exact" else _verify_pairs
    verdict, cache, positions = judge(fns, settings, state, rows, window)
    chosen = verdict.chosen & rows[:, None]
    state = state.replace(cache=cache)
    start = window.index[:, 0]
    state, tokens = canvas.unmask(state, start, window.index, verdict.tokens, chosen)
    behind = state.cursor + window.index.shape[1]
    is_mask = tokens == fns.config.mask_id
    first_mask = jnp.min(jnp.where(is_mask, window.index, behind[:, None]), axis=-1)
    closed = (first_mask - state.cursor) // length
    enough = block.answered(fns, state, window.index, tokens)
    if not settings.early_stop:
        enough &= closed > 0
    moving = jnp.where(rows & ~enough, closed, 0)
    places = jnp.arange(window.index.shape[1], dtype=jnp.int32)
    at = (verdict.place[..., None] == places) & rows[:, None, None]

    def histogram(slots):
        return jnp.sum(slots[..., None] & at, axis=1, dtype=jnp.int32)

    steps = jnp.where(moving > 0, 0, draft.block_step + verdict.steps)
    draft = draft.replace(
        order=jnp.where(rows[:, None], UNDRAFTED, draft.order),
        block=jnp.where(rows, 0, draft.block),
        ready=draft.ready & ~rows,
        block_step=jnp.where(rows, steps, draft.block_step),
        examined=draft.examined + histogram(verdict.examined),
        accepted=draft.accepted + histogram(verdict.accepted),
        rounds=draft.rounds + rows.astype(jnp.int32),
    )
    return state.replace(
        cursor=state.cursor + moving * length,
        step=jnp.where(rows, 0, state.step),
        done=state.done | enough,
        draft=draft,
        forwards=state.forwards.add(jnp.where(rows, positions, 0), verify=rows),
    )


def _verify_pairs(fns, settings, state, rows, window: _Open):
    """The paired row; see `_Verdict`. Also the target's cache and the row's tokens."""
    length, draft = settings.block_length, state.draft
    masked, order, width = window.masked, draft.order, window.index.shape[1]
    role = jnp.where(masked, layouts.DATA, layouts.KNOWN)
    copies = window.index
    if not settings.share_mask_position:
        copies = copies + _count(masked)[:, None]
    fields = layouts.simsd_pairs(
        jnp.concatenate([window.index, copies], axis=1),
        jnp.concatenate([role, jnp.full_like(role, layouts.MASK)], axis=1),
        jnp.concatenate([window.index // length] * 2, axis=1),
        jnp.concatenate([order, order], axis=1),
        length,
        jnp.concatenate([jnp.ones_like(masked), masked], axis=1),
    )
    data = window.filled(draft)
    tokens = jnp.concatenate([data, jnp.full_like(data, fns.config.mask_id)], axis=1)
    hidden, cache, stored = _run(fns, state, state.cache, rows, tokens, fields, settings)
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
                _keys(state, number, _UNIFORMS)
            ),
            _keys(state, number, _DRAWS),
        )
    accepted, first = accept_prefix(agrees, examined)
    tokens = sampling.Proposal(
        *(jnp.where(first, b, d) for b, d in zip(bonus, drafted, strict=True))
    )
    verdict = _Verdict(
        tokens=tokens,
        chosen=accepted | first,
        examined=window.drafted & (accepted | first),
        accepted=window.drafted & accepted,
        place=jnp.cumsum(examined.astype(jnp.int32), axis=-1) - 1,
        steps=jnp.zeros_like(state.step),
    )
    return verdict, cache, width + _count(masked) + stored


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


def _verify_exactly(fns, settings, state, rows, window: _Open):
    """Every state of the block at once; see `_Verdict`. Also the cache and the tokens."""
    length, draft = settings.block_length, state.draft
    batch = state.cursor.shape[0]
    number = jnp.arange(length, dtype=jnp.int32)
    drafted_steps = state.step  # a state before each of them, and none behind the last

    def widen(x):  # [B, T] -> [B, S, T], the same in every state
        return jnp.broadcast_to(x[:, None], (batch, length, length))

    shown = widen(window.drafted) & (widen(draft.order) < number[:, None])
    hole = widen(window.masked) & ~shown
    before = jnp.where(shown, widen(draft.token), widen(window.token))
    tokens = jnp.where(hole, fns.config.mask_id, before)
    exists = number < drafted_steps[:, None]  # [B, S]

    def flat(x):
        return x.reshape(batch, -1)

    valid = jnp.broadcast_to(exists[..., None], tokens.shape)
    states = jnp.broadcast_to(number[:, None], tokens.shape)
    fields = layouts.separate_states(
        flat(widen(window.index)),
        flat(states),
        state.cursor[:, None] // length,
        flat(valid),
    )
    hidden, cache, stored = _run(
        fns, state, state.cache, rows, flat(tokens), fields, settings
    )
    target = canvas.propose_with_keys(fns, settings, hidden, state.rng_key)

    def by_state(x):  # [B, S * T] -> [B * S, T]
        return x.reshape(batch * length, length)

    target = sampling.Proposal(*map(by_state, target))
    steps = (draft.block_step[:, None] + number).reshape(-1)
    keys = jnp.repeat(state.rng_key, length)
    own = block.choose(settings, target, hole.reshape(-1, length), steps, keys)
    own = own.reshape(tokens.shape)
    target = sampling.Proposal(*(x.reshape(tokens.shape) for x in target))
    drafted = widen(window.drafted) & (widen(draft.order) == number[:, None])
    same_tokens = jnp.all(~own | (target.token == widen(draft.token)), axis=-1)
    agrees = jnp.all(own == drafted, axis=-1) & same_tokens
    accepted, first = accept_prefix(agrees, exists)  # of states
    worth = accepted | first
    # What the steps up to the first difference unmask is the target's own in each.
    chosen = own & worth[..., None]
    tokens = sampling.Proposal(
        *(jnp.sum(jnp.where(chosen, x, jnp.zeros_like(x)), axis=1) for x in target)
    )
    verdict = _Verdict(
        tokens=tokens,
        chosen=jnp.any(chosen, axis=1),
        examined=jnp.any(drafted & worth[..., None], axis=1),
        accepted=jnp.any(drafted & accepted[..., None], axis=1),
        place=draft.order,
        steps=_count(worth),
    )
    return verdict, cache, drafted_steps * length + stored


def most_steps(settings: SimSDSettings, slots: int) -> jax.Array:
    """A round commits a slot; it drafts its blocks, verifies, and may store."""
    width = settings.draft_blocks * settings.block_length
    return slots * (width + 2)


def cache_label(settings: SimSDSettings) -> str:
    """The caches are exact; paired verification is not."""
    exact = settings.verification == "exact"
    return "exact" if exact else "approximate (paired verification)"


def report(state: SimSDState, row: int) -> dict[str, Any]:
    """A row's acceptance: drafted tokens judged and accepted, by their place in the draft.

    Tokens behind a rejection are not judged and do not count (specs, SimSD 5). In exact
    verification the place is the step in which the drafter unmasked the token.
    """
    examined = np.asarray(state.draft.examined[row])
    accepted = np.asarray(state.draft.accepted[row])
    rounds = int(state.draft.rounds[row])
    return {
        "rounds": rounds,
        "examined": examined.tolist(),
        "accepted": accepted.tolist(),
        "acceptance": float(accepted.sum() / max(examined.sum(), 1)),
        "accepted_a_round": float(accepted.sum() / max(rounds, 1)),
    }


register(
    Decoder(
        name="simsd",
        summary="a small model drafts, a large one verifies (paired: approximate; exact)",
        settings=SimSDSettings,
        resolve=resolve,
        init=init,
        step=step,
        most_steps=most_steps,
        cache=cache_label,
        drafts=True,
        report=report,
        rules=lambda settings: ("verified",),
    )
)
