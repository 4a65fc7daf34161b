"""Fast-dLLM v2 1.5B and 7B: the Qwen2.5 network, block-causal, logits shifted.

Facts: specs, Fast-dLLM v2 section 3. The mask id is in no published file.
"""

import dataclasses

from dllm_jax.models import dream

FAMILY = dataclasses.replace(
    dream.FAMILY,
    name="fast_dllm_v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    config_keys={**dream.FAMILY.config_keys, "block_length": ("bd_size",)},
    defaults={**dream.FAMILY.defaults, "mask_id": 151665},
    fixed={
        "attention": "block_causal",
        "logit_alignment": "shifted",
        "qkv_bias": True,
    },
    block_length_key="bd_size",
    presets={
        "fast-dllm-v2": {
            "decoder": "fast_dllm_v2",
            "block_length": 32,
            "small_block_size": 8,
            "threshold": 0.9,
        },
        "fast-dllm-v2-block-cache": {
            "decoder": "fast_dllm_v2",
            "block_length": 32,
            "small_block_size": 8,
            "threshold": 0.9,
            "use_block_cache": True,
        },
    },
)
