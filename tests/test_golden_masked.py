"""LLaDA and Dream against logits and decode traces of the published code."""

import dataclasses
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
from dllm_jax.decoding import DECODERS, loop, masked
from dllm_jax.model import Model, load, model_fns
from dllm_jax.settings import resolve_settings, traced_settings

_FAMILIES = ("llada", "dream")
_ENGINES = ("llada_generate", "dream_diffusion_generate")
_CANVAS, _BATCH = 64, 3  # of all cases, so that few programs are compiled
_PROMPT_WITH_MASKS = "mask_token_inside_prompt"
# Published forwards that unmask nothing, and what the front door is tested with.
_SPARING = (
    "gen_g16_b16_s40_more_steps_than_tokens",
    "entropy_n16_s32_more_steps",
    "maskgit_plus_n24_s24",
)
_GENERATE = ("gen_g32_b8_s16", "entropy_n24_s10")


def _cases(directory, kind):
    """Pairs of a family and one of its cases."""
    for family in _FAMILIES:
        path = directory / family / "cases.json"
        if path.exists():
            cases = json.loads(path.read_text())
            for case in cases[kind]:
                yield family, {**case, "special_ids": cases["special_ids"]}


def pytest_generate_tests(metafunc):
    directory = metafunc.config.getoption("--golden-dir")
    forward = list(_cases(directory, "forward"))
    decode = [c for c in _cases(directory, "decode") if c[1]["engine"] in _ENGINES]
    kinds = {
        "forward_case": forward,
        "decode_case": [c for c in decode if c[1]["name"] != _PROMPT_WITH_MASKS],
        "prompt_with_masks": [c for c in decode if c[1]["name"] == _PROMPT_WITH_MASKS],
        "sparing_case": [c for c in decode if c[1]["name"] in _SPARING],
        "generate_case": [c for c in decode if c[1]["name"] in _GENERATE],
    }
    for name in kinds.keys() & set(metafunc.fixturenames):
        ids = [f"{family}-{case['name']}" for family, case in kinds[name]]
        metafunc.parametrize(name, kinds[name], ids=ids)


@pytest.fixture(scope="module")
def models(golden_dir):
    return functools.cache(lambda family: load(str(golden_dir / family), dtype="float32"))


@pytest.fixture(scope="module")
def arrays(golden_dir):
    return functools.cache(lambda f: load_file(golden_dir / f / "arrays.safetensors"))


@functools.partial(jax.jit, static_argnames="config")
def _forward(params, config, tokens, valid):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    fields = layouts.bidirectional(position, valid)
    hidden = transformer.forward(params, config, tokens, fields).hidden
    return transformer.logits(params, hidden)


def test_forward_logits(models, arrays, forward_case):
    """Raw logits of the valid positions; what pads a row is dropped, then put behind."""
    family, case = forward_case
    model, stored, name = models(family), arrays(family), case["name"]
    ids, want = stored[f"fwd.{name}.input_ids"], stored[f"fwd.{name}.logits"]
    kept = stored.get(f"fwd.{name}.attention_mask", np.ones_like(ids)).astype(bool)
    tokens = np.full((_BATCH, _CANVAS), model.config.mask_id, np.int32)
    valid = np.zeros((_BATCH, _CANVAS), bool)
    for row, keep in enumerate(kept):
        tokens[row, : keep.sum()] = ids[row, keep]
        valid[row, : keep.sum()] = True
    got = np.asarray(_forward(model.params, model.config, tokens, valid))
    for row, keep in enumerate(kept):
        np.testing.assert_allclose(
            got[row, : keep.sum()], want[row, keep], atol=1e-4, rtol=0
        )


def _settings(case):
    """What the published arguments are called here."""
    given = case["settings"]
    if case["engine"] == "dream_diffusion_generate":
        named = {"steps": "denoising_steps", "alg": "remasking_strategy"}
        names = ("steps", "eps", "temperature", "top_p", "top_k", "alg", "alg_temp")
        return {named.get(n, n): given[n] for n in names if given[n] is not None}
    blocks = given["gen_length"] // given["block_length"]
    names = ("temperature", "cfg_scale", "logits_eos_inf", "confidence_eos_eot_inf")
    return {
        "block_length": given["block_length"] if blocks > 1 else 0,
        "denoising_steps": given["steps"] // blocks,
        "remasking_strategy": given["remasking"],
        **{name: given[name] for name in names},
    }


def _new_tokens(case) -> int:
    settings = case["settings"]
    return settings.get("gen_length") or settings["max_new_tokens"]


def _config(model, case):
    """The model's config, with the end tokens that the published code has as literals."""
    ids = case["special_ids"]
    eos_ids = (ids["eos"], ids["eot"]) if "eot" in ids else model.config.eos_ids
    return dataclasses.replace(model.config, eos_ids=eos_ids)


def _prompts(case) -> list[list[int]]:
    """Each row's own prompt, without what pads it on the left."""
    kept = case["attention_mask"] or [[1] * len(p) for p in case["prompt_ids"]]
    return [
        [token for token, keep in zip(prompt, keeps, strict=True) if keep]
        for prompt, keeps in zip(case["prompt_ids"], kept, strict=True)
    ]


@functools.partial(jax.jit, static_argnames="config")
def _step(params, config, settings, state):
    """A step, and the score of every slot of its window."""
    scores = []

    def spy(*args):
        proposal, score = propose(*args)
        scores.append(score)
        return proposal, score

    propose, masked.propose = masked.propose, spy
    try:
        after = masked.step(model_fns(params, config), settings, state)
    finally:
        masked.propose = propose
    width = scores[0].shape[1]
    start = jnp.minimum(state.cursor, state.canvas.shape[1] - width)
    whole = jnp.full(state.canvas.shape, jnp.nan)
    return after, jax.vmap(
        lambda row, new, first: jax.lax.dynamic_update_slice(row, new, (first,))
    )(whole, scores[0], start)


def _decode(model, case, prompts, **more):
    """The states before and after each forward, and the scores in each."""
    decoder = DECODERS["masked"]
    config = _config(model, case)
    settings = resolve_settings(decoder, config, {**_settings(case), **more})
    settings = traced_settings(settings)
    inputs = decode_inputs(
        prompts, _new_tokens(case), config.mask_id, _CANVAS, batch=_BATCH
    )
    state = decoder.init(model_fns(model.params, config), settings, inputs, _CANVAS)
    scores = []

    def step(state):
        with quick_compilation():
            state, score = _step(model.params, config, settings, state)
        scores.append(np.asarray(score))
        return state

    return loop.run_in_python(step, state), scores


def test_decode_trace(models, arrays, decode_case):
    """The canvas after every forward, and by what the unmasked slots were ranked."""
    family, case = decode_case
    prompts = _prompts(case)
    states, scores = _decode(models(family), case, prompts, early_stop=False)
    trace = arrays(family)[f"trace.{case['name']}"]
    assert len(states) - 1 == case["nfe"] == len(trace)
    padding = [
        len(p) - len(own) for p, own in zip(case["prompt_ids"], prompts, strict=True)
    ]
    for number, want in enumerate(trace):
        canvas = np.asarray(states[number + 1].canvas)
        for row, (pad, ids) in enumerate(zip(padding, want, strict=True)):
            assert canvas[row, : len(ids) - pad].tolist() == ids[pad:].tolist(), number
    for number, row, position, token, score in case["reveals"]:
        slot = position - padding[row]
        assert states[-1].canvas[row, slot] == token
        assert states[-1].unmask_forward[row, slot] == number
        np.testing.assert_allclose(scores[number][row, slot], score, atol=1e-4, rtol=0)
        if case["settings"].get("alg") not in ("topk_margin", "entropy"):
            confidence = states[-1].confidence[row, slot]
            np.testing.assert_allclose(confidence, score, atol=1e-4, rtol=0)
    assert len(case["reveals"]) == len(prompts) * _new_tokens(case)
    for row in range(len(prompts)):
        assert states[-1].forwards.denoise[row] == case["nfe"]


def test_early_stop_leaves_out_what_unmasks_nothing(models, arrays, sparing_case):
    """The same canvases, each once."""
    family, case = sparing_case
    states, _ = _decode(models(family), case, _prompts(case))
    spared = case["forwards_that_revealed_nothing"]
    assert len(states) - 1 == case["nfe"] - spared
    assert states[-1].forwards.denoise[0] == case["nfe"] - spared
    length = len(case["output_ids"][0])
    trace = arrays(family)[f"trace.{case['name']}"][:, 0]
    want = dict.fromkeys(tuple(ids.tolist()) for ids in trace)
    got = dict.fromkeys(tuple(s.canvas[0, :length].tolist()) for s in states)
    assert list(got)[1:] == [ids for ids in want if ids != next(iter(got))]


def test_masks_in_a_prompt_are_no_gaps(models, arrays, prompt_with_masks):
    """A decoder only writes what it generates (specs, LLaDA 2).

    The published loop ranks every masked slot before the block's end, so that masks in a
    prompt are replaced, at the expense of the block's quota: two masks stay in its
    output. Up to the step in which it first does so, both must agree.
    """
    family, case = prompt_with_masks
    [prompt] = case["prompt_ids"]
    states, scores = _decode(models(family), case, [prompt], early_stop=False)
    mask_id, final = case["special_ids"]["mask"], states[-1]
    length = len(case["output_ids"][0])
    assert mask_id in prompt and final.canvas[0, : len(prompt)].tolist() == prompt
    assert mask_id not in final.canvas[0, len(prompt) : length].tolist()
    assert mask_id in case["output_ids"][0][len(prompt) :]
    trace = arrays(family)[f"trace.{case['name']}"][:, 0]
    into_prompt = [n for n, _, position, _, _ in case["reveals"] if position < len(prompt)]
    assert into_prompt
    for number in range(min(into_prompt)):
        canvas = states[number + 1].canvas[0, :length]
        assert canvas.tolist() == trace[number].tolist()
    for number, _, position, _, score in case["reveals"]:
        if number < min(into_prompt):
            np.testing.assert_allclose(scores[number][0, position], score, atol=1e-4)


def test_generate(models, generate_case):
    """The jitted loop returns what the published code does, up to the first end token."""
    family, case = generate_case
    model: Model = models(family)
    [prompt], [ids] = case["prompt_ids"], case["output_ids"]
    request = {"max_new_tokens": _new_tokens(case), **_settings(case)}
    [out] = generate(model, [prompt], "masked", **request, stop_ids=())
    assert out.tokens == ids[len(prompt) :]
    assert out.finish_reason == "length"
    assert out.stats.forwards["total"] == out.stats.forwards["denoise"] == case["nfe"]
    assert out.stats.positions == case["nfe"] * len(ids)
    assert out.stats.generated_tokens == len(out.tokens)
    # Any token can be declared an end.
    stop = ids[len(prompt) + 5]
    [cut] = generate(model, [prompt], "masked", **request, stop_ids=[stop])
    assert cut.tokens == out.tokens[: out.tokens.index(stop)]
    assert cut.finish_reason == "eos"
    assert cut.stats.forwards["total"] <= case["nfe"]
