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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from dllm_jax.config import ModelConfig
from dllm_jax.hf import CheckpointError, HFCheckpoint, export_hf, read_json
from dllm_jax.params import (
    ParamInfo,
    Params,
    leaf_paths,
    leaf_shapes,
    params_from_leaves,
)
from dllm_jax.quantize import QUANTS, QArray, quantize
from dllm_jax.sharding import leaf_places

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
    quant: str = "none"  # of the weights: "none" or "int8"

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
        if values.get("quant", "none") not in QUANTS:
            raise ValueError(f"quant={values['quant']!r}")
        return Sidecar(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory / SIDECAR} is damaged: {error}.") from None


def _checksum(*values: Any) -> int:
    """CRC-32 of arrays' bytes, one behind the other."""
    checksum = 0
    for value in values:
        checksum = zlib.crc32(np.ascontiguousarray(value).view(np.uint8), checksum)
    return checksum


def _stored(leaf: Any) -> dict[str, Any]:
    """What is saved of a leaf, by name."""
    if isinstance(leaf, QArray):
        return {"values": leaf.values, "scale": leaf.scale}
    return {"value": leaf}


def _quiet_orbax() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def write_checkpoint(
    source: HFCheckpoint,
    destination: Path,
    dtype: str,
    name: str,
    revision: str | None,
    progress: Progress = lambda leaf, size: None,
    quant: str = "none",
) -> Sidecar:
    """Converts a checkpoint, leaf by leaf; the destination appears whole or not at all.

    Args:
      source: the opened Hugging Face checkpoint.
      destination: must not exist.
      dtype: a key of `DTYPES`.
      name: where the source came from, for the sidecar.
      revision: its commit, if known.
      progress: told of each finished leaf.
      quant: "none", or "int8" for weights in int8.

    Raises:
      CheckpointError: if the destination exists or cannot be written, or the source is bad.
    """
    _quiet_orbax()
    with _new_directory(destination) as partial:
        checksums = {}
        with ocp.StandardCheckpointer() as checkpointer:
            for leaf in leaf_paths(source.config):
                stored = _stored(source.read_leaf(leaf, DTYPES[dtype], quant))
                checksums[leaf] = _checksum(*stored.values())
                checkpointer.save(partial / "params" / leaf, stored)
                checkpointer.wait_until_finished()
                progress(leaf, sum(value.nbytes for value in stored.values()))
                del stored
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
            quant,
        )
        (partial / SIDECAR).write_text(sidecar.to_json(), encoding="utf-8")
        verify_checkpoint(partial)
    return sidecar


@contextlib.contextmanager
def _new_directory(destination: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `destination` at the end, or else is removed.

    Raises:
      CheckpointError: if the destination exists, or it or its content cannot be written.
    """
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
        yield partial
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def _restore_leaf(directory: Path, leaf: str, shapes: Any) -> dict[str, Any]:
    """What was saved of a leaf; damaged data makes Orbax raise anything."""
    with ocp.StandardCheckpointer() as checkpointer:
        path = (directory / "params" / leaf).resolve()
        return checkpointer.restore(path, _stored(shapes))


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        places,
    )


def verify_checkpoint(
    directory: Path, progress: Progress = lambda leaf, size: None
) -> Sidecar:
    """Reads every leaf back and compares its bytes with the sidecar's checksum."""
    _quiet_orbax()
    sidecar = read_sidecar(directory)
    places = leaf_places(sidecar.config, None, quant=sidecar.quant)
    damaged = [f for f in sidecar.tokenizer_files if not (directory / f).is_file()]
    for leaf, info in leaf_paths(sidecar.config).items():
        shapes = leaf_shapes(info, DTYPES[sidecar.dtype], sidecar.quant)
        try:
            stored = _restore_leaf(directory, leaf, _placed(shapes, places[leaf]))
            values = [np.asarray(stored[name]) for name in _stored(shapes)]
        except Exception as error:
            damaged.append(f"{leaf} ({_first_line(error)})")
            continue
        if _checksum(*values) != sidecar.checksums.get(leaf):
            damaged.append(leaf)
        progress(leaf, sum(value.nbytes for value in values))
    if damaged:
        raise CheckpointError(
            f"{directory}: {', '.join(damaged)} differ from what was written: "
            "convert the checkpoint again."
        )
    return sidecar


def read_params(
    directory: Path,
    sidecar: Sidecar,
    dtype: Any,
    places: dict[str, Any],
    quant: str = "none",
) -> Params:
    """Restores a converted checkpoint, leaf by leaf.

    Args:
      directory: of the checkpoint.
      sidecar: its own.
      dtype: of what is not int8.
      places: from `sharding.leaf_places`, for `quant`; every process reads its own devices'
        parts.
      quant: one of `quantize.QUANTS`.

    Raises:
      CheckpointError: if a leaf cannot be restored, or was stored in int8 and is wanted
        otherwise.
    """
    _quiet_orbax()
    if sidecar.quant != "none" and quant == "none":
        raise CheckpointError(
            f"{directory} was converted with quant={sidecar.quant!r}: the weights as they "
            "were (quant='none') are not there."
        )
    leaves = {}
    for leaf, info in leaf_paths(sidecar.config).items():
        place = places[leaf]
        fresh = info.quantized(quant) and not info.quantized(sidecar.quant)
        shapes = leaf_shapes(info, dtype, "none" if fresh else quant)
        placed = _placed(shapes, place.values if fresh else place)
        try:
            stored = _restore_leaf(directory, leaf, placed)
        except Exception as error:
            raise CheckpointError(
                f"{directory}: {leaf} cannot be restored ({_first_line(error)}): "
                "convert the checkpoint again."
            ) from None
        if fresh:
            leaves[leaf] = _quantize_there(stored["value"], info, place)
        elif info.quantized(quant):
            leaves[leaf] = shapes.replace(**stored)
        else:
            leaves[leaf] = stored["value"]
    return params_from_leaves(sidecar.config, leaves)


def export_checkpoint(
    directory: Path,
    destination: Path,
    progress: Callable[[str, int], None] = lambda file, size: None,
) -> Sidecar:
    """Writes a converted checkpoint as its family publishes it, whole or not at all.

    Args:
      directory: of the converted checkpoint.
      destination: must not exist.
      progress: told of each finished file and its bytes.

    Raises:
      CheckpointError: if either directory is bad, or the weights are in int8.
    """
    _quiet_orbax()
    sidecar = read_sidecar(directory)
    if sidecar.quant != "none":
        raise CheckpointError(
            f"{directory} has quant={sidecar.quant!r}: only weights as they were published "
            "can be exported (quant='none')."
        )
    infos, dtype = leaf_paths(sidecar.config), DTYPES[sidecar.dtype]
    places = leaf_places(sidecar.config, None)

    def read_leaf(leaf: str) -> np.ndarray:
        shapes = _placed(leaf_shapes(infos[leaf], dtype, "none"), places[leaf])
        try:
            value = np.asarray(_restore_leaf(directory, leaf, shapes)["value"])
        except Exception as error:
            raise CheckpointError(
                f"{directory}: {leaf} cannot be restored ({_first_line(error)})."
            ) from None
        if _checksum(value) != sidecar.checksums.get(leaf):
            raise CheckpointError(f"{directory}: {leaf} differs from what was written.")
        return value

    with _new_directory(destination) as partial:
        export_hf(
            read_leaf, sidecar.config, sidecar.family, partial, dtype, progress=progress
        )
        for file in sidecar.tokenizer_files:
            shutil.copyfile(directory / file, partial / file)
    return sidecar


def _quantize_there(weight: jax.Array, info: ParamInfo, place: QArray) -> QArray:
    """Quantises where the weight lies; its memory is free when that is done."""
    quantized = jax.jit(
        lambda x: quantize(x, info.contracts, place.dynamic), out_shardings=place
    )(weight)
    jax.block_until_ready(quantized)
    weight.delete()
    return quantized


def read_hf_params(
    source: HFCheckpoint, dtype: Any, places: dict[str, Any], quant: str = "none"
) -> Params:
    """Reads a Hugging Face checkpoint in memory, leaf by leaf, as `read_params` does."""
    return params_from_leaves(
        source.config,
        {
            leaf: jax.device_put(source.read_leaf(leaf, np.dtype(dtype), quant), place)
            for leaf, place in places.items()
        },
    )
