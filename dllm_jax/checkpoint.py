"""Converted checkpoints: Orbax items, a sidecar and the tokenizer's files.

    DIR/dllm.json          config, family, dtype, source, checksums
    DIR/params/LEAF/0 ..   Orbax checkpoints, each of a chunk of the leaf
    DIR/tokenizer.json ..  as published

Leaves come in chunks of a few hundred MB (some layers of a stack, some of the vocabulary),
so that writing and reading never hold more in host memory, and a restore places each shard
where it belongs.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import math
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from dllm_jax.config import ModelConfig
from dllm_jax.hf import CheckpointError, HFCheckpoint, export_leaves, read_json
from dllm_jax.models import FAMILIES
from dllm_jax.params import (
    ParamInfo,
    Params,
    leaf_dtype,
    leaf_paths,
    leaf_shapes,
    params_from_leaves,
)
from dllm_jax.quantize import QUANTS, QArray, quantize, scale_axes
from dllm_jax.sharding import fitting, leaf_places

SIDECAR = "dllm.json"
FORMAT_VERSION = 2
CHUNK_NUMBERS = 2**26
"""Most numbers of a chunk, 128 MiB in bfloat16, unless one layer has more."""
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
    checksums: dict[str, list[int]]  # CRC-32 of the bytes of each leaf's chunks
    chunk_numbers: int  # most numbers of a chunk
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
    if not (directory / SIDECAR).exists() and (directory / "config.json").exists():
        raise CheckpointError(
            f"{directory} is a Hugging Face checkpoint, not a converted one (it has no "
            f"{SIDECAR})."
        )
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
        values["checksums"] = {k: [*v] for k, v in values["checksums"].items()}
        if values["dtype"] not in DTYPES:
            raise ValueError(f"dtype={values['dtype']!r}")
        if values["family"] not in FAMILIES:
            raise ValueError(f"family={values['family']!r}")
        for file in values["tokenizer_files"]:
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{file!r} among tokenizer_files")
        if values.get("quant", "none") not in QUANTS:
            raise ValueError(f"quant={values['quant']!r}")
        sidecar = Sidecar(**values)
        for leaf, info in leaf_paths(sidecar.config).items():
            count = len(info.chunk_starts(sidecar.chunk_numbers))
            if len(sidecar.checksums[leaf]) != count:
                raise ValueError(f"{leaf} has not the checksums of {count} chunks")
        return sidecar
    except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory / SIDECAR} is damaged: {error}.") from None


def _checksum(*values: Any) -> int:
    """CRC-32 of arrays' bytes, one behind the other."""
    checksum = 0
    for value in values:
        checksum = zlib.crc32(np.ascontiguousarray(value).view(np.uint8), checksum)
    return checksum


def _release(numbers: int) -> None:
    """Frees what is left of a big chunk: Orbax leaves cycles that hold its arrays."""
    if numbers >= 2**22:
        gc.collect()


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
            for leaf, info in leaf_paths(source.config).items():
                checksums[leaf] = []
                for number, part in enumerate(info.chunks(CHUNK_NUMBERS)):
                    chunk = source.read_leaf(leaf, DTYPES[dtype], quant, part)
                    stored = _stored(chunk)
                    checksums[leaf].append(_checksum(*stored.values()))
                    checkpointer.save(partial / "params" / leaf / str(number), stored)
                    checkpointer.wait_until_finished()
                    progress(leaf, sum(value.nbytes for value in stored.values()))
                    size = info.cut(part).shape
                    del chunk, stored
                    _release(math.prod(size))
        for file in source.tokenizer_files:
            shutil.copyfile(source.directory / file, partial / file)
        sidecar = Sidecar(
            source.config,
            source.family.name,
            dtype,
            name,
            revision,
            checksums,
            CHUNK_NUMBERS,
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


def _restore_chunk(directory: Path, leaf: str, number: int, shapes: Any) -> dict[str, Any]:
    """What was saved of a chunk; damaged data makes Orbax raise anything."""
    with ocp.StandardCheckpointer() as checkpointer:
        path = (directory / "params" / leaf / str(number)).resolve()
        return checkpointer.restore(path, _stored(shapes))


def _host_chunks(
    directory: Path, sidecar: Sidecar, leaf: str
) -> Iterator[tuple[slice, dict[str, np.ndarray] | str]]:
    """A leaf chunk by chunk: what was saved, or what is wrong with it."""
    info, place = leaf_paths(sidecar.config)[leaf], leaf_places(sidecar.config, None)[leaf]
    dtype, known = DTYPES[sidecar.dtype], sidecar.checksums[leaf]
    parts = info.chunks(sidecar.chunk_numbers)
    for number, (part, checksum) in enumerate(zip(parts, known, strict=True)):
        shapes = leaf_shapes(info.cut(part), dtype, sidecar.quant)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
        )
        try:
            stored = _restore_chunk(directory, leaf, number, placed)
        except Exception as error:
            yield part, f"{leaf} ({_first_line(error)})"
            continue
        values = {name: np.asarray(stored[name]) for name in _stored(shapes)}
        right = _checksum(*values.values()) == checksum
        yield part, values if right else leaf


def verify_checkpoint(
    directory: Path, progress: Progress = lambda leaf, size: None
) -> Sidecar:
    """Reads every leaf back and compares its bytes with the sidecar's checksum."""
    _quiet_orbax()
    sidecar = read_sidecar(directory)
    damaged = [f for f in sidecar.tokenizer_files if not (directory / f).is_file()]
    for leaf, info in leaf_paths(sidecar.config).items():
        for part, found in _host_chunks(directory, sidecar, leaf):
            if isinstance(found, str):
                damaged += [found] if found not in damaged else []
            else:
                progress(leaf, sum(value.nbytes for value in found.values()))
            size = math.prod(info.cut(part).shape)
            del found
            _release(size)
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
        fresh = info.quantized(quant) and not info.quantized(sidecar.quant)
        chunks = []
        for number, part in enumerate(info.chunks(sidecar.chunk_numbers)):
            shapes = leaf_shapes(info.cut(part), dtype, "none" if fresh else quant)
            place = places[leaf].values if fresh else places[leaf]
            try:
                stored = _restore_chunk(directory, leaf, number, _placed(shapes, place))
            except Exception as error:
                raise CheckpointError(
                    f"{directory}: {leaf} cannot be restored ({_first_line(error)}): "
                    "convert the checkpoint again."
                ) from None
            if fresh:
                chunks.append(_quantize_there(stored["value"], info, places[leaf]))
            elif info.quantized(quant):
                chunks.append(shapes.replace(**stored))
            else:
                chunks.append(stored["value"])
        leaves[leaf] = _join(chunks, info, places[leaf])
    return params_from_leaves(sidecar.config, leaves)


def _placed(shapes: Any, places: Any) -> Any:
    """Shapes with the sharding of their whole, as far as it divides them."""

    def put(x: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fitting(place, x.shape))

    return jax.tree.map(put, shapes, places)


def _join(chunks: list[Any], info: ParamInfo, place: Any) -> Any:
    """The leaf of its chunks, where it belongs."""
    if len(chunks) == 1:
        return jax.device_put(chunks[0], place)

    joined = _joiner(info.chunk_axis, info.contracts, len(info.shape), place)(*chunks)
    jax.block_until_ready(joined)
    for array in jax.tree.leaves(chunks):
        array.delete()
    return joined


@functools.cache  # leaves of one shape share a program
def _joiner(axis: int, contracts: int | None, ndim: int, place: Any) -> Callable:
    def concatenate(*parts):
        if not isinstance(parts[0], QArray):
            return jnp.concatenate(parts, axis)
        values = jnp.concatenate([part.values for part in parts], axis)
        # The scale lacks an axis, which is behind the one that is cut or is axis 0.
        own = scale_axes(contracts, ndim).index(axis)
        scale = jnp.concatenate([part.scale for part in parts], own)
        return QArray(values, scale, parts[0].dynamic)

    return jax.jit(concatenate, out_shardings=place)


@functools.cache  # chunks of one shape share a program
def _quantizer(axis: int, where: QArray) -> Callable:
    return jax.jit(lambda x: quantize(x, axis, where.dynamic), out_shardings=where)


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

    def read_leaf(leaf: str) -> np.ndarray:
        info = leaf_paths(sidecar.config)[leaf]
        whole = np.empty(info.shape, leaf_dtype(info, DTYPES[sidecar.dtype]))
        for part, found in _host_chunks(directory, sidecar, leaf):
            if isinstance(found, str):
                raise CheckpointError(
                    f"{directory}: {found} differs from what was written."
                )
            whole[(slice(None),) * info.chunk_axis + (part,)] = found["value"]
        return whole

    with _new_directory(destination) as partial:
        export_leaves(
            *(read_leaf, sidecar.config, sidecar.family, partial, DTYPES[sidecar.dtype]),
            progress=progress,
        )
        for file in sidecar.tokenizer_files:
            shutil.copyfile(directory / file, partial / file)
    return sidecar


def _quantize_there(weight: jax.Array, info: ParamInfo, place: QArray) -> QArray:
    """Quantises where the weight lies; its memory is free when that is done."""
    shapes = leaf_shapes(
        dataclasses.replace(info, shape=weight.shape), weight.dtype, "int8"
    )
    where = jax.tree.map(
        lambda x, p: fitting(p, x.shape), shapes.replace(dynamic=place.dynamic), place
    )
    quantized = _quantizer(info.contracts, where)(weight)
    jax.block_until_ready(quantized)
    weight.delete()
    return quantized


def read_hf_params(
    source: HFCheckpoint,
    dtype: Any,
    places: dict[str, Any] | None = None,
    quant: str = "none",
) -> Params:
    """Reads a Hugging Face checkpoint in memory, leaf by leaf, as `read_params` does.

    Onto the first device if `places` is None.
    """
    if places is None:
        places = leaf_places(source.config, None, quant=quant)
    return params_from_leaves(
        source.config,
        {
            leaf: jax.device_put(source.read_leaf(leaf, np.dtype(dtype), quant), place)
            for leaf, place in places.items()
        },
    )
