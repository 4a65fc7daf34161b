"""The rules that choose slots to unmask, against small NumPy oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dllm_jax import unmasking

_BATCH = 3
_WIDTHS = (1, 4, 7)
_quick = settings(max_examples=60, deadline=None, derandomize=True)

_linear_quota = jax.jit(unmasking.linear_quota, static_argnums=1)
_top_count = jax.jit(unmasking.top_count)
_leftmost = jax.jit(unmasking.leftmost)
_above_threshold = jax.jit(unmasking.above_threshold)
_entropy_bounded = jax.jit(unmasking.entropy_bounded)
_jointly_certain = jax.jit(unmasking.jointly_certain)
_entropy_bounded_script = jax.jit(unmasking.entropy_bounded_script)


@st.composite
def _blocks(draw, values):
    """Masks, scores and counts of a batch; the few distinct `values` make ties common."""
    shape = (_BATCH, draw(st.sampled_from(_WIDTHS)))
    masked = draw(arrays(np.bool_, shape))
    score = draw(arrays(np.float32, shape, elements=st.sampled_from(values)))
    count = draw(arrays(np.int32, _BATCH, elements=st.integers(1, shape[1] + 2)))
    return masked, score, count


_best_and = jax.jit(unmasking.best_and)
_best_of_runs = jax.jit(unmasking.best_of_runs)
_confident_together = jax.jit(unmasking.confident_together, static_argnums=3)

# Multiples of a power of two: their sums are exact in float32, as ties must be.
_PROBABILITIES = [i / 16 for i in range(17)]
_ENTROPIES = [0.0, -0.0, 0.125, 0.25, 0.5, 0.75, 1.5, 3.0]


def _pick(shape, chosen_rows) -> np.ndarray:
    picked = np.zeros(shape, bool)
    for row, slots in enumerate(chosen_rows):
        picked[row, slots] = True
    return picked


def _best(score, masked, count) -> list[int]:
    """The `count` masked slots of highest score, of equals the leftmost, of one row."""
    slots = [i for i in range(len(score)) if masked[i]]
    return sorted(slots, key=lambda i: (-score[i], i))[:count]


# --- the quota --------------------------------------------------------------------------


@pytest.mark.parametrize("block_length", [1, 4, 7, 32])
@pytest.mark.parametrize("denoising_steps", [1, 2, 3, 4, 7, 8, 40])
def test_quota_follows_the_published_schedule(block_length, denoising_steps):
    base, more = block_length // denoising_steps, block_length % denoising_steps
    schedule = [base + 1] * more + [base] * (denoising_steps - more)
    assert sum(schedule) == block_length
    step = jnp.arange(denoising_steps, dtype=jnp.int32)
    found = _linear_quota(step, block_length, jnp.int32(denoising_steps))
    # The zeros of a schedule longer than the block would be forwards for nothing.
    np.testing.assert_array_equal(found, [max(n, 1) for n in schedule])
    late = _linear_quota(step + denoising_steps, block_length, jnp.int32(denoising_steps))
    assert (np.asarray(late) >= 1).all()


# --- rules by count ---------------------------------------------------------------------


@_quick
@given(_blocks([*_PROBABILITIES, -0.0, -1.0, 2.5]))
def test_top_count(block):
    masked, score, count = block
    expected = [_best(*row) for row in zip(score, masked, count, strict=True)]
    found = np.asarray(_top_count(score, masked, count))
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


@_quick
@given(_blocks([0.0]))
def test_leftmost(block):
    masked, _, count = block
    expected = [np.flatnonzero(row)[:n] for row, n in zip(masked, count, strict=True)]
    found = np.asarray(_leftmost(masked, count))
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


@pytest.mark.parametrize("rule", ["top_count", "leftmost"])
def test_a_partial_block_is_never_overwritten(rule):
    """A quota of a whole block on a block that begins with the prompt (SDAR's bug)."""
    masked = np.array([[False, False, False, True]] * _BATCH)
    score = np.array([[0.9, 0.9, 0.9, 0.1]] * _BATCH, np.float32)
    count = np.full(_BATCH, 4, np.int32)
    if rule == "top_count":
        found = _top_count(score, masked, count)
    else:
        found = _leftmost(masked, count)
    np.testing.assert_array_equal(found, masked)


# --- the threshold ----------------------------------------------------------------------


@_quick
@given(
    _blocks(_PROBABILITIES),
    st.sampled_from([0.0, 0.25, 0.5, 0.9375, 0.95, 1.0, 1.5]),
)
def test_dynamic_rule(block, threshold):
    """Above the threshold if the quota is met, else the quota's best, as SDAR has it."""
    masked, confidence, count = block
    expected = []
    for p, is_masked, quota in zip(confidence, masked, count, strict=True):
        high = [i for i in range(len(p)) if is_masked[i] and p[i] > threshold]
        expected.append(high if len(high) >= quota else _best(p, is_masked, quota))
    otherwise = _top_count(confidence, masked, count)
    found = _above_threshold(confidence, masked, np.float32(threshold), otherwise, count)
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


@pytest.mark.parametrize(
    ("confidence", "threshold", "above"),
    [
        ([0.0, 0.5, 1.0], 0.0, [False, True, True]),
        ([0.0, 0.5, 1.0], 0.5, [False, False, True]),
        ([0.5, 1.0, 1.0], 1.0, [False, False, False]),
        ([0.5, 1.0, 1.0], 1.5, [False, False, False]),
    ],
)
def test_the_threshold_is_strict(confidence, threshold, above):
    masked = np.ones((1, 3), bool)
    otherwise = np.zeros((1, 3), bool)
    found = _above_threshold(
        np.array([confidence], np.float32),
        masked,
        np.float32(threshold),
        otherwise,
        np.ones(1, np.int32),
    )
    np.testing.assert_array_equal(found, [above])


def test_too_few_above_the_threshold_are_dropped_for_the_other_choice():
    """JetEngine's fallback: the leftmost, not those above the threshold."""
    masked = np.array([[True, True, True, True], [True, True, True, True]])
    confidence = np.array([[0.1, 0.2, 0.3, 0.99], [0.1, 0.2, 0.98, 0.99]], np.float32)
    count = np.full(2, 2, np.int32)
    found = _above_threshold(
        confidence, masked, np.float32(0.9), _leftmost(masked, count), count
    )
    np.testing.assert_array_equal(
        found, [[True, True, False, False], [False, False, True, True]]
    )


# --- entropy ----------------------------------------------------------------------------


@_quick
@given(_blocks(_ENTROPIES), st.sampled_from([0.0, 0.125, 0.35, 1.0, 2.25, 100.0, np.inf]))
def test_entropy_bounded(block, bound):
    masked, entropy, _ = block
    expected = []
    for row, is_masked in zip(entropy, masked, strict=True):
        order = _best(-row, is_masked, len(row))
        total, within = 0.0, 0
        for slot in order:
            total += float(row[slot])
            within += total < bound
        expected.append(order[: max(within, 1)])
    found = np.asarray(_entropy_bounded(entropy, masked, np.float32(bound)))
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


@_quick
@given(_blocks(_ENTROPIES), st.sampled_from([0.0, 0.125, 0.35, 1.0, 2.25, 100.0]))
def test_jointly_certain(block, bound):
    masked, entropy, _ = block
    expected = []
    for row, is_masked in zip(entropy, masked, strict=True):
        order = _best(-row, is_masked, len(row))
        passing = [
            n
            for n in range(1, len(order) + 1)
            if sum(map(float, row[order[:n]])) - float(max(row[order[:n]])) <= bound
        ]
        expected.append(order[: max(passing, default=0)])
    found = np.asarray(_jointly_certain(entropy, masked, np.float32(bound)))
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


@_quick
@given(_blocks(_PROBABILITIES), st.sampled_from([0.0, 0.35, 1.0, 2.0, 5.0, 100.0]))
def test_entropy_bounded_script(block, bound):
    masked, confidence, _ = block
    expected = []
    for p, is_masked in zip(confidence.astype(np.float64), masked, strict=True):
        # One number a block, over decided slots too, in place of a slot's own entropy.
        total = -sum(x * np.log(x) for x in p if x > 0)
        slots = np.flatnonzero(is_masked)
        multiples = [total * (i + 1) for i in range(len(slots))]
        if total > 0:
            # Where a multiple meets the bound, float32 may fall on either side.
            assume(all(abs(m - bound) > 1e-4 for m in multiples))
        expected.append(slots[: max(sum(m < bound for m in multiples), 1)])
    found = np.asarray(_entropy_bounded_script(confidence, masked, np.float32(bound)))
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


# --- what holds for every rule ----------------------------------------------------------


@_quick
@given(_blocks(_PROBABILITIES), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_best_and(block, threshold):
    score, masked = block[1], block[0]
    expected = [
        {*np.flatnonzero(row & (s >= threshold)), *_best(s, row, 1)}
        for row, s in zip(masked, score, strict=True)
    ]
    found = _best_and(score >= threshold, score, masked)
    np.testing.assert_array_equal(found, _pick(masked.shape, map(sorted, expected)))


@_quick
@given(_blocks(_PROBABILITIES))
def test_best_of_runs(block):
    masked, score, _ = block
    expected = []
    for row, s in zip(masked, score, strict=True):
        edges = np.flatnonzero(np.diff([False, *row, False]))
        runs = edges.reshape(-1, 2)
        expected.append([first + int(s[first:last].argmax()) for first, last in runs])
    found = _best_of_runs(score, masked)
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


@_quick
@given(_blocks(_PROBABILITIES), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.booleans())
def test_confident_together(block, factor, spare_last):
    masked, score, _ = block
    expected = []
    for row, s in zip(masked, score, strict=True):
        ranked = _best(s, row, row.size)
        count = min(1, len(ranked))
        while count < len(ranked) and (
            s[ranked[count]] >= 1 - factor / (count + 2)
            or (spare_last and count == len(ranked) - 1)
        ):
            count += 1
        expected.append(ranked[:count])
    found = _confident_together(score, masked, np.float32(factor), spare_last)
    np.testing.assert_array_equal(found, _pick(masked.shape, expected))


def _dynamic(confidence, masked, count):
    otherwise = _top_count(confidence, masked, count)
    return _above_threshold(confidence, masked, np.float32(0.9), otherwise, count)


_RULES = {
    "sequential": lambda p, masked, count: _leftmost(masked, count),
    "static": _top_count,
    "dynamic": _dynamic,
    "entropy_bounded": lambda p, masked, count: _entropy_bounded(
        -np.log(np.maximum(p, 1e-6)), masked, np.float32(0.35)
    ),
    "jointly_certain": lambda p, masked, count: _jointly_certain(
        -np.log(np.maximum(p, 1e-6)), masked, np.float32(0.35)
    ),
    "entropy_bounded_script": lambda p, masked, count: _entropy_bounded_script(
        p, masked, np.float32(0.35)
    ),
}


@pytest.mark.parametrize("rule", _RULES)
def test_every_rule_makes_progress_and_ends_the_block(rule):
    """Never an unmasked slot, at least one masked one, and nothing where none is left."""
    rng = np.random.default_rng(0)
    for denoising_steps in (1, 3, 7, 20):
        masked = rng.random((_BATCH, 7)) < 0.7
        masked[0], masked[1] = False, True
        for step in range(7):
            # Flat, saturated and plain confidences.
            p = rng.random(masked.shape).astype(np.float32)
            p = [np.zeros_like(p), np.ones_like(p), p][rng.integers(3)]
            steps = np.full(_BATCH, step, np.int32)
            count = _linear_quota(steps, 7, jnp.int32(denoising_steps))
            chosen = np.asarray(_RULES[rule](p, masked, count))
            assert chosen.dtype == bool
            assert not (chosen & ~masked).any()
            np.testing.assert_array_equal(chosen.any(-1), masked.any(-1))
            masked = masked & ~chosen
            if rule in ("sequential", "static", "dynamic") and step + 1 >= denoising_steps:
                assert not masked.any()
        assert not masked.any()


@pytest.mark.parametrize("rule", ["static", "dynamic", "entropy_bounded"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_progress_even_when_the_scores_are_unusable(rule, value):
    """Scores that sort behind the slots that are not masked still unmask something."""
    masked = np.array([[False, True, True]] * _BATCH)
    score = np.where(masked, np.float32(value), np.float32(0.5))
    count = np.ones(_BATCH, np.int32)
    if rule == "entropy_bounded":
        chosen = _entropy_bounded(-score, masked, np.float32(0.35))
    else:
        chosen = _RULES[rule](score, masked, count)
    assert not (np.asarray(chosen) & ~masked).any()
    assert np.asarray(chosen).any(-1).all()
