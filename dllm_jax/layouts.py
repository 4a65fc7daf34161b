"""Attention patterns as choices of token fields, one function a pattern.

Each returns the fields that make `kernels_pallas.visible` give the pattern.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import FOREVER, NEVER, TokenFields

KNOWN, DATA, MASK = 0, 1, 2
"""Roles of tokens in a SimSD row: decided, drafted, and the mask copy of a drafted slot."""


def _fields(position, time, visible_from, visible_until, valid=None) -> TokenFields:
    """Fields of one shape; padding (`valid` False) is seen by nobody but itself."""
    if valid is not None:
        visible_from = jnp.where(valid, visible_from, NEVER)
    slot = jnp.arange(position.shape[-1], dtype=jnp.int32)
    whole = [position, time, visible_from, visible_until, slot]
    return TokenFields(
        *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), position.shape) for x in whole)
    )


def block_causal(
    position: jax.Array, block_length: int, valid: jax.Array | None = None
) -> TokenFields:
    """Blocks in order, all-to-all inside a block (SDAR, LLaDA2, Fast-dLLM v2).

    Args:
      position: int32 `[B, T]`; the block of position p is `p // block_length`.
      block_length: 1 gives causal attention.
      valid: bool `[B, T]`, False for padding.
    """
    block = position // block_length
    return _fields(position, block, block, FOREVER, valid)


def causal(position: jax.Array, valid: jax.Array | None = None) -> TokenFields:
    """Plain autoregression; `position` int32 `[B, T]`."""
    return block_causal(position, 1, valid)


def bidirectional(position: jax.Array, valid: jax.Array | None = None) -> TokenFields:
    """Everything sees everything (LLaDA, Dream); `position` int32 `[B, T]`."""
    return _fields(position, 0, 0, FOREVER, valid)


def shadowed(
    position: jax.Array,
    shadow_position: jax.Array,
    valid: jax.Array,
    shadow_valid: jax.Array,
) -> TokenFields:
    """[canvas | shadows] of WINO: copies of some slots that look at them and are not seen.

    Canvas tokens see the canvas. A shadow sees every shadow and the canvas, except for the
    slot that it stands for: it predicts that slot from all that surrounds it.

    Args:
      position: int32 `[B, T]`.
      shadow_position: int32 `[B, U]`, the slots that the shadows stand for.
      valid: bool `[B, T]`.
      shadow_valid: bool `[B, U]`.
    """
    moments = jnp.concatenate(
        [jnp.zeros_like(position), jnp.ones_like(shadow_position)], axis=1
    )
    return _fields(
        jnp.concatenate([position, shadow_position], axis=1),
        moments,
        moments,
        FOREVER,
        jnp.concatenate([valid, shadow_valid], axis=1),
    )


def causal_then_blocks(
    position: jax.Array,
    block_length: int,
    causal_until: jax.Array,
    valid: jax.Array | None = None,
) -> TokenFields:
    """Tokens before `causal_until` see what is not behind them, the rest whole blocks.

    With `causal_until` 0 this is `block_causal`, with a large one `causal`; a block that
    it cuts has decided tokens in front that do not look at the masks behind them (S2D2's
    draft_ver). The moments leave room for `mask_copies`: the token at p looks at 2p + 1
    if it is causal, else at the last such moment of its block.

    Args:
      position: int32 `[B, T]`.
      block_length: of the blocks.
      causal_until: int32 `[B]`, a position.
      valid: bool `[B, T]`, False for padding.
    """
    until = causal_until[:, None]
    first = position // block_length * block_length
    causal_token = position < until
    # No causal token looks this late, and every other token of the block does.
    opens = 2 * jnp.maximum(first, until) + 1
    own = 2 * position + 1
    return _fields(
        position,
        jnp.where(causal_token, own, 2 * (first + block_length) - 1),
        jnp.where(causal_token, own, opens),
        FOREVER,
        valid,
    )


def mask_copies(position: jax.Array, valid: jax.Array | None = None) -> TokenFields:
    """Masks that each predict their slot as if it came next (S2D2's verifier).

    The mask at p sees the tokens before p of `causal_then_blocks`, and no other mask; no
    token sees a mask.

    Args:
      position: int32 `[B, T]`.
      valid: bool `[B, T]`, False for padding.
    """
    return _fields(position, 2 * position, 2 * position, 2 * position + 1, valid)


def choose(rows: jax.Array, one: TokenFields, other: TokenFields) -> TokenFields:
    """`one` for the given rows, bool `[B]`, `other` for the rest."""
    return jax.tree.map(lambda x, y: jnp.where(rows[:, None], x, y), one, other)


def join(*parts: TokenFields) -> TokenFields:
    """Parts of a row, `[B, ...]` each, one behind the other."""
    joined = TokenFields(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)))
    slot = jnp.arange(joined.slot.shape[1], dtype=jnp.int32)
    return joined._replace(slot=jnp.broadcast_to(slot, joined.slot.shape))


def training_pairs(
    clean_position: jax.Array,
    noisy_position: jax.Array,
    block_length: jax.Array,
    clean_valid: jax.Array,
    noisy_valid: jax.Array,
) -> TokenFields:
    """[clean row | noisy row] of block-diffusion training, in one forward.

    A noisy token of block b sees the clean tokens of earlier blocks and the noisy tokens
    of its own; clean tokens see clean tokens block-causally. A clean token of the own
    block is born one moment after the noisy tokens look, so nothing leaks.

    Args:
      clean_position: int32 `[B, T]`.
      noisy_position: int32 `[B, U]`, any subset of the blocks; of a block that is cut, only
        the noisy tokens that are there see each other.
      block_length: int32 `[B]`, may differ from row to row.
      clean_valid: bool `[B, T]`.
      noisy_valid: bool `[B, U]`.
    """
    clean_block = clean_position // block_length[:, None]
    noisy_block = noisy_position // block_length[:, None]
    clean_time, noisy_time = 2 * clean_block + 1, 2 * noisy_block
    forever = jnp.full_like(clean_time, FOREVER)
    return _fields(
        jnp.concatenate([clean_position, noisy_position], axis=1),
        jnp.concatenate([clean_time, noisy_time], axis=1),
        jnp.concatenate([clean_time, noisy_time], axis=1),
        jnp.concatenate([forever, noisy_time + 1], axis=1),
        jnp.concatenate([clean_valid, noisy_valid], axis=1),
    )


def simsd_pairs(
    position: jax.Array,
    role: jax.Array,
    block: jax.Array,
    order: jax.Array,
    steps: int,
    valid: jax.Array | None = None,
    data_sees_masks: bool = True,
) -> TokenFields:
    """Drafted tokens and mask copies of their slots, judged in one forward (SimSD 2).

    A mask copy sees of its block what was unmasked before its slot, and the other slots
    as masks: the state in which the drafter chose. A drafted token sees the state after
    its own step. Known tokens see known tokens; data of earlier blocks are seen by all,
    their masks by none. Of a slot that was not drafted the data copy comes last.

    Args:
      position: int32 `[B, T]`, both copies of a slot have the same.
      role: int32 `[B, T]`, KNOWN, DATA or MASK.
      block: int32 `[B, T]`, number of the token's block in the whole text: cached keys
        of `block_causal` layouts are then seen by all.
      order: int32 `[B, T]`, the step in [0, steps) that unmasked the slot, -1 if none did;
        ignored for known tokens.
      steps: static.
      valid: bool `[B, T]`, False for padding.
      data_sees_masks: static; False hides all masks from drafted tokens (an ablation), of
        which there then is one block.
    """
    start = block * (2 * steps + 3)
    step = jnp.where(order < 0, steps, order)
    known, mask = role == KNOWN, role == MASK
    looks = start + 2 * step + 1  # as a mask copy; the data copy is born a moment later
    born = jnp.where(known, start, looks + 1)
    time, until = born, jnp.full_like(born, FOREVER)
    if not data_sees_masks:
        # Drafted tokens look when all masks are gone, the first of them last of all, and
        # each is gone for those that look after it.
        behind = start + 3 * steps + 3 - step
        time = jnp.where(known, start, behind)
        until = jnp.where(known, until, behind + 1)
    return _fields(
        position,
        jnp.where(mask, looks, time),
        jnp.where(mask, start + 1, born),
        jnp.where(mask, looks + 1, until),
        valid,
    )


def separate_states(
    position: jax.Array,
    state: jax.Array,
    start: jax.Array,
    valid: jax.Array | None = None,
) -> TokenFields:
    """Several states of one block side by side, none of which sees another.

    Gives what one forward a state would: the exact verifier of a denoising order.

    Args:
      position: int32 `[B, T]`.
      state: int32 `[B, T]`, >= 0, which state a token is of.
      start: int32 `[B, 1]`, a moment at which all cached keys are visible.
      valid: bool `[B, T]`, False for padding.
    """
    time = start + state
    return _fields(position, time, time, time + 1, valid)


def appended(
    position: jax.Array,
    start: jax.Array,
    shown: jax.Array,
    valid: jax.Array,
    moment: jax.Array | int = 0,
    until: jax.Array | int = FOREVER,
    since: jax.Array | int = 0,
) -> TokenFields:
    """Candidates and mask copies that look at a row from behind it (LEAP 1.2).

    They see the row and each other, as far as those are shown, but never another token of
    their own position. Where logits are shifted, what predicts a slot stands before it and
    must not see the slot's candidates either: it looks at the slot's own moment, at which
    they are hidden: shown in two copies, one until it and one since the next.

    Args:
      position: int32 `[B, U]`.
      start: int32 `[B, 1]`, when the row's last block looks; everything cached is visible.
      shown: bool `[B, U]`, whether other appended tokens see it.
      valid: bool `[B, U]`, False for padding.
      moment: int32 `[B, U]`, when it looks; -1 is when the row does, before it sees
        anything appended.
      until: int32 `[B, U]`, first moment at which it is hidden.
      since: int32 `[B, U]`, first moment at which it is shown.
    """
    first = start + 1
    return _fields(
        position,
        first + moment,
        jnp.where(shown, first + since, NEVER),
        # Moments are few: FOREVER must not overflow.
        jnp.where(jnp.asarray(until) == FOREVER, FOREVER, first + until),
        valid,
    )


def superposition(
    original: TokenFields, behind: TokenFields, hidden: jax.Array
) -> TokenFields:
    """[row | what is appended], of which the row sees nothing (LEAP 1.2).

    Args:
      original: `[B, T]` each, of the row.
      behind: `[B, U]` each, from `appended`.
      hidden: bool `[B, T]`, tokens of the row that the appended do not see.
    """
    expired = jnp.where(hidden, original.time + 1, original.visible_until)
    return join(original._replace(visible_until=expired), behind)
