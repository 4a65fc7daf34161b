"""Products of rows with the matrix of their group, for TPU: the experts of a mixture.

Rows come sorted by group. A grid step multiplies a tile of rows with a tile of one group's
matrix and keeps what is of that group's rows; a group's matrix is read once for each tile
of rows that it has a part in, and not at all if it has none. Matrices may be int8, with a
scale for each output channel that the finished sums are multiplied by.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_MOST_ROWS = 128  # of a tile
_MOST_WEIGHTS = 2**20  # numbers of a tile, 2 MiB in bfloat16, two of them at a time
_FLOATS = (jnp.bfloat16, jnp.float32)


class _Visits(NamedTuple):
    """Which tile of rows and which group each grid step has, in order of rows."""

    group: jax.Array  # int32 [V], among the groups of `sizes`
    tile: jax.Array  # int32 [V]
    begin: jax.Array  # int32 [E], a group's first row
    end: jax.Array  # int32 [E]
    first: jax.Array  # int32 [1], the first of these groups among all matrices


def _plan_visits(
    sizes: jax.Array, first: jax.Array, tiles: int, tile: int
) -> tuple[_Visits, jax.Array]:
    """The visits, and how many there are: at least one, so that the grid is not empty."""
    end = jnp.cumsum(sizes, dtype=jnp.int32)
    begin = end - sizes
    first_tile = jax.lax.div(begin, tile)
    of_group = jnp.where(sizes > 0, jax.lax.div(end - 1, tile) - first_tile + 1, 0)
    up_to = jnp.cumsum(of_group, dtype=jnp.int32)
    # Every tile is visited for the group that its first row is of, and once more for each
    # group that begins inside of it.
    visit = jnp.arange(tiles + sizes.shape[0] - 1, dtype=jnp.int32)
    group = jnp.sum(visit[:, None] >= up_to, axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.shape[0] - 1)
    at = first_tile[group] + visit - (up_to - of_group)[group]
    at = jnp.clip(at, 0, tiles - 1)
    return _Visits(group, at, begin, end, first.reshape(1)), jnp.maximum(up_to[-1], 1)


def can_group(weight: jax.Array, dtype: jnp.dtype) -> bool:
    """Whether `grouped_product` takes matrices `[.., D, F]` for rows of `dtype`."""
    whole = not (weight.shape[-2] % _LANES or weight.shape[-1] % _LANES)
    return whole and dtype in _FLOATS and weight.dtype in (dtype, jnp.int8)


def grouped_product(
    rows: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    sizes: jax.Array,
    first: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Each row times the matrix of its group, summed in float32.

    Args:
      rows: bfloat16 or float32 `[M, D]`, sorted by group; rows behind the groups give
        anything.
      weight: `[G, D, F]`, in the dtype of `rows` or int8; D and F are multiples of 128.
      scale: float32 `[G, F]` where the matrices are int8, else None.
      sizes: int32 `[E]`, rows of each group; they sum to at most M.
      first: int32 scalar; group e has matrix `first + e`.
      interpret: static; whether to run on the host, step by step.

    Returns:
      `[M, F]` in the dtype of `rows`.

    Raises:
      NotImplementedError: for other shapes or dtypes.
    """
    if not can_group(weight, rows.dtype) or (scale is None) == (weight.dtype == jnp.int8):
        raise NotImplementedError(
            f"rows {rows.dtype}, matrices {weight.dtype} of "
            f"{weight.shape[1:]}, scale {scale is not None}"
        )
    count, (groups, depth, width) = rows.shape[0], weight.shape
    tile = min(_MOST_ROWS, pl.cdiv(count, 16) * 16)
    rows = jnp.pad(rows, ((0, -count % tile), (0, 0)))
    tile_depth = _largest_divisor(depth, 2048)
    tile_width = _largest_divisor(width, max(_MOST_WEIGHTS // tile_depth, _LANES))
    tiles = rows.shape[0] // tile
    visits, num_visits = _plan_visits(sizes, first, tiles, tile)

    def rows_at(column, visit, step, visits):
        return visits.tile[visit], step

    def weight_at(column, visit, step, visits):
        return visits.first[0] + visits.group[visit], step, column

    def scale_at(column, visit, step, visits):
        return visits.first[0] + visits.group[visit], 0, column

    def out_at(column, visit, step, visits):
        return visits.tile[visit], column

    in_specs = [
        pl.BlockSpec((tile, tile_depth), rows_at),
        pl.BlockSpec((None, tile_depth, tile_width), weight_at),
    ]
    operands = [rows, weight]
    if scale is not None:
        in_specs.append(pl.BlockSpec((None, 1, tile_width), scale_at))
        operands.append(scale.reshape(groups, 1, width))
    out = pl.pallas_call(
        functools.partial(_kernel, tile=tile, steps=depth // tile_depth),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(width // tile_width, num_visits, depth // tile_depth),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tile, tile_width), out_at),
            scratch_shapes=[pltpu.VMEM((tile, tile_width), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        name="grouped_product",
        interpret=interpret,
    )(visits, *operands)
    return out[:count]


def _kernel(visits: _Visits, rows, weight, *rest, tile: int, steps: int):
    """A tile of rows times a tile of one group's matrix, summed over `steps`."""
    *scales, out, total = rest
    visit, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _begin():
        total[...] = jnp.zeros_like(total)

    total[...] += jax.lax.dot_general(
        rows[...],
        weight[...].astype(rows.dtype),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )

    @pl.when(step == steps - 1)
    def _end():
        group = visits.group[visit]
        row = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
        row += visits.tile[visit] * tile
        own = (row >= visits.begin[group]) & (row < visits.end[group])
        found = total[...]
        if scales:
            found *= scales[0][...]
        kept = out[...].astype(jnp.float32)  # of other groups, from visits before
        out[...] = jnp.where(own, found, kept).astype(out.dtype)


def _largest_divisor(size: int, most: int) -> int:
    """The largest divisor of `size` in whole lanes, up to `most`."""
    fits = (n for n in range(_LANES, size + 1, _LANES) if size % n == 0 and n <= most)
    return max(fits, default=_LANES)
