"""Grouped matrix products, one matrix a group of rows: the experts of a mixture.

On TPU, XLA computes `jax.lax.ragged_dot` by multiplying all rows with the matrices of all
groups and masking, by its own estimates for v5e: with 256 experts that is 256 times the
work as soon as rows are many. JAX's own kernel (megablox) reads a group's matrix once for
each tile of its rows, and not at all if it has none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from dllm_jax.platform import refuse_kernels
from dllm_jax.quantize import QArray

_LANES = 128
_MOST_ROWS = 128  # of a tile
_MOST_WEIGHTS = 2**20  # numbers of a tile, 2 MiB in bfloat16, two of them at a time


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
    kernel = not isinstance(weight, QArray) and (interpret is not None or _can(weight))
    if not kernel:
        own = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), weight
        )
        return _without_kernel(rows, own, sizes, group)
    count, (layers, experts, depth, width) = rows.shape[0], weight.shape
    # The groups of the other layers are empty.
    all_sizes = jax.lax.dynamic_update_slice(
        jnp.zeros((layers * experts,), jnp.int32), sizes, (layer * experts,)
    )
    tile = min(_MOST_ROWS, -(-count // 16) * 16)
    padded = jnp.pad(rows, ((0, -count % tile), (0, 0)))
    out = gmm(
        padded,
        weight.reshape(-1, depth, width),
        all_sizes,
        preferred_element_type=rows.dtype,
        tiling=(tile, *_weight_tile(depth, width)),
        interpret=bool(interpret),
    )
    return out[:count]


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


def _can(weight: jax.Array) -> bool:
    """Whether the kernel can do this product in this program."""
    try:
        refuse_kernels()
    except NotImplementedError:
        return False
    return not (weight.shape[-2] % _LANES or weight.shape[-1] % _LANES)


def _weight_tile(depth: int, width: int) -> tuple[int, int]:
    """Tile of a `[D, F]` matrix: all of D if it may be, and as much of F as fits."""

    def largest(size: int, most: int) -> int:
        """The largest divisor in whole lanes; all of it where it has none."""
        fits = (n for n in range(_LANES, size + 1, _LANES) if size % n == 0 and n <= most)
        return max(fits, default=size)

    tile = largest(depth, 2048)
    return tile, largest(width, max(_MOST_WEIGHTS // tile, _LANES))
