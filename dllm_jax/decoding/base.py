"""What every decoder shares: its interface, the state of a batch, counters, registry."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.cache import KVCache
from dllm_jax.config import ModelConfig
from dllm_jax.sampling import Proposal, SamplingKnobs
from dllm_jax.transformer import ForwardOutput
from kernels_pallas import TokenFields

UNDECIDED = -1
"""`unmask_forward` of a slot that is still masked."""


class ModelFns(NamedTuple):
    """A model as a decoder sees it: no layers, no mesh, no kernels.

    `config` is there for its ids and block length only.
    """

    config: ModelConfig
    # (tokens [B, T], fields [B, T], cache or None) -> ForwardOutput
    forward: Callable[[jax.Array, TokenFields, KVCache | None], ForwardOutput]
    # hidden [B, T, D] -> float32 [B, T, V]
    logits: Callable[[jax.Array], jax.Array]
    # (batch, slots) -> an empty cache
    init_cache: Callable[[int, int], KVCache]
    # hidden [B, T, D] -> greedy proposals, or None: from the logits
    propose: Callable[[jax.Array], Proposal] | None = None
    # the model that drafts for this one, or None
    draft: "ModelFns | None" = None


@struct.dataclass
class Forwards:
    """Forward passes that each row took part in, by kind, and the tokens they processed.

    A pass that stores a finished block and denoises the next one at once counts as
    `denoise`; the stored tokens count in `positions`.
    """

    prefill: Any  # [B] int32, prompt blocks into the cache
    draft: Any  # [B] int32, a drafter's passes
    denoise: Any  # [B] int32, passes that unmask
    verify: Any  # [B] int32, passes that judge a draft
    commit: Any  # [B] int32, passes that only store a finished block
    positions: Any  # [B] int32, tokens of the row in all its passes

    @classmethod
    def zeros(cls, batch: int) -> "Forwards":
        """All counters at 0."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: jnp.zeros((batch,), jnp.int32) for name in names})

    @property
    def unmasking(self) -> jax.Array:
        """Passes so far that could unmask a token: int32 `[B]`."""
        return self.draft + self.denoise + self.verify

    def add(self, positions: jax.Array, **passes: jax.Array) -> "Forwards":
        """Counts passes (bool `[B]` by kind) and the row's tokens in them (int32 `[B]`)."""
        counted = {
            kind: getattr(self, kind) + took_part.astype(jnp.int32)
            for kind, took_part in passes.items()
        }
        return self.replace(positions=self.positions + positions, **counted)


class DecodeInputs(NamedTuple):
    """A batch of prompts, each row left-aligned: nothing pads a row on its left.

    A prompt is followed by masks up to P. For infilling, given tokens stand between them:
    what counts as the prompt then ends at the first mask.
    """

    prompt: jax.Array  # [B, P] int32, the mask id behind each row's prompt
    prompt_length: jax.Array  # [B] int32
    max_new_tokens: jax.Array  # [B] int32, 0 for a row that only fills up the batch
    rng_key: jax.Array  # [B] keys
    stop_ids: jax.Array  # [N] int32, filled up with -1


@struct.dataclass
class DecodeState:
    """A batch between two steps of the loop. Rows never look at each other.

    A decoder that remembers more has a state of its own, derived from this one.

    C is the canvas: prompt, generated slots, and slack of one block. A slot behind the
    prompt is masked exactly where it holds the mask id: prompts are checked not to contain
    it, and no rule ever proposes it.
    """

    canvas: Any  # [B, C] int32
    prompt_length: Any  # [B] int32
    end: Any  # [B] int32, one past the last slot that may be returned
    cursor: Any  # [B] int32, first slot of the open block
    step: Any  # [B] int32, denoising steps done in the open block
    pending: Any  # [B] bool, a decided block waits to be stored: that before the cursor
    #   where the decoder folds, else that at the cursor
    done: Any  # [B] bool
    rng_key: Any  # [B] keys
    stop_ids: Any  # [N] int32
    cache: KVCache | None  # None for decoders that recompute the whole canvas
    forwards: Forwards
    confidence: Any  # [B, C] float32, of each token when it was unmasked
    unmask_forward: Any  # [B, C] int32, number of the forward that unmasked it, from 0
    rule: Any  # [B, C] int32, which of `Decoder.rules` unmasked it


def setting(
    default: Any,
    help: str,
    *,
    traced: bool = False,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    kind: type | None = None,
) -> Any:
    """A field of a decoder's settings.

    Args:
      default: value where the user gives none.
      help: one line for `--help` and the notebooks' forms.
      traced: whether the value is an input of the compiled program, not part of it.
      choices: allowed values.
      aliases: other names that users of other projects type.
      kind: type to parse a flag with; that of `default` if None.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "aliases": aliases,
        "kind": kind or type(default),
    }
    return struct.field(pytree_node=traced, default=default, metadata=metadata)


@struct.dataclass
class SamplingSettings:
    """What every decoder that proposes tokens lets the user choose."""

    temperature: float = setting(
        0.0, "0 is greedy, otherwise logits are divided by it", traced=True
    )
    top_k: int = setting(0, "sample among the k most probable; 0 is off", traced=True)
    top_p: float = setting(
        1.0, "sample among the most probable that sum to p; 1 is off", traced=True
    )
    # Derived by `resolve_sampling`: what a compiled program must know of these values.
    sample: bool = struct.field(pytree_node=False, default=False)
    filtered: bool = struct.field(pytree_node=False, default=False)

    @property
    def knobs(self) -> SamplingKnobs:
        """The traced values, as `dllm_jax.sampling` takes them."""
        return SamplingKnobs(self.temperature, self.top_k, self.top_p)


def derive_sampling(settings: Any) -> Any:
    """Checks the sampling settings one by one and derives the rest; raises ValueError."""
    check_at_least(settings, temperature=0.0, top_k=0)
    if not 0.0 < settings.top_p <= 1.0:
        raise ValueError(f"top_p={settings.top_p} must be in (0, 1].")
    return settings.replace(
        sample=settings.temperature > 0.0,
        filtered=settings.top_k > 0 or settings.top_p < 1.0,
    )


def resolve_sampling(settings: Any) -> Any:
    """`derive_sampling` for decoders that filter only what they sample."""
    settings = derive_sampling(settings)
    if settings.filtered and not settings.sample:
        raise ValueError(
            f"top_k={settings.top_k} and top_p={settings.top_p} filter what is sampled; "
            f"they need temperature > 0 (it is {settings.temperature})."
        )
    return settings


def two_a_slot(settings: Any, slots: int) -> int:
    """Most steps of a decoder each of whose steps unmasks a slot or stores a block."""
    del settings
    return 2 * slots


def one_rule(settings: Any) -> tuple[str, ...]:
    """The strategy, for decoders that unmask by one rule."""
    return (getattr(settings, "remasking_strategy", "confidence"),)


class Decoder(NamedTuple):
    """A decoding method: pure functions over a batch's state."""

    name: str
    summary: str
    # a flax.struct dataclass of `setting` fields
    settings: type
    # (settings, config) -> settings without None; raises ValueError
    resolve: Callable[[Any, ModelConfig], Any]
    # (fns, settings, inputs, canvas length) -> state, with prompts in the cache
    init: Callable[[ModelFns, Any, DecodeInputs, int], DecodeState]
    # (fns, settings, state) -> state after one more forward
    step: Callable[[ModelFns, Any, DecodeState], DecodeState]
    # settings -> how the cache changes the result: "exact", or "approximate (...)"
    cache: Callable[[Any], str] = lambda settings: "exact"
    # (settings, slots of the canvas) -> steps after which every row must be done
    most_steps: Callable[[Any, int], int | jax.Array] = two_a_slot
    # whether it needs a model that drafts
    drafts: bool = False
    # (settings, state, row) -> what else its statistics are, JSON-ready
    report: Callable[[Any, Any, int], dict[str, Any]] = lambda settings, state, row: {}
    # settings -> names of the rules by which it unmasks, `DecodeState.rule` counts them
    rules: Callable[[Any], tuple[str, ...]] = one_rule


DECODERS: dict[str, Decoder] = {}


def register(decoder: Decoder) -> Decoder:
    """Makes a decoder known by name; raises ValueError if the name is taken."""
    if decoder.name in DECODERS:
        raise ValueError(f"a decoder named {decoder.name!r} is already registered.")
    DECODERS[decoder.name] = decoder
    return decoder


def check_at_least(settings: Any, **minimum: float) -> None:
    """Raises ValueError for a setting that is not a number, or below its minimum."""
    for name, least in minimum.items():
        value = getattr(settings, name)
        if not value >= least or value == float("inf"):
            raise ValueError(f"{name}={value} must be a number of at least {least}.")


def check_choices(settings: Any) -> None:
    """Raises ValueError for a setting outside its choices."""
    for field in dataclasses.fields(settings):
        choices = field.metadata.get("choices")
        value = getattr(settings, field.name)
        if choices and value not in choices:
            allowed = ", ".join(choices)
            raise ValueError(f"{field.name}={value!r} must be one of {allowed}.")
