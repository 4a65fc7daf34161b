"""S2D2: the model drafts by block diffusion and verifies itself autoregressively.

Specs, S2D2 sections 1 to 3. A round drafts all masks of the open segment (the block, or
its open sub-block where logits are shifted) in one forward. If the routing policy thinks
it worth a second one, the first run of masks is verified: every slot is predicted from the
tokens before it alone, and the draft kept as far as the verifier agrees
(`dllm_jax.decoding.acceptance`). Otherwise slots are unmasked by confidence.

How a slot is predicted from what precedes it depends on where logits lie. In place: the
block, filled with the draft, is followed by a mask copy of each slot, which sees the
tokens before that slot and no other mask. Shifted: one causal pass over the filled block.

Each step of the loop is one forward of the batch, in which rows do what they need:

    [ block                  | what follows it        | with fold_verify ]
    [ open, drafting         |                        |                  ]
    [ open, filled: verify   | its mask copies        | the next, drafting ]
    [ finished: to be stored | the next, drafting     |                  ]

A batch whose rows all only draft runs the first part alone.

With `acceptance="greedy"`, `cache_ver`, `draft_ver` and a policy that verifies every draft
(`mask_span_length` with `min_ssd_span_length` 1, the rest as by default), every token is
the verifier's most probable one given causal keys and values of the tokens before it: the
result equals that of blocks of length 1 (decoder `ar`; shifted: plain autoregression),
token for token. It does not where verifications are skipped, or without cache_ver:
finished blocks are then stored as the drafter sees them, each token seeing its whole block.

Counters: `draft` counts forwards that draft, `verify` those that verify, `commit` those
that only store a block; a forward counts once, by its first part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import append
from dllm_jax.decoding import acceptance, block, canvas, fast_dllm_v2, routing
from dllm_jax.decoding.acceptance import Noise, Verdict
from dllm_jax.decoding.base import (
    DecodeInputs,
    Decoder,
    DecodeState,
    ModelFns,
    register,
)
from dllm_jax.decoding.s2d2_settings import S2D2Settings, resolve

_RULES = ("draft", "verified", "edited", "bonus")
_EDITED, _BONUS = 2, 3


@struct.dataclass
class S2D2State(DecodeState):
    """A batch between two steps. T is the length of a segment.

    Instead of the drafter's distributions its hidden states wait for the verifier: a
    rejection needs the distribution of one slot.
    """

    verifying: Any  # [B] bool, the draft of the open segment waits to be verified
    draft_token: Any  # [B, T] int32
    draft_confidence: Any  # [B, T] float32
    draft_hidden: Any  # [B, T, D]
    causal_until: Any  # [B] int32, first mask at the open block's last draft
    post_steps: Any  # [B] int32, drafts of the open block that found no mask
    judged: Any  # [B] int32, draft tokens that a verification looked at
    kept: Any  # [B] int32, those before its first rejection
    router: routing.Router


class Segment(NamedTuple):
    """The part of a row's open block that is denoised: its first with a mask."""

    offset: jax.Array  # [B] int32, in the block
    slots: jax.Array  # [B, T] int32, of the canvas
    masked: jax.Array  # [B, T] bool
    first_mask: jax.Array  # [B] int32 slot; behind the block if it has none


def open_segment(fns: ModelFns, settings: S2D2Settings, state: DecodeState) -> Segment:
    """Where each row denoises; of a block without masks, its first part."""
    length, small = settings.block_length, settings.small_block_size
    index = state.cursor[:, None] + jnp.arange(length, dtype=jnp.int32)
    masked = canvas.read(state.canvas, index) == fns.config.mask_id
    first = jnp.argmax(masked, axis=-1).astype(jnp.int32)
    offset = first // small * small
    places = offset[:, None] + jnp.arange(small, dtype=jnp.int32)
    return Segment(
        offset,
        state.cursor[:, None] + places,
        jnp.take_along_axis(masked, places, axis=-1),
        state.cursor + jnp.where(jnp.any(masked, axis=-1), first, length),
    )


def init(
    fns: ModelFns, settings: S2D2Settings, inputs: DecodeInputs, canvas_length: int
) -> S2D2State:
    """The state after the prompt's whole blocks are stored, causally with `cache_ver`."""

    def layout(position, length, valid):
        until = jnp.where(settings.cache_ver, inputs.prompt_length, 0)
        return layouts.causal_then_blocks(position, length, until, valid)

    length, small = settings.block_length, settings.small_block_size
    if fns.config.logit_alignment == "shifted":
        state = fast_dllm_v2.prefill(fns, length, inputs, canvas_length, layout)
    else:
        state, _ = block.prefill(fns, length, inputs, canvas_length, layout)
    batch = state.cursor.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    # Only the dtype and width of hidden states are asked for: nothing runs.
    one = jnp.zeros((batch, 1), jnp.int32)
    fields = layouts.causal(one)
    hidden = jax.eval_shape(lambda: fns.forward(one, fields, None).hidden)
    return S2D2State(
        **vars(state),
        verifying=jnp.zeros((batch,), bool),
        draft_token=jnp.zeros((batch, small), jnp.int32),
        draft_confidence=jnp.zeros((batch, small), jnp.float32),
        draft_hidden=jnp.zeros((batch, small, *hidden.shape[2:]), hidden.dtype),
        causal_until=zeros,
        post_steps=zeros,
        judged=zeros,
        kept=zeros,
        router=routing.new_router(settings, batch),
    )


def noise_from_keys(state: S2D2State, slots: int) -> Noise:
    """Uniform numbers for the round that each row is in.

    They depend on the row's key, its block and the round's number in the block: the same
    in every batch, and however rounds are folded into forwards.
    """
    fold_in = jax.vmap(jax.random.fold_in)
    keys = fold_in(fold_in(state.rng_key, state.cursor), state.step)
    keys = jax.vmap(lambda key: jax.random.split(key, 4), out_axes=1)(keys)

    def uniform(keys, shape):
        return jax.vmap(lambda key: jax.random.uniform(key, shape, jnp.float32))(keys)

    shapes = ((slots,), (slots,), (), ())
    return Noise(*map(uniform, keys, shapes))


# (state, slots of a segment) -> uniform numbers
DrawNoise = Callable[[S2D2State, int], Noise]


def _stored_until(settings: S2D2Settings, state: S2D2State, start: jax.Array) -> jax.Array:
    """Up to where the block from `start` is causal in the cache: int32 `[B]`."""
    leaked = jnp.where(settings.leak_draft_mask, state.causal_until, 0)
    return jnp.where(settings.cache_ver, start + settings.block_length, leaked)


class _Ran(NamedTuple):
    """What a forward left behind. Parts that no row asked for are zeros."""

    fed: jax.Array  # [B, L] int32, tokens of the first part
    k: jax.Array  # [layers, B, K, L, H] of the first part
    v: jax.Array
    segment: jax.Array  # [B, T, D] what predicts the drafting or verified segment
    behind: jax.Array | None  # [B, 1, D] what predicts the slot behind the first part
    ahead: jax.Array | None  # [B, T, D] what predicts the next block, of verifying rows
    positions: jax.Array  # [B] int32, tokens of the row


def _forward(
    fns: ModelFns, settings: S2D2Settings, state: S2D2State, segment: Segment
) -> _Ran:
    """One forward of the batch; see the picture above."""
    length, small = settings.block_length, settings.small_block_size
    shifted = fns.config.logit_alignment == "shifted"
    verifying = state.verifying & ~state.done
    storing = state.pending & ~state.done
    folding = storing & settings.fold
    start = state.cursor - jnp.where(folding, length, 0)
    places = jnp.arange(length, dtype=jnp.int32)

    index = start[:, None] + places
    fed = canvas.read(state.canvas, index)
    inside = places - segment.offset[:, None]
    draft = jnp.take_along_axis(state.draft_token, jnp.clip(inside, 0, small - 1), axis=-1)
    filled = (inside >= 0) & (inside < small) & (fed == fns.config.mask_id)
    fed = jnp.where(filled & verifying[:, None], draft, fed)
    drafts_until = jnp.where(settings.draft_ver, segment.first_mask, 0)
    until = jnp.where(storing, _stored_until(settings, state, start), drafts_until)
    until = jnp.where(verifying, start + length, until)
    first = (fed, layouts.causal_then_blocks(index, length, until))
    positions = jnp.where(state.done, 0, length)

    def run(*parts):
        tokens = jnp.concatenate([tokens for tokens, _ in parts], axis=1)
        fields = layouts.join(*(fields for _, fields in parts))
        out = fns.forward(tokens, fields, state.cache)
        return out.hidden, out.k[..., :length, :], out.v[..., :length, :]

    if shifted:
        hidden, k, v = run(first)
        # The slot before predicts a slot; a block's first one is known.
        before = jnp.maximum(segment.offset[:, None] + places[:small] - 1, 0)
        predictors = jnp.take_along_axis(hidden, before[..., None], axis=1)
        return _Ran(fed, k, v, predictors, hidden[:, -1:], None, positions)

    wide = length + settings.bonus_token
    further = jnp.arange(wide, dtype=jnp.int32)
    copies = start[:, None] + further
    following = copies + length
    last = state.canvas.shape[1] - 1
    next_tokens = canvas.read(state.canvas, jnp.minimum(following, last))
    drafting_next = folding | (verifying & settings.fold_verify)
    drafting_next = drafting_next[:, None] & (further < length)
    next_until = jnp.where(folding, drafts_until, 0)
    copies = layouts.mask_copies(copies, verifying[:, None] & (further < wide))
    following = layouts.causal_then_blocks(following, length, next_until, drafting_next)
    masks = jnp.full_like(next_tokens, fns.config.mask_id)
    if settings.fold_verify:
        fields = jax.tree.map(lambda x: x[:, :length], following)
        second = [(masks, copies), (next_tokens[:, :length], fields)]
    else:
        tokens = jnp.where(verifying[:, None], masks, next_tokens)
        second = [(tokens, layouts.choose(verifying, copies, following))]
    width = sum(tokens.shape[1] for tokens, _ in second)

    def alone():
        hidden, k, v = run(first)
        return jnp.pad(hidden, ((0, 0), (0, width), (0, 0))), k, v

    hidden, k, v = jax.lax.cond(
        jnp.any(verifying | folding), lambda: run(first, *second), alone
    )
    here, there = hidden[:, :length], hidden[:, length : 2 * length]
    ahead = hidden[:, length + wide :] if settings.fold_verify else there
    predictors = jnp.where(folding[:, None, None], ahead, here)
    predictors = jnp.where(verifying[:, None, None], there, predictors)
    positions += jnp.where(verifying, wide, 0) + jnp.where(folding, length, 0)
    if settings.fold_verify:
        positions += jnp.where(verifying, length, 0)
    return _Ran(
        fed,
        k,
        v,
        predictors,
        hidden[:, 2 * length : 2 * length + 1] if settings.bonus_token else None,
        ahead if settings.fold_verify else None,
        positions,
    )


def _probabilities(settings: S2D2Settings, logits, filtered: bool) -> jax.Array:
    return sampling.distribution(logits, settings.knobs, settings.tempered, filtered)


def _unmask(
    settings: S2D2Settings,
    state: S2D2State,
    segment: Segment,
    verdict: Verdict,
    rows: jax.Array,
    verified: bool,
) -> S2D2State:
    """Ends the rows' round: writes the verdict, and what the step still owes."""
    masked = segment.masked & rows[:, None]
    written = verdict.written & masked
    rest = masked & ~written
    high = rest & (state.draft_confidence > settings.threshold)
    written |= high & settings.always_check_high_confidence
    rest = masked & ~written

    quota = unmasking.linear_quota(
        state.step, settings.block_length, settings.denoising_steps
    )
    quota = jnp.maximum(quota, settings.num_to_transfer)
    owed = jnp.minimum(quota, _count(masked)) - _count(written)
    proposal = sampling.Proposal(verdict.token, verdict.confidence, verdict.confidence)
    chosen = block.fill_quota(settings, proposal, rest, owed)
    written |= chosen & (owed > 0)[:, None]
    start, slots = segment.slots[:, 0], segment.slots
    rule = verdict.written.astype(jnp.int32)
    state, _ = canvas.unmask(state, start, slots, proposal, written, rule)
    took_part = rows & jnp.any(masked, axis=-1)
    told = jnp.full_like(rows, verified)
    router = routing.learn(settings, state.router, told, _count(written), took_part)
    return state.replace(step=state.step + rows.astype(jnp.int32), router=router)


def _judge(
    fns: ModelFns,
    settings: S2D2Settings,
    state: S2D2State,
    segment: Segment,
    logits: jax.Array,
    noise: Noise,
) -> S2D2State:
    """Ends the round of the verifying rows; `logits` `[B, T, V]` are the verifier's."""
    rows = state.verifying & ~state.done
    masked = segment.masked & rows[:, None]
    span = routing.first_run(masked)

    def drafter(slot):
        hidden = jnp.take_along_axis(state.draft_hidden, slot[:, None, None], axis=1)
        return _probabilities(settings, fns.logits(hidden), settings.filter_draft)[:, 0]

    def verdict():
        return acceptance.judge(
            settings,
            fns.config.mask_id,
            span,
            masked,
            state.draft_token,
            state.draft_confidence,
            _probabilities(settings, logits, settings.filtered),
            drafter,
            noise,
        )

    verdict = jax.lax.cond(jnp.any(rows), verdict, lambda: _nothing(state))
    state = _unmask(settings, state, segment, verdict, rows, verified=True)
    return state.replace(
        verifying=state.verifying & ~rows,
        judged=state.judged + _count(span),
        kept=state.kept + _count(verdict.kept),
    )


def _nothing(state: S2D2State) -> Verdict:
    """The verdict on drafts that nobody has judged."""
    none = jnp.zeros(state.draft_token.shape, bool)
    return Verdict(none, state.draft_token, state.draft_confidence, none)


def _count(slots: jax.Array) -> jax.Array:
    return jnp.sum(slots, axis=-1, dtype=jnp.int32)


def _draft(
    fns: ModelFns,
    settings: S2D2Settings,
    state: S2D2State,
    hidden: jax.Array,
    logits: jax.Array,
    rows: jax.Array,
    draw_noise: DrawNoise,
) -> tuple[S2D2State, jax.Array]:
    """Drafts, edits and routes; ends the round of rows that do not verify.

    Args:
      fns: the model.
      settings: resolved.
      state: the segment that a row drafts is its open one.
      hidden: `[B, T, D]`, what predicts the segment.
      logits: float32 `[B, T, V]`, of it.
      rows: bool `[B]`, which rows draft.
      draw_noise: where uniform numbers come from.

    Returns:
      The state, and bool `[B]` rows that found neither a mask nor anything to edit.
    """
    segment = open_segment(fns, settings, state)
    slots, masked = segment.slots, segment.masked & rows[:, None]
    before = canvas.read(state.canvas, slots)
    probability = _probabilities(settings, logits, settings.filter_draft)
    if settings.sample:
        is_mask = jnp.arange(logits.shape[-1], dtype=jnp.int32) == fns.config.mask_id
        uniform = draw_noise(state, slots.shape[-1]).draft
        token = sampling.draw(jnp.where(is_mask, 0.0, probability), uniform)
        confidence = jnp.take_along_axis(probability, token[..., None], axis=-1)[..., 0]
    else:
        token, confidence, _ = sampling.propose(logits, fns.config.mask_id)
    post = rows & ~jnp.any(masked, axis=-1)
    unchanged = post
    if settings.edits:
        own = ~segment.masked & (slots >= state.prompt_length[:, None]) & rows[:, None]
        edited = own & (confidence > settings.editing_threshold) & (token != before)
        proposal = sampling.Proposal(token, confidence, confidence)
        state, _ = canvas.unmask(state, slots[:, 0], slots, proposal, edited, _EDITED)
        unchanged = post & ~jnp.any(edited, axis=-1)

    decided = ~segment.masked
    if fns.config.logit_alignment == "same":  # as published, prompts count elsewhere
        decided &= slots >= state.prompt_length[:, None]
    verify, router = routing.decide(
        settings,
        state.router,
        routing.Draft(
            span=routing.first_run(masked),
            masked=masked,
            confidence=confidence,
            probability=probability,
            confident=_count(masked & (confidence > settings.threshold)),
            progress=_count(decided),
        ),
        rows,
    )
    state = state.replace(
        verifying=state.verifying | verify,
        draft_token=jnp.where(rows[:, None], token, state.draft_token),
        draft_confidence=jnp.where(rows[:, None], confidence, state.draft_confidence),
        draft_hidden=jnp.where(rows[:, None, None], hidden, state.draft_hidden),
        causal_until=jnp.where(rows, segment.first_mask, state.causal_until),
        post_steps=state.post_steps + post.astype(jnp.int32),
        router=router,
    )
    rows = rows & ~verify
    state = _unmask(settings, state, segment, _nothing(state), rows, verified=False)
    return state, unchanged


def _close(
    fns: ModelFns,
    settings: S2D2Settings,
    state: S2D2State,
    rows: jax.Array,
    unchanged: jax.Array,
    stored: jax.Array,
) -> tuple[S2D2State, jax.Array]:
    """Ends rows that have all they return, and goes on where a block is finished.

    Args:
      fns: the model.
      settings: resolved.
      state: after the rows' round.
      rows: bool `[B]`, where anything can have changed.
      unchanged: bool `[B]`, rows that would edit their block no more.
      stored: bool `[B]`, rows whose block is in the cache.

    Returns:
      The state, and bool `[B]` which rows have a new open block.
    """
    length = settings.block_length
    index = state.cursor[:, None] + jnp.arange(length + 1, dtype=jnp.int32)
    tokens = canvas.read(state.canvas, index)
    complete = ~jnp.any(tokens[:, :length] == fns.config.mask_id, axis=-1)
    final = unchanged | stored | (state.post_steps >= settings.max_post_steps)
    final &= complete
    enough = rows & block.answered(fns, state, index, tokens)
    if settings.edits or not settings.early_stop:
        enough &= final
    if not (settings.fold or settings.early_stop):
        enough &= stored  # as in the reference
    closing = rows & final & ~enough
    moving = closing if settings.fold else closing & stored
    state = state.replace(
        cursor=state.cursor + jnp.where(moving, length, 0),
        step=jnp.where(moving, 0, state.step),
        post_steps=jnp.where(moving, 0, state.post_steps),
        pending=jnp.where(rows, closing & ~stored, state.pending),
        done=state.done | enough,
    )
    return state, moving


def step(
    fns: ModelFns,
    settings: S2D2Settings,
    state: S2D2State,
    draw_noise: DrawNoise = noise_from_keys,
) -> S2D2State:
    """One forward of the batch: each row drafts, verifies or stores.

    Args:
      fns: the model.
      settings: resolved.
      state: before the forward.
      draw_noise: where uniform numbers come from, to replay recorded ones.
    """
    length, small = settings.block_length, settings.small_block_size
    shifted = fns.config.logit_alignment == "shifted"
    active = ~state.done
    verifying, storing = state.verifying & active, state.pending & active
    drafting = active & ~verifying & (~storing | settings.fold)
    segment = open_segment(fns, settings, state)
    ran = _forward(fns, settings, state, segment)
    parts = [ran.segment, ran.behind, ran.ahead]
    sizes = [0 if part is None else part.shape[1] for part in parts]
    # One product with the head for all parts: it streams the head's weights once.
    logits = fns.logits(jnp.concatenate([p for p in parts if p is not None], axis=1))
    behind = logits[:, small : small + sizes[1]]

    noise = draw_noise(state, small)
    state = _judge(fns, settings, state, segment, logits[:, :small], noise)
    index = state.cursor[:, None] + jnp.arange(length, dtype=jnp.int32)
    as_fed = canvas.read(state.canvas, index) == ran.fed
    whole = jnp.all(as_fed & (ran.fed != fns.config.mask_id), axis=-1)
    accepted = verifying & whole & (state.post_steps >= settings.max_post_steps)
    stored = storing | (accepted & settings.reuse_verified)
    start = state.cursor - jnp.where(storing & settings.fold, length, 0)
    fields = layouts.causal_then_blocks(
        start[:, None] + jnp.arange(length, dtype=jnp.int32),
        length,
        _stored_until(settings, state, start),
    )
    kept = jnp.where(stored, length, 0)
    state = state.replace(cache=append(state.cache, ran.k, ran.v, fields, kept))
    if shifted:
        slot = state.cursor + length
        state = fast_dllm_v2.write_anchor(fns, state, behind, slot, stored)
    elif settings.bonus_token:
        state = _bonus(fns, settings, state, behind, noise, accepted)
    if settings.fold:
        state = state.replace(pending=state.pending & ~storing)
        stored &= ~storing  # that was the block before the open one
    changed = verifying if settings.fold else verifying | storing
    nothing = jnp.zeros_like(active)
    state, moved = _close(fns, settings, state, changed, nothing, stored)

    hidden, draft_logits = ran.segment, logits[:, :small]
    if settings.fold_verify:
        moved &= verifying & ~state.pending
        hidden = jnp.where(moved[:, None, None], ran.ahead, hidden)
        ahead = logits[:, small + sizes[1] :]
        draft_logits = jnp.where(moved[:, None, None], ahead, draft_logits)
        drafting |= moved
    forwards = state.forwards.add(
        ran.positions,
        draft=active & ~verifying & (~storing | settings.fold),
        verify=verifying,
        commit=storing & (not settings.fold),
    )
    state, unchanged = _draft(
        fns, settings, state, hidden, draft_logits, drafting, draw_noise
    )
    state, _ = _close(fns, settings, state, drafting, unchanged, nothing)
    return state.replace(forwards=forwards)


def _bonus(
    fns: ModelFns,
    settings: S2D2Settings,
    state: S2D2State,
    logits: jax.Array,
    noise: Noise,
    rows: jax.Array,
) -> S2D2State:
    """Writes the verifier's token for the slot behind the block; logits are `[B, 1, V]`."""
    probability = _probabilities(settings, logits, settings.filtered)[:, 0]
    token = acceptance.pick(settings, probability, fns.config.mask_id, noise.bonus)
    token = token[:, None]
    confidence = jnp.take_along_axis(probability, token, axis=-1)
    slot = state.cursor + settings.block_length
    proposal = sampling.Proposal(token, confidence, confidence)
    return canvas.unmask(state, slot, slot[:, None], proposal, rows[:, None], _BONUS)[0]


def most_steps(settings: S2D2Settings, slots: int) -> jax.Array:
    """Two forwards unmask a slot; each block is edited so many times, and stored."""
    blocks = -(-slots // settings.block_length)
    return 2 * slots + blocks * (settings.max_post_steps + 1)


register(
    Decoder(
        name="s2d2",
        summary="block-diffusion drafts that the model verifies autoregressively",
        settings=S2D2Settings,
        resolve=resolve,
        init=init,
        step=step,
        most_steps=most_steps,
        rules=lambda settings: _RULES,
    )
)
