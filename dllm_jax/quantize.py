"""int8 weights: values with a float32 scale for each output channel.

A product reads half of bfloat16's bytes and scales what comes out. Norms, biases, routers
and an embedding table that is not the head stay as they are: they are small, or decide near
ties, or are only looked up. Approximate: a weight is off by at most half a 127th of the
largest of its channel.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

QUANTS = ("none", "int8", "int8-dynamic")
"""What weights are in memory; with int8-dynamic, products quantise their other side too."""


_HOST_NUMBERS = 2**24  # of a weight that are float32 at a time, 64 MiB


@struct.dataclass
class QArray:
    """A stack of matrices in int8, as the products below take them.

    `values` is `[.., in, out]` and `scale` `[.., out]`; an embedding table is `[out, in]`.
    """

    values: Any  # int8
    scale: Any  # float32
    dynamic: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape


def scale_axes(axis: int, ndim: int) -> tuple[int, ...]:
    """The axes of a weight that its scale has, if `axis` is summed over in products."""
    return tuple(a for a in range(ndim) if a != axis % ndim)


def quantize(weight: Any, axis: int, dynamic: bool = False) -> QArray:
    """The nearest int8 weight, on the host for host arrays.

    Args:
      weight: float `[..]`.
      axis: the axis that products sum over.
      dynamic: whether products quantise their other side, token by token.
    """
    if isinstance(weight, np.ndarray):
        return QArray(*_quantize_on_host(weight, axis), dynamic)
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axis) / jnp.float32(127.0)
    safe = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    values = jnp.round(wide / jnp.expand_dims(safe, axis)).astype(jnp.int8)
    return QArray(values, scale, dynamic)


def _quantize_on_host(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and scale, with little memory besides: some channels at a time."""
    values = np.empty(weight.shape, np.int8)
    kept = scale_axes(axis, weight.ndim)
    scale = np.empty([weight.shape[a] for a in kept], np.float32)
    channels = kept[-1]
    step = max(_HOST_NUMBERS * weight.shape[channels] // max(weight.size, 1), 1)
    for begin in range(0, weight.shape[channels], step):
        part = [slice(None)] * weight.ndim
        part[channels] = slice(begin, begin + step)
        wide = weight[tuple(part)].astype(np.float32)
        own = np.abs(wide).max(axis=axis) / np.float32(127.0)
        wide /= np.expand_dims(np.maximum(own, np.finfo(np.float32).tiny), axis)
        values[tuple(part)] = np.round(wide, out=wide)
        scale[..., begin : begin + step] = own
    return values, scale


def dequantize(weight: QArray, axis: int, dtype: Any) -> Any:
    """The weight that stands for, in `dtype`; on the host for host arrays."""
    lib = np if isinstance(weight.values, np.ndarray) else jnp
    wide = weight.values.astype(lib.float32) * lib.expand_dims(weight.scale, axis)
    return wide.astype(dtype)


def _dynamic(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 of each token `[.., D]` and its scale `[.., 1]`."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127.0
    safe = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    return jnp.round(wide / safe).astype(jnp.int8), scale


def product(x: jax.Array, weight: Any, subscripts: str, dtype: Any) -> jax.Array:
    """An einsum of tokens and a weight, in `dtype`.

    Args:
      x: `[.., D]`.
      weight: an array, or a `QArray` whose scale is of the last axis of the result.
      subscripts: contracting the last axis of `x`.
      dtype: of the result.
    """
    if not isinstance(weight, QArray):
        return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)
    if weight.dynamic:
        values, scale = _dynamic(x)
        exact = jnp.einsum(
            subscripts, values, weight.values, preferred_element_type=jnp.int32
        )
        return (exact.astype(jnp.float32) * scale * weight.scale).astype(dtype)
    out = jnp.einsum(
        subscripts,
        x,
        weight.values.astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return (out * weight.scale).astype(dtype)


def matmul(x: jax.Array, weight: Any) -> jax.Array:
    """`x @ weight` in `x.dtype`, whatever the weight is."""
    if isinstance(weight, QArray):
        return product(x, weight, "...d,df->...f", x.dtype)
    return x @ weight


def take_rows(table: Any, index: jax.Array, dtype: Any) -> jax.Array:
    """`table[index]` of an embedding table `[V, D]`, in `dtype` if it is int8."""
    if not isinstance(table, QArray):
        return table[index]
    wide = table.values[index].astype(jnp.float32) * table.scale[index][..., None]
    return wide.astype(dtype)


def slice_columns(weight: Any, start: Any, size: int, axis: int = -1) -> Any:
    """A part of the output channels, along `axis` of the values."""
    if not isinstance(weight, QArray):
        return jax.lax.dynamic_slice_in_dim(weight, start, size, axis)
    return weight.replace(
        values=jax.lax.dynamic_slice_in_dim(weight.values, start, size, axis),
        scale=jax.lax.dynamic_slice_in_dim(weight.scale, start, size, -1),
    )
