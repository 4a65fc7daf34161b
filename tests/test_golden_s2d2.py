"""S2D2 against traces of the published code, three families (tests/golden/s2d2).

Every forward is replayed with the recorded uniform numbers: its kind, what it was fed,
what it proposed and how the draft was routed and judged, and its logits where they were
recorded. Cases that differ in their routing alone run in one program, which decides by
the policies of all of them and takes the case's own. What differs from the published
runs, and how the cases are read here:

- Fallback `entropy_bounded` is broken as published (specs, S2D2 1.10): with a quota of one
  token a step it takes the leftmost mask, which is strategy `sequential`.
- LLaDA2's prefill adds a 0/1 mask to the scores, so that prompts are not block-causal.
  That attention is written out below, for the one case whose prompt has two blocks.
- Fast-dLLM v2 generates whole blocks and the token behind them; it forgets a prompt of
  exactly one block, which is the same as decoding after an empty prompt.
- Draws called argmax ("constant" noise) become a uniform number that hits that token.
- The published residual may draw the mask, ours never does. A uniform number is moved to
  where it hits the same token once the mask's share is taken out.
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

from dllm_jax import generate, transformer
from dllm_jax.decoding import DECODERS, routing, s2d2
from dllm_jax.decoding.acceptance import Noise
from dllm_jax.model import Model, load, model_fns
from dllm_jax.sampling import SamplingKnobs, distribution
from dllm_jax.settings import resolve_settings, traced_settings
from kernels_pallas import NEVER

MASK_ID = 126
PROMPT, CANVAS = 64, 128  # one shape for all cases, so that few programs are compiled
FAMILIES = {"sdar": ".", "fast_dllm_v2": "fast_dllm_v2", "llada2": "llada2"}

_RENAMED = {
    "block_size": "block_length",
    "confidence_threshold": "threshold",
}
# Arguments of the published functions that have no counterpart.
_ELSEWHERE = {
    "mask_id",
    "gen_length",
    "max_new_tokens",
    "stopping_criteria_idx",
    "stop_token",
    "eos_id",
    "eos_early_stop",
    "trim_stop_tokens",
    "use_block_cache",
    "use_ssd_cache",
    "use_attention_mask",
    "eb_threshold",
}

# Settings that shape a program, by which policies read them.
_OF_SCORES = ("do_verify_score_type", "token_acceptance_estimator")
_OF_BANDIT = (
    "ucb_span_length_bins",
    "ucb_block_progress_bins",
    "ucb_entropy_bins",
    "ucb_entropy_source",
)
# A router with room for the buckets of all cases.
_ROOMY = {
    "do_verify_policy": "contextual_bandit_ucb",
    "ucb_span_length_bins": 3,
    "ucb_block_progress_bins": 3,
    "ucb_entropy_bins": 3,
}


def _cases(root):
    found = []
    for family, folder in FAMILIES.items():
        path = root / "s2d2" / folder / "cases.json"
        cases = json.loads(path.read_text())["cases"] if path.exists() else []
        found += [{**case, "family": family} for case in cases]
    return found


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = _cases(metafunc.config.getoption("--golden-dir"))
        cases.sort(key=lambda case: case["family"])
        metafunc.parametrize("case", cases, ids=[c["name"] for c in cases])


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    with quick_compilation():
        yield


@functools.cache
def _load(directory) -> Model:
    return load(str(directory), dtype="float32", mask_id=MASK_ID)


@functools.cache
def _arrays(directory):
    return load_file(directory / "arrays.safetensors")


@pytest.fixture
def directory(golden_dir, case):
    return golden_dir / "s2d2" / FAMILIES[case["family"]]


def _given(case):
    """The settings by our names."""
    given = {
        _RENAMED.get(name, name): value
        for name, value in case["settings"].items()
        if value is not None and name not in _ELSEWHERE
    }
    if given.get("remasking_strategy") == "entropy_bounded":
        given["remasking_strategy"] = "sequential"
    leaks = case["family"] == "sdar" and given["draft_ver"] and not given["cache_ver"]
    return {
        **given,
        "leak_draft_mask": leaks,
        "fold": False,
        "early_stop": case["family"] != "sdar",
    }


def _request(case):
    """Prompt, number of new tokens, and stop ids."""
    prompt, settings = case["prompt_ids"], case["settings"]
    if case["family"] == "sdar":
        return prompt, settings["gen_length"], settings["stopping_criteria_idx"]
    if case["family"] == "llada2":
        return prompt, settings["gen_length"], [settings["eos_id"]]
    if case["name"] == "f_prompt_equals_block_bug_sb8":
        prompt = []
    new = len(case["output_ids"]) - len(case["prompt_ids"])
    length = settings["block_size"]
    blocks = settings["max_new_tokens"] // length
    new = (len(prompt) // length + blocks) * length + 1 - len(prompt)
    return prompt, new, [settings["stop_token"]]


def _routing_of(case):
    """What the case's policy reads of the settings that shape a program."""
    given = _given(case)
    bandit = given["do_verify_policy"] == "contextual_bandit_ucb"
    by_score = given["do_verify_policy"].startswith("score")
    read = {"do_verify_policy": True, **dict.fromkeys(_OF_SCORES, by_score)}
    read |= dict.fromkeys(_OF_BANDIT, bandit)
    return tuple((name, given[name]) for name, is_read in read.items() if is_read)


@functools.cache
def _programs(root):
    """Of each case by name: its settings, and the routings of all cases of its program."""
    resolved, routings = {}, {}
    for case in _cases(root):
        model = _load(root / "s2d2" / FAMILIES[case["family"]])
        settings = resolve_settings(DECODERS["s2d2"], model.config, _given(case))
        unread = dict.fromkeys(("do_verify_policy", *_OF_SCORES, *_OF_BANDIT))
        settings = traced_settings(settings.replace(**unread))
        program = case["family"], jax.tree.structure(settings)
        found = routings.setdefault(program, [])
        if _routing_of(case) not in found:
            found.append(_routing_of(case))
        resolved[case["name"]] = settings, program
    return {
        name: (settings, tuple(routings[program]))
        for name, (settings, program) in resolved.items()
    }


@functools.partial(jax.jit, static_argnames="config")
def _start(params, config, settings, inputs):
    return s2d2.init(model_fns(params, config), settings, inputs, CANVAS)


class _Routing:
    """Module `routing` under several settings at once, of which `chosen` counts."""

    def __init__(self, routings, chosen):
        self._routings, self._chosen = routings, chosen

    def __getattr__(self, name):
        return getattr(routing, name)

    def _among(self, function, settings, *args):
        results = [function(settings.replace(**dict(r)), *args) for r in self._routings]
        return jax.tree.map(lambda *x: jnp.stack(x)[self._chosen], *results)

    def decide(self, settings, *args):
        return self._among(routing.decide, settings, *args)

    def learn(self, settings, *args):
        return self._among(routing.learn, settings, *args)


@functools.partial(jax.jit, static_argnames=("config", "routings"))
def _step(params, config, settings, routings, chosen, state, noise):
    """The state after a step, and the logits that it asked for."""
    asked_for = []

    def logits(hidden):
        asked_for.append(fns.logits(hidden))
        return asked_for[-1]

    fns = model_fns(params, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s2d2, "routing", _Routing(routings, chosen))
        state = s2d2.step(fns._replace(logits=logits), settings, state, lambda *_: noise)
    return state, asked_for[0]


def _close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def _additive_attention(length):
    """Attention whose scores get a 1 where a token may look, and else a 0."""

    def attend(q, k, v, packed, cache, layer, implementation):
        assert cache is None
        fields = packed.fields
        query, key = fields.position[:, :, None], fields.position[:, None]
        bias = (query // length >= key // length).astype(jnp.float32)
        padding = fields.visible_from[:, None] == NEVER
        bias = jnp.where(padding, -jnp.inf, bias)
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("btnh,bnsh->bnts", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(scores + bias[:, None], axis=-1)
        return jnp.einsum("bnts,bnsh->btnh", weights, v)

    return attend


def _forwards_of(case):
    """(kind, entry) of every forward."""
    kinds = {"prefill": "P", "store": "C"}
    for entry in case["trace"]:
        yield kinds.get(entry["t"], "D"), entry
        if "verify" in entry:
            yield "V", entry


def _noise(kind, entry, span, residual):
    """The recorded numbers of a forward, or those that hit what was recorded."""
    slots = len(span)
    draft, accept = np.zeros((2, 1, slots), np.float32)
    again = 0.0
    if kind == "D" and "draft_u" in entry:
        draft[0] = entry["draft_u"]
    if kind == "V":
        accept[0, span] = entry["verify"]["u"]
        redrawn = entry["verify"].get("resample")
        if redrawn:
            again = _uniform(redrawn, residual(entry["verify"]["first_reject"]))
    as_row = functools.partial(jnp.full, (1,), dtype=jnp.float32)
    return Noise(jnp.asarray(draft), jnp.asarray(accept), as_row(again), as_row(0.5))


def _residual(settings, logits, span, number):
    """What the `number`-th token of the span is drawn from if it is rejected."""
    knobs = SamplingKnobs(settings.temperature, settings.top_k, settings.top_p)
    slot = np.flatnonzero(span)[number]
    filters = settings.filtered, settings.filter_draft
    q, p = (
        np.float64(distribution(x[0, slot], knobs, settings.tempered, filtered))
        for x, filtered in zip(logits, filters, strict=True)
    )
    return np.maximum(q - p, 0)


def _uniform(redrawn, weights):
    """The number that draws the recorded token where the mask cannot be drawn."""
    token, up_to = redrawn["token"], np.cumsum(weights)
    if redrawn.get("u") is not None:
        target = redrawn["u"] * up_to[-1]
        assert np.argmax(up_to > target) == token
    else:
        assert weights.argmax() == token
        target = up_to[token] - weights[token] / 2
    if token > MASK_ID:
        target -= weights[MASK_ID]
    return target / (up_to[-1] - weights[MASK_ID])


def test_trace(golden_dir, directory, case, monkeypatch):
    """Every forward: kind, input, logits, draft, routing, verdict."""
    model, arrays = _load(directory), _arrays(directory)
    prompt, new, stop_ids = _request(case)
    settings, routings = _programs(golden_dir)[case["name"]]
    chosen = jnp.int32(routings.index(_routing_of(case)))
    length, small = settings.block_length, settings.small_block_size
    shifted = case["family"] == "fast_dllm_v2"
    inputs = decode_inputs([prompt], new, MASK_ID, PROMPT, (*stop_ids, -1)[:2])
    start = _start
    if case["name"] == "l_two_prefill_blocks_additive_mask_b8":
        monkeypatch.setattr(transformer, "attend", _additive_attention(length))
        start = _start.__wrapped__
    plain = {"block_length": length, "small_block_size": small}
    plain |= {"cache_ver": bool(settings.cache_ver), **_ROOMY}
    first = resolve_settings(DECODERS["s2d2"], model.config, plain)
    state = start(model.params, model.config, traced_settings(first), inputs)
    monkeypatch.undo()

    seen, draft_logits = {}, None

    def recorded(kind):
        name = {"P": "prefill", "D": "draft", "V": "verify", "C": "store"}[kind]
        seen[kind] = seen.get(kind, 0) + 1
        return arrays.get(f"{case['name']}/{name}/{seen[kind] - 1:03}")

    forwards = list(_forwards_of(case))
    assert "".join(kind for kind, _ in forwards) == case["forward_sequence"]
    if forwards[0][0] == "P":
        assert int(state.forwards.prefill[0]) == 1
        assert forwards[0][1]["in"] == prompt[: int(state.cursor[0])]
        forwards = forwards[1:]
    for kind, entry in forwards:
        before, cursor = state, int(state.cursor[0])
        assert not bool(before.done[0])
        block = np.asarray(before.canvas[0, cursor : cursor + length])
        masked = block == MASK_ID
        offset = int(masked.argmax()) // small * small
        here = slice(offset, offset + small)
        span = np.asarray(routing.first_run(jnp.asarray(masked[None, here])))[0]
        call = functools.partial(
            _step, model.params, model.config, settings, routings, chosen, before
        )
        residual = None
        if kind == "V" and "resample" in entry["verify"]:
            _, logits = call(_noise("", {}, span, None))
            judged = logits[:, :small], draft_logits
            residual = functools.partial(_residual, settings, judged, span)
        state, logits = call(_noise(kind, entry, span, residual))
        logits = np.asarray(logits[0, :small])
        counted = {
            name: int(getattr(state.forwards, name)[0] - getattr(before.forwards, name)[0])
            for name in ("draft", "verify", "commit", "denoise", "prefill")
        }
        name = {"D": "draft", "V": "verify", "C": "commit"}[kind]
        assert counted == {**dict.fromkeys(counted, 0), name: 1}

        if kind == "V":
            fed = block.copy()
            drafted = np.asarray(before.draft_token[0])
            fed[here] = np.where(masked[here], drafted, block[here])
            given = entry["verify"]["input"]
            assert fed[: len(given)].tolist()[:length] == given[:length]
        else:
            assert block.tolist() == entry["in"]
        want = recorded(kind)
        if want is not None and kind != "C":
            rows = np.arange(offset, offset + small)
            if shifted:
                rows = np.maximum(rows - 1, 0)
            elif kind == "V":
                rows = rows + length
            _close(logits, want[rows])
        if kind == "D":
            draft_logits = jnp.asarray(logits)[None]
            _check_draft(entry, state, masked[here])
            if "ucb_bucket" in entry:
                assert int(state.router.bucket[0]) == entry["ucb_bucket"]
        if kind == "V":
            _check_verdict(entry, before, state, cursor, offset, span)
        ends_round = kind == "V" or (kind == "D" and not entry["do_verify"])
        if ends_round and "out" in entry:
            after = np.asarray(state.canvas[0, cursor : cursor + length])
            assert after.tolist() == entry["out"]
    assert bool(state.done[0])
    _check_output(case, state, prompt)


def _check_draft(entry, state, masked):
    token, want = np.asarray(state.draft_token[0]), np.array(entry["x0"])
    assert token[masked].tolist() == want[masked].tolist()
    _close(np.asarray(state.draft_confidence[0])[masked], np.array(entry["x0_p"])[masked])
    assert bool(state.verifying[0]) == entry["do_verify"]


def _check_verdict(entry, before, after, cursor, offset, span):
    """Accepted tokens are the draft's; the rejected one is what was drawn."""
    verdict = entry["verify"]
    slots = np.flatnonzero(span) + cursor + offset
    written = np.asarray(after.canvas[0])[slots]
    drafted = np.asarray(before.draft_token[0])[span]
    accepted = verdict["n_accepted"]
    assert written[:accepted].tolist() == drafted[:accepted].tolist()
    if verdict["first_reject"] is None:
        assert accepted == len(slots)
    elif "resample" in verdict:
        assert written[accepted] == verdict["resample"]["token"]


def _check_output(case, state, prompt):
    canvas = np.asarray(state.canvas[0]).tolist()
    want = case["output_ids"][len(case["prompt_ids"]) - len(prompt) :]
    whole = case["settings"].get("trim_stop_tokens") is False
    got = canvas[: len(want)]
    assert got == want
    assert canvas[: len(prompt)] == prompt
    forwards = state.forwards
    total = sum(
        int(getattr(forwards, name)[0]) for name in ("prefill", "draft", "verify", "commit")
    )
    assert total == case["nfe"]
    kept, judged = np.sum(case["acceptance"], axis=0) if case["acceptance"] else (0, 0)
    assert (int(state.kept[0]), int(state.judged[0])) == (kept, judged)
    assert whole or MASK_ID not in got


def test_generate(golden_dir):
    """The jitted loop, folded, on the case that draws nothing: it never verifies."""
    cases = {case["name"]: case for case in _cases(golden_dir)}
    case = cases["never_verify_b8"]
    prompt, new, stop_ids = _request(case)
    model = _load(golden_dir / "s2d2" / FAMILIES[case["family"]])
    given = {**_given(case), "fold": True, "early_stop": True}
    [out] = generate(
        model, [prompt], "s2d2", max_new_tokens=new, stop_ids=stop_ids, **given
    )
    assert out.tokens == case["output_ids"][len(prompt) :][:new]
    forwards = out.stats.forwards
    assert forwards["verify"] == forwards["commit"] == 0
    assert forwards["total"] < case["nfe"]
