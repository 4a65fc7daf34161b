"""What published models need of memory, by arithmetic on their shapes: estimates."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.config import ModelConfig, MoEConfig
from dllm_jax.params import count_params, param_shapes

CONTEXT = 4096
"""Tokens, prompt and answer together, whose keys and values are counted."""


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
    "SDAR-1.7B": _config(28, 2048, 16, 6144, **_QWEN),
    "SDAR-4B": _config(36, 2560, 32, 9728, **_QWEN),
    "SDAR-8B": _config(36, 4096, 32, 12288, **_QWEN),
    "LLaDA-8B": _config(
        *(32, 4096, 32, 12288),
        **_BIDIRECTIONAL,
        num_kv_heads=32,
        vocab_size=126464,
        mask_id=126336,
        rope_theta=5e5,
    ),
    "Dream-7B": _config(
        *(28, 3584, 28, 18944),
        **_BIDIRECTIONAL,
        num_kv_heads=4,
        vocab_size=152064,
        mask_id=151666,
        rope_theta=1e6,
        qkv_bias=True,
        logit_alignment="shifted",
    ),
    "LLaDA2-mini": _config(
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
# A 100B-class mixture: 102.9 billion parameters, 6.1 active, as published; the widths are
# those that give these numbers.
MODELS["LLaDA2-flash"] = dataclasses.replace(
    MODELS["LLaDA2-mini"],
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    ffw_dim=9216,
    moe=dataclasses.replace(MODELS["LLaDA2-mini"].moe, ffw_dim=1024, shared_ffw_dim=1024),
)


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
