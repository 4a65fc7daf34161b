"""LEAP: unmask early what the likely next tokens would not change.

Specs, LEAP and KLASS 1 (arXiv 2605.10980). A step runs the text and, behind it, what could
come next: as candidates the tokens to which the step before gave a probability of at least
`eta`, at their slots' positions, and a mask copy of every slot that is still masked. The
text sees nothing of that. A mask copy sees the text and the candidates of all slots but
its own, so one forward predicts a slot twice: in the present context and in a perturbed
one. A slot whose first choice is the same in both and whose confidence is at least `tau`
is unmasked early; all else is the base rule's, a strategy of `fast_dllm`
(`confidence_threshold` as published, `entropy_threshold` for dParallel's checkpoints). If
nothing passes, the best slot is unmasked.

The test says nothing where no candidate of another slot is in sight, so it counts only
where one is; a block's first forward has no candidates.

What is not known of the published method are settings. On the demo model the first, second
and fourth change forwards by at most three in a hundred (docs/leap.md), so their defaults
are the simplest, the strictest and the cheapest choice:

    perturbation      add      candidates join the context, masked slots still show as masks
                      replace  the copies see each other instead of the text's masks
                      future   a slot with a candidate counts as filled
    candidates_see    the text, or also each other: then, from the second layer on, a copy
                      hears of its own slot's candidates through the others
    early_confidence  original: only what the text itself is sure of, so that `tau` at the
                      base rule's threshold is the base rule; perturbed; least of both
    num_candidates    most tokens a slot offers, for static shapes; above `eta` 0.2 there
                      are at most four

Models. Bidirectional: exact without a cache; with Fast-dLLM's, what is appended looks at
the kept keys too. Block-causal with logits in place: the cached prefix is seen by all.
Where logits are shifted (Dream) the mask copy that predicts a slot stands on the slot
before, and is a copy of the token there if that is decided. It sees neither the candidates
of its slot nor those of its own place. Nothing appended is ever stored.

Greedy only, as published.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax import layouts, sampling
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import block, canvas, fast_dllm
from dllm_jax.decoding.base import (
    UNDECIDED,
    DecodeInputs,
    Decoder,
    DecodeState,
    ModelFns,
    check_at_least,
    register,
    setting,
)
from dllm_jax.decoding.bidirectional import (
    CACHES,
    Window,
    close,
    look,
    open_window,
    window_width,
)

BASES = (
    "confidence_threshold",
    "entropy_threshold",
    "factor",
    "hierarchy",
    "entropy_bounded",
    "eb_sampler",
    "margin",
)
PERTURBATIONS = ("add", "replace", "future")
_BLOCK = 32  # as published
_EARLY = 1  # of the rules: the base rule, and this one


def _not_a_setting(kind: type) -> Any:
    return struct.field(default=None, metadata={"kind": kind})


@struct.dataclass
class LEAPSettings(fast_dllm.FastDLLMSettings):
    """Settings of the `leap` decoder, the base rule's among them."""

    block_length: int | None = setting(
        None,
        "tokens of a block; 32, or a block-causal model's own, if not given",
        aliases=("block_size",),
        kind=int,
    )
    cache: str | None = setting(
        None,
        "bidirectional models, keys kept through a block: none (exact; if not given), "
        "prefix or dual (approximate)",
        choices=CACHES,
        kind=str,
    )
    remasking_strategy: str | None = setting(
        None,
        "what a step unmasks anyway; if not given, the one whose threshold or factor is, "
        "else confidence_threshold",
        choices=BASES,
        aliases=("remasking", "strategy", "alg"),
        kind=str,
    )
    eta: float = setting(
        0.2,
        "probability in the step before from which (>=) a token is a candidate",
        traced=True,
        aliases=("candidate_threshold",),
    )
    tau: float = setting(
        0.7,
        "confidence from which (>=) a slot is unmasked early if its token is stable",
        traced=True,
        aliases=("early_threshold",),
    )
    consistency: bool = setting(
        True, "whether the token must be stable; without, tau is a second threshold"
    )
    perturbation: str = setting(
        "add", "what a mask copy sees besides candidates", choices=PERTURBATIONS
    )
    candidates_see: str = setting(
        "text",
        "what a candidate sees: the text, or all candidates of other slots too",
        choices=("text", "all"),
    )
    early_confidence: str = setting(
        "original",
        "the confidence that tau is compared with",
        choices=("original", "perturbed", "least"),
    )
    num_candidates: int = setting(1, "most candidates of a slot")
    fold: bool = setting(
        True,
        "block-causal models: store a finished block in the next block's first forward "
        "(exact)",
    )
    # No base rule reads these.
    denoising_steps: int | None = _not_a_setting(int)
    eps: float | None = _not_a_setting(float)
    # Derived by `resolve`.
    block_causal: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class LEAPState(DecodeState):
    """A batch between two steps, and what its open blocks may hold next."""

    candidates: Any  # [B, W, N] int32, the mask id where there is none


def resolve(settings: LEAPSettings, config: ModelConfig) -> LEAPSettings:
    """Fills in what was not given and checks everything; raises ValueError."""
    causal = config.attention == "block_causal"
    if causal:
        as_block = block.BlockSettings(block_length=settings.block_length)
        length = block.resolve(as_block, config).block_length
        if settings.cache is not None:
            raise ValueError(
                f"cache={settings.cache!r} is for bidirectional models; that of a "
                "block-causal one is exact."
            )
    else:
        length = _BLOCK if settings.block_length is None else settings.block_length
    settings = settings.replace(
        block_length=length, cache=settings.cache or "none", block_causal=causal
    )
    settings = fast_dllm.resolve_rule(settings)
    check_at_least(settings, eta=0.0, tau=0.0, num_candidates=1)
    if settings.eta > 1.0:
        raise ValueError(f"eta={settings.eta} must be in [0, 1].")
    if settings.num_candidates >= config.vocab_size:
        raise ValueError(
            f"num_candidates={settings.num_candidates} must be below the vocabulary's "
            f"{config.vocab_size}."
        )
    if settings.sample:
        raise ValueError(
            f"temperature={settings.temperature} must be 0: LEAP compares most probable "
            "tokens."
        )
    return settings


def init(
    fns: ModelFns, settings: LEAPSettings, inputs: DecodeInputs, canvas_length: int
) -> LEAPState:
    """The state of `block` or `fast_dllm`, and no candidates.

    Args:
      fns: the model.
      settings: resolved.
      inputs: the prompts, P <= canvas_length.
      canvas_length: static; at least every row's prompt and new tokens.
    """
    if settings.block_causal:
        length = settings.block_length
        state, _ = block.prefill(fns, length, inputs, canvas_length)
    else:
        state = fast_dllm.init(fns, settings, inputs, canvas_length)
    batch, slots = state.canvas.shape
    shape = (batch, window_width(settings.block_length, slots), settings.num_candidates)
    none = jnp.full(shape, fns.config.mask_id, jnp.int32)
    return LEAPState(**vars(state), candidates=none)


def _behind(slots: jax.Array) -> jax.Array:
    """Of each slot of `[B, W]`, what holds for the slot before it; False for the first."""
    return jnp.pad(slots, ((0, 0), (1, 0)))[:, :-1]


def superpose(
    fns: ModelFns, settings: LEAPSettings, state: LEAPState, window: Window
) -> tuple[canvas.Appended, jax.Array]:
    """What is appended to each row: W mask copies, then candidates.

    Args:
      fns: the model.
      settings: resolved.
      state: before the step.
      window: the open block, W slots.

    Returns:
      The tokens, and bool `[B, W]`, the slots whose copy sees another slot's candidate.
    """
    index, masked, mask_id = window.index, window.masked, fns.config.mask_id
    shifted = fns.config.logit_alignment == "shifted"
    batch, width, count = state.candidates.shape
    opened = (state.step[:, None] > 0) & settings.consistency  # else nobody looks at them
    token = jnp.where((masked & opened)[..., None], state.candidates, mask_id)
    is_candidate = token != mask_id
    offered = jnp.any(is_candidate, axis=-1)
    copied = masked & jnp.any(offered, axis=-1, keepdims=True)

    # The copy that predicts a slot stands at `place`, whose own candidates it cannot see.
    place, at_place, before = index, masked, offered
    number = offered.astype(jnp.int32)
    in_sight = jnp.sum(number, axis=-1, keepdims=True) - number
    if shifted:
        place = jnp.maximum(index - 1, 0)
        at_place, before = _behind(masked), _behind(offered)
        in_sight -= before.astype(jnp.int32)
    shown = jnp.zeros_like(masked)
    hidden = jnp.zeros_like(masked)
    if settings.perturbation != "add":
        shown = copied & at_place
        # Slots of the text that their copies stand for.
        hidden = masked & jnp.pad(copied, ((0, 0), (0, 1)))[:, 1:] if shifted else copied
    if settings.perturbation == "future":
        shown &= ~before
        hidden |= offered

    def each(x):  # [B, W, N] -> [B, W * N]
        return x.reshape(batch, width * count)

    def repeat(x):  # [B, W] -> [B, W * N]
        return jnp.repeat(x, count, axis=1)

    parts = [(canvas.read(state.canvas, place), place, shown, copied)]
    candidates = (each(token), repeat(index), each(is_candidate), each(is_candidate))
    parts += [candidates, candidates] if shifted else [candidates]
    tokens, position, shown, valid = (
        jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)
    )
    start = jnp.zeros_like(state.cursor)
    if settings.block_causal:
        start = state.cursor // settings.block_length
    moments = _moments(settings, index, count, shifted)
    fields = layouts.appended(position, start[:, None], shown, valid, *moments)
    nothing = jnp.zeros(state.canvas.shape, bool)
    hidden = canvas.write(nothing, index[:, 0], hidden)
    return canvas.Appended(tokens, fields, valid, hidden), masked & (in_sight > 0)


def _moments(
    settings: LEAPSettings, index: jax.Array, count: int, shifted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """When what is appended looks, until when and since when it is shown; `[B, U]` each.

    Where logits are shifted every slot has a moment of its own, at which its copy looks
    and its candidates are hidden: these are there twice, before it and behind it.
    """
    own = jnp.zeros_like(index)
    if shifted:
        own += jnp.arange(index.shape[1], dtype=jnp.int32)
    many = jnp.repeat(own, count, axis=1)
    looks = many if settings.candidates_see == "all" else jnp.full_like(many, -1)
    always, forever = jnp.zeros_like(many), jnp.full_like(many, layouts.FOREVER)
    copies = (own, jnp.full_like(own, layouts.FOREVER), jnp.zeros_like(own))
    parts = [copies, (looks, forever, always)]
    if shifted:
        parts = [copies, (looks, many, always), (looks, forever, many + 1)]
    moment, until, since = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return moment, until, since


def _unmask(
    fns: ModelFns,
    settings: LEAPSettings,
    state: LEAPState,
    window: Window,
    hidden: jax.Array,
    informed: jax.Array,
) -> LEAPState:
    """Unmasks slots of the open block and remembers the candidates of the others.

    Args:
      fns: the model.
      settings: resolved.
      state: before the step.
      window: the open block, W slots.
      hidden: `[B, W + U, D]`, of what predicts the window and of what is appended.
      informed: bool `[B, W]`, from `superpose`.
    """
    width, mask_id = window.index.shape[1], fns.config.mask_id
    masked = window.masked
    both, lead = fast_dllm.propose(fns, settings, hidden[:, : 2 * width], keys=None)
    original = sampling.Proposal(*(x[:, :width] for x in both))
    copy = sampling.Proposal(*(x[:, width:] for x in both))
    lead = None if lead is None else lead[:, :width]

    confidence = {
        "original": original.confidence,
        "perturbed": copy.confidence,
        "least": jnp.minimum(original.confidence, copy.confidence),
    }[settings.early_confidence]
    early = masked & (confidence >= settings.tau)
    if settings.consistency:
        early &= informed & (original.token == copy.token)
    only, at_first = jnp.zeros_like(state.done), jnp.zeros_like(masked)
    if not settings.block_causal:
        only, at_first = fast_dllm.only_first(fns, settings, state, window)
    needed = ~jnp.any(early, axis=-1, keepdims=True)
    base = fast_dllm.choose(
        settings, original, window, state.step, state.step, lead, needed
    )
    chosen = jnp.where(only[:, None], at_first, base | early)

    token, probability = original.token[..., None], original.confidence[..., None]
    if settings.num_candidates > 1:
        logits = fns.logits(hidden[:, :width])
        count = settings.num_candidates
        token, probability = sampling.top_tokens(logits, mask_id, count)
    rule = jnp.where(early & ~base, _EARLY, 0)
    start = window.index[:, 0]
    state, _ = canvas.unmask(state, start, window.index, original, chosen, rule)
    return state.replace(candidates=jnp.where(probability >= settings.eta, token, mask_id))


def step(fns: ModelFns, settings: LEAPSettings, state: LEAPState) -> LEAPState:
    """One forward of the batch: each row unmasks slots of its open block, or stores it."""
    if settings.block_causal:
        return _step_block_causal(fns, settings, state)
    window = open_window(fns, settings.block_length, state)
    appended, informed = superpose(fns, settings, state, window)
    hidden, state = look(fns, settings.cache, state, window, appended)
    state = _unmask(fns, settings, state, window, hidden, informed)
    return close(fns, state, window, state.step + 1, early_stop=settings.early_stop)


def _open_block(fns, settings: LEAPSettings, state: LEAPState, rows: jax.Array) -> Window:
    """The open block of a block-causal model, as `open_window` gives a canvas's."""
    length = settings.block_length
    index = state.cursor[:, None] + jnp.arange(length, dtype=jnp.int32)
    masked = (canvas.read(state.canvas, index) == fns.config.mask_id) & rows[:, None]
    inside = jnp.ones_like(masked)
    size = jnp.full_like(state.cursor, length)
    return Window(index, inside, masked, size, state.cursor + length)


def _step_block_causal(fns, settings: LEAPSettings, state: LEAPState) -> LEAPState:
    rows = ~state.done if settings.fold else ~state.done & ~state.pending
    window = _open_block(fns, settings, state, rows)
    appended, informed = superpose(fns, settings, state, window)

    def denoise(fns, settings, state, index, hidden, rows):
        state = _unmask(fns, settings, state, window, hidden, informed)
        tokens = canvas.read(state.canvas, index)
        complete = ~jnp.any(tokens == fns.config.mask_id, axis=-1)
        enough = block.answered(fns, state, index, tokens)
        if not settings.early_stop:
            enough &= complete
        extra = jnp.sum(appended.valid, axis=-1, dtype=jnp.int32)
        return (
            state.replace(
                step=state.step + rows.astype(jnp.int32),
                forwards=state.forwards.add(jnp.where(rows, extra, 0)),
            ),
            complete,
            enough,
        )

    return block.advance(fns, settings, state, denoise, appended)


def cache_label(settings: LEAPSettings) -> str:
    """What its cache does to the result."""
    return "exact" if settings.block_causal else fast_dllm.cache_label(settings)


def report(settings: LEAPSettings, state: LEAPState, row: int) -> dict[str, int]:
    """How many tokens were unmasked early, those behind the end too."""
    del settings
    decided = state.unmask_forward[row] != UNDECIDED
    return {"early": int(jnp.sum(decided & (state.rule[row] == _EARLY)))}


register(
    Decoder(
        name="leap",
        summary="unmasks early what the likely next tokens would not change (LEAP)",
        settings=LEAPSettings,
        resolve=resolve,
        init=init,
        step=step,
        cache=cache_label,
        report=report,
        rules=lambda settings: (settings.remasking_strategy, "early"),
    )
)
