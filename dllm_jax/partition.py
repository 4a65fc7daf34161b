"""How the devices that hold one model divide its work: the collectives of a forward.

The transformer runs inside `jax.shard_map`, where every array is a device's own part. What
a device computes of a layer is a partial sum over its heads, its feed-forward columns or
its experts; `Partition.sum` adds them up. With axes of size 1 there is nothing to add: the
same code then runs without a mesh.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.quantize import slice_columns, take_rows


class Partition(NamedTuple):
    """Over how many devices heads, feed-forward and vocabulary are split, and experts."""

    tensor: int = 1
    expert: int = 1

    def sum(self, x: jax.Array, over: tuple[str, ...] = ("tensor",)) -> jax.Array:
        """The sum of the devices' partial results, on all of them."""
        axes = tuple(axis for axis in over if getattr(self, axis) > 1)
        return jax.lax.psum(x, axes) if axes else x

    def index(self, axis: str) -> jax.Array | int:
        """Which of the devices along an axis this is: int32 scalar."""
        return jax.lax.axis_index(axis) if getattr(self, axis) > 1 else 0

    def heads(self, num_heads: int) -> int:
        """How many of so many heads each device has: at least one."""
        return max(num_heads // self.tensor, 1)

    def own_head(self, weight: Any, num_heads: int, size: int) -> Any:
        """What a device needs of a key or value projection `[.., num_heads * size]`.

        Where there are fewer heads than devices every device holds all of them, and its
        queries read one.
        """
        if num_heads >= self.tensor or weight.shape[-1] == size:
            return weight
        head = self.index("tensor") // (self.tensor // num_heads)
        return slice_columns(weight, head * size, size)

    def rows_of_table(
        self, table: Any, index: jax.Array, size: int, dtype: Any
    ) -> jax.Array:
        """`table[index]` of an embedding table of `size` rows, which may be divided."""
        held = table.shape[0]
        if held == size:
            return take_rows(table, index, dtype)
        own = index - self.index("tensor") * held
        mine = (own >= 0) & (own < held)
        rows = take_rows(table, jnp.clip(own, 0, held - 1), dtype)
        return self.sum(jnp.where(mine[..., None], rows, jnp.zeros_like(rows)))


WHOLE = Partition()
"""Every device has all of the model."""
