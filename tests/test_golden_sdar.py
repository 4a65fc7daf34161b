"""SDAR, dense and MoE, against logits and decode traces of the published code."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay import decode_inputs
from safetensors.numpy import load_file

from dllm_jax import generate, layouts, transformer
from dllm_jax.cache import append, init_cache
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.model import Model, load, model_fns
from dllm_jax.moe import Experts, mixture, route
from dllm_jax.sampling import propose
from dllm_jax.settings import resolve_settings, traced_settings

# What the published engines call a strategy -> what gives the same trace here.
_STRATEGIES = {
    ("sdar_generate", "entropy_bounded"): "entropy_bounded_script",
    ("jetengine", "low_confidence_dynamic"): "low_confidence_dynamic_leftmost",
}


def _read(directory, name):
    path = directory / name
    return json.loads(path.read_text()) if path.exists() else []


FAMILIES = ("sdar", "sdar_moe")


def pytest_generate_tests(metafunc):
    root = metafunc.config.getoption("--golden-dir")
    for argument, file in (
        ("decode_case", "cases.json"),
        ("forward_case", "forward_cases.json"),
    ):
        if argument not in metafunc.fixturenames:
            continue
        cases = []
        # The jitted loop is the same for both; the traces check each forward of both.
        whole_loop = metafunc.function is test_generate
        for family in FAMILIES[:1] if whole_loop else FAMILIES:
            found = _read(root / family, file)
            found = found["cases"] if isinstance(found, dict) else found
            cases += [{**case, "family": family} for case in found]
        names = [f"{c['family']}-{c.get('id') or c['name']}" for c in cases]
        metafunc.parametrize(argument, cases, ids=names)


@functools.cache
def _load(directory):
    return load(str(directory), dtype="float32")


@pytest.fixture
def model(request, golden_dir) -> Model:
    case = request.getfixturevalue(
        "decode_case" if "decode_case" in request.fixturenames else "forward_case"
    )
    return _load(golden_dir / case["family"])


@pytest.fixture
def arrays(golden_dir, forward_case):
    return load_file(golden_dir / forward_case["family"] / "arrays.safetensors")


@functools.partial(jax.jit, static_argnames=("config", "block"))
def _forward(params, config, tokens, position, block, cache):
    fields = layouts.block_causal(position, block)
    out = transformer.forward(params, config, tokens, fields, cache)
    return transformer.logits(params, out.hidden)[0], out, fields


def _logits(model, tokens, block, start=0, cache=None):
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    position = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return _forward(model.params, model.config, tokens, position, block, cache)


@functools.partial(jax.jit, static_argnames=("config", "canvas_length"))
def _init(params, config, settings, inputs, canvas_length):
    fns = model_fns(params, config)
    return DECODERS["block"].init(fns, settings, inputs, canvas_length)


@functools.partial(jax.jit, static_argnames=("config", "block"))
def _propose(params, config, tokens, position, block, cache):
    logit, _, _ = _forward(params, config, tokens, position, block, cache)
    return propose(logit[None], config.mask_id)


@functools.partial(jax.jit, static_argnames="config")
def _step(params, config, settings, state):
    return DECODERS["block"].step(model_fns(params, config), settings, state)


def test_forward_logits(model, arrays, forward_case):
    name, block = forward_case["name"], forward_case["block"]
    if forward_case["kind"] == "nocache":
        got, _, _ = _logits(model, arrays[f"{name}_input_ids"].reshape(-1), block)
        want = arrays[f"{name}_logits"]
        np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-4, rtol=0)
        return
    prompt = arrays[f"{name}_prompt_ids"].reshape(-1)
    got, out, fields = _logits(model, prompt, block)
    want = arrays[f"{name}_prefill_logits"]
    np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-4, rtol=0)
    cache = init_cache(model.config, 1, len(prompt) + block, jnp.float32)
    cache = append(cache, out.k, out.v, fields, jnp.array([len(prompt)], jnp.int32))
    if f"{name}_cache_k_layer0" in arrays:
        for ours, theirs in ((cache.k, "k"), (cache.v, "v")):
            want = arrays[f"{name}_cache_{theirs}_layer0"]
            got = ours[0, 0, :, : len(prompt)]
            np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-4, rtol=0)
    ids = arrays[f"{name}_block_ids"].reshape(-1)
    got, _, _ = _logits(model, ids, block, len(prompt), cache)
    want = arrays[f"{name}_block_logits"]
    np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-4, rtol=0)


def _settings(case):
    params = case["params"]
    strategy = params["remasking_strategy"]
    given = {
        "block_length": params["block_length"],
        "denoising_steps": params["denoising_steps"],
        "remasking_strategy": _STRATEGIES.get((case["engine"], strategy), strategy),
        "threshold": params.get("confidence_threshold"),
        "eb_threshold": params.get("eb_threshold"),
    }
    return {name: value for name, value in given.items() if value is not None}


def _request(case):
    params = case["params"]
    return {
        "max_new_tokens": params.get("gen_length", params.get("max_tokens")),
        "stop_ids": params.get("stop") or params.get("stop_words") or (),
    }


def _expected_ids(case):
    return case.get("protected_output_ids", case["output_ids"])


def _trim(case):
    """The completion that we return for the case's canvas."""
    request, prompt = _request(case), len(case["prompt_ids"])
    ids = _expected_ids(case)[prompt : prompt + request["max_new_tokens"]]
    stops = {*request["stop_ids"], case["mask_id"]}
    cut = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[:cut]


def test_decode_trace(model, decode_case):
    """Every forward: what was fed, what was proposed, and with which confidence."""
    case = decode_case
    decoder = DECODERS["block"]
    settings = resolve_settings(
        decoder, model.config, {**_settings(case), "fold": False, "early_stop": False}
    )
    length = settings.block_length
    settings = traced_settings(settings)
    request, prompt = _request(case), case["prompt_ids"]
    used = -(-(len(prompt) + request["max_new_tokens"]) // length) * length
    canvas_length = 128  # one for all cases, so that few programs are compiled
    assert used <= canvas_length
    inputs = decode_inputs(
        [prompt],
        request["max_new_tokens"],
        model.config.mask_id,
        64,
        tuple(request["stop_ids"]),
    )
    state = _init(model.params, model.config, settings, inputs, canvas_length)
    step = functools.partial(_step, model.params, model.config, settings)
    states = loop.run_in_python(step, state)

    trace = case.get("protected_trace_inputs")
    if trace is None:
        trace = case["trace"]
    has_prefill = len(prompt) >= length
    seen = trace[1:] if has_prefill else trace
    assert len(states) - 1 == len(seen)
    for before, after, entry in zip(states, states[1:], seen, strict=False):
        cursor = int(before.cursor[0])
        fed = np.asarray(before.canvas)[0, cursor : cursor + length].tolist()
        assert fed == _fed(entry)
        if isinstance(entry, dict):
            assert cursor == entry["start"]
            storing = model.config.mask_id not in fed
            assert storing == (entry["k"] == "store")
            if not storing and "x0" in entry:
                _check_proposals(model, before, after, entry, length)

    got = states[-1]
    # JetEngine's canvas grows block by block; what it never reached is masked here.
    want = _expected_ids(case)
    want = want + [case["mask_id"]] * (used - len(want))
    assert np.asarray(got.canvas)[0, :used].tolist() == want[:used]
    forwards = got.forwards
    total = sum(int(getattr(forwards, k)[0]) for k in ("prefill", "denoise", "commit"))
    assert total == case.get("protected_nfe", case["nfe"])


def _fed(entry):
    return entry["in"] if isinstance(entry, dict) else entry


def _check_proposals(model, before, after, entry, length):
    cursor = int(before.cursor[0])
    here = slice(cursor, cursor + length)
    block = np.asarray(before.canvas)[:, here]
    position = cursor + np.arange(length, dtype=np.int32)[None]
    proposal = _propose(model.params, model.config, block, position, length, before.cache)
    masked = block[0] == model.config.mask_id
    token, want = np.asarray(proposal.token)[0], np.array(entry["x0"])
    assert token[masked].tolist() == want[masked].tolist()
    confidence, want = np.asarray(proposal.confidence)[0], np.array(entry["conf"])
    np.testing.assert_allclose(confidence[masked], want[masked], atol=1e-4, rtol=0)
    number = np.asarray(after.unmask_forward)[0, here]
    new = number == int(before.forwards.denoise[0])
    kept = np.asarray(after.confidence)[0, here]
    np.testing.assert_allclose(kept[new], want[new], atol=1e-4, rtol=0)


def test_generate(model, decode_case):
    """The jitted loop, folded, returns the published tokens in fewer forwards."""
    case = decode_case
    [out] = generate(
        model, [case["prompt_ids"]], "block", **_settings(case), **_request(case)
    )
    assert out.tokens == _trim(case)
    # One forward a block less: the last block is never stored, and each other block is
    # stored by a forward that denoises.
    assert out.stats.forwards["commit"] == 0
    assert out.stats.forwards["total"] < case.get("protected_nfe", case["nfe"])


def test_mixture_of_experts(golden_dir):
    """The experts' layer alone: router logits and output."""
    directory = golden_dir / "sdar_moe"
    if not directory.exists():
        return
    model, arrays = _load(directory), load_file(directory / "arrays.safetensors")
    layer = jax.tree.map(lambda leaf: leaf[0], model.params.layers)
    x = jnp.asarray(arrays["moe_in"])
    logits = arrays["moe_router_logits"]
    np.testing.assert_allclose(x @ layer.router, logits, atol=1e-5)
    moe = model.config.moe
    expert, weight = route(x, layer.router, None, moe)
    want = np.argsort(-logits, axis=-1, kind="stable")[:, : moe.experts_per_token]
    np.testing.assert_array_equal(expert, want)
    np.testing.assert_allclose(jnp.sum(weight, axis=-1), 1.0, atol=1e-6)
    experts = Experts.of(model.params.layers)
    got = mixture(x[None], layer, experts, jnp.int32(0), moe)[0]
    np.testing.assert_allclose(got, arrays["moe_out"], atol=1e-5)
