"""Visibility, layouts, attention and the cache against double loops written from prose."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import layouts
from dllm_jax.cache import append, init_cache
from dllm_jax.config import ModelConfig
from kernels_pallas import (
    FOREVER,
    NEVER,
    NUM_CACHED_FIELDS,
    TokenFields,
    attend_reference,
    pack_key_fields,
    unpack_key_fields,
    visible,
)

# --- the rule ---------------------------------------------------------------------------


def test_rule_on_every_case_of_a_small_grid():
    query_grid = list(itertools.product((0, 1), (-1, 0, 1, 2), (0, 1)))
    key_grid = list(
        itertools.product((0, 1), (-1, 0, 1, 2, NEVER), (0, 1, 2, 3, FOREVER), (-1, 0, 1))
    )
    expected = np.zeros((len(query_grid), len(key_grid)), bool)
    for i, (query_position, time, query_slot) in enumerate(query_grid):
        for j, (key_position, born, dies, key_slot) in enumerate(key_grid):
            if query_slot == key_slot:
                expected[i, j] = True  # a token sees itself
            elif query_position == key_position:
                expected[i, j] = False  # never another copy of its own position
            else:
                expected[i, j] = born <= time < dies
    query_position, time, query_slot = np.array(query_grid, np.int32).T[..., None]
    key_position, born, dies, key_slot = np.array(key_grid, np.int32).T[:, None]
    # What a query is as a key, and a key as a query, must not matter.
    query = TokenFields(query_position, time, query_slot * 0 + 7, time * 0 - 7, query_slot)
    key = TokenFields(key_position, born * 0 + 99, born, dies, key_slot)
    found = visible(query, key)
    assert isinstance(found, np.ndarray) and found.dtype == bool
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.jit(visible)(query, key), expected)


# --- layouts ----------------------------------------------------------------------------


def _matrix(fields: TokenFields) -> np.ndarray:
    """Who sees whom, bool [B, T, T], once in NumPy and once in jnp."""
    for field in fields:
        assert field.dtype == jnp.int32
        assert field.shape == fields.position.shape
    in_numpy = TokenFields(*(np.asarray(field) for field in fields))
    both = [
        visible(
            TokenFields(*(field[:, :, None] for field in whole)),
            TokenFields(*(field[:, None, :] for field in whole)),
        )
        for whole in (in_numpy, fields)
    ]
    np.testing.assert_array_equal(*both)
    return both[0]


def _expected(position, valid, may_see) -> np.ndarray:
    """Double loop: itself yes, padding and copies of itself no, else `may_see`."""
    batch, num_tokens = position.shape
    seen = np.zeros((batch, num_tokens, num_tokens), bool)
    for row in range(batch):
        for i in range(num_tokens):
            for j in range(num_tokens):
                if i == j:
                    seen[row, i, j] = True
                elif not valid[row, j] or position[row, i] == position[row, j]:
                    seen[row, i, j] = False
                else:
                    seen[row, i, j] = may_see(position[row, i], position[row, j])
    return seen


def _positions(rng, batch, num_tokens):
    """Rows in order, out of order, offset and with copies of one position."""
    rows = [
        np.arange(num_tokens),
        rng.permutation(num_tokens),
        np.arange(num_tokens) + 5,
        rng.integers(0, num_tokens, num_tokens),
    ]
    return np.stack([rows[i % len(rows)] for i in range(batch)]).astype(np.int32)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("block_length", [1, 2, 3, 4, 16])
def test_block_causal(block_length, padded):
    rng = np.random.default_rng(block_length)
    position = _positions(rng, 8, 9)
    valid = rng.random(position.shape) < 0.6 if padded else np.ones(position.shape, bool)
    if padded:
        valid[0] = False  # a row of nothing but padding
    fields = layouts.block_causal(
        jnp.asarray(position), block_length, jnp.asarray(valid) if padded else None
    )

    def may_see(query, key):
        return key // block_length <= query // block_length

    np.testing.assert_array_equal(_matrix(fields), _expected(position, valid, may_see))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_causal_and_bidirectional(name, padded):
    rng = np.random.default_rng(1)
    position = _positions(rng, 4, 7)
    valid = rng.random(position.shape) < 0.6 if padded else np.ones(position.shape, bool)
    fields = getattr(layouts, name)(
        jnp.asarray(position), jnp.asarray(valid) if padded else None
    )

    def may_see(query, key):
        return name == "bidirectional" or key < query

    np.testing.assert_array_equal(_matrix(fields), _expected(position, valid, may_see))


def _training_expected(clean, noisy, length, clean_valid, noisy_valid) -> np.ndarray:
    batch, num_clean = clean.shape
    tokens = num_clean + noisy.shape[1]
    seen = np.zeros((batch, tokens, tokens), bool)
    for row in range(batch):
        halves = [
            ("clean", p, ok) for p, ok in zip(clean[row], clean_valid[row], strict=True)
        ]
        halves += [
            ("noisy", p, ok) for p, ok in zip(noisy[row], noisy_valid[row], strict=True)
        ]
        for i, (query_half, query_position, _) in enumerate(halves):
            for j, (key_half, key_position, key_ok) in enumerate(halves):
                query_block = query_position // length[row]
                key_block = key_position // length[row]
                if i == j:
                    seen[row, i, j] = True
                elif not key_ok:
                    seen[row, i, j] = False
                elif query_half == "clean":
                    seen[row, i, j] = key_half == "clean" and key_block <= query_block
                elif key_half == "clean":
                    seen[row, i, j] = key_block < query_block
                else:
                    # Padding may repeat a position; as a query it follows the rule too.
                    is_copy = key_position == query_position
                    seen[row, i, j] = key_block == query_block and not is_copy
    return seen


@pytest.mark.parametrize("padded", [False, True])
def test_training_pairs_with_a_block_length_per_row(padded):
    rng = np.random.default_rng(2)
    length = np.array([1, 2, 3, 4, 6, 12], np.int32)
    clean = np.tile(np.arange(12, dtype=np.int32), (len(length), 1))
    noisy = np.zeros((len(length), 12), np.int32)
    clean_valid = np.ones(clean.shape, bool)
    noisy_valid = np.zeros(noisy.shape, bool)
    for row, size in enumerate(length):
        # Any subset of whole blocks, in any order; the rest of the half is padding.
        blocks = rng.permutation(12 // size)[: max(1, 12 // size - 1)]
        chosen = np.concatenate([np.arange(size) + block * size for block in blocks])
        noisy[row, : len(chosen)] = chosen
        noisy_valid[row, : len(chosen)] = True
    if padded:
        clean_valid = np.arange(12) < rng.integers(1, 12, len(length))[:, None]
        noisy_valid &= rng.random(noisy.shape) < 0.8
    args = (clean, noisy, length, clean_valid, noisy_valid)
    fields = layouts.training_pairs(*(jnp.asarray(x) for x in args))
    np.testing.assert_array_equal(_matrix(fields), _training_expected(*args))


def test_training_pairs_leak_nothing():
    """Whatever a noisy token reaches through any number of layers is not its own token."""
    clean = jnp.arange(8, dtype=jnp.int32)[None]
    valid = jnp.ones((1, 8), bool)
    fields = layouts.training_pairs(clean, clean, jnp.array([4], jnp.int32), valid, valid)
    reach = _matrix(fields)[0]
    for _ in range(4):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    for i in range(8):
        own_block_clean = [j for j in range(8) if j // 4 == i // 4]
        assert not reach[8 + i, own_block_clean].any()


# --- packing ----------------------------------------------------------------------------


def test_pack_and_unpack_key_fields():
    rng = np.random.default_rng(3)
    low, high = -(2**31), 2**31 - 1
    fields = TokenFields(
        *(
            rng.integers(low, high, (2, 5), np.int32, endpoint=True)
            for _ in TokenFields._fields
        )
    )
    packed = pack_key_fields(TokenFields(*map(jnp.asarray, fields)))
    assert packed.shape == (2, NUM_CACHED_FIELDS, 5) and packed.dtype == jnp.int32
    back = unpack_key_fields(packed)
    for name in ("position", "visible_from", "visible_until"):
        np.testing.assert_array_equal(getattr(back, name), getattr(fields, name))
    # No fresh token, whose slot is its index, is taken for a cached key.
    assert all(field.shape == (2, 5) for field in back)
    assert (np.asarray(back.slot) < 0).all()


# --- attention --------------------------------------------------------------------------

_attend = jax.jit(attend_reference)


def _attention_oracle(q, k, v, seen, cached=None) -> np.ndarray:
    """Softmax attention in float64, one query and head at a time.

    `seen(row, i, j)`, with j counted over [cached | fresh], says what query i sees.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out = np.zeros(q.shape)
    for row, i, head in itertools.product(
        range(batch), range(num_tokens), range(num_heads)
    ):
        kv_head = head // group
        keys, values = list(k[row, kv_head]), list(v[row, kv_head])
        if cached is not None:
            length = int(cached[3][row])
            keys = list(np.asarray(cached[0], np.float64)[row, kv_head, :length]) + keys
            values = list(np.asarray(cached[1], np.float64)[row, kv_head, :length]) + values
        scores, mixed = [], []
        for j, (key, value) in enumerate(zip(keys, values, strict=True)):
            if seen(row, i, j):
                scores.append(np.dot(q[row, i, head], key) / np.sqrt(head_dim))
                mixed.append(value)
        weights = np.exp(np.array(scores) - max(scores))
        out[row, i, head] = (weights / weights.sum()) @ np.array(mixed)
    return out


def _case(seed, batch, num_tokens, slots, kv_heads, group, head_dim, block_length):
    """Random inputs: block-causal, ragged cache lengths, some fresh tokens padding."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    length = rng.integers(0, slots + 1, batch).astype(np.int32)
    # The fresh row may begin inside the cached text: copies of a position must not meet.
    start = np.maximum(length - rng.integers(0, 2, batch), 0)
    position = (start[:, None] + np.arange(num_tokens)).astype(np.int32)
    valid = rng.random((batch, num_tokens)) < 0.75
    cached_position = np.tile(np.arange(slots, dtype=np.int32), (batch, 1))
    fields = layouts.block_causal(jnp.asarray(position), block_length, jnp.asarray(valid))
    cached_fields = layouts.block_causal(jnp.asarray(cached_position), block_length)
    cached = (
        normal(batch, kv_heads, slots, head_dim),
        normal(batch, kv_heads, slots, head_dim),
        np.asarray(pack_key_fields(cached_fields)),
        length,
    )

    def seen(row, i, j, with_cache=True):
        fresh = j - length[row] if with_cache else j
        if fresh == i:
            return True
        if fresh >= 0 and not valid[row, fresh]:
            return False
        key = position[row, fresh] if fresh >= 0 else cached_position[row, j]
        query = position[row, i]
        return key != query and key // block_length <= query // block_length

    q = normal(batch, num_tokens, kv_heads * group, head_dim)
    k = normal(batch, kv_heads, num_tokens, head_dim)
    v = normal(batch, kv_heads, num_tokens, head_dim)
    return q, k, v, fields, cached, valid, seen


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    num_tokens=st.integers(1, 6),
    slots=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from((2, 4, 8)),
    block_length=st.integers(1, 4),
    with_cache=st.booleans(),
)
def test_attention_equals_the_float64_oracle(with_cache, **sizes):
    q, k, v, fields, cached, _, seen = _case(**sizes)
    if with_cache:
        found = _attend(q, k, v, fields, cached)
        expected = _attention_oracle(q, k, v, seen, cached)
    else:
        found = _attend(q, k, v, fields)
        expected = _attention_oracle(q, k, v, lambda *at: seen(*at, with_cache=False))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


_SIZES = {
    "batch": 3,
    "num_tokens": 5,
    "slots": 6,
    "kv_heads": 2,
    "group": 2,
    "head_dim": 4,
    "block_length": 3,
}


@pytest.mark.parametrize("seed", range(6))
def test_attention_with_grouped_heads_and_ragged_lengths(seed):
    q, k, v, fields, cached, _, seen = _case(seed, **_SIZES)
    expected = _attention_oracle(q, k, v, seen, cached)
    found = _attend(q, k, v, fields, cached)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_attention_keeps_its_dtype_and_softmax_in_float32():
    q, k, v, fields, cached, _, seen = _case(0, **_SIZES)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, *cached[:2])]
    found = _attend(*low[:3], fields, (*low[3:], *cached[2:]))
    assert found.dtype == jnp.bfloat16
    expected = _attention_oracle(*low[:3], seen, (*low[3:], *cached[2:]))
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("seed", range(3))
def test_slots_beyond_the_length_do_not_exist(seed):
    q, k, v, fields, cached, _, _ = _case(seed, **_SIZES)
    rng = np.random.default_rng(seed)
    dirty_k, dirty_v, dirty_fields = (x.copy() for x in cached[:3])
    for row, length in enumerate(cached[3]):
        dirty_k[row, :, length:] = 1e30
        dirty_v[row, :, length:] = -1e30
        shape = dirty_fields[row, :, length:].shape
        dirty_fields[row, :, length:] = rng.integers(-9, 9, shape)
    dirty = (dirty_k, dirty_v, dirty_fields, cached[3])
    np.testing.assert_array_equal(
        _attend(q, k, v, fields, dirty), _attend(q, k, v, fields, cached)
    )


@pytest.mark.parametrize("seed", range(3))
def test_padding_is_finite_and_does_not_matter(seed):
    q, k, v, fields, cached, valid, _ = _case(seed, **_SIZES)
    valid[0] = False  # a row of nothing but padding, over an empty cache
    length = cached[3].copy()
    length[0] = 0
    cached = (*cached[:3], length)
    fields = layouts.block_causal(fields.position, 3, jnp.asarray(valid))
    found = np.asarray(_attend(q, k, v, fields, cached))
    assert np.isfinite(found).all()
    dirty_q, dirty_k, dirty_v = q.copy(), k.copy(), v.copy()
    for row, i in np.argwhere(~valid):
        dirty_q[row, i] = 1e3
        dirty_k[row, :, i] = -1e30
        dirty_v[row, :, i] = 1e30
    dirty = np.asarray(_attend(dirty_q, dirty_k, dirty_v, fields, cached))
    np.testing.assert_array_equal(dirty[valid], found[valid])
    assert np.isfinite(dirty).all()


def test_rows_do_not_see_each_other():
    q, k, v, fields, cached, _, _ = _case(4, **_SIZES)
    whole = np.asarray(_attend(q, k, v, fields, cached))
    for row in range(3):
        one = slice(row, row + 1)
        alone = _attend(
            q[one],
            k[one],
            v[one],
            TokenFields(*(field[one] for field in fields)),
            tuple(x[one] for x in cached),
        )
        np.testing.assert_allclose(alone[0], whole[row], rtol=1e-6, atol=1e-6)
        others = np.arange(3) != row
        changed = [x.copy() for x in (q, k, v)]
        for x in changed:
            x[others] = 1e3
        lengths = np.where(others, 6, cached[3]).astype(np.int32)
        found = _attend(*changed, fields, (*cached[:3], lengths))
        np.testing.assert_array_equal(np.asarray(found)[row], whole[row])


def test_gradients_do_not_reach_what_is_not_seen():
    q, k, v, fields, _, valid, _ = _case(5, **_SIZES)

    @jax.jit
    @jax.grad
    def gradient(inputs):
        out = attend_reference(*inputs, fields)
        return jnp.sum(jnp.where(valid[..., None, None], out * out, 0.0))

    grad_q, grad_k, grad_v = gradient((q, k, v))
    assert not valid.all() and valid.any()
    assert all(np.isfinite(x).all() for x in (grad_q, grad_k, grad_v))
    for row, i in np.argwhere(~valid):
        assert not np.any(grad_q[row, i])
        assert not np.any(grad_k[row, :, i])
        assert not np.any(grad_v[row, :, i])


# --- the cache --------------------------------------------------------------------------

_LAYERS, _HEADS, _DIM, _FRESH, _SLOTS, _BATCH = 2, 2, 4, 3, 20, 3
_CONFIG = ModelConfig(
    vocab_size=8,
    num_layers=_LAYERS,
    embed_dim=8,
    num_heads=4,
    num_kv_heads=_HEADS,
    head_dim=_DIM,
    ffw_dim=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    max_positions=_SLOTS,
    mask_id=7,
)
_append = jax.jit(append)


def test_an_empty_cache_has_the_layout_of_the_design():
    cache = init_cache(_CONFIG, _BATCH, _SLOTS, jnp.bfloat16)
    for kept in (cache.k, cache.v):
        assert kept.shape == (_LAYERS, _BATCH, _HEADS, _SLOTS, _DIM)
        assert kept.dtype == jnp.bfloat16
    assert cache.fields.shape == (_BATCH, NUM_CACHED_FIELDS, _SLOTS)
    assert cache.fields.dtype == jnp.int32
    np.testing.assert_array_equal(cache.length, np.zeros(_BATCH))


def _fresh(rng):
    k = rng.normal(size=(_LAYERS, _BATCH, _HEADS, _FRESH, _DIM)).astype(np.float32)
    v = rng.normal(size=k.shape).astype(np.float32)
    fields = TokenFields(
        *(rng.integers(0, 99, (_BATCH, _FRESH)).astype(np.int32) for _ in range(5))
    )
    return k, v, fields


def _check_rows(cache, rows):
    """Compares what exists in the cache with a plain list of tokens a row."""
    back = unpack_key_fields(cache.fields)
    for row, tokens in enumerate(rows):
        assert int(cache.length[row]) == len(tokens)
        for slot, (k, v, numbers) in enumerate(tokens):
            np.testing.assert_array_equal(cache.k[:, row, :, slot], k)
            np.testing.assert_array_equal(cache.v[:, row, :, slot], v)
            stored = (back.position, back.visible_from, back.visible_until)
            assert tuple(int(field[row, slot]) for field in stored) == numbers


_COUNTS = st.lists(st.integers(0, _FRESH), min_size=_BATCH, max_size=_BATCH)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    steps=st.lists(st.tuples(_COUNTS, _COUNTS), min_size=1, max_size=5),
)
def test_appends_and_rollbacks_act_like_lists(seed, steps):
    rng = np.random.default_rng(seed)
    cache = jax.tree.map(np.asarray, init_cache(_CONFIG, _BATCH, _SLOTS, jnp.float32))
    rows = [[] for _ in range(_BATCH)]
    for counts, undone in steps:
        k, v, fields = _fresh(rng)
        cache = _append(cache, k, v, fields, np.array(counts, np.int32))
        cache = jax.tree.map(np.asarray, cache)
        for row, count in enumerate(counts):
            for i in range(count):
                numbers = (
                    int(fields.position[row, i]),
                    int(fields.visible_from[row, i]),
                    int(fields.visible_until[row, i]),
                )
                rows[row].append((k[:, row, :, i], v[:, row, :, i], numbers))
        _check_rows(cache, rows)
        lower = [max(len(row) - less, 0) for row, less in zip(rows, undone, strict=True)]
        rows = [row[:length] for row, length in zip(rows, lower, strict=True)]
        cache = cache.replace(length=np.array(lower, np.int32))
        _check_rows(cache, rows)


def test_append_up_to_the_last_slot_with_slack():
    """A cache with T slots of slack is filled to the brim and keeps its oldest keys."""
    rng = np.random.default_rng(6)
    cache = init_cache(_CONFIG, _BATCH, 3 * _FRESH, jnp.float32)
    first = _fresh(rng)
    counts = [_FRESH, _FRESH, 0]
    for fresh in (first, _fresh(rng), _fresh(rng)):
        cache = _append(cache, *fresh, np.array(counts, np.int32))
    np.testing.assert_array_equal(cache.length, [3 * _FRESH, 3 * _FRESH, 0])
    np.testing.assert_array_equal(cache.k[:, :2, :, :_FRESH], first[0][:, :2])


def test_append_casts_to_the_dtype_of_the_cache():
    cache = init_cache(_CONFIG, _BATCH, _SLOTS, jnp.bfloat16)
    k, v, fields = _fresh(np.random.default_rng(7))
    cache = append(cache, k, v, fields, np.full(_BATCH, _FRESH, np.int32))
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.k[..., :_FRESH, :], k.astype(jnp.bfloat16))
    np.testing.assert_array_equal(cache.v[..., :_FRESH, :], v.astype(jnp.bfloat16))


def test_cached_blocks_give_the_attention_of_one_whole_row():
    """Blocks stored one after the other equal one forward over the whole row."""
    block, tokens = _FRESH, 3 * _FRESH
    rng = np.random.default_rng(8)
    q = rng.normal(size=(_BATCH, tokens, 4, _DIM)).astype(np.float32)
    k = rng.normal(size=(_LAYERS, _BATCH, _HEADS, tokens, _DIM)).astype(np.float32)
    v = rng.normal(size=k.shape).astype(np.float32)
    position = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (_BATCH, 1))
    whole = _attend(q, k[1], v[1], layouts.block_causal(position, block))
    cache = init_cache(_CONFIG, _BATCH, tokens + block, jnp.float32)
    keep, drop = np.full(_BATCH, block, np.int32), np.zeros(_BATCH, np.int32)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        fields = layouts.block_causal(position[:, part], block)
        cached = (cache.k[1], cache.v[1], cache.fields, cache.length)
        out = _attend(q[:, part], k[1, :, :, part], v[1, :, :, part], fields, cached)
        np.testing.assert_allclose(out, whole[:, part], rtol=1e-5, atol=1e-5)
        fresh = k[..., part, :], v[..., part, :]
        # A denoising step writes but keeps nothing; only the commit advances.
        cache = _append(cache, fresh[0] * 100, fresh[1] * 100, fields, drop)
        cache = _append(cache, *fresh, fields, keep)
