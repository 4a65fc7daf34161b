"""Decoder `s2d2`: its acceptance rule, its layouts, its switches, and what it promises."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    CONFIG,
    EOS,
    MASK,
    ScriptedModel,
    quick_compilation,
    random_table,
    tiny_model,
)

from dllm_jax import generate, layouts
from dllm_jax.decoding import DECODERS, acceptance, loop, routing, s2d2
from dllm_jax.decoding.acceptance import Noise
from dllm_jax.decoding.s2d2_settings import S2D2Settings
from dllm_jax.settings import presets, resolve_settings
from kernels_pallas import visible

SHIFTED = CONFIG.__class__(**{**vars(CONFIG), "logit_alignment": "shifted"})
# A few likely tokens, so that drafts are often right.
TABLE = random_table(5, {1: 5.0, 2: 4.5, 3: 4.0, EOS: -1.0})
LENGTHS = (3, 8, 21)  # of no, whole and broken blocks
NEW = 22
AUTOREGRESSIVE = {"acceptance": "greedy", "cache_ver": True, "draft_ver": True}
ROUTED = {
    "do_verify_policy": "score_hysteresis",
    "token_acceptance_estimator": "soft_renyi_2_entropy",
    "do_verify_score_type": "difference_static",
    "hysteresis_threshold_on": -0.3,
    "hysteresis_threshold_off": -0.6,
    "score_penalty_coef": 1.0,
    "temperature": 0.8,
}
SWITCHES = {
    "reuse": {"reuse_verified": True},
    "fold_verify": {"reuse_verified": True, "fold_verify": True},
    "bonus": {"reuse_verified": True, "bonus_token": True},
    "all": {"reuse_verified": True, "fold_verify": True, "bonus_token": True},
}


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def models():
    return {"same": ScriptedModel(TABLE, CONFIG), "shifted": ScriptedModel(TABLE, SHIFTED)}


def prompts_of(lengths) -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(0, EOS, length).tolist() for length in lengths]


def decode(model, decoder="s2d2", prompts=None, **given):
    prompts = prompts_of(LENGTHS) if prompts is None else prompts
    seed = given.pop("seed", [7, 8, 9][: len(prompts)])
    return generate(
        model, prompts, decoder, max_new_tokens=NEW, seed=seed, stop_ids=(), **given
    )


def tokens_of(outputs):
    return [out.tokens for out in outputs]


def forwards_of(outputs, kind="total"):
    return sum(out.stats.forwards[kind] for out in outputs)


# --- the acceptance rule ----------------------------------------------------------------


def judge_many(q, p, greedy_draft: bool, tempering=1.0, count=40_000):
    """What `judge` writes for independent drafts of one slot: counts `[V]`."""
    rng = np.random.default_rng(11)
    vocab = len(q)
    uniform = jnp.asarray(rng.random((4, count, 1)), jnp.float32)
    p_rows = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (count, 1, vocab))
    q_rows = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (count, 1, vocab))
    token = jnp.full((count, 1), np.argmax(p), jnp.int32)
    if not greedy_draft:
        token = s2d2.sampling.draw(p_rows, uniform[0])
    whole = jnp.ones((count, 1), bool)
    settings = S2D2Settings(ssd_ratio_tempering_factor=tempering)
    verdict = acceptance.judge(
        settings,
        vocab - 1,
        whole,
        whole,
        token,
        jnp.asarray(p, jnp.float32)[token],
        q_rows,
        lambda slot: p_rows[:, 0],
        Noise(uniform[0], uniform[1], uniform[2, :, 0], uniform[3, :, 0]),
    )
    assert bool(verdict.written.all())
    return np.bincount(np.asarray(verdict.token)[:, 0], minlength=vocab)


def chi_square(counts, expected):
    """Pearson's statistic; where nothing is expected nothing may be counted."""
    expected = expected * counts.sum()
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    return np.sum((counts - expected)[possible] ** 2 / expected[possible])


# Six tokens and the mask, which neither draws. 20.5 is passed once in 1000 at 5 degrees.
Q = np.array([0.05, 0.3, 0.2, 0.1, 0.25, 0.1, 0.0])
P = np.array([0.3, 0.05, 0.25, 0.1, 0.1, 0.2, 0.0])


def test_sampled_drafts_come_out_as_the_verifier_draws():
    assert chi_square(judge_many(Q, P, greedy_draft=False), Q) < 20.5


@pytest.mark.parametrize("tempering", [1.0, 0.5])
def test_greedy_drafts_come_out_as_the_rule_says(tempering):
    """Not as the verifier draws: the draft is not a draw from p (specs, S2D2 1.5)."""
    best = P.argmax()
    passes = min(1.0, (Q[best] / P[best]) ** tempering)
    left = np.maximum(Q - P, 0.0)
    expected = (1 - passes) * left / left.sum()
    expected[best] += passes
    counts = judge_many(Q, P, greedy_draft=True, tempering=tempering)
    assert chi_square(counts, expected) < 20.5
    assert chi_square(counts, Q) > 100


def test_judges_the_first_run_up_to_its_first_rejection():
    """One row a rule; token t of the draft has p = 0.5 and the q of the table."""
    q_of_draft = np.array([0.5, 0.45, 0.1, 0.4, 0.45, 0.3], np.float32)
    masked = np.array([1, 1, 1, 1, 0, 1], bool)[None]
    span = routing.first_run(jnp.asarray(masked))
    assert np.asarray(span).tolist() == [[True, True, True, True, False, False]]
    draft = np.array([0, 1, 2, 0, 1, 2], np.int32)
    q = np.zeros((1, 6, 5), np.float32)
    q[0, :, 3] = 1 - q_of_draft
    q[0, np.arange(6), draft] = q_of_draft
    p = np.full((1, 5), 0.125, np.float32)

    half = [jnp.full(shape, 0.5, jnp.float32) for shape in ((1, 6), (1, 6), (1,), (1,))]

    def verdict(**given):
        return acceptance.judge(
            S2D2Settings(**given),
            4,
            span,
            jnp.asarray(masked),
            jnp.asarray(draft[None]),
            jnp.full((1, 6), 0.5, jnp.float32),
            jnp.asarray(q),
            lambda slot: jnp.asarray(p),
            Noise(*half),
        )

    def written(result):
        return np.flatnonzero(np.asarray(result.written)[0]).tolist()

    result = verdict()  # ratios 1, 0.9, 0.2: the third is rejected and drawn again
    assert written(result) == [0, 1, 2]
    assert np.asarray(result.token)[0, :3].tolist() == [0, 1, 3]
    np.testing.assert_allclose(result.confidence[0, :3], [0.5, 0.5, 0.9])
    assert written(verdict(allow_resample=False)) == [0, 1, 2]
    kept = verdict(allow_resample=False)
    assert np.asarray(kept.token)[0].tolist() == draft.tolist()
    assert written(verdict(allow_resample=False, write_rejected=False)) == [0, 1]
    assert written(verdict(ssd_ratio_threshold=0.5)) == [0, 1, 2, 3]
    everywhere = {"ssd_ratio_threshold": 0.5, "ssd_threshold_all_spans": True}
    assert written(verdict(**everywhere)) == [0, 1, 2, 3, 5]
    assert written(verdict(ssd_ratio_tempering_factor=0.1)) == [0, 1, 2, 3]
    greedy = verdict(acceptance="greedy")  # q of the first is a tie, of the next is not
    assert written(greedy) == [0, 1]
    assert np.asarray(greedy.token)[0, :2].tolist() == [0, 3]


def test_draws_never_leave_the_support():
    weights = jnp.array([[0.0, 0.3, 0.0, 0.7, 0.0]], jnp.float32) * 1e-30
    for uniform, token in ((0.0, 1), (0.29, 1), (0.31, 3), (1 - 2**-24, 3)):
        draw = s2d2.sampling.draw(weights, jnp.array([uniform], jnp.float32))
        assert draw.tolist() == [token]
    p = jnp.array([[0.25, 0.75]], jnp.float32)
    np.testing.assert_array_equal(s2d2.sampling.residual(p, p), p)


# --- layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("until", [0, 8, 10, 12])
def test_layouts_see_what_the_specs_say(until):
    """A cached block, an open one up to `until` causal, its mask copies, and the next."""
    length, first = 4, 8
    cached = jnp.arange(4, 8, dtype=jnp.int32)[None]
    block = jnp.arange(first, first + length, dtype=jnp.int32)[None]
    copies = jnp.arange(first, first + length + 1, dtype=jnp.int32)[None]
    row = layouts.join(
        layouts.causal_then_blocks(cached, length, jnp.array([until and 100])),
        layouts.causal_then_blocks(block, length, jnp.array([until])),
        layouts.mask_copies(copies),
        layouts.causal_then_blocks(block + length, length, jnp.array([0])),
    )
    parts = [("cached", cached), ("block", block), ("copy", copies), ("next", block + 4)]
    names = [(name, int(p)) for name, positions in parts for p in positions[0]]
    query = layouts.TokenFields(*(x[0, :, None] for x in row))
    key = layouts.TokenFields(*(x[0, None] for x in row))
    got = np.asarray(visible(query, key))

    def sees(query, key):
        (kind, at), (other, where) = query, key
        if query == key:
            return True
        if at == where or other == "copy":
            return False
        if kind == "copy":
            # The specs verify with a causal block; otherwise only tokens that are.
            return other == "cached" or (other == "block" and where < min(at, until))
        if other != kind:
            order = ["cached", "block", "next"]
            return order.index(other) < order.index(kind)
        causal = at < (until and 100 if kind == "cached" else until)
        causal &= kind != "next"
        return where < at if causal else True

    for i, one in enumerate(names):
        for j, other in enumerate(names):
            if one == ("copy", first + length) and other[0] == "block":
                assert got[i, j]  # what follows the block sees all of it
            elif one[0] == "copy" and other[0] == "block" and other[1] >= until:
                continue  # no forward has copies of a block that is not causal
            else:
                assert got[i, j] == sees(one, other), (one, other)


# --- what is exact ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def autoregression(models):
    """Blocks of length 1; where logits are shifted these are anchors alone."""
    same = decode(models["same"], "ar")
    one = {"block_length": 1, "small_block_size": 1}
    shifted = decode(models["shifted"], "fast_dllm_v2", **one)
    return {"same": tokens_of(same), "shifted": tokens_of(shifted)}


@pytest.mark.parametrize("alignment", ["same", "shifted"])
def test_greedy_with_causal_caches_is_autoregression(models, autoregression, alignment):
    """If every draft is verified; otherwise it is not."""
    model, want = models[alignment], autoregression[alignment]
    always = decode(model, **AUTOREGRESSIVE)
    assert tokens_of(always) == want
    assert forwards_of(always, "verify") == forwards_of(always, "draft")
    sometimes = decode(model, **AUTOREGRESSIVE, min_ssd_span_length=4, threshold=0.3)
    assert tokens_of(sometimes) != want


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_are_exact_and_save_forwards(models, autoregression, switch):
    model = models["same"]
    plain = decode(model, **AUTOREGRESSIVE)
    switched = decode(model, **AUTOREGRESSIVE, **SWITCHES[switch])
    assert tokens_of(switched) == autoregression["same"]
    assert forwards_of(switched) < forwards_of(plain) or switch == "reuse"
    commits = decode(model, **AUTOREGRESSIVE, fold=False)
    reused = decode(model, **AUTOREGRESSIVE, fold=False, reuse_verified=True)
    assert tokens_of(commits) == tokens_of(reused)
    assert forwards_of(reused, "commit") < forwards_of(commits, "commit")
    assert forwards_of(reused, "verify") == forwards_of(commits, "verify")


def test_reuse_is_exact_where_logits_are_shifted(models, autoregression):
    model = models["shifted"]
    plain = decode(model, **AUTOREGRESSIVE)
    reused = decode(model, **AUTOREGRESSIVE, reuse_verified=True)
    assert tokens_of(reused) == autoregression["shifted"]
    assert forwards_of(reused, "commit") < forwards_of(plain, "commit")
    assert forwards_of(reused, "verify") == forwards_of(plain, "verify")


def test_draws_do_not_depend_on_how_forwards_are_folded(models):
    """Same drafts, verdicts and tokens; other forwards."""
    model = models["same"]
    causal = {**ROUTED, "cache_ver": True, "draft_ver": True}
    plain = decode(model, **causal)
    for given, forwards in (
        ({"fold": False, "early_stop": False}, "more"),
        ({"reuse_verified": True}, "as many"),  # storing rides on a draft as it is
        ({"reuse_verified": True, "fold_verify": True}, "fewer"),
    ):
        other = decode(model, **causal, **given)
        assert tokens_of(other) == tokens_of(plain), given
        assert [o.confidence for o in other] == [o.confidence for o in plain]
        difference = np.sign(forwards_of(other) - forwards_of(plain))
        assert {-1: "fewer", 0: "as many", 1: "more"}[difference] == forwards
    assert 0 < forwards_of(plain, "verify") < forwards_of(plain, "draft")


def test_folding_is_exact_where_tokens_are_edited(models):
    given = {"editing_threshold": 0.3, "max_post_steps": 3, "threshold": 0.5}
    folded, plain = (decode(models["same"], **given, fold=f) for f in (True, False))
    assert tokens_of(folded) == tokens_of(plain)
    assert forwards_of(folded) < forwards_of(plain)


# --- promises ---------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", ["same", "shifted"])
def test_a_row_of_a_batch_equals_the_prompt_alone(models, alignment):
    """Each row routes for itself: in some forwards one verifies while another drafts."""
    model, prompts = models[alignment], prompts_of(LENGTHS)
    together = decode(model, **ROUTED)
    for index, prompt in enumerate(prompts):
        [alone] = decode(model, prompts=[prompt], seed=[7 + index], **ROUTED)
        assert alone.tokens == together[index].tokens
        assert alone.unmask_forward == together[index].unmask_forward
        assert alone.stats.forwards == together[index].stats.forwards
        assert alone.stats.positions == together[index].stats.positions
        assert MASK not in alone.tokens and len(alone.tokens) == NEW


def test_the_loop_is_its_step_and_rows_want_different_forwards(models):
    model = models["same"]
    outputs = decode(model, **ROUTED)
    _, (state, params, settings, *_) = model.last_call
    step = jax.jit(functools.partial(s2d2.step, model.fns(params), settings))
    states = loop.run_in_python(step, state)
    for row, out in enumerate(outputs):
        start = LENGTHS[row]
        assert states[-1].canvas[row, start : start + NEW].tolist() == out.tokens
        forwards = jax.tree.map(lambda x, row=row: int(x[row]), vars(states[-1].forwards))
        assert forwards.pop("positions") == out.stats.positions
        assert {**forwards, "total": sum(forwards.values())} == out.stats.forwards
    active = np.array([s.verifying[:3] & ~s.done[:3] for s in states])
    drafting = np.array([~s.verifying[:3] & ~s.done[:3] for s in states])
    assert (active.any(axis=1) & drafting.any(axis=1)).any()


def test_one_trace_a_bucket(models):
    """Thresholds, cache_ver, draft_ver and reuse are values, not programs."""
    model = models["same"]
    decode(model, **ROUTED)
    before = model.num_traces
    changed = {**ROUTED, "hysteresis_threshold_on": 0.5, "temperature": 0.3}
    switched = {"cache_ver": True, "draft_ver": True, "reuse_verified": True}
    decode(model, prompts=prompts_of((9, 2, 30)), **changed, **switched)
    assert model.num_traces == before


def test_values_of_settings_are_one_trace(models):
    model = models["same"]
    decode(model, **ROUTED)
    _, (state, params, settings, *_) = model.last_call

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, settings, state):
        return s2d2.step(model.fns(params), settings, state)

    for threshold in (0.1, 0.5, 0.9):
        state = step(params, settings.replace(threshold=jnp.float32(threshold)), state)
    assert state.forwards.positions.sum() > 0


def test_stop_ids_and_the_mask_token(models):
    """A likely mask token is never written, and nothing follows a stop id."""
    model = models["same"]
    model.params, before = jnp.asarray(random_table(2, {MASK: 5.0, EOS: 3.0})), model.params
    try:
        outs = generate(
            model, prompts_of(LENGTHS), "s2d2", max_new_tokens=NEW, seed=[7, 8, 9], **ROUTED
        )
    finally:
        model.params = before
    assert all(MASK not in out.tokens and EOS not in out.tokens for out in outs)
    assert {"eos"} <= {out.finish_reason for out in outs}


def test_a_transformer_verifies_as_it_decodes_one_by_one():
    """Unlike with keys of blocks that saw themselves whole."""
    model, prompts = tiny_model(3), prompts_of((13,))
    want = decode(model, "ar", prompts)
    given = {**AUTOREGRESSIVE, **SWITCHES["bonus"]}
    assert tokens_of(decode(model, "s2d2", prompts, **given)) == tokens_of(want)
    given |= {"cache_ver": False, "reuse_verified": False}
    assert tokens_of(decode(model, "s2d2", prompts, **given)) != tokens_of(want)


# --- settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (CONFIG, {"do_verify_policy": "never"}, ["'never'", "contextual_bandit_ucb"]),
        (CONFIG, {"acceptance": "exact"}, ["acceptance='exact'", "stochastic, greedy"]),
        (
            CONFIG,
            {"do_verify_policy": "score_hysteresis", "hysteresis_threshold_off": 1.0},
            ["hysteresis_threshold_on=0.0", "above hysteresis_threshold_off=1.0"],
        ),
        (CONFIG, {"reuse_verified": True}, ["reuse_verified=True", "cache_ver=True"]),
        (CONFIG, {"fold_verify": True}, ["fold_verify=True", "reuse_verified=True"]),
        (CONFIG, {"leak_draft_mask": True}, ["leak_draft_mask=True", "draft_ver=True"]),
        (CONFIG, {"small_block_size": 2}, ["small_block_size=2", "shifted"]),
        (CONFIG, {"max_post_steps": 2}, ["max_post_steps=2", "editing_threshold < 1"]),
        (CONFIG, {"ucb_entropy_bins": 0}, ["ucb_entropy_bins=0", "at least 1"]),
        (CONFIG, {"ssd_ratio_tempering_factor": -1.0}, ["ssd_ratio_tempering_factor=-1.0"]),
        (CONFIG, {"num_to_transfer": 0}, ["num_to_transfer=0"]),
        (CONFIG, {"score_penalty_coef": float("nan")}, ["score_penalty_coef=nan"]),
        (CONFIG, {"top_p": 0.0}, ["top_p=0.0", "(0, 1]"]),
        (SHIFTED, {"bonus_token": True}, ["bonus_token=True", "logits in place"]),
        (SHIFTED, {"small_block_size": 3}, ["small_block_size=3", "block_length=4"]),
        (SHIFTED, {"editing_threshold": 0.9}, ["editing_threshold=0.9", "in place"]),
    ],
)
def test_wrong_settings_are_named(config, given, words):
    with pytest.raises(ValueError) as error:
        resolve_settings(DECODERS["s2d2"], config, given)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_published_configurations():
    """By name, with the estimator of all of them."""
    found = {name: given for name, given in presets().items() if "s2d2" in name}
    assert len(found) == 7
    for name, given in found.items():
        config = SHIFTED if name.startswith("fast") else CONFIG
        config = config.__class__(**{**vars(config), "block_length": 32})
        given.pop("decoder")
        settings = resolve_settings(DECODERS["s2d2"], config, given)
        assert settings.acceptance == "stochastic"
        if settings.do_verify_policy != "mask_span_length":
            assert settings.token_acceptance_estimator == "soft_entropy_negexp"
