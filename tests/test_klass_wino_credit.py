"""Decoders that remember: `klass`, `wino` and `credit` beyond the released traces."""

import dataclasses
import functools

import numpy as np
import pytest
from tiny import CONFIG, MASK, ScriptedModel, random_table

from dllm_jax.decoding.base import DECODERS
from dllm_jax.generate import generate, infill
from dllm_jax.settings import resolve_settings

SAME = dataclasses.replace(CONFIG, attention="bidirectional")
SHIFTED = dataclasses.replace(SAME, logit_alignment="shifted")
GIVEN = {
    "klass": {"block_length": 6, "threshold": 0.3, "kl_threshold": 5.0},
    "wino": {"block_length": 8, "threshold": 0.2, "threshold_back": 0.6},
    "credit": {"block_length": 6, "threshold": 0.5},
}
every_decoder = pytest.mark.parametrize("decoder", GIVEN)


@pytest.fixture(scope="module")
def model():
    return ScriptedModel(random_table(6), SAME)


def prompts_of(*lengths) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, MASK, length).tolist() for length in lengths]


@every_decoder
def test_promises(model, decoder):
    """No mask is left, every slot has its forward, a row needs at most one a slot."""
    run = functools.partial(generate, model, decoder=decoder, **GIVEN[decoder])
    prompts = prompts_of(3, 40, 17)
    for prompt, out in zip(prompts, run(prompts, max_new_tokens=21), strict=True):
        assert MASK not in out.tokens and -1 not in out.unmask_forward
        assert out.stats.forwards["total"] == out.stats.forwards["denoise"] <= 21
        [alone] = run([prompt], max_new_tokens=21)
        assert (alone.tokens, alone.unmask_forward) == (out.tokens, out.unmask_forward)
        assert alone.stats.positions == out.stats.positions
        assert out.stats.cache == "none (exact)"


@every_decoder
def test_draws_repeat_and_depend_on_the_seed(model, decoder):
    run = functools.partial(
        generate,
        model,
        prompts_of(9, 9),
        decoder,
        max_new_tokens=16,
        temperature=1.5,
        **GIVEN[decoder],
    )
    first = [out.tokens for out in run(seed=1)]
    assert first == [out.tokens for out in run(seed=1)]
    assert first != [out.tokens for out in run(seed=2)]


@every_decoder
def test_infilling_leaves_the_given_tokens(model, decoder):
    """WINO takes back what it wrote, never what it was given."""
    ids = np.random.default_rng(2).integers(0, MASK, 40)
    holes = [5, 6, 7, 9, 20, 21, 22, 23, 24, 25, 39]
    ids[holes] = MASK
    [out] = infill(model, [ids.tolist()], decoder, **GIVEN[decoder])
    kept = np.delete(np.arange(40), holes)
    assert MASK not in out.tokens
    np.testing.assert_array_equal(np.array(out.tokens)[kept], ids[kept])


def test_wino_takes_tokens_back(model):
    """With a test that nothing passes, tokens are written again in a later forward."""
    prompts = prompts_of(6)
    wide = {"block_length": 16, "threshold": 0.05, "threshold_back": 1.1}
    [out] = generate(model, prompts, "wino", max_new_tokens=16, stop_ids=(), **wide)
    [trusting] = generate(
        model,
        prompts,
        "wino",
        max_new_tokens=16,
        stop_ids=(),
        **{**wide, "threshold_back": 0.0},
    )
    assert trusting.stats.forwards["total"] < out.stats.forwards["total"] <= 16


@every_decoder
def test_the_trace_names_the_rules(model, decoder):
    [out] = generate(
        model, prompts_of(5), decoder, max_new_tokens=14, trace=True, **GIVEN[decoder]
    )
    names = {"klass": {"stable", "quota"}, "wino": {"wide_in"}, "credit": {"credit"}}
    assert {record["rule"] for record in out.trace} == names[decoder]


def test_credit_off_is_the_threshold_rule(model):
    prompts = prompts_of(4, 11)
    request = {"max_new_tokens": 18, "block_length": 6, "cache": "dual", "threshold": 0.6}
    credit = generate(model, prompts, "credit", alpha=0.0, **request)
    plain = generate(model, prompts, "fast_dllm", **request)
    for one, other in zip(credit, plain, strict=True):
        assert one.tokens == other.tokens
        assert one.unmask_forward == other.unmask_forward
        assert one.stats.cache == other.stats.cache == "approximate (dual)"


@pytest.mark.parametrize(
    ("decoder", "config", "given", "words"),
    [
        ("klass", CONFIG, {}, ["attention='block_causal'"]),
        ("klass", SAME, {"kl_history_length": 0}, ["kl_history_length=0", "at least 1"]),
        ("klass", SAME, {"unmask_strategy": "some"}, ["'some'", "all, max_conf, min_kl"]),
        ("klass", SAME, {"kl_threshold": -0.1}, ["kl_threshold=-0.1"]),
        ("wino", SHIFTED, {}, ["logit_alignment='shifted'"]),
        ("wino", SAME, {"threshold_back": -1.0}, ["threshold_back=-1.0"]),
        ("credit", SAME, {"decay": 1.5}, ["decay=1.5", "[0, 1]"]),
        ("credit", SHIFTED, {"cache": "dual"}, ["cache='dual'", "'shifted'"]),
        ("credit", SAME, {"cache": "dual", "block_length": 0}, ["block_length"]),
        ("credit", CONFIG, {}, ["attention='block_causal'"]),
    ],
)
def test_wrong_settings_are_named(decoder, config, given, words):
    with pytest.raises(ValueError) as error:
        resolve_settings(DECODERS[decoder], config, given)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
