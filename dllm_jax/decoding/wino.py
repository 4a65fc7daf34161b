"""WINO: unmask widely, and take back what the rest of the text does not support.

Specs, LEAP and KLASS 9.3. Each forward runs the canvas and, behind it, a shadow of the open
block: masks at the block's positions that see everything but the slot they stand for. A
step unmasks the slots above `threshold`, and masks slots of earlier steps again to which
their shadow gives less than `threshold_back`. Fewer are taken back than the step before had
unmasked, so a block takes no more forwards than it has slots; a block is final when it has
no mask, and ends its row no earlier.

Exact: the whole canvas in every forward.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, unmasking
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import canvas
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeInputs,
    Decoder,
    DecodeState,
    ModelFns,
    SamplingSettings,
    check_at_least,
    register,
    resolve_sampling,
    setting,
)
from dllm_jax.decoding.bidirectional import (
    Window,
    block_length_setting,
    close,
    open_window,
    probability,
    propose_from_hidden,
    slot_keys,
)

_LEAST_CAP, _MOST_CAP = 5, 20  # as published, as is the share of 0.7


@struct.dataclass
class WINOSettings(SamplingSettings):
    """Settings of the `wino` decoder."""

    block_length: int = block_length_setting(128)
    threshold: float = setting(
        0.6,
        "confidence above which (>) a slot is unmasked",
        traced=True,
        aliases=("confidence_threshold",),
    )
    threshold_back: float = setting(
        0.9,
        "probability below which (<), seen from its surroundings, a token is masked again",
        traced=True,
    )


@struct.dataclass
class WINOState(DecodeState):
    """A batch between two steps."""

    unmasked: Any  # [B] int32, slots that the step before unmasked


def resolve(settings: WINOSettings, config: ModelConfig) -> WINOSettings:
    """Checks everything; raises ValueError."""
    if config.attention != "bidirectional" or config.logit_alignment != "same":
        raise ValueError(
            "this decoder needs bidirectional attention and logits in place; the model "
            f"has attention={config.attention!r}, "
            f"logit_alignment={config.logit_alignment!r}."
        )
    check_at_least(settings, block_length=0, threshold=0.0, threshold_back=0.0)
    return resolve_sampling(settings)


def init(
    fns: ModelFns, settings: WINOSettings, inputs: DecodeInputs, canvas_length: int
) -> WINOState:
    """Lays out the canvas.

    Args:
      fns: the model.
      settings: resolved.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens.
    """
    del settings
    state = canvas.lay_out(fns, inputs, canvas_length)
    return WINOState(**vars(state), unmasked=jnp.zeros_like(state.cursor))


def _run(fns: ModelFns, state: DecodeState, window: Window) -> tuple[jax.Array, jax.Array]:
    """Hidden states `[B, W, D]` of the window's slots, and of their shadows."""
    batch, slots = state.canvas.shape
    position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
    valid = position < state.end[:, None]
    fields = layouts.shadowed(position, window.index, valid, window.inside)
    shadows = jnp.full_like(window.index, fns.config.mask_id)
    tokens = jnp.concatenate([state.canvas, shadows], axis=1)
    hidden = fns.forward(tokens, fields, None).hidden
    own = jnp.take_along_axis(hidden, window.index[..., None], axis=1)
    return own, hidden[:, slots:]


def step(fns: ModelFns, settings: WINOSettings, state: WINOState) -> WINOState:
    """One forward of the batch: each row unmasks slots of its block, and masks some."""
    window = open_window(fns, settings.block_length, state)
    masked, previous = window.masked, state.unmasked
    own, shadow = _run(fns, state, window)
    keys = slot_keys(state, window, state.step)
    proposal = propose_from_hidden(fns, settings, own, keys)
    confidence = proposal.confidence

    def count(slots):
        return jnp.sum(slots, axis=-1, dtype=jnp.int32)

    cap = jnp.clip(count(masked) * 7 // 10, _LEAST_CAP, _MOST_CAP)
    passing = masked & (confidence > settings.threshold)
    passing = unmasking.best_and(passing, confidence, masked)
    chosen = unmasking.top_count(confidence, passing, cap)

    token = canvas.read(state.canvas, window.index)
    written = canvas.read(state.unmask_forward, window.index) != UNDECIDED
    support = probability(fns.logits(shadow), token)
    doubtful = window.inside & ~masked & written & (support < settings.threshold_back)
    doubtful &= (count(chosen) >= 2)[:, None] & ~state.done[:, None]
    limit = jnp.where(count(doubtful) >= previous, previous - 1, count(doubtful))
    revoked = unmasking.top_count(-support, doubtful, limit)

    start = window.index[:, 0]
    state, _ = canvas.unmask(state, start, window.index, proposal, chosen)
    state = canvas.mask_again(fns, state, start, window.index, revoked)
    positions = state.end + count(window.inside)
    state = state.replace(
        unmasked=count(chosen),
        forwards=state.forwards.add(jnp.where(state.done, 0, positions)),
    )
    return close(fns, state, window, state.step + 1, revocable=True)


register(
    Decoder(
        name="wino",
        summary="bidirectional denoising that takes back what is not supported (WINO)",
        settings=WINOSettings,
        resolve=resolve,
        init=init,
        step=step,
        cache=lambda settings: "none (exact)",
        rules=lambda settings: ("wide_in",),
    )
)
