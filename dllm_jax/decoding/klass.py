"""KLASS: unmask what is sure and has stopped changing.

Specs, LEAP and KLASS 2 and 9.1 (arXiv 2511.05664). A slot is ready when its token's
probability is above `threshold` and its distribution has moved, from forward to forward,
by less than `kl_threshold` nats of KL(now || before) in each of the last
`kl_history_length` forwards. A step unmasks the ready slots; without any it unmasks the
step's quota of the most confident.

The distributions of the forward before are compared at the open block's slots only, and
kept as hidden states, `[B, C, D]`: logits are computed again rather than carried. A block's
first forward compares with the last of the block before; forwards of earlier blocks do not
count, which is what the published code's gate comes to.

Exact: the whole canvas in every forward. Where the published code runs out of steps and
leaves masks, a block here goes on until it has none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import unmasking
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
from dllm_jax.decoding.bidirectional import (
    block_length_setting,
    check_bidirectional,
    close,
    even_quota,
    open_window,
    predict,
    propose_plain,
    run_canvas,
    slot_keys,
    window_width,
)


@struct.dataclass
class KLASSSettings(SamplingSettings):
    """Settings of the `klass` decoder."""

    block_length: int = block_length_setting(64)
    threshold: float = setting(
        0.9,
        "confidence above which (>) a stable slot is unmasked",
        traced=True,
        aliases=("conf_threshold", "confidence_threshold"),
    )
    kl_threshold: float = setting(
        0.01, "nats below which (<) a slot's change counts as none", traced=True
    )
    kl_history_length: int = setting(
        2, "forwards in a row in which a slot must not have changed"
    )
    unmask_strategy: str = setting(
        "all",
        "which ready slots a step unmasks: all, the most confident, the most stable",
        choices=("all", "max_conf", "min_kl"),
    )
    denoising_steps: int = setting(
        0,
        "steps over which a block is spread where nothing is ready; 0 is one a token",
        aliases=("steps_per_block",),
        traced=True,
    )
    early_stop: bool = setting(
        True, "end a row as soon as all it returns is decided (same tokens)"
    )


@struct.dataclass
class KLASSState(DecodeState):
    """A batch between two steps, and what the next one compares with."""

    hidden: Any  # [B, C, D] of the forward before
    history: Any  # [B, W, n] float32, the open block's KL divergences, the newest last


def resolve(settings: KLASSSettings, config: ModelConfig) -> KLASSSettings:
    """Checks everything; raises ValueError."""
    check_bidirectional(config)
    check_choices(settings)
    check_at_least(
        settings,
        block_length=0,
        threshold=0.0,
        kl_threshold=0.0,
        kl_history_length=1,
        denoising_steps=0,
    )
    return resolve_sampling(settings)


def init(
    fns: ModelFns, settings: KLASSSettings, inputs: DecodeInputs, canvas_length: int
) -> KLASSState:
    """Lays out the canvas; nothing was seen before.

    Args:
      fns: the model.
      settings: resolved.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens.
    """
    state = canvas.lay_out(fns, inputs, canvas_length)
    hidden = jax.eval_shape(lambda s: run_canvas(fns, s.canvas, s.end), state)
    width = window_width(settings.block_length, canvas_length)
    history = (state.canvas.shape[0], width, settings.kl_history_length)
    return KLASSState(
        **vars(state),
        hidden=jnp.zeros(hidden.shape, hidden.dtype),
        history=jnp.full(history, jnp.inf, jnp.float32),
    )


def _divergence(now: jax.Array, before: jax.Array) -> jax.Array:
    """KL(now || before) in nats, `[B, W]`, of float32 logits `[B, W, V]`."""
    now, before = jax.nn.log_softmax(now), jax.nn.log_softmax(before)
    return jnp.sum(jnp.exp(now) * (now - before), axis=-1)


def step(fns: ModelFns, settings: KLASSSettings, state: KLASSState) -> KLASSState:
    """One forward of the batch: each row unmasks slots of its open block."""
    window = open_window(fns, settings.block_length, state)
    masked = window.masked
    hidden = run_canvas(fns, state.canvas, state.end)
    logits = fns.logits(predict(fns.config, hidden, window.index))
    before = fns.logits(predict(fns.config, state.hidden, window.index))
    change = _divergence(logits, before)
    change = jnp.where(state.forwards.denoise[:, None] == 0, jnp.inf, change)
    history = jnp.where(state.step[:, None, None] == 0, jnp.inf, state.history)
    history = jnp.concatenate([history[..., 1:], change[..., None]], axis=-1)
    keys = slot_keys(state, window, state.step)
    proposal = propose_plain(settings, fns.config, logits, keys)
    confidence = proposal.confidence

    stable = jnp.all(history < settings.kl_threshold, axis=-1)
    ready = masked & (confidence > settings.threshold) & stable
    one = jnp.ones_like(state.step)
    picked = {
        "all": ready,
        "max_conf": unmasking.top_count(confidence, ready, one),
        "min_kl": unmasking.top_count(-change, ready, one),
    }[settings.unmask_strategy]
    quota = even_quota(settings.denoising_steps, state.step, window)
    best = unmasking.top_count(confidence, masked, quota)
    some = jnp.any(ready, axis=-1, keepdims=True)
    chosen = jnp.where(some, picked, best)

    start, rule = window.index[:, 0], (~some).astype(jnp.int32)
    state, _ = canvas.unmask(state, start, window.index, proposal, chosen, rule)
    state = state.replace(
        hidden=hidden,
        history=history,
        forwards=state.forwards.add(jnp.where(state.done, 0, state.end)),
    )
    return close(fns, state, window, state.step + 1, early_stop=settings.early_stop)


register(
    Decoder(
        name="klass",
        summary="bidirectional denoising of what is sure and stable (KLASS)",
        settings=KLASSSettings,
        resolve=resolve,
        init=init,
        step=step,
        cache=lambda settings: "none (exact)",
        rules=lambda settings: ("stable", "quota"),
    )
)
