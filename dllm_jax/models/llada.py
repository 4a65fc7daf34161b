"""LLaDA 8B Base, Instruct and 1.5: a Llama-style encoder, bidirectional, plain MHA.

Facts: published configuration and model code (specs, LLaDA section 1). The leaf name
`ff_out` is both the MLP's down projection and, outside the blocks, the output head.
"""

from dllm_jax.config import Family

_FAST = {"decoder": "fast_dllm", "block_length": 32}
_KLASS = {"decoder": "klass", "block_length": 64, "max_new_tokens": 256}
_WINO = {"decoder": "wino", "block_length": 128, "max_new_tokens": 256}
_LEAP = {"decoder": "leap", "block_length": 32, "eta": 0.2, "tau": 0.7}

FAMILY = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
    config_keys={
        "vocab_size": ("embedding_size", "vocab_size"),
        "num_layers": ("n_layers",),
        "embed_dim": ("d_model",),
        "num_heads": ("n_heads",),
        "num_kv_heads": ("n_kv_heads",),
        "head_dim": ("head_dim",),
        "ffw_dim": ("mlp_hidden_size",),
        "rope_theta": ("rope_theta",),
        "norm_eps": ("rms_norm_eps",),
        "max_positions": ("max_sequence_length",),
        "tied_head": ("weight_tying",),
        "block_length": ("block_length",),
        "mask_id": ("mask_token_id",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "tied_head": False,
        "block_length": 32,
        "mask_id": 126336,
    },
    fixed={"attention": "bidirectional", "logit_alignment": "same"},
    supported={
        "activation_type": ("silu",),
        "alibi": (False,),
        "attention_layer_norm": (False,),
        "bias_for_layer_norm": (False, None),
        "block_type": ("llama",),
        "include_bias": (False,),
        "include_qkv_bias": (False, None),
        "input_emb_norm": (False,),
        "layer_norm_type": ("rms",),
        "rope": (True,),
        "scale_logits": (False,),
    },
    tensors={
        "embed": "model.transformer.wte.weight",
        "layers.attn_norm": "model.transformer.blocks.{layer}.attn_norm.weight",
        "layers.q": "model.transformer.blocks.{layer}.q_proj.weight",
        "layers.k": "model.transformer.blocks.{layer}.k_proj.weight",
        "layers.v": "model.transformer.blocks.{layer}.v_proj.weight",
        "layers.o": "model.transformer.blocks.{layer}.attn_out.weight",
        "layers.mlp_norm": "model.transformer.blocks.{layer}.ff_norm.weight",
        "layers.gate": "model.transformer.blocks.{layer}.ff_proj.weight",
        "layers.up": "model.transformer.blocks.{layer}.up_proj.weight",
        "layers.down": "model.transformer.blocks.{layer}.ff_out.weight",
        "final_norm": "model.transformer.ln_f.weight",
        "head": "model.transformer.ff_out.weight",
    },
    block_length_key="block_length",
    eos_token_ids=(126348,),
    presets={
        "llada-blocks": {
            "decoder": "masked",
            "remasking_strategy": "low_confidence",
            "block_length": 32,
        },
        # As evaluated: Instruct in one block, where end tokens would fill the answer.
        "llada-instruct": {
            "decoder": "masked",
            "remasking_strategy": "low_confidence",
            "confidence_eos_eot_inf": True,
        },
        "llada-threshold": {**_FAST, "cache": "none", "threshold": 0.9},
        "llada-prefix-cache": {**_FAST, "cache": "prefix", "threshold": 0.9},
        "llada-dual-cache": {**_FAST, "cache": "dual", "threshold": 0.9},
        "llada-factor": {**_FAST, "cache": "none", "factor": 1.0},
        "dparallel-llada": {**_FAST, "cache": "none", "entropy_threshold": 0.5},
        "klass-llada-gsm8k": {**_KLASS, "threshold": 0.6, "kl_threshold": 0.015},
        "klass-llada-math": {**_KLASS, "threshold": 0.6, "kl_threshold": 0.010},
        "klass-llada-humaneval": {**_KLASS, "threshold": 0.9, "kl_threshold": 0.010},
        "klass-llada-mbpp": {**_KLASS, "threshold": 0.7, "kl_threshold": 0.010},
        "wino-llada-gsm8k": {**_WINO, "threshold": 0.6},
        "wino-llada-math": {**_WINO, "threshold": 0.7},
        "wino-llada-mbpp": {**_WINO, "threshold": 0.8},
        "credit-llada": {"decoder": "credit", "block_length": 32},
        "leap-llada": _LEAP,
        "leap-dparallel-llada": {**_LEAP, "entropy_threshold": 0.5},
    },
)
