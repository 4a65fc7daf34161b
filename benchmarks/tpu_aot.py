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

Method. The program's text is walked from the loop's body; an inner loop counts as often as
its condition says, a branch as its dearest side (a folded step that also stores a block).
Bytes are operands and results that lie in HBM, of a slice only what it cuts out. Time is
the compiler's own estimate of cycles over the clock; where it gives none (updates in
place, gathers), bytes over bandwidth. The attention kernel is opaque to XLA: its bytes and
time come from its own cost estimate at `context` cached tokens, plus 2 us a call.

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
import json
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
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from dllm_jax.compiler import compiler_options
from dllm_jax.config import ModelConfig, MoEConfig
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.decoding.base import DecodeInputs
from dllm_jax.model import model_fns
from dllm_jax.params import leaf_paths, param_shapes, weight_bytes
from dllm_jax.settings import default_decoder, resolve_settings, traced_settings
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


CHIPS = {
    "v4": Chip("v4:2x2x1", 17.2e9, 6.1e11, 1.38e14, 1.05e9),
    "v5e": Chip("v5e:2x2", 17.2e9, 8.2e11, 1.97e14, 1.5e9),
    "v5p": Chip("v5p:2x2x1", 103e9, 2.46e12, 4.59e14, 1.75e9),
    "v6e": Chip("v6e:2x2", 34.4e9, 1.64e12, 9.2e14, 1.75e9),
    "v7x": Chip("tpu7x:2x2x1", 103e9, 3.7e12, 1.155e15, 2.2e9),
}

_QWEN = {"num_kv_heads": 8, "head_dim": 128, "qk_norm": True, "block_length": 4}
_QWEN |= {"vocab_size": 151936, "mask_id": 151669, "rope_theta": 1e6, "norm_eps": 1e-6}
_BIDIRECTIONAL = {"attention": "bidirectional", "head_dim": 128, "norm_eps": 1e-6}


def _config(layers: int, embed: int, heads: int, ffw: int, **others: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        ffw_dim=ffw,
        max_positions=32768,
        **others,
    )


MODELS = {
    "sdar-1.7b": _config(28, 2048, 16, 6144, **_QWEN),
    "sdar-4b": _config(36, 2560, 32, 9728, **_QWEN),
    "sdar-8b": _config(36, 4096, 32, 12288, **_QWEN),
    "llada-8b": _config(
        *(32, 4096, 32, 12288),
        **_BIDIRECTIONAL,
        num_kv_heads=32,
        vocab_size=126464,
        mask_id=126336,
        rope_theta=5e5,
    ),
    "dream-7b": _config(
        *(28, 3584, 28, 18944),
        **_BIDIRECTIONAL,
        num_kv_heads=4,
        vocab_size=152064,
        mask_id=151666,
        rope_theta=1e6,
        qkv_bias=True,
        logit_alignment="shifted",
    ),
    "llada2-mini": _config(
        *(20, 2048, 16, 5120),
        num_kv_heads=4,
        head_dim=128,
        vocab_size=157184,
        mask_id=156895,
        rope_theta=6e5,
        norm_eps=1e-6,
        qk_norm=True,
        block_length=32,
        rotary_fraction=0.5,
        dense_layers=1,
        moe=MoEConfig(
            num_experts=256,
            experts_per_token=8,
            ffw_dim=512,
            shared_ffw_dim=512,
            scoring="sigmoid",
            scale=2.5,
            num_groups=8,
            groups_per_token=4,
            selection_bias=True,
        ),
    ),
}

# --- compiling --------------------------------------------------------------------------


def compile_loop(
    config: ModelConfig,
    decoder_name: str,
    settings: dict[str, Any],
    chip: Chip,
    batch: int,
    context: int,
    implementation: str = "auto",
    kv_dtype: Any = jnp.bfloat16,
) -> tuple[Any, Any]:
    """The compiled loop of a decoder, and the shapes of its state."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    device = topology.devices[0]
    placed = SingleDeviceSharding(device)
    decoder = DECODERS[decoder_name]
    resolved = traced_settings(resolve_settings(decoder, config, settings))

    def spec(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), tree
        )

    def fns(params):
        return model_fns(params, config, implementation, kv_dtype)

    params = param_shapes(config, jnp.bfloat16, placed)
    inputs = DecodeInputs(
        prompt=jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        prompt_length=jax.ShapeDtypeStruct((batch,), jnp.int32),
        max_new_tokens=jax.ShapeDtypeStruct((batch,), jnp.int32),
        rng_key=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
        stop_ids=jax.ShapeDtypeStruct((8,), jnp.int32),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def go_on(state, params, settings, pause):
        step = functools.partial(decoder.step, fns(params), settings)
        return loop.run(step, state, pause, 2 * context)

    # The mesh tells `attend` for which device the program is.
    with jax.sharding.set_mesh(Mesh(np.array([device]), "x", axis_types=(AxisType.Auto,))):
        state = jax.eval_shape(
            lambda p, i: decoder.init(fns(p), resolved, i, context), params, inputs
        )
        pause = jax.ShapeDtypeStruct((), jnp.bool_, sharding=placed)
        lowered = go_on.lower(spec(state), params, spec(resolved), pause)
    return lowered.compile(compiler_options(device.device_kind)), state


def ideal(
    config: ModelConfig, chip: Chip, batch: int, tokens: int, cached: int, int8: bool
) -> tuple[float, float]:
    """Bytes and seconds of a forward that moves weights and cache once, at full speed."""
    bytes_, products = weight_bytes(config, jnp.bfloat16, batch * tokens), 0.0
    for path, info in leaf_paths(config).items():
        if path != "embed" or config.tied_head:
            chosen = config.moe.experts_per_token if "expert_" in path else 1
            of = config.moe.num_experts if "expert_" in path else 1
            products += float(np.prod(info.shape)) * chosen / of
    heads = config.num_layers * config.head_dim
    slots = batch * config.num_layers * config.num_kv_heads * cached
    bytes_ += 2 * slots * (config.head_dim + 4 if int8 else 2 * config.head_dim)
    flops = 2 * batch * tokens * products
    flops += 4 * batch * tokens * heads * config.num_heads * (cached + tokens)
    return bytes_, max(bytes_ / chip.bandwidth, flops / chip.flops)


def measure(
    model: str,
    chip_name: str,
    batch: int,
    context: int,
    decoder: str,
    settings: dict[str, Any],
    int8: bool = False,
) -> dict[str, Any]:
    """One line of the table."""
    config, chip = MODELS[model], CHIPS[chip_name]
    started = time.perf_counter()
    kv_dtype = jnp.int8 if int8 else jnp.bfloat16
    compiled, state = compile_loop(
        config, decoder, settings, chip, batch, context, kv_dtype=kv_dtype
    )
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    cached = 0 if state.cache is None else context
    layer_bytes = batch * config.num_kv_heads * config.head_dim * context
    layer_bytes *= 1 if int8 else 2
    calls: list[int] = []  # tokens a row of each call of the kernel

    def kernel(one: Instruction) -> Cost | None:
        if not one.name.startswith("paired_attention"):
            return None
        ((_, kv_heads, rows, _),) = dimensions(one.shape)
        tokens = rows * kv_heads // config.num_heads
        calls.append(tokens)
        shape = (batch, tokens, config.num_heads, config.head_dim)
        size = 1 if int8 else 2
        cost = attention_cost(shape, kv_heads, cached, 2, size, quantised=int8)
        at_best = max(cost.bytes_accessed / chip.bandwidth, cost.flops / chip.flops)
        return Cost(cost.bytes_accessed, at_best + 2e-6)

    text = compiled.as_text()
    forward = Reader(text, chip.clock, chip.bandwidth, layer_bytes, kernel).loop()
    best_bytes, best_seconds = ideal(config, chip, batch, max(calls), cached, int8)
    row = {
        "model": model,
        "chip": chip_name,
        "batch": batch,
        "context": context,
        "decoder": decoder,
        "K/V": "int8" if int8 else "bfloat16",
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
    for count in (1, 2, 4):
        row[f"tok/s at {count}"] = batch * count / forward.seconds
    elapsed = time.perf_counter() - started
    print(f"{model} {chip_name} {batch} {context}: {elapsed:.0f} s", file=sys.stderr)
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
    parser.add_argument("--int8-kv", action="store_true", help="int8 keys and values")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    args = parser.parse_args()
    pairs = (pair.partition("=") for pair in args.set)
    settings = {name: json.loads(value) for name, _, value in pairs}
    rows, failed = [], []
    for model in args.model or MODELS:
        decoder = args.decoder or default_decoder(MODELS[model])
        for chip in args.chip or ("v5e", "v6e", "v5p"):
            for batch in args.batch or (1, 8, 32):
                for context in args.context or (1024, 8192):
                    case = (model, chip, batch, context, decoder)
                    try:
                        rows.append(measure(*case, settings, args.int8_kv))
                    except jax.errors.JaxRuntimeError as error:
                        # It needs too much memory, or its text is too new for this jaxlib.
                        failed.append((case, str(error).splitlines()[0][:200]))
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
