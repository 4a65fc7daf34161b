"""Mixture of experts: routing in float32, and products grouped by expert."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.config import MoEConfig
from dllm_jax.grouped import grouped_matmul
from dllm_jax.layers import swiglu
from dllm_jax.params import LayerParams
from dllm_jax.partition import WHOLE, Partition


def route(
    x: jax.Array, router: jax.Array, bias: jax.Array | None, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts for each token.

    Everything is float32: near ties decide which expert runs. With groups, a group's
    score is the sum of its two best experts (specs, LLaDA2 section 4, router).

    Args:
      x: `[M, D]` tokens after the norm.
      router: `[D, E]`.
      bias: float32 `[E]` added for the choice only, or None.
      config: static.

    Returns:
      expert ids int32 `[M, k]` and weights float32 `[M, k]`.
    """
    logit = jnp.dot(
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if config.scoring == "softmax":
        score = jax.nn.softmax(logit, axis=-1)
    else:
        score = jax.nn.sigmoid(logit)
    ranked = score if bias is None else score + bias
    if config.num_groups > 1:
        grouped = ranked.reshape(ranked.shape[0], config.num_groups, -1)
        group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        _, best = jax.lax.top_k(group_score, config.groups_per_token)
        groups = jnp.arange(config.num_groups, dtype=jnp.int32)
        eligible = jnp.any(best[:, :, None] == groups, axis=1)
        ranked = jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
    _, expert = jax.lax.top_k(ranked, config.experts_per_token)
    weight = jnp.take_along_axis(score, expert, axis=-1)
    if config.normalise and config.experts_per_token > 1:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    return expert.astype(jnp.int32), weight * jnp.float32(config.scale)


class Experts(NamedTuple):
    """The experts of a stack of layers; arrays or `QArray`."""

    gate: Any  # [L, E, D, F]
    up: Any  # [L, E, D, F]
    down: Any  # [L, E, F, D]

    @classmethod
    def of(cls, stack: LayerParams) -> "Experts":
        """Those of a stack; None each if it has none."""
        return cls(stack.expert_gate, stack.expert_up, stack.expert_down)


def mixture(
    x: jax.Array,
    layer: LayerParams,
    experts: Experts,
    index: jax.Array,
    config: MoEConfig,
    partition: Partition = WHOLE,
) -> jax.Array:
    """The feed-forward part of a layer with experts, `[B, T, D]` to `[B, T, D]`.

    Tokens are sorted by expert and each matrix is one grouped product; the routed outputs
    are added up in float32. Where a partition divides experts or their columns, this is
    what the device's own parts add to the sum.

    Args:
      x: `[B, T, D]`.
      layer: the layer's other parameters.
      experts: of its whole stack.
      index: int32 scalar, which layer of the stack it is.
      config: static.
      partition: static.
    """
    tokens = x.reshape(-1, x.shape[-1])
    expert, weight = route(tokens, layer.router, layer.router_bias, config)
    held = experts.gate.shape[1]
    own = expert.reshape(-1) - partition.index("expert") * held
    # Choices of other devices' experts come last and belong to no group.
    own = jnp.where((own >= 0) & (own < held), own, held)
    order = jnp.argsort(own, stable=True)
    groups = jnp.arange(held, dtype=jnp.int32)
    sizes = jnp.sum(own[:, None] == groups, axis=0, dtype=jnp.int32)
    rows = tokens[order // config.experts_per_token]
    group = own[order]
    gate = grouped_matmul(rows, experts.gate, index, sizes, group)
    up = grouped_matmul(rows, experts.up, index, sizes, group)
    out = grouped_matmul(jax.nn.silu(gate) * up, experts.down, index, sizes, group)
    out = out[jnp.argsort(order)].reshape(*expert.shape, -1).astype(jnp.float32)
    if partition.expert > 1:  # rows without a group are not defined
        mine = (own < held).reshape(*expert.shape, 1)
        out = jnp.where(mine, out, jnp.zeros_like(out))
    mixed = jnp.sum(out * weight[..., None], axis=1).astype(x.dtype).reshape(x.shape)
    if layer.gate is None:
        return mixed
    shared = swiglu(x, layer.gate, layer.up, layer.down)
    if partition.expert > 1:  # all devices along the axis have it, one adds it
        first = partition.index("expert") == 0
        shared = jnp.where(first, shared, jnp.zeros_like(shared))
    return mixed + shared
