"""Norm, rotary embedding and feed-forward against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dllm_jax.grouped import grouped_matmul
from dllm_jax.layers import apply_rope, rms_norm, rope_tables, swiglu
from dllm_jax.quantize import dequantize, quantize

_bfloat16 = ml_dtypes.bfloat16
_norm = jax.jit(rms_norm, static_argnums=2)
_tables = jax.jit(rope_tables, static_argnums=(1, 2))
_silu_gated = jax.jit(swiglu)


# --- the norm ---------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_rms_norm_in_float32(eps):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 16)).astype(np.float32)
    x[0, 0] = 0.0
    weight = rng.normal(size=16).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight
    found = _norm(x, weight, eps)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("norm", [rms_norm, _norm], ids=["eager", "jit"])
def test_rms_norm_casts_back_before_the_weight(norm):
    """Two roundings to bfloat16, after the norm and after the weight."""
    rng = np.random.default_rng(1)
    x = (3 * rng.normal(size=(64, 64))).astype(_bfloat16)
    weight = rng.normal(size=64).astype(_bfloat16)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    wide_weight = weight.astype(np.float64)
    expected = (normed.astype(_bfloat16).astype(np.float64) * wide_weight).astype(_bfloat16)
    late_cast = (normed * wide_weight).astype(_bfloat16)
    found = norm(jnp.asarray(x), jnp.asarray(weight), 1e-6)
    assert found.dtype == jnp.bfloat16
    # The float32 norm may round a few entries to the other side.
    assert np.mean(np.asarray(found) == expected) > 0.99
    assert np.mean(late_cast == expected) < 0.9


def test_rms_norm_squares_in_float32():
    """Squares of such bfloat16 values are exact enough only in float32."""
    x = np.full((1, 256), 3.0, _bfloat16)
    x[0, 0] = 100.0
    found = np.asarray(_norm(jnp.asarray(x), jnp.ones(256, jnp.bfloat16), 1e-6))
    scale = np.sqrt((100.0**2 + 255 * 9.0) / 256)
    np.testing.assert_allclose(found[0, 1].astype(np.float64), 3.0 / scale, rtol=4e-3)


# --- the rotary embedding ---------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=2)
def _rotate(x, position, theta):
    return apply_rope(x, *rope_tables(position, x.shape[-1], theta))


def _rope_oracle(x, position, theta) -> np.ndarray:
    """Pairs (x[i], x[i + H/2]) as complex numbers, turned by position * theta^(-2i/H)."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    out = np.zeros(x.shape)
    for row, i in np.ndindex(*position.shape):
        for pair in range(half):
            angle = float(position[row, i]) * theta ** (-2.0 * pair / (2 * half))
            turned = (x[row, i, :, pair] + 1j * x[row, i, :, pair + half]) * np.exp(
                1j * angle
            )
            out[row, i, :, pair] = turned.real
            out[row, i, :, pair + half] = turned.imag
    return out


_POSITIONS = np.stack([np.arange(51), np.arange(250, 301)]).astype(np.int32)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [2, 16])
def test_rope_in_float32(head_dim, theta):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 51, 3, head_dim)).astype(np.float32)
    found = _rotate(x, _POSITIONS, theta)
    assert found.dtype == jnp.float32
    expected = _rope_oracle(x, _POSITIONS, theta)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_rope_of_bfloat16_has_float32_angles():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 51, 2, 16)).astype(_bfloat16)
    found = _rotate(jnp.asarray(x), _POSITIONS, 1e6)
    assert found.dtype == jnp.bfloat16
    expected = _rope_oracle(x, _POSITIONS, 1e6)
    # Half a unit in the last place of bfloat16, and a little for the float32 angle.
    np.testing.assert_allclose(
        np.asarray(found).astype(np.float64), expected, rtol=2**-8, atol=1e-4
    )
    # In bfloat16 the positions above 256 fall together in pairs.
    one = np.ones((2, 51, 1, 2), _bfloat16)
    turned = np.asarray(_rotate(jnp.asarray(one), _POSITIONS, 1e4))[1, :, 0]
    assert len(np.unique(turned.astype(np.float64), axis=0)) == 51


def test_rope_tables_are_float32_and_exact_far_out():
    position = np.array([[0, 257, 4095, 32767]], np.int32)
    cos, sin = _tables(position, 8, 1e6)
    assert cos.shape == sin.shape == (1, 4, 4)
    assert cos.dtype == sin.dtype == jnp.float32
    angle = position[..., None] * 1e6 ** (-np.arange(0, 8, 2) / 8)
    # A float32 angle of this size is good to 2e-3.
    np.testing.assert_allclose(cos, np.cos(angle), atol=4e-3)
    np.testing.assert_allclose(sin, np.sin(angle), atol=4e-3)
    np.testing.assert_array_equal(cos[0, 0], np.ones(4))
    np.testing.assert_array_equal(sin[0, 0], np.zeros(4))


def test_rope_depends_on_the_distance_alone():
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(query_at, key_at):
        at = [np.array([[p]], np.int32) for p in (query_at, key_at)]
        return float(jnp.sum(_rotate(q, at[0], 1e4) * _rotate(k, at[1], 1e4)))

    np.testing.assert_allclose(score(7, 3), score(304, 300), atol=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


# --- the feed-forward -------------------------------------------------------------------


def test_swiglu():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 3, 6)).astype(np.float32)
    x[0, 0] *= 100.0  # silu far out on both sides
    gate, up = rng.normal(size=(2, 6, 10)).astype(np.float32)
    down = rng.normal(size=(10, 6)).astype(np.float32)
    wide = x.astype(np.float64)
    gated = wide @ gate
    expected = (gated / (1 + np.exp(-gated)) * (wide @ up)) @ down
    found = _silu_gated(x, gate, up, down)
    assert found.shape == (2, 3, 6) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        [3, 0, 40, 5, 0, 0, 1, 11],
        [0] * 7 + [60],
        [0] * 8,
        [130, 0, 126, 0, 1, 127, 0, 300],  # several tiles, borders in and between them
        [1] * 8,
    ],
)
def test_grouped_products(sizes, quantised):
    """The kernel of TPUs against one product a row; groups may be empty, rows left over."""
    rng = np.random.default_rng(0)
    count = max(sum(sizes), 60)
    rows = rng.normal(size=(count, 256)).astype(np.float32)
    weight = rng.normal(size=(2, 8, 256, 384)).astype(np.float32)
    group = np.repeat(np.arange(8), sizes).astype(np.int32)
    inside = len(group)
    group = np.pad(group, (0, count - inside), constant_values=8)
    given = jnp.asarray(weight)
    if quantised:
        given = quantize(given, -2)
        weight = np.asarray(dequantize(given, -2, np.float32))
    want = np.einsum("md,mdf->mf", rows[:inside], weight[1, group[:inside]])
    layer, counts = np.int32(1), np.array(sizes, np.int32)
    others = tuple(map(jnp.asarray, (layer, counts, group)))
    for interpret in (None, True):
        got = grouped_matmul(jnp.asarray(rows), given, *others, interpret=interpret)
        assert got.shape == (count, 384)
        np.testing.assert_allclose(got[:inside], want, rtol=1e-4, atol=1e-3)
