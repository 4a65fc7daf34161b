"""Caches of int8 keys and values: bounded error, close decodings, plain labels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG

import dllm_jax
from dllm_jax import layouts
from dllm_jax.cache import append, init_cache, refill
from dllm_jax.decode import main

_BATCH, _FRESH, _SLOTS = 3, 5, 16
PROMPTS = [f"Ana has {n} coins. She finds 4. How many coins?" for n in range(3, 11)]


def _fresh(seed: int):
    shape = (CONFIG.num_layers, _BATCH, CONFIG.num_kv_heads, _FRESH, CONFIG.head_dim)
    rng = np.random.default_rng(seed)
    scale = rng.lognormal(sigma=2.0, size=(*shape[:-1], 1))
    return [jnp.asarray(rng.normal(size=shape) * scale, jnp.float32) for _ in "kv"]


def _position(start: int):
    row = jnp.arange(start, start + _FRESH, dtype=jnp.int32)
    return layouts.causal(jnp.broadcast_to(row, (_BATCH, _FRESH)))


def _check(cache, name: str, row: int, slots: slice, want) -> None:
    """Off by half a step of the vector's own scale at most."""
    stored = np.asarray(getattr(cache, name)[:, row, :, slots], np.float32)
    scale = np.asarray(getattr(cache, f"{name}_scale")[:, row, :, slots])[..., None]
    want = np.asarray(want[:, row])
    assert np.abs(stored).max() == 127
    assert (np.abs(stored * scale - want) <= scale * 0.5001).all()


def test_appended_numbers_are_off_by_half_a_step():
    cache = init_cache(CONFIG, _BATCH, _SLOTS, jnp.int8)
    count = jnp.array([5, 2, 0], jnp.int32)
    first, second = _fresh(0), _fresh(1)
    cache = append(cache, *first, _position(0), count)
    cache = append(cache, *second, _position(5), count)
    assert cache.length.tolist() == [10, 4, 0]
    assert cache.k.dtype == jnp.int8 and cache.k_scale.dtype == jnp.float32
    for name, one, other in zip("kv", first, second, strict=True):
        _check(cache, name, 0, slice(0, 5), one)
        _check(cache, name, 0, slice(5, 10), other)
        _check(cache, name, 1, slice(0, 2), one[..., :2, :])
        _check(cache, name, 1, slice(2, 7), other)


def test_refilled_rows_and_the_others():
    cache = init_cache(CONFIG, _BATCH, _SLOTS, jnp.int8)
    first, second = _fresh(2), _fresh(3)
    count = jnp.full((_BATCH,), _FRESH, jnp.int32)
    cache = append(cache, *first, _position(0), count)
    rows = jnp.array([True, False, True])
    cache = refill(cache, *second, _position(0), rows, count - 1)
    assert cache.length.tolist() == [4, 5, 4]
    for name, one, other in zip("kv", first, second, strict=True):
        for row in range(_BATCH):
            _check(cache, name, row, slice(0, 5), other if rows[row] else one)


def test_a_vector_of_zeros_stays_one():
    cache = init_cache(CONFIG, _BATCH, _SLOTS, jnp.int8)
    nothing = jnp.zeros_like(_fresh(0)[0])
    count = jnp.full((_BATCH,), _FRESH, jnp.int32)
    cache = append(cache, nothing, nothing, _position(0), count)
    assert not cache.k.any() and not cache.k_scale.any()


@pytest.fixture(scope="module")
def models():
    load = functools.cache(lambda name, kv: dllm_jax.load(name, kv_dtype=kv))
    return load


@pytest.mark.parametrize(
    ("name", "decoder", "settings", "label"),
    [
        ("demo", "ar", {}, "approximate (int8)"),
        ("demo", "block", {"block_length": 8}, "approximate (int8)"),
        ("demo-llada", "fast_dllm", {"cache": "dual"}, "approximate (dual), int8"),
    ],
)
def test_decodings_hardly_change(models, name, decoder, settings, label):
    request = {"decoder": decoder, "max_new_tokens": 32, **settings}
    plain = dllm_jax.generate(models(name, "auto"), PROMPTS, **request)
    small = dllm_jax.generate(models(name, "int8"), PROMPTS, **request)
    pairs = [
        a == b
        for one, other in zip(plain, small, strict=True)
        for a, b in zip(one.tokens, other.tokens, strict=False)
    ]
    assert np.mean(pairs) > 0.8
    assert {out.stats.cache for out in small} == {label}
    differ = [
        abs(a - b)
        for one, other in zip(plain, small, strict=True)
        for a, b in zip(one.confidence, other.confidence, strict=False)
    ]
    assert max(differ) > 0.0 and np.median(differ) < 0.02


def test_a_cache_takes_half_of_bfloat16():
    def size(dtype):
        cache = jax.eval_shape(lambda: init_cache(CONFIG, 1, 1024, dtype))
        return sum(x.size * x.dtype.itemsize for x in (cache.k, cache.v))

    assert 2 * size(jnp.int8) == size(jnp.bfloat16)


def test_wrong_choices(golden_dir, capsys):
    with pytest.raises(ValueError, match="kv_dtype='int4' must be one of auto, int8"):
        dllm_jax.load("demo", kv_dtype="int4")
    path = str(golden_dir / "fast_dllm_v2")
    model = dllm_jax.load(path, mask_id=253, kv_dtype="int8")
    with pytest.raises(ValueError, match="use_block_cache=True"):
        dllm_jax.generate(
            model, [[1, 2, 3]], "fast_dllm_v2", use_block_cache=True, max_new_tokens=32
        )
    argv = ["--prompt", PROMPTS[0], "--kv-dtype", "int8", "--compile-cache", "none"]
    assert main([*argv, "--max-new-tokens", "16"]) == 0
    assert "approximate (int8)" in capsys.readouterr().err
