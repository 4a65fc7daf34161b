"""The one transformer: pure functions of parameters, tokens, fields and cache."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from dllm_jax.attention import attend
from dllm_jax.cache import KVCache
from dllm_jax.config import ModelConfig
from dllm_jax.layers import apply_rope, rms_norm, rope_tables, swiglu
from dllm_jax.moe import Experts, mixture
from dllm_jax.params import LayerParams, Params
from dllm_jax.partition import WHOLE, Partition
from dllm_jax.quantize import matmul, product
from kernels_pallas import TokenFields, pack_fields


class ForwardOutput(NamedTuple):
    """What a forward pass leaves behind."""

    hidden: jax.Array  # [B, T, D] after the final norm, the input of `logits`
    k: jax.Array  # [L, B, K, T, H] roped keys of the fresh tokens
    v: jax.Array  # [L, B, K, T, H] values of the fresh tokens


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    fields: TokenFields,
    cache: KVCache | None = None,
    implementation: str = "auto",
    partition: Partition = WHOLE,
) -> ForwardOutput:
    """Runs fresh tokens through the model; the cache is only read.

    Args:
      params: the weights.
      config: static.
      tokens: int32 `[B, T]`, ids below `config.vocab_size`.
      fields: `[B, T]` each, which decide positions and who sees whom.
      cache: the committed prefix of every row, or None.
      implementation: static, of the attention (`attention.attend`).
      partition: static, how the model is divided; parameters, cache and the keys and values
        that come back are then this device's part, and the call is inside `shard_map`.

    Returns:
      Hidden states, and the fresh keys and values, which `cache.append` can keep.
    """
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, *fields])
    batch, num_tokens = tokens.shape
    rotary_dim = int(config.head_dim * config.rotary_fraction)
    cos, sin = rope_tables(fields.position, rotary_dim, config.rope_theta)

    num_heads = partition.heads(config.num_heads)
    num_kv_heads = partition.heads(config.num_kv_heads)
    packed = pack_fields(fields, num_heads // num_kv_heads)

    def own(weight):  # of keys or values
        if weight is None:
            return None
        return partition.own_head(weight, config.num_kv_heads, config.head_dim)

    def project(x, weight, bias):  # [B, T, D] -> [B, T, heads, H]
        # Fused with what follows, XLA for TPU would want the weight transposed: a copy of
        # all of them before the loop, and a slow slice of it in every layer.
        x = jax.lax.optimization_barrier(matmul(x, weight))
        x = x if bias is None else x + bias
        return x.reshape(batch, num_tokens, -1, config.head_dim)

    def qk_norms(stack: LayerParams):  # [L, N + K, H], the weights of all heads
        if stack.q_norm is None:
            return None
        queries = jnp.repeat(stack.q_norm[:, None], num_heads, axis=1)
        keys = jnp.repeat(stack.k_norm[:, None], num_kv_heads, axis=1)
        return jnp.concatenate([queries, keys], axis=1)

    def layer_step(experts: Experts, first: int, carry, xs):
        x, index = carry
        layer, norms = xs
        with jax.named_scope("attention"):
            y = rms_norm(x, layer.attn_norm, config.norm_eps)
            # Queries and keys go through norm and RoPE together: half as many operations.
            q = project(y, layer.q, layer.q_bias)
            k = project(y, own(layer.k), own(layer.k_bias))
            both = jnp.concatenate([q, k], axis=2)
            if norms is not None:
                both = rms_norm(both, norms, config.norm_eps)
            q, k = jnp.split(apply_rope(both, cos, sin), [num_heads], axis=2)
            k = k.swapaxes(1, 2)
            v = project(y, own(layer.v), own(layer.v_bias)).swapaxes(1, 2)
            out = attend(q, k, v, packed, cache, index, implementation)
            x = x + partition.sum(matmul(out.reshape(batch, num_tokens, -1), layer.o))
        with jax.named_scope("mlp"):
            y = rms_norm(x, layer.mlp_norm, config.norm_eps)
            if layer.router is None:
                x = x + partition.sum(swiglu(y, layer.gate, layer.up, layer.down))
            else:
                number = index - first
                part = mixture(y, layer, experts, number, config.moe, partition)
                x = x + partition.sum(part, ("tensor", "expert"))
        return (x, index + 1), (k, v)

    with jax.named_scope("embed"):
        dtype = params.final_norm.dtype
        x = partition.rows_of_table(params.embed, tokens, config.vocab_size, dtype)
    fresh, carry, first = [], (x, jnp.int32(0)), 0
    for stack in params.stacks:
        # Not scanned over: a layer's experts would be copied for their kernel.
        experts = Experts.of(stack)
        rest = stack.replace(expert_gate=None, expert_up=None, expert_down=None)
        step = functools.partial(layer_step, experts, first)
        carry, keys_values = jax.lax.scan(step, carry, (rest, qk_norms(stack)))
        fresh.append(keys_values)
        first += stack.attn_norm.shape[0]
    x, _ = carry
    k, v = fresh[0]
    if len(fresh) > 1:
        k, v = (jnp.concatenate(parts) for parts in zip(*fresh, strict=True))
    hidden = rms_norm(x, params.final_norm, config.norm_eps)
    return ForwardOutput(hidden, k, v)


def logits(
    params: Params,
    hidden: jax.Array,
    vocab_size: int | None = None,
    partition: Partition = WHOLE,
) -> jax.Array:
    """Float32 logits `[..., V]` of hidden states `[..., D]`.

    Only ask for slots that can be unmasked: at a vocabulary of 152k this is the largest
    array of a forward pass.

    Args:
      params: the weights.
      hidden: after the final norm.
      vocab_size: of the model; needed where a partition may divide the vocabulary, whose
        devices then gather each other's logits.
      partition: static, as in `forward`.
    """
    with jax.named_scope("logits"):
        if params.head is None:
            own = product(hidden, params.embed, "...d,vd->...v", jnp.float32)
        else:
            own = product(hidden, params.head, "...d,dv->...v", jnp.float32)
        if vocab_size in (None, own.shape[-1]) or partition.tensor == 1:
            return own
        return jax.lax.all_gather(own, "tensor", axis=own.ndim - 1, tiled=True)
