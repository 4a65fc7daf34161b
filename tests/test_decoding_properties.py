"""What every decoder promises, for any prompt, setting and neighbour.

The oracle is a decoder in NumPy without a cache: it recomputes the whole canvas for every
step and has selection rules of its own. Most tests run a scripted model, whose logits are
exact and depend on every visible token; some run a random transformer.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tiny import (
    BOS,
    CONFIG,
    EOS,
    EOT,
    MASK,
    ROWS,
    VOCAB,
    ScriptedModel,
    random_table,
    scripted_fns,
    table_row,
    tiny_model,
    token_code,
)

from dllm_jax import layouts, transformer
from dllm_jax.decoding import DECODERS, loop
from dllm_jax.decoding.base import UNDECIDED
from dllm_jax.decoding.block import STRATEGIES
from dllm_jax.generate import generate
from dllm_jax.request import plan
from dllm_jax.settings import traced_settings

# Prompt and new tokens stay in one bucket, so that few programs compile. A multiple of 5
# less than 64: no block of a row that is done reaches into the canvas's slack.
ROOM = 60

# (fold, early_stop): each stores other blocks and ends at another forward.
BOTH = ((True, True), (False, False))
FOLDED, PLAIN = BOTH[:1], BOTH[1:]

# Every strategy in blocks of 5, which divides no bucket, and some in longer ones.
METHODS = {
    "ar": BOTH,
    "low_confidence_dynamic-5": BOTH,
    "low_confidence_dynamic-64": FOLDED,
    "low_confidence_static-5": BOTH,
    "sequential-5": BOTH,
    "entropy_bounded-5": (*BOTH, (True, False)),
    "entropy_bounded-64": PLAIN,
    "random-5": BOTH,
    "random-16": FOLDED,
    "low_confidence_dynamic_leftmost-5": BOTH,
    "entropy_bounded_script-5": BOTH,
}
every_method = pytest.mark.parametrize("method", METHODS)


def examples(count: int):
    """Settings of a property test; the same examples in every run."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def decoder_and_settings(method: str) -> tuple[str, dict]:
    """The arguments of `generate` that a name in `METHODS` stands for."""
    if method == "ar":
        return "ar", {}
    strategy, length = method.rsplit("-", 1)
    return "block", {"remasking_strategy": strategy, "block_length": int(length)}


def test_every_method_is_tested():
    strategies = {method.rsplit("-", 1)[0] for method in METHODS}
    assert strategies == {"ar", *STRATEGIES}


# --- the oracle -----------------------------------------------------------------------


class NearTie(Exception):
    """Two numbers are so close that rounding may decide between them."""


@dataclasses.dataclass
class Expected:
    """What a row must give."""

    canvas: list[int]
    order: list[int]  # number of the forward that unmasked each slot
    confidence: list[float]
    forwards: dict[str, int]
    positions: int
    tokens: list[int]
    finish_reason: str


@dataclasses.dataclass
class Proposals:
    """What a model proposes for the slots of a block."""

    token: np.ndarray
    confidence: np.ndarray
    entropy: np.ndarray
    lead: np.ndarray  # of the best logit over the second

    @classmethod
    def of(cls, logits: np.ndarray) -> "Proposals":
        x = np.asarray(logits, np.float64)
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)
        allowed = np.delete(x, MASK, axis=-1)  # the last id, so others keep their index
        best = np.sort(allowed, axis=-1)
        token = allowed.argmax(axis=-1)
        confidence = np.take_along_axis(p, token[:, None], axis=-1)[:, 0]
        return cls(token, confidence, entropy, best[:, -1] - best[:, -2])


def select(method, step, masked, proposals, recorded, differ) -> list[int]:
    """The slots of a block that a step unmasks, as the documentation has it.

    Args:
      method: resolved settings.
      step: number of the step in the block.
      masked: masked slots of the block, in order.
      proposals: of the whole block.
      recorded: the slots that the decoder chose, for the rule that draws them.
      differ: called with two numbers whose order decides.
    """
    length, steps = method.block_length, method.denoising_steps
    quota = min(max(length // steps + (step < length % steps), 1), len(masked))

    def lowest(score, count):
        ranked = sorted(masked, key=lambda i: (score[i], i))
        if 0 < count < len(ranked):
            differ(score[ranked[count - 1]], score[ranked[count]])
        return ranked[:count]

    def below(sums, bound):
        for total in sums:
            differ(total, bound)
        return max(sum(total < bound for total in sums), 1)

    confidence = proposals.confidence
    bound = float(np.float32(method.eb_threshold))
    match method.remasking_strategy:
        case "sequential":
            return masked[:quota]
        case "low_confidence_static":
            return lowest(-confidence, quota)
        case "random":
            assert len(recorded) == quota
            assert set(recorded) <= set(masked)
            return recorded
        case "entropy_bounded":
            sums = np.cumsum(np.sort(proposals.entropy[masked]))
            return lowest(proposals.entropy, below(sums, bound))
        case "entropy_bounded_script":
            p = confidence[confidence > 0]
            one = -np.sum(p * np.log(p))
            return masked[: below([one * (k + 1) for k in range(len(masked))], bound)]
    threshold = float(np.float32(method.threshold))
    for i in masked:
        differ(confidence[i], threshold)
    high = [i for i in masked if confidence[i] > threshold]
    if len(high) >= quota:
        return high
    if method.remasking_strategy == "low_confidence_dynamic":
        return lowest(-confidence, quota)
    return masked[:quota]


def decode_without_cache(
    logits_of: Callable[[list[int], int], np.ndarray],
    method,
    prompt: list[int],
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    recorded: np.ndarray,
    tolerance: float = 0.0,
) -> Expected:
    """Block diffusion, greedy, one prompt, from the whole canvas at every step.

    Args:
      logits_of: canvas and start of a block -> logits `[block_length, VOCAB]`.
      method: resolved settings.
      prompt: token ids.
      max_new_tokens: as asked.
      stop_ids: as asked.
      recorded: the decoder's own order `[C]`, for the rule that draws its slots.
      tolerance: closer numbers than this raise `NearTie`.
    """
    length, end = method.block_length, len(prompt) + max_new_tokens
    canvas = prompt + [MASK] * (-(-end // length) * length - len(prompt))
    order = [UNDECIDED] * len(canvas)
    confidence = [0.0] * len(canvas)
    start = positions = len(prompt) // length * length
    forwards = {"prefill": int(start > 0), "denoise": 0, "commit": 0}

    def differ(a, b):
        if abs(a - b) < tolerance:
            raise NearTie

    def answer():
        """Tokens and finish reason, or None while a slot before the end is masked."""
        for i in range(len(prompt), end):
            if canvas[i] in stop_ids:
                return canvas[len(prompt) : i], "eos"
            if canvas[i] == MASK:
                return None
        return canvas[len(prompt) : end], "length"

    pending = False
    while True:
        block = range(start, start + length)
        step = 0
        while any(canvas[i] == MASK for i in block):
            proposals = Proposals.of(logits_of(canvas, start))
            masked = [i for i in range(length) if canvas[start + i] == MASK]
            number = forwards["denoise"]
            drawn = [i for i in masked if recorded[start + i] == number]
            chosen = select(method, step, masked, proposals, drawn, differ)
            for i in chosen:
                differ(proposals.lead[i], 0.0)
                canvas[start + i] = int(proposals.token[i])
                order[start + i] = number
                confidence[start + i] = float(proposals.confidence[i])
            forwards["denoise"] += 1
            positions += length + (length if pending else 0)
            pending = False
            step += 1
            if method.early_stop and answer():
                break
        ended = answer() is not None
        if not method.fold and not (ended and method.early_stop):
            forwards["commit"] += 1
            positions += length
        pending = method.fold
        if ended:
            return Expected(canvas, order, confidence, forwards, positions, *answer())
        start += length


def scripted_logits(table: np.ndarray, method):
    """The scripted model from the whole canvas."""

    def logits_of(canvas, start):
        end = start + method.block_length
        position = np.arange(end)
        total = token_code(np.array(canvas[:end]), position).sum()
        return table[table_row(total, position[start:])]

    return logits_of


@functools.partial(jax.jit, static_argnums=1)
def _whole_canvas(params, config, canvas, block_length):
    position = jnp.arange(canvas.shape[1], dtype=jnp.int32)[None]
    fields = layouts.block_causal(position, block_length)
    out = transformer.forward(params, config, canvas, fields, None)
    return transformer.logits(params, out.hidden)[0]


def transformer_logits(model, method):
    """The transformer from the whole canvas, always of one shape."""

    def logits_of(canvas, start):
        padded = np.full((1, 128), MASK, np.int32)  # later blocks are not seen
        padded[0, : len(canvas)] = canvas
        logits = _whole_canvas(
            model.params, model.config, padded, np.int32(method.block_length)
        )
        return np.asarray(logits)[start : start + method.block_length]

    return logits_of


# --- what is compared -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """A batch of prompts and everything but the method."""

    prompts: list[list[int]]
    max_new_tokens: int
    knobs: dict = dataclasses.field(default_factory=dict)  # of the block decoder
    stop_ids: tuple[int, ...] = CONFIG.eos_ids

    def arguments(self, method: str, **more) -> tuple[str, dict]:
        """The decoder and all other arguments of `generate`."""
        decoder, chosen = decoder_and_settings(method)
        knobs = {} if decoder == "ar" else self.knobs
        return decoder, {
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": self.stop_ids,
            **chosen,
            **knobs,
            **more,
        }

    def run(self, model, method: str, prompts=None, **more):
        """The outputs and, of the last batch, the state."""
        decoder, arguments = self.arguments(method, **more)
        outputs = generate(model, prompts or self.prompts, decoder, **arguments)
        return outputs, jax.tree.map(_to_numpy, model.state)

    def settings(self, method: str, **more):
        """The method's resolved settings."""
        decoder, arguments = self.arguments(method, **more)
        return plan(CONFIG, decoder, **arguments).settings


def _to_numpy(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_promises(request: Request, method, outputs, state) -> None:
    """What holds of every output, whatever the model says."""
    length = method.block_length
    assert state.done.all()
    for row, (prompt, output) in enumerate(zip(request.prompts, outputs, strict=True)):
        begin, end = len(prompt), len(prompt) + request.max_new_tokens
        tokens, canvas = output.tokens, state.canvas[row].tolist()
        assert canvas[:begin] == prompt
        assert canvas[begin : begin + len(tokens)] == tokens
        assert not {MASK, *request.stop_ids} & set(tokens)
        assert all(0 <= token < VOCAB for token in tokens)
        assert len(tokens) <= request.max_new_tokens
        if output.finish_reason == "eos":
            assert len(tokens) < request.max_new_tokens
            assert canvas[begin + len(tokens)] in request.stop_ids
        else:
            assert output.finish_reason == "length"
            assert len(tokens) == request.max_new_tokens
        stats = output.stats
        assert stats.prompt_tokens == begin
        assert stats.generated_tokens == len(tokens) + (output.finish_reason == "eos")
        blocks = -(-end // length) - begin // length
        masks = (begin // length + blocks) * length - begin
        kinds = {k: n for k, n in stats.forwards.items() if k != "total"}
        assert stats.forwards["total"] == sum(kinds.values()) <= masks + blocks + 1
        assert kinds["denoise"] <= masks
        assert len(output.confidence) == len(output.unmask_forward) == len(tokens)
        assert np.isfinite(output.confidence).all()
        assert all(0 <= n < kinds["denoise"] for n in output.unmask_forward)
    for row in range(len(request.prompts), len(state.done)):  # rows that only fill up
        assert all(count[row] == 0 for count in jax.tree.leaves(state.forwards))


def assert_stored_tokens_are_final(method, state) -> None:
    """The cache has the final tokens of every block but the open and the pending one."""
    cache = state.cache
    for row in range(len(state.done)):
        count = int(cache.length[row])
        assert count == state.cursor[row] - method.block_length * state.pending[row]
        np.testing.assert_array_equal(cache.fields[row, 0, :count], np.arange(count))
        used = min(count, state.canvas.shape[1] - method.block_length)  # not the slack
        stored = cache.k[0, row, 0, :used, 0]
        np.testing.assert_array_equal(stored, state.canvas[row, :used])


def assert_expected(request: Request, method, outputs, state, logits_of, tolerance=0.0):
    """Every row is what the oracle makes of its prompt alone."""
    for row, (prompt, output) in enumerate(zip(request.prompts, outputs, strict=True)):
        order = state.unmask_forward[row]
        expected = decode_without_cache(
            logits_of,
            method,
            prompt,
            request.max_new_tokens,
            request.stop_ids,
            order,
            tolerance,
        )
        # Not the slack: a row that is done may write there.
        used = min(len(expected.canvas), state.canvas.shape[1] - method.block_length)
        assert state.canvas[row, :used].tolist() == expected.canvas[:used]
        assert order[:used].tolist() == expected.order[:used]
        np.testing.assert_allclose(
            state.confidence[row, :used], expected.confidence[:used], atol=1e-5
        )
        assert output.tokens == expected.tokens
        assert output.finish_reason == expected.finish_reason
        span = slice(len(prompt), len(prompt) + len(output.tokens))
        assert output.unmask_forward == expected.order[span]
        counted = {kind: output.stats.forwards[kind] for kind in expected.forwards}
        assert counted == expected.forwards
        assert output.stats.positions == expected.positions


def assert_same_rows(some, others) -> None:
    """Two lists of outputs agree in everything but the time taken."""
    for one, other in zip(some, others, strict=True):
        assert one.tokens == other.tokens
        assert one.finish_reason == other.finish_reason
        assert one.unmask_forward == other.unmask_forward
        assert one.stats.forwards == other.stats.forwards
        assert one.stats.positions == other.stats.positions
        np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-5)


def folding(method: str, fold: bool, early_stop: bool) -> dict:
    """Settings; `ar` always stops early."""
    return {"fold": fold} if method == "ar" else dict(fold=fold, early_stop=early_stop)


def check(model, method: str, request: Request, logits_of, variants, tolerance=0.0):
    """Decodes with each of `variants`, (fold, early_stop), and compares everything."""
    found = {}
    for variant in variants:
        more = folding(method, *variant)
        resolved = request.settings(method, **more)
        outputs, state = request.run(model, method, **more)
        assert_promises(request, resolved, outputs, state)
        oracle = logits_of(resolved)
        assert_expected(request, resolved, outputs, state, oracle, tolerance)
        if isinstance(model, ScriptedModel):
            assert_stored_tokens_are_final(resolved, state)
        found[variant] = outputs
    for outputs in found.values():
        for one, other in zip(found[variants[0]], outputs, strict=True):
            assert one.tokens == other.tokens
            assert one.finish_reason == other.finish_reason
            assert one.unmask_forward == other.unmask_forward
    for (fold, early_stop), outputs in found.items():
        if fold and (False, early_stop) in found:
            for one, other in zip(outputs, found[False, early_stop], strict=True):
                assert one.stats.forwards["total"] <= other.stats.forwards["total"]
    return found


# --- what is drawn --------------------------------------------------------------------


def random_prompt(length: int, seed: int) -> list[int]:
    """Any ids that a prompt may hold, stop ids among them."""
    return np.random.default_rng(seed).integers(0, MASK, length).tolist()


def prompts_for(max_new_tokens: int, rows) -> st.SearchStrategy:
    """As many prompts as `rows` draws, in one bucket together with the new tokens."""
    prompt = st.builds(
        random_prompt, st.integers(1, ROOM - max_new_tokens), st.integers(0, 2**16)
    )
    return rows.flatmap(lambda n: st.lists(prompt, min_size=n, max_size=n))


@st.composite
def requests(draw, rows=st.integers(3, 4)):  # noqa: B008  both fill a batch of 4
    """Batches whose programs are all the same."""
    max_new_tokens = draw(st.one_of(st.integers(1, 8), st.integers(9, 48)))
    return Request(
        prompts=draw(prompts_for(max_new_tokens, rows)),
        max_new_tokens=max_new_tokens,
        knobs={
            "threshold": draw(st.sampled_from([0.0, 0.2, 0.35, 0.5, 0.9, 1.0, 5.0])),
            "eb_threshold": draw(st.sampled_from([0.0, 0.1, 0.35, 1.0, 2.5, 7.0, 100.0])),
            "denoising_steps": draw(st.integers(1, 70)),
        },
        stop_ids=draw(st.sampled_from([(EOS, EOT), (), (3, 17, 40)])),
    )


def _table(values: dict[int, float], other: float = 0.0) -> np.ndarray:
    table = np.full((ROWS, VOCAB), other, np.float32)
    for token, value in values.items():
        table[:, token] = value
    return table


def _certain_table() -> np.ndarray:
    table = _table({})
    table[np.arange(ROWS), np.arange(ROWS) * 7 % MASK] = 1e4
    return table


TABLES = {
    "random": random_table(0),
    "ends often": random_table(1, {EOS: 2.0}),
    "mostly the mask": random_table(2, {MASK: 6.0}),
    "flat": _table({}),
    "always the mask": _table({MASK: 1e4}),
    "nothing but the mask": _table({MASK: 0.0}, other=-1e30),
    "certain": _certain_table(),
    "ends at once": _table({EOS: 1e4}),
    "may end": _table({EOS: 0.5, 7: 0.5}),
}
RANDOM = ("random", "ends often", "mostly the mask")
HARD = [name for name in TABLES if name not in RANDOM]


@pytest.fixture(scope="module")
def scripted() -> ScriptedModel:
    return ScriptedModel(TABLES["random"])


@pytest.fixture(scope="module")
def tiny():
    return tiny_model(2)


def use_table(model: ScriptedModel, name: str) -> Callable:
    """Gives the model other logits; returns the oracle's view of them."""
    model.params = jnp.asarray(TABLES[name])
    return functools.partial(scripted_logits, TABLES[name])


# --- cache, stops, masks, ends --------------------------------------------------------


@every_method
@examples(6)
@given(request=requests(), table=st.sampled_from(RANDOM))
def test_exact_cache_equals_no_cache(scripted, method, request, table):
    check(scripted, method, request, use_table(scripted, table), METHODS[method])


@pytest.mark.parametrize(
    ("method", "variants"),
    [("ar", FOLDED), ("low_confidence_dynamic-5", ((True, True), (False, True)))],
)
@examples(4)
@given(request=requests())
def test_exact_cache_equals_no_cache_in_a_transformer(tiny, method, variants, request):
    oracle = functools.partial(transformer_logits, tiny)
    try:
        check(tiny, method, request, oracle, variants, 1e-4)
    except NearTie:
        reject()


@every_method
@pytest.mark.parametrize("table", HARD)
def test_every_loop_ends(scripted, method, table):
    """Flat, certain and broken models; thresholds that all or no slot passes."""
    oracle = use_table(scripted, table)
    prompts = [random_prompt(n, n) for n in (1, 4, 5, 21)]
    for max_new_tokens, threshold, bound, steps in (
        (1, 0.0, 0.0, 1),
        (19, 1.0, 0.35, 3),
        (39, 5.0, 1000.0, 70),
    ):
        knobs = {
            "threshold": threshold,
            "eb_threshold": bound,
            "denoising_steps": steps,
        }
        check(
            scripted,
            method,
            Request(prompts, max_new_tokens, knobs),
            oracle,
            METHODS[method],
        )


@every_method
def test_prompts_that_end_around_a_block_border(scripted, method):
    oracle = use_table(scripted, "random")
    length = 1 if method == "ar" else int(method.rsplit("-", 1)[1])
    for max_new_tokens in sorted({1, min(length, 28), min(length + 1, 29)}):
        longest = ROOM - max_new_tokens
        borders = (length - 1, length, length + 1, 2 * length - 1, 2 * length)
        lengths = [n for n in borders if 0 < n <= longest] or [longest]
        for some in (lengths[:4], lengths[4:]):
            prompts = [random_prompt(n, n) for n in (*some, 1, 2, 3)[:4]]
            request = Request(prompts, max_new_tokens, stop_ids=())
            check(scripted, method, request, oracle, METHODS[method])


def test_the_longest_canvas(scripted):
    """Prompt and new tokens fill all positions, next to a short and a middling prompt."""
    oracle = use_table(scripted, "random")
    limit = CONFIG.max_positions
    prompts = [random_prompt(n, n) for n in (3, 70, limit - 21)]
    method = "low_confidence_dynamic-5"
    request = Request(prompts, 21, {"threshold": 0.3}, stop_ids=())
    found = check(scripted, method, request, oracle, ((True, True),))
    # The short prompt gives the same on a canvas of another width.
    narrow = Request([prompts[0]] * 3, 21, {"threshold": 0.3}, stop_ids=())
    [alone, *_] = check(scripted, method, narrow, oracle, ((True, True),))[True, True]
    assert_same_rows([alone], found[True, True][:1])


# --- rows -----------------------------------------------------------------------------

SAMPLED = {"temperature": 1.0}
FILTERED = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}


def check_rows(model, method: str, request: Request, data, **more):
    """A row is the same alone, in another order, among others, and in smaller batches."""
    rows = len(request.prompts)
    seeds = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=rows, max_size=rows))
    batch, state = request.run(model, method, seed=seeds, **more)
    assert_promises(request, request.settings(method, **more), batch, state)

    alone = [
        request.run(model, method, prompts=[prompt], seed=[seed], **more)[0][0]
        for prompt, seed in zip(request.prompts, seeds, strict=True)
    ]
    assert_same_rows(alone, batch)

    order = data.draw(st.permutations(range(rows)))
    permuted, _ = request.run(
        model,
        method,
        prompts=[request.prompts[i] for i in order],
        seed=[seeds[i] for i in order],
        **more,
    )
    assert_same_rows(permuted, [batch[i] for i in order])

    kept = data.draw(st.integers(0, rows - 1))
    strangers = data.draw(prompts_for(request.max_new_tokens, st.just(rows)))
    strangers[kept] = request.prompts[kept]
    others = [seed ^ 1 for seed in seeds]
    others[kept] = seeds[kept]
    among, _ = request.run(model, method, prompts=strangers, seed=others, **more)
    assert_same_rows([among[kept]], [batch[kept]])

    # One seed for all: prompt i draws from (seed, i), in batches of any size.
    together, _ = request.run(model, method, seed=seeds[0], **more)
    parts, _ = request.run(model, method, seed=seeds[0], batch_size=1, **more)
    assert_same_rows(parts, together)
    assert_same_rows(together[:1], batch[:1])


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ar", FILTERED),
        ("low_confidence_dynamic-5", {}),
        ("low_confidence_dynamic-5", SAMPLED),
        ("random-5", {}),
    ],
)
@examples(4)
@given(request=requests(), table=st.sampled_from(RANDOM), data=st.data())
def test_a_row_equals_its_prompt_alone(scripted, method, more, request, table, data):
    use_table(scripted, table)
    check_rows(scripted, method, request, data, **more)


@pytest.mark.parametrize(
    ("method", "more"),
    [("low_confidence_dynamic-5", {}), ("low_confidence_dynamic-5", SAMPLED)],
)
@examples(3)
@given(request=requests(), data=st.data())
def test_a_row_equals_its_prompt_alone_in_a_transformer(tiny, method, more, request, data):
    check_rows(tiny, method, request, data, **more)


@examples(5)
@given(request=requests(), seed=st.integers(0, 2**32 - 1))
def test_folding_changes_no_draw(scripted, request, seed):
    use_table(scripted, "random")
    method = "low_confidence_dynamic-5"
    plain, state = request.run(scripted, method, seed=seed, fold=False, **SAMPLED)
    assert_promises(request, request.settings(method, **SAMPLED), plain, state)
    folded, _ = request.run(scripted, method, seed=seed, **SAMPLED)
    for one, other in zip(folded, plain, strict=True):
        assert (one.tokens, one.unmask_forward) == (other.tokens, other.unmask_forward)
        assert one.finish_reason == other.finish_reason
        assert one.stats.forwards["total"] <= other.stats.forwards["total"]


class Letters:
    """A tokenizer whose every token is a character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("0") + i) for i in ids)


@examples(6)
@given(
    request=requests(),
    table=st.sampled_from(RANDOM),
    stop=st.lists(st.integers(0, MASK - 1), min_size=1, max_size=6),
)
def test_a_stop_string_ends_its_own_row(request, table, stop, scripted):
    use_table(scripted, table)
    method, stop = "low_confidence_dynamic-5", list(Letters().decode(stop))
    whole, _ = request.run(scripted, method)
    scripted.tokenizer = Letters()
    try:
        batch, _ = request.run(scripted, method, stop=stop)
        alone, _ = request.run(scripted, method, stop=stop, batch_size=1)
    finally:
        scripted.tokenizer = None
    assert_same_rows(alone, batch)
    for one, full in zip(batch, whole, strict=True):
        text = Letters().decode(full.tokens)
        cut = min((text.index(s) for s in stop if s in text), default=None)
        assert one.text == text[:cut] == Letters().decode(one.tokens)
        assert one.finish_reason == (full.finish_reason if cut is None else "stop")
        assert one.stats.forwards["total"] <= full.stats.forwards["total"]
        assert one.confidence == full.confidence[:cut]


def test_seeds_matter_and_repeat(scripted):
    use_table(scripted, "flat")
    request = Request([[1, 2, 3]] * 4, 30, stop_ids=())
    method = "low_confidence_dynamic-5"
    same, _ = request.run(scripted, method, seed=[7, 7, 8, 9], **SAMPLED)
    assert same[0].tokens == same[1].tokens
    assert len({tuple(output.tokens) for output in same}) == 3
    streams, _ = request.run(scripted, method, seed=7, **SAMPLED)
    assert len({tuple(output.tokens) for output in streams}) == 4
    assert streams[0].tokens == same[0].tokens


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-42, 1e-46])
def test_a_temperature_near_zero_is_nearly_greedy(scripted, temperature):
    use_table(scripted, "random")
    request = Request([random_prompt(n, n) for n in (2, 9, 30)], 20)
    method = "low_confidence_dynamic-5"
    knobs = {"threshold": 5.0, "denoising_steps": 1}
    request = dataclasses.replace(request, knobs=knobs)
    greedy, _ = request.run(scripted, method)
    sampled, state = request.run(scripted, method, temperature=temperature)
    assert_promises(request, request.settings(method), sampled, state)
    assert [o.tokens for o in sampled] == [o.tokens for o in greedy]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 50, "top_p": 1e-6}])
def test_the_only_candidate_is_the_greedy_one(scripted, filters):
    use_table(scripted, "mostly the mask")
    request = Request([random_prompt(n, n) for n in (2, 9, 30)], 20)
    greedy, _ = request.run(scripted, "ar")
    sampled, _ = request.run(scripted, "ar", temperature=3.0, **filters)
    assert [o.tokens for o in sampled] == [o.tokens for o in greedy]


@pytest.mark.parametrize("temperature", [1e6, 3e38])
def test_a_high_temperature_keeps_every_promise(scripted, temperature):
    use_table(scripted, "mostly the mask")
    request = Request([random_prompt(n, n) for n in (2, 9, 30)], 20)
    for method, more in (("ar", FILTERED), ("low_confidence_dynamic-5", SAMPLED)):
        more = {**more, "temperature": temperature}
        outputs, state = request.run(scripted, method, **more)
        assert_promises(request, request.settings(method, **more), outputs, state)


# --- loop, pauses, traces -------------------------------------------------------------


def assert_same_state(one, other) -> None:
    """Equal to the bit, but for confidences, which other programs may round elsewhere."""
    one, other = (jax.tree.map(_to_numpy, state) for state in (one, other))
    np.testing.assert_allclose(one.confidence, other.confidence, rtol=1e-6)
    rest = [state.replace(confidence=None) for state in (one, other)]
    chex.assert_trees_all_equal(*rest)


def assert_progress(method, before, after) -> None:
    """One step: it unmasks or stores in every row, and takes nothing back."""
    for row in range(len(before.done)):
        end = before.end[row]
        old, new = before.canvas[row, :end], after.canvas[row, :end]
        np.testing.assert_array_equal(old[old != MASK], new[old != MASK])
        if before.done[row]:
            assert after.done[row]
            np.testing.assert_array_equal(old, new)
            assert before.cache.length[row] == after.cache.length[row]
            counts = [
                [x[row] for x in jax.tree.leaves(s.forwards)] for s in (before, after)
            ]
            assert counts[0] == counts[1]
            continue
        order = after.unmask_forward[row]
        unmasked = np.flatnonzero(before.unmask_forward[row] != order)
        stored = after.cache.length[row] - before.cache.length[row]
        start = before.cursor[row]
        assert all(start <= i < start + method.block_length for i in unmasked)
        assert (order[unmasked] == before.forwards.denoise[row]).all()
        assert (before.canvas[row][unmasked] == MASK).all()
        assert stored in (0, method.block_length)
        denoised = after.forwards.denoise[row] - before.forwards.denoise[row]
        committed = after.forwards.commit[row] - before.forwards.commit[row]
        assert denoised + committed == 1
        assert (len(unmasked) > 0) == (denoised == 1)
        assert (stored > 0) or denoised


@pytest.mark.parametrize(
    ("method", "fold"),
    [(name, True) for name in METHODS if name == "ar" or name.endswith("-5")]
    + [("low_confidence_dynamic-5", False)],
)
def test_the_loop_equals_its_steps_in_python(scripted, method, fold):
    """... and all settings and lengths are one trace."""
    use_table(scripted, "ends often")
    decoder = DECODERS[decoder_and_settings(method)[0]]
    more = folding(method, fold, early_stop=fold)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(table, traced, state):
        return decoder.step(scripted_fns(table), traced, state)

    for lengths, max_new_tokens, knobs in (
        ((1, 5, 12, 30), 30, {"threshold": 0.3, "eb_threshold": 3.0}),
        ((17, 2, 40), 9, {"threshold": 0.9, "denoising_steps": 2}),
    ):
        prompts = [random_prompt(n, n) for n in lengths]
        request = Request(prompts, max_new_tokens, knobs)
        request.run(scripted, method, **more)
        final, (_, (started, *_)) = scripted.state, scripted.last_call
        resolved = request.settings(method, **more)
        one_step = functools.partial(step, scripted.params, traced_settings(resolved))
        states = loop.run_in_python(one_step, started)
        assert_same_state(states[-1], final)
        states = [jax.tree.map(_to_numpy, state) for state in states]
        for before, after in itertools.pairwise(states):
            assert_progress(resolved, before, after)
        # The counters against the calls: the slowest row took part in every one.
        counters = states[-1].forwards
        assert max(counters.denoise + counters.commit) == len(states) - 1


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("method", ["ar", "low_confidence_dynamic-5", "random-5"])
@pytest.mark.parametrize("rows", [4, 3])
def test_pauses_change_nothing(scripted, method, fold, rows):
    """Streaming and stop strings pause after a finished block, also when a row is done."""
    use_table(scripted, "ends often")
    request = Request([random_prompt(n, n) for n in (1, 5, 12, 30)[:rows]], 30)
    more = folding(method, fold, early_stop=fold)
    request.run(scripted, method, **more)
    final, (key, (before, *arguments, _)) = scripted.state, scripted.last_call
    length = request.settings(method).block_length
    blocks = np.asarray(final.cursor - before.cursor) // length + 1
    for _ in range(blocks.sum()):
        pause = jnp.asarray(True)
        state = jax.tree.map(jnp.copy, before)
        after = scripted.run_program(key, None, (state, *arguments, pause))
        news = (after.cursor > before.cursor) | (after.done & ~before.done)
        assert bool(news.any()), "a pause without news: whoever waits for the end hangs"
        if bool(after.done.all()):
            break
        before = after
    assert_same_state(after, final)


def test_a_bucket_is_one_trace(scripted):
    """Other lengths, thresholds, temperatures and seeds compile nothing."""
    use_table(scripted, "random")

    def run(lengths, max_new_tokens, **more):
        request = Request([random_prompt(n, n) for n in lengths], max_new_tokens)
        request.run(scripted, "low_confidence_dynamic-5", **more)

    before = scripted.num_traces
    run([5, 6, 7], 8, temperature=1.0)
    assert scripted.num_traces - before <= 2  # prefill and loop
    counted = scripted.num_traces, scripted.compile_seconds
    for n in range(1, 13):
        run([n, 64 - n, 3], max(1, n - 8), temperature=n / 4, seed=n)
    run([1, 2, 3], 48, temperature=0.5, threshold=0.8, denoising_steps=2)
    run([1, 2, 3, 4], 48, temperature=0.5, threshold=0.9, eb_threshold=1.0)
    run([9, 9, 9, 9], 48, temperature=0.1, seed=[1, 2, 3, 4])
    use_table(scripted, "ends often")  # other weights of the same shape
    run([1, 2, 3], 48, temperature=2.0, stop_ids=[5])
    assert (scripted.num_traces, scripted.compile_seconds) == counted


# --- bad inputs -----------------------------------------------------------------------


class NeverRun(ScriptedModel):
    """A model that must be asked nothing."""

    def run_program(self, key, build, args):
        pytest.fail("the input was accepted")


def message_of(prompts, config=CONFIG, **arguments) -> str:
    """The one line in which a request is refused."""
    model = NeverRun(TABLES["random"], config)
    with pytest.raises(ValueError) as caught:
        generate(model, prompts, **{"max_new_tokens": 8, **arguments})
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tempertaure": 1.0}, ["tempertaure=1.0", "temperature"]),
        ({"decoder": "ar", "threshold": 0.5}, ["threshold=0.5", "ar"]),
        ({"decoder": "nope"}, ["decoder='nope'", "block", "ar"]),
        ({"decoder": 5}, ["decoder=5"]),
        ({"preset": "nope"}, ["preset='nope'", "sdar-static"]),
        ({"threshold": 0.5, "confidence_threshold": 0.5}, ["threshold", "twice"]),
        ({"dynamic_threshold": 0.5, "confidence_threshold": 0.6}, ["threshold", "twice"]),
        ({"block_length": 4, "block_size": 8}, ["block_length", "twice"]),
        ({"top_k": 5}, ["top_k=5", "temperature"]),
        ({"top_p": 0.5}, ["top_p=0.5", "temperature"]),
        ({"decoder": "ar", "top_k": 5}, ["top_k=5", "temperature"]),
        ({"temperature": NAN}, ["temperature=nan"]),
        ({"temperature": INF}, ["temperature=inf"]),
        ({"temperature": -1.0}, ["temperature=-1.0"]),
        ({"temperature": "1"}, ["temperature='1'"]),
        ({"temperature": True}, ["temperature=True"]),
        ({"temperature": [1.0]}, ["temperature=[1.0]"]),
        ({"threshold": NAN}, ["threshold=nan"]),
        ({"threshold": INF}, ["threshold=inf"]),
        ({"threshold": -0.1}, ["threshold=-0.1"]),
        ({"threshold": "0.9"}, ["threshold='0.9'"]),
        ({"threshold": True}, ["threshold=True"]),
        ({"eb_threshold": NAN}, ["eb_threshold=nan"]),
        ({"eb_threshold": -1.0}, ["eb_threshold=-1.0"]),
        ({"block_length": 0}, ["block_length=0"]),
        ({"block_length": -3}, ["block_length=-3"]),
        ({"block_length": 2.5}, ["block_length=2.5"]),
        ({"block_length": "4"}, ["block_length='4'"]),
        ({"block_length": True}, ["block_length=True"]),
        ({"block_length": NAN}, ["block_length=nan"]),
        ({"block_length": INF}, ["block_length=inf"]),
        ({"denoising_steps": 0}, ["denoising_steps=0"]),
        ({"denoising_steps": NAN}, ["denoising_steps=nan"]),
        ({"denoising_steps": 2**31}, ["denoising_steps=2147483648"]),
        ({"temperature": 1.0, "top_k": -1}, ["top_k=-1"]),
        ({"temperature": 1.0, "top_k": 2**31}, ["top_k=2147483648"]),
        ({"temperature": 1.0, "top_k": INF}, ["top_k=inf"]),
        ({"temperature": 1.0, "top_p": 0.0}, ["top_p=0.0"]),
        ({"temperature": 1.0, "top_p": 1.5}, ["top_p=1.5"]),
        ({"temperature": 1.0, "top_p": NAN}, ["top_p=nan"]),
        ({"fold": 1}, ["fold=1"]),
        ({"fold": "yes"}, ["fold='yes'"]),
        ({"early_stop": 0}, ["early_stop=0"]),
        ({"remasking_strategy": "best"}, ["remasking_strategy='best'", *STRATEGIES]),
        ({"remasking_strategy": 3}, ["remasking_strategy=3"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"max_new_tokens": -1}, ["max_new_tokens=-1"]),
        ({"max_new_tokens": 1.5}, ["max_new_tokens=1.5"]),
        ({"max_new_tokens": "5"}, ["max_new_tokens='5'"]),
        ({"max_new_tokens": True}, ["max_new_tokens=True"]),
        ({"max_new_tokens": 10**12}, ["max_new_tokens=1000000000000", "256"]),
        ({"steps": 0}, ["steps=0"]),
        ({"steps": -8}, ["steps=-8"]),
        ({"steps": "8"}, ["steps='8'"]),
        ({"steps": True}, ["steps=True"]),
        ({"steps": NAN}, ["steps=nan"]),
        ({"steps": 8, "denoising_steps": 4}, ["steps=8", "denoising_steps"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"seed": 2**32}, ["seed=4294967296"]),
        ({"seed": 1.5}, ["seed=1.5"]),
        ({"seed": "a"}, ["seed='a'"]),
        ({"seed": True}, ["seed=True"]),
        ({"seed": [1.5]}, ["seed=[1.5]"]),
        ({"seed": [-1]}, ["seed=[-1]"]),
        ({"seed": []}, ["0 seeds", "1 prompt"]),
        ({"seed": [1, 2]}, ["2 seeds", "1 prompt"]),
        ({"stop_ids": [VOCAB]}, ["stop_ids=", "64"]),
        ({"stop_ids": [-1]}, ["stop_ids=", "-1"]),
        ({"stop_ids": [MASK]}, ["stop_ids=", "63", "mask"]),
        ({"stop_ids": [NAN]}, ["stop_ids=", "nan"]),
        ({"stop_ids": ["a"]}, ["stop_ids=", "'a'"]),
        ({"stop_ids": "5"}, ["stop_ids=", "'5'"]),
        ({"stop_ids": [1.5]}, ["stop_ids=", "1.5"]),
        ({"stop_ids": [True]}, ["stop_ids=", "True"]),
        ({"stop_ids": 5}, ["stop_ids=5"]),
        ({"stop": "."}, ["stop=", "tokenizer"]),
        ({"stop": ""}, ["stop=", "empty"]),
        ({"stop": 5}, ["stop=5"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"batch_size": "a"}, ["batch_size='a'"]),
        ({"batch_size": 1.5}, ["batch_size=1.5"]),
        ({"batch_size": True}, ["batch_size=True"]),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(arguments, words):
    message = message_of([[1, 2, 3]], **arguments)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[-1]], ["-1", "64"]),
        ([[VOCAB]], ["64"]),
        ([[2**40]], [str(2**40), "64"]),
        ([[1, MASK]], ["63", "mask"]),
        ([[1, 2], [3], [MASK]], ["prompt 2", "63", "mask"]),
        ([[1] * 249], ["249", "8", "256"]),
        ([[1], [1] * 300], ["prompt 1", "300", "8", "256"]),
        ("text", ["tokenizer"]),
        (["text"], ["tokenizer"]),
        ([["a"]], ["prompt", "'a'"]),
        ([[None]], ["prompt", "None"]),
        ([[NAN]], ["prompt", "nan"]),
        ([[1.5, 2]], ["1.5"]),
        ([1.5, 2.5], ["1.5"]),
        ([[True]], ["True"]),
        ([5, [1]], ["5"]),
        (5, ["5"]),
        (None, ["None"]),
    ],
    ids=lambda x: str(x)[:30],
)
def test_wrong_prompts_are_refused(prompts, words):
    message = message_of(prompts)
    for word in words:
        assert word in message


def test_an_empty_prompt_is_the_bos_token(scripted):
    use_table(scripted, "random")
    request = Request([[], [BOS], [5, 6]], 20)
    outputs, _ = request.run(scripted, "low_confidence_dynamic-5")
    assert_same_rows(outputs[:1], outputs[1:2])
    assert outputs[0].stats.prompt_tokens == 1
    without = dataclasses.replace(CONFIG, bos_id=None)
    assert "BOS" in message_of([[5], []], without)
    assert "prompt 1" in message_of([[5], []], without)


def test_no_prompts_give_no_outputs():
    assert generate(NeverRun(TABLES["random"]), []) == []


@pytest.mark.parametrize("name", ["threshold", "confidence_threshold", "dynamic_threshold"])
def test_a_preset_is_overridden_by_any_name(name):
    request = plan(CONFIG, preset="sdar-dynamic", **{name: 0.5})
    assert request.settings.threshold == 0.5
    request = plan(CONFIG, preset="sdar-static", remasking="random")
    assert request.settings.remasking_strategy == "random"
