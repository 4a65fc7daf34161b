"""The families' data: config keys, names of tensors, special ids, published sizes."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dllm_jax.checkpoint import read_hf_params
from dllm_jax.config import ModelConfig
from dllm_jax.hf import (
    CheckpointError,
    HFCheckpoint,
    count_bytes,
    export_hf,
    hf_config,
    source_tensors,
)
from dllm_jax.models import FAMILIES, resolve_family
from dllm_jax.params import (
    LayerParams,
    Params,
    count_params,
    leaf_paths,
    params_from_leaves,
)

GOLDEN = Path(__file__).parent / "golden"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WITH_GOLDEN = [name for name in FAMILIES if (GOLDEN / name).is_dir()]

# --- configs and tables as published, written down from the specs ---------------------

SDAR_8B = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "bos_token_id": 151643,
    "debug": False,
    "eos_token_id": 151643,
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "micro_forward": False,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "skip_checkpoint": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_deepep": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SDAR_4B = {
    **SDAR_8B,
    "hidden_size": 2560,
    "intermediate_size": 9728,
}
SDAR_1_7B = {
    **SDAR_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
}
SDAR_GENERATION = {
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
LLADA_8B = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}


def _sdar_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    out = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config["vocab_size"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        out |= {
            prefix + "input_layernorm.weight": (width,),
            prefix + "post_attention_layernorm.weight": (width,),
            prefix + "self_attn.q_proj.weight": (queries, width),
            prefix + "self_attn.k_proj.weight": (keys, width),
            prefix + "self_attn.v_proj.weight": (keys, width),
            prefix + "self_attn.o_proj.weight": (width, queries),
            prefix + "self_attn.q_norm.weight": (config["head_dim"],),
            prefix + "self_attn.k_norm.weight": (config["head_dim"],),
            prefix + "mlp.gate_proj.weight": (inner, width),
            prefix + "mlp.up_proj.weight": (inner, width),
            prefix + "mlp.down_proj.weight": (width, inner),
        }
    return out


def _llada_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    width, inner = config["d_model"], config["mlp_hidden_size"]
    keys = config["n_kv_heads"] * (width // config["n_heads"])
    out = {
        "model.transformer.wte.weight": (config["embedding_size"], width),
        "model.transformer.ln_f.weight": (width,),
        "model.transformer.ff_out.weight": (config["embedding_size"], width),
    }
    for layer in range(config["n_layers"]):
        prefix = f"model.transformer.blocks.{layer}."
        out |= {
            prefix + "attn_norm.weight": (width,),
            prefix + "q_proj.weight": (width, width),
            prefix + "k_proj.weight": (keys, width),
            prefix + "v_proj.weight": (keys, width),
            prefix + "attn_out.weight": (width, width),
            prefix + "ff_norm.weight": (width,),
            prefix + "ff_proj.weight": (inner, width),
            prefix + "up_proj.weight": (inner, width),
            prefix + "ff_out.weight": (width, inner),
        }
    return out


# Name -> config, the spec's table of tensors, parameters, bytes of all tensors.
#
# The published byte counts are the `total_size` of the index, or the size of the weights
# as far as it was known: two bytes (bfloat16) a parameter and nothing else. Files on disk
# are some kilobytes larger, by the header of each shard.
PUBLISHED = {
    "SDAR-8B-Chat": (SDAR_8B, _sdar_tensors, 8_190_735_360, 16_381_470_720),
    "SDAR-4B-Chat": (SDAR_4B, _sdar_tensors, 4_411_424_256, 8_822_848_512),
    # Published as "4.06 GB", which is how it is known that the head is not tied.
    "SDAR-1.7B-Chat": (SDAR_1_7B, _sdar_tensors, 2_031_739_904, 4_063_479_808),
    "LLaDA-8B-Instruct": (LLADA_8B, _llada_tensors, 8_015_581_184, 16_031_162_368),
}


@pytest.fixture(params=PUBLISHED)
def published(request):
    hf, tensors, num_params, num_bytes = PUBLISHED[request.param]
    family = resolve_family(hf)
    config = ModelConfig.from_hf(hf, family, name=request.param)
    return hf, family, config, tensors, num_params, num_bytes


def golden_config(name: str) -> tuple[dict, ModelConfig]:
    hf = json.loads((GOLDEN / name / "config.json").read_text())
    hf.setdefault("mask_token_id", 253)  # some publish it nowhere; it must be in 256 words
    return hf, ModelConfig.from_hf(hf, FAMILIES[name])


def leaf(params: Params, path: str):
    for name in path.split("."):
        params = getattr(params, name)
    return params


def random_params(config: ModelConfig) -> Params:
    rng = np.random.default_rng(0)
    leaves = {
        path: rng.normal(size=info.shape).astype(np.float32)
        for path, info in leaf_paths(config).items()
    }
    return params_from_leaves(config, leaves)


# --- published sizes ------------------------------------------------------------------


def test_published_size(published):
    _, _, config, _, num_params, num_bytes = published
    assert count_params(config) == num_params
    assert count_bytes(config, BFLOAT16) == num_bytes
    assert count_bytes(config, np.float16) == num_bytes
    assert count_bytes(config, np.float32) == 2 * num_bytes


def test_published_tensors(published):
    """Names and shapes of real checkpoints, against a table written from the specs."""
    hf, family, config, tensors, num_params, _ = published
    got = {name: source.shape for name, source in source_tensors(config, family).items()}
    want = tensors(hf)
    assert sorted(set(got) ^ set(want)) == []
    assert got == want
    assert sum(int(np.prod(shape)) for shape in want.values()) == num_params


@pytest.mark.parametrize("hf", [SDAR_8B, SDAR_4B, SDAR_1_7B], ids=["8B", "4B", "1.7B"])
def test_published_config_of_sdar(hf):
    family = resolve_family(hf)
    config = ModelConfig.from_hf(hf, family, SDAR_GENERATION, name="SDAR-Chat")
    assert family.name == "sdar"
    assert config.qk_norm and not config.tied_head
    assert (config.attention, config.logit_alignment) == ("block_causal", "same")
    assert (config.rope_theta, config.norm_eps) == (1e6, 1e-6)
    assert (config.num_kv_heads, config.head_dim) == (8, 128)
    assert (config.max_positions, config.vocab_size) == (32768, 151936)
    # Neither mask id nor block size is in the published config.json.
    assert (config.mask_id, config.block_length) == (151669, 4)
    assert set(config.eos_ids) == {151643, 151645}
    assert (config.pad_id, config.bos_id) == (151643, 151643)


def test_published_config_of_llada():
    config = ModelConfig.from_hf(LLADA_8B, resolve_family(LLADA_8B))
    assert not config.qk_norm and not config.tied_head
    assert (config.attention, config.logit_alignment) == ("bidirectional", "same")
    assert (config.rope_theta, config.norm_eps) == (5e5, 1e-5)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 128)
    assert config.ffw_dim == 12288  # mlp_ratio is ignored
    assert config.mask_id == 126336
    assert set(config.eos_ids) == {126081, 126348}  # the second is <|eot_id|>
    assert config.pad_id == 126081


@pytest.mark.parametrize(
    ("changes", "field", "want"),
    [
        ({"n_kv_heads": None}, "num_kv_heads", 32),
        ({"n_kv_heads": 8}, "num_kv_heads", 8),
        ({"embedding_size": None}, "vocab_size", 126464),
        ({"embedding_size": 126720}, "vocab_size", 126720),
        ({"vocab_size": 126464, "embedding_size": 126500}, "vocab_size", 126500),
        ({"mlp_ratio": 8}, "ffw_dim", 12288),
        ({"train_max_sequence_length": 8192}, "max_positions", 4096),
        ({"weight_tying": True}, "tied_head", True),
    ],
    ids=str,
)
def test_keys_of_llada(changes, field, want):
    hf = {**LLADA_8B, **changes}
    assert getattr(ModelConfig.from_hf(hf, FAMILIES["llada"]), field) == want


def test_json_values_win_over_defaults():
    """Classes of the published code have other defaults than the published files."""
    hf = {**SDAR_8B, "head_dim": 64, "rope_theta": 10000, "mask_token_id": 7}
    config = ModelConfig.from_hf(hf, FAMILIES["sdar"])
    assert (config.head_dim, config.rope_theta, config.mask_id) == (64, 1e4, 7)
    assert isinstance(config.rope_theta, float)


# --- block length and special ids -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "block_size", "want"),
    [
        ("SDAR-1.7B-Chat", None, 4),
        ("SDAR-1.7B-Chat-b8", None, 8),
        ("SDAR-1.7B-Chat-b16", None, 16),
        ("JetLM/SDAR-1.7B-Chat-b64", None, 64),
        ("models/SDAR-1.7B-Chat-b32/", None, 32),
        ("SDAR-1.7B-Chat-b16", 8, 8),
        ("SDAR-1.7B-Chat", 32, 32),
        ("SDAR-1.7B-Chat-b16-v2", None, 4),
        ("SDAR-b0", None, 4),
        ("SDAR-b", None, 4),
        ("", None, 4),
        ("500", None, 4),
        ("checkpoints/20000", None, 4),
        ("sdar-b16/500", None, 4),
    ],
)
def test_block_length(name, block_size, want):
    """config.json, else the name's suffix, else 4; a bare number is no suffix."""
    hf = dict(SDAR_8B) if block_size is None else {**SDAR_8B, "block_size": block_size}
    assert ModelConfig.from_hf(hf, FAMILIES["sdar"], name=name).block_length == want


def _write_golden(directory: Path, **changes) -> Path:
    """The golden SDAR with another config; None deletes a key."""
    config = json.loads((GOLDEN / "sdar" / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").symlink_to(GOLDEN / "sdar" / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("name", "changes", "want"),
    [
        ("SDAR-1.7B-Chat-b16", {}, 16),
        ("SDAR-1.7B-Chat", {"_name_or_path": "JetLM/SDAR-1.7B-Chat-b8"}, 8),
        ("SDAR-1.7B-Chat-b16", {"_name_or_path": "/data/run3/step-500"}, 16),
        ("SDAR-1.7B-Chat-b16", {"_name_or_path": ""}, 16),
        ("1000", {}, 4),
    ],
)
def test_block_length_of_a_directory(tmp_path, name, changes, want):
    directory = _write_golden(tmp_path / name, block_size=None, **changes)
    assert HFCheckpoint(directory).config.block_length == want


@pytest.mark.parametrize(
    ("in_config", "in_generation", "in_tokenizer", "want"),
    [
        (62, [61, 62], 61, {61, 62}),
        (62, None, None, {62}),
        (None, 61, None, {61}),
        (None, None, 60, {60}),
        ([60, 61], 62, 63, {60, 61, 62, 63}),
        (None, [], None, set()),
        (0, None, None, {0}),
    ],
)
def test_eos_ids_are_the_union(in_config, in_generation, in_tokenizer, want):
    hf = {**SDAR_8B, "eos_token_id": in_config}
    generation = {} if in_generation is None else {"eos_token_id": in_generation}
    tokenizer = {} if in_tokenizer is None else {"eos_id": in_tokenizer}
    config = ModelConfig.from_hf(hf, FAMILIES["sdar"], generation, tokenizer)
    assert set(config.eos_ids) == want
    assert len(config.eos_ids) == len(want)


def test_family_stop_ids_only_where_they_exist():
    assert FAMILIES["llada"].eos_token_ids == (126348,)
    assert golden_config("llada")[1].eos_ids == (240,)


def test_pad_and_bos_may_come_from_any_file():
    hf = {**SDAR_8B, "bos_token_id": None}
    family = FAMILIES["sdar"]
    assert ModelConfig.from_hf(hf, family).pad_id is None
    assert ModelConfig.from_hf(hf, family, {"pad_token_id": 5}).pad_id == 5
    assert ModelConfig.from_hf(hf, family, {}, {"pad_id": 6}).pad_id == 6
    assert ModelConfig.from_hf(hf, family, {}, {"bos_id": 0}).bos_id == 0
    # config.json first, then generation_config.json, then the tokenizer
    hf["pad_token_id"] = 7
    config = ModelConfig.from_hf(hf, family, {"pad_token_id": 5}, {"pad_id": 6})
    assert config.pad_id == 7


@pytest.mark.parametrize(
    ("changes", "generation", "tokenizer", "message"),
    [
        ({"pad_token_id": 151669}, {}, {}, "mask_id=151669"),
        ({}, {"pad_token_id": 151669}, {}, "mask_id=151669"),
        ({}, {}, {"pad_id": 151669}, "mask_id=151669"),
        ({"eos_token_id": 151669}, {}, {}, "mask_id=151669"),
        ({}, {"eos_token_id": [151645, 151669]}, {}, "mask_id=151669"),
        ({}, {}, {"eos_id": 151669}, "mask_id=151669"),
        ({}, {}, {"mask_id": 151665}, r"151669 .* 151665 by the tokenizer"),
        ({"mask_token_id": 5}, {}, {"mask_id": 151669}, r"5 .* 151669 by the tokenizer"),
        ({"mask_token_id": 151936}, {}, {}, "mask_id=151936 is outside .* 151936"),
        ({"vocab_size": 1000}, {}, {}, "outside the vocabulary of 1000"),
        ({"eos_token_id": -1}, {}, {}, "outside the vocabulary"),
    ],
)
def test_wrong_ids(changes, generation, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**SDAR_8B, **changes}, FAMILIES["sdar"], generation, tokenizer)


def test_tokenizer_may_agree_on_the_mask():
    config = ModelConfig.from_hf(SDAR_8B, FAMILIES["sdar"], {}, {"mask_id": 151669})
    assert config.mask_id == 151669


# --- families -------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_found_by_its_names(name):
    family = FAMILIES[name]
    assert family.name == name
    for architecture in family.architectures:
        assert resolve_family({"architectures": [architecture]}) is family
    for model_type in family.model_types:
        for silent in ({}, {"architectures": None}, {"architectures": []}):
            assert resolve_family({"model_type": model_type, **silent}) is family


@pytest.mark.parametrize(
    "hf",
    [
        {},
        {"architectures": ["Foo"]},
        {"architectures": ["Foo"], "model_type": "sdar"},
        {"architectures": [], "model_type": "foo"},
        {"model_type": None},
    ],
    ids=str,
)
def test_unknown_family(hf):
    with pytest.raises(ValueError, match="architectures") as error:
        resolve_family(hf)
    for family in FAMILIES.values():
        assert family.architectures[0] in str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_a_family_are_its_own(name):
    others = [family for other, family in FAMILIES.items() if other != name]
    for family in others:
        assert not set(family.architectures) & set(FAMILIES[name].architectures)
        assert not set(family.model_types) & set(FAMILIES[name].model_types)


@pytest.mark.parametrize("name", FAMILIES)
def test_tables_use_fields_that_exist(name):
    """A misspelt field would only show with the first checkpoint that needs it."""
    family = FAMILIES[name]
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    ours = {*family.config_keys, *family.fixed}
    assert ours <= fields
    assert not set(family.config_keys) & set(family.fixed)
    known = ours | set(getattr(family, "moe_keys", ()))
    assert set(family.defaults) <= known
    required = {
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.default is dataclasses.MISSING
    }
    assert required <= ours
    assert family.block_length_key in family.config_keys["block_length"]
    stacks = {f.name for f in dataclasses.fields(Params) if f.name.endswith("layers")}
    whole = {f.name for f in dataclasses.fields(Params)} - stacks
    inner = {f"{s}.{f.name}" for s in stacks for f in dataclasses.fields(LayerParams)}
    assert set(family.tensors) <= whole | inner
    for path, pattern in family.tensors.items():
        assert ("{layer}" in pattern) == (path in inner), path


@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_table_equals_a_real_file(name):
    """Both directions: names and shapes that the published code itself has written."""
    _, config = golden_config(name)
    sources = source_tensors(config, FAMILIES[name])
    with safe_open(GOLDEN / name / "model.safetensors", framework="numpy") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert {key: source.shape for key, source in sources.items()} == stored


@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_every_number_is_read_once(name):
    """The leaves hold as many numbers as the file, and each leaf has a name."""
    _, config = golden_config(name)
    family = FAMILIES[name]
    assert set(leaf_paths(config)) <= set(family.tensors)
    stored = load_file(GOLDEN / name / "model.safetensors")
    assert count_params(config) == sum(tensor.size for tensor in stored.values())


@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_every_number_arrives(name, tmp_path):
    """Numbers that name their tensor and place come out where they belong."""
    hf, config = golden_config(name)
    sources = source_tensors(config, FAMILIES[name])
    first, tensors = 0, {}
    for key, source in sources.items():
        size = int(np.prod(source.shape))
        tensors[key] = np.arange(first, first + size, dtype=np.float32)
        tensors[key] = tensors[key].reshape(source.shape)
        first += size
    assert first < 2**24  # exact in float32
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = HFCheckpoint(tmp_path, name)
    arrived = [
        checkpoint.read_leaf(path, np.dtype(np.float32)).reshape(-1)
        for path in leaf_paths(config)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(arrived)), np.arange(first))


@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_config_there_and_back(name):
    _, config = golden_config(name)
    family = FAMILIES[name]
    hf = json.loads(json.dumps(hf_config(config, family)))
    assert resolve_family(hf) is family
    assert ModelConfig.from_hf(hf, family) == config
    # its own form, as the sidecar stores it
    values = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(values) == config
    assert hash(ModelConfig.from_dict(values)) == hash(config)


def test_published_config_there_and_back(published):
    _, family, config, _, _, _ = published
    hf = json.loads(json.dumps(hf_config(config, family)))
    assert ModelConfig.from_hf(hf, family) == config
    # The block length is written down: a directory's suffix does not change it.
    assert ModelConfig.from_hf(hf, family, name="x-b64") == config


def test_unknown_key_of_our_config():
    _, config = golden_config("sdar")
    with pytest.raises(ValueError, match="colour"):
        ModelConfig.from_dict({**config.to_dict(), "colour": "red"})


# --- export ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_export_and_read(tmp_path, name, tied, dtype):
    """Bit for bit, and a checkpoint that the strict reader accepts."""
    _, config = golden_config(name)
    config = dataclasses.replace(config, tied_head=tied)
    dtype = np.dtype(BFLOAT16 if dtype == "bfloat16" else dtype)
    params = random_params(config)
    export_hf(params, config, name, tmp_path / "out", dtype)
    checkpoint = HFCheckpoint(tmp_path / "out")
    assert checkpoint.family is FAMILIES[name]
    assert checkpoint.config == config
    assert checkpoint.dtype == dtype
    for path, info in leaf_paths(config).items():
        kept = np.dtype(np.float32) if getattr(info, "float32", False) else dtype
        want = np.asarray(leaf(params, path)).astype(kept)
        got = checkpoint.read_leaf(path, dtype)
        assert (got.dtype, got.shape) == (kept, info.shape), path
        same = np.ascontiguousarray(got).view(np.uint8) == want.view(np.uint8)
        assert same.all(), path


@pytest.mark.parametrize("name", WITH_GOLDEN)
def test_export_restores_the_published_file(tmp_path, name):
    """Read and written again, a checkpoint has the same tensors bit for bit."""
    _, config = golden_config(name)
    stored = load_file(GOLDEN / name / "model.safetensors")
    hf_dir = tmp_path / "in"
    hf_dir.mkdir()
    (hf_dir / "config.json").write_text(json.dumps(golden_config(name)[0]))
    save_file(stored, hf_dir / "model.safetensors")
    checkpoint = HFCheckpoint(hf_dir)
    params = read_hf_params(checkpoint, np.float32)
    export_hf(params, config, name, tmp_path / "out", np.float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    for key, tensor in stored.items():
        assert written[key].dtype == tensor.dtype, key
        np.testing.assert_array_equal(written[key], tensor, err_msg=key)


def test_export_of_a_tied_head_names_no_head(tmp_path):
    _, config = golden_config("sdar")
    config = dataclasses.replace(config, tied_head=True)
    export_hf(random_params(config), config, "sdar", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]


def test_reader_is_strict_about_an_export(tmp_path):
    """What was exported for one config is refused under another."""
    _, config = golden_config("sdar")
    export_hf(random_params(config), config, "sdar", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"missing.*layers\.3"):
        HFCheckpoint(tmp_path)
