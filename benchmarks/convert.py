"""What converting a checkpoint costs: host memory and throughput.

    python benchmarks/convert.py [--layers 28] [--scratch DIR] [--json FILE] [--quick]

Writes random weights in the shapes of SDAR-1.7B (3.4 GB in files of at most 1 GB; with
--layers 36 and --model SDAR-8B those of SDAR-8B, if the disk has room), and then runs, each
in a process of its own: a plain copy of the files, the conversion, the conversion to int8,
the check of its checksums, and the export back. `peak/leaf` is the process's peak memory
against the largest leaf of the parameter tree, `over leaf GB` what it is above it; a bare
start of the command (imports and devices) is in the first line. Files were written just
before, so reads may come from the operating system's cache, for the copy too.
"""

import argparse
import dataclasses
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import finish, parse_args

from dllm_jax.config import ModelConfig
from dllm_jax.hf import count_bytes, export_leaves
from dllm_jax.model_sizes import MODELS
from dllm_jax.params import leaf_paths

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_COPY = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
_CONVERT = ("-m", "convert")


def make_config(model: str, layers: int) -> ModelConfig:
    """A model with the widths of a published one, and ids as a checkpoint has them."""
    ids = {"eos_ids": (151643,), "pad_id": 151643, "bos_id": 151643}
    return dataclasses.replace(MODELS[model], num_layers=layers, **ids)


def write_source(config: ModelConfig, directory: Path) -> None:
    """Random finite weights, made leaf by leaf."""
    rng, infos = np.random.default_rng(0), leaf_paths(config)
    pattern = rng.normal(size=2**20).astype(BFLOAT16)

    def read_leaf(leaf: str) -> np.ndarray:
        return np.resize(pattern, infos[leaf].shape)

    export_leaves(read_leaf, config, "sdar", directory)


def run(*command: str) -> tuple[float, float]:
    """Seconds and peak bytes of a Python process."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed.")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def main() -> None:
    """Measures every step once."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "SDAR-1.7B", "choices": ("SDAR-1.7B", "SDAR-4B", "SDAR-8B")},
        layers={"type": int, "default": 28},
        write={"help": argparse.SUPPRESS},
        scratch={"help": "where there is room for three copies (default: temporary)"},
    )
    config = make_config(args.model, 2 if args.quick else args.layers)
    if args.write is not None:
        return write_source(config, Path(args.write))
    infos = leaf_paths(config).values()
    largest = max(math.prod(info.shape) for info in infos) * BFLOAT16.itemsize
    size = count_bytes(config, BFLOAT16)
    rows: list[dict[str, Any]] = []

    def measure(name: str, bytes_: int, *command: str) -> None:
        seconds, peak = run(*command)
        rows.append(
            {
                "step": name,
                "seconds": seconds,
                "MB/s": bytes_ / seconds / 1e6,
                "peak GB": peak / 1e9,
                "peak/leaf": peak / largest,
                "over leaf GB": (peak - largest) / 1e9,
            }
        )
        print(rows[-1], file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        place = {name: str(Path(scratch) / name) for name in ("hf", "orbax", "out")}
        # In a process of its own: a child's peak counts what its parent had.
        ours = (__file__, "--model", args.model, "--layers", str(config.num_layers))
        run(*ours, "--write", place["hf"])
        start = "import convert.__main__, jax; jax.devices()"
        measure("bare start", 0, "-c", start)
        measure("plain copy", size, "-c", _COPY, place["hf"], place["out"])
        shutil.rmtree(place["out"])
        measure("convert", size, *_CONVERT, place["hf"], place["orbax"])
        measure("verify", size, *_CONVERT, "verify", place["orbax"])
        measure("export", size, *_CONVERT, "export", place["orbax"], place["out"])
        for exported in Path(place["out"]).glob("*.safetensors"):
            assert exported.read_bytes() == (Path(place["hf"]) / exported.name).read_bytes()
        shutil.rmtree(place["orbax"])
        measure(
            "convert --quant int8",
            size,
            *_CONVERT,
            place["hf"],
            place["orbax"],
            "--quant",
            "int8",
        )
    print(
        f"{args.model} with {config.num_layers} layers: {size / 1e9:.2f} GB, largest leaf "
        f"{largest / 1e9:.2f} GB\n"
    )
    finish(args, rows)


if __name__ == "__main__":
    main()
