"""The parameters of a model as one abstract tree, from which everything else derives.

Letters in shapes: L layers, D embed, N query heads, K key/value heads, H head_dim,
F feed-forward, E experts, V vocabulary. Matrices are stored [in, out], layers stacked in
front.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dllm_jax.config import ModelConfig
from dllm_jax.quantize import QArray, scale_axes


@struct.dataclass
class LayerParams:
    """A stack of layers of one kind; leaves that a model does not have are None."""

    attn_norm: Any  # [L, D]
    q: Any  # [L, D, N*H]
    k: Any  # [L, D, K*H]
    v: Any  # [L, D, K*H]
    q_bias: Any  # [L, N*H] or None
    k_bias: Any  # [L, K*H] or None
    v_bias: Any  # [L, K*H] or None
    o: Any  # [L, N*H, D]
    q_norm: Any  # [L, H] or None
    k_norm: Any  # [L, H] or None
    mlp_norm: Any  # [L, D]
    gate: Any  # [L, D, F], as up and down: of a dense layer, or of the shared expert
    up: Any  # [L, D, F]
    down: Any  # [L, F, D]
    router: Any  # [L, D, E] or None
    router_bias: Any  # [L, E] float32 or None
    expert_gate: Any  # [L, E, D, F] or None
    expert_up: Any  # [L, E, D, F] or None
    expert_down: Any  # [L, E, F, D] or None


@struct.dataclass
class Params:
    """A whole model."""

    embed: Any  # [V, D]
    dense_layers: LayerParams | None  # the leading dense layers of a mixture of experts
    layers: LayerParams  # all others
    final_norm: Any  # [D]
    head: Any  # [D, V], or None when the embedding table is the head

    @property
    def stacks(self) -> tuple[LayerParams, ...]:
        """The stacks of layers in the order in which they run."""
        return tuple(s for s in (self.dense_layers, self.layers) if s is not None)


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """A leaf of the abstract tree: what it looks like and what its axes mean."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical names, the input of sharding rules
    init_scale: float | None  # standard deviation, or None for ones (norm weights)
    float32: bool = False  # kept in float32 whatever the dtype of the model
    contracts: int | None = (
        None  # axis that products sum over; None: stays as it is in int8
    )

    def quantized(self, quant: str) -> bool:
        """Whether the leaf is a `QArray` in a model of this `quantize.QUANTS`."""
        return quant != "none" and self.contracts is not None

    @property
    def chunk_axis(self) -> int:
        """Along which axis the leaf may be cut: not one that a scale is taken over."""
        return 1 if self.contracts == 0 else 0

    def chunk_starts(self, most_numbers: int) -> range:
        """Where pieces along `chunk_axis` begin; see `chunks`."""
        length = self.shape[self.chunk_axis]
        each = max(most_numbers * length // max(math.prod(self.shape), 1), 1)
        return range(0, length, each // 256 * 256 or each)

    def chunks(self, most_numbers: int) -> list[slice]:
        """Pieces along `chunk_axis` of at most so many numbers, or of one index each.

        Long ones are whole multiples of 256, so that devices can divide them too.
        """
        starts = self.chunk_starts(most_numbers)
        return [slice(i, min(i + starts.step, starts.stop)) for i in starts]

    def cut(self, part: slice) -> "ParamInfo":
        """The leaf as a chunk of it looks."""
        shape = list(self.shape)
        shape[self.chunk_axis] = part.stop - part.start
        return dataclasses.replace(self, shape=tuple(shape))


def _abstract_stack(config: ModelConfig, layers: int, dense: bool) -> LayerParams:
    embed, moe = config.embed_dim, None if dense else config.moe
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim

    def vector(size: int, axis: str | None, scale=None, **kind) -> ParamInfo:
        return ParamInfo((layers, size), ("layers", axis), scale, **kind)

    def matrix(rows: int, columns: int, axes: tuple[str, str], depth=1) -> ParamInfo:
        scale = 1.0 / math.sqrt(rows * depth)
        return ParamInfo((layers, rows, columns), ("layers", *axes), scale, contracts=-2)

    def experts(info: ParamInfo) -> ParamInfo:
        shape = (layers, moe.num_experts, *info.shape[1:])
        axes = ("layers", "experts", *info.axes[1:])
        return dataclasses.replace(info, shape=shape, axes=axes)

    def network(width: int) -> tuple[ParamInfo, ParamInfo, ParamInfo]:
        inward = matrix(embed, width, ("embed", "ffw"))
        return inward, inward, matrix(width, embed, ("ffw", "embed"), residual_depth)

    residual_depth = 2 * config.num_layers
    qk_norm = vector(config.head_dim, None) if config.qk_norm else None
    width = config.ffw_dim if moe is None else moe.shared_ffw_dim
    gate, up, down = network(width) if width else (None, None, None)
    routed = [experts(info) for info in network(moe.ffw_dim)] if moe else [None] * 3
    biased = moe is not None and moe.selection_bias
    router = None
    if moe:  # decides near ties: never in int8
        router = matrix(embed, moe.num_experts, ("embed", None))
        router = dataclasses.replace(router, contracts=None)
    return LayerParams(
        attn_norm=vector(embed, "embed"),
        q=matrix(embed, heads, ("embed", "q_heads")),
        k=matrix(embed, kv_heads, ("embed", "kv_heads")),
        v=matrix(embed, kv_heads, ("embed", "kv_heads")),
        q_bias=vector(heads, "q_heads", 0.0) if config.qkv_bias else None,
        k_bias=vector(kv_heads, "kv_heads", 0.0) if config.qkv_bias else None,
        v_bias=vector(kv_heads, "kv_heads", 0.0) if config.qkv_bias else None,
        o=matrix(heads, embed, ("q_heads", "embed"), residual_depth),
        q_norm=qk_norm,
        k_norm=qk_norm,
        mlp_norm=vector(embed, "embed"),
        gate=gate,
        up=up,
        down=down,
        router=router,
        router_bias=vector(moe.num_experts, None, 0.0, float32=True) if biased else None,
        expert_gate=routed[0],
        expert_up=routed[1],
        expert_down=routed[2],
    )


def abstract_params(config: ModelConfig) -> Params:
    """The tree of `ParamInfo` that describes every parameter of a model."""
    embed, dense = config.embed_dim, config.dense_layers if config.moe else 0
    head = ParamInfo((embed, config.vocab_size), ("embed", "vocab"), 0.02, contracts=0)
    table = ParamInfo((config.vocab_size, embed), ("vocab", "embed"), 0.02)
    if config.tied_head:
        table = dataclasses.replace(table, contracts=1)
    return Params(
        embed=table,
        dense_layers=_abstract_stack(config, dense, dense=True) if dense else None,
        layers=_abstract_stack(config, config.num_layers - dense, dense=False),
        final_norm=ParamInfo((embed,), ("embed",), None),
        head=None if config.tied_head else head,
    )


def _map(fn, tree: Params) -> Params:
    return jax.tree.map(fn, tree, is_leaf=lambda leaf: isinstance(leaf, ParamInfo))


def param_shapes(
    config: ModelConfig, dtype: Any, shardings: Any = None, quant: str = "none"
) -> Params:
    """The tree of `jax.ShapeDtypeStruct`, as restores and ahead-of-time lowering want.

    Args:
      config: the model.
      dtype: of what is not quantised.
      shardings: one for all leaves, or a tree as from `sharding.param_shardings`.
      quant: one of `quantize.QUANTS`.
    """
    shapes = _map(lambda info: leaf_shapes(info, dtype, quant), abstract_params(config))
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(
        lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
        shapes,
        shardings,
    )


def leaf_shapes(info: ParamInfo, dtype: Any, quant: str) -> Any:
    """The `jax.ShapeDtypeStruct` of a leaf, or a `QArray` of two."""
    if not info.quantized(quant):
        return jax.ShapeDtypeStruct(info.shape, leaf_dtype(info, dtype))
    kept = scale_axes(info.contracts, len(info.shape))
    scale = jax.ShapeDtypeStruct(tuple(info.shape[a] for a in kept), jnp.float32)
    values = jax.ShapeDtypeStruct(info.shape, jnp.int8)
    return QArray(values, scale, quant == "int8-dynamic")


def leaf_dtype(info: ParamInfo, dtype: Any) -> Any:
    """The dtype of a leaf in a model of `dtype`."""
    return jnp.dtype(jnp.float32) if info.float32 else jnp.dtype(dtype)


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


def get_leaf(params: Params, path: str) -> Any:
    """A leaf by its dotted path."""
    return functools.reduce(getattr, path.split("."), params)


def init_params(config: ModelConfig, rng_key: jax.Array, dtype=jnp.float32) -> Params:
    """Random parameters for training. The key is consumed."""
    infos = leaf_paths(config)
    keys = dict(zip(infos, jax.random.split(rng_key, len(infos)), strict=True))

    def init(path: str, info: ParamInfo) -> jax.Array:
        if info.init_scale is None:
            return jnp.ones(info.shape, dtype)
        noise = jax.random.truncated_normal(keys[path], -3.0, 3.0, info.shape)
        return (noise * info.init_scale).astype(leaf_dtype(info, dtype))

    return params_from_leaves(
        config, {path: init(path, info) for path, info in infos.items()}
    )


def count_params(config: ModelConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(info.shape) for info in leaf_paths(config).values())


def weight_bytes(config: ModelConfig, params: Params, tokens: int) -> float:
    """Bytes of weights that a forward of so many tokens reads, once.

    Of the embedding table only its use as the head counts; of experts, as many as the
    tokens choose if no two choose the same.

    Args:
      config: the model.
      params: its parameters, or their shapes.
      tokens: of all rows.
    """
    total = 0.0
    paths = leaf_paths(config)
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QArray))
    for path, leaf in zip(paths, leaves, strict=True):
        if path == "embed" and not config.tied_head:
            continue
        used = 1.0
        if "expert_" in path:
            used = min(1.0, tokens * config.moe.experts_per_token / config.moe.num_experts)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(leaf))
        total += used * size
    return total
