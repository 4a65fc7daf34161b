"""Exact verification of a draft: the target's own decoding, replayed in one forward.

Ours, not the paper's. The drafted slots have an order, and the states of the block in which
its first k of them hold their tokens stand side by side in one row, each blind to the
others (`layouts.separate_states`): one forward gives the target's true logits of every
one. From the first state on, the target's own step (`block`'s, with the same settings) is
taken. If it unmasks just the slots that come next in the order, with the same tokens, the
replay goes on in the state that this gives; at the first step that does not, what the
target itself would unmask is committed and the replay ends. So what is committed is the
target's own decoding, whatever was drafted; only how far a forward gets depends on it.

Sampling is replayed as well: what the target draws in a state depends on the row's seed, on
the block and on how many masks are left (`canvas.keys_of_state`), so the result is what the
target alone would have sampled with this seed, and is distributed as the target's. The
drafter draws with the same random numbers, which makes it agree about as often as any rule
of acceptance could.
"""

import jax
import jax.numpy as jnp

from dllm_jax import layouts, sampling
from dllm_jax.cache import KVCache
from dllm_jax.decoding import block, canvas
from dllm_jax.decoding.base import ModelFns
from dllm_jax.decoding.simsd_round import OpenBlocks, SimSDState, Verdict, count, run_model


def verify(
    fns: ModelFns,
    settings: block.BlockSettings,
    state: SimSDState,
    rows: jax.Array,
    window: OpenBlocks,
) -> tuple[Verdict, KVCache, jax.Array]:
    """One target forward over every state of the draft of one open block.

    Args:
      fns: the target.
      settings: resolved; those of `block` are the target's.
      state: its draft's `order` numbers the drafted slots from 0.
      rows: bool `[B]`, which rows take part.
      window: the open block.

    Returns:
      The verdict, the target's cache, and the row's tokens, int32 `[B]`.
    """
    length, draft = settings.block_length, state.draft
    batch = state.cursor.shape[0]
    number = jnp.arange(
        length, dtype=jnp.int32
    )  # S states, each with k tokens of the draft

    def widen(x):  # [B, T] -> [B, S, T], the same in every state
        return jnp.broadcast_to(x[:, None], (batch, length, length))

    drafted = widen(window.drafted)
    order = widen(draft.order)
    shown = drafted & (order < number[:, None])
    hole = widen(window.masked) & ~shown
    before = jnp.where(shown, widen(draft.token), widen(window.token))
    tokens = jnp.where(hole, fns.config.mask_id, before)
    # Behind a draft that leaves masks, the target goes on from the state that it gives.
    num_masked, num_drafted = count(window.masked), count(window.drafted)
    num_states = jnp.minimum(num_drafted + 1, num_masked)
    exists = number < num_states[:, None]

    def flat(x):  # [B, S, T] -> [B, S * T]
        return x.reshape(batch, -1)

    fields = layouts.separate_states(
        flat(widen(window.index)),
        flat(jnp.broadcast_to(number[:, None], tokens.shape)),
        state.cursor[:, None] // length,
        flat(jnp.broadcast_to(exists[..., None], tokens.shape)),
    )
    hidden, cache, stored = run_model(
        fns, state, state.cache, rows, flat(tokens), fields, settings
    )
    left = jnp.maximum(num_masked[:, None] - number, 0)
    token_keys, choice_keys = canvas.keys_of_state(
        jnp.repeat(state.rng_key, length),
        jnp.repeat(state.cursor, length),
        left.reshape(-1),
    )
    hidden = hidden.reshape(batch * length, length, -1)
    target = canvas.propose_with_keys(fns, settings, hidden, token_keys)
    target = sampling.Proposal(*(x.reshape(tokens.shape) for x in target))

    def replay(carry, state_of_all):
        """One state: the target's step there, if the replay has got there."""
        at, steps = carry
        here, masked, proposal, keys = state_of_all
        reached = (at == here) & (here < num_states)
        own = block.choose(settings, proposal, masked, steps, keys) & reached[:, None]
        upto = here + count(own)
        next_ones = window.drafted & (draft.order >= here) & (draft.order < upto[:, None])
        agrees = jnp.all(own == next_ones, axis=-1)
        agrees &= jnp.all(~own | (proposal.token == draft.token), axis=-1)
        at = jnp.where(reached & agrees, upto, at)
        return (at, steps + reached.astype(jnp.int32)), own

    def by_state(x):  # [B, S, ...] -> [S, B, ...]
        return jnp.swapaxes(x, 0, 1)

    start = (jnp.zeros((batch,), jnp.int32), draft.block_step)
    each = (
        number,
        by_state(hole),
        jax.tree.map(by_state, target),
        by_state(choice_keys.reshape(batch, length)),
    )
    (agreed, steps), own = jax.lax.scan(replay, start, each)
    own = by_state(own)
    tokens = (jnp.sum(jnp.where(own, x, jnp.zeros_like(x)), axis=1) for x in target)
    verdict = Verdict(
        tokens=sampling.Proposal(*tokens),
        chosen=jnp.any(own, axis=1),
        examined=window.drafted & (draft.order <= agreed[:, None]),
        accepted=window.drafted & (draft.order < agreed[:, None]),
        place=draft.order,
        steps=steps - draft.block_step,
    )
    return verdict, cache, num_states * length + stored
