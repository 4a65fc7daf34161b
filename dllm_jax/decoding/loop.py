"""The one loop that drives every decoder."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dllm_jax.decoding.base import DecodeState

StepFn = Callable[[DecodeState], DecodeState]


def run(
    step: StepFn,
    state: DecodeState,
    pause: jax.Array,
    most_steps: int | jax.Array,
    most_ends: int | jax.Array = 0,
) -> DecodeState:
    """Steps until every row is done, on the device.

    Args:
      step: one forward of the batch.
      state: where to begin.
      pause: bool scalar; True returns as soon as a row has finished a block (streaming).
      most_steps: int32 scalar, `Decoder.most_steps`: the loop ends whatever a decoder does.
      most_ends: int32 scalar; returns when so many rows have ended (to be refilled); 0 is
        never.

    Returns:
      The final state, or the state at the pause.
    """
    start, was_done = state.cursor, state.done

    def going(carry):
        count, state = carry
        ended = state.done & ~was_done
        moved = jnp.any((state.cursor > start) | ended)
        full = (most_ends > 0) & (jnp.sum(ended, dtype=jnp.int32) >= most_ends)
        return jnp.any(~state.done) & (count < most_steps) & ~(pause & moved) & ~full

    def body(carry):
        count, state = carry
        return count + 1, step(state)

    return jax.lax.while_loop(going, body, (jnp.int32(0), state))[1]


def run_in_python(
    step: StepFn, state: DecodeState, most_steps: int | None = None
) -> list[DecodeState]:
    """The same loop in Python, with every state: for debuggers and tests.

    `most_steps` is twice the canvas if None, enough for any decoder's defaults.
    """
    states = [state]
    most_steps = most_steps or 2 * state.canvas.shape[1]
    while not bool(jnp.all(states[-1].done)) and len(states) <= most_steps:
        states.append(step(states[-1]))
    return states
