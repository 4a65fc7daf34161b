"""SimSD against decode traces, logits and rejection cases of the released code.

The released loop has other ways to fill a block after a rejection than `truncate`; in them
what is emitted is not what is committed, so this library does not have them. Its cacheless
loop lays blocks out from the prompt's end and re-drafts partial blocks as blocks of their
own; the cached loop's way is taken here. Cases of either are not replayed.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay import decode_inputs

from dllm_jax import layouts, sampling, transformer
from dllm_jax.cache import append, init_cache
from dllm_jax.decoding import DECODERS, acceptance, paired_verification, simsd
from dllm_jax.model import load, model_fns
from dllm_jax.settings import resolve_settings, traced_settings

MASK_ID = 127
_PROMPT, _CANVAS = 64, 128  # of all cases, so that few programs are compiled
_FOLDED = ("c00_B4_trunc", "c13_B16_dynamic_0.4")


def _replayed(case) -> bool:
    cfg = case["cfg"]
    cached = case["entry"] == "spec_kv_cache"
    return cached and cfg["partial_block_fill"] == "truncate" and not cfg["eos_min_prob"]


def pytest_generate_tests(metafunc):
    directory = metafunc.config.getoption("--golden-dir") / "simsd"

    def read(name):
        return json.loads((directory / f"{name}.json").read_text())

    kinds = {
        "case": lambda: [c for c in read("cases") if _replayed(c)],
        "logits_case": lambda: [c for c in read("logits") if c["name"].startswith("L")],
        "draft_case": lambda: [c for c in read("logits") if c["name"].startswith("Dr")],
        "unit": lambda: read("mrs_units"),
    }
    for name in kinds.keys() & set(metafunc.fixturenames):
        found = kinds[name]()
        metafunc.parametrize(name, found, ids=[c["name"] for c in found])


@pytest.fixture(scope="module")
def models(golden_dir):
    return {
        name: load(str(golden_dir / "simsd" / name), dtype="float32", mask_id=MASK_ID)
        for name in ("draft", "target")
    }


@pytest.fixture(scope="module")
def arrays(golden_dir):
    def read(name):
        with np.load(golden_dir / "simsd" / f"{name}.npz") as stored:
            return dict(stored)

    return functools.cache(read)


def _fns(params, configs):
    target, draft = map(model_fns, params, configs)
    return target._replace(draft=draft)


@functools.partial(jax.jit, static_argnames="configs")
def _start(params, configs, settings, inputs):
    return simsd.init(_fns(params, configs), settings, inputs, _CANVAS)


@functools.partial(jax.jit, static_argnames="configs")
def _step(params, configs, settings, state):
    return simsd.step(_fns(params, configs), settings, state)


def _settings(case, **more):
    cfg = case["cfg"]
    return {
        "block_length": cfg["block_length"],
        "denoising_steps": cfg["denoising_steps"],
        "remasking_strategy": cfg["remasking_strategy"],
        "threshold": cfg["confidence_threshold"],
        "draft_steps_per_block": max(cfg["draft_steps_per_block"], 0),
        **more,
    }


def _rounds(models, case, fold):
    """The states before and after each verification."""
    target, draft = models["target"], models[case["draft"]]
    params, configs = (target.params, draft.params), (target.config, draft.config)
    given = _settings(case, fold=fold)
    settings = resolve_settings(DECODERS["simsd"], target.config, given)
    settings = traced_settings(settings)
    stop_ids = tuple(case["eos_ids"] or ())
    inputs = decode_inputs([case["prompt_ids"]], 100, MASK_ID, _PROMPT, stop_ids)
    state, found = _start(params, configs, settings, inputs), []
    while not state.done[0] and len(found) < len(case["rounds"]):
        after = _step(params, configs, settings, state)
        if after.draft.rounds[0] > state.draft.rounds[0]:
            found.append((state, after))
        state = after
    return found


def _check_rounds(models, case, fold):
    rounds = _rounds(models, case, fold)
    assert len(rounds) == len(case["rounds"])
    length = case["cfg"]["block_length"]
    for (before, after), want in zip(rounds, case["rounds"], strict=True):
        cursor = int(before.cursor[0])
        slots = slice(cursor, cursor + length)
        was = np.asarray(before.canvas[0, slots])
        masked = was == MASK_ID
        order = np.asarray(before.draft.order[0])[masked]
        drafted = order >= 0
        assert cursor == want["ctx_aligned"]
        assert was[~masked].tolist() == want["leftover"]
        assert order.tolist() == want["step_map"]
        token = np.asarray(before.draft.token[0])[masked]
        assert token[drafted].tolist() == np.array(want["draft_ids"])[drafted].tolist()
        now = np.asarray(after.canvas[0, slots])[masked]
        assert now[now != MASK_ID].tolist() == want["final_ids"]
        new = (now != MASK_ID) & (now == np.array(want["target_argmax"]))
        probability = np.asarray(after.confidence[0, slots])[masked]
        agreed = new & (now == np.array(want["draft_ids"]))
        np.testing.assert_allclose(
            probability[agreed],
            np.array(want["target_prob_of_draft"], float)[agreed],
            atol=1e-4,
        )
    return rounds[-1][1]


def test_rounds(models, case):
    """What is drafted, in which order, what is committed, and how often each model ran."""
    final = _check_rounds(models, case, fold=False)
    forwards, published = final.forwards, case["forwards"]
    assert forwards.verify[0] == published["target"]["verify"]
    assert forwards.prefill[0] == published["target"].get("prefill", 0)
    # The block that a run ends with is not stored; the published loop does so.
    stored = published["target"].get("extend", 0)
    assert stored - 1 <= forwards.commit[0] <= stored
    work = published["draft"]["denoise"] + published["draft"].get("prefill", 0)
    assert forwards.draft[0] - forwards.commit[0] == work
    stats, draft = case["stats"], final.draft
    assert draft.accepted.sum() == stats["total_real_drafted_accepted"]
    if case["cfg"]["draft_steps_per_block"] < 0:
        assert draft.examined.sum() == stats["total_real_drafted_seen"]


def test_pipelined_cases(golden_dir):
    """The released pipelined loop says what its plain one does, mostly replayed above."""
    directory = golden_dir / "simsd"
    cases = json.loads((directory / "cases.json").read_text())
    plain = {c["name"]: c["output_ids"] for c in cases}
    replayed = {c["name"] for c in cases if _replayed(c)}
    pipelined = json.loads((directory / "pipeline.json").read_text())
    assert len(pipelined) == 24
    assert sum(case["base_case"] in replayed for case in pipelined) >= 12
    for case in pipelined:
        assert case["output_ids"] == plain[case["base_case"]], case


@pytest.mark.parametrize("name", _FOLDED)
def test_folding_changes_nothing(models, golden_dir, name):
    """Stored with the next forward of each model, blocks cost no forward of their own."""
    cases = json.loads((golden_dir / "simsd" / "cases.json").read_text())
    [case] = [case for case in cases if case["name"] == name]
    final = _check_rounds(models, case, fold=True)
    published = case["forwards"]
    assert final.forwards.commit[0] == 0
    work = published["draft"]["denoise"] + published["draft"].get("prefill", 0)
    assert final.forwards.draft[0] == work


def test_several_blocks_in_one_verification(models, golden_dir):
    """K = 4: the first round, before the cacheless loop's way with partial blocks shows."""
    cases = json.loads((golden_dir / "simsd" / "cases.json").read_text())
    [case] = [case for case in cases if case["name"] == "c29_B4_nocache_K4"]
    target, draft = models["target"], models["draft"]
    params, configs = (target.params, draft.params), (target.config, draft.config)
    count, length = case["cfg"]["K"], case["cfg"]["block_length"]
    given = _settings(case, draft_blocks=count)
    settings = resolve_settings(DECODERS["simsd"], target.config, given)
    settings = traced_settings(settings)
    inputs = decode_inputs([case["prompt_ids"]], 64, MASK_ID, _PROMPT)
    before, rounds = _start(params, configs, settings, inputs), case["rounds"][:count]
    while not before.draft.ready[0]:
        before = _step(params, configs, settings, before)
    after = _step(params, configs, settings, before)
    drafted = [token for r in rounds for token in r["draft_ids"]]
    assert before.draft.token[0].tolist() == drafted
    order = [step for r in rounds for step in r["step_map"]]
    assert before.draft.order[0].tolist() == order
    final = [token for r in rounds for token in r.get("final_ids", [])]
    begin = len(case["prompt_ids"])
    window = after.canvas[0, begin : begin + count * length].tolist()
    assert window == final + [MASK_ID] * (len(window) - len(final))
    assert after.cursor[0] == begin + len(final) // length * length


@functools.partial(jax.jit, static_argnames="config")
def _row_logits(params, config, prompt, stored, length, tokens, fields):
    """Logits of a row over the cache of a prompt's first `stored` tokens."""
    row = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None]
    prefix = layouts.block_causal(row, length, valid=row < stored)
    out = transformer.forward(params, config, prompt, prefix)
    cache = init_cache(config, 1, 128, jnp.float32)
    cache = append(cache, out.k, out.v, prefix, jnp.reshape(stored, (1,)))
    hidden = transformer.forward(params, config, tokens, fields, cache).hidden
    return transformer.logits(params, hidden)


def _logits(model, case, tokens, fields):
    width, size = 64, len(tokens)
    prompt = np.zeros((1, _PROMPT), np.int32)
    prompt[0, : case["ctx_aligned"]] = case["prompt"][: case["ctx_aligned"]]
    row = np.zeros((1, width), np.int32)
    row[0, :size] = tokens
    got = _row_logits(
        model.params,
        model.config,
        prompt,
        jnp.int32(case["ctx_aligned"]),
        jnp.int32(case["B"]),
        row,
        fields,
    )
    return np.asarray(got[0, :size])


def _padded(values, width=64):
    return np.pad(np.array(values, np.int32), (0, width - len(values)))[None]


def test_paired_logits(models, arrays, logits_case):
    """Of every row: known, drafted, and the mask copies that judge."""
    case, stored = logits_case, arrays("logits")
    known, data = case["leftover"], case["draft_ids"]
    begin = case["ctx_aligned"] + np.arange(len(known) + len(data))
    tokens = [*known, *data, *[MASK_ID] * len(data)]
    role = [layouts.KNOWN] * len(known) + [layouts.DATA] * len(data)
    role += [layouts.MASK] * len(data)
    order = [0] * len(known) + case["step_map"] * 2
    fields = layouts.simsd_pairs(
        _padded([*begin, *begin[len(known) :]]),
        _padded(role),
        _padded([case["ctx_aligned"] // case["B"]] * len(role)),
        _padded(order),
        case["B"],
        np.arange(64)[None] < len(role),
    )
    got = _logits(models["target"], case, tokens, fields)
    want = stored[f"{case['name']}/cache_logits"]
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_exact_states_are_sequential_denoising(models, arrays, logits_case):
    """Each slot's logits in the state it was drafted in, all states in one row.

    These are the step-by-step logits; paired logits differ from them by up to 0.9.
    """
    case, stored = logits_case, arrays("logits")
    known, data, order = case["leftover"], case["draft_ids"], np.array(case["step_map"])
    moments = np.unique(order)
    rows = [[*known, *np.where(order < t, data, MASK_ID)] for t in moments]
    width = len(rows[0])
    slots = case["ctx_aligned"] + np.arange(width)
    fields = layouts.separate_states(
        np.tile(slots, len(rows))[None].astype(np.int32),
        np.repeat(np.arange(len(rows)), width)[None].astype(np.int32),
        np.array([[case["ctx_aligned"] // case["B"]]], np.int32),
    )
    model = models["target"]
    prompt = np.zeros((1, _PROMPT), np.int32)
    prompt[0, : case["ctx_aligned"]] = case["prompt"][: case["ctx_aligned"]]
    got = _row_logits(
        model.params,
        model.config,
        prompt,
        jnp.int32(case["ctx_aligned"]),
        jnp.int32(case["B"]),
        np.array(rows, np.int32).reshape(1, -1),
        fields,
    )
    got = np.asarray(got[0]).reshape(len(rows), width, -1)[:, len(known) :]
    at = np.searchsorted(moments, order)
    want = stored[f"{case['name']}/sequential_denoise_logits"]
    np.testing.assert_allclose(got[at, np.arange(len(data))], want, atol=1e-4, rtol=0)


def test_drafter_logits(models, arrays, draft_case):
    case = draft_case
    length, known = case["B"], case["leftover"]
    tokens = [*known, *[MASK_ID] * (length - len(known))]
    position = _padded(case["ctx_aligned"] + np.arange(length))
    fields = layouts.block_causal(position, length, np.arange(64)[None] < length)
    got = _logits(models["draft"], case, tokens, fields)
    want = arrays("logits")[f"{case['name']}/draft_logits_step1"]
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_rejection_rule(arrays, unit):
    """Accepted prefix and residual of the released rule, with its own uniforms."""
    stored, name = arrays("mrs_units"), unit["name"]
    p, q = stored[f"{name}/draft_probs"], stored[f"{name}/target_probs"]
    token = np.array(unit["draft_ids"], np.int32)
    uniform = np.zeros(len(token), np.float32)
    uniform[: len(unit["uniforms"])] = unit["uniforms"][: len(token)]
    agrees = paired_verification.judge_by_ratio(token, p, q, uniform)
    examined = np.ones((1, len(token)), bool)
    accepted, first = acceptance.accept_prefix(agrees[None], examined)
    assert accepted.sum() == unit["n_accepted"]
    assert first.any() == (unit["n_accepted"] < len(token))
    if f"{name}/residual" in stored:
        left = paired_verification.residual_of_rejection(token, p, q)[unit["n_accepted"]]
        left = np.asarray(left / left.sum())
        np.testing.assert_allclose(left, stored[f"{name}/residual"], atol=1e-6)
        assert left.argmax() == unit["bonus_token_if_argmax_of_residual"]
    greedy = unit["greedy_match"]
    same = jnp.asarray(token == q.argmax(axis=-1))[None]
    accepted, first = acceptance.accept_prefix(same, examined)
    assert accepted.sum() == greedy["n_accepted"]
    bonus = q.argmax(axis=-1)[np.asarray(first[0])].tolist()
    assert [*token[np.asarray(accepted[0])], *bonus] == greedy["final_ids"]


def test_sampled_rounds_are_distributed_as_released(models, golden_dir):
    """First round of 1024 runs: how many tokens are accepted, and the first token."""
    from dllm_jax import generate

    case = json.loads((golden_dir / "simsd" / "sampling.json").read_text())[0]
    rows = 1024
    outs = generate(
        models["target"],
        [case["prompt_ids"]] * rows,
        "simsd",
        draft_model=models["draft"],
        max_new_tokens=4,
        block_length=4,
        temperature=1.0,
        stop_ids=(),
    )
    first = np.bincount([out.tokens[0] for out in outs], minlength=128) / rows
    counts = np.zeros(128)
    for token, count in case["position_token_counts"][0]:
        counts[token] = count
    # The expected distance of two samples of this size is about 0.05.
    assert np.abs(first - counts / counts.sum()).sum() / 2 < 0.1
    alone = np.mean([max(out.unmask_forward) == out.unmask_forward[0] for out in outs])
    whole = dict((tuple(k), n) for k, n in case["per_block_accepted_counts"])
    share = (whole[(4,)] + whole[(3,)]) / case["n_runs"]
    assert abs(alone - share) < 0.06


def test_distribution_is_what_is_sampled():
    """Temperature, top-k and top-p as `sampling.propose` draws."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 50)), jnp.float32)
    knobs = sampling.SamplingKnobs(jnp.float32(0.5), jnp.int32(5), jnp.float32(0.9))
    share = sampling.distribution(logits, knobs, True, True)
    assert 1 <= (share > 0).sum() <= 5
    np.testing.assert_allclose(share.sum(), 1.0, atol=1e-6)
