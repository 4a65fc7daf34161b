"""Hugging Face checkpoints on disk: strict reading, tensor by tensor, and writing.

No torch, and none of the checkpoint's own Python code: families are data
(`dllm_jax.models`), tensors come from safetensors.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dllm_jax.config import Family, ModelConfig
from dllm_jax.models import FAMILIES, resolve_family
from dllm_jax.params import (
    ParamInfo,
    Params,
    get_leaf,
    leaf_dtype,
    leaf_paths,
    leaf_shapes,
)
from dllm_jax.quantize import QArray, quantize

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LFS_MARK = b"version https://git-lfs"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with everything that is wrong with it.

    One line, whatever the names in it are.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, by its safetensors header."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Part:
    """Where rows of a source tensor belong in our tree."""

    leaf: str  # dotted path, such as `layers.q`
    index: tuple[int, ...]  # into a stacked leaf: layer, or layer and expert
    rows: slice  # of the published tensor
    transpose: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """What one source tensor is: its published shape, and its parts in our tree."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises CheckpointError with the path if it is not one."""
    try:
        raw = path.read_bytes()
        if raw.startswith(_LFS_MARK):
            raise CheckpointError(f"{path} is {_POINTER}")
        value = json.loads(raw.decode("utf-8"))
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, an endless number
        raise CheckpointError(f"{path} is not readable JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return value


_POINTER = "a Git LFS pointer, not the file itself: run `git lfs pull`."


def _read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, checked against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8 + 64)
            if start.startswith(_LFS_MARK):
                raise CheckpointError(f"{path.name} is {_POINTER}")
            if size < 8:
                raise CheckpointError(
                    f"{path.name} is truncated: {size} bytes; download it again."
                )
            header_size = int.from_bytes(start[:8], "little")
            if header_size > 100_000_000 or start[8:9] != b"{":
                raise CheckpointError(f"{path.name} is not a safetensors file.")
            if size < 8 + header_size:
                raise CheckpointError(
                    f"{path.name} is truncated inside its header: download it again."
                )
            file.seek(8)
            raw = file.read(header_size)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror or error}.") from None
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} has a broken safetensors header: {error!r}."
        ) from None
    expected = 8 + header_size + end
    if size < expected:
        raise CheckpointError(
            f"{path.name} is truncated: {size:,} of {expected:,} bytes; download it again."
        )
    if size > expected:
        raise CheckpointError(
            f"{path.name} is damaged: {size:,} bytes where its header says "
            f"{expected:,}; download it again."
        )
    return tensors


def _tensor(path: Path, name: str, entry: dict[str, Any]) -> Tensor:
    """One entry of a header; raises ValueError and its like if it is none."""
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{path.name} stores {name} as {entry['dtype']}; supported are "
            f"{', '.join(_DTYPES)}."
        )
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {shape} at {begin} to {end}")
    dtype = _DTYPES[entry["dtype"]]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name} of shape {shape} has {end - begin} bytes")
    return Tensor(path, shape, dtype)


def _shard_names(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files of a checkpoint, and the index's map of tensors, if any."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no weight_map.")
        escaping = [n for n in weight_map.values() if Path(str(n)).name != n]
        if escaping:
            raise CheckpointError(f"{index_path} names a file outside: {escaping[0]!r}.")
        return sorted(set(weight_map.values())), weight_map
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if "model.safetensors" in names:
        return ["model.safetensors"], None
    if not names:
        others = sorted(p.name for p in directory.glob("*.bin"))
        hint = f" (it has {others[0]}: only safetensors are read)" if others else ""
        raise CheckpointError(f"{directory} has no *.safetensors file{hint}.")
    if len(names) > 1:
        raise CheckpointError(
            f"{directory} has {len(names)} safetensors files but no "
            "model.safetensors.index.json: download it as well."
        )
    return names, None


def _special_id(value: Any, vocabulary: Mapping[str, int]) -> int | None:
    token = value.get("content") if isinstance(value, dict) else value
    return vocabulary.get(token) if isinstance(token, str) else None


def _tokenizer_ids(directory: Path) -> dict[str, int | None]:
    """Special ids by the tokenizer's own files, without loading the tokenizer."""
    config_path = directory / "tokenizer_config.json"
    if not config_path.exists():
        return {}
    config = read_json(config_path)
    vocabulary: dict[str, int] = {}
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and str(key).isdigit():
            vocabulary[entry.get("content")] = int(key)
    tokenizer_path = directory / "tokenizer.json"
    if tokenizer_path.exists():
        tokenizer = read_json(tokenizer_path)
        plain = (tokenizer.get("model") or {}).get("vocab")
        if isinstance(plain, dict):
            vocabulary = {**plain, **vocabulary}
        for entry in tokenizer.get("added_tokens") or []:
            if isinstance(entry, dict) and type(entry.get("id")) is int:
                vocabulary[entry.get("content")] = entry["id"]
    names = {
        "eos_id": "eos_token",
        "pad_id": "pad_token",
        "bos_id": "bos_token",
        "mask_id": "mask_token",
    }
    return {ours: _special_id(config.get(key), vocabulary) for ours, key in names.items()}


class HFCheckpoint:
    """A checkpoint directory whose headers agree with its index and its config."""

    def __init__(
        self,
        directory: Path,
        family: str | None = None,
        mask_id: int | None = None,
        name: str | None = None,
    ):
        """Opens a directory and reads headers only.

        Args:
          directory: holds config.json and safetensors.
          family: overrides what config.json says of the architecture.
          mask_id: overrides the mask id.
          name: what the checkpoint is called, if not as its directory (a hub id).

        Raises:
          CheckpointError: everything that is wrong, in one message.
        """
        self.directory = directory
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory.")
        if family is not None and family not in FAMILIES:
            raise CheckpointError(f"{family=} must be one of {', '.join(FAMILIES)}.")
        hf_config = read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        try:
            tokenizer = _tokenizer_ids(directory)
        except CheckpointError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{directory}: the tokenizer's files are damaged: {error}."
            ) from None
        try:
            self.family: Family = (
                resolve_family(hf_config) if family is None else FAMILIES[family]
            )
            self.config = ModelConfig.from_hf(
                hf_config,
                self.family,
                generation,
                tokenizer,
                name=name or directory.resolve().name,
                mask_id=mask_id,
            )
        except CheckpointError:
            raise
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{directory}: {error}") from None
        self.tokenizer_files = tuple(
            file for file in TOKENIZER_FILES if (directory / file).is_file()
        )
        self.tensors: dict[str, Tensor] = {}
        problems = self._read_headers()
        described = _count_sources(self.config)
        if described > 10 * len(self.tensors) + 100_000:
            problems.append(
                f"it describes {described:,} tensors, the files have {len(self.tensors):,}."
            )
        else:
            self.sources = source_tensors(self.config, self.family)
            problems += self._compare()
        if problems:
            raise CheckpointError(
                f"{directory} is no {self.family.name} checkpoint as its config "
                f"describes it: {' '.join(problems)}"
            )

    def _read_headers(self) -> list[str]:
        """Reads every file's header; returns what is wrong with the files."""
        problems = []
        for file in self.tokenizer_files:
            with (self.directory / file).open("rb") as stream:
                if stream.read(len(_LFS_MARK)) == _LFS_MARK:
                    problems.append(f"{file} is {_POINTER}")
        names, weight_map = _shard_names(self.directory)
        absent = [n for n in names if not os.path.isfile(self.directory / n)]
        if absent:
            problems.append(
                f"{len(absent)} of {len(names)} weight files that the index names are "
                f"not there: {', '.join(absent)}. Was the download interrupted?"
            )
        duplicates, stale = set(), set()
        for name in names:
            if name in absent:
                continue
            try:
                header = _read_header(self.directory / name)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            duplicates |= set(header) & set(self.tensors)
            self.tensors |= header
            if weight_map is not None:
                stale |= {t for t, f in weight_map.items() if f == name} ^ set(header)
        self._unreadable = bool(problems)
        if duplicates:
            problems.append(f"stored twice: {', '.join(sorted(duplicates))}.")
        if stale:
            problems.append(
                f"the index disagrees with the files about {', '.join(sorted(stale))}: "
                "download both again."
            )
        return problems

    def _compare(self) -> list[str]:
        """Both directions: all that is missing, unexpected or of a wrong shape."""
        expected = dict(self.sources)
        problems = []
        head, table = self.family.tensors["head"], self.family.tensors["embed"]
        if self.config.tied_head and head in self.tensors:
            expected[head] = expected[table]
        missing = sorted(set(expected) - set(self.tensors))
        unexpected = sorted(set(self.tensors) - set(expected))
        shapes = {
            name: f"{name} is {list(tensor.shape)}, not {list(expected[name].shape)}"
            for name, tensor in sorted(self.tensors.items())
            if name in expected and tensor.shape != expected[name].shape
        }
        # What an unreadable file holds is not known to be missing.
        if missing and not self._unreadable:
            problems.append(f"missing tensors: {', '.join(missing)}.")
        if unexpected:
            problems.append(f"unexpected tensors: {', '.join(unexpected)}.")
        if shapes:
            problems.append(f"wrong shapes: {'; '.join(shapes.values())}.")
        both = {head, table}
        if head in expected and expected[head] is expected.get(table):
            known = both <= set(self.tensors) and not both & set(shapes)
            if known and not np.array_equal(
                self.read(head).astype(np.float32), self.read(table).astype(np.float32)
            ):
                problems.append(
                    f"the config ties the head to the embedding, but {head} differs "
                    f"from {table}."
                )
        return problems

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the embedding table is stored."""
        return self.tensors[self.family.tensors["embed"]].dtype

    @property
    def dtypes(self) -> str:
        """All dtypes that the checkpoint's tensors have, for reports."""
        return "/".join(sorted({str(tensor.dtype) for tensor in self.tensors.values()}))

    def read(self, name: str) -> np.ndarray:
        """One tensor as published."""
        with safe_open(self.tensors[name].file, framework="numpy") as file:
            return file.get_tensor(name)

    def read_leaf(
        self, leaf: str, dtype: np.dtype, quant: str = "none", part: slice | None = None
    ) -> Any:
        """One leaf of our tree, stacked and transposed, in `dtype` or a `QArray`.

        Only one source tensor is held besides the leaf.

        Args:
          leaf: its dotted path.
          dtype: of what is not quantised.
          quant: one of `quantize.QUANTS`.
          part: of the leaf, along its `chunk_axis`; all of it if None.

        Raises:
          CheckpointError: if a value is not finite, before or after the cast.
        """
        whole = leaf_paths(self.config)[leaf]
        part = part or slice(0, whole.shape[whole.chunk_axis])
        info = whole.cut(part)
        shapes = leaf_shapes(info, dtype, quant)
        out = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
        pieces = (
            (name, piece)
            for name, source in self.sources.items()
            for piece in source.parts
            if piece.leaf == leaf
        )
        for name, piece in pieces:
            index, within = piece.index, part
            if index:  # a matrix of a stack
                if not part.start <= index[0] < part.stop:
                    continue
                index, within = (index[0] - part.start, *index[1:]), None
            if not isinstance(out, QArray):
                self._read_piece(name, piece, out[index], within)
                continue
            weight = np.empty(info.shape[len(index) :], leaf_dtype(info, dtype))
            self._read_piece(name, piece, weight, within)
            axis = info.contracts % len(info.shape) - len(index)
            one = quantize(weight, axis)
            out.values[index], out.scale[index] = one.values, one.scale
        return out

    def _read_piece(
        self, name: str, piece: Part, target: np.ndarray, within: slice | None
    ) -> None:
        """What a tensor has of a leaf, or of it what is `within` its first rows."""
        rows = piece.rows
        if within is not None:
            rows = slice(rows.start + within.start, rows.start + within.stop)
        try:
            with safe_open(self.tensors[name].file, framework="numpy") as file:
                value = file.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"reading {name} from {self.tensors[name].file.name} failed: {error}."
            ) from None
        value = value.T if piece.transpose else value
        with np.errstate(over="ignore"):
            target[...] = value.astype(target.dtype, copy=False)
        bad = target.size - int(np.isfinite(target).sum())
        if bad:
            own = value.size - int(np.isfinite(value).sum())
            cause = (
                f"has {own} values that are not finite"
                if own
                else f"overflows {target.dtype} at {bad} values: choose another --dtype"
            )
            raise CheckpointError(f"{name} {cause}.")


def _stacked(info: ParamInfo) -> int:
    """How many leading axes of a leaf published checkpoints take apart."""
    return [axis in ("layers", "experts") for axis in info.axes].count(True)


def _count_sources(config: ModelConfig) -> int:
    """About how many tensors a published checkpoint has, without naming them."""
    leaves = leaf_paths(config).values()
    return sum(math.prod(info.shape[: _stacked(info)]) for info in leaves)


def source_tensors(config: ModelConfig, family: Family) -> dict[str, Source]:
    """Every tensor of a published checkpoint of this config, by name."""
    dense = config.dense_layers if config.moe else 0
    sources: dict[str, Source] = {}
    for leaf, info in leaf_paths(config).items():
        pattern = family.tensors[leaf]
        stacked = _stacked(info)
        shape = info.shape[stacked:]
        transpose = len(shape) == 2 and leaf not in family.untransposed
        published = shape[::-1] if transpose else shape
        first_layer = dense if leaf.startswith("layers.") else 0
        for index in np.ndindex(*info.shape[:stacked]):
            layer, expert = (*index, 0, 0)[:2]
            name = pattern.format(layer=layer + first_layer, expert=expert)
            before = sources.get(name, Source((0, *published[1:]), ()))
            rows = slice(before.shape[0], before.shape[0] + published[0])
            part = Part(leaf, index, rows, transpose)
            sources[name] = Source((rows.stop, *published[1:]), (*before.parts, part))
    return sources


def hf_config(config: ModelConfig, family: Family) -> dict[str, Any]:
    """A config.json from which `ModelConfig.from_hf` gives `config` back."""
    values = {
        key: getattr(config, ours)
        for ours, keys in family.config_keys.items()
        for key in keys
    }
    for ours, keys in family.moe_keys.items():
        if ours == "shared_experts":
            values[keys[0]] = config.moe.shared_ffw_dim // config.moe.ffw_dim
        else:
            values[keys[0]] = getattr(config.moe, ours)
    for key, allowed in family.supported.items():
        values[key] = allowed[0]
    return {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0],
        **values,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": config.pad_id,
    }


SHARD_BYTES = 1_000_000_000
"""Most bytes of a file of an exported checkpoint, unless one tensor is larger."""


def export_leaves(
    read_leaf: Callable[[str], Any],
    config: ModelConfig,
    family: str,
    directory: Path,
    dtype: Any = ml_dtypes.bfloat16,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str, int], None] = lambda file, size: None,
) -> None:
    """Writes config.json and safetensors as the family publishes them.

    Only the leaves of one tensor, and one file of tensors, are in memory at a time.

    Args:
      read_leaf: a leaf by its dotted path, `[..]` as in the parameter tree.
      config: the model.
      family: its name.
      directory: written to; made if need be.
      dtype: of the tensors.
      shard_bytes: most bytes of a file; a checkpoint that fits into one has no index.
      progress: told of each finished file and its bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    infos, sources = leaf_paths(config), source_tensors(config, FAMILIES[family])

    def size(name: str) -> int:
        return math.prod(sources[name].shape) * target(name).itemsize

    def target(name: str) -> np.dtype:
        return leaf_dtype(infos[sources[name].parts[0].leaf], dtype)

    shards: list[list[str]] = []
    groups = _groups_of_tensors(sources)
    total = sum(map(size, sources))
    if total <= shard_bytes:
        shards = [list(sources)]
    else:
        for group in groups:
            room = 0
            for name in group:
                if size(name) > room:
                    shards.append([])
                    room = shard_bytes
                shards[-1].append(name)
                room -= size(name)
    weight_map, held = {}, {}
    for number, names in enumerate(shards, start=1):
        tensors = {}
        needed = dict.fromkeys(part.leaf for n in names for part in sources[n].parts)
        held = {leaf: held.get(leaf) for leaf in needed}
        for name in names:
            tensors[name] = np.empty(sources[name].shape, target(name))
            for part in sources[name].parts:
                if held[part.leaf] is None:
                    held[part.leaf] = read_leaf(part.leaf)
                value = np.asarray(held[part.leaf][part.index])
                tensors[name][part.rows] = value.T if part.transpose else value
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        _share(directory / file)
        weight_map |= dict.fromkeys(names, file)
        progress(file, sum(map(size, names)))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    text = json.dumps(hf_config(config, FAMILIES[family]), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _share(path: Path) -> None:
    """Gives a file the usual mode; safetensors writes for its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def export_hf(
    params: Params,
    config: ModelConfig,
    family: str,
    directory: Path,
    dtype: Any = ml_dtypes.bfloat16,
) -> None:
    """`export_leaves` of parameters in memory."""
    export_leaves(functools.partial(get_leaf, params), config, family, directory, dtype)


def _groups_of_tensors(sources: Mapping[str, Source]) -> list[list[str]]:
    """The tensors, those together that are of the same leaves (fused projections too)."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, source in sources.items():
        leaves = {part.leaf for part in source.parts}
        joined = [group for group in groups if group[0] & leaves]
        groups = [group for group in groups if not group[0] & leaves]
        names = [n for group in joined for n in group[1]]
        groups.append((leaves.union(*(group[0] for group in joined)), [*names, name]))
    return [names for _, names in groups]


def count_bytes(config: ModelConfig, dtype: np.dtype, quant: str = "none") -> int:
    """Bytes of all parameters in `dtype`, or in int8 what `quant` says."""
    shapes = [leaf_shapes(info, dtype, quant) for info in leaf_paths(config).values()]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
