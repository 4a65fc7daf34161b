"""Meshes, and where parameters and the state of a batch lie on them.

Every leaf of the parameters names what its axes mean (`params.ParamInfo.axes`); rules map
these names to mesh axes. Rows of a batch are divided over the axis "data": devices that
hold different rows exchange nothing, and each goes on until its own rows are done.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dllm_jax.cache import KVCache
from dllm_jax.config import ModelConfig
from dllm_jax.params import ParamInfo, Params, leaf_paths, params_from_leaves
from dllm_jax.partition import WHOLE, Partition
from dllm_jax.quantize import QArray, scale_axes

MESH_AXES = ("data", "tensor", "expert")
"""Rows of a batch; heads, feed-forward and vocabulary; experts. An axis may have size 1."""

LOGICAL_RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": None,
    "vocab": "tensor",
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "ffw": "tensor",
    "experts": "expert",
}
"""The mesh axis over which each logical axis is split; None and unnamed axes are whole."""


def _leaf_spec(
    path: str, info: ParamInfo, rules: Mapping[str, str | None]
) -> PartitionSpec:
    unknown = [axis for axis in info.axes if axis is not None and axis not in rules]
    if unknown:
        raise ValueError(
            f"{path} has the axis {unknown[0]!r}, which the rules do not name; they name "
            f"{', '.join(rules)}."
        )
    split = [None if axis is None else rules[axis] for axis in info.axes]
    for mesh_axis in filter(None, split):
        axes = [axis for axis, on in zip(info.axes, split, strict=True) if on == mesh_axis]
        if len(axes) > 1:
            raise ValueError(
                f"{path} has the axes {' and '.join(map(repr, axes))}, which the rules put "
                f"on one mesh axis {mesh_axis!r}: an array can be split over it once."
            )
    return PartitionSpec(*split)


def param_specs(
    config: ModelConfig, rules: Mapping[str, str | None] = LOGICAL_RULES
) -> Params:
    """The tree of `PartitionSpec`, whatever the sizes of a mesh.

    Args:
      config: the model.
      rules: mesh axis by logical axis, None for axes that stay whole.

    Raises:
      ValueError: if the rules lack an axis, or put two axes of a leaf on one mesh axis.
    """
    return params_from_leaves(
        config,
        {path: _leaf_spec(path, info, rules) for path, info in leaf_paths(config).items()},
    )


def param_shardings(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, str | None] = LOGICAL_RULES,
    quant: str = "none",
) -> Params:
    """The tree of `NamedSharding` on a mesh.

    Projections are split between heads, never inside one. Where there are fewer key/value
    heads than devices to split them over, key and value projections are replicated, and
    so each device has the heads that its query heads read. A vocabulary that cannot be
    split evenly is whole on every device.

    Args:
      config: the model.
      mesh: has the axes that the rules name, of `MESH_AXES`.
      rules: as `param_specs`.
      quant: one of `quantize.QUANTS`; a scale lies as the channels that it is of.

    Raises:
      ValueError: as `param_specs`, or if a mesh axis is missing or does not divide what is
        to be split over it.
    """
    sizes = dict(mesh.shape)
    kv_devices = sizes.get(rules.get("kv_heads"), 1)
    if config.num_kv_heads < kv_devices:
        if kv_devices % config.num_kv_heads:
            raise ValueError(
                f"{config.num_kv_heads} key/value heads cannot be shared evenly by the "
                f"mesh axis {rules['kv_heads']!r} of size {kv_devices}."
            )
        rules = {**rules, "kv_heads": None}
    if config.vocab_size % sizes.get(rules.get("vocab"), 1):
        rules = {**rules, "vocab": None}
    heads = {"q_heads": config.num_heads, "kv_heads": config.num_kv_heads}

    def place(path: str, info: ParamInfo) -> Any:
        spec = _leaf_spec(path, info, rules)
        for dimension, (axis, mesh_axis) in enumerate(zip(info.axes, spec, strict=True)):
            if mesh_axis is None:
                continue
            if mesh_axis not in sizes:
                raise ValueError(
                    f"{path} is to be split over the mesh axis {mesh_axis!r}; the mesh has "
                    f"{', '.join(sizes)}."
                )
            size = heads.get(axis, info.shape[dimension])
            if size % sizes[mesh_axis]:
                raise ValueError(
                    f"dimension {dimension} of {path}, {size} {axis}, cannot be split "
                    f"evenly over the mesh axis {mesh_axis!r} of size {sizes[mesh_axis]}."
                )
        whole = NamedSharding(mesh, spec)
        if not info.quantized(quant):
            return whole
        kept = scale_axes(info.contracts, len(info.shape))
        scale = NamedSharding(mesh, PartitionSpec(*(spec[axis] for axis in kept)))
        return QArray(whole, scale, quant == "int8-dynamic")

    leaves: dict[str, Any] = {
        path: place(path, info) for path, info in leaf_paths(config).items()
    }
    return params_from_leaves(config, leaves)


def fitting(place: Any, shape: Sequence[int]) -> Any:
    """A sharding for a part of an array: as the whole's, on axes that it divides evenly."""
    if not isinstance(place, NamedSharding):
        return place
    sizes = dict(place.mesh.shape)
    spec = (*place.spec, *[None] * (len(shape) - len(place.spec)))
    split = (
        axis if axis is None or size % sizes[axis] == 0 else None
        for axis, size in zip(spec, shape, strict=True)
    )
    return NamedSharding(place.mesh, PartitionSpec(*split))


def leaf_places(
    config: ModelConfig,
    mesh: Mesh | None,
    rules: Mapping[str, str | None] = LOGICAL_RULES,
    quant: str = "none",
) -> dict[str, Any]:
    """`param_shardings` by dotted paths; the first device if there is no mesh."""
    paths = leaf_paths(config)
    if mesh is None:
        alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        dynamic = quant == "int8-dynamic"
        return {
            path: QArray(alone, alone, dynamic) if info.quantized(quant) else alone
            for path, info in paths.items()
        }
    shardings = param_shardings(config, mesh, rules, quant)
    leaves = jax.tree.leaves(shardings, is_leaf=lambda leaf: isinstance(leaf, QArray))
    return dict(zip(paths, leaves, strict=True))


REPLICATED: Mapping[str, str | None] = dict.fromkeys(LOGICAL_RULES)
"""Rules by which every device has the whole model."""


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes in a text such as `data=2,tensor=4`; axes that it leaves out have size 1.

    Raises:
      ValueError: for a text that is none.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    given = set()
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in sizes or name in given or not equals or not size.isdecimal():
            raise ValueError(
                f"mesh={text!r} must be axis=size pairs with commas between them, such as "
                f"data=2,tensor=4; the axes are {', '.join(MESH_AXES)}."
            )
        given.add(name)
        sizes[name] = int(size)
    if min(sizes.values()) < 1:
        raise ValueError(f"mesh={text!r}: every axis must have a size of at least 1.")
    return sizes


def make_mesh(
    mesh: str | Mapping[str, int] | None, devices: Sequence[Any] | None = None
) -> Mesh | None:
    """A mesh with all of `MESH_AXES`, or None where one device does it all.

    Neighbours along "tensor" are neighbours among the devices, as far as jax can arrange
    that: it is the axis with the most traffic.

    Args:
      mesh: as `parse_mesh` takes or gives it; None or all sizes 1: one device.
      devices: to take them from; all of the run by default.

    Raises:
      ValueError: if the sizes do not use all devices of a run of several processes, or
        more than there are.
    """
    if mesh is None:
        mesh = {}
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else {**mesh}
    if unknown := sizes.keys() - set(MESH_AXES):
        raise ValueError(f"mesh has the axis {min(unknown)!r}, not of {MESH_AXES}.")
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    wanted = int(np.prod(shape))
    devices = list(jax.devices() if devices is None else devices)
    shown = ",".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
    if wanted > len(devices):
        raise ValueError(f"mesh={shown} needs {wanted} devices; there are {len(devices)}.")
    if jax.process_count() > 1 and wanted != len(devices):
        raise ValueError(
            f"mesh={shown} has {wanted} devices, the run of {jax.process_count()} "
            f"processes {len(devices)}: it must use all of them."
        )
    if wanted == 1:
        return None
    return jax.make_mesh(
        shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:wanted]
    )


def make_partition(mesh: Mesh | AbstractMesh | None) -> Partition:
    """How the devices of a mesh divide a model."""
    if mesh is None:
        return WHOLE
    return Partition(mesh.shape["tensor"], mesh.shape["expert"])


def batch_specs(tree: Any, whole_drafter: bool = False) -> Any:
    """The tree of `PartitionSpec` of a batch's inputs or state.

    Rows lie along "data", heads of a cache along "tensor".

    Args:
      tree: `DecodeInputs`, or a state of a decoder; arrays or their shapes.
      whole_drafter: whether every device has all heads of what is under "draft".
    """
    rows = PartitionSpec("data")

    def spec(path: Any, leaf: Any) -> Any:
        names = [getattr(key, "name", None) for key in path]
        if isinstance(leaf, KVCache):
            whole = whole_drafter and "draft" in names
            heads = PartitionSpec(None, "data", None if whole else "tensor")
            scales = None if leaf.k_scale is None else heads
            return KVCache(heads, heads, rows, rows, scales, scales)
        return PartitionSpec() if names[-1] == "stop_ids" else rows

    return jax.tree_util.tree_map_with_path(
        spec, tree, is_leaf=lambda leaf: isinstance(leaf, KVCache)
    )


def place(mesh: Mesh | None, tree: Any, specs: Any) -> Any:
    """Puts host arrays, equal in every process, where `specs` says (if there is a mesh)."""
    if mesh is None:
        return tree
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding))
        return jax.device_put(np.asarray(x), sharding)  # of its own devices each

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: put(x, shardings), tree)
    return jax.tree.map(put, tree, shardings)


def wait_for_all(name: str) -> None:
    """Returns when every process of the run has got here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def fetch(tree: Any) -> Any:
    """The arrays on the host, in every process all of them."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)
