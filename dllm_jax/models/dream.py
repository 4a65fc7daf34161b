"""Dream 7B Base and Instruct: the Qwen2.5 network, bidirectional, logits shifted.

Facts: specs, Dream section 4. generation_config.json has a null mask id, so config.json's
counts.
"""

from dllm_jax.config import Family

FAMILY = Family(
    name="dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
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
        "block_length": ("block_length",),
        "mask_id": ("mask_token_id",),
    },
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
        "embed": "model.embed_tokens.weight",
        "layers.attn_norm": "model.layers.{layer}.input_layernorm.weight",
        "layers.q": "model.layers.{layer}.self_attn.q_proj.weight",
        "layers.k": "model.layers.{layer}.self_attn.k_proj.weight",
        "layers.v": "model.layers.{layer}.self_attn.v_proj.weight",
        "layers.q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
        "layers.k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
        "layers.v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
        "layers.o": "model.layers.{layer}.self_attn.o_proj.weight",
        "layers.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "layers.up": "model.layers.{layer}.mlp.up_proj.weight",
        "layers.down": "model.layers.{layer}.mlp.down_proj.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    block_length_key="block_length",
    eos_token_ids=(151645,),
    presets={
        "dream-entropy": {"decoder": "masked", "remasking_strategy": "entropy"},
    },
)
