"""Grouped matrix products, one matrix a group of rows: the experts of a mixture.

On TPU, XLA computes `jax.lax.ragged_dot` by multiplying all rows with the matrices of all
groups and masking, by its own estimates for v5e: with 256 experts that is 256 times the
work as soon as rows are many. The kernel of `kernels_pallas` reads a group's matrix once
for each tile of its rows, and not at all if it has none.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.platform import refuse_kernels
from dllm_jax.quantize import QArray
from kernels_pallas import can_group, grouped_product


def grouped_matmul(
    rows: jax.Array,
    weight: Any,
    layer: jax.Array,
    sizes: jax.Array,
    group: jax.Array,
    interpret: bool | None = None,
) -> jax.Array:
    """Each row times the matrix of its group, in `rows.dtype`.

    Args:
      rows: `[M, D]`, sorted by group; those behind the groups give anything.
      weight: `[L, E, D, F]`, an array or a `QArray`; rows are never quantised here.
      layer: int32 scalar, whose matrices to take. The kernel gets those of all layers: a
        slice of an operand would be copied for it.
      sizes: int32 `[E]`, rows of each group.
      group: int32 `[M]`, of each row; any for rows without a group.
      interpret: static; the kernel in interpret mode (tests), or where it can run if None.

    Returns:
      `[M, F]`.
    """
    quantised = isinstance(weight, QArray)
    values = weight.values if quantised else weight
    if interpret is None and not _can(values, rows.dtype):
        own = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), weight
        )
        return _without_kernel(rows, own, sizes, group)
    _, experts, depth, width = values.shape
    return grouped_product(
        rows,
        values.reshape(-1, depth, width),
        weight.scale.reshape(-1, width) if quantised else None,
        sizes,
        layer * experts,
        interpret=bool(interpret),
    )


def _without_kernel(
    rows: jax.Array, weight: Any, sizes: jax.Array, group: jax.Array
) -> jax.Array:
    """`grouped_matmul` for the matrices `[E, D, F]` of one layer."""
    if not isinstance(weight, QArray):
        return jax.lax.ragged_dot(rows, weight, sizes)
    out = jax.lax.ragged_dot(
        rows,
        weight.values.astype(rows.dtype),
        sizes,
        preferred_element_type=jnp.float32,
    )
    last = weight.scale.shape[0] - 1
    return (out * weight.scale[jnp.minimum(group, last)]).astype(rows.dtype)


def _can(weight: jax.Array, dtype: Any) -> bool:
    """Whether the kernel can do this product in this program."""
    try:
        refuse_kernels()
    except NotImplementedError:
        return False
    return can_group(weight, dtype)
