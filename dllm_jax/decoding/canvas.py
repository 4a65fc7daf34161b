"""The canvas of a batch: laying it out, reading and writing windows, unmasking slots."""

import jax
import jax.numpy as jnp

from dllm_jax import sampling
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeInputs,
    DecodeState,
    Forwards,
    ModelFns,
    SamplingSettings,
)


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
    )


def read(canvas: jax.Array, index: jax.Array) -> jax.Array:
    """`canvas[row, index[row]]` for `[B, C]` and int32 `[B, T]`."""
    return jnp.take_along_axis(canvas, index, axis=1)


def write(canvas: jax.Array, start: jax.Array, values: jax.Array) -> jax.Array:
    """Writes `[B, T]` values into `[B, C]` at each row's own start, int32 `[B]`."""
    return jax.vmap(
        lambda row, first, new: jax.lax.dynamic_update_slice(row, new, (first,))
    )(canvas, start, values)


def propose(
    fns: ModelFns, settings: SamplingSettings, state: DecodeState, logits: jax.Array
) -> tuple[sampling.Proposal, jax.Array]:
    """Proposals for `[B, T, V]` logits, and one fresh key a row for the choice of slots.

    Keys come from the row's own key and its number of denoising forwards, so that a row
    draws the same in every batch.
    """
    keys = jax.vmap(jax.random.fold_in)(state.rng_key, state.forwards.denoise)
    token_keys, choice_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    proposal = sampling.propose(
        logits,
        fns.config.mask_id,
        token_keys if settings.sample else None,
        sampling.SamplingKnobs(settings.temperature, settings.top_k, settings.top_p),
        settings.filtered,
    )
    return proposal, choice_keys


def unmask(
    state: DecodeState,
    start: jax.Array,
    index: jax.Array,
    proposal: sampling.Proposal,
    chosen: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Writes the chosen proposals, and when and how surely they were written.

    Args:
      state: before the step, its counters too.
      start: int32 `[B]`, first slot of each row's window.
      index: int32 `[B, T]`, the window's slots.
      proposal: `[B, T]` each.
      chosen: bool `[B, T]`.

    Returns:
      The state, and the window's tokens `[B, T]`.
    """
    number = state.forwards.unmasking[:, None]
    tokens = jnp.where(chosen, proposal.token, read(state.canvas, index))
    confidence = jnp.where(chosen, proposal.confidence, read(state.confidence, index))
    forward = jnp.where(chosen, number, read(state.unmask_forward, index))
    state = state.replace(
        canvas=write(state.canvas, start, tokens),
        confidence=write(state.confidence, start, confidence),
        unmask_forward=write(state.unmask_forward, start, forward),
    )
    return state, tokens
