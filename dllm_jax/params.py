"""The parameters of a model as one abstract tree, from which everything else derives.

Letters in shapes: L layers, D embed, N query heads, K key/value heads, H head_dim,
F feed-forward, V vocabulary. Matrices are stored [in, out], layers stacked in front.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.config import ModelConfig


@struct.dataclass
class LayerParams:
    """All layers of a stack; leaves that a model does not have are None."""

    attn_norm: Any  # [L, D]
    q: Any  # [L, D, N*H]
    k: Any  # [L, D, K*H]
    v: Any  # [L, D, K*H]
    o: Any  # [L, N*H, D]
    q_norm: Any  # [L, H] or None
    k_norm: Any  # [L, H] or None
    mlp_norm: Any  # [L, D]
    gate: Any  # [L, D, F]
    up: Any  # [L, D, F]
    down: Any  # [L, F, D]


@struct.dataclass
class Params:
    """A whole model."""

    embed: Any  # [V, D]
    layers: LayerParams
    final_norm: Any  # [D]
    head: Any  # [D, V], or None when the embedding table is the head


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """A leaf of the abstract tree: what it looks like and what its axes mean."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical names, the input of sharding rules
    init_scale: float | None  # standard deviation, or None for ones (norm weights)


def abstract_params(config: ModelConfig) -> Params:
    """The tree of `ParamInfo` that describes every parameter of a model."""
    layers, embed = config.num_layers, config.embed_dim
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim

    def norm(size: int, axis: str | None) -> ParamInfo:
        return ParamInfo((layers, size), ("layers", axis), None)

    def matrix(rows: int, columns: int, axes: tuple[str, str], depth=1) -> ParamInfo:
        scale = 1.0 / math.sqrt(rows * depth)
        return ParamInfo((layers, rows, columns), ("layers", *axes), scale)

    qk_norm = norm(config.head_dim, None) if config.qk_norm else None
    residual_depth = 2 * layers
    return Params(
        embed=ParamInfo((config.vocab_size, embed), ("vocab", "embed"), 0.02),
        layers=LayerParams(
            attn_norm=norm(embed, "embed"),
            q=matrix(embed, heads, ("embed", "q_heads")),
            k=matrix(embed, kv_heads, ("embed", "kv_heads")),
            v=matrix(embed, kv_heads, ("embed", "kv_heads")),
            o=matrix(heads, embed, ("q_heads", "embed"), residual_depth),
            q_norm=qk_norm,
            k_norm=qk_norm,
            mlp_norm=norm(embed, "embed"),
            gate=matrix(embed, config.ffw_dim, ("embed", "ffw")),
            up=matrix(embed, config.ffw_dim, ("embed", "ffw")),
            down=matrix(config.ffw_dim, embed, ("ffw", "embed"), residual_depth),
        ),
        final_norm=ParamInfo((embed,), ("embed",), None),
        head=(
            None
            if config.tied_head
            else ParamInfo((embed, config.vocab_size), ("embed", "vocab"), 0.02)
        ),
    )


def _map(fn, tree: Params) -> Params:
    return jax.tree.map(fn, tree, is_leaf=lambda leaf: isinstance(leaf, ParamInfo))


def param_shapes(config: ModelConfig, dtype: Any, sharding: Any = None) -> Params:
    """The tree of `jax.ShapeDtypeStruct`, as restores and ahead-of-time lowering want."""
    return _map(
        lambda info: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding),
        abstract_params(config),
    )


def leaf_paths(config: ModelConfig) -> dict[str, ParamInfo]:
    """Every leaf by its dotted path, such as `layers.q`."""
    leaves = jax.tree.leaves_with_path(
        abstract_params(config), is_leaf=lambda leaf: isinstance(leaf, ParamInfo)
    )
    return {".".join(key.name for key in path): info for path, info in leaves}


def params_from_leaves(config: ModelConfig, leaves: dict[str, Any]) -> Params:
    """Assembles the tree from values by dotted path, the inverse of `leaf_paths`."""
    ordered = [leaves[path] for path in leaf_paths(config)]
    structure = jax.tree.structure(
        abstract_params(config), is_leaf=lambda leaf: isinstance(leaf, ParamInfo)
    )
    return jax.tree.unflatten(structure, ordered)


def init_params(config: ModelConfig, rng_key: jax.Array, dtype=jnp.float32) -> Params:
    """Random parameters for training. The key is consumed."""
    infos = leaf_paths(config)
    keys = dict(zip(infos, jax.random.split(rng_key, len(infos)), strict=True))

    def init(path: str, info: ParamInfo) -> jax.Array:
        if info.init_scale is None:
            return jnp.ones(info.shape, dtype)
        noise = jax.random.truncated_normal(keys[path], -3.0, 3.0, info.shape)
        return (noise * info.init_scale).astype(dtype)

    return params_from_leaves(
        config, {path: init(path, info) for path, info in infos.items()}
    )


def count_params(config: ModelConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(info.shape) for info in leaf_paths(config).values())
