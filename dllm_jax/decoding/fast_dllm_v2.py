"""Fast-dLLM v2: blocks of sub-blocks from left to right, logits shifted by one.

Specs, Fast-dLLM v2 section 3.1. The hidden state of slot p predicts the token of slot
p + 1, so a block's first slot cannot be predicted from within: the forward that stores
the block before it (or the prompt) leaves that token behind, greedily, as an ordinary
autoregressive model would. It is called the anchor here. The rest of the block is denoised
one sub-block after the other, the slots behind still masks.

Each row wants one of three forwards at a time:

    window     the whole open block; unmasks slots of the open sub-block
    sub-block  only the open sub-block (`use_block_cache`)
    commit     the finished block, which is stored; its last logits give the next anchor

`use_block_cache` is an approximation: a sub-block sees keys and values of the rest of its
block that may be stale. They need no memory of their own, for they lie in the cache just
behind a row's length, where a window forward leaves them, unseen by all other forwards. A
sub-block forward looks at the cache as if it were a block longer, with the keys of its
own slots hidden, and then replaces those.

A batch runs as wide as its most demanding row. In a window-wide forward a row that wants
its sub-block alone has the other tokens of its window as padding: what it computes does
not depend on its neighbours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import KVCache, append
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import block, canvas
from dllm_jax.decoding.base import (
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
from kernels_pallas import NEVER, pack_key_fields, unpack_key_fields

_SUB_BLOCK = 8  # as published
_ANCHOR = 1  # of RULES
RULES = ("threshold", "anchor")


@struct.dataclass
class FastDLLMv2Settings(SamplingSettings):
    """Settings of the `fast_dllm_v2` decoder."""

    block_length: int | None = setting(
        None,
        "tokens of a block; the model's own if not given",
        aliases=("block_size",),
        kind=int,
    )
    small_block_size: int | None = setting(
        None,
        "tokens of a sub-block, a divisor of block_length; 8 if not given",
        aliases=("sub_block_length",),
        kind=int,
    )
    threshold: float = setting(
        0.9,
        "confidence above which (>) slots are unmasked at once; 1 is one slot a step",
        traced=True,
        aliases=("confidence_threshold",),
    )
    use_block_cache: bool = setting(
        False, "run a sub-block alone where possible (approximate: stale keys)"
    )


def resolve(settings: FastDLLMv2Settings, config: ModelConfig) -> FastDLLMv2Settings:
    """Fills in what was not given and checks everything; raises ValueError."""
    if config.attention != "block_causal" or config.logit_alignment != "shifted":
        raise ValueError(
            f"this decoder needs block-causal attention and shifted logits; the model "
            f"has attention={config.attention!r}, "
            f"logit_alignment={config.logit_alignment!r}."
        )
    length, small = settings.block_length, settings.small_block_size
    length = config.block_length if length is None else length
    small = min(_SUB_BLOCK, length) if small is None else small
    settings = settings.replace(block_length=length, small_block_size=small)
    check_at_least(settings, block_length=1, small_block_size=1, threshold=0.0)
    if length % small:
        raise ValueError(
            f"small_block_size={small} must be a divisor of block_length={length}."
        )
    return resolve_sampling(settings)


class Wanted(NamedTuple):
    """The forward that each row takes part in next, and where its open sub-block is."""

    commit: jax.Array  # [B] bool
    window: jax.Array  # [B] bool
    sub_block: jax.Array  # [B] bool
    offset: jax.Array  # [B] int32, of the open sub-block in the open block


def wanted(fns: ModelFns, settings: FastDLLMv2Settings, state: DecodeState) -> Wanted:
    """What each row wants to run.

    With the block cache, a sub-block needs a window forward as long as its first slot is
    masked, because only the slot before can predict that one; and so does a block's first
    step, which finds no keys of its window in the cache.
    """
    length, small = settings.block_length, settings.small_block_size
    index = state.cursor[:, None] + jnp.arange(length, dtype=jnp.int32)
    masked = canvas.read(state.canvas, index) == fns.config.mask_id
    first_mask = jnp.argmax(masked, axis=-1).astype(jnp.int32)
    offset = first_mask // small * small
    denoising = jnp.any(masked, axis=-1) & ~state.done
    fresh = (first_mask == offset) | (state.step == 0)
    sub_block = denoising & ~fresh & settings.use_block_cache
    commit = ~jnp.any(masked, axis=-1) & ~state.done
    return Wanted(commit, denoising & ~sub_block, sub_block, offset)


def seen_by_sub_block(
    cache: KVCache, settings: FastDLLMv2Settings, rows: jax.Array, offset: jax.Array
) -> KVCache:
    """The cache as a sub-block's forward looks at it, for reading only.

    Args:
      cache: with the keys of the open block behind each row's length.
      settings: resolved.
      rows: bool `[B]`, rows that run a sub-block; the others see the cache as it is.
      offset: int32 `[B]`, of the sub-block in its block.
    """
    fields = unpack_key_fields(cache.fields)
    place = jnp.arange(fields.position.shape[1], dtype=jnp.int32)
    place = place - (cache.length + offset)[:, None]
    own = rows[:, None] & (place >= 0) & (place < settings.small_block_size)
    fields = fields._replace(visible_from=jnp.where(own, NEVER, fields.visible_from))
    length = cache.length + jnp.where(rows, settings.block_length, 0)
    return cache.replace(fields=pack_key_fields(fields), length=length)


def _behind(buffer: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """`length` slots of `[L, B, K, S, H]` from each row's own start."""

    def row(x, first):  # [L, K, S, H]
        return jax.lax.dynamic_slice_in_dim(x, first, length, axis=2)

    return jax.vmap(row, in_axes=(1, 0), out_axes=1)(buffer, start)


def _put(window: jax.Array, fresh: jax.Array, offset: jax.Array) -> jax.Array:
    """A window `[L, B, K, T, H]` with fresh slots at each row's own offset."""

    def row(x, new, first):  # [L, K, T, H]
        return jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=2)

    return jax.vmap(row, in_axes=(1, 1, 0), out_axes=1)(window, fresh, offset)


def _forward(
    fns: ModelFns, settings: FastDLLMv2Settings, state: DecodeState, want: Wanted
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One forward of the batch.

    Returns:
      The hidden states that predict the open sub-block, `[B, S, D]` with S its length
      (of a row that commits: that predict the anchor, S times), and keys and values of
      the window, `[L, B, K, T, H]` each.
    """
    length, small = settings.block_length, settings.small_block_size
    cache = state.cache
    places = jnp.arange(length, dtype=jnp.int32)
    # The slot before predicts a slot. There is none before the first token of what the
    # row runs, but that token is known.
    first = jnp.where(want.sub_block, want.offset, 0)[:, None]
    before = jnp.maximum(want.offset[:, None] + places[:small] - 1, first)
    before = jnp.where(want.commit[:, None], length - 1, before)

    def predictors(hidden, place):
        return jnp.take_along_axis(hidden, place[..., None], axis=1)

    def run(start, width, seen, valid=None):
        index = start[:, None] + places[:width]
        fields = layouts.block_causal(index, length, valid)
        return fns.forward(canvas.read(state.canvas, index), fields, seen)

    if not settings.use_block_cache:
        out = run(state.cursor, length, cache)
        return predictors(out.hidden, before), out.k, out.v
    if cache.k_scale is not None:
        raise ValueError(
            "use_block_cache=True reads keys back from the cache: it needs kv_dtype='auto' "
            "(it is 'int8')."
        )

    seen = seen_by_sub_block(cache, settings, want.sub_block, want.offset)
    stale_k = _behind(cache.k, cache.length, length)
    stale_v = _behind(cache.v, cache.length, length)

    def whole_window():
        place = places - want.offset[:, None]
        own = ~want.sub_block[:, None] | ((place >= 0) & (place < small))
        out = run(state.cursor, length, seen, own)
        own = own[None, :, None, :, None]
        k = jnp.where(own, out.k.astype(stale_k.dtype), stale_k)
        v = jnp.where(own, out.v.astype(stale_v.dtype), stale_v)
        return predictors(out.hidden, before), k, v

    def sub_block_alone():
        out = run(state.cursor + want.offset, small, seen)
        k = _put(stale_k, out.k.astype(stale_k.dtype), want.offset)
        v = _put(stale_v, out.v.astype(stale_v.dtype), want.offset)
        # Of rows that are done anything will do.
        place = jnp.clip(before - want.offset[:, None], 0, small - 1)
        return predictors(out.hidden, place), k, v

    wide = jnp.any(want.window | want.commit)
    return jax.lax.cond(wide, whole_window, sub_block_alone)


def write_anchor(
    fns: ModelFns, state: DecodeState, logits: jax.Array, slot: jax.Array, rows: jax.Array
) -> DecodeState:
    """Writes the token that `logits` `[B, 1, V]` predict at `slot` `[B]` in `rows`.

    Always the most probable one, as published, even where other tokens are sampled. Its
    recorded forward is the denoising forward that follows.
    """
    proposal = sampling.propose(logits, fns.config.mask_id)
    return canvas.unmask(state, slot, slot[:, None], proposal, rows[:, None], _ANCHOR)[0]


def init(
    fns: ModelFns, settings: FastDLLMv2Settings, inputs: DecodeInputs, canvas_length: int
) -> DecodeState:
    """The state after `prefill`."""
    return prefill(fns, settings.block_length, inputs, canvas_length)


def prefill(
    fns: ModelFns,
    length: int,
    inputs: DecodeInputs,
    canvas_length: int,
    layout: block.Layout = layouts.block_causal,
) -> DecodeState:
    """Stores the prompt's whole blocks and, if that is all of it, predicts an anchor.

    The published code forgets a prompt of exactly one block; here it is like any other.

    Args:
      fns: the model.
      length: static, of a block.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens, up to whole
        blocks. One block of slack is added.
      layout: of the stored tokens.
    """
    state, hidden = block.prefill(fns, length, inputs, canvas_length, layout)
    if hidden is None:
        return state
    rows = (state.cursor > 0) & (state.cursor == state.prompt_length) & ~state.done
    last = jnp.maximum(state.cursor - 1, 0)[:, None, None]
    logits = fns.logits(jnp.take_along_axis(hidden, last, axis=1))
    state = write_anchor(fns, state, logits, state.cursor, rows)
    index = state.cursor[:, None]
    ends = block.answered(fns, state, index, canvas.read(state.canvas, index))
    return state.replace(done=state.done | (rows & ends))


def step(fns: ModelFns, settings: FastDLLMv2Settings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row denoises its open sub-block or stores its block.

    A row ends as soon as all it returns is decided, also inside a block.
    """
    length, small = settings.block_length, settings.small_block_size
    want = wanted(fns, settings, state)
    hidden, k, v = _forward(fns, settings, state, want)
    index = state.cursor[:, None] + jnp.arange(length + 1, dtype=jnp.int32)
    fields = layouts.block_causal(index[:, :length], length)
    kept = jnp.where(want.commit, length, 0)
    # What is not kept stays behind the row's length: the block cache.
    state = state.replace(cache=append(state.cache, k, v, fields, kept))

    start = state.cursor + want.offset
    slots = start[:, None] + jnp.arange(small, dtype=jnp.int32)
    denoising = want.window | want.sub_block
    masked = canvas.read(state.canvas, slots) == fns.config.mask_id
    masked &= denoising[:, None]
    logits = fns.logits(hidden)
    proposal, _ = canvas.propose(fns, settings, state, logits)
    one = jnp.ones_like(start)
    best = unmasking.top_count(proposal.confidence, masked, one)
    chosen = unmasking.above_threshold(
        proposal.confidence, masked, settings.threshold, best, one
    )
    state, _ = canvas.unmask(state, start, slots, proposal, chosen)
    state = write_anchor(fns, state, logits[:, :1], state.cursor + length, want.commit)

    tokens = canvas.read(state.canvas, index)
    enough = block.answered(fns, state, index, tokens)
    ran = jnp.where(want.sub_block, small, length)
    return state.replace(
        cursor=state.cursor + kept,
        step=jnp.where(want.commit, 0, state.step + denoising.astype(jnp.int32)),
        done=state.done | enough,
        forwards=state.forwards.add(
            jnp.where(state.done, 0, ran), denoise=denoising, commit=want.commit
        ),
    )


def cache_label(settings: FastDLLMv2Settings) -> str:
    """What its caches do to the result."""
    return "approximate (block cache)" if settings.use_block_cache else "exact"


register(
    Decoder(
        name="fast_dllm_v2",
        summary="Fast-dLLM v2: sub-blocks, anchors from shifted logits",
        settings=FastDLLMv2Settings,
        resolve=resolve,
        init=init,
        step=step,
        cache=cache_label,
        rules=lambda settings: RULES,
    )
)
