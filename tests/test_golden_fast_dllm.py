"""Fast-dLLM and dParallel on LLaDA and Dream against traces of the published code."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay import decode_inputs
from safetensors.numpy import load_file
from tiny import quick_compilation

from dllm_jax import generate
from dllm_jax.decoding import DECODERS, fast_dllm, loop
from dllm_jax.model import load, model_fns
from dllm_jax.settings import resolve_settings, traced_settings

_CANVAS = 64  # of all cases, so that few programs are compiled
# Its budget of one step leaves the block's other masks in the published output.
_LEAVES_MASKS = "fd_prefix_entropy_spb1_leaves_masks"
_GENERATE = ("fd_dual_thr0.9", "dparallel_llada_prefix_h0.3", "fd_factor1.0_none")


def _cases(directory):
    for folder in ("llada", "dream", "klass"):
        for case in json.loads((directory / folder / "cases.json").read_text())["decode"]:
            method = case.get("engine", case.get("method"))
            if method.startswith("fast_dllm") or method == "dparallel":
                yield {**case, "folder": folder, "family": case.get("model", folder)}


def pytest_generate_tests(metafunc):
    cases = list(_cases(metafunc.config.getoption("--golden-dir")))
    kinds = {
        "trace_case": [c for c in cases if c["name"] != _LEAVES_MASKS],
        "wasteful_case": [
            c
            for c in cases
            if c["forwards_that_revealed_nothing"] and c["name"] != _LEAVES_MASKS
        ],
        "cut_short": [c for c in cases if c["name"] == _LEAVES_MASKS],
        "generate_case": [c for c in cases if c["name"] in _GENERATE],
    }
    for name in kinds.keys() & set(metafunc.fixturenames):
        ids = [f"{case['family']}-{case['name']}" for case in kinds[name]]
        metafunc.parametrize(name, kinds[name], ids=ids)


@pytest.fixture(scope="module")
def models(golden_dir):
    return functools.cache(lambda family: load(str(golden_dir / family), dtype="float32"))


@pytest.fixture(scope="module")
def arrays(golden_dir):
    return functools.cache(lambda f: load_file(golden_dir / f / "arrays.safetensors"))


def _new_tokens(case) -> int:
    settings = case["settings"]
    return settings.get("gen_length") or settings["max_new_tokens"]


def _settings(case):
    """What the published arguments are called here."""
    given, engine = case["settings"], case.get("engine", "dparallel")
    length = given.get("block_length", _new_tokens(case))
    steps = given["steps"] * length // _new_tokens(case)
    if engine == "fast_dllm_dream_nocache":
        strategy = "confidence_threshold_quota"
    elif engine == "fast_dllm_dream_block" and given["alg"] != "confidence_threshold":
        strategy = "entropy"  # whatever the name says
    elif given.get("factor") is not None:
        strategy = "factor_script"
    elif engine == "dparallel":
        strategy = "low_entropy" if given["threshold"] is None else "entropy_threshold"
    else:
        strategy = "low_confidence" if given["threshold"] is None else engine
    if strategy == engine:
        strategy = "confidence_threshold"
    out = {"block_length": length, "remasking_strategy": strategy}
    if "dual_cache" in given:
        out["cache"] = "dual" if given["dual_cache"] else "prefix"
    else:
        named = [kind for kind in ("prefix", "dual") if engine.endswith(kind)]
        out["cache"] = given.get("cache", [*named, "none"][0])
    if strategy.startswith("confidence_threshold"):
        out["threshold"] = given["threshold"]
    elif strategy == "entropy_threshold":
        out["entropy_threshold"] = given["threshold"]
    elif strategy == "factor_script":
        out["factor"] = given["factor"]
    if strategy in ("confidence_threshold_quota", "low_confidence", "low_entropy"):
        out["denoising_steps"] = steps
    if strategy == "entropy":
        out |= {"denoising_steps": steps, "eps": given["eps"]}
    return out


@functools.partial(jax.jit, static_argnames="config")
def _step(params, config, settings, state):
    """A step, and the entropy of every slot of its window."""
    entropies = []

    def spy(*args):
        proposal = propose(*args)
        entropies.append(proposal.entropy)
        return proposal

    propose, fast_dllm.propose_from_hidden = fast_dllm.propose_from_hidden, spy
    try:
        after = fast_dllm.step(model_fns(params, config), settings, state)
    finally:
        fast_dllm.propose_from_hidden = propose
    start = jnp.minimum(state.cursor, state.canvas.shape[1] - entropies[0].shape[1])
    whole = jnp.full(state.canvas.shape, jnp.nan)
    return after, jax.vmap(
        lambda row, new, first: jax.lax.dynamic_update_slice(row, new, (first,))
    )(whole, entropies[0], start)


def _decode(model, case, early_stop):
    """The states before and after each forward, and the entropies in each."""
    decoder, config = DECODERS["fast_dllm"], model.config
    given = {**_settings(case), "early_stop": early_stop}
    settings = traced_settings(resolve_settings(decoder, config, given))
    inputs = decode_inputs(case["prompt_ids"], _new_tokens(case), config.mask_id, _CANVAS)
    state = decoder.init(model_fns(model.params, config), settings, inputs, _CANVAS)
    entropies = []

    def step(state):
        with quick_compilation():
            state, entropy = _step(model.params, config, settings, state)
        entropies.append(np.asarray(entropy))
        return state

    return loop.run_in_python(step, state), entropies


def _canvases(case, states):
    length = len(case["output_ids"][0])
    return [state.canvas[0, :length].tolist() for state in states]


def test_decode_trace(models, arrays, trace_case):
    """The canvas after every forward, and what its slots were chosen by."""
    case, stored = trace_case, arrays(trace_case["folder"])
    # The published loops with a factor run no forward in vain, the others may.
    early_stop = "factor" in case.get("engine", "")
    states, entropies = _decode(models(case["family"]), case, early_stop)
    assert _canvases(case, states[1:]) == stored[f"trace.{case['name']}"][:, 0].tolist()
    assert states[-1].forwards.denoise[0] == case["nfe"]
    reveals = case["reveals"]
    assert len(reveals) == _new_tokens(case)
    for number, *place, token in (r[:4] if len(r) == 5 else r for r in reveals):
        assert states[-1].canvas[0, place[-1]] == token
        assert states[-1].unmask_forward[0, place[-1]] == number
    by_entropy = case["settings"].get("alg", "").startswith(("entropy", "maskgit"))
    if "engine" in case and not by_entropy:
        for number, _, position, _, confidence in reveals:
            got = states[number + 1].confidence[0, position]
            np.testing.assert_allclose(got, confidence, atol=1e-4, rtol=0)
    elif "engine" in case:
        first = {prompt + n for prompt in [len(case["prompt_ids"][0])] for n in range(24)}
        for number, _, position, _, score in reveals:
            if score < 0 and position in first:
                got = -entropies[number][0, position]
                np.testing.assert_allclose(got, score, atol=1e-4, rtol=0)
    else:
        for got, want in zip(entropies, stored[f"entropy.{case['name']}"], strict=True):
            known = ~np.isnan(want)
            np.testing.assert_allclose(
                got[0, : len(want)][known], want[known], atol=1e-4, rtol=0
            )


def test_early_stop_leaves_out_what_unmasks_nothing(models, arrays, wasteful_case):
    """The same canvases, each once."""
    case = wasteful_case
    states, _ = _decode(models(case["family"]), case, True)
    got = _canvases(case, states)
    trace = arrays(case["folder"])[f"trace.{case['name']}"][:, 0].tolist()
    assert [got[0], *trace] != got
    assert [got[0], *(ids for ids in trace if ids != got[0])][-1] == got[-1]
    assert got == list(map(list, dict.fromkeys(map(tuple, [got[0], *trace]))))
    wasted = case["forwards_that_revealed_nothing"]
    assert states[-1].forwards.denoise[0] == case["nfe"] - wasted


def test_a_short_schedule_leaves_no_masks(models, cut_short):
    """One step a block: its second forward, the first without the cache, fills it.

    The published loop ends there with masks in the output (specs, LLaDA 5.5).
    """
    case = cut_short
    model = models(case["family"])
    states, _ = _decode(model, case, True)
    final, published = _canvases(case, states)[-1], case["output_ids"][0]
    mask_id, prompt = model.config.mask_id, case["prompt_ids"][0]
    assert mask_id in published and mask_id not in final
    assert final[: len(prompt) + 1] == published[: len(prompt) + 1]
    assert len(states) - 1 == 4 == case["nfe"]


def test_generate(models, generate_case):
    """The jitted loop returns what the published code does, and counts its tokens."""
    case = generate_case
    model, given = models(case["family"]), _settings(case)
    [prompt], [ids], new = case["prompt_ids"], case["output_ids"], _new_tokens(case)
    request = {"max_new_tokens": new, "stop_ids": (), **given}
    [out] = generate(model, [prompt], "fast_dllm", **request)
    assert out.tokens == ids[len(prompt) :]
    forwards = case["nfe"] - case["forwards_that_revealed_nothing"]
    assert out.stats.forwards["total"] == out.stats.forwards["denoise"] == forwards
    blocks, length = new // given["block_length"], given["block_length"]
    whole = len(ids) * (blocks if given["cache"] != "none" else forwards)
    rest = {
        "none": 0,
        "dual": (forwards - blocks) * length,
        "prefix": out.stats.positions - whole,
    }
    assert out.stats.positions == whole + rest[given["cache"]]
    assert out.stats.positions <= forwards * len(ids)
