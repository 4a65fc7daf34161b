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

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import sampling, unmasking
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
    Window,
    block_length_setting,
    check_bidirectional,
    close,
    draw_each,
    even_quota,
    fold_in,
    num_steps,
    open_window,
    predict,
    probability,
    propose_each,
    propose_from_hidden,
    run_canvas,
    window_width,
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

    block_length: int = block_length_setting(0)
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
    check_bidirectional(config)
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
    reveal = tuple(unmasking.reveal_schedule(steps, settings.eps).tolist())
    padding = -steps % _STEP_BUCKET
    return settings.replace(denoising_steps=steps, reveal=reveal + (1.0,) * padding)


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


def propose(
    fns: ModelFns,
    settings: MaskedSettings,
    state: DecodeState,
    window: Window,
    token_keys: jax.Array,
    choice_keys: jax.Array,
) -> tuple[sampling.Proposal, jax.Array]:
    """Proposals for the window, from a forward, and how early each is to be unmasked.

    Args:
      fns: the model.
      settings: resolved.
      state: before the step.
      window: the open block.
      token_keys: keys `[B, W]`, consumed: a slot draws the same on every canvas.
      choice_keys: keys `[B, W]`, consumed.

    Returns:
      The proposals, their confidence being the probability as the strategy counts it,
      and the score, float32 `[B, W]`; of no meaning for `origin`.
    """
    tokens, end, index = state.canvas, state.end, window.index
    if settings.guided:
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        in_prompt = position < state.prompt_length[:, None]
        without_prompt = jnp.where(in_prompt, fns.config.mask_id, tokens)
        tokens = jnp.concatenate([tokens, without_prompt])
        end, index = (jnp.concatenate([x, x]) for x in (end, index))
    hidden = predict(fns.config, run_canvas(fns, tokens, end), index)
    changed = settings.guided | settings.logits_eos_inf | settings.confidence_eos_eot_inf
    if settings.remasking_strategy == "low_confidence" and not changed:
        # Whatever the window: greedily, no logits are held for it.
        proposal = propose_from_hidden(fns, settings, hidden, token_keys)
        return proposal, proposal.confidence
    logits = fns.logits(hidden)
    if settings.guided:
        logits, unconditional = jnp.split(logits, 2)
        logits = unconditional + (settings.cfg_scale + 1.0) * (logits - unconditional)
    return _propose_from_logits(settings, fns.config, logits, token_keys, choice_keys)


def _is_any(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    return jnp.isin(tokens, jnp.array(ids, jnp.int32))


def _remove(logits: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Gives some tokens probability 0."""
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.where(_is_any(tokens, ids), -jnp.inf, logits)


def _propose_from_logits(
    settings: MaskedSettings,
    config: ModelConfig,
    logits: jax.Array,
    token_keys: jax.Array,
    choice_keys: jax.Array,
) -> tuple[sampling.Proposal, jax.Array]:
    """`propose` for float32 logits `[B, W, V]`."""
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
    as_is = sampling.SamplingKnobs(jnp.float32(1.0), jnp.int32(0), jnp.float32(1.0))
    proposal = propose_each(settings, config, drawn_from, token_keys, as_is)
    counted = drawn_from if strategy in _SCHEDULED else logits
    proposal = proposal._replace(
        confidence=_confidence(settings, config, counted, proposal.token)
    )
    if strategy == "random":
        return proposal, draw_each(jax.random.uniform, choice_keys)
    score = proposal.confidence
    if strategy == "topk_margin":
        score = sampling.margin(counted, config.mask_id)
    elif strategy == "entropy":
        score = -proposal.entropy
    if settings.tempered:
        # The best of noisy scores are draws without replacement from their softmax.
        score = score / settings.alg_temp + draw_each(jax.random.gumbel, choice_keys)
    return proposal, score


def _filler_id(config: ModelConfig) -> int:
    """The end token that pads training texts, and so fills up answers (LLaDA's EOS)."""
    return config.pad_id if config.pad_id in config.eos_ids else config.eos_ids[0]


def _confidence(settings, config, logits, token) -> jax.Array:
    """Probability of `token` `[B, W]` under `logits` `[B, W, V]`, float32."""
    if settings.confidence_eos_eot_inf:
        # The others share what end tokens had, at every temperature (published: at 0).
        logits = _remove(logits, config.eos_ids)
    confidence = probability(logits, token)
    if settings.confidence_eos_eot_inf:
        # Not only by the above: nothing else may be left of a filtered distribution.
        confidence = jnp.where(_is_any(token, config.eos_ids), 0.0, confidence)
    return confidence


def _quota(
    settings: MaskedSettings, state: DecodeState, window: Window, fate: jax.Array
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
        return state.step, even_quota(settings.denoising_steps, state.step, window)
    if settings.remasking_strategy == "origin":
        survivors = jnp.cumprod(1.0 - settings.reveal)
        due = window.masked[..., None] & (fate[..., None] >= survivors)
        counts = jnp.sum(due, axis=1, dtype=jnp.int32)
    else:
        remaining = jnp.sum(window.masked, axis=-1, dtype=jnp.int32)
        counts = unmasking.scheduled_counts(remaining, settings.reveal)
    return unmasking.next_useful(state.step, counts, settings.early_stop)


def step(fns: ModelFns, settings: MaskedSettings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row unmasks slots of its open block."""
    active = ~state.done
    window = open_window(fns, settings.block_length, state)
    block_keys = fold_in(state.rng_key, state.cursor)
    fate_keys = fold_in(fold_in(block_keys, jnp.zeros_like(state.step)), window.index)
    fate = draw_each(jax.random.uniform, fate_keys)
    number, count = _quota(settings, state, window, fate)
    # By block and step, not by forward: forwards that are left out change no draw.
    step_keys = fold_in(block_keys, number + 1)
    token_keys = fold_in(step_keys, 2 * window.index)
    choice_keys = fold_in(step_keys, 2 * window.index + 1)
    proposal, score = propose(fns, settings, state, window, token_keys, choice_keys)
    score = fate if settings.remasking_strategy == "origin" else score
    chosen = unmasking.top_count(score, window.masked, count)
    start = window.index[:, 0]
    state, _ = canvas.unmask(state, start, window.index, proposal, chosen)
    positions = jnp.where(active, state.end * (2 if settings.guided else 1), 0)
    state = state.replace(forwards=state.forwards.add(positions))
    ready = number + 1 >= num_steps(settings.denoising_steps, window)
    return close(
        fns,
        state,
        window,
        number + 1,
        early_stop=settings.early_stop,
        ready=ready | settings.early_stop,
    )


def most_steps(settings: MaskedSettings, slots: int) -> jax.Array:
    """Each block's steps, useful or not, and one for each slot that they leave masked."""
    blocks = -(-slots // window_width(settings.block_length, slots))
    return blocks * settings.denoising_steps + slots


register(
    Decoder(
        name="masked",
        summary="bidirectional denoising of the whole canvas, without a cache",
        settings=MaskedSettings,
        resolve=resolve,
        init=init,
        step=step,
        cache=lambda settings: "none (exact)",
        most_steps=most_steps,
    )
)
