"""Block diffusion: denoise a block, store its keys and values, go on to the next.

Decoding of SDAR (specs, SDAR 1.1) and of every block-causal family with logits in place.
Exact: a finished block depends on itself and on earlier blocks only, so the cache gives
the same numbers as recomputing everything.

A finished block must be run once more on its final tokens to be stored. With `fold`
that pass also carries the first denoising step of the next block, in the same row: one
forward a block less, and the block after the last is never stored at all.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, sampling, unmasking
from dllm_jax.cache import append, cache_slots
from dllm_jax.config import ModelConfig
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeInputs,
    Decoder,
    DecodeState,
    Forwards,
    ModelFns,
    check_at_least,
    check_choices,
    register,
    setting,
)

STRATEGIES = (
    "low_confidence_dynamic",
    "low_confidence_static",
    "sequential",
    "entropy_bounded",
    "random",
    "low_confidence_dynamic_leftmost",
    "entropy_bounded_script",
)


@struct.dataclass
class BlockSettings:
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
    temperature: float = setting(
        0.0, "0 is greedy, otherwise logits are divided by it", traced=True
    )
    top_k: int = setting(0, "sample among the k most probable; 0 is off", traced=True)
    top_p: float = setting(
        1.0, "sample among the most probable that sum to p; 1 is off", traced=True
    )
    fold: bool = setting(
        True, "store a finished block in the next block's first forward (exact)"
    )
    early_stop: bool = setting(
        True, "end a row as soon as all it returns is decided (same tokens)"
    )
    # Derived by `resolve`: what a compiled program must know of the traced values.
    sample: bool = struct.field(pytree_node=False, default=False)
    filtered: bool = struct.field(pytree_node=False, default=False)


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
    if settings.denoising_steps is None:
        settings = settings.replace(denoising_steps=settings.block_length)
    check_choices(settings)
    check_at_least(
        settings,
        denoising_steps=1,
        threshold=0.0,
        eb_threshold=0.0,
        temperature=0.0,
        top_k=0,
    )
    if not 0.0 < settings.top_p <= 1.0:
        raise ValueError(f"top_p={settings.top_p} must be in (0, 1].")
    filtered = settings.top_k > 0 or settings.top_p < 1.0
    sample = settings.temperature > 0.0
    if filtered and not sample:
        raise ValueError(
            f"top_k={settings.top_k} and top_p={settings.top_p} filter what is sampled; "
            f"they need temperature > 0 (it is {settings.temperature})."
        )
    return settings.replace(sample=sample, filtered=filtered)


def init(
    fns: ModelFns, settings: BlockSettings, inputs: DecodeInputs, canvas_length: int
) -> DecodeState:
    """Lays out the canvas and stores the prompt's whole blocks, in one forward.

    Args:
      fns: the model.
      settings: resolved.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens, up to whole
        blocks. One block of slack is added.
    """
    batch, prompt_slots = inputs.prompt.shape
    length = settings.block_length
    slots = canvas_length + length
    position = jnp.arange(slots, dtype=jnp.int32)
    prompt = jnp.pad(inputs.prompt, ((0, 0), (0, slots - prompt_slots)))
    canvas = jnp.where(position < inputs.prompt_length[:, None], prompt, fns.config.mask_id)
    stored = inputs.prompt_length // length * length
    cache = fns.init_cache(batch, cache_slots(slots))
    forwards = Forwards.zeros(batch)
    done = inputs.max_new_tokens == 0
    # Only whole blocks are stored, so a prompt shorter than a block needs no forward.
    width = prompt_slots // length * length
    if width:
        row = jnp.broadcast_to(position[:width], (batch, width))
        fields = layouts.block_causal(row, length, valid=row < stored[:, None])
        out = fns.forward(canvas[:, :width], fields, None)
        cache = append(cache, out.k, out.v, fields, stored)
        took_part = (stored > 0) & ~done
        forwards = forwards.add(jnp.where(took_part, stored, 0), prefill=took_part)
    return DecodeState(
        canvas=canvas,
        prompt_length=inputs.prompt_length,
        end=inputs.prompt_length + inputs.max_new_tokens,
        cursor=stored,
        step=jnp.zeros((batch,), jnp.int32),
        pending=jnp.zeros((batch,), bool),
        done=done,
        rng_key=inputs.rng_key,
        stop_ids=inputs.stop_ids,
        cache=cache,
        forwards=forwards,
        confidence=jnp.zeros(canvas.shape, jnp.float32),
        unmask_forward=jnp.full(canvas.shape, UNDECIDED, jnp.int32),
    )


def choose(
    settings: BlockSettings,
    proposal: sampling.Proposal,
    masked: jax.Array,
    step: jax.Array,
    rng_keys: jax.Array,
) -> jax.Array:
    """The slots that a step unmasks: bool `[B, T]`. The keys are consumed."""
    strategy = settings.remasking_strategy
    confidence = proposal.confidence
    remaining = jnp.sum(masked, axis=-1, dtype=jnp.int32)
    quota = unmasking.linear_quota(step, masked.shape[-1], settings.denoising_steps)
    # The published script fills its quota from decided slots and overwrites them.
    quota = jnp.minimum(quota, remaining)
    if strategy == "sequential":
        return unmasking.leftmost(masked, quota)
    if strategy == "low_confidence_static":
        return unmasking.top_count(confidence, masked, quota)
    if strategy == "random":
        score = jax.vmap(lambda key: jax.random.uniform(key, masked.shape[1:]))(rng_keys)
        return unmasking.top_count(score, masked, quota)
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


def _read(canvas: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(canvas, index, axis=1)


def _write(canvas: jax.Array, start: jax.Array, values: jax.Array) -> jax.Array:
    return jax.vmap(
        lambda row, first, new: jax.lax.dynamic_update_slice(row, new, (first,))
    )(canvas, start, values)


def _unmask(
    settings: BlockSettings,
    fns: ModelFns,
    state: DecodeState,
    index: jax.Array,
    hidden: jax.Array,
    rows: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """One denoising step of the open block in `rows`; also returns the block's tokens."""
    block = _read(state.canvas, index)
    masked = (block == fns.config.mask_id) & rows[:, None]
    keys = jax.vmap(jax.random.fold_in)(state.rng_key, state.forwards.denoise)
    token_keys, choice_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    proposal = sampling.propose(
        fns.logits(hidden),
        fns.config.mask_id,
        token_keys if settings.sample else None,
        sampling.SamplingKnobs(settings.temperature, settings.top_k, settings.top_p),
        settings.filtered,
    )
    chosen = choose(settings, proposal, masked, state.step, choice_keys)
    block = jnp.where(chosen, proposal.token, block)
    confidence = jnp.where(chosen, proposal.confidence, _read(state.confidence, index))
    number = jnp.where(
        chosen, state.forwards.denoise[:, None], _read(state.unmask_forward, index)
    )
    start = state.cursor
    state = state.replace(
        canvas=_write(state.canvas, start, block),
        confidence=_write(state.confidence, start, confidence),
        unmask_forward=_write(state.unmask_forward, start, number),
        step=state.step + rows.astype(jnp.int32),
    )
    return state, block


def _settled(
    settings: BlockSettings, fns: ModelFns, state: DecodeState, index, block
) -> tuple[jax.Array, jax.Array]:
    """Whether the open block has no mask left, and whether the row has all it returns."""
    masked = block == fns.config.mask_id
    complete = ~jnp.any(masked, axis=-1)
    is_stop = jnp.any(block[..., None] == state.stop_ids, axis=-1)
    is_stop &= index >= state.prompt_length[:, None]
    beyond = jnp.iinfo(jnp.int32).max
    first_stop = jnp.min(jnp.where(is_stop, index, beyond), axis=-1)
    first_mask = jnp.min(jnp.where(masked, index, beyond), axis=-1)
    last_needed = jnp.minimum(first_stop, state.end - 1)
    block_end = index[:, -1] + 1
    if settings.early_stop:
        enough = jnp.minimum(first_mask, block_end) > last_needed
    else:
        enough = complete & (block_end > last_needed)
    return complete, enough


def step(fns: ModelFns, settings: BlockSettings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row denoises its open block or stores it."""
    advance = _step_folded if settings.fold else _step_unfolded
    return advance(fns, settings, state)


def _step_unfolded(fns, settings, state: DecodeState) -> DecodeState:
    length = settings.block_length
    index = state.cursor[:, None] + jnp.arange(length, dtype=jnp.int32)
    block = _read(state.canvas, index)
    complete = ~jnp.any(block == fns.config.mask_id, axis=-1)
    storing, denoising = complete & ~state.done, ~complete & ~state.done
    fields = layouts.block_causal(index, length)
    out = fns.forward(block, fields, state.cache)
    kept = jnp.where(storing, length, 0)
    state = state.replace(cache=append(state.cache, out.k, out.v, fields, kept))
    state, block = _unmask(settings, fns, state, index, out.hidden, denoising)
    complete, enough = _settled(settings, fns, state, index, block)
    # Without early stop a row ends after its last block is stored, as in the reference.
    ends = enough if settings.early_stop else enough & storing
    return state.replace(
        cursor=state.cursor + kept,
        step=jnp.where(storing, 0, state.step),
        done=state.done | ends,
        forwards=state.forwards.add(
            jnp.where(state.done, 0, length), denoise=denoising, commit=storing
        ),
    )


def _step_folded(fns, settings, state: DecodeState) -> DecodeState:
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
        out = fns.forward(_read(state.canvas, position), fields, state.cache)
        k, v = out.k[..., :length, :], out.v[..., :length, :]
        return out.hidden[:, length:], k, v

    def denoise():
        fields = layouts.block_causal(index, length)
        return fns.forward(_read(state.canvas, index), fields, state.cache)

    hidden, k, v = jax.lax.cond(
        jnp.any(storing), store_and_denoise, lambda: tuple(denoise())
    )
    stored_fields = layouts.block_causal(both[:, :length], length)
    kept = jnp.where(storing, length, 0)
    state = state.replace(cache=append(state.cache, k, v, stored_fields, kept))
    state, block = _unmask(settings, fns, state, index, hidden, active)
    complete, enough = _settled(settings, fns, state, index, block)
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
