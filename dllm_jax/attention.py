"""Attention of fresh tokens over [cached prefix | fresh tokens], backend by backend.

A backend raises NotImplementedError for a case that it cannot do. "auto" then takes the
next one, and says in the log what it took.
"""

import functools
import logging

import jax

from dllm_jax.cache import KVCache
from dllm_jax.platform import refuse_kernels, target
from kernels_pallas import (
    BlockSizes,
    CachedKV,
    PackedFields,
    attend_reference,
    paired_attention,
)

_logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "pallas", "xla")


def _xla(q, k, v, packed: PackedFields, cached: CachedKV | None, layer) -> jax.Array:
    if cached is not None:
        cached = cached.of_layer(layer)
    return attend_reference(q, k, v, packed.fields, cached)


def _pallas(q, k, v, packed: PackedFields, cached: CachedKV | None, layer) -> jax.Array:
    refuse_kernels()
    sizes = BlockSizes.for_device(target()[1])
    return paired_attention(q, k, v, packed, cached, layer, block_sizes=sizes)


_BACKENDS = {"pallas": _pallas, "xla": _xla}


@functools.lru_cache
def _log_once(message: str) -> None:
    _logger.info(message)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    fields: PackedFields,
    cache: KVCache | None,
    layer: jax.Array,
    implementation: str = "auto",
) -> jax.Array:
    """Attention under the visibility rule.

    Args:
      q: `[B, T, N, H]` roped queries.
      k: `[B, K, T, H]` roped fresh keys.
      v: `[B, K, T, H]` fresh values.
      fields: of the fresh tokens, packed once for all layers by `pack_fields(.., N / K)`.
      cache: the committed prefix, read only, or None.
      layer: int32 scalar, which layer of the cache to read.
      implementation: "pallas" (TPU), "xla" (everywhere), or "auto": the first of these
        that can.

    Returns:
      `[B, T, N, H]`.

    Raises:
      NotImplementedError: if the chosen implementation cannot do this case.
      ValueError: for an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be one of {', '.join(IMPLEMENTATIONS)}.")
    cached = None
    if cache is not None:
        cached = CachedKV(
            cache.k, cache.v, cache.fields, cache.length, cache.k_scale, cache.v_scale
        )
    inputs = (q, k, v, fields, cached, layer)
    if implementation != "auto":
        return _BACKENDS[implementation](*inputs)
    case = f"{q.dtype} queries {q.shape}, {k.shape[1]} key heads"
    refused = ""
    for name, backend in _BACKENDS.items():
        try:
            out = backend(*inputs)
        except NotImplementedError as reason:
            refused += f"; not {name}: {reason}"
            continue
        _log_once(f"attention of {case}: {name}{refused}")
        return out
    raise NotImplementedError(f"attention of {case}{refused}")
