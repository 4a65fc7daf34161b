"""Decoding on meshes: the tokens of one device, and only the expected collectives."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import CONFIG, tiny_model

from dllm_jax import generate, layouts, load, log_likelihood
from dllm_jax.config import MoEConfig
from dllm_jax.model import Model
from dllm_jax.sharding import make_mesh, param_shardings


def on_mesh(model: Model, mesh: str) -> Model:
    """The same model, divided."""
    mesh = make_mesh(mesh)
    shardings = param_shardings(model.config, mesh)
    return Model(
        jax.device_put(model.params, shardings), model.config, model.tokenizer, mesh=mesh
    )


def prompts_of(*lengths) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 50, length).tolist() for length in lengths]


def check_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        assert one.unmask_forward == other.unmask_forward
        assert one.stats.forwards == other.stats.forwards
        assert one.stats.positions == other.stats.positions
        np.testing.assert_allclose(one.confidence, other.confidence, atol=1e-4)


BIDIRECTIONAL = dataclasses.replace(CONFIG, attention="bidirectional")
SHIFTED = dataclasses.replace(BIDIRECTIONAL, logit_alignment="shifted", qkv_bias=True)
FAST_V2 = dataclasses.replace(CONFIG, logit_alignment="shifted", tied_head=True)
DECODERS = [
    ("ar", CONFIG, {}),
    ("block", CONFIG, {"block_length": 8, "threshold": 0.5}),
    ("block", CONFIG, {"temperature": 0.8}),
    ("s2d2", CONFIG, {"block_length": 8}),
    ("simsd", CONFIG, {"block_length": 6}),
    ("simsd", CONFIG, {"verification": "exact", "temperature": 0.9}),
    ("edit", CONFIG, {"threshold": 0.6, "editing_threshold": 0.5}),
    ("masked", BIDIRECTIONAL, {"block_length": 8, "denoising_steps": 3}),
    ("masked", SHIFTED, {"remasking_strategy": "entropy", "denoising_steps": 5}),
    ("fast_dllm", BIDIRECTIONAL, {"block_length": 8, "cache": "dual", "threshold": 0.6}),
    ("fast_dllm", SHIFTED, {"block_length": 8, "cache": "prefix", "threshold": 0.6}),
    ("klass", BIDIRECTIONAL, {"block_length": 8}),
    ("wino", BIDIRECTIONAL, {"block_length": 8, "threshold": 0.3}),
    ("credit", BIDIRECTIONAL, {"block_length": 8}),
    ("leap", SHIFTED, {"block_length": 8, "tau": 0.3}),
    ("leap", CONFIG, {"block_length": 8, "tau": 0.3}),
    ("fast_dllm_v2", FAST_V2, {}),
]


@pytest.mark.parametrize(
    ("decoder", "config", "settings"), DECODERS, ids=[d for d, _, _ in DECODERS]
)
def test_every_decoder(decoder, config, settings):
    """Rows over two groups of devices, and heads over two devices in each."""
    model = tiny_model(0, config)
    divided = on_mesh(model, "data=2,tensor=2")
    settings = {"max_new_tokens": 14, "seed": [1, 2, 3], **settings}
    one, other = dict(settings), dict(settings)
    if decoder == "simsd":
        drafter = tiny_model(1, dataclasses.replace(config, num_layers=1))
        one["draft_model"] = drafter
        other["draft_model"] = on_mesh(drafter, "data=2,tensor=2")
    prompts = prompts_of(3, 21, 8)
    check_same(
        generate(divided, prompts, decoder, **other),
        generate(model, prompts, decoder, **one),
    )


@pytest.mark.parametrize("mesh", ["data=2", "tensor=4", "data=4,tensor=2"])
def test_shapes_of_mesh(mesh):
    """More devices than key/value heads, and more groups of rows than rows."""
    model = tiny_model(0)
    request = {"block_length": 8, "max_new_tokens": 14, "seed": [1, 2, 3]}
    prompts = prompts_of(3, 21, 8)
    got = generate(on_mesh(model, mesh), prompts, "block", **request)
    check_same(got, generate(model, prompts, "block", **request))


_MOE = MoEConfig(
    num_experts=8,
    experts_per_token=2,
    ffw_dim=32,
    shared_ffw_dim=32,
    scoring="sigmoid",
    scale=2.5,
    num_groups=4,
    groups_per_token=2,
    selection_bias=True,
)


@pytest.mark.parametrize(
    "mesh", ["expert=4", "expert=2,tensor=2", "data=2,expert=2,tensor=2"]
)
def test_experts(mesh):
    """Experts over devices, beside a shared one, behind a dense layer."""
    config = dataclasses.replace(CONFIG, num_layers=3, dense_layers=1, moe=_MOE)
    model = tiny_model(3, config)
    request = {"block_length": 8, "max_new_tokens": 14}
    prompts = prompts_of(3, 21)
    got = generate(on_mesh(model, mesh), prompts, "block", **request)
    check_same(got, generate(model, prompts, "block", **request))


def test_a_whole_drafter_of_a_divided_target():
    target = tiny_model(0)
    # Three heads, which two devices could not divide.
    other = dataclasses.replace(CONFIG, num_layers=1, num_heads=3, num_kv_heads=1)
    drafter = tiny_model(1, other)
    mesh = make_mesh("tensor=2")
    whole = Model(drafter.params, other, mesh=mesh, divided=False)
    request = {"max_new_tokens": 14, "block_length": 6, "verification": "exact"}
    prompts = prompts_of(9)
    got = generate(
        on_mesh(target, "tensor=2"), prompts, "simsd", draft_model=whole, **request
    )
    want = generate(target, prompts, "simsd", draft_model=drafter, **request)
    check_same(got, want)
    with pytest.raises(ValueError, match="with the model's mesh"):
        generate(target, prompts, "simsd", draft_model=whole)


def test_loading_onto_a_mesh(golden_dir, tmp_path):
    """From either kind of checkpoint; int8 keys and likelihoods go on working."""
    from convert.__main__ import main as convert

    directory = golden_dir / "sdar"
    assert convert([str(directory), str(tmp_path / "sdar")]) == 0
    single = load(str(directory), dtype="float32")
    [prompt] = prompts_of(19)
    want = generate(single, prompt, "block", max_new_tokens=12, block_length=4)
    score = log_likelihood(single, [prompt], [want[0].tokens], block_length=1)
    for path in (directory, tmp_path / "sdar"):
        model = load(str(path), dtype="float32", mesh={"data": 2, "tensor": 2})
        assert len(model.params.layers.q.sharding.device_set) == 4
        half = model.params.layers.q.addressable_shards[0].data.shape
        assert half[2] * 2 == single.params.layers.q.shape[2]
        check_same(
            generate(model, prompt, "block", max_new_tokens=12, block_length=4), want
        )
    again = log_likelihood(model, [prompt], [want[0].tokens], block_length=1)
    np.testing.assert_allclose(again[0].log_likelihood, score[0].log_likelihood, atol=1e-3)
    settings = {"kv_dtype": "int8", "dtype": "float32"}
    quantised = [load(str(directory), **settings, mesh=mesh) for mesh in (None, "tensor=2")]
    one, other = (generate(m, prompt, "block", max_new_tokens=12) for m in quantised)
    assert one[0].tokens == other[0].tokens


def test_command_line(capsys):
    from dllm_jax.decode import main

    arguments = ["--prompt", "Tom has 3 pens. He buys 4 more. How many?", "--quiet"]
    arguments += ["--compile-cache", "none", "--no-stream", "--max-new-tokens", "40"]
    assert main(arguments) == 0
    want = capsys.readouterr().out
    assert main([*arguments, "--mesh", "data=2,tensor=2"]) == 0
    assert capsys.readouterr().out == want
    mistakes = {
        "tensor=3": "2 key/value heads",
        "tensor=16": "needs 16 devices; there are 8",
        "rows=2": "the axes are data, tensor, expert",
        "tensor=0": "at least 1",
        "tensor=2,tensor=2": "axis=size pairs",
    }
    for mesh, words in mistakes.items():
        assert main([*arguments, "--mesh", mesh]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
    assert main([*arguments, "--draft-whole"]) == 2
    assert "needs --mesh" in capsys.readouterr().err


def _count_collectives(config, mesh: str) -> dict[str, int]:
    """Collectives in the text of one compiled forward with its greedy proposals."""
    model = on_mesh(tiny_model(0, config), mesh)
    tokens = np.zeros((4, 4), np.int32)

    def forward(params, tokens):
        fns = model.fns(params)
        position = jax.numpy.broadcast_to(np.arange(4, dtype=np.int32), tokens.shape)
        out = fns.forward(tokens, layouts.block_causal(position, 4), None)
        return fns.propose(out.hidden).token

    program = model.jit(forward, (model.specs, P("data")), P("data"))
    text = program.lower(model.params, tokens).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    return {
        kind: count
        for kind in kinds
        if (count := len(re.findall(rf"= [^=]*\b{kind}(?:-start)?\(", text)))
    }


def test_collectives_of_a_forward():
    """Of a layer, scanned over: one sum behind attention, one behind feed-forward.

    Besides, one sum for the embeddings, and the few numbers a slot that the parts of the
    vocabulary exchange. Groups of rows exchange nothing.
    """
    assert _count_collectives(CONFIG, "data=4") == {}
    found = _count_collectives(CONFIG, "data=2,tensor=2")
    assert found.pop("all-reduce") == 3
    assert found.pop("all-gather") <= 5
    assert found == {}
    moe = dataclasses.replace(CONFIG, moe=_MOE)
    found = _count_collectives(moe, "expert=2,tensor=2")
    assert found.pop("all-reduce") == 3
    assert found.pop("all-gather") <= 5
    assert found == {}
