"""What decoders of bidirectional models share: the open block and what is predicted there.

A row's canvas is [prompt | slots to fill | padding], and its own length is exactly its
prompt and its new tokens: what lies behind is seen by nobody. The slots are filled block
by block, the later blocks in sight as masks. Given tokens may stand between them
(infilling): a block counts slots, and a block without a mask is passed over.

Exact decoding runs the whole canvas in every forward (`CACHES[0]`). Fast-dLLM's caches
(specs, LLaDA 5) run it once a block, keep keys and values as they are then, and run
less in the block's other forwards:

    prefix  keeps what lies before the block, runs the block and all behind it
    dual    keeps what lies around the block, runs the block alone

In bidirectional attention every key depends on every slot, so kept keys are stale as soon
as a slot is filled: both are approximations.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import refill
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import canvas
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeState,
    ModelFns,
    SamplingSettings,
    setting,
)

CACHES = ("none", "prefix", "dual")


def block_length_setting(default: int) -> Any:
    """The `block_length` of a decoder's settings."""
    return setting(
        default,
        "tokens of a block, counted from the prompt's end; 0 is all new tokens",
        aliases=("block_size",),
    )


def cache_setting(default: str) -> Any:
    """The `cache` of a decoder's settings."""
    return setting(
        default,
        "keys kept through a block: none (exact), prefix (approximate: what lies before "
        "the block), dual (approximate: what lies around it)",
        choices=CACHES,
    )


class Window(NamedTuple):
    """The slots that logits are computed for: the open block, and what fills it up."""

    index: jax.Array  # [B, W] int32
    inside: jax.Array  # [B, W] bool, slots of the row's open block
    masked: jax.Array  # [B, W] bool, those that a step may unmask
    size: jax.Array  # [B] int32, slots that were masked when the block was opened
    block_end: jax.Array  # [B] int32


def window_width(block_length: int, slots: int) -> int:
    """Slots of a window: a block's, or the whole canvas's where it is one block (0)."""
    return min(block_length or slots, slots)


def open_window(fns: ModelFns, block_length: int, state: DecodeState) -> Window:
    """The window of each row. Near the canvas's end it begins before the open block.

    Args:
      fns: the model.
      block_length: static; 0 makes all slots that are to be filled one block.
      state: before the step.
    """
    slots = state.canvas.shape[1]
    width = window_width(block_length, slots)
    start = jnp.minimum(state.cursor, slots - width)
    index = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    block_end = state.end
    if block_length:
        block_end = jnp.minimum(state.cursor + block_length, state.end)
    inside = (index >= state.cursor[:, None]) & (index < block_end[:, None])
    masked = inside & (canvas.read(state.canvas, index) == fns.config.mask_id)
    filled = inside & (canvas.read(state.unmask_forward, index) != UNDECIDED)
    size = jnp.sum(masked | filled, axis=-1, dtype=jnp.int32)
    return Window(index, inside, masked & ~state.done[:, None], size, block_end)


def _predicting(config: ModelConfig, index: jax.Array, first: jax.Array) -> jax.Array:
    """The slots whose hidden states predict the slots `index`, none before `first`.

    Shifted logits of slot p come from p - 1. What nothing precedes predicts itself: slot 0,
    and a slice's first slot, which the decoders have filled before.
    """
    shifted = config.logit_alignment == "shifted"
    return jnp.maximum(index - 1 if shifted else index, first)


def _gather(hidden: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(hidden, index[..., None], axis=1)


def run_canvas(fns: ModelFns, tokens: jax.Array, end: jax.Array) -> jax.Array:
    """Hidden states `[B, C, D]` of whole canvases, int32 `[B, C]` of lengths `[B]`."""
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    fields = layouts.bidirectional(position, valid=position < end[:, None])
    return fns.forward(tokens, fields, None).hidden


def predict(config: ModelConfig, hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Which of `hidden` `[B, C, D]` predict the slots int32 `[B, W]`: `[B, W, D]`."""
    return _gather(hidden, _predicting(config, index, jnp.int32(0)))


def look(
    fns: ModelFns,
    kind: str,
    state: DecodeState,
    window: Window,
    appended: canvas.Appended | None = None,
) -> tuple[jax.Array, DecodeState]:
    """Hidden states that predict the window's slots, from one forward of the batch.

    A row that opens a block runs its whole canvas and keeps it; the others run a part of
    theirs against what they kept, in the same forward. How many tokens a row has in it is
    what the neediest row needs, rounded up to one of a few widths.

    Args:
      fns: the model.
      kind: static, one of `CACHES`.
      state: before the step; its `step` is 0 where a block is opened.
      window: the open block.
      appended: U tokens behind the row, or None. They are never kept.

    Returns:
      `[B, W, D]`, or `[B, W + U, D]` with those of what is appended, and the state with
      its cache and `forwards.positions` brought up.
    """
    active, slots = ~state.done, state.canvas.shape[1]
    extra = 0
    if appended is not None:
        extra = jnp.sum(appended.valid, axis=-1, dtype=jnp.int32)

    def run_row(position, valid, cache, wanted):
        """What predicts the window, what is appended, and fresh keys of the row."""
        width = position.shape[1]
        fields = layouts.bidirectional(position, valid)
        tokens, fields = canvas.row_of(state, position, fields, appended)
        out = fns.forward(tokens, fields, cache)
        hidden = _gather(out.hidden, jnp.minimum(wanted, width - 1))
        hidden = jnp.concatenate([hidden, out.hidden[:, width:]], axis=1)
        return hidden, out.k[..., :width, :], out.v[..., :width, :]

    if kind == "none":
        position = jnp.arange(slots, dtype=jnp.int32)
        position = jnp.broadcast_to(position, state.canvas.shape)
        valid = position < state.end[:, None]
        wanted = _predicting(fns.config, window.index, jnp.int32(0))
        hidden, _, _ = run_row(position, valid, None, wanted)
        return hidden, _count(state, jnp.where(active, state.end + extra, 0))
    opening = active & (state.step == 0)
    first = jnp.where(opening, 0, state.cursor)
    last = jnp.where(opening | (kind == "prefix"), state.end, window.block_end)
    needed = jnp.max(jnp.where(opening, slots, jnp.where(active, last - first, 0)))
    widths = _widths(kind, window.index.shape[1], slots)
    wanted = _predicting(fns.config, window.index, first[:, None]) - first[:, None]
    cache = state.cache.replace(length=jnp.where(opening, 0, state.cache.length))

    def run(width: int):
        position = first[:, None] + jnp.arange(width, dtype=jnp.int32)
        valid = position < last[:, None]
        position = jnp.minimum(position, slots - 1)
        hidden, k, v = run_row(position, valid, cache, wanted)
        if width < slots:
            return hidden, state.cache
        kept = position < state.cursor[:, None]
        if kind == "dual":
            kept |= position >= window.block_end[:, None]
        fields = layouts.bidirectional(position, valid & kept)
        return hidden, refill(state.cache, k, v, fields, opening, state.end)

    which = sum((needed > width).astype(jnp.int32) for width in widths[:-1])
    runs = [lambda width=width: run(width) for width in widths]
    hidden, cache = jax.lax.switch(which, runs)
    state = _count(state, jnp.where(active, last - first + extra, 0))
    return hidden, state.replace(cache=cache)


def _widths(kind: str, block: int, slots: int) -> list[int]:
    """How many tokens a row may have in a forward, ascending; each is a compiled branch."""
    widths = [block]
    while kind == "prefix" and 2 * widths[-1] < slots:
        widths.append(2 * widths[-1])
    return [*(width for width in widths if width < slots), slots]


def _count(state: DecodeState, positions: jax.Array) -> DecodeState:
    return state.replace(forwards=state.forwards.add(positions))


def settle(
    fns: ModelFns, state: DecodeState, block_end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is left to do after a step.

    Args:
      fns: the model.
      state: after the step's tokens were written.
      block_end: int32 `[B]`, of the open block.

    Returns:
      int32 `[B]`, the first slot from the cursor on that is still masked, `end` if there
      is none; and bool `[B]`, whether all that the row returns is decided: every slot up
      to its first stop id, or else its last slot.
    """
    slot = jnp.arange(state.canvas.shape[1], dtype=jnp.int32)
    end = state.end[:, None]
    is_stop = jnp.any(state.canvas[..., None] == state.stop_ids, axis=-1)
    is_stop &= (slot >= state.prompt_length[:, None]) & (slot < block_end[:, None])
    is_mask = (state.canvas == fns.config.mask_id) & (slot >= state.cursor[:, None])

    def first(slots):
        return jnp.min(jnp.where(slots & (slot < end), slot, end), axis=-1)

    first_mask = first(is_mask)
    return first_mask, first_mask > jnp.minimum(first(is_stop), state.end - 1)


def close(
    fns: ModelFns,
    state: DecodeState,
    window: Window,
    steps_done: jax.Array,
    *,
    early_stop: bool = True,
    ready: jax.Array | bool = True,
    revocable: bool = False,
) -> DecodeState:
    """The state after a denoising forward: rows go on in their block, open one, or end.

    Args:
      fns: the model.
      state: after the step's tokens were written.
      window: as before the step.
      steps_done: int32 `[B]`, steps of the block.
      early_stop: static; ends a row as soon as all it returns is decided, not only with
        its last block.
      ready: bool `[B]`, whether a block without masks may be left; it is run again if not.
      revocable: static; tokens of the open block may still be taken back.
    """
    active = ~state.done
    first_mask, enough = settle(fns, state, window.block_end)
    over = (first_mask >= window.block_end) & ready
    if not early_stop:
        enough = over & (first_mask >= state.end)
    if revocable:
        enough &= over
    moving = active & over & ~enough
    return state.replace(
        cursor=jnp.where(moving, first_mask, state.cursor),
        step=jnp.where(moving, 0, jnp.where(active, steps_done, state.step)),
        done=state.done | enough,
        forwards=state.forwards.add(jnp.zeros_like(state.step), denoise=active),
    )


def check_bidirectional(config: ModelConfig) -> None:
    """Raises ValueError for a model of another attention."""
    if config.attention != "bidirectional":
        raise ValueError(
            "this decoder needs bidirectional attention; the model has "
            f"attention={config.attention!r}."
        )


def num_steps(denoising_steps: jax.Array, window: Window) -> jax.Array:
    """Steps over which each block is spread, int32 `[B]`; one a slot if 0 are wanted."""
    return jnp.where(denoising_steps > 0, denoising_steps, jnp.maximum(window.size, 1))


def even_quota(denoising_steps: jax.Array, step: jax.Array, window: Window) -> jax.Array:
    """How many slots step number `step` int32 `[B]` unmasks, evenly spread: int32 `[B]`.

    With more steps than slots the last would have none, but find nothing masked.
    """
    steps = num_steps(denoising_steps, window)
    return unmasking.linear_quota(step, window.size, steps)


def slot_keys(state: DecodeState, window: Window, number: jax.Array) -> jax.Array:
    """A key for every slot of the window: keys `[B, W]`, for one draw.

    They depend on the block and the step's `number` int32 `[B]`, not on the forward:
    forwards that are left out change no draw.
    """
    keys = fold_in(fold_in(state.rng_key, state.cursor), number)
    return fold_in(keys, window.index)


def fold_in(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """One key a row `[B]` for numbers `[B]`, or one a slot `[B, W]` for `[B, W]`."""
    fold = jax.random.fold_in
    if numbers.ndim == 2:
        fold = jax.vmap(fold, in_axes=(None, 0))
    return jax.vmap(fold)(keys, numbers)


def draw_each(draw, keys: jax.Array) -> jax.Array:
    """A float32 for each key `[B, W]`, whatever the width of the canvas."""
    return jax.vmap(jax.vmap(lambda key: draw(key, (), jnp.float32)))(keys)


def propose_each(
    settings: SamplingSettings,
    config: ModelConfig,
    logits: jax.Array,
    keys: jax.Array,
    knobs: sampling.SamplingKnobs,
) -> sampling.Proposal:
    """`sampling.propose` with a key a slot: a slot draws the same on every canvas.

    Args:
      settings: whether to sample, and whether to filter.
      config: for its mask id.
      logits: float32 `[B, W, V]`.
      keys: keys `[B, W]`, consumed.
      knobs: traced sampling values.
    """
    if not settings.sample:
        return sampling.propose(logits, config.mask_id)
    alone = logits.reshape(-1, 1, logits.shape[-1])
    each = sampling.propose(
        alone, config.mask_id, keys.reshape(-1), knobs, settings.filtered
    )
    return sampling.Proposal(*(x.reshape(keys.shape) for x in each))


def probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Probability of `token` `[B, W]` under `logits` `[B, W, V]`, float32."""
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1))


def propose_plain(
    settings: SamplingSettings, config: ModelConfig, logits: jax.Array, keys: jax.Array
) -> sampling.Proposal:
    """Tokens as sampled; confidence and entropy before temperature and filters.

    Args:
      settings: resolved.
      config: for its mask id.
      logits: float32 `[B, W, V]`.
      keys: keys `[B, W]`, consumed.
    """
    proposal = sampling.propose(logits, config.mask_id)
    if not settings.sample:
        return proposal
    token = propose_each(settings, config, logits, keys, settings.knobs).token
    return proposal._replace(token=token, confidence=probability(logits, token))


def propose_from_hidden(
    fns: ModelFns, settings: SamplingSettings, hidden: jax.Array, keys: jax.Array
) -> sampling.Proposal:
    """`propose_plain` for `[B, W, D]`; greedily by the model's own head, if it has one."""
    if fns.propose is None or settings.sample:
        return propose_plain(settings, fns.config, fns.logits(hidden), keys)
    return fns.propose(hidden)
