"""SDAR dense, 1.7B to 8B, every block size: the Qwen3 network with block-causal attention.

Facts: published configuration and model code (specs, SDAR section 1). Checkpoints on the
hub carry neither block size nor mask id; the block size is in the name's suffix, if any.
"""

from dllm_jax.config import Family

_DYNAMIC = {"decoder": "block", "remasking_strategy": "low_confidence_dynamic"}
# S2D2's table of configurations (specs, S2D2 section 6); drafts there are sampled at
# temperature 1 in the evaluations, and the most probable tokens in the demonstrations.
_S2D2 = {
    "decoder": "s2d2",
    "remasking_strategy": "low_confidence_dynamic",
    "threshold": 0.85,
    "cache_ver": True,
    "draft_ver": True,
    "token_acceptance_estimator": "soft_entropy_negexp",
    "do_verify_policy": "score_threshold",
    "do_verify_score_type": "difference_static",
    "do_verify_score_threshold": 0.0,
}

FAMILY = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    config_keys={
        "vocab_size": ("vocab_size",),
        "num_layers": ("num_hidden_layers",),
        "embed_dim": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "ffw_dim": ("intermediate_size",),
        "rope_theta": ("rope_theta",),
        "norm_eps": ("rms_norm_eps",),
        "max_positions": ("max_position_embeddings",),
        "tied_head": ("tie_word_embeddings",),
        "block_length": ("block_size",),
        "mask_id": ("mask_token_id",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": 128,
        "tied_head": False,
        "block_length": 4,
        "mask_id": 151669,
    },
    fixed={"qk_norm": True, "attention": "block_causal", "logit_alignment": "same"},
    supported={
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "use_sliding_window": (False,),
    },
    tensors={
        "embed": "model.embed_tokens.weight",
        "layers.attn_norm": "model.layers.{layer}.input_layernorm.weight",
        "layers.q": "model.layers.{layer}.self_attn.q_proj.weight",
        "layers.k": "model.layers.{layer}.self_attn.k_proj.weight",
        "layers.v": "model.layers.{layer}.self_attn.v_proj.weight",
        "layers.o": "model.layers.{layer}.self_attn.o_proj.weight",
        "layers.q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
        "layers.k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
        "layers.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "layers.up": "model.layers.{layer}.mlp.up_proj.weight",
        "layers.down": "model.layers.{layer}.mlp.down_proj.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    presets={
        "sdar-static": {
            "decoder": "block",
            "remasking_strategy": "low_confidence_static",
            "block_length": 4,
            "denoising_steps": 4,
        },
        "sdar-dynamic": {**_DYNAMIC, "block_length": 4, "threshold": 0.9},
        "sdar-dynamic-0.95": {**_DYNAMIC, "block_length": 4, "threshold": 0.95},
        "sdar-b32": {**_DYNAMIC, "block_length": 32, "threshold": 0.9},
        "sdar-s2d2-a": {**_S2D2, "block_length": 4, "score_penalty_coef": 1.0},
        "sdar-s2d2-b": {**_S2D2, "block_length": 16, "score_penalty_coef": 0.0},
    },
)
