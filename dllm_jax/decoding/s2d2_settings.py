"""Settings of the `s2d2` decoder: the reference's names, and this library's switches.

Specs, S2D2 sections 1.1, 2 and 3. Defaults are those of the published function for SDAR,
but for the temperature: 0 here, which gives what its 1 without sampling gives.
"""

from flax import struct

from dllm_jax.config import ModelConfig
from dllm_jax.decoding import acceptance, block, fast_dllm_v2, routing
from dllm_jax.decoding.acceptance import AcceptanceSettings
from dllm_jax.decoding.base import (
    SamplingSettings,
    check_at_least,
    check_choices,
    derive_sampling,
    setting,
)
from dllm_jax.decoding.routing import RoutingSettings

STRATEGIES = ("low_confidence_dynamic", "low_confidence_static", "sequential")


@struct.dataclass
class S2D2Settings(SamplingSettings, AcceptanceSettings, RoutingSettings):
    """Settings of the `s2d2` decoder."""

    block_length: int | None = setting(
        None,
        "tokens of a block; the model's own if not given",
        aliases=("block_size",),
        kind=int,
    )
    small_block_size: int | None = setting(
        None,
        "tokens of a sub-block, a divisor of block_length; 8 if not given (shifted logits)",
        aliases=("sub_block_length",),
        kind=int,
    )
    denoising_steps: int | None = setting(
        None,
        "steps over which a block is spread; block_length if not given",
        aliases=("steps_per_block",),
        traced=True,
        kind=int,
    )
    num_to_transfer: int = setting(1, "slots that every step unmasks at least", traced=True)
    remasking_strategy: str = setting(
        "low_confidence_dynamic",
        "which slots are unmasked where a verification was skipped or gave too few",
        choices=STRATEGIES,
        aliases=("remasking", "strategy"),
    )
    threshold: float = setting(
        0.85,
        "confidence above which (>) the dynamic strategy unmasks at once",
        traced=True,
        aliases=("confidence_threshold",),
    )
    always_check_high_confidence: bool = setting(
        False,
        "unmask by the threshold after a verification too",
        traced=True,
    )
    editing_threshold: float = setting(
        1.0,
        "probability above which (>) a draft replaces a decided token; 1 is off",
        traced=True,
        aliases=("edit_threshold",),
    )
    max_post_steps: int = setting(
        0, "most steps that may edit a block after its last mask", traced=True
    )
    do_sample: bool = setting(
        True,
        "draw drafts if temperature > 0; otherwise they are the most probable tokens, and "
        "the temperature shapes the judged distributions only",
    )
    cache_ver: bool = setting(
        False,
        "store prompts and blocks causally, as the verifier sees them",
        traced=True,
    )
    draft_ver: bool = setting(
        False,
        "decided tokens before the first mask of a block are causal in drafts too",
        traced=True,
    )
    leak_draft_mask: bool = setting(
        False,
        "draft_ver without cache_ver: store a block under its last draft's mask, as the "
        "published code does by accident",
        traced=True,
    )
    reuse_verified: bool = setting(
        False,
        "keep the verifier's keys and values of a block that it accepted as it was "
        "drafted, instead of running it once more (exact; needs cache_ver)",
        traced=True,
    )
    fold_verify: bool = setting(
        False,
        "draft the next block in the forward that verifies this one, and use that if all "
        "of this one is accepted (exact; logits in place, needs reuse_verified)",
    )
    bonus_token: bool = setting(
        False,
        "after a block was accepted as it was drafted, also keep the verifier's token for "
        "the slot behind it (logits in place)",
    )
    fold: bool = setting(
        True,
        "store a finished block in the next block's first draft (exact; logits in place)",
    )
    early_stop: bool = setting(
        True, "end a row as soon as all it returns is decided (same tokens)"
    )
    # Derived by `resolve`.
    tempered: bool = struct.field(pytree_node=False, default=False)
    filter_draft: bool = struct.field(pytree_node=False, default=False)
    edits: bool = struct.field(pytree_node=False, default=False)


def resolve(settings: S2D2Settings, config: ModelConfig) -> S2D2Settings:
    """Fills in what was not given and checks everything; raises ValueError."""
    shifted = config.logit_alignment == "shifted"
    length, small = settings.block_length, settings.small_block_size
    if shifted:
        own = fast_dllm_v2.FastDLLMv2Settings(block_length=length, small_block_size=small)
        own = fast_dllm_v2.resolve(own, config)
        length, small = own.block_length, own.small_block_size
    else:
        own = block.BlockSettings(block_length=length)
        length = block.resolve(own, config).block_length
        if small not in (None, length):
            raise ValueError(
                f"small_block_size={small} needs shifted logits; with logits in place a "
                f"block of {length} is one segment."
            )
        small = length
    steps = length if settings.denoising_steps is None else settings.denoising_steps
    settings = settings.replace(
        block_length=length, small_block_size=small, denoising_steps=steps
    )
    check_choices(settings)
    check_at_least(
        settings,
        denoising_steps=1,
        num_to_transfer=1,
        threshold=0.0,
        editing_threshold=0.0,
        max_post_steps=0,
    )
    routing.check(settings)
    acceptance.check(settings)
    _check_switches(settings, shifted)
    settings = derive_sampling(settings)
    sample = settings.sample and settings.do_sample
    return settings.replace(
        sample=sample,
        tempered=settings.sample,
        # Where logits are shifted, the published code filters only what it draws from.
        filter_draft=settings.filtered and (sample or not shifted),
        edits=settings.editing_threshold < 1.0,
        write_rejected=not shifted,
        fold=settings.fold and not shifted,
    )


def _check_switches(settings: S2D2Settings, shifted: bool) -> None:
    needs = {
        "reuse_verified": ("cache_ver", "keys and values are reused that are causal"),
        "fold_verify": ("reuse_verified", "the next block sees reused keys"),
        "leak_draft_mask": ("draft_ver", "it is that mask which leaks"),
    }
    for name, (other, why) in needs.items():
        if getattr(settings, name) and not getattr(settings, other):
            raise ValueError(f"{name}=True needs {other}=True: {why}.")
    if settings.leak_draft_mask and settings.cache_ver:
        raise ValueError("leak_draft_mask=True needs cache_ver=False: it decides the mask.")
    for name in ("fold_verify", "bonus_token"):
        if shifted and getattr(settings, name):
            raise ValueError(
                f"{name}=True needs logits in place; where they are shifted, a block's "
                "first token comes from the forward that stores the block before it."
            )
    if shifted and settings.editing_threshold < 1.0:
        raise ValueError(
            f"editing_threshold={settings.editing_threshold} needs logits in place; use 1."
        )
    if settings.max_post_steps and settings.editing_threshold >= 1.0:
        raise ValueError(
            f"max_post_steps={settings.max_post_steps} needs editing_threshold < 1 "
            f"(it is {settings.editing_threshold})."
        )
