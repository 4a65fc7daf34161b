"""SDAR-30B-A3B: SDAR with a mixture of experts in every layer (Qwen3-MoE).

Facts: specs, SDAR MoE section 2.
"""

import dataclasses

from dllm_jax.models import sdar

_MLP = "model.layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"

FAMILY = dataclasses.replace(
    sdar.FAMILY,
    name="sdar_moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    moe_keys={
        "num_experts": ("num_experts",),
        "experts_per_token": ("num_experts_per_tok",),
        "ffw_dim": ("moe_intermediate_size",),
        "normalise": ("norm_topk_prob",),
    },
    defaults={**sdar.FAMILY.defaults, "normalise": True},
    moe_fixed={"scoring": "softmax"},
    supported={
        **sdar.FAMILY.supported,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    tensors={
        **{
            leaf: name
            for leaf, name in sdar.FAMILY.tensors.items()
            if leaf not in ("layers.gate", "layers.up", "layers.down")
        },
        "layers.router": f"{_MLP}.gate.weight",
        "layers.expert_gate": f"{_EXPERT}.gate_proj.weight",
        "layers.expert_up": f"{_EXPERT}.up_proj.weight",
        "layers.expert_down": f"{_EXPERT}.down_proj.weight",
    },
    presets={},
)
