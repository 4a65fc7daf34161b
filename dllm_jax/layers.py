"""The layers of the transformer that are not attention."""

from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.quantize import matmul


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of the last axis.

    Computed in float32 and cast back before the weight is applied, the order of the
    published models; in bfloat16 the other order gives other numbers.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rope_tables(position: jax.Array, rotary_dim: int, theta: float):
    """Cosine and sine, float32 `[B, T, rotary_dim/2]`, of int32 positions `[B, T]`.

    Angles stay float32: in bfloat16 positions above 256 would coincide.
    """
    exponent = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    inverse_frequency = 1.0 / (jnp.float32(theta) ** exponent)
    angle = position.astype(jnp.float32)[..., None] * inverse_frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `[B, T, heads, H]` in halves (rotate_half), in float32, and casts back.

    The tables cover the leading dimensions of a head; what lies behind passes through.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        rotated.append(wide[..., 2 * half :])
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def swiglu(x: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    """`down(silu(gate(x)) * up(x))` for `[B, T, D]`."""
    return matmul(jax.nn.silu(matmul(x, gate)) * matmul(x, up), down)
