"""Fast-dLLM v2 1.5B and 7B: the Qwen2.5 network, block-causal, logits shifted.

Facts: specs, Fast-dLLM v2 section 3. The mask id is in no published file.
"""

import dataclasses

from dllm_jax.models import dream

# S2D2's table of configurations (specs, S2D2 section 6).
_S2D2 = {"decoder": "s2d2", "block_length": 32, "threshold": 0.9}
_HYSTERESIS = {
    **_S2D2,
    "token_acceptance_estimator": "soft_entropy_negexp",
    "do_verify_policy": "score_hysteresis",
    "hysteresis_threshold_on": 1.0,
    "hysteresis_threshold_off": -5.0,
    "do_verify_score_type": "difference_dynamic",
    "score_penalty_coef": 1.0,
}

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
        "fast-dllm-v2-s2d2-a": {**_HYSTERESIS, "small_block_size": 4},
        "fast-dllm-v2-s2d2-b": {**_HYSTERESIS, "small_block_size": 16},
        "fast-dllm-v2-s2d2-c": {
            **_S2D2,
            "small_block_size": 32,
            "do_verify_policy": "mask_span_length",
            "min_ssd_span_length": 8,
        },
    },
)
