"""KLASS, WINO, CreditDecoding and dInfer's hierarchy against traces of released code.

Where these run out of steps and leave masks, a block here goes on; cases that do so agree
up to there. Their tokens are decoded without stop ids.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay import decode_inputs
from safetensors.numpy import load_file
from tiny import quick_compilation

from dllm_jax.decoding import DECODERS, bidirectional, canvas, loop
from dllm_jax.model import load, model_fns
from dllm_jax.settings import resolve_settings, traced_settings

_CANVAS = 64  # of all cases, so that few programs are compiled
_NAMES = {
    "conf_threshold": "threshold",
    "credit_alpha": "alpha",
    "boost_gamma": "gamma",
    "decay_beta": "decay",
}
_KEPT = (
    *("threshold", "threshold_back", "low_threshold", "alpha", "gamma", "decay"),
    *("kl_threshold", "kl_history_length", "unmask_strategy"),
)


def _cases(directory):
    cases = json.loads((directory / "klass" / "cases.json").read_text())["decode"]
    return [case for case in cases if case["method"] != "dparallel"]


def pytest_generate_tests(metafunc):
    cases = _cases(metafunc.config.getoption("--golden-dir"))
    kinds = {
        "case": [c for c in cases if not c["remaining_masks"]],
        "cut_short": [c for c in cases if c["remaining_masks"]],
    }
    for name in kinds.keys() & set(metafunc.fixturenames):
        ids = [case["name"] for case in kinds[name]]
        metafunc.parametrize(name, kinds[name], ids=ids)


@pytest.fixture(scope="module")
def models(golden_dir):
    return functools.cache(lambda family: load(str(golden_dir / family), dtype="float32"))


@pytest.fixture(scope="module")
def arrays(golden_dir):
    return load_file(golden_dir / "klass" / "arrays.safetensors")


def _new_tokens(case) -> int:
    settings = case["settings"]
    return settings.get("gen_length") or settings["max_new_tokens"]


def _decoder_and_settings(case):
    """What the published arguments are called here."""
    published = {_NAMES.get(k, k): v for k, v in case["settings"].items()}
    given = {name: published[name] for name in _KEPT if name in published}
    given["block_length"] = published.get("block_length", 0)
    if case["method"] == "klass" and given["block_length"]:  # Dream's has no quota
        blocks = _new_tokens(case) // given["block_length"]
        given["denoising_steps"] = published["steps"] // blocks
    if case["method"] == "hierarchy":
        return "fast_dllm", {**given, "remasking_strategy": "hierarchy", "cache": "none"}
    return case["method"], given


@functools.partial(jax.jit, static_argnames=("config", "name"))
def _step(params, config, name, settings, state):
    """A step, and what it computed by the way."""
    seen = {}

    def spy(module, function, kind):
        real = getattr(module, function)

        def call(*args):
            seen[kind] = real(*args)
            return seen[kind]

        return module, function, real, call

    decoder = __import__(f"dllm_jax.decoding.{name}", fromlist=["step"])
    of_hidden = name in ("fast_dllm", "wino")
    proposes = "propose_from_hidden" if of_hidden else "propose_plain"
    spies = [spy(decoder, proposes, "proposal")]
    if name == "klass":
        spies.append(spy(decoder, "_divergence", "kl"))
    if name == "wino":
        spies.append(spy(decoder, "probability", "back"))
    for module, function, _, call in spies:
        setattr(module, function, call)
    try:
        after = decoder.step(model_fns(params, config), settings, state)
    finally:
        for module, function, real, _ in spies:
            setattr(module, function, real)
    window = bidirectional.open_window(
        model_fns(params, config), settings.block_length, state
    )
    seen["conf"] = seen.pop("proposal").confidence
    out = {}
    for kind, values in seen.items():
        nothing = jnp.full(state.canvas.shape, jnp.nan)
        values = jnp.where(window.inside, values, jnp.nan)
        out[kind] = canvas.write(nothing, window.index[:, 0], values)
    return after, out


def _decode(model, case):
    """The states before and after each forward, and what was computed in each."""
    name, given = _decoder_and_settings(case)
    decoder, config = DECODERS[name], model.config
    settings = traced_settings(resolve_settings(decoder, config, given))
    inputs = decode_inputs(case["prompt_ids"], _new_tokens(case), config.mask_id, _CANVAS)
    state = decoder.init(model_fns(model.params, config), settings, inputs, _CANVAS)
    computed = []

    def step(state):
        with quick_compilation():
            state, out = _step(model.params, config, name, settings, state)
        computed.append({kind: np.asarray(v[0]) for kind, v in out.items()})
        return state

    return loop.run_in_python(step, state), computed


def _compare(got, want, atol, only):
    """Values of the open block that both have, at most 5 of a divergence."""
    want = want[: len(only)]
    known = ~np.isnan(want) & ~np.isnan(got[: len(want)]) & only & (want < 5.0)
    np.testing.assert_allclose(got[: len(want)][known], want[known], atol=atol, rtol=0)
    return known.sum()


def test_trace(models, arrays, case):
    """The canvas after every forward, and the numbers that its slots were chosen by."""
    model = models(case["model"])
    states, computed = _decode(model, case)
    length, name = len(case["output_ids"][0]), case["name"]
    got = [state.canvas[0, :length].tolist() for state in states[1 : case["nfe"] + 1]]
    assert got == arrays[f"trace.{name}"][:, 0].tolist()
    if "early_stop" not in name:
        assert len(states) - 1 == case["nfe"] == states[-1].forwards.denoise[0]
    kinds = {"conf": "conf", "fused_conf": "conf", "kl": "kl", "back": "back"}
    compared = 0
    for stored, ours in kinds.items():
        for number, want in enumerate(arrays.get(f"{stored}.{name}", [])):
            before = np.asarray(states[number].canvas[0, :length])
            masked = before == model.config.mask_id
            only = {"back": ~masked, "kl": masked & (number > 0)}.get(stored, masked)
            atol = 2e-4 if stored == "kl" else 1e-4
            compared += _compare(computed[number][ours], want, atol, only)
    assert compared >= case["nfe"]


def test_a_block_whose_steps_run_out_goes_on(models, arrays, cut_short):
    """Published canvases up to the forward that ends the first such block."""
    case = cut_short
    model = models(case["model"])
    states, _ = _decode(model, case)
    trace = arrays[f"trace.{case['name']}"][:, 0]
    prompt, length = len(case["prompt_ids"][0]), trace.shape[1]
    block = case["settings"].get("block_length", length - prompt)
    mask_id = model.config.mask_id
    blocks = trace[:, prompt:].reshape(len(trace), -1, block) == mask_id
    # A block is left when its masks stay for good.
    left = [b for b in range(blocks.shape[1]) if blocks[-1, b].any()]
    touched = (blocks[:, left[0]] != blocks[-1, left[0]]).any(axis=-1)
    last = len(trace) if left[0] == blocks.shape[1] - 1 else int(touched.sum()) + 1
    for number in range(last):
        got = states[number + 1].canvas[0, :length].tolist()
        assert got == trace[number].tolist(), number
    assert last > 3 and mask_id in case["output_ids"][0]
    assert mask_id not in states[-1].canvas[0, :length].tolist()
