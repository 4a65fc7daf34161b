"""The families that this library reads, one data file each."""

from collections.abc import Mapping
from typing import Any

from dllm_jax.config import Family
from dllm_jax.models import dream, fast_dllm_v2, llada, llada2, sdar, sdar_moe

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (sdar, sdar_moe, llada, dream, fast_dllm_v2, llada2)
}


def resolve_family(hf: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config; raises ValueError with what is supported."""
    architectures = hf.get("architectures") or []
    for family in FAMILIES.values():
        if any(name in family.architectures for name in architectures):
            return family
    if not architectures:
        for family in FAMILIES.values():
            if hf.get("model_type") in family.model_types:
                return family
    known = ", ".join(
        f"{name} ({family.name})"
        for family in FAMILIES.values()
        for name in family.architectures
    )
    raise ValueError(
        f"config.json has architectures={architectures!r} and "
        f"model_type={hf.get('model_type')!r}; supported architectures are {known}; "
        "--family overrides what it says."
    )
