"""What the decode loop costs beyond its forwards.

    python benchmarks/loop_overhead.py [--json FILE] [--quick]

Wall time of a whole generation, compiled and warm, over the number of its forwards times
one bare jitted forward of the same shapes (transformer and logits of one block, against a
cache of the same size). Without folding, so that every forward has these shapes. Both are
measured in turn in the same run, and the median of their ratios is reported: the machine is
noisy, a ratio of neighbours less so.
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from common import finish, parse_args

import dllm_jax
from dllm_jax import layouts
from dllm_jax.cache import cache_slots
from dllm_jax.config import ModelConfig
from dllm_jax.model import Model
from dllm_jax.params import count_params, init_params
from dllm_jax.run import bucket


def random_100m() -> Model:
    """A random SDAR of 100M parameters."""
    config = ModelConfig(
        vocab_size=16384,
        num_layers=12,
        embed_dim=768,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        ffw_dim=2048,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=4096,
        qk_norm=True,
        block_length=8,
        mask_id=16383,
        eos_ids=(),
    )
    return Model(init_params(config, jax.random.key(0)), config, name="random-100m")


def _bare_forward(model: Model, length: int, slots: int):
    fns = model.fns(model.params)

    @jax.jit
    def forward(params, tokens, position, cache):
        bound = model.fns(params)
        fields = layouts.block_causal(position, length)
        out = bound.forward(tokens, fields, cache)
        return bound.logits(out.hidden), out.k, out.v

    cache = fns.init_cache(1, slots)
    # Half full: attention over the cache is masked, not shortened, on this path.
    cache = cache.replace(length=jnp.full((1,), slots // 2, jnp.int32))
    tokens = jnp.full((1, length), model.config.mask_id, jnp.int32)
    position = slots // 2 + jnp.arange(length, dtype=jnp.int32)[None]
    return lambda: forward(model.params, tokens, position, cache)


def measure(model: Model, new_tokens: int, repeats: int) -> dict[str, object]:
    """Ratios for one model."""
    length = model.config.block_length
    prompt = list(range(5, 5 + 2 * length))
    generate = functools.partial(
        dllm_jax.generate,
        model,
        [prompt],
        "block",
        max_new_tokens=new_tokens,
        remasking_strategy="low_confidence_static",
        stop_ids=(),
        fold=False,
    )
    forwards = generate()[0].stats.forwards["total"]
    slots = cache_slots(bucket(len(prompt) + new_tokens) + length)
    bare = _bare_forward(model, length, slots)
    jax.block_until_ready(bare())
    ratios, loops, singles = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(forwards):
            jax.block_until_ready(bare())
        single = (time.perf_counter() - started) / forwards
        started = time.perf_counter()
        generate()
        loop = time.perf_counter() - started
        ratios.append(loop / (forwards * single))
        loops.append(loop)
        singles.append(single)
        print(f"{model.name}: ratio {ratios[-1]:.3f}", file=sys.stderr)
    return {
        "model": model.name,
        "parameters": count_params(model.config),
        "forwards": forwards,
        "generation s": statistics.median(loops),
        "bare forward ms": 1e3 * statistics.median(singles),
        "ratio": statistics.median(ratios),
        "lowest ratio": min(ratios),
    }


def main() -> None:
    """Measures the demo model and a larger random one."""
    args = parse_args(__doc__.splitlines()[0])
    repeats = 2 if args.quick else 7
    rows = [measure(dllm_jax.load("demo"), 32 if args.quick else 128, repeats)]
    if not args.quick:
        rows.append(measure(random_100m(), 64, repeats))
    finish(args, rows)


if __name__ == "__main__":
    main()
