"""The `masked` decoder: what it promises, against an oracle and against statistics.

The oracle decodes one prompt in NumPy, with rules of its own. Most tests run the scripted
model, whose logits are exact and depend on every token that a slot sees.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny import (
    CONFIG,
    EOS,
    EOT,
    MASK,
    PAD,
    ROWS,
    VOCAB,
    ScriptedModel,
    quick_compilation,
    random_table,
    table_row,
    tiny_model,
    token_code,
)

from dllm_jax import unmasking
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.decoding.base import UNDECIDED
from dllm_jax.generate import generate
from dllm_jax.request import plan
from dllm_jax.settings import resolve_settings

SAME = dataclasses.replace(CONFIG, attention="bidirectional")
SHIFTED = dataclasses.replace(SAME, logit_alignment="shifted")
SCHEDULED = ("maskgit_plus", "topk_margin", "entropy", "origin")

TABLES = (
    random_table(0),
    random_table(1, {EOS: 2.0}),  # ends often
    random_table(2, {MASK: 6.0}),  # mostly prefers the mask token
)


@pytest.fixture(scope="module")
def llada() -> ScriptedModel:
    return ScriptedModel(TABLES[0], SAME)


def use_table(model: ScriptedModel, table: np.ndarray) -> None:
    model.params = jnp.asarray(table, jnp.float32)


def random_prompts(seed: int, lengths) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MASK, length).tolist() for length in lengths]


def state_of(model):
    """The last state, without its keys, as NumPy arrays."""
    return jax.tree.map(np.asarray, model.state.replace(rng_key=None))


# --- the oracle -----------------------------------------------------------------------


def published_quota(step: int, num_steps: int, eps: float, masks: int) -> int:
    """Dream's schedule with another linspace than the decoder's (specs, Dream 4.6)."""
    if step == num_steps - 1:
        return masks
    time = np.linspace(1.0, eps, num_steps + 1, dtype=np.float32)
    share = np.float32(1.0) - time[step + 1] / time[step]
    return int(np.float32(masks) * share)


def even_quota(step: int, num_steps: int, size: int) -> int:
    return size // num_steps + (step < size % num_steps)


def softmax(logits) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def keep_most_probable(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Without the mask token; top-p, then top-k."""
    out = np.full_like(logits, -np.inf)
    for row, kept in zip(logits, out, strict=True):
        order = [i for i in np.argsort(-row, kind="stable") if i != MASK]
        probability = softmax(row[order])
        before = np.cumsum(probability) - probability
        count = max(1, int((before <= top_p).sum()))
        order = order[: min(count, top_k or count)]
        kept[order] = row[order]
    return out


class Oracle:
    """Decodes one prompt greedily; the order of drawn slots is taken from the decoder."""

    def __init__(self, table, config, settings, prompt, max_new_tokens, stop_ids):
        self.table, self.config, self.settings = table, config, settings
        self.prompt, self.stop_ids = prompt, stop_ids
        self.canvas = prompt + [MASK] * max_new_tokens
        self.order = [UNDECIDED] * len(self.canvas)
        self.confidence = [0.0] * len(self.canvas)
        self.denoise = 0

    def raw_logits(self, canvas) -> np.ndarray:
        position = np.arange(len(canvas))
        total = token_code(np.array(canvas), position).sum()
        rows = table_row(total, position)
        if self.config.logit_alignment == "shifted":
            rows = np.concatenate([rows[:1], rows[:-1]])
        return self.table[rows]

    def logits(self) -> np.ndarray:
        logits = self.raw_logits(self.canvas)
        if self.settings.cfg_scale:
            new = self.canvas[len(self.prompt) :]
            without = self.raw_logits([MASK] * len(self.prompt) + new)
            scale = np.float32(self.settings.cfg_scale + 1)
            logits = without + scale * (logits - without)
        logits = logits.astype(np.float64)
        if self.settings.logits_eos_inf:
            logits[:, EOS] = -np.inf
        return logits

    def propose(self):
        """Tokens, confidences and scores of all slots."""
        settings, logits = self.settings, self.logits()
        if settings.filtered:
            logits = keep_most_probable(logits, settings.top_k, settings.top_p)
        allowed = np.delete(logits, MASK, axis=-1)  # the last id
        token = allowed.argmax(axis=-1)
        if settings.confidence_eos_eot_inf:
            logits[:, [EOS, EOT]] = -np.inf
        p = softmax(logits)
        confidence = np.take_along_axis(p, token[:, None], axis=-1)[:, 0]
        match settings.remasking_strategy:
            case "topk_margin":
                best = np.sort(np.delete(p, MASK, axis=-1), axis=-1)
                return token, confidence, best[:, -1] - best[:, -2]
            case "entropy":
                return token, confidence, np.sum(p * np.log(p + 1e-10), axis=-1)
        return token, confidence, confidence

    def answered(self) -> bool:
        for token in self.canvas[len(self.prompt) :]:
            if token in self.stop_ids:
                return True
            if token == MASK:
                return False
        return True

    def unmask(self, slots, proposals):
        token, confidence, _ = proposals
        for i in slots:
            self.canvas[i], self.order[i] = int(token[i]), self.denoise
            self.confidence[i] = confidence[i]
        self.denoise += 1

    def run(self, recorded):
        settings, end = self.settings, len(self.canvas)
        strategy, early = settings.remasking_strategy, settings.early_stop
        start = len(self.prompt)
        while start < end:
            block = range(start, min(start + (settings.block_length or end), end))
            steps = settings.denoising_steps or len(block)
            for step in range(steps):
                gaps = [i for i in block if self.canvas[i] == MASK]
                drawn = [i for i in gaps if recorded[i] == self.denoise]
                if strategy in SCHEDULED:
                    quota = published_quota(step, steps, settings.eps, len(gaps))
                else:
                    quota = min(even_quota(step, steps, len(block)), len(gaps))
                if strategy == "origin":
                    quota = len(drawn)
                    assert quota or not early or not gaps
                if early and not quota:
                    continue
                proposals = self.propose()
                if strategy in ("random", "origin"):
                    chosen = drawn
                else:
                    chosen = sorted(gaps, key=lambda i, s=proposals[2]: (-s[i], i))[:quota]
                assert len(chosen) == quota
                self.unmask(chosen, proposals)
                if early and self.answered():
                    return
            start = block.stop


CASES = {
    "low_confidence": [{}, {"block_length": 5}, {"block_length": 5, "early_stop": False}],
    "random": [{"block_length": 16}],
    "maskgit_plus": [{}, {"block_length": 7, "early_stop": False}],
    "topk_margin": [{"block_length": 64, "early_stop": False}],
    "entropy": [{"block_length": 16}],
    "origin": [{}, {"block_length": 5, "early_stop": False}],
}
CASES = {
    "-".join(map(str, (strategy, *case.values()))): {"remasking_strategy": strategy, **case}
    for strategy, cases in CASES.items()
    for case in cases
}
# (new tokens, steps): the last two may be more forwards than the loop runs.
SIZES = ((24, 9), (1, 1), (16, 5), (11, 14), (12, 0), (11, 70))
KNOBS = {
    "cfg": {"cfg_scale": 1.5},
    "cfg in blocks": {"cfg_scale": 0.5, "block_length": 6},
    "no eos": {"logits_eos_inf": True},
    "eos last": {"confidence_eos_eot_inf": True},
    "neither": {"logits_eos_inf": True, "confidence_eos_eot_inf": True},
    "top-p": {"remasking_strategy": "maskgit_plus", "top_p": 0.6},
    "top-k": {"remasking_strategy": "entropy", "top_k": 3},
    "both": {"remasking_strategy": "topk_margin", "top_k": 4, "top_p": 0.5},
}


def check(model, prompts, max_new_tokens, stop_ids=(EOS, EOT), **knobs):
    """Decodes a batch and compares all of it with the oracle."""
    arguments = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, **knobs}
    settings = plan(model.config, "masked", **arguments).settings
    outputs = generate(model, prompts, "masked", **arguments)
    state, table = state_of(model), np.asarray(model.params)
    assert state.done.all()
    for row, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):
        oracle = Oracle(table, model.config, settings, prompt, max_new_tokens, stop_ids)
        oracle.run(state.unmask_forward[row])
        end = len(oracle.canvas)
        assert state.canvas[row, :end].tolist() == oracle.canvas
        assert (state.canvas[row, end:] == MASK).all()
        assert state.unmask_forward[row, :end].tolist() == oracle.order
        np.testing.assert_allclose(
            state.confidence[row, :end], oracle.confidence, atol=1e-5
        )
        new = oracle.canvas[len(prompt) :]
        cut = next((i for i, t in enumerate(new) if t in (*stop_ids, MASK)), len(new))
        assert out.tokens == new[:cut]
        assert MASK not in new[: cut + 1]
        assert out.finish_reason == ("length" if cut == len(new) else "eos")
        kinds = {k: n for k, n in out.stats.forwards.items() if n and k != "total"}
        assert kinds == {"denoise": oracle.denoise}
        twice = 2 if settings.cfg_scale else 1
        assert out.stats.positions == oracle.denoise * end * twice
    return outputs


def check_sizes(model, case):
    for seed, table in enumerate(TABLES):
        use_table(model, table)
        for new, steps in SIZES if case.get("early_stop", True) else SIZES[:-2]:
            prompts = random_prompts(7 * seed + new, (3, 40, 17))
            check(model, prompts, new, denoising_steps=steps, **case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decoding_is_what_the_oracle_does(llada, case):
    """Mixed batches, so that a row is also what its prompt gives alone."""
    check_sizes(llada, case)


@pytest.mark.parametrize("name", ["low_confidence-5", "maskgit_plus"])
def test_shifted_logits(name):
    check_sizes(ScriptedModel(TABLES[0], SHIFTED), CASES[name])


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_knobs(llada, knobs):
    for seed, table in enumerate(TABLES):
        use_table(llada, table)
        for new, steps in ((20, 0), (13, 4)):
            prompts = random_prompts(seed, (9, 1, 30))
            check(llada, prompts, new, denoising_steps=steps, **knobs)


# --- schedules --------------------------------------------------------------------------


def quotas(masks: int, steps: int, eps: float = 1e-3) -> list[int]:
    found, left = [], masks
    for share in unmasking.reveal_schedule(steps, eps):
        found.append(int(np.float32(left) * share))
        left -= found[-1]
    assert left == 0
    return found


def test_published_schedules():
    assert quotas(24, 24) == [0, *[1] * 22, 2]
    assert quotas(24, 10) == [2] * 7 + [3, 3, 4]
    assert quotas(16, 5) == [3, 3, 3, 3, 4]
    assert quotas(256, 64) == [3, *[4] * 62, 5]
    assert quotas(16, 32) == [0] * 17 + [1] * 14 + [2]
    assert quotas(16, 8, 0.2) == [1, 1, 1, 1, 2, 1, 2, 7]
    assert quotas(9, 1) == [9]


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.5])
def test_schedules_reveal_everything(eps):
    for steps in (1, 2, 3, 63, 64, 65, 512):
        reveal = unmasking.reveal_schedule(steps, eps)
        assert reveal.dtype == np.float32 and reveal.shape == (steps,)
        assert (reveal >= 0).all() and (reveal <= 1).all() and reveal[-1] == 1


def test_published_forwards_are_all_run(llada):
    """However many they are: `early_stop=False` counts as the published loops do."""
    use_table(llada, TABLES[2])
    for strategy in ("low_confidence", "origin"):
        [out] = generate(
            llada,
            [[1, 2]],
            "masked",
            max_new_tokens=20,
            remasking_strategy=strategy,
            denoising_steps=500,
            early_stop=False,
            stop_ids=(),
        )
        assert len(out.tokens) == 20 and MASK not in out.tokens
        assert out.stats.forwards["denoise"] == 500


# --- rows -------------------------------------------------------------------------------

DRAWN = {
    "random": {"remasking_strategy": "random", "block_length": 8},
    "origin": {"remasking_strategy": "origin"},
    "entropy": {"remasking_strategy": "entropy", "alg_temp": 0.5},
}


def assert_same_rows(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.tokens == other.tokens
        assert one.unmask_forward == other.unmask_forward
        assert one.finish_reason == other.finish_reason
        assert one.stats.forwards == other.stats.forwards
        assert one.stats.positions == other.stats.positions


@pytest.mark.parametrize("knobs", DRAWN.values(), ids=DRAWN)
def test_a_row_draws_the_same_in_any_batch(llada, knobs):
    """Also on a longer canvas; and other seeds are other draws."""
    use_table(llada, TABLES[1])
    prompts = random_prompts(3, (4, 100, 20, 20))
    prompts[3] = prompts[2]
    run = functools.partial(
        generate, llada, decoder="masked", max_new_tokens=16, temperature=1.0, **knobs
    )
    seeds = [5, 6, 7, 8]
    together = run(prompts, seed=seeds)
    for row in (0, 2, 3):
        assert_same_rows([together[row]], run([prompts[row]], seed=[seeds[row]]))
    assert together[2].tokens != together[3].tokens


@pytest.mark.parametrize("knobs", DRAWN.values(), ids=DRAWN)
def test_forwards_that_are_left_out_change_no_draw(llada, knobs):
    use_table(llada, TABLES[1])
    prompts = random_prompts(4, (4, 12, 20))
    run = functools.partial(
        generate,
        llada,
        prompts,
        "masked",
        max_new_tokens=16,
        temperature=0.7,
        denoising_steps=24,
        **knobs,
    )
    for one, other in zip(run(), run(early_stop=False), strict=True):
        assert one.tokens == other.tokens
        assert one.stats.forwards["total"] < other.stats.forwards["total"]


@pytest.mark.parametrize("config", [SAME, SHIFTED], ids=["same", "shifted"])
def test_a_transformer_gives_a_row_what_its_prompt_gives_alone(config):
    model = tiny_model(0, config)
    prompts = random_prompts(5, (3, 50, 21))
    run = functools.partial(
        generate,
        model,
        decoder="masked",
        max_new_tokens=12,
        cfg_scale=0.5,
        block_length=5,
        stop_ids=(),
    )
    with quick_compilation():
        together = run(prompts)
        each = [run([prompt]) for prompt in prompts]
    for out, [alone] in zip(together, each, strict=True):
        assert_same_rows([out], [alone])
        np.testing.assert_allclose(out.confidence, alone.confidence, rtol=1e-4)
        assert len(out.tokens) == 12


def test_guidance_of_0_is_none(llada):
    use_table(llada, TABLES[0])
    decoder = DECODERS["masked"]
    resolved = resolve_settings(decoder, SAME, {})
    prompts = random_prompts(6, (5, 33))
    plain = generate(llada, prompts, "masked", max_new_tokens=16)
    state = state_of(llada)
    key, (before, params, settings, *when) = llada.last_call
    step = functools.partial(decoder.step, llada.fns(params), settings.replace(guided=True))
    with quick_compilation():
        guided = jax.jit(functools.partial(loop.run, step))(before, when[-1], 200)
    np.testing.assert_array_equal(guided.canvas, state.canvas)
    np.testing.assert_array_equal(guided.unmask_forward, state.unmask_forward)
    assert key[0] == "masked" and not resolved.guided and len(plain) == 2


def test_the_loop_is_its_steps_in_python(llada):
    use_table(llada, TABLES[1])
    prompts = random_prompts(8, (5, 33, 2))
    generate(
        llada,
        prompts,
        "masked",
        max_new_tokens=20,
        block_length=6,
        temperature=0.5,
    )
    final = llada.state
    _, (before, params, settings, *_) = llada.last_call
    step = jax.jit(functools.partial(DECODERS["masked"].step, llada.fns(params), settings))
    with quick_compilation():
        states = loop.run_in_python(step, before)
    for one, other in zip(
        jax.tree.leaves(final.replace(rng_key=None)),
        jax.tree.leaves(states[-1].replace(rng_key=None)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    # Every step unmasks something in each row, and nothing is ever taken back.
    for earlier, later in itertools.pairwise(states):
        kept = earlier.canvas != MASK
        np.testing.assert_array_equal(later.canvas[kept], earlier.canvas[kept])
        gained = jnp.any(kept != (later.canvas != MASK), axis=1)
        assert (gained | earlier.done).all()


def test_values_do_not_retrace():
    model = ScriptedModel(TABLES[0], SAME)
    run = functools.partial(generate, model, decoder="masked", max_new_tokens=16)
    run([[1, 2, 3]], remasking_strategy="entropy", temperature=1.0, cfg_scale=1.0)
    traces = model.num_traces
    run(
        [[5] * 40],
        remasking_strategy="entropy",
        temperature=0.3,
        cfg_scale=0.2,
        denoising_steps=500,
        eps=0.1,
    )
    assert model.num_traces == traces


# --- end tokens ---------------------------------------------------------------------------


def end_table() -> np.ndarray:
    """The end of text is nearly certain everywhere (C7 of the failure log)."""
    table = random_table(3)
    table[:, EOS] += 12.0
    table[:, EOT] += 8.0
    return table


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_come_last_or_never(llada, temperature):
    use_table(llada, end_table())
    run = functools.partial(
        generate,
        llada,
        [[1, 2, 3]],
        "masked",
        max_new_tokens=16,
        temperature=temperature,
        stop_ids=(),
    )
    [plain] = run()
    assert plain.tokens.count(EOS) > 8
    [never] = run(logits_eos_inf=True)
    assert EOS not in never.tokens and EOT in never.tokens
    [last] = run(confidence_eos_eot_inf=True, seed=3)
    ends = [t in (EOS, EOT) for t in last.tokens]
    assert any(ends)
    for end, confidence in zip(ends, last.confidence, strict=True):
        assert (confidence == 0.0) == end
    [neither] = run(logits_eos_inf=True, confidence_eos_eot_inf=True)
    assert EOS not in neither.tokens


def test_the_end_that_pads_is_what_logits_eos_inf_means():
    config = dataclasses.replace(SAME, eos_ids=(EOT, PAD))
    model = ScriptedModel(random_table(4, {PAD: 9.0, EOT: 6.0}), config)
    [out] = generate(
        model, [[1]], "masked", max_new_tokens=8, stop_ids=(), logits_eos_inf=True
    )
    assert PAD not in out.tokens and EOT in out.tokens


# --- statistics ---------------------------------------------------------------------------


def many(model, max_new_tokens, rows=256, **knobs):
    """The state after decoding the same prompt in many rows, each with its own key."""
    generate(
        model,
        [[1, 2, 3]] * rows,
        "masked",
        max_new_tokens=max_new_tokens,
        stop_ids=(),
        **knobs,
    )
    state = state_of(model)
    new = slice(3, 3 + max_new_tokens)
    return state.canvas[:, new], state.unmask_forward[:, new], state.confidence[:, new]


def constant_table(row) -> np.ndarray:
    return np.tile(np.asarray(row, np.float32), (ROWS, 1))


def test_random_is_a_uniform_order(llada):
    use_table(llada, TABLES[0])
    _, order, _ = many(llada, 8, remasking_strategy="random")
    assert (np.sort(order, axis=1) == np.arange(8)).all()
    counts = np.array([np.bincount(order[:, slot], minlength=8) for slot in range(8)])
    statistic = ((counts - 32.0) ** 2 / 32.0).sum()
    assert stats.chi2.sf(statistic, 49) > 1e-3
    # Slots do not move together: the pair that comes first is any of 28.
    pairs = [tuple(np.flatnonzero(row < 2)) for row in order]
    counts = list(np.unique(pairs, axis=0, return_counts=True)[1])
    counts += [0] * (28 - len(counts))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_origin_reveals_each_slot_at_its_own_time(llada):
    """Evenly over time, what is left after `eps` in the last step, slots independent."""
    use_table(llada, TABLES[0])
    steps, eps = 6, 0.3
    _, order, _ = many(
        llada,
        16,
        remasking_strategy="origin",
        denoising_steps=steps,
        eps=eps,
        early_stop=False,
    )
    expected = np.full(steps, (1 - eps) / steps)
    expected[-1] += eps
    counts = np.bincount(order.ravel(), minlength=steps)
    assert stats.chisquare(counts, expected * order.size).pvalue > 1e-3
    # Independent slots: the number revealed first is binomial.
    first = (order == 0).sum(axis=1)
    variance = 16 * expected[0] * (1 - expected[0])
    assert abs(first.var() / variance - 1) < 0.35
    # And so are steps: given that a slot is left, its next step is a fresh draw.
    assert abs(np.corrcoef(order[:, :-1].ravel(), order[:, 1:].ravel())[0, 1]) < 0.06


def test_alg_temp_draws_slots_without_replacement(llada):
    """The slot that comes first is drawn from softmax(confidence / alg_temp)."""
    use_table(llada, TABLES[0])
    prompt = [1, 2, 3]
    settings = plan(SAME, "masked", remasking_strategy="maskgit_plus").settings
    oracle = Oracle(TABLES[0], SAME, settings, prompt, 8, ())
    _, confidence, _ = oracle.propose()
    expected = softmax(confidence[3:] / 0.4)
    _, order, _ = many(
        llada,
        8,
        rows=1024,
        remasking_strategy="maskgit_plus",
        denoising_steps=6,
        eps=0.0,
        alg_temp=0.4,
    )
    assert (np.sort(order, axis=1)[:, 0] == 0).all()
    assert ((order == 0).sum(axis=1) == 1).all()
    counts = np.bincount(order.argmin(axis=1), minlength=8)
    assert stats.chisquare(counts, expected * 1024).pvalue > 1e-3


@pytest.mark.parametrize("strategy", ["low_confidence", "maskgit_plus"])
def test_temperature_draws_and_what_counts_as_confidence(llada, strategy):
    """LLaDA counts the model's own probabilities, Dream those that it draws from."""
    row = np.random.default_rng(5).normal(size=VOCAB)
    row[MASK] = 2.0
    use_table(llada, constant_table(row))
    tokens, _, confidence = many(
        llada, 16, remasking_strategy=strategy, denoising_steps=1, temperature=0.7
    )
    drawn = np.delete(row, MASK) / 0.7
    expected = softmax(drawn) * tokens.size
    counts = np.bincount(tokens.ravel(), minlength=VOCAB)
    assert counts[MASK] == 0
    common = expected >= 8
    groups = [*counts[:MASK][common], counts[:MASK][~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    assert stats.chisquare(groups, wanted).pvalue > 1e-3
    counted = softmax(row if strategy == "low_confidence" else row / 0.7)
    np.testing.assert_allclose(confidence, counted[tokens], rtol=1e-4)


# --- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"remasking_strategy": "sequential"}, ["sequential", "origin", "low_confidence"]),
        ({"alg_temp": 0.1}, ["alg_temp=0.1", "maskgit_plus", "low_confidence"]),
        ({"alg_temp": 0.1, "alg": "origin"}, ["alg_temp=0.1", "origin"]),
        ({"eps": 0.1}, ["eps=0.1", "entropy", "low_confidence"]),
        ({"eps": 1.0, "alg": "entropy"}, ["eps=1.0", "[0, 1)"]),
        ({"confidence_eos_eot_inf": True, "alg": "random"}, ["confidence_eos_eot_inf"]),
        ({"confidence_eos_eot_inf": True, "alg": "entropy"}, ["confidence_eos_eot_inf"]),
        ({"cfg_scale": -1.0}, ["cfg_scale=-1.0"]),
        ({"cfg_scale": float("nan")}, ["cfg_scale=nan"]),
        ({"denoising_steps": -1}, ["denoising_steps=-1"]),
        ({"block_length": -4}, ["block_length=-4"]),
        ({"temperature": -0.1}, ["temperature=-0.1"]),
        ({"top_p": 0.9}, ["top_p=0.9", "temperature"]),
        ({"top_k": 3, "alg": "origin"}, ["top_k=3", "temperature"]),
        ({"top_p": 0.0, "alg": "entropy"}, ["top_p=0.0"]),
        ({"threshold": 0.9}, ["threshold=0.9", "masked"]),
    ],
)
def test_wrong_settings_are_refused_in_one_line(given, words):
    with pytest.raises(ValueError) as error:
        plan(SAME, "masked", **given)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="bidirectional"):
        plan(CONFIG, "masked")
    with pytest.raises(ValueError, match="needs block-causal attention"):
        plan(SAME, "block")
    without = dataclasses.replace(SAME, eos_ids=())
    with pytest.raises(ValueError, match="end-of-sequence"):
        plan(without, "masked", logits_eos_inf=True)


def test_defaults_are_filled_in():
    scheduled = plan(SHIFTED, "masked", alg="entropy").settings
    assert (scheduled.denoising_steps, scheduled.eps) == (512, 1e-3)
    assert len(scheduled.reveal) == 512
    in_blocks = plan(SHIFTED, "masked", alg="origin", block_length=24).settings
    assert in_blocks.denoising_steps == 24 and len(in_blocks.reveal) == 64
    assert plan(SAME, "masked").settings.reveal == ()
    warm = plan(SAME, "masked", alg="entropy", top_p=0.9).settings
    assert warm.filtered and not warm.sample
