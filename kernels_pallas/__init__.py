"""Attention over [cached prefix | fresh tokens] under one visibility rule, and the grouped
products of experts.

This package depends on JAX alone and never imports `dllm_jax`.
"""

from kernels_pallas.block_sizes import BlockSizes
from kernels_pallas.grouped_product import can_group, grouped_product
from kernels_pallas.paired_attention import (
    PackedFields,
    attention_cost,
    pack_fields,
    paired_attention,
)
from kernels_pallas.reference import CachedKV, attend_reference
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
    "BlockSizes",
    "CachedKV",
    "PackedFields",
    "TokenFields",
    "attend_reference",
    "attention_cost",
    "can_group",
    "grouped_product",
    "pack_fields",
    "pack_key_fields",
    "paired_attention",
    "unpack_key_fields",
    "visible",
)
