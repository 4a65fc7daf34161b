"""Published models of 7B to 30B as shapes: tensors, bytes, and what each device holds.

Configs and tables are written down from the specs (LLaDA 1.1 and 1.2; Dream 4.1 and 4.2;
SDAR 1; SDAR MoE 2; Fast-dLLM v2 3; LLaDA2 4). No weights are allocated.
"""

import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from tiny import CONFIG, tiny_model

from dllm_jax.config import ModelConfig
from dllm_jax.hf import read_json, source_tensors
from dllm_jax.models import resolve_family
from dllm_jax.params import count_params, leaf_paths, param_shapes
from dllm_jax.sharding import LOGICAL_RULES, MESH_AXES, param_shardings, param_specs

LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
DREAM_7B = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
FAST_DLLM_V2_7B = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "attention_dropout": 0.0,
    "bd_size": 32,
    "bos_token_id": 151643,
    "conplemenrary_mask": True,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151645,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SDAR_8B = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SDAR_30B_A3B = {
    **SDAR_8B,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
LLADA2_MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_cache": False,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "vocab_size": 157184,
}

# --- tables of tensors: name -> published shape [out, in], and over what it is split ----

WHOLE, SPLIT, EXPERT = "whole", "tensor", "tensor and expert"


def _table(top: dict, layer: dict, layers: range) -> dict[str, tuple[tuple, str]]:
    return top | {
        name.format(layer=index): entry for index in layers for name, entry in layer.items()
    }


def _llada_8b():
    block = "model.transformer.blocks.{layer}."
    layer = {
        block + "attn_norm.weight": ((4096,), WHOLE),
        block + "ff_norm.weight": ((4096,), WHOLE),
        **{
            f"{block}{name}.weight": ((4096, 4096), SPLIT)
            for name in ("q_proj", "k_proj", "v_proj", "attn_out")
        },
        block + "ff_proj.weight": ((12288, 4096), SPLIT),
        block + "up_proj.weight": ((12288, 4096), SPLIT),
        block + "ff_out.weight": ((4096, 12288), SPLIT),
    }
    top = {
        "model.transformer.wte.weight": ((126464, 4096), SPLIT),
        "model.transformer.ln_f.weight": ((4096,), WHOLE),
        "model.transformer.ff_out.weight": ((126464, 4096), SPLIT),
    }
    return _table(top, layer, range(32))


def _qwen(vocab, width, queries, keys, layers, bias=False, qk_norm=False):
    """What Qwen's descendants share: all but the feed-forward network."""
    block = "model.layers.{layer}."
    layer = {
        block + "input_layernorm.weight": ((width,), WHOLE),
        block + "post_attention_layernorm.weight": ((width,), WHOLE),
        block + "self_attn.q_proj.weight": ((queries, width), SPLIT),
        block + "self_attn.k_proj.weight": ((keys, width), SPLIT),
        block + "self_attn.v_proj.weight": ((keys, width), SPLIT),
        block + "self_attn.o_proj.weight": ((width, queries), SPLIT),
    }
    if bias:
        layer |= {
            block + "self_attn.q_proj.bias": ((queries,), SPLIT),
            block + "self_attn.k_proj.bias": ((keys,), SPLIT),
            block + "self_attn.v_proj.bias": ((keys,), SPLIT),
        }
    if qk_norm:
        layer |= {
            block + "self_attn.q_norm.weight": ((128,), WHOLE),
            block + "self_attn.k_norm.weight": ((128,), WHOLE),
        }
    top = {
        "model.embed_tokens.weight": ((vocab, width), SPLIT),
        "model.norm.weight": ((width,), WHOLE),
        "lm_head.weight": ((vocab, width), SPLIT),
    }
    return _table(top, layer, range(layers))


def _network(prefix, width, inner, split=SPLIT):
    return {
        prefix + "gate_proj.weight": ((inner, width), split),
        prefix + "up_proj.weight": ((inner, width), split),
        prefix + "down_proj.weight": ((width, inner), split),
    }


def _qwen_7b():
    table = _qwen(152064, 3584, 3584, 512, 28, bias=True)
    return _table(table, _network("model.layers.{layer}.mlp.", 3584, 18944), range(28))


def _sdar_8b():
    table = _qwen(151936, 4096, 4096, 1024, 36, qk_norm=True)
    return _table(table, _network("model.layers.{layer}.mlp.", 4096, 12288), range(36))


def _sdar_30b_a3b():
    table = _qwen(151936, 2048, 4096, 512, 48, qk_norm=True)
    mlp = "model.layers.{layer}.mlp."
    layer = {mlp + "gate.weight": ((128, 2048), WHOLE)}
    for expert in range(128):
        layer |= _network(f"{mlp}experts.{expert}.", 2048, 768, EXPERT)
    return _table(table, layer, range(48))


def _llada2_mini():
    block = "model.layers.{layer}."
    layer = {
        block + "input_layernorm.weight": ((2048,), WHOLE),
        block + "post_attention_layernorm.weight": ((2048,), WHOLE),
        # 16 query heads, 4 key heads, 4 value heads.
        block + "attention.query_key_value.weight": (((16 + 4 + 4) * 128, 2048), SPLIT),
        block + "attention.dense.weight": ((2048, 2048), SPLIT),
        block + "attention.query_layernorm.weight": ((128,), WHOLE),
        block + "attention.key_layernorm.weight": ((128,), WHOLE),
    }
    top = {
        "model.word_embeddings.weight": ((157184, 2048), SPLIT),
        "model.norm.weight": ((2048,), WHOLE),
        "lm_head.weight": ((157184, 2048), SPLIT),
    }
    table = _table(top, layer, range(20)) | _network("model.layers.0.mlp.", 2048, 5120)
    mixture = {
        block + "mlp.gate.weight": ((256, 2048), WHOLE),
        block + "mlp.gate.expert_bias": ((256,), WHOLE),
        **_network(block + "mlp.shared_experts.", 2048, 512),
    }
    for expert in range(256):
        mixture |= _network(f"{block}mlp.experts.{expert}.", 2048, 512, EXPERT)
    return _table(table, mixture, range(1, 20))


# Name -> config.json, table, parameters, bytes in bfloat16.
MODELS = {
    # As the index file's total_size says (specs, LLaDA 1.2).
    "LLaDA-8B-Instruct": (LLADA_8B, _llada_8b, 8_015_581_184, 16_031_162_368),
    # Qwen2.5-7B with its biases; the sum of the table by hand:
    # 28 * (2 * 3584**2 + 3584 + 2 * (512 * 3584 + 512) + 3 * 18944 * 3584 + 2 * 3584)
    # + 2 * 152064 * 3584 + 3584.
    "Dream-v0-Base-7B": (DREAM_7B, _qwen_7b, 7_615_616_512, 15_231_233_024),
    "Fast_dLLM_v2_7B": (FAST_DLLM_V2_7B, _qwen_7b, 7_615_616_512, 15_231_233_024),
    # As the published files' size says (specs, SDAR 1).
    "SDAR-8B-Chat": (SDAR_8B, _sdar_8b, 8_190_735_360, 16_381_470_720),
    # By hand: 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 2 * 2048 + 2 * 128 + 128 * 2048
    # + 128 * 3 * 768 * 2048) + 2 * 151936 * 2048 + 2048, as of Qwen3-30B-A3B.
    "SDAR-30B-A3B-Chat": (SDAR_30B_A3B, _sdar_30b_a3b, 30_532_122_624, 61_064_245_248),
    # By hand: 20 * (3072 * 2048 + 2048**2 + 2 * 128 + 2 * 2048) + 3 * 5120 * 2048
    # + 19 * (256 * 2048 + 256 + 257 * 3 * 512 * 2048) + 2 * 157184 * 2048 + 2048.
    # The selection bias, 19 * 256 numbers, stays float32.
    "LLaDA2.0-mini": (LLADA2_MINI, _llada2_mini, 16_255_643_392, 32_511_296_512),
}


@functools.cache
def _config(name):
    hf = MODELS[name][0]
    return ModelConfig.from_hf(hf, resolve_family(hf), name=name)


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def _bytes(shapes):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _mesh(tensor=1, expert=1, data=1):
    return AbstractMesh((data, tensor, expert), MESH_AXES)


def _split_shapes(config, mesh):
    """What one device holds of each leaf in bfloat16."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(place.shard_shape(x.shape), x.dtype),
        param_shapes(config, jnp.bfloat16),
        param_shardings(config, mesh),
    )


def test_config_is_read_as_published(tmp_path, name):
    """From a file, with what the published ones leave out."""
    hf, *_ = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    stored = read_json(tmp_path / "config.json")
    family = resolve_family(stored)
    config = ModelConfig.from_hf(stored, family, name=name)
    assert config == _config(name)
    want = {
        "LLaDA-8B-Instruct": ("llada", "bidirectional", "same", 126336, 128),
        "Dream-v0-Base-7B": ("dream", "bidirectional", "shifted", 151666, 128),
        "Fast_dLLM_v2_7B": ("fast_dllm_v2", "block_causal", "shifted", 151665, 128),
        "SDAR-8B-Chat": ("sdar", "block_causal", "same", 151669, 128),
        "SDAR-30B-A3B-Chat": ("sdar_moe", "block_causal", "same", 151669, 128),
        "LLaDA2.0-mini": ("llada2", "block_causal", "same", 156895, 128),
    }[name]
    got = (config.attention, config.logit_alignment, config.mask_id, config.head_dim)
    assert (family.name, *got) == want


def test_tensors_and_sizes(name):
    """Published names and shapes, numbers of parameters and bytes."""
    hf, table, num_params, num_bytes = MODELS[name]
    config = _config(name)
    got = {n: s.shape for n, s in source_tensors(config, resolve_family(hf)).items()}
    want = {tensor: shape for tensor, (shape, _) in table().items()}
    assert sorted(set(got) ^ set(want)) == []
    assert got == want
    assert sum(map(math.prod, want.values())) == count_params(config) == num_params
    shapes = param_shapes(config, jnp.bfloat16)
    assert _bytes(shapes) == num_bytes
    assert [x.shape for x in jax.tree.leaves(shapes)] == [
        info.shape for info in leaf_paths(config).values()
    ]


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_bytes_of_a_device(name, tensor):
    """A device of data=1, tensor=.., expert=4 holds its share of every tensor."""
    _, table, _, _ = MODELS[name]
    config = _config(name)
    expert = 4 if config.moe else 1
    parts = {WHOLE: 1, SPLIT: tensor, EXPERT: tensor * expert}
    want = 0
    for tensor_name, (shape, split) in table().items():
        width = 4 if tensor_name.endswith("expert_bias") else 2
        assert math.prod(shape) % parts[split] == 0
        want += math.prod(shape) // parts[split] * width
    assert _bytes(_split_shapes(config, _mesh(tensor, expert))) == want


@pytest.mark.parametrize(
    ("model", "expert", "whole", "routed"),
    [
        # Parameters that every device has (norms, routers), and those of routed experts.
        ("LLaDA-8B-Instruct", 1, 65 * 4096, 0),
        ("Dream-v0-Base-7B", 1, 57 * 3584, 0),
        ("SDAR-8B-Chat", 1, 73 * 4096 + 36 * 2 * 128, 0),
        (
            "SDAR-30B-A3B-Chat",
            4,
            97 * 2048 + 48 * (2 * 128 + 128 * 2048),
            48 * 128 * 3 * 768 * 2048,
        ),
    ],
)
def test_bytes_of_a_device_by_hand(model, expert, whole, routed):
    """Four devices share what is split, and four times as many the experts."""
    total = MODELS[model][2]
    want = whole + (total - whole - routed) // 4 + routed // (4 * expert)
    assert _bytes(_split_shapes(_config(model), _mesh(4, expert))) == 2 * want
    # Rows of a batch are split over data; parameters are not.
    assert _bytes(_split_shapes(_config(model), _mesh(4, expert, data=8))) == 2 * want


def test_specs():
    specs = param_specs(_config("LLaDA2.0-mini"))
    assert specs.embed == PartitionSpec("tensor", None)
    assert specs.head == PartitionSpec(None, "tensor")
    assert specs.final_norm == PartitionSpec(None)
    layers = specs.layers
    assert layers.q == layers.k == layers.gate == PartitionSpec(None, None, "tensor")
    assert layers.o == layers.down == PartitionSpec(None, "tensor", None)
    assert layers.expert_up == PartitionSpec(None, "expert", None, "tensor")
    assert layers.expert_down == PartitionSpec(None, "expert", "tensor", None)
    assert layers.router == PartitionSpec(None, None, None)
    assert layers.q_bias is None and specs.dense_layers.router is None
    assert param_specs(_config("Dream-v0-Base-7B")).layers.k_bias == PartitionSpec(
        None, "tensor"
    )


def test_few_key_heads_are_replicated():
    """Eight key heads on 16 devices: every device has them all."""
    config = _config("SDAR-8B-Chat")
    shardings = param_shardings(config, _mesh(tensor=16))
    assert shardings.layers.q.shard_shape((36, 4096, 4096)) == (36, 4096, 256)
    for leaf in (shardings.layers.k, shardings.layers.v):
        assert leaf.shard_shape((36, 4096, 1024)) == (36, 4096, 1024)
    eight = param_shardings(config, _mesh(tensor=8))
    assert eight.layers.k.shard_shape((36, 4096, 1024)) == (36, 4096, 128)


def test_heads_are_not_cut():
    """3584 columns would divide by 8, but 28 heads do not."""
    words = (
        "dimension 2 of layers.q, 28 q_heads, cannot be split evenly over the mesh axis "
    )
    with pytest.raises(ValueError, match=words + "'tensor' of size 8"):
        param_shardings(_config("Dream-v0-Base-7B"), _mesh(tensor=8))


@pytest.mark.parametrize(
    ("model", "mesh", "words"),
    [
        (
            "LLaDA2.0-mini",
            _mesh(tensor=1, expert=3),
            "dimension 1 of layers.expert_gate, 256 experts, cannot be split evenly over "
            "the mesh axis 'expert' of size 3",
        ),
        (
            "SDAR-8B-Chat",
            _mesh(tensor=64),
            "dimension 2 of layers.q, 32 q_heads, cannot be split evenly",
        ),
        (
            "SDAR-30B-A3B-Chat",
            AbstractMesh((1, 4), ("data", "tensor")),
            "layers.expert_gate is to be split over the mesh axis 'expert'; the mesh has "
            "data, tensor",
        ),
    ],
    ids=["experts", "heads", "missing"],
)
def test_meshes_that_do_not_fit(model, mesh, words):
    with pytest.raises(ValueError, match=words):
        param_shardings(_config(model), mesh)


def test_rules_that_do_not_fit():
    config = _config("SDAR-8B-Chat")
    words = "embed has the axes 'vocab' and 'embed', which the rules put on one mesh axis "
    with pytest.raises(ValueError, match=words + "'tensor'"):
        param_specs(config, {**LOGICAL_RULES, "embed": "tensor"})
    with pytest.raises(ValueError, match="embed has the axis 'vocab', which the rules do"):
        param_specs(config, {"embed": None})
    specs = param_specs(config, {**LOGICAL_RULES, "embed": "data"})
    assert specs.layers.o == PartitionSpec(None, "tensor", "data")
    # Every axis that a parameter may have has a rule, on a mesh axis that exists.
    for name in MODELS:
        for info in leaf_paths(_config(name)).values():
            assert set(info.axes) - {None} <= set(LOGICAL_RULES)
    assert set(LOGICAL_RULES.values()) - {None} <= set(MESH_AXES)


def test_arrays_can_be_placed():
    """On a mesh of real devices, of which the tests have one."""
    params = tiny_model().params
    mesh = jax.make_mesh((1, 1, 1), MESH_AXES)
    shardings = param_shardings(CONFIG, mesh)
    placed = jax.device_put(params, shardings)
    assert placed.layers.q.sharding == NamedSharding(
        mesh, PartitionSpec(None, None, "tensor")
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), placed, params))
