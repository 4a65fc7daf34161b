"""Attention over [cached prefix | fresh tokens] under one visibility rule.

This package depends on JAX alone and never imports `dllm_jax`.
"""

from kernels_pallas.reference import attend_reference
from kernels_pallas.visibility import (
    FOREVER,
    NEVER,
    NUM_CACHED_FIELDS,
    TokenFields,
    pack_key_fields,
    unpack_key_fields,
    visible,
)

__all__ = (
    "FOREVER",
    "NEVER",
    "NUM_CACHED_FIELDS",
    "TokenFields",
    "attend_reference",
    "pack_key_fields",
    "unpack_key_fields",
    "visible",
)
