"""Compiles each kernel alone for every TPU generation; prints JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from tpu_aot import CHIPS  # first: it tells libtpu that there is no TPU

# isort: split
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from kernels_pallas import (
    BlockSizes,
    CachedKV,
    TokenFields,
    grouped_product,
    paired_attention,
)

# tokens, slots, key heads, group, head_dim, dtype, int8 cache
_CASES = (
    (4, 8192, 8, 4, 128, "bfloat16", False),
    (8, 8192, 4, 7, 128, "bfloat16", True),
    (300, 8192, 2, 2, 256, "bfloat16", False),
    (1, 8192, 32, 1, 128, "float32", False),
)


def _compile(device, tokens, slots, kv_heads, group, head_dim, dtype, quantised) -> float:
    """Temporaries of one case, two rows and four layers, as a share of its cache."""
    placed = SingleDeviceSharding(device)

    def array(*shape, of=dtype):
        return jax.ShapeDtypeStruct(shape, of, sharding=placed)

    cache = [array(4, 2, kv_heads, slots, head_dim, of="int8" if quantised else dtype)] * 2
    scales = [array(4, 2, kv_heads, slots, of="float32")] * 2 if quantised else []
    cached = CachedKV(*cache, array(2, 8, slots, of="int32"), array(2, of="int32"), *scales)
    fields = TokenFields(*[array(2, tokens, of="int32")] * 5)
    fresh = [array(2, kv_heads, tokens, head_dim)] * 2
    sizes = BlockSizes.for_device(device.device_kind)

    def attend(q, k, v, fields, cached, layer):
        return paired_attention(q, k, v, fields, cached, layer, block_sizes=sizes)

    q = array(2, tokens, kv_heads * group, head_dim)
    lowered = jax.jit(attend).lower(q, *fresh, fields, cached, array(of=jnp.int32))
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    return temporary / sum(x.size * x.dtype.itemsize for x in cache)


# rows, matrices, their depth and width, dtype, int8 matrices
_GROUPED_CASES = (
    (512, 256, 2048, 512, "bfloat16", False),
    (40, 256, 512, 2048, "bfloat16", True),
    (512, 64, 4096, 1536, "float32", True),
)


def _compile_grouped(device, rows, count, depth, width, dtype, quantised) -> float:
    """Temporaries of one case, three layers, as a share of its matrices."""
    placed = SingleDeviceSharding(device)

    def array(*shape, of=dtype):
        return jax.ShapeDtypeStruct(shape, of, sharding=placed)

    weight = array(3 * count, depth, width, of="int8" if quantised else dtype)
    scale = array(3 * count, width, of="float32") if quantised else None
    sizes, first = array(count, of="int32"), array(of="int32")
    lowered = jax.jit(grouped_product).lower(
        array(rows, depth), weight, scale, sizes, first
    )
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    return temporary / (weight.size * weight.dtype.itemsize)


def main() -> None:
    """Compiles every case for every chip."""
    report = {}
    for name, chip in CHIPS.items():
        topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
        device = topology.devices[0]
        report[name] = [_compile(device, *case) for case in _CASES]
        report[name] += [_compile_grouped(device, *case) for case in _GROUPED_CASES]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
