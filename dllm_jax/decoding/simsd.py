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
block's successive states stand side by side, and the target's own decoder (`block` with the
same settings) is replayed on their true logits (`exact_verification`). The result is
`block`'s of the target alone, token for token, whatever the drafter; sampled, it is what
the target alone samples with the same seed. With the target as its own drafter and a lower
`draft_threshold` it is self-speculation: many slots a forward, and their exact check.

A step of the loop is one forward of one model for all rows; rows with a finished draft wait
until the others have theirs. Counters: `draft` are all forwards of the drafter, `verify`
the target's, `commit` those of the target that only store.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import append
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import block, canvas, exact_verification, paired_verification
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeInputs,
    Decoder,
    ModelFns,
    check_at_least,
    register,
    setting,
)
from dllm_jax.decoding.simsd_round import (
    DRAWS,
    UNDRAFTED,
    Draft,
    SimSDState,
    count,
    open_blocks,
    row_keys,
    run_model,
)

PAIRED_STRATEGIES = ("low_confidence_static", "low_confidence_dynamic")
ABLATIONS = ("none", "own_positions", "blind_data", "reversed_order")


@struct.dataclass
class SimSDSettings(block.BlockSettings):
    """Settings of the `simsd` decoder; those of `block` are of both models' denoising."""

    remasking_strategy: str = setting(
        "low_confidence_static",
        "which slots a step unmasks; exact verification takes all of them",
        choices=block.STRATEGIES,
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
        "rejection sampling, with temperature > 0); by the temperature if not given; "
        "exact: replay",
        choices=("greedy_match", "mrs", "replay"),
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
    draft_threshold: float = setting(
        0.0,
        "exact: the drafter unmasks at once, in the strategy's order, slots of a higher "
        "confidence; 0: what the strategy unmasks in a step",
        traced=True,
    )
    ablation: str = setting(
        "none",
        "paired, to see what matters: mask copies at positions of their own, drafted "
        "tokens that see no mask, or the drafting order reversed",
        choices=ABLATIONS,
    )


def resolve(settings: SimSDSettings, config: ModelConfig) -> SimSDSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    exact = settings.verification == "exact"
    if settings.acceptance is None:
        chosen = "mrs" if settings.temperature > 0.0 else "greedy_match"
        settings = settings.replace(acceptance="replay" if exact else chosen)
    settings = block.resolve(settings, config)
    check_at_least(
        settings,
        draft_blocks=1,
        num_draft_tokens=0,
        draft_steps_per_block=0,
        draft_threshold=0.0,
    )
    unused = {"draft_threshold": settings.draft_threshold > 0.0}
    unused["acceptance"] = settings.acceptance == "replay"
    if exact:
        unused = {
            "ablation": settings.ablation != "none",
            "draft_blocks": settings.draft_blocks > 1,
            "acceptance": settings.acceptance != "replay",
        }
    for name in (name for name, given in unused.items() if given):
        raise ValueError(
            f"{name}={getattr(settings, name)!r} does not apply to "
            f"verification={settings.verification!r}."
        )
    return settings if exact else _resolve_paired(settings)


def _resolve_paired(settings: SimSDSettings) -> SimSDSettings:
    if settings.remasking_strategy not in PAIRED_STRATEGIES:
        raise ValueError(
            f"remasking_strategy={settings.remasking_strategy!r} needs "
            f"verification='exact'; 'paired' takes {', '.join(PAIRED_STRATEGIES)}."
        )
    if (settings.acceptance == "mrs") != settings.sample:
        raise ValueError(
            f"acceptance={settings.acceptance!r} goes with temperature "
            f"{'> 0' if settings.acceptance == 'mrs' else '0'} (it is "
            f"{settings.temperature})."
        )
    if settings.ablation == "blind_data" and settings.draft_blocks > 1:
        raise ValueError(
            f"ablation='blind_data' takes draft_blocks=1 (it is {settings.draft_blocks})."
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
        own_steps=jnp.zeros((batch,), jnp.int32),
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


def _draft(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> SimSDState:
    """One forward of the drafter: a denoising step of rows whose draft is not complete."""
    length, draft = settings.block_length, state.draft
    rows = ~state.done & ~draft.ready
    window = open_blocks(fns, settings, state)
    hidden, cache, stored = run_model(
        fns.draft,
        state,
        draft.cache,
        rows,
        window.filled(draft),
        layouts.block_causal(window.index, length),
        settings,
    )
    here = window.number == draft.block[:, None]
    left = window.masked & ~window.drafted & here & rows[:, None]
    exact = settings.verification == "exact"
    token_keys = choice_keys = row_keys(state, state.forwards.draft, DRAWS)
    if exact:  # those of the target in this state
        token_keys, choice_keys = canvas.keys_of_state(
            state.rng_key, state.cursor, count(left)
        )
    proposal = canvas.propose_with_keys(fns.draft, settings, hidden, token_keys)
    choose = _choose_as_target if exact else _choose_spread
    chosen, score = choose(settings, proposal, left, state, choice_keys)
    width = window.index.shape[1]
    limit = jnp.where(settings.num_draft_tokens > 0, settings.num_draft_tokens, width)
    so_far = count(window.drafted)
    room = limit - so_far
    chosen = unmasking.top_count(score, chosen, room)
    order = jnp.broadcast_to(state.step[:, None], chosen.shape)
    if exact:
        order = so_far[:, None] + unmasking.rank(score, chosen)
    step = state.step + rows.astype(jnp.int32)
    most = settings.draft_steps_per_block
    over = ~jnp.any(left & ~chosen, axis=-1) | ((most > 0) & (step >= most))
    behind = window.number > draft.block[:, None]
    complete = over & ~jnp.any(window.masked & behind, axis=-1)
    complete |= count(chosen) >= room
    draft = draft.replace(
        cache=cache,
        token=jnp.where(chosen, proposal.token, draft.token),
        order=jnp.where(chosen, order, draft.order),
        hidden=jnp.where(chosen[..., None], hidden, draft.hidden),
        block=draft.block + (rows & over & ~complete).astype(jnp.int32),
        ready=draft.ready | (rows & complete),
    )
    step = jnp.where(rows & over & ~complete, 0, step)
    positions = jnp.where(rows, width, 0) + stored
    return state.replace(
        step=step, draft=draft, forwards=state.forwards.add(positions, draft=rows)
    )


def _choose_spread(
    settings: SimSDSettings,
    proposal: sampling.Proposal,
    left: jax.Array,
    state: SimSDState,
    rng_keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The slots that a step of the drafter unmasks, of the masked ones `left`, and a score.

    Spread over the steps that are left, by what is left (specs, SimSD 4.2).
    """
    del rng_keys
    confidence, remaining = proposal.confidence, count(left)
    steps_left = jnp.maximum(settings.denoising_steps - state.step, 1)
    quota = (remaining + steps_left - 1) // steps_left
    best = unmasking.top_count(confidence, left, quota)
    if settings.remasking_strategy == "low_confidence_static":
        return best, confidence
    chosen = unmasking.above_threshold(confidence, left, settings.threshold, best, quota)
    return chosen, confidence


def _choose_as_target(
    settings: SimSDSettings,
    proposal: sampling.Proposal,
    left: jax.Array,
    state: SimSDState,
    rng_keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """As `_choose_spread`; what the target would choose, or more at once."""
    number = state.draft.block_step + state.step
    chosen = block.choose(settings, proposal, left, number, rng_keys)
    score = block.preference(settings, proposal, rng_keys)
    # More at once, in the strategy's own order: what it passes over ends the replay.
    place, slots = unmasking.rank(score, left), left.shape[-1]
    unsure = left & ~(proposal.confidence > settings.draft_threshold)
    first_unsure = jnp.min(jnp.where(unsure, place, slots), axis=-1, keepdims=True)
    more = left & (place < first_unsure) & (settings.draft_threshold > 0.0)
    return chosen | more, score


def _verify(fns: ModelFns, settings: SimSDSettings, state: SimSDState) -> SimSDState:
    """One forward of the target: judges all drafts, commits, and opens what is next."""
    length, draft = settings.block_length, state.draft
    rows = ~state.done
    window = open_blocks(fns, settings, state)
    exact = settings.verification == "exact"
    verify = exact_verification.verify if exact else paired_verification.verify
    verdict, cache, positions = verify(fns, settings, state, rows, window)
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
        own_steps=draft.own_steps + jnp.where(rows, verdict.steps, 0),
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


def most_steps(settings: SimSDSettings, slots: int) -> jax.Array:
    """A round commits a slot; it drafts its blocks, verifies, and may store."""
    width = settings.draft_blocks * settings.block_length
    return slots * (width + 2)


def cache_label(settings: SimSDSettings) -> str:
    """The caches are exact; paired verification is not."""
    exact = settings.verification == "exact"
    return "exact" if exact else "approximate (paired verification)"


def report(settings: SimSDSettings, state: SimSDState, row: int) -> dict[str, Any]:
    """A row's acceptance: drafted tokens judged and accepted, by their place in the draft.

    Tokens behind a rejection are not judged and do not count (specs, SimSD 5). What the
    target alone would have needed is known where its decoding is replayed; else it is
    `denoising_steps` a block.
    """
    examined = np.asarray(state.draft.examined[row])
    accepted = np.asarray(state.draft.accepted[row])
    rounds = int(state.draft.rounds[row])
    alone = float(state.draft.own_steps[row])
    if settings.verification == "paired":
        committed = int(np.sum(np.asarray(state.unmask_forward[row]) != UNDECIDED))
        alone = committed * float(settings.denoising_steps) / settings.block_length
    return {
        "rounds": rounds,
        "examined": examined.tolist(),
        "accepted": accepted.tolist(),
        "acceptance": float(accepted.sum() / max(examined.sum(), 1)),
        "accepted_a_round": float(accepted.sum() / max(rounds, 1)),
        "forwards_of_target_alone": alone,
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
