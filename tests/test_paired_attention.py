"""NumPy oracle == XLA == Pallas in interpret mode, on every layout."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dllm_jax import attention, layouts, platform
from dllm_jax.cache import KVCache
from kernels_pallas import (
    FOREVER,
    BlockSizes,
    CachedKV,
    TokenFields,
    attend_reference,
    attention_cost,
    pack_fields,
    pack_key_fields,
    paired_attention,
    unpack_key_fields,
    visible,
)

# --- cases ------------------------------------------------------------------------------

_LAYERS, _LAYER = 2, 1
_SMALL = BlockSizes(rows=32, slots=128, tokens=128, heads=2)


def _anything(rng, position):
    """Fields of no layout at all: copies of positions, lives that overlap or are empty."""

    def numbers(low, high):
        return jnp.asarray(rng.integers(low, high, position.shape), jnp.int32)

    until = jnp.where(numbers(0, 2) == 1, FOREVER, numbers(-1, 6))
    slot = jnp.broadcast_to(jnp.arange(position.shape[1], dtype=jnp.int32), position.shape)
    return TokenFields(numbers(0, 9), numbers(-1, 5), numbers(-1, 5), until, slot)


def _training_pairs(rng, position):
    batch, num_tokens = position.shape
    noisy = position[:, : num_tokens // 2]
    length = jnp.asarray(rng.integers(1, 5, batch), jnp.int32)
    valid = jnp.asarray(rng.random(position.shape) < 0.8)
    clean = position[:, : num_tokens - noisy.shape[1]]
    rest = valid[:, clean.shape[1] :]
    return layouts.training_pairs(clean, noisy, length, valid[:, : clean.shape[1]], rest)


def _with_padding(layout):
    def make(rng, position):
        return layout(position, valid=jnp.asarray(rng.random(position.shape) < 0.8))

    return make


def _drafts(rng, position):
    """Permutations with ties and gaps: the order in which slots were drafted."""
    return jnp.asarray(rng.integers(-1, 4, position.shape), jnp.int32)


def _simsd_pairs(rng, position):
    """[known | data | masks] of a block that the cache ends in."""
    slots = position.shape[1] // 3
    known, order = position[:, : position.shape[1] - 2 * slots], _drafts(rng, position)
    drafted, order = known[:, -1:] + 1 + jnp.arange(slots), order[:, :slots]
    role = jnp.concatenate(
        [
            jnp.full(known.shape, layouts.KNOWN),
            jnp.full(drafted.shape, layouts.DATA),
            jnp.full(drafted.shape, layouts.MASK),
        ],
        axis=1,
    )
    return layouts.simsd_pairs(
        jnp.concatenate([known, drafted, drafted], axis=1),
        role,
        jnp.broadcast_to(position[:, :1], position.shape),
        jnp.concatenate([jnp.zeros_like(known), order, order], axis=1),
        steps=4,
    )


def _mask_copies(rng, position):
    """A causal row and its mask copies, cut where the row is odd."""
    half = position[:, : -(-position.shape[1] // 2)]
    until = jnp.full((half.shape[0],), 1000)
    row = layouts.causal_then_blocks(half, 4, until)
    fields = layouts.join(row, layouts.mask_copies(half))
    return TokenFields(*(x[:, : position.shape[1]] for x in fields))


def _separate_states(rng, position):
    return layouts.separate_states(
        position[:, :1] + position % 3, position % 4, position[:, :1]
    )


def _superposition(rng, position):
    canvas = position[:, : -(-position.shape[1] // 2)]
    appended = jnp.asarray(
        rng.permuted(np.asarray(canvas), axis=1)[:, : position.shape[1] // 2]
    )
    shown = jnp.asarray(rng.random(position.shape) < 0.5)
    start = position[:, :1]
    row = layouts.bidirectional(canvas)
    row = row._replace(time=row.time + start, visible_from=row.visible_from + start)
    behind = layouts.appended(
        appended, start, shown[:, canvas.shape[1] :], jnp.ones(appended.shape, bool)
    )
    return layouts.superposition(row, behind, ~shown[:, : canvas.shape[1]])


_LAYOUTS = {
    "block_causal": _with_padding(functools.partial(layouts.block_causal, block_length=4)),
    "causal": _with_padding(layouts.causal),
    "bidirectional": _with_padding(layouts.bidirectional),
    "training_pairs": _training_pairs,
    "simsd_pairs": _simsd_pairs,
    "mask_copies": _mask_copies,
    "separate_states": _separate_states,
    "superposition": _superposition,
    "anything": _anything,
}


@dataclasses.dataclass(frozen=True)
class _Case:
    """Shapes and layout of one drawn case."""

    layout: str
    seed: int = 0
    batch: int = 2
    tokens: int = 4
    slots: int = 0
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    quantised: bool = False


def _inputs(case: _Case):
    """Inputs of a case; whatever does not exist is NaN, its fields are anything."""
    rng = np.random.default_rng(case.seed)
    batch, kv_heads, head_dim = case.batch, case.kv_heads, case.head_dim

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q = normal(batch, case.tokens, kv_heads * case.group, head_dim)
    k, v = normal(2, batch, kv_heads, case.tokens, head_dim)
    q, k, v = (jnp.asarray(x, case.dtype) for x in (q, k, v))
    # Rows without any cached key, at the front, inside and at the end, are half of them.
    length = rng.integers(0, case.slots + 1, batch) * rng.integers(0, 2, batch)
    length = length.astype(np.int32)
    start = np.maximum(length - rng.integers(0, 2, batch), 0).astype(np.int32)
    position = jnp.asarray(start[:, None] + np.arange(case.tokens, dtype=np.int32))
    fields = _LAYOUTS[case.layout](rng, position)
    if not case.slots:
        return q, k, v, fields, None
    slot = jnp.tile(jnp.arange(case.slots, dtype=jnp.int32), (batch, 1))
    stored = layouts.block_causal(slot, 4)
    if case.layout == "anything":
        stored = _anything(rng, slot)
    missing = np.arange(case.slots) >= length[:, None]  # [B, S]
    garbage = rng.integers(-(2**31), 2**31 - 1, (batch, 8, case.slots))
    packed = np.where(missing[:, None], garbage, pack_key_fields(stored)).astype(np.int32)
    shape = (_LAYERS, batch, kv_heads, case.slots, head_dim)
    scales = None, None
    if case.quantised:
        keys, values = rng.integers(-127, 128, (2, *shape)).astype(np.int8)
        scales = rng.random((2, *shape[:-1])).astype(np.float32) / 60
        scales = np.where(missing[:, None], np.nan, scales)
    else:
        keys, values = normal(2, *shape)
        hidden = missing[:, None, :, None]
        keys, values = (np.where(hidden, np.nan, x) for x in (keys, values))
        keys, values = (jnp.asarray(x, case.dtype) for x in (keys, values))
    return q, k, v, fields, CachedKV(keys, values, packed, length, *scales)


def _oracle(q, k, v, fields, cached: CachedKV | None) -> np.ndarray:
    """Softmax attention in float64 over the keys that exist, a row and head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    fields = TokenFields(*(np.asarray(x) for x in fields))
    group = q.shape[2] // k.shape[1]
    out = np.zeros(q.shape)
    for row in range(q.shape[0]):
        query = TokenFields(*(x[row, :, None] for x in fields))
        seen = visible(query, TokenFields(*(x[row, None] for x in fields)))
        length = 0
        if cached is not None:
            length = int(cached.length[row])
            packed = unpack_key_fields(jnp.asarray(cached.fields[row : row + 1]))
            key = TokenFields(*(np.asarray(x)[0, None, :length] for x in packed))
            seen = np.concatenate([visible(query, key), seen], axis=1)
        for head in range(q.shape[2]):
            keys, values = k[row, head // group], v[row, head // group]
            if cached is not None:
                of_head = (_LAYER, row, head // group, slice(length))
                old = [np.asarray(x[of_head], np.float64) for x in (cached.k, cached.v)]
                if cached.k_scale is not None:
                    old[0] *= cached.k_scale[of_head][:, None]
                    old[1] *= cached.v_scale[of_head][:, None]
                keys = np.concatenate([old[0], keys])
                values = np.concatenate([old[1], values])
            score = q[row, :, head] @ keys.T / np.sqrt(q.shape[-1])
            score = np.where(seen, score, -np.inf)
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            out[row, :, head] = weight @ values / weight.sum(axis=1, keepdims=True)
    return out


_xla = jax.jit(
    lambda q, k, v, fields, cached: attend_reference(
        q, k, v, fields, None if cached is None else cached.of_layer(jnp.int32(_LAYER))
    )
)


@functools.partial(jax.jit, static_argnames=("block_sizes", "interpret"))
def _pallas(q, k, v, fields, cached, block_sizes=_SMALL, interpret=True):
    return paired_attention(
        q,
        k,
        v,
        fields,
        cached,
        jnp.int32(_LAYER),
        block_sizes=block_sizes,
        interpret=interpret,
    )


def _check(case: _Case, **kernel) -> None:
    inputs = _inputs(case)
    expected = _oracle(*inputs)
    assert np.isfinite(expected).all()
    # bfloat16 has 8 bits: of the output, and of the weights before they meet the values.
    tolerance = 2e-5 if case.dtype == "float32" else 2.5e-2
    for found in (_xla(*inputs), _pallas(*inputs, **kernel)):
        assert found.dtype == case.dtype
        found = np.asarray(found, np.float64)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# --- the three agree --------------------------------------------------------------------

_CASES = st.builds(
    _Case,
    layout=st.sampled_from(sorted(_LAYOUTS)),
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    tokens=st.one_of(st.integers(2, 24), st.sampled_from((64, 130))),
    slots=st.sampled_from((0, 1, 7, 128, 200, 300, 384)),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from((64, 128)),
    dtype=st.sampled_from(("float32", "bfloat16")),
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=_CASES, rows=st.sampled_from((32, 64)), heads=st.integers(1, 3))
def test_oracle_xla_and_pallas_agree(case, rows, heads):
    sizes = BlockSizes(rows=rows, slots=128, tokens=128, heads=heads)
    _check(case, block_sizes=sizes)


@pytest.mark.parametrize("layout", sorted(_LAYOUTS))
def test_every_layout(layout):
    """One shape, many blocks of rows and slots: each layout is a run, not a compilation."""
    for seed in range(2):
        _check(_Case(layout, seed, batch=3, tokens=20, slots=300))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_cache(dtype):
    _check(
        _Case("block_causal", batch=3, slots=300, dtype=dtype, quantised=True),
    )


@pytest.mark.parametrize("tokens", [1, 300])
def test_one_token_and_several_blocks_of_them(tokens):
    """300 tokens are three blocks of fresh keys, the last one ragged, and 19 row tiles."""
    _check(_Case("causal", batch=1, tokens=tokens, slots=128))


def test_head_dim_256():
    _check(_Case("block_causal", head_dim=256, kv_heads=1, slots=128))


# --- one by one -------------------------------------------------------------------------


def test_blocks_that_nobody_sees_are_not_computed():
    """Keys of later blocks may be NaN: a causal row never touches them."""
    q, k, v, fields, _ = _inputs(_Case("causal", batch=1, tokens=300, group=1))
    fields = layouts.causal(fields.position)
    found = _pallas(q, k, v, fields, None)
    changed = _pallas(q, *(x.at[:, :, 256:].set(jnp.nan) for x in (k, v)), fields, None)
    np.testing.assert_array_equal(changed[:, :256], found[:, :256])
    assert np.isnan(changed[:, 256:]).all()


def test_rows_do_not_see_each_other():
    inputs = _inputs(_Case("anything", 3, batch=3, tokens=20, slots=300))
    whole = np.asarray(_pallas(*inputs))
    q, k, v, fields, cached = inputs
    for row in range(3):
        others = np.arange(3) != row
        changed = [x.at[others].set(jnp.nan) for x in (q, k, v)]
        length = np.where(others, 300 - cached.length, cached.length).astype(np.int32)
        found = _pallas(*changed, fields, cached._replace(length=length))
        np.testing.assert_array_equal(found[row], whole[row])


def test_gradients_are_those_of_the_reference():
    q, k, v, fields, _ = _inputs(_Case("training_pairs", tokens=12))

    def loss(attend, q, k, v):
        return jnp.sum(attend(q, k, v, fields, None) ** 2)

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2)))(q, k, v)
        for attend in (_pallas, _xla)
    )
    for one, other in zip(found, expected, strict=True):
        assert np.any(one)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_with_a_cache():
    inputs = _inputs(_Case("block_causal", tokens=5, slots=7))

    def loss(attend, q):
        return jnp.sum(attend(q, *inputs[1:]) ** 2)

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, attend)))(inputs[0])
        for attend in (_pallas, _xla)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        _Case("anything", 1, batch=3, tokens=5, slots=300, kv_heads=1),
        _Case("causal", 2, batch=1, tokens=130, slots=7, kv_heads=1, group=1),
        _Case("block_causal", 3, tokens=3, slots=130, dtype="bfloat16", quantised=True),
    ],
    ids=lambda case: case.layout,
)
def test_simulated_tpu_without_races_and_with_poisoned_memory(case, capfd):
    """Memory that nobody has written is NaN, also what lies behind an array's end."""
    interpret = pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="uninitialized",
        num_cores_or_threads=2,
    )
    _check(case, interpret=interpret)
    assert "RACE" not in capfd.readouterr().out.upper()


def test_cases_the_kernel_does_not_do():
    inputs = _inputs(_Case("causal", slots=7))
    q, k, v, fields, cached = inputs
    half = [x.astype(jnp.float16) for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="float16"):
        paired_attention(*half, fields)
    with pytest.raises(NotImplementedError, match="head_dim"):
        paired_attention(q[..., :32], k[..., :32], v[..., :32], fields)
    with pytest.raises(NotImplementedError, match="int8"):
        paired_attention(q, k, v, fields, cached._replace(k=cached.k.astype(jnp.int8)))


@pytest.mark.parametrize("wrong", [{"rows": 8}, {"slots": 100}, {"heads": 0}])
def test_block_sizes_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BlockSizes(**wrong)


def test_cost_counts_the_cache_once():
    cost = attention_cost((2, 4, 8, 128), 4, 1024, itemsize=2, cached_itemsize=1)
    keys_values = 2 * 2 * 4 * 1024 * 128
    assert keys_values < cost.bytes_accessed < 1.1 * keys_values
    assert cost.flops == 4 * 2 * 8 * 4 * (1024 + 4) * 128


# --- the choice of an implementation ----------------------------------------------------


def _cache(cached: CachedKV) -> KVCache:
    return KVCache(cached.k, cached.v, cached.fields, cached.length)


def _attend(q, k, v, fields, cache, implementation="auto"):
    fields = pack_fields(fields, q.shape[2] // k.shape[1])
    layer = jnp.int32(_LAYER)
    return attention.attend(q, k, v, fields, cache, layer, implementation)


def test_auto_is_xla_on_a_cpu_and_says_so_once(caplog):
    q, k, v, fields, cached = _inputs(_Case("causal", slots=7))
    attention._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="dllm_jax.attention"):
        for _ in range(2):
            found = _attend(q, k, v, fields, _cache(cached))
    np.testing.assert_array_equal(found, _xla(q, k, v, fields, cached))
    (record,) = caplog.records
    assert "xla; not pallas: " in record.message


def test_chosen_implementation_that_cannot_is_an_error():
    inputs = _inputs(_Case("causal"))
    with pytest.raises(NotImplementedError, match="cpu"):
        _attend(*inputs, "pallas")
    with pytest.raises(ValueError, match="implementation='cuda'"):
        _attend(*inputs, "cuda")


def _pretend_tpu(monkeypatch):
    for module in (attention, platform):
        monkeypatch.setattr(module, "target", lambda: ("tpu", "TPU v5 lite"))


def test_auto_takes_the_kernel_on_a_tpu(monkeypatch):
    """The kernel where it can, XLA for what it refuses."""
    interpreted = functools.partial(paired_attention, interpret=True)
    _pretend_tpu(monkeypatch)
    taken = []

    def record(q, *args, **kwargs):
        out = interpreted(q, *args, **kwargs)
        taken.append(q.shape)
        return out

    monkeypatch.setattr(attention, "paired_attention", record)
    q, k, v, fields, cached = _inputs(_Case("block_causal", slots=7))
    found = _attend(q, k, v, fields, _cache(cached))
    expected = _xla(q, k, v, fields, cached)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert taken == [q.shape]
    narrow = [x[..., :32] for x in (q, k, v)]
    found = _attend(*narrow, fields, None)
    np.testing.assert_allclose(found, _xla(*narrow, fields, None), rtol=1e-6, atol=1e-6)
    assert taken == [q.shape]


def test_auto_leaves_a_sharded_program_to_xla(monkeypatch):
    """Over several devices the kernel runs inside shard_map only."""
    _pretend_tpu(monkeypatch)
    inputs = _inputs(_Case("block_causal"))
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(NotImplementedError, match="shard_map"),
    ):
        jax.eval_shape(lambda: _attend(*inputs, "pallas"))
