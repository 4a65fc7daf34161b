"""Where the parameters of a model lie on a mesh of devices.

Every leaf names what its axes mean (`params.ParamInfo.axes`); rules map these names to mesh
axes. Nothing here touches a device: a mesh may be abstract.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dllm_jax.config import ModelConfig
from dllm_jax.params import ParamInfo, Params, leaf_paths, params_from_leaves

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
) -> Params:
    """The tree of `NamedSharding` on a mesh.

    Projections are split between heads, never inside one. Where there are fewer key/value
    heads than devices to split them over, key and value projections are replicated, and
    so each device has the heads that its query heads read.

    Args:
      config: the model.
      mesh: has the axes that the rules name, of `MESH_AXES`.
      rules: as `param_specs`.

    Raises:
      ValueError: as `param_specs`, or if a mesh axis is missing or does not divide what is
        to be split over it.
    """
    sizes = dict(mesh.shape)
    if config.num_kv_heads < sizes.get(rules.get("kv_heads"), 1):
        rules = {**rules, "kv_heads": None}
    heads = {"q_heads": config.num_heads, "kv_heads": config.num_kv_heads}

    def place(path: str, info: ParamInfo) -> NamedSharding:
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
        return NamedSharding(mesh, spec)

    leaves: dict[str, Any] = {
        path: place(path, info) for path, info in leaf_paths(config).items()
    }
    return params_from_leaves(config, leaves)
