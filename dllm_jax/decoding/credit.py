"""CreditDecoding: tokens that were the first choice before get credit for it.

Specs, LEAP and KLASS 9.4 (arXiv 2510.06133, as dInfer decodes). In every step of a block
each masked slot votes for its most probable token with that probability to the power of
`gamma`; older votes fade by `decay` a step. A token's votes m add `alpha` ln(1 + m) to its
logit, and Fast-dLLM's threshold is applied to the distribution that results.

The published code keeps votes in a table [block, vocabulary]. A slot votes once a step and
a block has no more steps than slots, so here they are a list of tokens and weights,
`[B, W, W]`, spread out over the vocabulary for the moment they are needed.

The caches are those of `fast_dllm`: `none` is exact, `prefix` and `dual` are approximate.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import sampling, unmasking
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import canvas, fast_dllm
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
from dllm_jax.decoding.bidirectional import (
    Window,
    block_length_setting,
    cache_setting,
    close,
    look,
    open_window,
    propose_plain,
    slot_keys,
    window_width,
)

_AS_GOOD = 1e-5  # slots this close to the best one's confidence are as good (published)


@struct.dataclass
class CreditSettings(SamplingSettings):
    """Settings of the `credit` decoder."""

    block_length: int = block_length_setting(32)
    cache: str = cache_setting("none")
    threshold: float = setting(
        0.9,
        "confidence, with credit, from which (>=) a slot is unmasked at once",
        traced=True,
        aliases=("confidence_threshold",),
    )
    alpha: float = setting(
        0.7, "weight of the credit", traced=True, aliases=("credit_alpha",)
    )
    gamma: float = setting(
        0.2, "exponent of a vote's probability", traced=True, aliases=("boost_gamma",)
    )
    decay: float = setting(
        0.8, "what is left of a vote a step later", traced=True, aliases=("decay_beta",)
    )
    early_stop: bool = setting(
        True, "end a row as soon as all it returns is decided (same tokens)"
    )


@struct.dataclass
class Votes:
    """The votes of the open block's slots, one a step."""

    token: Any  # [B, W, W] int32
    weight: Any  # [B, W, W] float32


@struct.dataclass
class CreditState(DecodeState):
    """A batch between two steps."""

    votes: Votes


def resolve(settings: CreditSettings, config: ModelConfig) -> CreditSettings:
    """Checks everything; raises ValueError."""
    check_choices(settings)
    shared = {"block_length": settings.block_length, "cache": settings.cache}
    fast_dllm.resolve(fast_dllm.FastDLLMSettings(**shared), config)
    if settings.cache != "none" and config.logit_alignment != "same":
        raise ValueError(
            f"cache={settings.cache!r} needs logits in place; the model has "
            f"logit_alignment={config.logit_alignment!r}: use cache='none'."
        )
    check_at_least(settings, threshold=0.0, alpha=0.0, gamma=0.0, decay=0.0)
    if settings.decay > 1.0:
        raise ValueError(f"decay={settings.decay} must be in [0, 1].")
    return resolve_sampling(settings)


def init(
    fns: ModelFns, settings: CreditSettings, inputs: DecodeInputs, canvas_length: int
) -> CreditState:
    """`fast_dllm`'s state, and no votes."""
    state = fast_dllm.init(fns, settings, inputs, canvas_length)
    width = window_width(settings.block_length, canvas_length)
    shape = (state.canvas.shape[0], width, width)
    votes = Votes(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    return CreditState(**vars(state), votes=votes)


def _vote(
    settings: CreditSettings,
    votes: Votes,
    window: Window,
    proposal: sampling.Proposal,
    step: jax.Array,
) -> Votes:
    """The votes after those of step number `step` int32 `[B]`."""
    now = jnp.arange(votes.weight.shape[-1]) == step[:, None, None]
    old = jnp.where(step[:, None, None] == 0, 0.0, votes.weight * settings.decay)
    weight = jnp.where(window.masked, proposal.confidence**settings.gamma, 0.0)
    return Votes(
        token=jnp.where(now, proposal.token[..., None], votes.token),
        weight=jnp.where(now, weight[..., None], old),
    )


def _credit(votes: Votes, vocab_size: int) -> jax.Array:
    """Sum of the votes for each token: float32 `[B, W, V]`."""
    add = jax.vmap(
        jax.vmap(lambda token, weight: jnp.zeros(vocab_size).at[token].add(weight))
    )
    return add(votes.token, votes.weight)


def step(fns: ModelFns, settings: CreditSettings, state: CreditState) -> CreditState:
    """One forward of the batch: each row votes, and unmasks slots of its open block."""
    window = open_window(fns, settings.block_length, state)
    hidden, state = look(fns, settings.cache, state, window)
    logits = fns.logits(hidden)
    first_choice = sampling.propose(logits, fns.config.mask_id)
    votes = _vote(settings, state.votes, window, first_choice, state.step)
    credit = _credit(votes, logits.shape[-1])
    logits = logits + settings.alpha * jnp.log1p(credit)
    keys = slot_keys(state, window, state.step)
    proposal = propose_plain(settings, fns.config, logits, keys)
    confidence = proposal.confidence
    best = jnp.max(jnp.where(window.masked, confidence, 0.0), axis=-1, keepdims=True)
    passing = confidence >= jnp.minimum(settings.threshold, best - _AS_GOOD)
    chosen = unmasking.best_and(passing, confidence, window.masked)
    state, _ = canvas.unmask(state, window.index[:, 0], window.index, proposal, chosen)
    state = state.replace(votes=votes)
    return close(fns, state, window, state.step + 1, early_stop=settings.early_stop)


register(
    Decoder(
        name="credit",
        summary="fast_dllm with credit for earlier first choices (CreditDecoding)",
        settings=CreditSettings,
        resolve=resolve,
        init=init,
        step=step,
        cache=fast_dllm.cache_label,
        rules=lambda settings: ("credit",),
    )
)
