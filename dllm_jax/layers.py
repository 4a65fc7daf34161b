"""The layers of the transformer that are not attention."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of the last axis.

    Computed in float32 and cast back before the weight is applied, the order of the
    published models; in bfloat16 the other order gives other numbers.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rope_tables(position: jax.Array, head_dim: int, theta: float):
    """Cosine and sine, float32 `[B, T, H/2]`, of int32 positions `[B, T]`.

    Angles stay float32: in bfloat16 positions above 256 would coincide.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    inverse_frequency = 1.0 / (jnp.float32(theta) ** exponent)
    angle = position.astype(jnp.float32)[..., None] * inverse_frequency
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `[B, T, heads, H]` in halves (rotate_half), in float32, and casts back."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return rotated.astype(x.dtype)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """`down(silu(gate(x)) * up(x))` for `[B, T, D]`."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down
