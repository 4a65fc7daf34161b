"""What published models need of memory, by arithmetic on their shapes: estimates."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dllm_jax.config import ModelConfig, MoEConfig
from dllm_jax.params import count_params, param_shapes

CONTEXT = 4096
"""Tokens, prompt and answer together, whose keys and values are counted."""


def _sdar(layers: int, embed: int, heads: int, ffw: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffw_dim=ffw,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=32768,
        qk_norm=True,
        mask_id=151669,
    )


def _bidirectional(layers: int, embed: int, heads: int, **sizes: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        embed_dim=embed,
        num_heads=heads,
        head_dim=128,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_positions=CONTEXT,
        attention="bidirectional",
        **sizes,
    )


_DREAM = _bidirectional(
    28, 3584, 28, num_kv_heads=4, ffw_dim=18944, vocab_size=152064, mask_id=151666
)
_LLADA2_MINI = dataclasses.replace(
    _sdar(layers=20, embed=2048, heads=16, ffw=5120),
    vocab_size=157184,
    num_kv_heads=4,
    mask_id=156895,
    dense_layers=1,
    moe=MoEConfig(256, 8, 512, shared_ffw_dim=512, selection_bias=True),
)

MODELS: dict[str, ModelConfig] = {
    "SDAR-1.7B": _sdar(layers=28, embed=2048, heads=16, ffw=6144),
    "SDAR-4B": _sdar(layers=36, embed=2560, heads=32, ffw=9728),
    "SDAR-8B": _sdar(layers=36, embed=4096, heads=32, ffw=12288),
    "LLaDA-8B": _bidirectional(
        32, 4096, 32, num_kv_heads=32, ffw_dim=12288, vocab_size=126464, mask_id=126336
    ),
    "Dream-7B": dataclasses.replace(_DREAM, qkv_bias=True),
    "LLaDA2-mini": _LLADA2_MINI,
}
"""Shapes alone, of the published config.json files; not configs to decode with."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Bytes of a model."""

    name: str
    params: int
    bfloat16: int  # weights
    int8: int  # weights, with `quant="int8"`
    cache: int  # bfloat16 keys and values of one prompt of CONTEXT tokens


def model_sizes() -> list[ModelSize]:
    """The sizes of `MODELS`."""
    return [
        ModelSize(
            name=name,
            params=count_params(config),
            bfloat16=_weights(config, "none"),
            int8=_weights(config, "int8"),
            cache=_cache(config),
        )
        for name, config in MODELS.items()
    ]


def _weights(config: ModelConfig, quant: str) -> int:
    leaves = jax.tree.leaves(param_shapes(config, jnp.bfloat16, quant=quant))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _cache(config: ModelConfig) -> int:
    if config.attention == "bidirectional":
        return 0  # the exact decoders of these models keep nothing
    heads = config.num_kv_heads * config.head_dim
    return CONTEXT * 2 * config.num_layers * heads * 2
