"""int8 weights: small errors, half the bytes, every family, every way to get them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.__main__ import main as convert
from dllm_jax import checkpoint, generate, layouts, load
from dllm_jax.quantize import QArray, dequantize, quantize

_FAMILIES = ("sdar", "sdar_moe", "llada", "dream", "fast_dllm_v2", "llada2")


def load_golden(golden_dir, family, **options):
    mask_id = 253 if family in ("fast_dllm_v2", "llada2") else None
    return load(str(golden_dir / family), dtype="float32", mask_id=mask_id, **options)


def logits_of(model, tokens):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    fns = model.fns(model.params)
    out = jax.jit(
        lambda t: fns.logits(fns.forward(t, layouts.causal(position), None).hidden)
    )
    return np.asarray(out(tokens))


def test_rounding():
    """Half a step of the channel's own scale at most; zeros stay zeros."""
    weight = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)
    weight[1, :, 2] = 0.0
    for given in (weight, jnp.asarray(weight)):
        got = quantize(given, axis=-2)
        assert got.values.dtype == np.int8 and got.scale.shape == (3, 5)
        error = np.abs(np.asarray(dequantize(got, -2, np.float32)) - weight)
        assert (error <= np.abs(weight).max(axis=1, keepdims=True) / 254 + 1e-7).all()
        assert (np.asarray(got.values)[1, :, 2] == 0).all()


@pytest.mark.parametrize("family", _FAMILIES)
def test_logits_of_every_family(golden_dir, family):
    """Near the float32 ones; with int8 activations too, not quite as near."""
    tokens = np.random.default_rng(1).integers(0, 200, (2, 24)).astype(np.int32)
    want = logits_of(load_golden(golden_dir, family), tokens)
    errors = []
    for quant in ("int8", "int8-dynamic"):
        model = load_golden(golden_dir, family, quant=quant)
        assert isinstance(model.params.layers.q, QArray)
        assert model.dtype == np.float32
        errors.append(np.abs(logits_of(model, tokens) - want).mean() / want.std())
    assert 0.0 < errors[0] < 0.03, errors
    assert errors[0] < errors[1] < 0.08, errors


def test_tokens_agree(golden_dir):
    """Most of a greedy decoding is the same; the cache is exact or not as before."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 200, 20).tolist() for _ in range(4)]
    whole, quantized = (load_golden(golden_dir, "sdar", quant=q) for q in ("none", "int8"))
    want = generate(whole, prompts, "block", max_new_tokens=16, block_length=4)
    got = generate(quantized, prompts, "block", max_new_tokens=16, block_length=4)
    pairs = [
        pair
        for one, other in zip(got, want, strict=True)
        for pair in zip(one.tokens, other.tokens, strict=False)
    ]
    assert np.mean([a == b for a, b in pairs]) > 0.7


@pytest.mark.parametrize(("family", "chunk"), [("sdar", None), ("llada2", 3000)])
def test_converted_or_quantised_at_load(
    golden_dir, tmp_path, capsys, family, chunk, monkeypatch
):
    """The same numbers at conversion, at load from either kind, and on a mesh.

    Whether leaves are saved whole or in chunks.
    """
    if chunk:
        monkeypatch.setattr(checkpoint, "CHUNK_NUMBERS", chunk)
    more = ["--mask-id", "253"] if family == "llada2" else []
    source = str(golden_dir / family)
    assert convert([source, str(tmp_path / "int8"), "--quant", "int8", *more]) == 0
    assert "and int8, verified" in capsys.readouterr().out
    assert convert([source, str(tmp_path / "whole"), *more]) == 0
    assert convert(["verify", str(tmp_path / "int8")]) == 0
    want = load_golden(golden_dir, family, quant="int8").params
    models = [
        load(str(tmp_path / "int8"), dtype="float32"),
        load(str(tmp_path / "whole"), dtype="float32", quant="int8"),
        load(str(tmp_path / "whole"), dtype="float32", quant="int8", mesh="tensor=2"),
        load(str(tmp_path / "int8"), dtype="float32", mesh="tensor=2"),
    ]
    for model in models:
        assert model.quant == "int8"
        # Devices divide less exactly than the host: a scale may be off by its last bit.
        for one, other in zip(*map(jax.tree.leaves, (model.params, want)), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            whole = one == np.round(one)
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=whole.all())
            assert np.mean(np.abs(one - other) > 0.5) < 1e-3
    assert len(models[3].params.layers.q.scale.sharding.device_set) == 2
    prompt = list(range(11))
    chunks = list((tmp_path / "int8" / "params" / "head").iterdir())
    assert (len(chunks) > 1) == bool(chunk)
    one, other = (
        generate(models[i], prompt, "block", max_new_tokens=12)[0].tokens for i in (0, 3)
    )
    assert one == other
    with pytest.raises(ValueError, match="converted with quant='int8'"):
        load(str(tmp_path / "int8"), quant="none")
    assert convert(["export", str(tmp_path / "int8"), str(tmp_path / "out")]) == 2
    assert "quant='int8'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="quant='int4' must be one of auto, none, int8"):
        load("demo", quant="int4")


def test_bytes(golden_dir):
    """Half of bfloat16's, but for scales and what stays as it is."""

    def size(model):
        return sum(x.nbytes for x in jax.tree.leaves(model.params.layers))

    whole = load(str(golden_dir / "sdar"), dtype="bfloat16")
    small = load(str(golden_dir / "sdar"), dtype="bfloat16", quant="int8")
    assert size(small) < 0.6 * size(whole)
    assert small.params.layers.attn_norm.dtype == jnp.bfloat16
    assert small.params.embed.dtype == jnp.bfloat16
