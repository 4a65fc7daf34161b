"""Dream 7B Base and Instruct: the Qwen2.5 network, bidirectional, logits shifted.

Facts: specs, Dream section 4. generation_config.json has a null mask id, so config.json's
counts.
"""

import dataclasses

from dllm_jax.models import sdar

_QWEN = {
    leaf: name
    for leaf, name in sdar.FAMILY.tensors.items()
    if leaf not in ("layers.q_norm", "layers.k_norm")
}
_PROJECTION = "model.layers.{layer}.self_attn.%s_proj.bias"

_FAST = {"decoder": "fast_dllm", "block_length": 32}
_KLASS = {"decoder": "klass", "block_length": 0, "max_new_tokens": 256}
_LEAP = {"decoder": "leap", "block_length": 32, "eta": 0.2, "tau": 0.7}

FAMILY = dataclasses.replace(
    sdar.FAMILY,
    name="dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
    config_keys={**sdar.FAMILY.config_keys, "block_length": ("block_length",)},
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-6,
        "tied_head": False,
        "block_length": 32,
        "mask_id": 151666,
    },
    fixed={
        "attention": "bidirectional",
        "logit_alignment": "shifted",
        "qkv_bias": True,
    },
    supported={
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "use_sliding_window": (False,),
    },
    tensors={
        **_QWEN,
        "layers.q_bias": _PROJECTION % "q",
        "layers.k_bias": _PROJECTION % "k",
        "layers.v_bias": _PROJECTION % "v",
    },
    block_length_key="block_length",
    eos_token_ids=(151645,),
    presets={
        "dream-entropy": {
            "decoder": "masked",
            "remasking_strategy": "entropy",
            "denoising_steps": 256,
            "max_new_tokens": 256,
        },
        "dream-threshold": {**_FAST, "cache": "none", "threshold": 0.9},
        "dream-prefix-cache": {**_FAST, "cache": "prefix", "threshold": 0.9},
        "dream-dual-cache": {**_FAST, "cache": "dual", "threshold": 0.9},
        "dparallel-dream": {**_FAST, "cache": "none", "entropy_threshold": 0.45},
        "klass-dream-gsm8k": {**_KLASS, "threshold": 0.9, "kl_threshold": 0.001},
        "klass-dream-math": {**_KLASS, "threshold": 0.9, "kl_threshold": 0.005},
        "klass-dream-humaneval": {**_KLASS, "threshold": 0.8, "kl_threshold": 0.001},
        "leap-dream": _LEAP,
        "leap-dparallel-dream": {**_LEAP, "entropy_threshold": 0.45},
    },
)
