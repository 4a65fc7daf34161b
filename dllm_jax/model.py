"""A loaded model: parameters, config, tokenizer, and the programs compiled for it."""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dllm_jax import head, transformer
from dllm_jax.cache import init_cache
from dllm_jax.checkpoint import (
    DTYPES,
    SIDECAR,
    read_hf_params,
    read_params,
    read_sidecar,
)
from dllm_jax.compiler import compiler_options
from dllm_jax.config import ModelConfig
from dllm_jax.decoding.base import ModelFns
from dllm_jax.hf import HFCheckpoint
from dllm_jax.params import Params
from dllm_jax.partition import WHOLE, Partition
from dllm_jax.quantize import QUANTS
from dllm_jax.sharding import (
    LOGICAL_RULES,
    REPLICATED,
    leaf_places,
    make_mesh,
    make_partition,
    param_shardings,
)
from dllm_jax.tokenizer import Tokenizer

DEMO_MODELS = ("demo", "demo-draft", "demo-llada")
KV_DTYPES = ("auto", "int8")


class Model:
    """A loaded model: parameters, config, tokenizer, and its compiled programs."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        name: str = "model",
        kv_dtype: Any = None,
        mesh: Mesh | None = None,
        divided: bool = True,
        quant: str = "none",
    ):
        self.params = params
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.kv_dtype = kv_dtype  # of keys and values in caches; that of params if None
        self.mesh = mesh  # of `sharding.make_mesh`, where the parameters lie; or None
        self.divided = divided  # over the mesh; else every device has all of the model
        self.quant = quant  # of the weights, one of `quantize.QUANTS`
        self.num_traces = 0  # times that a program was traced, for tests
        self.compile_seconds = 0.0
        self._programs: dict[Any, Callable] = {}

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parameters."""
        return self.params.final_norm.dtype

    def fns(self, params: Params) -> ModelFns:
        """The model as decoders see it."""
        return model_fns(
            params, self.config, kv_dtype=self.kv_dtype, partition=self.partition
        )

    def undivided_fns(self, params: Params) -> ModelFns:
        """`fns` as if there were no mesh."""
        return model_fns(params, self.config, kv_dtype=self.kv_dtype)

    @property
    def partition(self) -> Partition:
        """How the devices of the mesh divide the model."""
        return make_partition(self.mesh) if self.divided else WHOLE

    @property
    def specs(self) -> Params:
        """How the parameters lie on the mesh: a tree of `PartitionSpec`."""
        rules = LOGICAL_RULES if self.divided else REPLICATED
        shardings = param_shardings(self.config, self.mesh, rules, self.quant)
        return jax.tree.map(lambda sharding: sharding.spec, shardings)

    def jit(self, fn: Callable, in_specs: Any, out_specs: Any, **options: Any) -> Callable:
        """`jax.jit`, on a mesh with every device running `fn` on its own parts.

        Args:
          fn: a pure function of the parameters and a batch.
          in_specs: `PartitionSpec` of its arguments, as `jax.shard_map` takes them.
          out_specs: of its results.
          **options: of `jax.jit`.
        """
        if self.mesh is not None:
            fn = jax.shard_map(
                fn,
                mesh=self.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )
        return jax.jit(fn, **options)

    def run_program(self, key: tuple, build: Callable[[], Callable], args: tuple) -> Any:
        """Calls a jitted function, compiling it once for each key and argument shapes."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        full_key = (key, shapes, structure)
        if full_key not in self._programs:
            started = time.perf_counter()
            self.num_traces += 1
            options = compiler_options(jax.devices()[0].device_kind)
            self._programs[full_key] = build().lower(*args).compile(options)
            self.compile_seconds += time.perf_counter() - started
        return self._programs[full_key](*args)


def check_loaded(model: Any, name: str = "model") -> None:
    """Raises ValueError for the name of a model in place of a model."""
    if isinstance(model, str | os.PathLike):
        raise ValueError(
            f"{name}={os.fspath(model)!r} must be a loaded model: dllm_jax.load("
            f"{os.fspath(model)!r})."
        )


def check_pair(model: ModelConfig, drafter: ModelConfig) -> None:
    """Raises ValueError unless one model can draft for the other."""
    for name in ("vocab_size", "mask_id", "eos_ids", "attention", "logit_alignment"):
        own, other = getattr(model, name), getattr(drafter, name)
        if own != other:
            raise ValueError(
                f"draft_model has {name}={other!r}, the model {name}={own!r}: they must "
                "be equal."
            )


def model_fns(
    params: Params,
    config: ModelConfig,
    implementation: str = "auto",
    kv_dtype: Any = None,
    partition: Partition = WHOLE,
) -> ModelFns:
    """Binds parameters, and the attention of `attention.attend`, to the transformer.

    Args:
      params: the weights; under a partition those of one device.
      config: of the whole model.
      implementation: of the attention.
      kv_dtype: of cached keys and values; that of the weights if None.
      partition: how the model is divided, inside `shard_map`.
    """
    kv_dtype = kv_dtype or params.final_norm.dtype
    own = dataclasses.replace(config, num_kv_heads=partition.heads(config.num_kv_heads))
    divided = {"vocab_size": config.vocab_size, "partition": partition}
    return ModelFns(
        config=config,
        forward=functools.partial(
            transformer.forward,
            params,
            config,
            implementation=implementation,
            partition=partition,
        ),
        logits=functools.partial(transformer.logits, params, **divided),
        init_cache=lambda batch, slots: init_cache(own, batch, slots, kv_dtype),
        propose=functools.partial(
            head.propose_greedily, params, mask_id=config.mask_id, **divided
        ),
    )


def resolve_model_path(name: str) -> Path:
    """The directory of a model: a demo's name, or a path.

    Raises:
      ValueError: if there is no such directory.
    """
    name = os.fspath(name)
    if name in DEMO_MODELS:
        return Path(str(resources.files("dllm_jax") / "data" / name))
    path = Path(name)
    if not os.path.isdir(path):  # unlike Path's own, false for a name that is too long
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        hint = f"; for a hub id, run `python -m convert {name} DIR` first" if hub else ""
        raise ValueError(
            f"model={name!r} is neither a directory nor one of "
            f"{', '.join(DEMO_MODELS)}{hint}."
        )
    return path


def load_config(name: str) -> ModelConfig:
    """The config of a model, without its weights; raises ValueError if it has none."""
    path = resolve_model_path(name)
    if (path / SIDECAR).exists():
        return read_sidecar(path).config
    return HFCheckpoint(path).config


def load(
    name: str = "demo",
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    family: str | None = None,
    mask_id: int | None = None,
    mesh: str | Mapping[str, int] | Mesh | None = None,
    divided: bool = True,
    quant: str = "auto",
) -> Model:
    """Loads a model.

    Args:
      name: a converted directory, a Hugging Face directory (converted in memory), or
        "demo", "demo-draft", "demo-llada".
      dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on TPU and GPU,
        float32 on CPU.
      kv_dtype: of cached keys and values: "int8" takes half of bfloat16's memory and
        bandwidth and is approximate; "auto" is that of the weights.
      family: overrides what config.json says of the architecture (HF directories only).
      mask_id: overrides the mask id (HF directories only).
      mesh: sizes of the axes data (rows of a batch), tensor (heads, feed-forward and
        vocabulary) and expert, as "data=2,tensor=4" or a dict; or a mesh of
        `sharding.make_mesh`. Of a converted directory each device, and each host, reads
        its own part; of a Hugging Face directory each host reads all, leaf by leaf.
      divided: False puts the whole model on every device of the mesh (a small drafter
        whose target is divided).
      quant: of the weights: "none", "int8" (approximate; half of bfloat16's memory and
        bandwidth), "int8-dynamic" (products also quantise their other side, token by token:
        less exact, faster where tokens are many), or "auto": as converted.

    Returns:
      The model, on the default device or on the mesh.

    Raises:
      ValueError: if there is no such model, it is damaged, or it cannot be divided so.
    """
    if quant not in ("auto", *QUANTS):
        raise ValueError(f"{quant=} must be one of auto, {', '.join(QUANTS)}.")
    if not isinstance(mesh, Mesh):
        mesh = make_mesh(mesh)
    rules = LOGICAL_RULES if divided else REPLICATED
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=} must be one of auto, {', '.join(DTYPES)}.")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"{kv_dtype=} must be one of {', '.join(KV_DTYPES)}.")
    path = resolve_model_path(name)
    if (path / SIDECAR).exists():
        if family is not None or mask_id is not None:
            raise ValueError(
                f"{family=} and {mask_id=} are fixed at conversion: {name} is converted."
            )
        sidecar = read_sidecar(path)
        config = sidecar.config
        quant = sidecar.quant if quant == "auto" else quant
        places = leaf_places(config, mesh, rules, quant)
        params = read_params(path, sidecar, DTYPES[dtype], places, quant)
    else:
        checkpoint = HFCheckpoint(path, family, mask_id)
        config = checkpoint.config
        quant = "none" if quant == "auto" else quant
        places = leaf_places(config, mesh, rules, quant)
        params = read_hf_params(checkpoint, DTYPES[dtype], places, quant)
    has_tokenizer = any((path / file).exists() for file in ("tokenizer.json", "vocab.json"))
    tokenizer = Tokenizer(path, config.mask_id) if has_tokenizer else None
    cached = jnp.int8 if kv_dtype == "int8" else None
    return Model(params, config, tokenizer, os.fspath(name), cached, mesh, divided, quant)
