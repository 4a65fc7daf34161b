"""The canvas of a batch: laying it out, reading and writing windows, unmasking slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax import layouts, sampling
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeInputs,
    DecodeState,
    Forwards,
    ModelFns,
    SamplingSettings,
)
from kernels_pallas import TokenFields


class Appended(NamedTuple):
    """Tokens behind a forward's row that look at it; nothing of it sees or keeps them."""

    tokens: jax.Array  # [B, U] int32
    fields: TokenFields  # [B, U], from `layouts.appended`
    valid: jax.Array  # [B, U] bool
    hidden: jax.Array  # [B, C] bool, slots of the canvas that they do not see


def lay_out(fns: ModelFns, inputs: DecodeInputs, slots: int) -> DecodeState:
    """The state before the first forward: prompts, then masks; nothing is cached.

    Args:
      fns: the model.
      inputs: the prompts, P <= slots.
      slots: static, length of the canvas with its slack.
    """
    batch, prompt_slots = inputs.prompt.shape
    behind = ((0, 0), (0, slots - prompt_slots))
    canvas = jnp.pad(inputs.prompt, behind, constant_values=fns.config.mask_id)
    return DecodeState(
        canvas=canvas,
        prompt_length=inputs.prompt_length,
        end=inputs.prompt_length + inputs.max_new_tokens,
        cursor=inputs.prompt_length,
        step=jnp.zeros((batch,), jnp.int32),
        pending=jnp.zeros((batch,), bool),
        done=inputs.max_new_tokens == 0,
        rng_key=inputs.rng_key,
        stop_ids=inputs.stop_ids,
        cache=None,
        forwards=Forwards.zeros(batch),
        confidence=jnp.zeros(canvas.shape, jnp.float32),
        unmask_forward=jnp.full(canvas.shape, UNDECIDED, jnp.int32),
        rule=jnp.zeros(canvas.shape, jnp.int32),
    )


def read(canvas: jax.Array, index: jax.Array) -> jax.Array:
    """`canvas[row, index[row]]` for `[B, C]` and int32 `[B, T]`."""
    return jnp.take_along_axis(canvas, index, axis=1)


def write(canvas: jax.Array, start: jax.Array, values: jax.Array) -> jax.Array:
    """Writes `[B, T]` values into `[B, C]` at each row's own start, int32 `[B]`."""
    return jax.vmap(
        lambda row, first, new: jax.lax.dynamic_update_slice(row, new, (first,))
    )(canvas, start, values)


def row_of(
    state: DecodeState,
    index: jax.Array,
    fields: TokenFields,
    appended: Appended | None = None,
) -> tuple[jax.Array, TokenFields]:
    """Tokens and fields of a forward's row: slots of the canvas, and what is appended.

    Args:
      state: before the forward.
      index: int32 `[B, T]`, the slots.
      fields: theirs.
      appended: U tokens, or None.

    Returns:
      `[B, T + U]` each.
    """
    tokens = read(state.canvas, index)
    if appended is None:
        return tokens, fields
    hidden = read(appended.hidden, index)
    tokens = jnp.concatenate([tokens, appended.tokens], axis=1)
    return tokens, layouts.superposition(fields, appended.fields, hidden)


def propose(
    fns: ModelFns, settings: SamplingSettings, state: DecodeState, logits: jax.Array
) -> tuple[sampling.Proposal, jax.Array]:
    """Proposals for `[B, T, V]` logits, and one fresh key a row for the choice of slots."""
    token_keys, choice_keys = _keys(state)
    return _from_logits(fns, settings, logits, token_keys), choice_keys


def propose_from_hidden(
    fns: ModelFns, settings: SamplingSettings, state: DecodeState, hidden: jax.Array
) -> tuple[sampling.Proposal, jax.Array]:
    """`propose` for `[B, T, D]` hidden states; greedily by the model's own head, if any."""
    token_keys, choice_keys = _keys(state)
    return propose_with_keys(fns, settings, hidden, token_keys), choice_keys


def propose_with_keys(
    fns: ModelFns, settings: SamplingSettings, hidden: jax.Array, keys: jax.Array
) -> sampling.Proposal:
    """`propose_from_hidden` with the caller's keys `[B]`, consumed if tokens are drawn."""
    if fns.propose is None or settings.sample:
        return _from_logits(fns, settings, fns.logits(hidden), keys)
    return fns.propose(hidden)


def _from_logits(
    fns: ModelFns, settings: SamplingSettings, logits: jax.Array, keys: jax.Array
) -> sampling.Proposal:
    return sampling.propose(
        logits,
        fns.config.mask_id,
        keys if settings.sample else None,
        settings.knobs,
        settings.filtered,
    )


def _keys(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """Fresh keys of each row, for its tokens and for the choice of slots.

    They come from the row's own key and its number of denoising forwards, so that a row
    draws the same in every batch.
    """
    keys = jax.vmap(jax.random.fold_in)(state.rng_key, state.forwards.denoise)
    token_keys, choice_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    return token_keys, choice_keys


def keys_of_state(
    rng_key: jax.Array, start: jax.Array, num_masked: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys for what is drawn in one state of a block: its tokens, and the choice of slots.

    A block whose tokens are never taken back is once in a state with so many masks. Keys
    that depend on nothing else are the same whoever draws, and in whichever forward: what
    a drafter draws with them is likely to be what its target draws.

    Args:
      rng_key: keys `[B]`, of the rows.
      start: int32 `[B]`, the block's first slot.
      num_masked: int32 `[B]`.

    Returns:
      Keys `[B]` each.
    """

    def of_row(key, *numbers):
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return tuple(jax.random.split(key))

    return jax.vmap(of_row)(rng_key, start, num_masked)


def unmask(
    state: DecodeState,
    start: jax.Array,
    index: jax.Array,
    proposal: sampling.Proposal,
    chosen: jax.Array,
    rule: jax.Array | int = 0,
) -> tuple[DecodeState, jax.Array]:
    """Writes the chosen proposals, and when, how surely and by which rule.

    Args:
      state: before the step, its counters too.
      start: int32 `[B]`, first slot of each row's window.
      index: int32 `[B, T]`, the window's slots.
      proposal: `[B, T]` each.
      chosen: bool `[B, T]`.
      rule: int32 `[B, T]`, or one for all: which of `Decoder.rules` chose the slot.

    Returns:
      The state, and the window's tokens `[B, T]`.
    """
    number = state.forwards.unmasking[:, None]
    tokens = jnp.where(chosen, proposal.token, read(state.canvas, index))
    confidence = jnp.where(chosen, proposal.confidence, read(state.confidence, index))
    forward = jnp.where(chosen, number, read(state.unmask_forward, index))
    rule = jnp.where(chosen, jnp.asarray(rule, jnp.int32), read(state.rule, index))
    state = state.replace(
        canvas=write(state.canvas, start, tokens),
        confidence=write(state.confidence, start, confidence),
        unmask_forward=write(state.unmask_forward, start, forward),
        rule=write(state.rule, start, rule),
    )
    return state, tokens


def mask_again(
    fns: ModelFns,
    state: DecodeState,
    start: jax.Array,
    index: jax.Array,
    revoked: jax.Array,
) -> DecodeState:
    """Takes tokens back: their slots are masked and undecided. Arguments as `unmask`."""

    def put(values, new):
        return write(values, start, jnp.where(revoked, new, read(values, index)))

    return state.replace(
        canvas=put(state.canvas, jnp.int32(fns.config.mask_id)),
        unmask_forward=put(state.unmask_forward, jnp.int32(UNDECIDED)),
    )
