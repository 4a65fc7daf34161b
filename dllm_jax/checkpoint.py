"""Converted checkpoints: one Orbax item a leaf, a sidecar and the tokenizer's files.

    DIR/dllm.json          config, family, dtype, source, checksums
    DIR/params/LEAF/       an Orbax checkpoint holding one array
    DIR/tokenizer.json ..  as published

A leaf each, so that writing and reading hold one leaf of host memory at a time, and a
restore places each shard where it belongs.
"""

import contextlib
import dataclasses
import json
import logging
import shutil
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from dllm_jax.config import ModelConfig
from dllm_jax.hf import CheckpointError, HFCheckpoint, read_json
from dllm_jax.params import Params, leaf_dtype, leaf_paths, params_from_leaves

SIDECAR = "dllm.json"
FORMAT_VERSION = 1
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

Progress = Callable[[str, int], None]
"""Called with a leaf's name and its bytes when the leaf is finished."""


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """What a converted checkpoint says of itself."""

    config: ModelConfig
    family: str
    dtype: str
    source: str  # directory or hub id that it was converted from
    revision: str | None  # commit of the source, where known
    checksums: dict[str, int]  # CRC-32 of each leaf's bytes
    tokenizer_files: tuple[str, ...]

    def to_json(self) -> str:
        """The text of the sidecar file."""
        ids = {
            "mask_id": self.config.mask_id,
            "eos_ids": list(self.config.eos_ids),
            "pad_id": self.config.pad_id,
        }
        values = {
            "format_version": FORMAT_VERSION,
            **dataclasses.asdict(self),
            "ids": ids,
        }
        return json.dumps(values, indent=2) + "\n"


def read_sidecar(directory: Path) -> Sidecar:
    """Reads a sidecar; raises CheckpointError if it is not one of ours."""
    values = read_json(directory / SIDECAR)
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory / SIDECAR} has format_version={version}; this library reads "
            f"{FORMAT_VERSION}: convert the checkpoint again."
        )
    values.pop("ids", None)
    try:
        values["config"] = ModelConfig.from_dict(values["config"])
        values["tokenizer_files"] = tuple(values["tokenizer_files"])
        values["checksums"] = dict(values["checksums"])
        if values["dtype"] not in DTYPES:
            raise ValueError(f"dtype={values['dtype']!r}")
        return Sidecar(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory / SIDECAR} is damaged: {error}.") from None


def _checksum(value: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(value).view(np.uint8))


def _quiet_orbax() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def write_checkpoint(
    source: HFCheckpoint,
    destination: Path,
    dtype: str,
    name: str,
    revision: str | None,
    progress: Progress = lambda leaf, size: None,
) -> Sidecar:
    """Converts a checkpoint, leaf by leaf; the destination appears whole or not at all.

    Args:
      source: the opened Hugging Face checkpoint.
      destination: must not exist.
      dtype: a key of `DTYPES`.
      name: where the source came from, for the sidecar.
      revision: its commit, if known.
      progress: told of each finished leaf.

    Raises:
      CheckpointError: if the destination exists or cannot be written, or the source is bad.
    """
    _quiet_orbax()
    destination = destination.resolve()
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if destination.exists():
            raise CheckpointError(
                f"{destination} exists: choose another destination or remove it."
            )
        new_parents = [p for p in partial.parents if not p.exists()]
        partial.mkdir(parents=True)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"cannot write {destination.parent}: {reason}. Choose a writable place."
        ) from None
    try:
        checksums = {}
        with ocp.StandardCheckpointer() as checkpointer:
            for leaf in leaf_paths(source.config):
                value = source.read_leaf(leaf, DTYPES[dtype])
                checksums[leaf] = _checksum(value)
                checkpointer.save(partial / "params" / leaf, {"value": value})
                checkpointer.wait_until_finished()
                progress(leaf, value.nbytes)
        for file in source.tokenizer_files:
            shutil.copyfile(source.directory / file, partial / file)
        sidecar = Sidecar(
            source.config,
            source.family.name,
            dtype,
            name,
            revision,
            checksums,
            source.tokenizer_files,
        )
        (partial / SIDECAR).write_text(sidecar.to_json(), encoding="utf-8")
        verify_checkpoint(partial)
        partial.rename(destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        # Orbax's writers report a full disk as one of several types.
        if isinstance(error, CheckpointError) or not isinstance(
            error, OSError | ValueError | RuntimeError
        ):
            raise
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise CheckpointError(f"writing {destination} failed: {reason}.") from None
    return sidecar


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def _restore_leaf(directory: Path, leaf: str, shape: jax.ShapeDtypeStruct) -> Any:
    """One array; damaged data makes Orbax raise anything."""
    with ocp.StandardCheckpointer() as checkpointer:
        path = (directory / "params" / leaf).resolve()
        return checkpointer.restore(path, {"value": shape})["value"]


def verify_checkpoint(
    directory: Path, progress: Progress = lambda leaf, size: None
) -> Sidecar:
    """Reads every leaf back and compares its bytes with the sidecar's checksum."""
    _quiet_orbax()
    sidecar = read_sidecar(directory)
    damaged = [f for f in sidecar.tokenizer_files if not (directory / f).is_file()]
    for leaf, info in leaf_paths(sidecar.config).items():
        dtype = leaf_dtype(info, DTYPES[sidecar.dtype])
        shape = jax.ShapeDtypeStruct(info.shape, dtype, sharding=_one_device())
        try:
            value = np.asarray(_restore_leaf(directory, leaf, shape))
        except Exception as error:
            damaged.append(f"{leaf} ({_first_line(error)})")
            continue
        if _checksum(value) != sidecar.checksums.get(leaf):
            damaged.append(leaf)
        progress(leaf, value.nbytes)
    if damaged:
        raise CheckpointError(
            f"{directory}: {', '.join(damaged)} differ from what was written: "
            "convert the checkpoint again."
        )
    return sidecar


def _one_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def read_params(
    directory: Path, sidecar: Sidecar, dtype: Any, shardings: Params | None = None
) -> Params:
    """Restores a converted checkpoint in `dtype`, leaf by leaf.

    With `shardings`, a tree of `NamedSharding`, every process reads its devices' parts.
    """
    _quiet_orbax()
    places = _places(sidecar.config, shardings)
    leaves = {}
    for leaf, info in leaf_paths(sidecar.config).items():
        shape = jax.ShapeDtypeStruct(
            info.shape, leaf_dtype(info, dtype), sharding=places[leaf]
        )
        try:
            leaves[leaf] = _restore_leaf(directory, leaf, shape)
        except Exception as error:
            raise CheckpointError(
                f"{directory}: {leaf} cannot be restored ({_first_line(error)}): "
                "convert the checkpoint again."
            ) from None
    return params_from_leaves(sidecar.config, leaves)


def read_hf_params(
    source: HFCheckpoint, dtype: Any, shardings: Params | None = None
) -> Params:
    """Reads a Hugging Face checkpoint in memory, leaf by leaf, as `read_params` does."""
    places = _places(source.config, shardings)
    return params_from_leaves(
        source.config,
        {
            leaf: jax.device_put(source.read_leaf(leaf, np.dtype(dtype)), places[leaf])
            for leaf in leaf_paths(source.config)
        },
    )


def _places(config: ModelConfig, shardings: Params | None) -> dict[str, Any]:
    """The sharding of each leaf by its path."""
    paths = leaf_paths(config)
    if shardings is None:
        return dict.fromkeys(paths, _one_device())
    return dict(zip(paths, jax.tree.leaves(shardings), strict=True))
