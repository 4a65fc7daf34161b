"""Decoder `leap`: identities of its row, and its steps against an oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay import decode_inputs
from tiny import (
    CONFIG,
    MASK,
    ScriptedModel,
    quick_compilation,
    random_table,
    table_row,
    tiny_model,
    token_code,
)

from dllm_jax.decoding import leap
from dllm_jax.decoding.base import DECODERS
from dllm_jax.decoding.bidirectional import look, open_window
from dllm_jax.generate import generate, infill
from dllm_jax.settings import resolve_settings, traced_settings
from kernels_pallas import NEVER

SAME = dataclasses.replace(CONFIG, attention="bidirectional")
SHIFTED = dataclasses.replace(SAME, logit_alignment="shifted")
CAUSAL = dataclasses.replace(CONFIG, block_length=8)
# Two usual tokens, so that predictions are often the same in both contexts.
TABLE = random_table(6, {7: 4.0, 30: 3.0})
LENGTHS = (5, 33, 1, 18)
PERTURBATIONS = pytest.mark.parametrize("perturbation", leap.PERTURBATIONS)
ALIGNMENTS = pytest.mark.parametrize("config", [SAME, SHIFTED], ids=["same", "shifted"])


@pytest.fixture(scope="module")
def models():
    configs = {"same": SAME, "shifted": SHIFTED, "causal": CAUSAL}
    return {name: ScriptedModel(TABLE, config) for name, config in configs.items()}


def prompts_of(lengths) -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(0, 59, length).tolist() for length in lengths]


# --- the row, on a random transformer ---------------------------------------------------


def superposed(config, **given):
    """A state inside a block with some candidates, and what a forward makes of it."""
    model = tiny_model(2, config)
    fns = model.fns(model.params)
    settings = resolve_settings(
        DECODERS["leap"], config, {"block_length": 8, "num_candidates": 2, **given}
    )
    settings = traced_settings(settings)
    inputs = decode_inputs(prompts_of((6, 9)), 12, MASK, 16)
    state = leap.init(fns, settings, inputs, 24)
    rng = np.random.default_rng(3)
    window = open_window(fns, 8, state)
    decided = rng.random(window.index.shape) < 0.3
    tokens = rng.integers(0, 59, window.index.shape)
    canvas = np.array(state.canvas)
    for row, index in enumerate(np.asarray(window.index)):
        canvas[row, index[decided[row]]] = tokens[row, decided[row]]
    candidates = rng.integers(0, 59, state.candidates.shape)
    candidates[rng.random(candidates.shape) < 0.5] = MASK
    state = state.replace(
        canvas=jnp.asarray(canvas),
        candidates=jnp.asarray(candidates, jnp.int32),
        step=jnp.ones_like(state.step),
    )
    window = open_window(fns, 8, state)
    appended, informed = leap.superpose(fns, settings, state, window)
    return fns, settings, state, window, appended, np.asarray(informed)


def run(fns, state, window, appended):
    """Logits of the window and of its copies."""
    hidden, _ = look(fns, "none", state, window, appended)
    width = window.index.shape[1]
    return fns.logits(hidden[:, :width]), fns.logits(hidden[:, width : 2 * width])


@ALIGNMENTS
@PERTURBATIONS
def test_the_text_does_not_notice_what_is_appended(config, perturbation):
    with quick_compilation():
        fns, _, state, window, appended, _ = superposed(config, perturbation=perturbation)
        assert appended.valid.any()
        plain, _ = run(fns, state, window, None)
        original, copies = run(fns, state, window, appended)
    np.testing.assert_allclose(original, plain, atol=1e-5)
    masked = np.asarray(window.masked)
    assert np.abs(np.asarray(copies - plain))[masked].max() > 1e-3


@ALIGNMENTS
@PERTURBATIONS
def test_copies_without_candidates_are_the_text(config, perturbation):
    with quick_compilation():
        fns, settings, state, window, appended, _ = superposed(
            config, perturbation=perturbation
        )
        plain, _ = run(fns, state, window, None)
        masked = np.asarray(window.masked)
        if perturbation != "future":  # where it is candidates that hide masks
            # The copies stay, in the place of the text's masks or not.
            is_copy = np.arange(appended.tokens.shape[1]) < masked.shape[1]
            seen = jnp.where(is_copy, appended.fields.visible_from, NEVER)
            gone = appended._replace(fields=appended.fields._replace(visible_from=seen))
            _, copies = run(fns, state, window, gone)
            np.testing.assert_allclose(copies[masked], plain[masked], rtol=1e-5, atol=2e-5)
        none = state.replace(candidates=jnp.full_like(state.candidates, MASK))
        appended, informed = leap.superpose(fns, settings, none, window)
        assert not informed.any() and not appended.valid.any()
        _, copies = run(fns, state, window, appended)
    np.testing.assert_allclose(copies[masked], plain[masked], rtol=1e-5, atol=2e-5)


@ALIGNMENTS
def test_a_copy_is_blind_to_the_candidates_of_its_slot(config):
    """Wholly, where candidates see the text alone; else it hears of them from others."""
    given = {"candidates_see": "text"}
    with quick_compilation():
        fns, settings, state, window, appended, informed = superposed(config, **given)
        _, before = run(fns, state, window, appended)
        slot = int(np.flatnonzero(np.asarray(window.masked[0]) & informed[0])[1])
        other = state.candidates.at[0, slot].set(jnp.array([11, 12]))
        changed = state.replace(candidates=other)
        appended, _ = leap.superpose(fns, settings, changed, window)
        _, after = run(fns, state, window, appended)
    np.testing.assert_allclose(after[0, slot], before[0, slot], atol=1e-5)
    different = np.abs(np.asarray(after - before)).max(axis=-1) > 1e-3
    assert different[0].any() and not different[1].any()


# --- steps, in exact integers -----------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def oracle(shifted, settings, prompt, max_new_tokens):
    """Tokens, the forward and the rule of each, and the tokens run: specs, 1.2 and 1.3."""
    canvas = [*prompt, *[MASK] * max_new_tokens]
    when, why, forwards, ran = {}, {}, 0, 0
    for begin in range(len(prompt), len(canvas), settings.block_length):
        block = range(begin, min(begin + settings.block_length, len(canvas)))
        candidates: dict[int, list[int]] = {}
        while any(canvas[s] == MASK for s in block):
            masked = [s for s in block if canvas[s] == MASK]
            originals = [("O", s, s, t) for s, t in enumerate(canvas)]
            items = [
                ("R", s, max(s - shifted, 0), canvas[max(s - shifted, 0)]) for s in masked
            ]
            items += [("C", s, s, t) for s in masked for t in candidates.get(s, [])]
            if not any(candidates.values()):
                items = []
            copied = {item[2] for item in items if item[0] == "R"} & set(masked)

            def sees(query, key, candidates=candidates, masked=masked, copied=copied):
                if query is key:
                    return True
                if key[2] == query[2]:
                    return False
                if key[0] == "O":
                    if query[0] == "O" or settings.perturbation == "add":
                        return True
                    filled = settings.perturbation == "future" and candidates.get(key[1])
                    return key[1] not in copied and not filled
                if query[0] == "O":
                    return False
                if key[0] == "C":
                    return key[1] != query[1]
                if key[2] not in masked or settings.perturbation == "add":
                    return False
                return settings.perturbation == "replace" or not candidates.get(key[2])

            def logits(query, row=originals + items, sees=sees):
                seen = [token_code(k[3], k[2]) for k in row if sees(query, k)]
                return TABLE[table_row(sum(seen), query[2])].astype(np.float64)

            p = {s: softmax(logits(originals[max(s - shifted, 0)])) for s in masked}
            best = {s: int(p[s][:MASK].argmax()) for s in masked}
            confidence = {s: p[s][best[s]] for s in masked}
            early = set()
            for item in items:
                if item[0] == "R":
                    s = item[1]
                    informed = any(k[0] == "C" and sees(item, k) for k in items)
                    agree = int(logits(item)[:MASK].argmax()) == best[s]
                    if informed and agree and confidence[s] >= settings.tau:
                        early.add(s)
            base = {s for s in masked if confidence[s] >= settings.threshold}
            if not base | early:
                base = {max(masked, key=lambda s: (confidence[s], -s))}
            for s in base | early:
                canvas[s], when[s] = best[s], forwards
                why[s] = "confidence_threshold" if s in base else "early"
            candidates = {
                s: [
                    t
                    for t in np.argsort(-p[s][:MASK], kind="stable")[
                        : settings.num_candidates
                    ].tolist()
                    if p[s][t] >= settings.eta
                ]
                for s in masked
                if s not in base | early
            }
            forwards, ran = forwards + 1, ran + len(canvas) + _appended(items, shifted)
    return canvas[len(prompt) :], when, why, ran


def _appended(items, shifted) -> int:
    """Each candidate is there twice where logits are shifted."""
    return sum(1 + shifted * (item[0] == "C") for item in items)


@pytest.mark.parametrize(
    ("name", "perturbation", "count"),
    [
        ("same", "add", 2),
        ("same", "replace", 1),
        ("same", "future", 3),
        ("shifted", "add", 2),
        ("shifted", "replace", 2),
        ("shifted", "future", 1),
    ],
)
def test_decodes_as_the_oracle_does(models, name, perturbation, count):
    """In a batch of mixed lengths: tokens, their forwards and rules, how much was run."""
    given = {
        "block_length": 6,
        "eta": 0.15,
        "tau": 0.35,
        "threshold": 0.8,
        "perturbation": perturbation,
        "num_candidates": count,
    }
    model, prompts = models[name], prompts_of(LENGTHS)
    settings = resolve_settings(DECODERS["leap"], model.config, given)
    with quick_compilation():
        outs = generate(
            model,
            prompts,
            "leap",
            max_new_tokens=20,
            stop_ids=(),
            trace=True,
            **given,
        )
    early = 0
    for prompt, out in zip(prompts, outs, strict=True):
        tokens, when, why, ran = oracle(name == "shifted", settings, prompt, 20)
        assert out.tokens == tokens
        assert {r["slot"]: r["forward"] for r in out.trace} == when
        assert {r["slot"]: r["rule"] for r in out.trace} == why
        assert out.stats.positions == ran
        assert out.stats.cache == "none (exact)"
        early += out.stats.more["early"]
        assert out.stats.more["early"] == sum(rule == "early" for rule in why.values())
    assert early > 2


@pytest.mark.parametrize(
    ("name", "cache", "base"),
    [
        ("same", "none", {"threshold": 0.6}),
        ("same", "prefix", {"threshold": 0.6}),
        ("shifted", "dual", {"threshold": 0.6}),
        ("shifted", "none", {"entropy_threshold": 1.0}),
        ("same", "dual", {"remasking_strategy": "margin", "margin_threshold": 0.5}),
    ],
)
def test_a_tau_that_nothing_reaches_is_the_base_rule(models, name, cache, base):
    """With confidence: tau = phi. The kept keys are those without anything appended."""
    shared = {"max_new_tokens": 18, "block_length": 6, "cache": cache, "stop_ids": ()}
    run = functools.partial(generate, models[name], prompts_of(LENGTHS), **shared, **base)
    with quick_compilation():
        outs = run(decoder="leap", tau=base.get("threshold", 1.1), eta=0.1)
        state = models[name].state
        expected = run(decoder="fast_dllm")
        other = models[name].state
    for one, out in zip(outs, expected, strict=True):
        assert (one.tokens, one.unmask_forward) == (out.tokens, out.unmask_forward)
        assert one.stats.forwards == out.stats.forwards
        assert one.stats.cache == out.stats.cache
        assert one.stats.more == {"early": 0}
    jax.tree.map(np.testing.assert_array_equal, state.cache, other.cache)


@pytest.mark.parametrize("fold", [True, False])
def test_block_causal_models(models, fold):
    """tau = phi is decoder `block`, and its cache."""
    model = models["causal"]
    run = functools.partial(
        generate, model, prompts_of(LENGTHS), max_new_tokens=24, fold=fold, threshold=0.7
    )
    with quick_compilation():
        expected, block = run(decoder="block"), model.state
        outs, state = run(decoder="leap", tau=0.7, eta=0.1), model.state
    for one, out in zip(outs, expected, strict=True):
        assert (one.tokens, one.unmask_forward) == (out.tokens, out.unmask_forward)
        assert one.stats.forwards == out.stats.forwards
        assert one.stats.cache == "exact"
        assert one.stats.positions > out.stats.positions
    np.testing.assert_array_equal(state.cache.length, block.cache.length)
    for row, length in enumerate(np.asarray(block.cache.length)):
        (k, fields), (block_k, block_fields) = (
            (s.cache.k[:, row, :, :length], s.cache.fields[row, :, :length])
            for s in (state, block)
        )
        np.testing.assert_array_equal(k, block_k)
        np.testing.assert_array_equal(fields, block_fields)


def test_a_block_of_the_whole_text_is_a_bidirectional_canvas(models):
    """What the copies see in a block-causal row: all 32 slots are one block."""
    [prompt] = prompts_of((12,))
    given = {"max_new_tokens": 20, "tau": 0.3, "threshold": 0.8, "stop_ids": ()}
    with quick_compilation():
        [one] = generate(models["causal"], prompt, "leap", block_length=32, **given)
        [other] = generate(models["same"], prompt, "leap", block_length=20, **given)
    assert (one.tokens, one.unmask_forward) == (other.tokens, other.unmask_forward)
    assert one.stats.more == other.stats.more
    assert one.stats.more["early"] > 0


@pytest.mark.parametrize("name", ["same", "shifted", "causal"])
def test_a_row_gets_what_its_prompt_gets_alone(models, name):
    given = {"decoder": "leap", "max_new_tokens": 16, "block_length": 8, "tau": 0.4}
    model, prompts = models[name], prompts_of((3, 40, 17))
    with quick_compilation():
        together = generate(model, prompts, **given)
        for prompt, out in zip(prompts, together, strict=True):
            [alone] = generate(model, prompt, **given)
            assert (alone.tokens, alone.unmask_forward) == (out.tokens, out.unmask_forward)
            assert alone.stats.positions == out.stats.positions
            assert alone.stats.more == out.stats.more


def test_without_the_test_tau_is_a_threshold(models):
    """At 0 it unmasks a block at once; nothing is appended."""
    given = {"max_new_tokens": 18, "block_length": 6, "stop_ids": ()}
    run = functools.partial(generate, models["same"], prompts_of(LENGTHS), **given)
    with quick_compilation():
        for out in run(decoder="leap", tau=0.0, consistency=False):
            assert out.unmask_forward == [0] * 6 + [1] * 6 + [2] * 6
        outs = run(decoder="leap", tau=0.5, consistency=False)
        expected = run(decoder="fast_dllm", threshold=0.5, cache="none")
    for one, out in zip(outs, expected, strict=True):
        assert (one.tokens, one.unmask_forward) == (out.tokens, out.unmask_forward)
        assert one.stats.positions == out.stats.positions


def test_infilling_and_values_are_traced(models):
    model = models["same"]
    ids = np.random.default_rng(2).integers(0, 59, 40)
    holes = [5, 6, 7, 9, 20, 21, 22, 23, 24, 25, 39]
    ids[holes] = MASK
    with quick_compilation():
        [out] = infill(model, [ids.tolist()], "leap", block_length=8, tau=0.4)
        before = model.num_traces
        infill(
            model, [ids.tolist()], "leap", block_length=8, tau=0.3, eta=0.1, threshold=0.8
        )
    assert model.num_traces == before
    kept = np.delete(np.arange(40), holes)
    assert MASK not in out.tokens
    np.testing.assert_array_equal(np.array(out.tokens)[kept], ids[kept])


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (SAME, {"eta": 1.5}, ["eta=1.5", "[0, 1]"]),
        (SAME, {"tau": float("nan")}, ["tau=nan"]),
        (SAME, {"perturbation": "some"}, ["'some'", "add, replace, future"]),
        (SAME, {"candidates_see": "nothing"}, ["'nothing'", "text, all"]),
        (SAME, {"num_candidates": 0}, ["num_candidates=0", "at least 1"]),
        (SAME, {"num_candidates": 64}, ["num_candidates=64", "64"]),
        (SAME, {"early_confidence": "most"}, ["'most'", "original, perturbed, least"]),
        (SAME, {"temperature": 0.5}, ["temperature=0.5", "must be 0"]),
        (SAME, {"strategy": "low_confidence"}, ["'low_confidence'", "margin"]),
        (SAME, {"threshold": 0.5, "factor": 1.0}, ["threshold=0.5", "'factor'"]),
        (SAME, {"denoising_steps": 4}, ["denoising_steps=4", "no setting"]),
        (SAME, {"cache": "dual", "block_length": 0}, ["block_length"]),
        (CAUSAL, {"cache": "dual"}, ["cache='dual'", "exact"]),
        (
            dataclasses.replace(CONFIG, logit_alignment="shifted"),
            {},
            ["logit_alignment='shifted'"],
        ),
    ],
)
def test_wrong_settings_are_named(config, given, words):
    with pytest.raises(ValueError) as error:
        resolve_settings(DECODERS["leap"], config, given)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_defaults():
    def settings(config, **given):
        return resolve_settings(DECODERS["leap"], config, given)

    assert (settings(SAME).block_length, settings(SAME).cache) == (32, "none")
    assert settings(CAUSAL).block_length == 8
    assert settings(SAME).remasking_strategy == "confidence_threshold"
    rule = settings(SAME, entropy_threshold=0.4).remasking_strategy
    assert rule == "entropy_threshold"
