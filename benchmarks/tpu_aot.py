"""What the TPU compiler says of whole decode loops, without a TPU.

    python benchmarks/tpu_aot.py --model sdar-1.7b --chip v5e --batch 1 --context 1024

Compiles the loop of a decoder (all forwards of a generation but the prefill) ahead of time
for one chip, with abstract parameters, and reads the optimised program. Every option may
be given several times or left out, which means all. Needs libtpu (the `test` extra).

Columns, all for one chip, one forward of the loop, and `context` cached tokens in every
row (decoders without a cache run a canvas of `context` tokens):

    cache GB        keys and values of `context` tokens in every row
    args, temp GB   memory of the loop's inputs (weights, cache) and its temporaries
    fits            whether both are below the chip's memory
    copies          copies or transposes of a whole layer of keys or values in the loop
    moved GB        bytes between HBM and the core
    moved/ideal     against weights (of experts, as many as tokens choose) and K/V, once
    estimate ms     see below
    roofline ms     the larger of ideal bytes / bandwidth and FLOPs of the products / peak
    est/roof        their ratio
    tok/s at n      rows x n committed tokens over the estimate
    collectives     exchanges between devices, and the estimate of their time (below)

With `--mesh` the program is for several devices and all columns but tok/s are one device's;
`--draft-model` compiles the loop of a pair.

Method. The program's text is walked from the loop's body; an inner loop counts as often as
its condition says, a branch as its dearest side (a folded step that also stores a block).
Bytes are operands and results that lie in HBM, of a slice only what it cuts out. Time is
the compiler's own estimate of cycles over the clock; where it gives none (updates in
place, gathers), bytes over bandwidth. The attention kernel is opaque to XLA: its bytes and
time come from its own cost estimate at `context` cached tokens, plus 2 us a call. A
collective takes its bytes over both directions of a ring at the published speed of a link,
plus 1 us a hop, and overlaps nothing.

Error. Memory and bytes are exact for the program, apart from padding of tiles. Times have
not been compared with hardware: the compiler counts on about 70 to 85 % of peak bandwidth
for a stream of weights and on 1.2 us for the smallest operation, overlaps nothing, and
clocks are derived from peak FLOPs; take +-40 %.
"""

import os

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine, markdown_table
from hlo import Cost, Instruction, Reader, dimensions
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from dllm_jax.compiler import compiler_options
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.decoding.base import DecodeInputs
from dllm_jax.model import Model
from dllm_jax.model_sizes import MODELS as PUBLISHED
from dllm_jax.params import leaf_paths, param_shapes, weight_bytes
from dllm_jax.quantize import QUANTS
from dllm_jax.settings import default_decoder, resolve_settings, traced_settings
from dllm_jax.sharding import MESH_AXES, batch_specs, param_shardings, parse_mesh
from kernels_pallas import attention_cost


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the estimates need of one device, by the peaks that Google publishes.

    A device is a chip, but for v4 and 7x: ahead of time they show the halves of a chip.
    """

    topology: str
    memory: float  # bytes
    bandwidth: float  # bytes / s
    flops: float  # bfloat16 / s
    clock: float  # Hz, peak FLOPs over those of the matrix units in one cycle
    link: float  # bytes / s to one neighbour, one way


CHIPS = {
    "v4": Chip("v4:2x2x1", 17.2e9, 6.1e11, 1.38e14, 1.05e9, 4.5e10),
    "v5e": Chip("v5e:2x2", 17.2e9, 8.2e11, 1.97e14, 1.5e9, 4.5e10),
    "v5p": Chip("v5p:2x2x1", 103e9, 2.46e12, 4.59e14, 1.75e9, 9e10),
    "v6e": Chip("v6e:2x2", 34.4e9, 1.64e12, 9.2e14, 1.75e9, 9e10),
    "v7x": Chip("tpu7x:2x2x1", 103e9, 3.7e12, 1.155e15, 2.2e9, 9e10),
}

MODELS = {name.lower(): config for name, config in PUBLISHED.items()}

# --- compiling --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str
    chip: str
    batch: int  # rows, of all devices
    context: int
    decoder: str
    mesh: str = ""  # as `parse_mesh` takes it; empty for one device
    topology: str = ""  # the chip's smallest if empty
    drafter: str = ""  # of `MODELS`, or none
    quant: str = "none"
    int8_kv: bool = False

    @property
    def devices(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return parse_mesh(self.mesh) if self.mesh else dict.fromkeys(MESH_AXES, 1)


def _abstract_model(name: str, case: Case, mesh: Mesh | None, device: Any) -> Model:
    """A model whose parameters are shapes on the mesh, or on the device."""
    config, placed = MODELS[name], SingleDeviceSharding(device)
    if mesh is not None:
        placed = param_shardings(config, mesh, quant=case.quant)
    params = param_shapes(config, jnp.bfloat16, placed, case.quant)
    kv_dtype = jnp.int8 if case.int8_kv else None
    return Model(params, config, None, name, kv_dtype, mesh, quant=case.quant)


def compile_loop(case: Case, settings: dict[str, Any]) -> tuple[Any, Any, list[Model]]:
    """The compiled loop of a decoder, the shapes of its state, and the models."""
    chip, sizes = CHIPS[case.chip], case.devices
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=case.topology or chip.topology
    )
    count = math.prod(sizes.values())
    if count > len(topology.devices):
        raise ValueError(f"{case.mesh} needs {count} devices; {topology} has fewer.")
    devices = np.array(topology.devices[:count])
    mesh = None
    if count > 1:
        auto = (AxisType.Auto,) * len(MESH_AXES)
        mesh = Mesh(devices.reshape(*sizes.values()), MESH_AXES, axis_types=auto)
    names = [name for name in (case.model, case.drafter) if name]
    models = [_abstract_model(name, case, mesh, devices[0]) for name in names]
    model, decoder = models[0], DECODERS[case.decoder]
    resolved = traced_settings(resolve_settings(decoder, model.config, settings))
    inputs = DecodeInputs(
        prompt=jax.ShapeDtypeStruct((case.batch, 64), jnp.int32),
        prompt_length=jax.ShapeDtypeStruct((case.batch,), jnp.int32),
        max_new_tokens=jax.ShapeDtypeStruct((case.batch,), jnp.int32),
        rng_key=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), case.batch)),
        stop_ids=jax.ShapeDtypeStruct((8,), jnp.int32),
    )

    def fns(params, whole=False):
        own, *other = (
            m.undivided_fns(p) if whole else m.fns(p)
            for m, p in zip(models, params, strict=True)
        )
        return own._replace(draft=other[0] if other else None)

    def start(params, settings, inputs, whole=False):
        return decoder.init(fns(params, whole), settings, inputs, case.context)

    def go_on(state, params, settings, pause):
        step = functools.partial(decoder.step, fns(params), settings)
        return loop.run(step, state, pause, 2 * case.context)

    def placed(tree, specs):
        if mesh is None:
            where = jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), tree)
        else:
            named = functools.partial(NamedSharding, mesh)
            is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
            where = jax.tree.map(named, specs, is_leaf=is_spec)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
        )

    params = tuple(m.params for m in models)
    flags = jax.tree.map(lambda _: P(), resolved)
    # The mesh tells `attend` for which device the program is.
    shown = mesh or Mesh(devices, "x", axis_types=(AxisType.Auto,))
    with jax.sharding.set_mesh(shown):
        args = (params, resolved, inputs)
        whole = jax.eval_shape(functools.partial(start, whole=True), *args)
        specs = batch_specs(whole)
        param_specs = mesh and tuple(m.specs for m in models)
        in_specs = (param_specs, P(), batch_specs(inputs))
        state = jax.eval_shape(model.jit(start, in_specs, specs), *args)
        pause = placed(jax.ShapeDtypeStruct((), jnp.bool_), P())
        program = model.jit(go_on, (specs, param_specs, P(), P()), specs, donate_argnums=0)
        lowered = program.lower(
            placed(state, specs), params, placed(resolved, flags), pause
        )
    return lowered.compile(compiler_options(devices[0].device_kind)), state, models


def ideal(model: Model, case: Case, tokens: int, cached: int) -> tuple[float, float]:
    """Bytes and seconds of a forward that moves weights and cache once, at full speed.

    Of one device, if the work is divided evenly.
    """
    config, chip, sizes = model.config, CHIPS[case.chip], case.devices
    batch, split = case.batch / sizes["data"], sizes["tensor"] * sizes["expert"]
    bytes_, products = weight_bytes(config, model.params, int(batch * tokens)), 0.0
    for path, info in leaf_paths(config).items():
        if path != "embed" or config.tied_head:
            chosen = config.moe.experts_per_token if "expert_" in path else 1
            of = config.moe.num_experts if "expert_" in path else 1
            products += float(np.prod(info.shape)) * chosen / of
    heads = config.num_layers * config.head_dim
    slots = batch * config.num_layers * max(config.num_kv_heads, sizes["tensor"]) * cached
    bytes_ += 2 * slots * (config.head_dim + 4 if case.int8_kv else 2 * config.head_dim)
    flops = 2 * batch * tokens * products
    flops += 4 * batch * tokens * heads * config.num_heads * (cached + tokens)
    bytes_, flops = bytes_ / split, flops / split
    return bytes_, max(bytes_ / chip.bandwidth, flops / chip.flops)


def measure(case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    chip, sizes = CHIPS[case.chip], case.devices
    started = time.perf_counter()
    compiled, state, models = compile_loop(case, settings)
    config = models[0].config
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    cached = 0 if state.cache is None else case.context
    batch, tensor = case.batch // sizes["data"], sizes["tensor"]
    kv_heads = max(config.num_kv_heads // tensor, 1)
    size = 1 if case.int8_kv else 2
    layer_bytes = batch * kv_heads * config.head_dim * case.context * size
    calls: list[int] = []  # tokens a row of each call of the kernel

    def experts(one: Instruction) -> Cost:
        """Matrices of the experts that any token chose, if each chooses evenly; rows."""
        ((rows, width),) = dimensions(one.shape)
        held = config.moe.num_experts // sizes["expert"]
        choices = rows / sizes["expert"]
        read = held * (1 - (1 - 1 / held) ** choices)
        depth = config.embed_dim
        if width == config.embed_dim:
            depth = config.moe.ffw_dim // tensor
        size = 2.0 if case.quant == "none" else 1.0
        moved = size * read * depth * width + 2.0 * rows * (depth + width)
        # A tile of rows is multiplied whole for every expert that it has rows of.
        flops = 2.0 * depth * width * (choices + read * min(rows, 128))
        at_best = max(moved / chip.bandwidth, flops / chip.flops)
        return Cost(moved, at_best + 2e-6)

    def kernel(one: Instruction) -> Cost | None:
        if one.name.startswith("grouped_product"):
            return experts(one)
        if not one.name.startswith("paired_attention"):
            return None
        ((_, own_kv_heads, rows, head_dim),) = dimensions(one.shape)
        # Whose call it is shows in its heads; a drafter's forward is never the dearest.
        heads = max(config.num_heads // tensor, 1)
        tokens = rows * own_kv_heads // heads
        calls.append(tokens)
        shape = (batch, tokens, heads, head_dim)
        cost = attention_cost(shape, own_kv_heads, cached, 2, size, quantised=case.int8_kv)
        at_best = max(cost.bytes_accessed / chip.bandwidth, cost.flops / chip.flops)
        return Cost(cost.bytes_accessed, at_best + 2e-6)

    def exchange(opcode: str, size: int, devices: int) -> float:
        """A ring in both directions of a torus axis, and a microsecond a hop."""
        share = (devices - 1) / devices * size / (2 * chip.link)
        passes = 2 if opcode == "all-reduce" else 1
        return passes * (share + 1e-6 * devices / 2)

    text = compiled.as_text()
    reader = Reader(text, chip.clock, chip.bandwidth, layer_bytes, kernel, exchange)
    forward = reader.loop()
    best_bytes, best_seconds = ideal(models[0], case, max(calls), cached)
    count = math.prod(sizes.values())
    row = {
        "model": case.model + (f" + {case.drafter}" if case.drafter else ""),
        "chip": f"{count} {case.chip}" if count > 1 else case.chip,
        "mesh": case.mesh,
        "batch": case.batch,
        "context": case.context,
        "decoder": case.decoder,
        "weights": "bfloat16" if case.quant == "none" else case.quant,
        "K/V": "int8" if case.int8_kv else "bfloat16",
        "tokens": max(calls),
        "cache GB": 2 * config.num_layers * layer_bytes / 1e9 if cached else 0.0,
        "args GB": memory.argument_size_in_bytes / 1e9,
        "temp GB": memory.temp_size_in_bytes / 1e9,
        "fits": "yes" if used < chip.memory else "no",
        "copies": forward.copies,
        "moved GB": forward.moved / 1e9,
        "moved/ideal": forward.moved / best_bytes,
        "estimate ms": 1e3 * forward.seconds,
        "roofline ms": 1e3 * best_seconds,
        "est/roof": forward.seconds / best_seconds,
    }
    if count > 1:
        row["collectives"] = forward.collectives
        row["network ms"] = 1e3 * forward.network
    for committed in (1, 2, 4):
        row[f"tok/s at {committed}"] = case.batch * committed / forward.seconds
    if count > 1:
        row["tok/s per chip at 2"] = 2 * case.batch / forward.seconds / count
    elapsed = time.perf_counter() - started
    print(f"{case}: {elapsed:.0f} s", file=sys.stderr)
    return row


def main() -> None:
    """Compiles what was asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument(
        "--chip", action="append", choices=CHIPS, help="default v5e v6e v5p"
    )
    parser.add_argument("--batch", action="append", type=int, help="default 1 8 32")
    parser.add_argument("--context", action="append", type=int, help="default 1024 8192")
    parser.add_argument("--decoder", choices=DECODERS, help="default: the model's own")
    parser.add_argument("--draft-model", default="", choices=MODELS, metavar="MODEL")
    parser.add_argument("--int8-kv", action="store_true", help="int8 keys and values")
    parser.add_argument("--quant", default="none", choices=QUANTS, help="of the weights")
    parser.add_argument("--mesh", action="append", help="as of dllm_jax.decode; repeatable")
    parser.add_argument("--topology", default="", help="such as v5e:4x4")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    args = parser.parse_args()
    pairs = (pair.partition("=") for pair in args.set)
    settings = {name: json.loads(value) for name, _, value in pairs}
    axes = itertools.product(
        args.model or MODELS,
        args.chip or ("v5e", "v6e", "v5p"),
        args.mesh or [""],
        args.batch or (1, 8, 32),
        args.context or (1024, 8192),
    )
    rows, failed = [], []
    for model, chip, mesh, batch, context in axes:
        case = Case(
            model=model,
            chip=chip,
            batch=batch,
            context=context,
            decoder=args.decoder or default_decoder(MODELS[model]),
            mesh=mesh,
            topology=args.topology,
            drafter=args.draft_model,
            quant=args.quant,
            int8_kv=args.int8_kv,
        )
        try:
            rows.append(measure(case, settings))
        except jax.errors.JaxRuntimeError as error:
            # It needs too much memory, or its text is too new for this jaxlib.
            failed.append((str(case), str(error).splitlines()[0][:200]))
    if rows:
        print(markdown_table(rows))
    for case, reason in failed:
        print(f"\n{case} gives no numbers: {reason}")
    where = machine()
    print("\ncompiled on " + ", ".join(f"{key} {value}" for key, value in where.items()))
    if args.json is not None:
        failures = [{"case": case, "reason": reason} for case, reason in failed]
        report = {"machine": where, "rows": rows, "failed": failures}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
