"""LLaDA2.0 and 2.1, mini and flash: a block-causal mixture of experts.

One leading dense layer, a shared expert, sigmoid routing within the best groups, RoPE on
half of each head. Facts: specs, LLaDA2 section 4. End and mask ids are in no published
file; sliding_window is set but not applied by the published code.
"""

from dllm_jax.config import Family

_LAYER = "model.layers.{layer}"
_EXPERT = _LAYER + ".mlp.experts.{expert}"
_SHARED = _LAYER + ".mlp.shared_experts"

_ATTENTION = {
    "attn_norm": f"{_LAYER}.input_layernorm.weight",
    "q": f"{_LAYER}.attention.query_key_value.weight",
    "k": f"{_LAYER}.attention.query_key_value.weight",
    "v": f"{_LAYER}.attention.query_key_value.weight",
    "o": f"{_LAYER}.attention.dense.weight",
    "q_norm": f"{_LAYER}.attention.query_layernorm.weight",
    "k_norm": f"{_LAYER}.attention.key_layernorm.weight",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm.weight",
}
# S2D2's table of configurations (specs, S2D2 section 6). By these numbers the conservative
# one verifies every draft and the other few, whatever the published text says.
_S2D2 = {
    "decoder": "s2d2",
    "block_length": 32,
    "token_acceptance_estimator": "soft_entropy_negexp",
    "do_verify_policy": "score_threshold",
    "do_verify_score_type": "difference_static",
    "score_penalty_coef": 4.0,
}

FAMILY = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe", "llada21_moe", "llada2_moe_veomni"),
    config_keys={
        "vocab_size": ("vocab_size",),
        "num_layers": ("num_hidden_layers",),
        "embed_dim": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "ffw_dim": ("intermediate_size",),
        "rope_theta": ("rope_theta",),
        "rotary_fraction": ("partial_rotary_factor",),
        "norm_eps": ("rms_norm_eps",),
        "max_positions": ("max_position_embeddings",),
        "tied_head": ("tie_word_embeddings",),
        "dense_layers": ("first_k_dense_replace",),
        "block_length": ("block_length",),
        "mask_id": ("mask_token_id",),
    },
    moe_keys={
        "num_experts": ("num_experts",),
        "experts_per_token": ("num_experts_per_tok",),
        "ffw_dim": ("moe_intermediate_size",),
        "shared_experts": ("num_shared_experts",),
        "num_groups": ("n_group",),
        "groups_per_token": ("topk_group",),
        "scale": ("routed_scaling_factor",),
        "selection_bias": ("moe_router_enable_expert_bias",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "tied_head": False,
        "block_length": 32,
        "mask_id": 156895,
        "shared_experts": 0,
        "selection_bias": True,
        "scale": 1.0,
    },
    fixed={"qk_norm": True, "attention": "block_causal", "logit_alignment": "same"},
    moe_fixed={"scoring": "sigmoid", "normalise": True},
    supported={
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "score_function": ("sigmoid",),
        "use_bias": (False,),
        "use_qk_norm": (True,),
        "use_qkv_bias": (False,),
        "use_sliding_window": (False,),
    },
    tensors={
        "embed": "model.word_embeddings.weight",
        **{f"dense_layers.{leaf}": name for leaf, name in _ATTENTION.items()},
        "dense_layers.gate": f"{_LAYER}.mlp.gate_proj.weight",
        "dense_layers.up": f"{_LAYER}.mlp.up_proj.weight",
        "dense_layers.down": f"{_LAYER}.mlp.down_proj.weight",
        **{f"layers.{leaf}": name for leaf, name in _ATTENTION.items()},
        "layers.router": f"{_LAYER}.mlp.gate.weight",
        "layers.router_bias": f"{_LAYER}.mlp.gate.expert_bias",
        "layers.expert_gate": f"{_EXPERT}.gate_proj.weight",
        "layers.expert_up": f"{_EXPERT}.up_proj.weight",
        "layers.expert_down": f"{_EXPERT}.down_proj.weight",
        "layers.gate": f"{_SHARED}.gate_proj.weight",
        "layers.up": f"{_SHARED}.up_proj.weight",
        "layers.down": f"{_SHARED}.down_proj.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    block_length_key="block_length",
    eos_token_ids=(156892,),
    presets={
        "llada2.0": {
            "decoder": "block",
            "remasking_strategy": "low_confidence_dynamic",
            "block_length": 32,
            "denoising_steps": 32,
            "threshold": 0.95,
        },
        "llada2.1-quality": {
            "decoder": "edit",
            "block_length": 32,
            "threshold": 0.7,
            "editing_threshold": 0.5,
        },
        "llada2.1-speed": {
            "decoder": "edit",
            "block_length": 32,
            "threshold": 0.5,
            "editing_threshold": 0.0,
        },
        "llada2.1-dllm": {
            "decoder": "edit",
            "block_length": 32,
            "threshold": 0.95,
            "editing_threshold": 0.9,
        },
        "llada2.1-s2d2-conservative": {
            **_S2D2,
            "threshold": 0.95,
            "editing_threshold": 0.9,
            "do_verify_score_threshold": -5.0,
        },
        "llada2.1-s2d2-quality": {
            **_S2D2,
            "threshold": 0.7,
            "editing_threshold": 0.5,
            "do_verify_score_threshold": 0.0,
        },
    },
)
