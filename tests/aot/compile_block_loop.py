"""Compiles whole decode loops for a v5e chip and prints what the compiler says, as JSON."""

import functools
import json
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dllm_jax.config import ModelConfig
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.decoding.base import DecodeInputs
from dllm_jax.model import model_fns
from dllm_jax.params import param_shapes
from dllm_jax.settings import resolve_settings, traced_settings

# Big enough that a cache does not fit VMEM, which would hide every copy.
CONFIG = ModelConfig(
    vocab_size=4096,
    num_layers=4,
    embed_dim=1024,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    ffw_dim=2048,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=32768,
    qk_norm=True,
    block_length=4,
    mask_id=4095,
    eos_ids=(4094,),
)
BATCH, CANVAS = 8, 8192


def compile_loop(name: str, device) -> dict:
    """Memory of one decoder's loop, and the copies of cache size in its program."""
    placed = SingleDeviceSharding(device)
    decoder = DECODERS[name]
    settings = traced_settings(resolve_settings(decoder, CONFIG, {}))

    def spec(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), tree
        )

    params = param_shapes(CONFIG, jnp.bfloat16, placed)
    inputs = DecodeInputs(
        jax.ShapeDtypeStruct((BATCH, 64), jnp.int32),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH)),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    state = jax.eval_shape(
        lambda p, i: decoder.init(model_fns(p, CONFIG), settings, i, CANVAS),
        params,
        inputs,
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def go_on(state, params, settings, pause):
        step = functools.partial(decoder.step, model_fns(params, CONFIG), settings)
        return loop.run(step, state, pause, 2 * CANVAS)

    pause = jax.ShapeDtypeStruct((), jnp.bool_, sharding=placed)
    lowered = go_on.lower(spec(state), params, spec(settings), pause)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    slots = state.cache.k.shape[3]
    cache_bytes = 2 * state.cache.k.size * state.cache.k.dtype.itemsize
    tail = f"{slots},{CONFIG.head_dim}]"
    moves = "(copy|copy-start|transpose)"
    pattern = re.compile(rf"= bf16\[[0-9,]*{re.escape(tail)}\S* {moves}\(")
    copies = [
        line.strip()[:160]
        for line in compiled.as_text().splitlines()
        if pattern.search(line)
    ]
    return {
        "cache_bytes": cache_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "cache_copies": copies,
    }


def main() -> None:
    """Compiles the loops and prints one line of JSON."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    names = ("ar", "block", "s2d2")
    report = {name: compile_loop(name, topology.devices[0]) for name in names}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
