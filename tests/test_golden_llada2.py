"""LLaDA2 against logits and decode traces of the published code (tests/golden/llada2).

Version 2.0 is the `block` decoder, version 2.1 the `edit` decoder. What differs from the
published runs, and how the cases are read here:

- 2.0 shrinks `steps` to `gen_length // minimal_topk`; here that is the caller's number of
  `denoising_steps`. With more steps than slots the published schedule ends in steps that
  need not unmask anything; ours unmask one slot at least. No case gets that far.
- 2.0 ends after the block that holds an eos; 2.1 without `eos_early_stop` decodes on and
  cuts the answer at the eos. Traces of 2.1 are therefore decoded without stop ids.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay import decode_inputs
from safetensors.numpy import load_file
from tiny import quick_compilation

from dllm_jax import generate, layouts, transformer
from dllm_jax.cache import append, init_cache
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.layers import swiglu
from dllm_jax.model import Model, load, model_fns
from dllm_jax.moe import Experts, mixture, route
from dllm_jax.sampling import propose
from dllm_jax.settings import resolve_settings, traced_settings

MASK_ID = 253  # no config says it
PROMPT, CANVAS = 64, 128  # one shape for all cases, so that few programs are compiled


def _read(directory, name):
    path = directory / name
    return json.loads(path.read_text()) if path.exists() else []


def _cases(directory):
    cases = _read(directory, "cases.json")
    return cases["cases"] if isinstance(cases, dict) else cases


def pytest_generate_tests(metafunc):
    directory = metafunc.config.getoption("--golden-dir") / "llada2"
    if "decode_case" in metafunc.fixturenames:
        cases = _cases(directory)
        metafunc.parametrize("decode_case", cases, ids=[c["id"] for c in cases])
    if "forward_case" in metafunc.fixturenames:
        forward = _read(directory, "forward_cases.json")
        metafunc.parametrize("forward_case", forward, ids=[c["name"] for c in forward])


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def directory(golden_dir):
    return golden_dir / "llada2"


@pytest.fixture(scope="module")
def model(directory) -> Model:
    return load(str(directory), dtype="float32", mask_id=MASK_ID)


@pytest.fixture(scope="module")
def arrays(directory):
    return load_file(directory / "arrays.safetensors")


@functools.partial(jax.jit, static_argnames="config")
def _forward(params, config, tokens, start, length, block, cache):
    """Logits, and what to store, of `length` tokens from `start`, in blocks of `block`."""
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    fields = layouts.block_causal(start + offset, block, valid=offset < length)
    out = transformer.forward(params, config, tokens, fields, cache)
    return transformer.logits(params, out.hidden)[0], out.k, out.v, fields


def _run(model, ids, block, start=0, cache=None, width=64):
    tokens = jnp.zeros((1, width), jnp.int32).at[0, : len(ids)].set(ids)
    numbers = (jnp.int32(x) for x in (start, len(ids), block))
    logits, *fresh = _forward(model.params, model.config, tokens, *numbers, cache)
    return logits[: len(ids)], fresh


def _close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_forward_logits(model, arrays, forward_case):
    name, block = forward_case["name"], forward_case["block"]
    if forward_case["kind"] == "nocache":
        logits, _ = _run(model, arrays[f"{name}_input_ids"], block)
        _close(logits, arrays[f"{name}_logits"])
        return
    prompt = arrays[f"{name}_prompt_ids"]
    _, fresh = _run(model, prompt, block)
    cache = init_cache(model.config, 1, CANVAS, jnp.float32)
    cache = append(cache, *fresh, jnp.array([len(prompt)], jnp.int32))
    ids = arrays[f"{name}_block_ids"]
    logits, _ = _run(model, ids, block, len(prompt), cache, width=32)
    _close(logits, arrays[f"{name}_block_logits"])


def test_mixture_of_experts(model, arrays):
    """Router, shared expert and their sum, of the first layer with experts."""
    layer = jax.tree.map(lambda leaf: leaf[0], model.params.layers)
    x = jnp.asarray(arrays["moe_in"])
    logits = x @ layer.router
    _close(logits, arrays["moe_router_logits"])
    expert, weight = route(x, layer.router, layer.router_bias, model.config.moe)
    want = np.argsort(arrays["moe_topk_idx"], axis=-1)
    got = np.argsort(expert, axis=-1)
    for ours, theirs in ((expert, "moe_topk_idx"), (weight, "moe_topk_weight")):
        ours = np.take_along_axis(np.asarray(ours), got, axis=-1)
        _close(ours, np.take_along_axis(arrays[theirs], want, axis=-1))
    _close(swiglu(x, layer.gate, layer.up, layer.down), arrays["moe_shared_out"])
    experts = Experts.of(model.params.layers)
    got = mixture(x[None], layer, experts, jnp.int32(0), model.config.moe)[0]
    _close(got, arrays["moe_out"])


def _arguments(case):
    """The decoder and its settings."""
    params = case["params"]
    length = params["block_length"]
    given = {"block_length": length, "threshold": params["threshold"]}
    if case["version"] == "2.0":
        steps = min(params["steps"], params["gen_length"] // params["minimal_topk"])
        return "block", {**given, "denoising_steps": steps, "early_stop": False}
    return "edit", {
        **given,
        "editing_threshold": params["editing_threshold"],
        "max_post_steps": params["max_post_steps"],
        "num_to_transfer": params["num_to_transfer"],
    }


@functools.partial(jax.jit, static_argnames=("config", "name"))
def _start(params, config, name, settings, inputs):
    return DECODERS[name].init(model_fns(params, config), settings, inputs, CANVAS)


@functools.partial(jax.jit, static_argnames=("config", "name"))
def _step(params, config, name, settings, state):
    """The state after a step, and the proposals for the logits that the step asked for."""
    asked_for = []

    def logits(hidden):
        asked_for.append(fns.logits(hidden))
        return asked_for[-1]

    fns = model_fns(params, config)
    state = DECODERS[name].step(fns._replace(logits=logits, propose=None), settings, state)
    return state, propose(asked_for[-1], config.mask_id)


def _decode(model, case, fold=True):
    """Every state of the decoder and, from the second on, the proposals it had."""
    name, given = _arguments(case)
    settings = resolve_settings(DECODERS[name], model.config, {**given, "fold": fold})
    settings = traced_settings(settings)
    stop_id = case["eos_id"] if case["version"] == "2.0" else -1
    gen_length = case["params"]["gen_length"]
    inputs = decode_inputs([case["prompt_ids"]], gen_length, MASK_ID, PROMPT, (stop_id,))
    proposals = []

    def step(state):
        state, proposal = _step(model.params, model.config, name, settings, state)
        proposals.append(proposal)
        return state

    start = _start(model.params, model.config, name, settings, inputs)
    return loop.run_in_python(step, start), proposals


def _cut(ids, eos_id):
    return ids[: ids.index(eos_id)] if eos_id in ids else ids


def test_decode_trace(model, decode_case):
    """Every forward: what was fed, what was proposed, and with which confidence."""
    case, length = decode_case, decode_case["params"]["block_length"]
    prompt = case["prompt_ids"]
    states, proposals = _decode(model, case)
    trace = case["trace"]
    assert len(trace) == len(proposals) == case["nfe"]
    edits = 0
    for before, after, proposal, entry in zip(
        states, states[1:], proposals, trace, strict=False
    ):
        start = entry["start"]
        assert int(before.cursor[0]) == start
        block = np.asarray(before.canvas[0, start : start + length])
        assert block.tolist() == entry["in"]
        assert proposal.token[0].tolist() == entry["x0"]
        _close(proposal.confidence[0], entry["conf"])
        written = np.asarray(after.canvas[0, start : start + length])
        changed = written != block
        recorded = np.asarray(after.confidence[0, start : start + length])
        _close(recorded[changed], np.array(entry["conf"])[changed])
        number = np.asarray(after.unmask_forward[0, start : start + length])
        assert (number[changed] == int(before.forwards.denoise[0])).all()
        if int(after.cursor[0]) == start and not bool(after.done[0]):
            edits += int((changed & (block != model.config.mask_id)).sum())
    assert edits == case.get("nedit", 0)

    forwards = states[-1].forwards
    assert int(forwards.denoise[0]) == case["nfe"]
    assert int(forwards.prefill[0]) == (len(prompt) >= length)
    assert int(forwards.commit[0]) == 0
    generated = states[-1].canvas[0, len(prompt) :][: case["params"]["gen_length"]]
    assert states[-1].canvas[0, : len(prompt)].tolist() == prompt
    got, want = generated.tolist(), case["output_ids"]
    assert got[: len(want)] == want
    assert len(want) == len(got) or want[-1] == case["eos_id"]


@pytest.mark.parametrize("length", [8, 32])
def test_unfolded_forwards_are_those_of_the_published_cache(model, directory, length):
    """Prefill, denoising and store forwards of 2.1 with a cache, in their order."""
    checked = 0
    for case in _cases(directory):
        if case["version"] == "2.0" or case["params"]["block_length"] != length:
            continue
        states, _ = _decode(model, case, fold=False)
        kinds = "p" * int(states[0].forwards.prefill[0])
        for before, after in itertools.pairwise(states):
            stored = after.forwards.commit[0] - before.forwards.commit[0]
            kinds += "s" if int(stored) else "d"
        assert kinds == case["cached_trace_kinds"]
        assert len(kinds) == case["nfe_cached"]
        folded, _ = _decode(model, case)
        np.testing.assert_array_equal(states[-1].canvas, folded[-1].canvas)
        checked += 1
    assert checked


@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_generate(model, directory, version):
    """The jitted loop returns the published tokens, up to the eos and without it."""
    reasons = set()
    for case in _cases(directory):
        prompt, new = case["prompt_ids"], case["params"]["gen_length"]
        # Of one bucket and block length, so that one program is compiled.
        if case["version"] != version or case["params"]["block_length"] != 32:
            continue
        if len(prompt) + new > 64:
            continue
        decoder, given = _arguments(case)
        [out] = generate(
            model, [prompt], decoder, max_new_tokens=new, stop_ids=[case["eos_id"]], **given
        )
        assert out.tokens == _cut(case["output_ids"], case["eos_id"])
        has_eos = case["output_ids"][-1] == case["eos_id"]
        assert out.finish_reason == ("eos" if has_eos else "length")
        assert out.stats.forwards["denoise"] <= case["nfe"]
        reasons.add(out.finish_reason)
    assert "length" in reasons


def test_a_row_of_a_batch_equals_the_prompt_alone(model, directory):
    """Prompts of all lengths, in blocks that every step may rewrite."""
    cases = [c for c in _cases(directory) if len(c["prompt_ids"]) <= 24][:8]
    prompts = [c["prompt_ids"][row:] for row, c in enumerate(cases)]
    assert len({len(prompt) % 8 for prompt in prompts}) > 3
    new = 20
    given = {"block_length": 8, "threshold": 0.1, "editing_threshold": 0.0}
    given = {**given, "max_post_steps": 7}
    settings = resolve_settings(DECODERS["edit"], model.config, given)
    settings = traced_settings(settings)

    def decode(prompts):
        inputs = decode_inputs(prompts, new, MASK_ID, PROMPT)
        state = _start(model.params, model.config, "edit", settings, inputs)
        step = functools.partial(_step, model.params, model.config, "edit", settings)
        return loop.run_in_python(lambda state: step(state)[0], state)[-1]

    together = decode(prompts)
    for row, prompt in enumerate(prompts):
        alone = decode([prompt])
        for leaf in ("canvas", "unmask_forward", "confidence", "forwards"):
            jax.tree.map(
                lambda ours, theirs, row=row: _close(ours[row], theirs[0]),
                getattr(together, leaf),
                getattr(alone, leaf),
            )
        answer = together.canvas[row, len(prompt) : len(prompt) + new].tolist()
        assert model.config.mask_id not in answer
        blocks = -(-(len(prompt) + new) // 8) - len(prompt) // 8
        assert int(together.forwards.denoise[row]) <= blocks * (8 + 7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_post_steps": -1}, "max_post_steps=-1 must be a number of at least 0"),
        ({"num_to_transfer": 0}, "num_to_transfer=0"),
        ({"editing_threshold": -0.5}, "editing_threshold=-0.5"),
        ({"editing_threshold": float("nan")}, "editing_threshold=nan"),
    ],
)
def test_wrong_settings_are_named(model, given, words):
    with pytest.raises(ValueError, match=words):
        resolve_settings(DECODERS["edit"], model.config, given)
