"""Block diffusion that corrects itself: every step may also rewrite decided tokens.

Decoding of LLaDA2.1 (specs, LLaDA2 4.2). A step unmasks slots of the open block and, in
the same forward, replaces tokens of that block that the model would now choose otherwise
with more than `editing_threshold` of probability. A block without masks is looked at
again until a step changes nothing, `max_post_steps` times at most: edits can oscillate.
Then it is stored, and its tokens are final; prompts are never edited.

Exact, as `block` is: the same forwards over the same cache, with or without `fold`. The
mask token is never proposed, so no edit opens a slot again. (LLaDA2.0 does not edit: that
is decoder `block` with `low_confidence_dynamic`.)
"""

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import unmasking
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import block, canvas
from dllm_jax.decoding.base import (
    Decoder,
    DecodeState,
    ModelFns,
    SamplingSettings,
    check_at_least,
    register,
    resolve_sampling,
    setting,
)


@struct.dataclass
class EditSettings(SamplingSettings):
    """Settings of the `edit` decoder."""

    block_length: int | None = setting(
        None,
        "tokens of a block; the model's own if not given",
        aliases=("block_size",),
        kind=int,
    )
    threshold: float = setting(
        0.95,
        "confidence above which (>) a masked slot is unmasked at once",
        traced=True,
        aliases=("confidence_threshold",),
    )
    editing_threshold: float = setting(
        0.9,
        "probability above which (>) another token replaces a decided one; 0 takes every "
        "change, 1 none",
        traced=True,
        aliases=("edit_threshold",),
    )
    max_post_steps: int = setting(
        16, "most steps that may edit a block after its last mask", traced=True
    )
    num_to_transfer: int = setting(
        1, "slots to unmask where fewer pass the threshold", traced=True
    )
    fold: bool = setting(
        True, "store a finished block in the next block's first forward (exact)"
    )

    # Not a setting: a row ends with the block that decides the last token it returns.
    early_stop = True


def resolve(settings: EditSettings, config: ModelConfig) -> EditSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    as_block = block.BlockSettings(block_length=settings.block_length)
    length = block.resolve(as_block, config).block_length
    settings = settings.replace(block_length=length)
    check_at_least(
        settings,
        threshold=0.0,
        editing_threshold=0.0,
        max_post_steps=0,
        num_to_transfer=1,
    )
    return resolve_sampling(settings)


def _denoise(
    fns: ModelFns,
    settings: EditSettings,
    state: DecodeState,
    index: jax.Array,
    hidden: jax.Array,
    rows: jax.Array,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Unmasks and edits slots of the open block; see `block.Denoise`.

    `state.step` counts the steps that began without a mask. A token's recorded
    confidence and forward are those of the step that wrote it last.
    """
    before = canvas.read(state.canvas, index)
    is_mask = before == fns.config.mask_id
    masked = is_mask & rows[:, None]
    proposal, _ = canvas.propose_from_hidden(fns, settings, state, hidden)
    confidence = proposal.confidence
    remaining = jnp.sum(masked, axis=-1, dtype=jnp.int32)
    quota = jnp.minimum(settings.num_to_transfer, remaining)
    unmasked = unmasking.above_threshold(
        confidence,
        masked,
        settings.threshold,
        unmasking.top_count(confidence, masked, quota),
        quota,
    )
    editable = ~is_mask & (index >= state.prompt_length[:, None]) & rows[:, None]
    edited = (
        editable & (confidence > settings.editing_threshold) & (proposal.token != before)
    )
    written, rule = unmasked | edited, edited.astype(jnp.int32)
    state, after = canvas.unmask(state, state.cursor, index, proposal, written, rule)
    post = rows & (remaining == 0)
    steps = state.step + post.astype(jnp.int32)
    complete = ~jnp.any(after == fns.config.mask_id, axis=-1)
    unchanged = post & ~jnp.any(edited, axis=-1)
    final = rows & complete & (unchanged | (steps >= settings.max_post_steps))
    enough = final & block.answered(fns, state, index, after)
    return state.replace(step=steps), final, enough


def step(fns: ModelFns, settings: EditSettings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row denoises and edits its block, or stores it."""
    return block.advance(fns, settings, state, _denoise)


def most_steps(settings: EditSettings, slots: int) -> jax.Array:
    """Each block unmasks a slot a step, is edited so many times, and stored."""
    blocks = -(-slots // settings.block_length)
    return slots + blocks * (settings.max_post_steps + 1)


register(
    Decoder(
        name="edit",
        summary="block diffusion that may rewrite decided tokens of the open block",
        settings=EditSettings,
        resolve=resolve,
        init=block.init,
        step=step,
        most_steps=most_steps,
        rules=lambda settings: ("threshold", "edited"),
    )
)
