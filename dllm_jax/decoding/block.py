"""Block diffusion: denoise a block, store its keys and values, go on to the next.

Decoding of SDAR (specs, SDAR 1.1) and of every block-causal family with logits in place.
Exact: a finished block depends on itself and on earlier blocks only, so the cache gives
the same numbers as recomputing everything.

A finished block must be run once more on its final tokens to be stored. With `fold`
that pass also carries the first denoising step of the next block, in the same row: one
forward a block less, and the block after the last is never stored at all.

The order of forwards is the same whatever a denoising step does with its logits, so
other decoders of cached blocks reuse `prefill` and `advance`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import append, cache_slots
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import canvas
from dllm_jax.decoding.base import (
    DecodeInputs,
    Decoder,
    DecodeState,
    ModelFns,
    SamplingSettings,
    check_at_least,
    check_choices,
    register,
    resolve_sampling,
    setting,
)
from kernels_pallas import TokenFields

STRATEGIES = (
    "low_confidence_dynamic",
    "low_confidence_static",
    "sequential",
    "entropy_bounded",
    "random",
    "low_confidence_dynamic_leftmost",
    "entropy_bounded_script",
)

# (fns, settings, state, the open block's slots [B, T], its hidden states [B, T, D], bool
# [B] which rows denoise) -> state, bool [B] whether the block will change no more, and
# bool [B] whether the row has all it returns
Denoise = Callable[
    [ModelFns, Any, DecodeState, jax.Array, jax.Array, jax.Array],
    tuple[DecodeState, jax.Array, jax.Array],
]

# (positions [B, T], block length, valid [B, T]) -> fields
Layout = Callable[..., TokenFields]


@struct.dataclass
class BlockSettings(SamplingSettings):
    """Settings of the `block` decoder."""

    block_length: int | None = setting(
        None,
        "tokens of a block; the model's own if not given",
        aliases=("block_size",),
        kind=int,
    )
    denoising_steps: int | None = setting(
        None,
        "steps over which a block is spread; block_length if not given",
        aliases=("steps_per_block",),
        traced=True,
        kind=int,
    )
    remasking_strategy: str = setting(
        "low_confidence_dynamic",
        "which slots a step unmasks",
        choices=STRATEGIES,
        aliases=("remasking", "strategy"),
    )
    threshold: float = setting(
        0.9,
        "confidence above which (>) the dynamic strategies unmask at once",
        traced=True,
        aliases=("confidence_threshold", "dynamic_threshold"),
    )
    eb_threshold: float = setting(
        0.35,
        "entropy_bounded: nats that one step may unmask",
        traced=True,
    )
    fold: bool = setting(
        True, "store a finished block in the next block's first forward (exact)"
    )
    early_stop: bool = setting(
        True, "end a row as soon as all it returns is decided (same tokens)"
    )


def resolve(settings: BlockSettings, config: ModelConfig) -> BlockSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    if config.attention != "block_causal" or config.logit_alignment != "same":
        raise ValueError(
            f"this decoder needs block-causal attention and logits in place; the model "
            f"has attention={config.attention!r}, "
            f"logit_alignment={config.logit_alignment!r}."
        )
    if settings.block_length is None:
        settings = settings.replace(block_length=config.block_length)
    check_at_least(settings, block_length=1)
    if settings.block_length > config.max_positions:
        raise ValueError(
            f"block_length={settings.block_length} exceeds the model's "
            f"{config.max_positions} positions."
        )
    if settings.denoising_steps is None:
        settings = settings.replace(denoising_steps=settings.block_length)
    check_choices(settings)
    check_at_least(settings, denoising_steps=1, threshold=0.0, eb_threshold=0.0)
    return resolve_sampling(settings)


def init(
    fns: ModelFns, settings: BlockSettings, inputs: DecodeInputs, canvas_length: int
) -> DecodeState:
    """The state after `prefill`."""
    return prefill(fns, settings.block_length, inputs, canvas_length)[0]


def prefill(
    fns: ModelFns,
    length: int,
    inputs: DecodeInputs,
    canvas_length: int,
    layout: Layout = layouts.block_causal,
) -> tuple[DecodeState, jax.Array | None]:
    """Lays out the canvas and stores the prompt's whole blocks, in one forward.

    Args:
      fns: the model.
      length: static, of a block.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens, up to whole
        blocks. One block of slack is added.
      layout: of the stored tokens.

    Returns:
      The state, and the forward's hidden states `[B, W, D]` with W the whole blocks of P;
      None if there is none.
    """
    batch, prompt_slots = inputs.prompt.shape
    slots = canvas_length + length
    stored = inputs.prompt_length // length * length
    state = canvas.lay_out(fns, inputs, slots)
    state = state.replace(cursor=stored, cache=fns.init_cache(batch, cache_slots(slots)))
    # Only whole blocks are stored, so a prompt shorter than a block needs no forward.
    width = prompt_slots // length * length
    if not width:
        return state, None
    row = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    fields = layout(row, length, valid=row < stored[:, None])
    out = fns.forward(state.canvas[:, :width], fields, None)
    took_part = (stored > 0) & ~state.done
    state = state.replace(
        cache=append(state.cache, out.k, out.v, fields, stored),
        forwards=state.forwards.add(jnp.where(took_part, stored, 0), prefill=took_part),
    )
    return state, out.hidden


def choose(
    settings: BlockSettings,
    proposal: sampling.Proposal,
    masked: jax.Array,
    step: jax.Array,
    rng_keys: jax.Array,
) -> jax.Array:
    """The slots that a step unmasks: bool `[B, T]`. The keys are consumed."""
    remaining = jnp.sum(masked, axis=-1, dtype=jnp.int32)
    quota = unmasking.linear_quota(step, masked.shape[-1], settings.denoising_steps)
    # The published script fills its quota from decided slots and overwrites them.
    quota = jnp.minimum(quota, remaining)
    return fill_quota(settings, proposal, masked, quota, rng_keys)


def fill_quota(
    settings: BlockSettings,
    proposal: sampling.Proposal,
    masked: jax.Array,
    quota: jax.Array,
    rng_keys: jax.Array | None = None,
) -> jax.Array:
    """The slots that a step unmasks which owes `quota`, int32 `[B]`: bool `[B, T]`.

    The keys are consumed; only strategy random needs them.
    """
    strategy = settings.remasking_strategy
    confidence = proposal.confidence
    if strategy in ("sequential", "low_confidence_static", "random"):
        return unmasking.top_count(preference(settings, proposal, rng_keys), masked, quota)
    if strategy == "entropy_bounded":
        return unmasking.entropy_bounded(proposal.entropy, masked, settings.eb_threshold)
    if strategy == "entropy_bounded_script":
        return unmasking.entropy_bounded_script(confidence, masked, settings.eb_threshold)
    if strategy == "low_confidence_dynamic":
        otherwise = unmasking.top_count(confidence, masked, quota)
    else:  # as JetEngine falls back
        otherwise = unmasking.leftmost(masked, quota)
    return unmasking.above_threshold(
        confidence, masked, settings.threshold, otherwise, quota
    )


def preference(
    settings: BlockSettings, proposal: sampling.Proposal, rng_keys: jax.Array | None = None
) -> jax.Array:
    """By what a strategy ranks the slots that it may unmask: float32 `[B, T]`.

    The keys are consumed; only strategy random needs them.
    """
    strategy, confidence = settings.remasking_strategy, proposal.confidence
    if strategy == "sequential":
        slot = jnp.arange(confidence.shape[-1], dtype=confidence.dtype)
        return jnp.broadcast_to(-slot, confidence.shape)
    if strategy == "random":
        shape = confidence.shape[1:]
        return jax.vmap(lambda key: jax.random.uniform(key, shape))(rng_keys)
    return -proposal.entropy if strategy == "entropy_bounded" else confidence


def answered(
    fns: ModelFns, state: DecodeState, index: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Whether a row has all that it returns: bool `[B]`.

    That is every slot up to its first stop id, or else its last slot.

    Args:
      fns: the model.
      state: its `prompt_length`, `end` and `stop_ids` count.
      index: int32 `[B, T]`, slots in order; all before the first of them are decided and
        hold no stop id.
      tokens: int32 `[B, T]`, what they hold.
    """
    is_stop = jnp.any(tokens[..., None] == state.stop_ids, axis=-1)
    is_stop &= index >= state.prompt_length[:, None]
    beyond = index[:, -1] + 1

    def first(slots):
        return jnp.min(jnp.where(slots, index, beyond[:, None]), axis=-1)

    first_stop, first_mask = first(is_stop), first(tokens == fns.config.mask_id)
    return (first_stop < first_mask) | (state.end <= first_mask)


def _denoise(
    fns: ModelFns,
    settings: BlockSettings,
    state: DecodeState,
    index: jax.Array,
    hidden: jax.Array,
    rows: jax.Array,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Unmasks slots of the open block; see `Denoise`."""
    block = canvas.read(state.canvas, index)
    masked = (block == fns.config.mask_id) & rows[:, None]
    token_keys, choice_keys = canvas.keys_of_state(
        state.rng_key, state.cursor, jnp.sum(masked, axis=-1, dtype=jnp.int32)
    )
    proposal = canvas.propose_with_keys(fns, settings, hidden, token_keys)
    chosen = choose(settings, proposal, masked, state.step, choice_keys)
    state, block = canvas.unmask(state, state.cursor, index, proposal, chosen)
    complete = ~jnp.any(block == fns.config.mask_id, axis=-1)
    enough = answered(fns, state, index, block)
    if not settings.early_stop:
        enough &= complete
    return state.replace(step=state.step + rows.astype(jnp.int32)), complete, enough


def step(fns: ModelFns, settings: BlockSettings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row denoises its open block or stores it."""
    return advance(fns, settings, state, _denoise)


def advance(
    fns: ModelFns,
    settings: Any,
    state: DecodeState,
    denoise: Denoise,
    appended: canvas.Appended | None = None,
) -> DecodeState:
    """One forward of the batch, whose logits `denoise` uses.

    Args:
      fns: the model.
      settings: with `block_length`, `fold`, `early_stop` and what `denoise` needs.
      state: before the forward. With `fold`, a block waits to be stored before the
        cursor, without it at the cursor.
      denoise: one denoising step.
      appended: U tokens behind the open block, or None; `denoise` then gets hidden states
        `[B, T + U, D]`. They are never stored, and `denoise` counts them.
    """
    one_forward = _step_folded if settings.fold else _step_unfolded
    return one_forward(fns, settings, state, denoise, appended)


def _step_unfolded(fns, settings, state: DecodeState, denoise, appended) -> DecodeState:
    length = settings.block_length
    index = state.cursor[:, None] + jnp.arange(length, dtype=jnp.int32)
    storing, denoising = state.pending & ~state.done, ~state.pending & ~state.done
    fields = layouts.block_causal(index, length)
    out = fns.forward(*canvas.row_of(state, index, fields, appended), state.cache)
    kept = jnp.where(storing, length, 0)
    k, v = out.k[..., :length, :], out.v[..., :length, :]
    state = state.replace(cache=append(state.cache, k, v, fields, kept))
    state, complete, enough = denoise(fns, settings, state, index, out.hidden, denoising)
    # Without early stop a row ends after its last block is stored, as in the reference.
    ends = enough if settings.early_stop else enough & storing
    return state.replace(
        cursor=state.cursor + kept,
        step=jnp.where(storing, 0, state.step),
        pending=denoising & complete & ~ends,
        done=state.done | ends,
        forwards=state.forwards.add(
            jnp.where(state.done, 0, length), denoise=denoising, commit=storing
        ),
    )


def _step_folded(fns, settings, state: DecodeState, denoise, appended) -> DecodeState:
    length = settings.block_length
    offsets = jnp.arange(-length, length, dtype=jnp.int32)
    both = state.cursor[:, None] + offsets  # the block before the cursor, and the open one
    index = both[:, length:]
    active = ~state.done
    storing = state.pending & active

    def store_and_denoise():
        position = jnp.maximum(both, 0)
        valid = storing[:, None] | (offsets >= 0)
        fields = layouts.block_causal(position, length, valid)
        out = fns.forward(*canvas.row_of(state, position, fields, appended), state.cache)
        k, v = out.k[..., :length, :], out.v[..., :length, :]
        return out.hidden[:, length:], k, v

    def only_denoise():
        fields = layouts.block_causal(index, length)
        out = fns.forward(*canvas.row_of(state, index, fields, appended), state.cache)
        return out.hidden, out.k[..., :length, :], out.v[..., :length, :]

    hidden, k, v = jax.lax.cond(jnp.any(storing), store_and_denoise, only_denoise)
    stored_fields = layouts.block_causal(both[:, :length], length)
    kept = jnp.where(storing, length, 0)
    state = state.replace(cache=append(state.cache, k, v, stored_fields, kept))
    state, complete, enough = denoise(fns, settings, state, index, hidden, active)
    moving = active & complete & ~enough
    return state.replace(
        cursor=state.cursor + jnp.where(moving, length, 0),
        step=jnp.where(moving, 0, state.step),
        pending=moving,
        done=state.done | enough,
        forwards=state.forwards.add(jnp.where(active, length, 0) + kept, denoise=active),
    )


register(
    Decoder(
        name="block",
        summary="block diffusion with an exact cache",
        settings=BlockSettings,
        resolve=resolve,
        init=init,
        step=step,
    )
)
