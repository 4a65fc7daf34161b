"""Fast-dLLM v2 against logits and decode traces of the published code.

Data: tests/golden/fast_dllm_v2. How the cases are read here:

- The published decoder generates whole blocks, `max_new_tokens // block_size` of them,
  and one token more: the anchor behind the last. Traces are decoded with exactly that
  number of new tokens; `generate` returns `max_new_tokens` at most.
- A prompt of exactly one block is never fed by the published code. That case
  (`reference_bug`) is not compared; the prompt is treated as any other here.
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

from dllm_jax import generate, layouts, transformer
from dllm_jax.cache import append, init_cache
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.decoding import fast_dllm_v2 as decoder
from dllm_jax.model import Model, load, model_fns
from dllm_jax.sampling import propose
from dllm_jax.settings import resolve_settings, traced_settings

MASK_ID = 253  # no config says it
PROMPT, CANVAS = 96, 160  # one shape for all cases, so that few programs are compiled


def _read(directory, name):
    path = directory / name
    return json.loads(path.read_text()) if path.exists() else []


def _cases(directory):
    cases = _read(directory, "cases.json")
    cases = cases["cases"] if isinstance(cases, dict) else cases
    return [case for case in cases if "reference_bug" not in case]


def pytest_generate_tests(metafunc):
    directory = metafunc.config.getoption("--golden-dir") / "fast_dllm_v2"
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
    return golden_dir / "fast_dllm_v2"


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
    tokens = jnp.zeros((1, width), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
    numbers = (jnp.int32(x) for x in (start, len(ids), block))
    logits, *fresh = _forward(model.params, model.config, tokens, *numbers, cache)
    return logits[: len(ids)], fresh


def _close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_forward_logits(model, arrays, forward_case):
    """Raw logits: alone, over a cached prompt, and of a sub-block over the block cache."""
    name, block = forward_case["name"], forward_case["block"]
    if forward_case["kind"] == "nocache":
        logits, _ = _run(model, arrays[f"{name}_input_ids"], block)
        _close(logits, arrays[f"{name}_logits"])
        return
    prompt = arrays[f"{name}_prompt_ids"]
    start = len(prompt)
    _, fresh = _run(model, prompt, block)
    cache = init_cache(model.config, 1, CANVAS, jnp.float32)
    cache = append(cache, *fresh, jnp.array([start], jnp.int32))
    ids = arrays[f"{name}_block_ids"]
    logits, fresh = _run(model, ids, block, start, cache, width=32)
    _close(logits, arrays[f"{name}_block_logits"])

    cache = append(cache, *fresh, jnp.array([0], jnp.int32))
    offset, size = forward_case["sub_offset"], forward_case["sub_len"]
    given = {"block_length": block, "small_block_size": size}
    settings = resolve_settings(DECODERS["fast_dllm_v2"], model.config, given)
    seen = decoder.seen_by_sub_block(
        cache, settings, jnp.array([True]), jnp.array([offset], jnp.int32)
    )
    ids = arrays[f"{name}_sub_ids"]
    logits, _ = _run(model, ids, block, start + offset, seen, width=32)
    _close(logits, arrays[f"{name}_sub_logits"])


def _given(case):
    params = case["params"]
    return {
        "block_length": params["block_size"],
        "small_block_size": params["small_block_size"],
        "threshold": params["threshold"],
        "use_block_cache": params["use_block_cache"],
    }


def _published_new_tokens(case):
    length, prompt = case["params"]["block_size"], len(case["prompt_ids"])
    blocks = case["params"]["max_new_tokens"] // length
    return (prompt // length + blocks) * length + 1 - prompt


@functools.partial(jax.jit, static_argnames="config")
def _start(params, config, settings, inputs):
    return decoder.init(model_fns(params, config), settings, inputs, CANVAS)


@functools.partial(jax.jit, static_argnames="config")
def _step(params, config, settings, state):
    """What was wanted, the state after the step, and the proposals for its logits."""
    asked_for = []

    def logits(hidden):
        asked_for.append(fns.logits(hidden))
        return asked_for[-1]

    fns = model_fns(params, config)
    want = decoder.wanted(fns, settings, state)
    state = decoder.step(fns._replace(logits=logits), settings, state)
    [logit] = asked_for
    return want, state, propose(logit, config.mask_id)


def _decode(model, given, prompts, max_new_tokens, stop_ids=()):
    """Every state of the decoder; of each step also what was wanted and proposed."""
    settings = resolve_settings(DECODERS["fast_dllm_v2"], model.config, given)
    settings = traced_settings(settings)
    steps = []

    def step(state):
        want, state, proposal = _step(model.params, model.config, settings, state)
        steps.append((want, proposal))
        return state

    # The start does not look at these settings, so that it is compiled once a length.
    plain = {"small_block_size": settings.block_length, "use_block_cache": False}
    start = _start(
        model.params,
        model.config,
        settings.replace(**plain),
        decode_inputs(prompts, max_new_tokens, MASK_ID, PROMPT, stop_ids),
    )
    return loop.run_in_python(step, start), steps


def test_decode_trace(model, decode_case):
    """Every forward: its kind, what was fed, what was proposed, with which confidence."""
    case, params = decode_case, decode_case["params"]
    length, small = params["block_size"], params["small_block_size"]
    prompt, new = case["prompt_ids"], _published_new_tokens(case)
    states, steps = _decode(model, _given(case), [prompt], new, [case["stop_token"]])
    trace = case["trace"]
    counts = dict.fromkeys(case["nfe_by_kind"], 0)
    assert int(states[0].forwards.prefill[0]) == case["nfe_by_kind"]["prefill"]
    if len(prompt) >= length:
        first, *trace = trace
        counts["prefill"] += 1
        stored = len(prompt) // length * length
        assert (first["k"], first["past"], first["in"]) == ("prefill", 0, prompt[:stored])
        if stored == len(prompt):
            assert int(states[0].canvas[0, stored]) == first["next_ar"]
    assert len(steps) == len(trace)
    for before, after, (want, proposal), entry in zip(
        states, states[1:], steps, trace, strict=False
    ):
        kind, start = entry["k"], int(before.cursor[0])
        counts[kind] += 1
        whole = "full_bc" if params["use_block_cache"] else "full"
        wanted = [x for x in ("commit", "window", "sub_block") if getattr(want, x)[0]]
        assert wanted == [{"commit": "commit", whole: "window", "sub": "sub_block"}[kind]]
        assert start == entry["past"] == int(before.cache.length[0])
        offset = int(want.offset[0])
        ran = (offset, small) if kind == "sub" else (0, length)
        window = np.asarray(before.canvas[0, start : start + length])
        assert window[ran[0] : sum(ran)].tolist() == entry["in"]
        assert after.forwards.positions[0] - before.forwards.positions[0] == ran[1]
        if kind == "commit":
            assert int(after.canvas[0, start + length]) == entry["next_ar"]
            continue
        assert offset == entry.get("off", offset)
        assert proposal.token[0].tolist() == entry["x0"]
        _close(proposal.confidence[0], entry["conf"])
        slots = slice(start + offset, start + offset + small)
        number = int(before.forwards.denoise[0])
        written = np.asarray(after.unmask_forward[0, slots]) == number
        written &= np.asarray(before.canvas[0, slots]) == model.config.mask_id
        assert written.any()
        recorded = np.asarray(after.confidence[0, slots])
        _close(recorded[written], np.array(entry["conf"])[written])

    assert counts == case["nfe_by_kind"]
    forwards, want = states[-1].forwards, case["output_ids"]
    assert int(forwards.commit[0]) == counts["commit"]
    total = forwards.prefill[0] + forwards.denoise[0] + forwards.commit[0]
    assert int(total) == case["nfe"]
    assert states[-1].canvas[0, : len(want)].tolist() == want
    assert len(want) == len(prompt) + new or want[-1] == case["stop_token"]


def test_a_prompt_of_one_block_is_seen(model, directory):
    """Stored, with an anchor from its last logits; a token asked for needs nothing more."""
    [case] = [
        case for case in _read(directory, "cases.json")["cases"] if "reference_bug" in case
    ]
    prompt = case["prompt_ids"]
    assert len(prompt) == case["params"]["block_size"]
    logits, _ = _run(model, prompt, len(prompt))
    anchor = int(jnp.argmax(logits[-1]))
    states, steps = _decode(model, _given(case), [prompt], 1)
    assert not steps
    assert states[0].canvas[0, : len(prompt) + 1].tolist() == [*prompt, anchor]
    states, steps = _decode(model, _given(case), [prompt], 9, [anchor])
    assert not steps
    states, steps = _decode(model, _given(case), [prompt], 9)
    assert int(states[-1].forwards.prefill[0]) == 1
    answer = states[-1].canvas[0, len(prompt) : len(prompt) + 9].tolist()
    assert answer[0] == anchor
    assert model.config.mask_id not in answer


def test_a_row_of_a_batch_equals_the_prompt_alone(model, directory):
    """Also where neighbours want other forwards at the same time."""
    prompts = [c["prompt_ids"] for c in _cases(directory)][:8]
    prompts = [prompt[: len(prompt) - row] for row, prompt in enumerate(prompts)]
    prompts[1], new = prompts[1][:1], 30
    assert {len(prompt) < 16 for prompt in prompts} == {True, False}
    given = {
        "block_length": 16,
        "small_block_size": 4,
        "threshold": 0.6,
        "use_block_cache": True,
    }
    states, steps = _decode(model, given, prompts, new)
    kinds = np.array([want[:3] for want, _ in steps]).any(axis=-1)  # [steps, 3]
    assert kinds.all(axis=-1).any(), "all three forwards at once"
    assert (~kinds[:, :2].any(axis=-1)).any(), "sub-blocks alone"
    for row, prompt in enumerate(prompts):
        [*_, alone], _ = _decode(model, given, [prompt], new)
        for leaf in ("canvas", "unmask_forward", "confidence", "forwards"):
            jax.tree.map(
                lambda ours, theirs, row=row: _close(ours[row], theirs[0]),
                getattr(states[-1], leaf),
                getattr(alone, leaf),
            )
        canvas = states[-1].canvas[row].tolist()
        assert canvas[: len(prompt)] == prompt
        assert model.config.mask_id not in canvas[: len(prompt) + new]


@pytest.mark.parametrize("use_block_cache", [False, True], ids=["exact", "block_cache"])
def test_generate(model, directory, use_block_cache):
    """The jitted loop returns the published tokens, but never more than asked for."""
    checked = 0
    for case in _cases(directory):
        given, prompt = _given(case), case["prompt_ids"]
        # Of one program.
        if given["small_block_size"] != 8 or case["params"]["max_new_tokens"] != 64:
            continue
        if given["use_block_cache"] != use_block_cache:
            continue
        stop = case["stop_token"]
        [out] = generate(
            model, [prompt], "fast_dllm_v2", max_new_tokens=64, stop_ids=[stop], **given
        )
        want = case["output_ids"][len(prompt) :][:64]
        if stop in want:
            assert out.tokens == want[: want.index(stop)]
            assert out.finish_reason == "eos"
            assert out.stats.forwards["total"] == case["nfe"]
        else:
            # Whole blocks after a partial one can be less than was asked for.
            assert out.tokens[: len(want)] == want
            assert len(out.tokens) == 64 or out.finish_reason == "eos"
        assert model.config.mask_id not in out.tokens
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"small_block_size": 6},
            "small_block_size=6 must be a divisor of block_length=32",
        ),
        ({"small_block_size": 0}, "small_block_size=0"),
        ({"threshold": float("nan")}, "threshold=nan"),
    ],
)
def test_wrong_settings_are_named(model, given, words):
    with pytest.raises(ValueError, match=words):
        resolve_settings(DECODERS["fast_dllm_v2"], model.config, given)


def test_models_with_logits_in_place_are_refused(model):
    config = ModelConfig(**{**vars(model.config), "logit_alignment": "same"})
    with pytest.raises(ValueError, match="logit_alignment='same'"):
        resolve_settings(DECODERS["fast_dllm_v2"], config, {})
