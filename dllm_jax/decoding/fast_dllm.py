"""Fast-dLLM: a step unmasks all that it is sure of, with or without an approximate cache.

Decoding of LLaDA and Dream (arXiv 2505.22618; specs, LLaDA 5, and for dParallel's entropy
rule, LEAP and KLASS 3 and 9.2). The canvas, its blocks and the two caches are those of
`bidirectional`. Without a cache it is exact; `prefix` and `dual` are approximations.

A strategy is a score and what a step takes by it, always including the best slot:

    confidence_threshold        confidence >= threshold
    confidence_threshold_quota  the same, of at most an even quota and what earlier steps
                                left of theirs (Fast-dLLM's uncached Dream)
    factor                      the n best, as long as the n-th >= 1 - factor / (n + 1)
    factor_script               the same, but the last candidate never fails (as published)
    entropy_threshold           entropy <= entropy_threshold (dParallel)
    low_confidence              an even quota of the most confident
    low_entropy                 an even quota of the least entropy
    entropy                     the least entropy, by Dream's time schedule
    hierarchy                   confidence > threshold, and of every run of masks the best
                                if > low_threshold (dInfer; specs, LEAP and KLASS 9.4)
    entropy_bounded             the least entropy, as long as it sums up to < eb_threshold
                                (as decoder `block`: JetEngine)
    eb_sampler                  the same, but all up to the one before <= eb_threshold
                                (the EB-Sampler's own bound, arXiv 2505.24857)
    margin                      lead over the second token >= margin_threshold

Confidence is the probability of the token, entropy that of its distribution, both before
temperature and filters, as is the lead.

With a cache and shifted logits (Dream) the forward that opens a block unmasks the block's
first slot and nothing else, as published: what predicts it lies outside the block and is
run in no other forward.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import sampling, unmasking
from dllm_jax.cache import cache_slots
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
    cache_setting,
    check_bidirectional,
    close,
    even_quota,
    look,
    num_steps,
    open_window,
    propose_from_hidden,
    propose_plain,
    slot_keys,
    window_width,
)

STRATEGIES = (
    "confidence_threshold",
    "confidence_threshold_quota",
    "factor",
    "factor_script",
    "entropy_threshold",
    "low_confidence",
    "low_entropy",
    "entropy",
    "hierarchy",
    "entropy_bounded",
    "eb_sampler",
    "margin",
)
# Which strategies read a setting, where not all do; what it is if not given.
_READERS = {
    "threshold": ("confidence_threshold", "confidence_threshold_quota", "hierarchy"),
    "low_threshold": ("hierarchy",),
    "factor": ("factor", "factor_script"),
    "entropy_threshold": ("entropy_threshold",),
    "eb_threshold": ("entropy_bounded", "eb_sampler"),
    "margin_threshold": ("margin",),
    "eps": ("entropy",),
    "denoising_steps": (
        "confidence_threshold_quota",
        "low_confidence",
        "low_entropy",
        "entropy",
    ),
}
_DEFAULTS = {
    "threshold": 0.9,
    "low_threshold": 0.4,
    "factor": 1.0,
    "entropy_threshold": 0.5,
    "eb_threshold": 0.35,
    "margin_threshold": 0.8,
    "eps": 1e-3,
    "denoising_steps": 0,
}


@struct.dataclass
class FastDLLMSettings(SamplingSettings):
    """Settings of the `fast_dllm` decoder."""

    block_length: int = block_length_setting(32)
    cache: str = cache_setting("prefix")
    remasking_strategy: str | None = setting(
        None,
        "which slots a step unmasks; if not given, the one whose threshold or factor is, "
        "else confidence_threshold",
        choices=STRATEGIES,
        aliases=("remasking", "strategy", "alg"),
        kind=str,
    )
    threshold: float | None = setting(
        None,
        "confidence from which (>=) a slot is unmasked at once; 0.9 if not given",
        traced=True,
        aliases=("confidence_threshold",),
        kind=float,
    )
    low_threshold: float | None = setting(
        None,
        "hierarchy: confidence above which (>) the best of a run of masks is unmasked; "
        "0.4 if not given",
        traced=True,
        kind=float,
    )
    factor: float | None = setting(
        None,
        "the n-th most confident slot needs 1 - factor / (n + 1); 1 if not given",
        traced=True,
        kind=float,
    )
    entropy_threshold: float | None = setting(
        None,
        "entropy in nats up to which (<=) a slot is unmasked at once; 0.5 if not given",
        traced=True,
        kind=float,
    )
    eb_threshold: float | None = setting(
        None,
        "entropy_bounded, eb_sampler: nats that one step may unmask; 0.35 if not given",
        traced=True,
        kind=float,
    )
    margin_threshold: float | None = setting(
        None,
        "margin: lead over the second most probable token from which (>=) a slot is "
        "unmasked at once; 0.8 if not given",
        traced=True,
        kind=float,
    )
    denoising_steps: int | None = setting(
        None,
        "strategies with a quota: steps over which a block is spread; 0 or not given is "
        "one a token",
        aliases=("steps_per_block",),
        traced=True,
        kind=int,
    )
    eps: float | None = setting(
        None,
        "entropy: time at which the schedule ends; 0.001 if not given",
        traced=True,
        kind=float,
    )
    early_stop: bool = setting(
        True,
        "skip forwards that unmask nothing, end a row as soon as all it returns is "
        "decided (same tokens)",
    )
    # Derived by `resolve`: [S] float32, share of the masks that each step reveals.
    reveal: Any = struct.field(default=(), metadata={"kind": float})


def resolve(settings: FastDLLMSettings, config: ModelConfig) -> FastDLLMSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    check_bidirectional(config)
    return resolve_rule(settings)


def resolve_rule(settings: FastDLLMSettings) -> FastDLLMSettings:
    """`resolve` but for what depends on the model."""
    strategy = settings.remasking_strategy
    if strategy is None:
        named = ("factor", "entropy_threshold")  # each of one strategy, its namesake
        given = [name for name in named if getattr(settings, name) is not None]
        strategy = given[0] if given else STRATEGIES[0]
        settings = settings.replace(remasking_strategy=strategy)
    check_choices(settings)
    for name, readers in _READERS.items():
        if getattr(settings, name) is None:
            settings = settings.replace(**{name: _DEFAULTS[name]})
        elif strategy not in readers:
            raise ValueError(
                f"{name}={getattr(settings, name)} needs remasking_strategy "
                f"{' or '.join(readers)} (it is {strategy!r})."
            )
    check_at_least(settings, block_length=0, **dict.fromkeys(_DEFAULTS, 0))
    if not settings.eps < 1.0:
        raise ValueError(f"eps={settings.eps} must be in [0, 1).")
    if settings.cache != "none" and settings.block_length == 0:
        raise ValueError(
            f"cache={settings.cache!r} keeps what lies outside a block: it needs "
            "block_length >= 1 (it is 0, all new tokens)."
        )
    if strategy == "entropy":
        steps = settings.denoising_steps or settings.block_length
        if not steps:
            raise ValueError(
                "denoising_steps=0 with block_length=0 leaves the schedule of "
                "remasking_strategy 'entropy' without a length: give one of them."
            )
        reveal = unmasking.reveal_schedule(steps, settings.eps).tolist()
        settings = settings.replace(denoising_steps=steps, reveal=tuple(reveal))
    return resolve_sampling(settings)


def init(
    fns: ModelFns, settings: FastDLLMSettings, inputs: DecodeInputs, canvas_length: int
) -> DecodeState:
    """Lays out the canvas; each block's first forward fills the cache, so it runs none.

    Args:
      fns: the model.
      settings: resolved.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens.
    """
    state = canvas.lay_out(fns, inputs, canvas_length)
    if settings.cache != "none":
        batch = inputs.prompt.shape[0]
        state = state.replace(cache=fns.init_cache(batch, cache_slots(canvas_length)))
    return state


def propose(
    fns: ModelFns,
    settings: FastDLLMSettings,
    hidden: jax.Array,
    keys: jax.Array | None,
) -> tuple[sampling.Proposal, jax.Array | None]:
    """Proposals for `[B, W, D]`, and their lead `[B, W]` if the strategy reads it.

    The keys `[B, W]` are consumed; None where no token is drawn.
    """
    if settings.remasking_strategy != "margin":
        return propose_from_hidden(fns, settings, hidden, keys), None
    logits = fns.logits(hidden)
    proposal = propose_plain(settings, fns.config, logits, keys)
    return proposal, sampling.margin(logits, fns.config.mask_id)


def choose(
    settings: FastDLLMSettings,
    proposal: sampling.Proposal,
    window: Window,
    step: jax.Array,
    count: jax.Array,
    lead: jax.Array | None = None,
    needed: jax.Array | bool = True,
) -> jax.Array:
    """The slots that a step unmasks: bool `[B, W]`.

    Args:
      settings: resolved.
      proposal: `[B, W]` each.
      window: the open block.
      step: int32 `[B]`, steps done in the block.
      count: int32 `[B]`, what the time schedule says.
      lead: float32 `[B, W]`, for strategy margin.
      needed: bool `[B, 1]`, False for rows that may also unmask nothing, where what
        passes a threshold decides.
    """
    confidence, surety = proposal.confidence, -proposal.entropy
    masked, strategy = window.masked, settings.remasking_strategy
    confident = confidence >= settings.threshold
    quota = even_quota(settings.denoising_steps, step, window)
    if strategy == "confidence_threshold":
        return unmasking.best_and(confident, confidence, masked, needed)
    if strategy == "confidence_threshold_quota":
        steps = num_steps(settings.denoising_steps, window)
        so_far = (step + 1) * (window.size // steps)
        so_far += jnp.minimum(step + 1, window.size % steps)
        due = jnp.where(step + 1 < steps, so_far, window.size)
        remaining = jnp.sum(masked, axis=-1, dtype=jnp.int32)
        allowed = unmasking.top_count(confidence, masked, due - window.size + remaining)
        return allowed & unmasking.best_and(confident, confidence, masked)
    if strategy in ("factor", "factor_script"):
        return unmasking.confident_together(
            confidence, masked, settings.factor, strategy == "factor_script"
        )
    if strategy == "hierarchy":
        passing = confidence > settings.threshold
        leads = unmasking.best_of_runs(confidence, masked)
        passing |= leads & (confidence > settings.low_threshold)
        return unmasking.best_and(passing, confidence, masked, needed)
    if strategy == "entropy_threshold":
        certain = proposal.entropy <= settings.entropy_threshold
        return unmasking.best_and(certain, surety, masked, needed)
    if strategy == "entropy_bounded":
        return unmasking.entropy_bounded(proposal.entropy, masked, settings.eb_threshold)
    if strategy == "eb_sampler":
        return unmasking.jointly_certain(proposal.entropy, masked, settings.eb_threshold)
    if strategy == "margin":
        passing = lead >= settings.margin_threshold
        return unmasking.best_and(passing, lead, masked, needed)
    if strategy == "low_confidence":
        return unmasking.top_count(confidence, masked, quota)
    if strategy == "low_entropy":
        return unmasking.top_count(surety, masked, quota)
    return unmasking.top_count(surety, masked, count)


def only_first(
    fns: ModelFns, settings: FastDLLMSettings, state: DecodeState, window: Window
) -> tuple[jax.Array, jax.Array]:
    """Rows that unmask the block's first slot and nothing else, bool `[B]`; and that slot.

    With a cache and shifted logits: those that open a block. The slot is bool `[B, W]`.
    """
    at_first = window.masked & (window.index == state.cursor[:, None])
    shifted = fns.config.logit_alignment == "shifted"
    if settings.cache == "none" or not shifted:
        at_first = jnp.zeros_like(at_first)
    return (state.step == 0) & jnp.any(at_first, axis=-1), at_first


def step(fns: ModelFns, settings: FastDLLMSettings, state: DecodeState) -> DecodeState:
    """One forward of the batch: each row opens a block or goes on in its own."""
    window = open_window(fns, settings.block_length, state)
    number = count = state.step
    first_only, at_first = only_first(fns, settings, state, window)
    if settings.remasking_strategy == "entropy":
        remaining = jnp.sum(window.masked, axis=-1, dtype=jnp.int32)
        counts = unmasking.scheduled_counts(remaining, settings.reveal)
        number, count = unmasking.next_useful(state.step, counts, settings.early_stop)
        number = jnp.where(first_only, state.step, number)
    hidden, state = look(fns, settings.cache, state, window)
    keys = slot_keys(state, window, number)
    proposal, lead = propose(fns, settings, hidden, keys)
    chosen = choose(settings, proposal, window, number, count, lead)
    chosen = jnp.where(first_only[:, None], at_first, chosen)
    start = window.index[:, 0]
    state, _ = canvas.unmask(state, start, window.index, proposal, chosen)
    # As published, without early stop: the cached loop of a block runs at least once.
    ready = settings.early_stop | (settings.cache == "none") | (state.step > 0)
    return close(
        fns, state, window, number + 1, early_stop=settings.early_stop, ready=ready
    )


def cache_label(settings: FastDLLMSettings) -> str:
    """What its cache does to the result."""
    exact = settings.cache == "none"
    return "none (exact)" if exact else f"approximate ({settings.cache})"


def most_steps(settings: FastDLLMSettings, slots: int) -> jax.Array:
    """Each block's steps, useful or not, and one for each slot that they leave masked."""
    blocks = -(-slots // window_width(settings.block_length, slots))
    return blocks * (settings.denoising_steps + 1) + slots


register(
    Decoder(
        name="fast_dllm",
        summary="bidirectional denoising by confidence; cache none (exact), prefix or dual "
        "(approximate)",
        settings=FastDLLMSettings,
        resolve=resolve,
        init=init,
        step=step,
        cache=cache_label,
        most_steps=most_steps,
    )
)
