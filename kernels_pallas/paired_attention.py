"""Flash attention over [stacked cache | fresh tokens] as one Pallas kernel for TPU.

The grid is (batch row, group of key heads, tile of query rows, step), and the steps of a
tile go first through the cached keys and then through the fresh ones. A query row is one
token under one of the query heads that share a key head, a head's tokens next to each
other: even a few tokens fill the sublanes of a matrix product.

The cache stays stacked over layers, for a slice in front of a kernel is a copy: the layer
is a prefetched scalar which the index maps read. So are the rows' lengths; steps behind a
row's last block name that block again, which fetches nothing, and compute nothing. Of the
fresh keys a tile takes the blocks that may be visible to it by the extremes of its fields,
so a causal prefill does half the work.

Visibility is computed on each tile from the fields, in lanes for keys and down the sublanes
for queries; no mask is ever stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.block_sizes import BlockSizes
from kernels_pallas.reference import CachedKV, attend_reference
from kernels_pallas.visibility import (
    CACHED_KEY,
    NEVER,
    NUM_CACHED_FIELDS,
    TokenFields,
    visible,
)

_LANES = 128
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


class PackedFields(NamedTuple):
    """The fields of fresh tokens as the kernel reads them, the same for every layer.

    XLA does not move the packing out of a loop over layers, for it grows the fields.
    """

    fields: TokenFields  # [B, T] each
    query: jax.Array  # [B, G * T, 8] int32: position, time, slot of each query row
    key: jax.Array  # [B, 8, T] int32: position, visible_from, visible_until, slot


def pack_fields(fields: TokenFields, group: int) -> PackedFields:
    """Packs `[B, T]` fields, for `group` query heads a key head."""

    def packed(parts, axis):
        spare = [(0, 0)] * 3
        spare[axis] = (0, NUM_CACHED_FIELDS - len(parts))
        return jnp.pad(jnp.stack(parts, axis=axis), spare)

    query = packed((fields.position, fields.time, fields.slot), 2)
    born, dies = fields.visible_from, fields.visible_until
    key = packed((fields.position, born, dies, fields.slot), 1)
    return PackedFields(fields, jnp.tile(query, (1, group, 1)), key)


class _Plan(NamedTuple):
    """Static facts of one call."""

    rows: int  # of a query tile
    slots: int  # of a cached block
    tokens: int  # of a fresh block
    heads: int  # of a step
    row_tiles: int
    head_groups: int
    cached_blocks: int
    fresh_blocks: int
    num_tokens: int
    scale: float
    quantised: bool


def _query_fields(block) -> TokenFields:
    """`[rows, 8]` with a field a lane -> columns `[rows, 1]`."""
    position, time, slot = (block[:, i : i + 1] for i in range(3))
    return TokenFields(position, time, time, time, slot)


def _key_fields(block, slot) -> TokenFields:
    """`[8, keys]` with a field a sublane -> rows `[1, keys]`."""
    position, visible_from, visible_until = (block[i : i + 1, :] for i in range(3))
    return TokenFields(position, position, visible_from, visible_until, slot)


def _matmul(a, b, contract_b: int):
    """`a` times `b` in float32; full precision where the operands are float32."""
    highest = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if highest else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _kernel(layer_ref, length_ref, source_ref, resident_ref, *refs, plan: _Plan):
    del layer_ref, source_ref  # for the index maps
    refs = list(refs)
    q_ref, query_ref = refs[:2]
    fresh = refs[2:5]
    cached = refs[5:-4]
    out_ref, max_ref, sum_ref, acc_ref = refs[-4:]
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def start():
        max_ref[...] = jnp.full_like(max_ref, _MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def absorb(block, fields: TokenFields, exist=None):
        """Takes a block's keys into the running softmax.

        `exist` is how many of the keys are real: what lies behind them may hold anything,
        also NaN, and a weight of 0 is no protection from that.
        """
        k_ref, v_ref, _, *scales = block
        keys = k_ref.shape[1]
        if exist is not None:
            lane = jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
            sublane = jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
            never = jnp.where(lane < exist, fields.visible_from, NEVER)
            slot = jnp.where(lane < exist, fields.slot, CACHED_KEY)
            fields = fields._replace(visible_from=never, slot=slot)
        seen = visible(_query_fields(query_ref[...]), fields)

        def values(block, dtype):
            # Integers reach bfloat16 by way of float32 only.
            wide = block.astype(jnp.float32) if exist is not None or scales else block
            if exist is not None:
                wide = jnp.where(sublane < exist, wide, 0.0)
            return wide.astype(dtype)

        for head in range(plan.heads):
            q = q_ref[head]
            k, v = k_ref[head], values(v_ref[head], q.dtype)
            if scales:
                k = k.astype(jnp.float32).astype(q.dtype)
            score = _matmul(q, k, 1) * plan.scale
            if scales:
                score = score * scales[0][head : head + 1, :]
            score = jnp.where(seen, score, _MASKED)
            old_max = max_ref[head]
            new_max = jnp.maximum(old_max, jnp.max(score, axis=-1, keepdims=True))
            # Masked again: where nothing is seen yet, the largest score is itself masked.
            weight = jnp.where(seen, jnp.exp(score - new_max[:, :1]), 0.0)
            decay = jnp.exp(old_max - new_max)
            max_ref[head] = new_max
            sum_ref[head] = decay * sum_ref[head] + jnp.sum(weight, -1, keepdims=True)
            if scales:
                weight = jnp.where(seen, weight * scales[1][head : head + 1, :], 0.0)
            mixed = _matmul(weight.astype(v.dtype), v, 0)
            acc_ref[head] = decay[:, :1] * acc_ref[head] + mixed

    if cached:
        exist = length_ref[row] - step * plan.slots

        def absorb_cached(exist=None):
            slot = jnp.full((1, plan.slots), CACHED_KEY, jnp.int32)
            absorb(cached, _key_fields(cached[2][...], slot), exist)

        in_cache = step < plan.cached_blocks
        pl.when(in_cache & (exist >= plan.slots))(absorb_cached)
        pl.when(in_cache & (exist > 0) & (exist < plan.slots))(
            functools.partial(absorb_cached, exist)
        )

    block = step - plan.cached_blocks
    wanted = block >= 0
    if plan.fresh_blocks * plan.row_tiles > 1:
        at = _resident_index(plan, row, tile, jnp.maximum(block, 0))
        wanted &= resident_ref[at] == block

    @pl.when(wanted)
    def absorb_fresh():
        packed = fresh[2][...]
        ragged = plan.num_tokens % plan.tokens
        exist = plan.num_tokens - block * plan.tokens if ragged else None
        absorb(fresh, _key_fields(packed, packed[3:4, :]), exist)

    @pl.when(step == plan.cached_blocks + plan.fresh_blocks - 1)
    def finish():
        for head in range(plan.heads):
            total = sum_ref[head][:, :1]
            out = acc_ref[head] / jnp.where(total == 0.0, 1.0, total)
            out_ref[head] = out.astype(out_ref.dtype)


def _resident_index(plan: _Plan, row, tile, block):
    return (row * plan.row_tiles + tile) * plan.fresh_blocks + block


def _blocks_per_tile(plan: _Plan, packed: PackedFields) -> jax.Array:
    """Which fresh block is to be in VMEM at each step: int32, flat [B, tiles, blocks].

    The block of the step itself where a query of the tile may see a key of it, judged by
    the extremes of their fields; otherwise the block before, which costs no fetch.
    """
    if plan.fresh_blocks * plan.row_tiles == 1:
        return jnp.zeros((1,), jnp.int32)

    def extremes(field, size, count):
        padding = ((0, 0), (0, size * count - field.shape[1]))
        tiled = jnp.pad(field, padding, mode="edge").reshape(-1, count, size)
        return jnp.min(tiled, axis=-1), jnp.max(tiled, axis=-1)

    def meet(a, b):  # whether two ranges [B, tiles] and [B, blocks] overlap
        return (a[0][:, :, None] <= b[1][:, None]) & (b[0][:, None] <= a[1][:, :, None])

    of_tile = functools.partial(extremes, size=plan.rows, count=plan.row_tiles)
    of_block = functools.partial(extremes, size=plan.tokens, count=plan.fresh_blocks)
    first, last = of_tile(packed.query[:, :, 1])
    born, _ = of_block(packed.fields.visible_from)
    _, dies = of_block(packed.fields.visible_until)
    alive = (born[:, None] <= last[:, :, None]) & (first[:, :, None] < dies[:, None])
    slots = of_tile(packed.query[:, :, 2]), of_block(packed.fields.slot)
    wanted = alive | meet(*slots)
    block = jnp.arange(plan.fresh_blocks, dtype=jnp.int32)
    latest = jax.lax.cummax(jnp.where(wanted, block, -1), axis=2)
    first_wanted = jnp.argmax(wanted, axis=2).astype(jnp.int32)[..., None]
    return jnp.where(latest < 0, first_wanted, latest).reshape(-1)


def _divisor(number: int, limit: int, fits) -> int:
    """The largest divisor of `number` up to `limit` that `fits`, or else 0."""
    sizes = range(min(number, limit), 0, -1)
    return next((n for n in sizes if number % n == 0 and fits(n)), 0)


def _make_plan(q, k, cached: CachedKV | None, sizes: BlockSizes) -> _Plan:
    """Cuts the operands; raises NotImplementedError for what the kernel cannot do."""
    _, num_tokens, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if jnp.dtype(q.dtype) not in _FLOATS or k.dtype != q.dtype:
        raise NotImplementedError(f"queries {q.dtype} and keys {k.dtype}")
    if head_dim % 64 or not 64 <= head_dim <= 256:
        raise NotImplementedError(f"{head_dim=}")
    quantised = cached is not None and cached.k_scale is not None
    slots = 0
    if cached is not None:
        stored = jnp.dtype(cached.k.dtype)
        if stored != (jnp.int8 if quantised else q.dtype):
            raise NotImplementedError(f"a cache of {stored}, {quantised=}, for {q.dtype}")
        slots = cached.k.shape[3]
    all_rows = num_heads // kv_heads * num_tokens
    rows = min(sizes.rows, all_rows)
    slot_block = min(sizes.slots, slots)
    tokens = min(sizes.tokens, num_tokens)
    # Two buffers each of keys, values, queries and output, then float32 running sums.
    numbers = 4 * head_dim * (slot_block + tokens + rows)
    head_bytes = numbers * q.dtype.itemsize + 4 * rows * (2 * _LANES + head_dim)

    def fits(heads: int) -> bool:
        # A block of scales has heads down the sublanes: tiles of 8, or all there are.
        whole = not quantised or heads == kv_heads or heads % 8 == 0
        return whole and (heads == 1 or heads * head_bytes <= sizes.vmem_limit_bytes * 0.6)

    heads = _divisor(kv_heads, max(sizes.heads, 8) if quantised else sizes.heads, fits)
    if not heads:
        raise NotImplementedError(f"an int8 cache of {kv_heads} key heads")
    return _Plan(
        rows=rows,
        slots=slot_block,
        tokens=tokens,
        heads=heads,
        row_tiles=pl.cdiv(all_rows, rows),
        head_groups=kv_heads // heads,
        cached_blocks=pl.cdiv(slots, slot_block) if slots else 0,
        fresh_blocks=pl.cdiv(num_tokens, tokens),
        num_tokens=num_tokens,
        scale=head_dim**-0.5,
        quantised=quantised,
    )


def _source_rows(length: jax.Array) -> jax.Array:
    """For each row the last one up to it that has cached keys, int32 [B]; 0 if none.

    A row without any names what that row fetched last, and so fetches nothing.
    """
    index = jnp.arange(length.shape[0], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(length > 0, index, 0))


def _index_maps(plan: _Plan):
    def cached_at(row, heads, step, length, source):
        """Row, group of heads and block of the cache that a step has in VMEM."""
        from_row = source[row]
        last = jax.lax.div(length[from_row] + plan.slots - 1, plan.slots) - 1
        last = jnp.maximum(last, 0)
        empty = length[row] == 0
        block = jnp.where(empty, last, jnp.minimum(step, last))
        return from_row, jnp.where(empty, plan.head_groups - 1, heads), block

    def queries(row, heads, tile, step, *scalars):
        return row, heads, tile, 0

    def query_fields(row, heads, tile, step, *scalars):
        return row, tile, 0

    def cached(row, heads, tile, step, layer, length, source, resident):
        row, heads, block = cached_at(row, heads, step, length, source)
        return layer[0], row, heads, block, 0

    def cached_fields(row, heads, tile, step, layer, length, source, resident):
        row, _, block = cached_at(row, heads, step, length, source)
        return row, 0, block

    def cached_scales(row, heads, tile, step, layer, length, source, resident):
        row, heads, block = cached_at(row, heads, step, length, source)
        return layer[0], row, heads, block

    def fresh_block(row, tile, step, resident):
        if plan.fresh_blocks * plan.row_tiles == 1:
            return 0
        block = jnp.maximum(step - plan.cached_blocks, 0)
        return resident[_resident_index(plan, row, tile, block)]

    def fresh(row, heads, tile, step, layer, length, source, resident):
        return row, heads, fresh_block(row, tile, step, resident), 0

    def fresh_fields(row, heads, tile, step, layer, length, source, resident):
        return row, 0, fresh_block(row, tile, step, resident)

    return queries, query_fields, cached, cached_fields, cached_scales, fresh, fresh_fields


def attention_cost(
    q_shape: tuple[int, ...],
    kv_heads: int,
    slots: int,
    itemsize: int,
    cached_itemsize: int,
    quantised: bool = False,
) -> pl.CostEstimate:
    """The work of one call if every row's cache is full up to `slots`.

    Args:
      q_shape: `(B, T, N, H)`.
      kv_heads: K.
      slots: cached keys of a row.
      itemsize: bytes of a query, fresh key or output number.
      cached_itemsize: bytes of a cached number.
      quantised: whether the cache has a float32 scale for each key and value.
    """
    batch, num_tokens, num_heads, head_dim = q_shape
    pairs = batch * num_heads * num_tokens * (slots + num_tokens)
    fresh = 2 * kv_heads * num_tokens * head_dim * itemsize
    queries = 2 * num_tokens * num_heads * head_dim * itemsize
    slot_bytes = 2 * kv_heads * (head_dim * cached_itemsize + 4 * quantised)
    fields = 4 * NUM_CACHED_FIELDS
    return pl.CostEstimate(
        flops=4 * pairs * head_dim,
        transcendentals=pairs,
        bytes_accessed=batch
        * (slots * (slot_bytes + fields) + fresh + queries + num_tokens * fields),
    )


def _forward(q, k, v, packed, cached: CachedKV | None, layer, sizes, interpret):
    batch, num_tokens, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    plan = _make_plan(q, k, cached, sizes)
    # XLA keeps queries head-major on TPU, so neither this nor the way back moves data.
    packed_q = q.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)
    at = _index_maps(plan)
    at_q, at_query, at_cached, at_cached_fields, at_scales, at_fresh, at_fields = at
    q_spec = pl.BlockSpec((None, plan.heads, plan.rows, head_dim), at_q)
    kv_spec = pl.BlockSpec((None, plan.heads, plan.tokens, head_dim), at_fresh)
    operands = [packed_q, packed.query, k, v, packed.key]
    specs = [
        q_spec,
        pl.BlockSpec((None, plan.rows, NUM_CACHED_FIELDS), at_query),
        kv_spec,
        kv_spec,
        pl.BlockSpec((None, NUM_CACHED_FIELDS, plan.tokens), at_fields),
    ]
    if plan.cached_blocks:
        block = (None, None, plan.heads, plan.slots, head_dim)
        operands += [cached.k, cached.v, cached.fields]
        specs += [pl.BlockSpec(block, at_cached), pl.BlockSpec(block, at_cached)]
        shape = (None, NUM_CACHED_FIELDS, plan.slots)
        specs.append(pl.BlockSpec(shape, at_cached_fields))
        length = cached.length
    else:
        length = jnp.zeros((batch,), jnp.int32)
    if plan.cached_blocks and plan.quantised:
        operands += [cached.k_scale, cached.v_scale]
        shape = (None, None, plan.heads, plan.slots)
        specs += [pl.BlockSpec(shape, at_scales)] * 2

    scratch = [
        pltpu.VMEM((plan.heads, plan.rows, width), jnp.float32)
        for width in (_LANES, _LANES, head_dim)
    ]
    scalars = (
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        length,
        _source_rows(length),
        _blocks_per_tile(plan, packed),
    )
    call = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(
                batch,
                plan.head_groups,
                plan.row_tiles,
                plan.cached_blocks + plan.fresh_blocks,
            ),
            in_specs=specs,
            out_specs=q_spec,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(packed_q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_limit_bytes,
        ),
        cost_estimate=attention_cost(
            q.shape,
            kv_heads,
            cached.k.shape[3] if plan.cached_blocks else 0,
            q.dtype.itemsize,
            cached.k.dtype.itemsize if plan.cached_blocks else 0,
            plan.quantised,
        ),
        interpret=interpret,
        name="paired_attention",
    )
    out = call(*scalars, *operands)
    return out.reshape(batch, num_heads, num_tokens, head_dim).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q, k, v, packed, cached, layer, sizes, interpret):
    return _forward(q, k, v, packed, cached, layer, sizes, interpret)


def _attend_forward(q, k, v, packed, cached, layer, sizes, interpret):
    out = _forward(q, k, v, packed, cached, layer, sizes, interpret)
    return out, (q, k, v, packed, cached, layer)


def _attend_backward(sizes, interpret, residuals, out_gradient):
    """Differentiates the reference, which computes the forward once more.

    The cache is a constant: it gets no gradient.
    """
    del sizes, interpret
    q, k, v, packed, cached, layer = residuals
    of_layer = None if cached is None else cached.of_layer(layer)

    def recompute(q, k, v):
        return attend_reference(q, k, v, packed.fields, of_layer)

    _, pull = jax.vjp(recompute, q, k, v)
    nothing = jax.tree.map(lambda _: None, (packed, cached, layer))
    return (*pull(out_gradient), *nothing)


_attend.defvjp(_attend_forward, _attend_backward)


def paired_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    fields: TokenFields | PackedFields,
    cached: CachedKV | None = None,
    layer: jax.Array | int = 0,
    *,
    block_sizes: BlockSizes | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of fresh tokens over a stacked cache and over each other.

    Differentiable in `q`, `k` and `v`; the backward pass is XLA's, of the reference.

    Args:
      q: `[B, T, N, H]` roped queries, bfloat16 or float32; H 64, 128, 192 or 256.
      k: `[B, K, T, H]` roped fresh keys; query head n reads key head `n // (N / K)`.
      v: `[B, K, T, H]` fresh values.
      fields: the fields of the fresh tokens, int32 `[B, T]` each, or the same packed once
        for all layers by `pack_fields`.
      cached: None, or the stacked cache, in the dtype of `q` or int8 with scales. Slots at
        or beyond a row's length do not exist for it, whatever they hold.
      layer: int32 scalar, which layer of the cache to read.
      block_sizes: limits of the kernel's blocks; by default those of a current TPU.
      interpret: True or `pltpu.InterpretParams` runs the kernel without a TPU.

    Returns:
      `[B, T, N, H]` in the dtype of `q`; 0 for a query that sees nothing. Scores, softmax
      and sums are float32.

    Raises:
      NotImplementedError: for dtypes and head sizes that the kernel does not do.
    """
    sizes = block_sizes or BlockSizes()
    layer = jnp.asarray(layer, jnp.int32)
    if isinstance(fields, TokenFields):
        fields = pack_fields(fields, q.shape[2] // k.shape[1])
    return _attend(q, k, v, fields, cached, layer, sizes, interpret)
