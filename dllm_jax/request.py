"""What a user asks for, checked before anything is loaded: `plan`, `plan_infill`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dllm_jax.config import ModelConfig
from dllm_jax.decoding import Decoder
from dllm_jax.model import check_pair
from dllm_jax.prompts import MARKER
from dllm_jax.settings import (
    canonical_names,
    default_decoder,
    describe_settings,
    find_decoder,
    find_preset,
    resolve_settings,
)

MAX_NEW_TOKENS = 128
LOGPROBS = ("commit", "rescored", "both")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked request: everything that a run needs besides weights."""

    decoder: Decoder
    settings: Any
    max_new_tokens: int
    seed: int | tuple[int, ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    chat: bool | None
    marker: str | None = None  # of holes, for infilling; max_new_tokens then is 0
    trace: bool = False
    logprobs: str | None = None

    def describe(self) -> dict[str, Any]:
        """The resolved settings, for printing."""
        length: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.marker is not None:
            length = {"infill": self.marker}
        return {
            "decoder": self.decoder.name,
            **length,
            "seed": self.seed,
            **describe_settings(self.settings),
        }


def plan(
    config: ModelConfig,
    decoder: str | None = None,
    *,
    max_new_tokens: int | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    chat: bool | None = None,
    preset: str | None = None,
    steps: int | None = None,
    trace: bool = False,
    logprobs: str | None = None,
    **settings: Any,
) -> Plan:
    """Checks a request against a model's config. Arguments as `generate`."""
    chosen = find_preset(preset) if preset else {}
    own = chosen.pop("decoder", None)
    usual = chosen.pop("max_new_tokens", MAX_NEW_TOKENS)
    if max_new_tokens is None:
        max_new_tokens = usual
    method = find_decoder(decoder or own or default_decoder(config))
    given = {key: value for key, value in settings.items() if value is not None}
    given = {**chosen, **canonical_names(method, given)}
    if type(max_new_tokens) is not int or not 1 <= max_new_tokens <= config.max_positions:
        raise ValueError(
            f"{max_new_tokens=} must be a whole number from 1 to the model's "
            f"{config.max_positions} positions."
        )
    resolved = resolve_settings(method, config, given)
    if steps is not None:
        given["denoising_steps"] = _steps_per_block(steps, max_new_tokens, given, resolved)
        resolved = resolve_settings(method, config, given)
    seeds = tuple(seed) if isinstance(seed, list | tuple) else (seed,)
    if not all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        raise ValueError(f"{seed=} must be in [0, 2**32).")
    stops = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"{stop=} must be strings that are not empty.")
    ids = config.eos_ids if stop_ids is None else stop_ids
    valid = isinstance(ids, list | tuple) and all(
        type(i) is int and 0 <= i < config.vocab_size and i != config.mask_id for i in ids
    )
    if not valid:
        raise ValueError(
            f"{stop_ids=} must be a list of ids in [0, {config.vocab_size}), without the "
            "mask id."
        )
    if not isinstance(trace, bool):
        raise ValueError(f"{trace=} must be True or False.")
    if logprobs not in (None, *LOGPROBS):
        raise ValueError(f"{logprobs=} must be None or one of {', '.join(LOGPROBS)}.")
    seed = seeds if isinstance(seed, list | tuple) else seed
    ids = tuple(ids)
    more = {"trace": trace, "logprobs": logprobs}
    return Plan(method, resolved, max_new_tokens, seed, stops, ids, chat, **more)


def plan_infill(
    config: ModelConfig,
    decoder: str | None = None,
    *,
    marker: str = MARKER,
    seed: int | Sequence[int] = 0,
    preset: str | None = None,
    **settings: Any,
) -> Plan:
    """Checks a request for infilling against a model's config. Arguments as `infill`."""
    if config.attention != "bidirectional":
        raise ValueError(
            "infilling needs a model that sees what follows a hole (attention "
            f"'bidirectional'); this one has attention={config.attention!r}: a hole would "
            "see its own block and the text before it, but not after. It can continue a "
            "prompt (generate)."
        )
    for name in ("max_new_tokens", "stop", "stop_ids", "steps", "chat"):
        if name in settings:
            raise ValueError(f"{name}={settings[name]!r} does not apply to infilling.")
    if not isinstance(marker, str) or len(marker) < 2:
        raise ValueError(f"{marker=} must be a text of at least two characters.")
    # The row's own length counts, not the usual number of new tokens or a preset's.
    unused = {"max_new_tokens": 1, "stop_ids": ()}
    request = plan(config, decoder, seed=seed, preset=preset, **unused, **settings)
    return dataclasses.replace(request, max_new_tokens=0, marker=marker)


def _steps_per_block(steps: int, max_new_tokens: int, given: dict, resolved: Any) -> int:
    """Denoising steps of one block, from the number of steps in all."""
    if "denoising_steps" in given:
        raise ValueError(
            f"{steps=} (in all) and denoising_steps (per block) are both given: choose one."
        )
    if type(steps) is not int or steps < 1:
        raise ValueError(f"{steps=} must be a whole number of at least 1.")
    if not hasattr(resolved, "denoising_steps"):
        raise ValueError(f"{steps=} does not apply: this decoder has no denoising_steps.")
    length = resolved.block_length or max_new_tokens  # 0: all of it is one block
    per_block, rest = divmod(steps * length, max_new_tokens)
    if per_block < 1 or rest:
        raise ValueError(
            f"{steps=} cannot be spread evenly over {max_new_tokens} tokens in blocks of "
            f"{length}: use a multiple of {max_new_tokens / length:g}."
        )
    return per_block


def check_drafter(config: ModelConfig, request: Plan, drafter: ModelConfig | None) -> None:
    """Raises ValueError unless the decoder has the models that it needs."""
    name = request.decoder.name
    if request.decoder.drafts and drafter is None:
        raise ValueError(
            f"decoder {name!r} needs draft_model, a model that drafts (the same one may)."
        )
    if drafter is not None:
        if not request.decoder.drafts:
            raise ValueError(f"draft_model is given, but not used by decoder {name!r}.")
        check_pair(config, drafter)
