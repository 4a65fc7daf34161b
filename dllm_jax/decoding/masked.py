"""Bidirectional denoising: every forward sees the whole canvas, nothing is cached.

Decoding of LLaDA (specs, LLaDA 2) and of Dream (specs, Dream 4.6). Exact: prompt and
generated slots change what every other slot sees, so each forward recomputes all of them.

A row's canvas is [prompt | generated slots | padding], and its own length is exactly its
prompt and its new tokens: what lies behind is seen by nobody. The generated slots are
denoised as one block, or block by block from the prompt's end (semi-autoregression, with
the later blocks in sight as masks).

A strategy is two choices, how surely a slot's token is known and how many slots a step
unmasks:

    low_confidence  probability of the token, no temperature  even quota     LLaDA
    random          chance                                    even quota     LLaDA
    maskgit_plus    probability of the token                  time schedule  Dream
    topk_margin     lead over the second most probable        time schedule  Dream
    entropy         minus the entropy of the distribution     time schedule  Dream
    origin          each slot by chance, on its own           time schedule  Dream

Dream's probabilities are those of the distribution that is drawn from, after temperature,
top-p and top-k; LLaDA's are those of the logits themselves.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dllm_jax import layouts, sampling, unmasking
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

_RANKED = ("maskgit_plus", "topk_margin", "entropy")
_SCHEDULED = (*_RANKED, "origin")
_BY_PROBABILITY = ("low_confidence", "maskgit_plus")
STRATEGIES = ("low_confidence", "random", *_SCHEDULED)

_EPS = 1e-3  # Dream's published defaults
_SCHEDULED_STEPS = 512
_STEP_BUCKET = 64  # schedules are padded to its multiples, so that few programs compile


@struct.dataclass
class MaskedSettings(SamplingSettings):
    """Settings of the `masked` decoder."""

    block_length: int = setting(
        0,
        "tokens of a block, counted from the prompt's end; 0 is all new tokens",
        aliases=("block_size",),
    )
    denoising_steps: int = setting(
        0,
        "steps over which a block is spread; 0 is one a token (scheduled strategies: "
        "block_length, or 512)",
        aliases=("steps_per_block",),
        traced=True,
    )
    remasking_strategy: str = setting(
        "low_confidence",
        "which slots a step unmasks",
        choices=STRATEGIES,
        aliases=("remasking", "strategy", "alg"),
    )
    cfg_scale: float = setting(
        0.0,
        "classifier-free guidance, by a second canvas without the prompt; 0 is off",
        traced=True,
    )
    logits_eos_inf: bool = setting(False, "never propose the end-of-text (padding) token")
    confidence_eos_eot_inf: bool = setting(
        False, "unmask end tokens last: they count as confidence 0"
    )
    alg_temp: float = setting(
        0.0,
        "maskgit_plus, topk_margin, entropy: slots are drawn by score / alg_temp; 0 is off",
        traced=True,
    )
    eps: float | None = setting(
        None,
        "scheduled strategies: time at which the schedule ends; 0.001 if not given",
        traced=True,
        kind=float,
    )
    early_stop: bool = setting(
        True,
        "skip forwards that unmask nothing, end a row as soon as all it returns is "
        "decided (same tokens)",
    )
    # Derived by `resolve`: whether cfg_scale and alg_temp are on, and the schedule.
    guided: bool = struct.field(pytree_node=False, default=False)
    tempered: bool = struct.field(pytree_node=False, default=False)
    # [S] float32, share of the masks that each step reveals, 1 from the last step on.
    reveal: Any = struct.field(default=(), metadata={"kind": float})


def resolve(settings: MaskedSettings, config: ModelConfig) -> MaskedSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    if config.attention != "bidirectional":
        raise ValueError(
            "this decoder needs bidirectional attention; the model has "
            f"attention={config.attention!r}."
        )
    check_choices(settings)
    check_at_least(
        settings,
        block_length=0,
        denoising_steps=0,
        cfg_scale=0.0,
        alg_temp=0.0,
        temperature=0.0,
    )
    strategy = settings.remasking_strategy
    if settings.alg_temp > 0.0 and strategy not in _RANKED:
        raise _not_for("alg_temp", settings, _RANKED)
    if settings.confidence_eos_eot_inf and strategy not in _BY_PROBABILITY:
        raise _not_for("confidence_eos_eot_inf", settings, _BY_PROBABILITY)
    if (settings.logits_eos_inf or settings.confidence_eos_eot_inf) and not config.eos_ids:
        raise ValueError(
            f"logits_eos_inf={settings.logits_eos_inf} and confidence_eos_eot_inf="
            f"{settings.confidence_eos_eot_inf} need a model with end-of-sequence ids."
        )
    if strategy in _SCHEDULED:
        settings = _with_schedule(settings)
    elif settings.eps is not None:
        raise _not_for("eps", settings, _SCHEDULED)
    else:
        settings = settings.replace(eps=_EPS)  # read by nobody
    settings = settings.replace(
        guided=settings.cfg_scale > 0.0, tempered=settings.alg_temp > 0.0
    )
    if strategy in _RANKED and settings.temperature == 0.0:
        # Filters change what these rank by, also where nothing is drawn.
        filtered = resolve_sampling(settings.replace(temperature=1.0))
        return filtered.replace(temperature=settings.temperature, sample=False)
    return resolve_sampling(settings)


def _not_for(
    name: str, settings: MaskedSettings, strategies: tuple[str, ...]
) -> ValueError:
    return ValueError(
        f"{name}={getattr(settings, name)} needs remasking_strategy "
        f"{' or '.join(strategies)} (it is {settings.remasking_strategy!r})."
    )


def _with_schedule(settings: MaskedSettings) -> MaskedSettings:
    if settings.eps is None:
        settings = settings.replace(eps=_EPS)
    if not 0.0 <= settings.eps < 1.0:
        raise ValueError(f"eps={settings.eps} must be in [0, 1).")
    steps = settings.denoising_steps or settings.block_length or _SCHEDULED_STEPS
    reveal = tuple(reveal_schedule(steps, settings.eps).tolist())
    padding = -steps % _STEP_BUCKET
    return settings.replace(denoising_steps=steps, reveal=reveal + (1.0,) * padding)


def reveal_schedule(steps: int, eps: float) -> np.ndarray:
    """Share of the masks that each step reveals: float32 `[steps]`, the last one 1.

    Time runs evenly from 1 to `eps`; a step from t to s reveals 1 - s / t of what is
    left. Every operation is rounded to float32, as published: the shares are made to be
    truncated, so one rounding more or less is one token more or less (specs, Dream 4.6).
    Computed on the host, because accelerators divide less exactly.
    """
    one, end = np.float32(1.0), np.float32(eps)
    stride = (end - one) / np.float32(steps)
    index = np.arange(steps + 1)
    up = one + stride * index.astype(np.float32)
    down = end - stride * (steps - index).astype(np.float32)
    time = np.where(index < (steps + 1) // 2, up, down)
    reveal = one - time[1:] / time[:-1]
    reveal[-1] = one
    return reveal


def init(
    fns: ModelFns, settings: MaskedSettings, inputs: DecodeInputs, canvas_length: int
) -> DecodeState:
    """Lays out the canvas; there is nothing to store, so it runs no forward.

    Args:
      fns: the model.
      settings: resolved.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens.
    """
    del settings
    return canvas.lay_out(fns, inputs, canvas_length)


class _Window(NamedTuple):
    """The slots that logits are computed for: the open block, and what fills it up."""

    index: jax.Array  # [B, W] int32
    inside: jax.Array  # [B, W] bool, slots of the row's open block
    masked: jax.Array  # [B, W] bool, those that a step may unmask
    block_end: jax.Array  # [B] int32


def _open(settings: MaskedSettings, fns: ModelFns, state: DecodeState) -> _Window:
    """The window of each row. Near the canvas's end it begins before the open block."""
    slots = state.canvas.shape[1]
    width = min(settings.block_length or slots, slots)
    start = jnp.minimum(state.cursor, slots - width)
    index = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    block_end = state.end
    if settings.block_length:
        block_end = jnp.minimum(state.cursor + settings.block_length, state.end)
    inside = (index >= state.cursor[:, None]) & (index < block_end[:, None])
    masked = inside & (canvas.read(state.canvas, index) == fns.config.mask_id)
    return _Window(index, inside, masked & ~state.done[:, None], block_end)


def _logits(
    fns: ModelFns, settings: MaskedSettings, state: DecodeState, index: jax.Array
) -> jax.Array:
    """Logits that predict the slots `index` int32 `[B, W]`: float32 `[B, W, V]`."""
    batch, slots = state.canvas.shape
    position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
    fields = layouts.bidirectional(position, valid=position < state.end[:, None])
    # Shifted: slot p is predicted at p - 1, and slot 0, which nothing precedes, at 0.
    shifted = fns.config.logit_alignment == "shifted"
    source = jnp.maximum(index - 1, 0) if shifted else index
    tokens = state.canvas
    if settings.guided:
        in_prompt = position < state.prompt_length[:, None]
        without_prompt = jnp.where(in_prompt, fns.config.mask_id, tokens)
        tokens = jnp.concatenate([tokens, without_prompt])
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), (fields, source))
        fields, source = twice
    hidden = fns.forward(tokens, fields, None).hidden
    logits = fns.logits(jnp.take_along_axis(hidden, source[..., None], axis=1))
    if settings.guided:
        logits, unconditional = jnp.split(logits, 2)
        logits = unconditional + (settings.cfg_scale + 1.0) * (logits - unconditional)
    return logits


def _is_any(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    return jnp.isin(tokens, jnp.array(ids, jnp.int32))


def _remove(logits: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Gives some tokens probability 0."""
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.where(_is_any(tokens, ids), -jnp.inf, logits)


def propose(
    settings: MaskedSettings,
    config: ModelConfig,
    logits: jax.Array,
    token_keys: jax.Array,
    choice_keys: jax.Array,
) -> tuple[sampling.Proposal, jax.Array]:
    """Proposals, and how early each slot deserves to be unmasked.

    Args:
      settings: resolved.
      config: for its special ids.
      logits: float32 `[B, W, V]`.
      token_keys: keys `[B, W]`, consumed: a slot draws the same on every canvas.
      choice_keys: keys `[B, W]`, consumed.

    Returns:
      The proposals, their confidence being the probability as the strategy counts it,
      and the score, float32 `[B, W]`; of no meaning for `origin`.
    """
    strategy = settings.remasking_strategy
    if settings.logits_eos_inf:
        logits = _remove(logits, (_filler_id(config),))
    drawn_from = logits
    if settings.sample:
        drawn_from = sampling.divide_by_temperature(logits, settings.temperature)
    if settings.filtered:
        # Without the mask token, or it might be all that is left. Dream's order: top-p,
        # then top-k.
        drawn_from = _remove(drawn_from, (config.mask_id,))
        off = sampling.SamplingKnobs(jnp.float32(1.0), jnp.int32(0), jnp.float32(1.0))
        drawn_from = sampling.filter_logits(drawn_from, off.top_k, settings.top_p)
        drawn_from = sampling.filter_logits(drawn_from, settings.top_k, off.top_p)
    proposal = _draw(settings, config, drawn_from, token_keys)
    counted = drawn_from if strategy in _SCHEDULED else logits
    proposal = proposal._replace(
        confidence=_confidence(settings, config, counted, proposal.token)
    )
    if strategy == "random":
        return proposal, _each(jax.random.uniform, choice_keys)
    score = proposal.confidence
    if strategy == "topk_margin":
        score = _margin(_remove(counted, (config.mask_id,)), counted)
    elif strategy == "entropy":
        score = -proposal.entropy
    if settings.tempered:
        # The best of noisy scores are draws without replacement from their softmax.
        score = score / settings.alg_temp + _each(jax.random.gumbel, choice_keys)
    return proposal, score


def _filler_id(config: ModelConfig) -> int:
    """The end token that pads training texts, and so fills up answers (LLaDA's EOS)."""
    return config.pad_id if config.pad_id in config.eos_ids else config.eos_ids[0]


def _draw(settings, config, logits, keys) -> sampling.Proposal:
    """Tokens from ready-made logits `[B, W, V]`, each slot with its own key."""
    if not settings.sample:
        return sampling.propose(logits, config.mask_id)
    as_is = sampling.SamplingKnobs(jnp.float32(1.0), jnp.int32(0), jnp.float32(1.0))
    each = sampling.propose(
        logits.reshape(-1, 1, logits.shape[-1]), config.mask_id, keys.reshape(-1), as_is
    )
    return sampling.Proposal(*(x.reshape(keys.shape) for x in each))


def _confidence(settings, config, logits, token) -> jax.Array:
    """Probability of `token` `[B, W]` under `logits` `[B, W, V]`, float32."""
    if settings.confidence_eos_eot_inf:
        # The others share what end tokens had, at every temperature (published: at 0).
        logits = _remove(logits, config.eos_ids)
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    confidence = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1))
    if settings.confidence_eos_eot_inf:
        # Not only by the above: nothing else may be left of a filtered distribution.
        confidence = jnp.where(_is_any(token, config.eos_ids), 0.0, confidence)
    return confidence


def _margin(allowed, logits) -> jax.Array:
    """Lead of the most probable token over the second, `[B, W]`.

    Args:
      allowed: float32 `[B, W, V]`, without the mask token.
      logits: float32 `[B, W, V]`, with its share of the probability.
    """
    share = jnp.exp(allowed - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    first = jnp.argmax(share, axis=-1)[..., None]
    rest = jnp.where(jnp.arange(share.shape[-1]) == first, 0.0, share)
    return jnp.max(share, axis=-1) - jnp.max(rest, axis=-1)


def _fold(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """One key a row `[B]` for numbers `[B]`, or one a slot `[B, W]` for `[B, W]`."""
    fold = jax.random.fold_in
    if numbers.ndim == 2:
        fold = jax.vmap(fold, in_axes=(None, 0))
    return jax.vmap(fold)(keys, numbers)


def _each(draw, keys: jax.Array) -> jax.Array:
    """A float32 for each key `[B, W]`, whatever the width of the canvas."""
    return jax.vmap(jax.vmap(lambda key: draw(key, (), jnp.float32)))(keys)


def _quota(
    settings: MaskedSettings, state: DecodeState, window: _Window, fate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The step that each row takes, and how many slots it unmasks: int32 `[B]` each.

    Args:
      settings: resolved.
      state: before the step.
      window: the open block.
      fate: float32 `[B, W]`, uniform; `origin` unmasks a slot in the first step whose
        share of survivors is at most that. The same law as a draw in each step.
    """
    if settings.remasking_strategy not in _SCHEDULED:
        size = window.block_end - state.cursor
        steps = _num_steps(settings, size)
        # More steps than slots: the last steps would have 0, but find nothing masked.
        return state.step, unmasking.linear_quota(state.step, size, steps)
    if settings.remasking_strategy == "origin":
        survivors = jnp.cumprod(1.0 - settings.reveal)
        due = window.masked[..., None] & (fate[..., None] >= survivors)
        counts = jnp.sum(due, axis=1, dtype=jnp.int32)
    else:
        remaining = jnp.sum(window.masked, axis=-1, keepdims=True, dtype=jnp.int32)
        counts = jnp.floor(remaining.astype(jnp.float32) * settings.reveal)
        counts = counts.astype(jnp.int32)  # [B, S]
    step = state.step
    ahead = jnp.arange(counts.shape[-1]) >= step[:, None]
    useful = jnp.argmax(ahead & (counts > 0), axis=-1).astype(jnp.int32)
    step = jnp.where(_skips(settings, state), useful, step)
    return step, jnp.take_along_axis(counts, step[:, None], axis=-1)[:, 0]


def _num_steps(settings: MaskedSettings, size: jax.Array) -> jax.Array:
    """Steps of a block of `size` int32 `[B]` slots."""
    steps = settings.denoising_steps
    return jnp.where(steps > 0, steps, jnp.maximum(size, 1))


def _skips(settings: MaskedSettings, state: DecodeState) -> jax.Array:
    """Whether each row leaves out forwards that unmask nothing: bool `[B]`.

    Without `early_stop` they are run as published, until there are as many as the canvas
    has slots: the loop runs twice that many, and must have unmasked everything then.
    """
    slots = state.canvas.shape[1]
    return (state.forwards.denoise >= slots) | settings.early_stop


def step(fns: ModelFns, settings: MaskedSettings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row unmasks slots of its open block."""
    active = ~state.done
    window = _open(settings, fns, state)
    block_keys = _fold(state.rng_key, state.cursor)
    fate_keys = _fold(_fold(block_keys, jnp.zeros_like(state.step)), window.index)
    fate = _each(jax.random.uniform, fate_keys)
    number, count = _quota(settings, state, window, fate)
    # By block and step, not by forward: forwards that are left out change no draw.
    step_keys = _fold(block_keys, number + 1)
    token_keys = _fold(step_keys, 2 * window.index)
    choice_keys = _fold(step_keys, 2 * window.index + 1)
    logits = _logits(fns, settings, state, window.index)
    proposal, score = propose(settings, fns.config, logits, token_keys, choice_keys)
    score = fate if settings.remasking_strategy == "origin" else score
    chosen = unmasking.top_count(score, window.masked, count)
    start = window.index[:, 0]
    state, tokens = canvas.unmask(state, start, window.index, proposal, chosen)
    over, enough = _settled(settings, fns, state, window, tokens, number + 1)
    moving = active & over & ~enough
    positions = state.end * (2 if settings.guided else 1)
    return state.replace(
        cursor=jnp.where(moving, window.block_end, state.cursor),
        step=jnp.where(moving, 0, jnp.where(active, number + 1, state.step)),
        done=state.done | enough,
        forwards=state.forwards.add(jnp.where(active, positions, 0), denoise=active),
    )


def _settled(
    settings: MaskedSettings,
    fns: ModelFns,
    state: DecodeState,
    window: _Window,
    tokens: jax.Array,
    steps_done: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Whether the open block is over, and whether the row has all it returns.

    Args:
      settings: resolved.
      fns: the model.
      state: with the step's tokens, but not yet its forward.
      window: as before the step.
      tokens: int32 `[B, W]`, after the step.
      steps_done: int32 `[B]`, steps of the block.
    """
    masked = window.inside & (tokens == fns.config.mask_id)
    over = ~jnp.any(masked, axis=-1)
    if not settings.early_stop:
        steps = _num_steps(settings, window.block_end - state.cursor)
        over &= (steps_done >= steps) | _skips(settings, state)
        return over, over & (window.block_end >= state.end)
    is_stop = jnp.any(tokens[..., None] == state.stop_ids, axis=-1) & window.inside
    beyond = jnp.iinfo(jnp.int32).max
    first_stop = jnp.min(jnp.where(is_stop, window.index, beyond), axis=-1)
    first_mask = jnp.min(jnp.where(masked, window.index, beyond), axis=-1)
    last_needed = jnp.minimum(first_stop, state.end - 1)
    return over, jnp.minimum(first_mask, window.block_end) > last_needed


register(
    Decoder(
        name="masked",
        summary="bidirectional denoising of the whole canvas, without a cache",
        settings=MaskedSettings,
        resolve=resolve,
        init=init,
        step=step,
    )
)
