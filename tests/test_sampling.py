"""Proposals: greedy, filtered and sampled tokens, their confidence and entropy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from dllm_jax.sampling import SamplingKnobs, filter_logits, margin, propose, top_tokens

_quick = settings(max_examples=50, deadline=None, derandomize=True)
_VOCAB = 7

_greedy = jax.jit(propose, static_argnums=1)
_filter = jax.jit(filter_logits)


@functools.partial(jax.jit, static_argnames=("mask_id", "filtered"))
def _sample(logits, mask_id, rng_keys, knobs, filtered=False):
    return propose(logits, mask_id, rng_keys, knobs, filtered)


def _knobs(temperature=1.0, top_k=0, top_p=1.0) -> SamplingKnobs:
    return SamplingKnobs(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))


def _softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _entropy(probability) -> float:
    return -sum(p * np.log(p) for p in probability if p > 0)


# --- greedy -----------------------------------------------------------------------------


@_quick
@given(
    arrays(
        np.float32,
        (2, 3, _VOCAB),
        elements=st.sampled_from([-np.inf, -100.0, -1.0, 0.0, 0.5, 2.0, 30.0]),
    ),
    st.sampled_from([0, 3]),
)
def test_greedy_proposals(logits, mask_id):
    others = [i for i in range(_VOCAB) if i != mask_id]
    assume(np.isfinite(logits[..., others]).any(-1).all())
    token, confidence, entropy = _greedy(logits, mask_id)
    assert token.dtype == jnp.int32
    assert confidence.dtype == entropy.dtype == jnp.float32
    for at in np.ndindex(2, 3):
        best = max(others, key=lambda i: (logits[at][i], -i))
        probability = _softmax(logits[at])
        assert int(token[at]) == best
        # The mask token keeps its share of the distribution.
        # Below 1e-37 float32 may flush to zero.
        np.testing.assert_allclose(confidence[at], probability[best], rtol=1e-5, atol=1e-37)
        np.testing.assert_allclose(entropy[at], _entropy(probability), atol=1e-5)


def test_top_tokens_are_the_best_in_order_of_index_where_tied():
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 3, (3, 5, 9)).astype(np.float32)  # many ties
    tokens, probability = top_tokens(jnp.asarray(logits), 4, 3)
    p = np.apply_along_axis(_softmax, -1, logits)
    allowed = np.where(np.arange(9) == 4, -np.inf, logits)
    order = np.argsort(-allowed, axis=-1, kind="stable")[..., :3]
    np.testing.assert_array_equal(tokens, order)
    expected = np.take_along_axis(p, order, axis=-1)
    np.testing.assert_allclose(probability, expected, rtol=1e-5)
    lead = margin(jnp.asarray(logits), 4)
    np.testing.assert_allclose(lead, expected[..., 0] - expected[..., 1], atol=1e-6)
    certain = jnp.where(jnp.arange(9) == 7, 0.0, -jnp.inf)[None, None]
    np.testing.assert_array_equal(margin(certain, 4), [[1.0]])


def test_confidence_just_below_a_threshold_stays_below():
    """0.8993, which a bfloat16 softmax turns into 0.9023."""
    logits = np.array([[[2.19, 0.0, -9.0, -9.0, -np.inf]]], np.float32)
    confidence = float(_greedy(logits, 4).confidence[0, 0])
    np.testing.assert_allclose(confidence, _softmax(logits)[0, 0, 0], rtol=1e-6)
    assert 0.899 < confidence < 0.9


@pytest.mark.parametrize("sampled", [False, True])
def test_large_logits_do_not_overflow(sampled):
    logits = np.array([[[99.0, 100.0, 1.0, -1e30]]], np.float32)
    if sampled:
        keys = jax.random.split(jax.random.key(0), 400)
        logits = np.tile(logits, (400, 1, 1))
        found = _sample(logits, 3, keys, _knobs())
        share = np.mean(np.asarray(found.token) == 1)
        assert abs(share - 1 / (1 + np.exp(-1))) < 0.1  # 0.73, and never the first index
        assert set(np.unique(found.token)) == {0, 1}
    else:
        found = _greedy(logits, 3)
        assert int(found.token[0, 0]) == 1
    probability = _softmax(logits[0, 0])
    np.testing.assert_allclose(
        found.confidence, probability[np.asarray(found.token)], rtol=1e-5
    )
    np.testing.assert_allclose(found.entropy, _entropy(probability), rtol=1e-5)


# --- the mask token ---------------------------------------------------------------------

_MASK_CASES = {
    "largest": [1.0, 0.5, 2.0, 0.0],
    "overwhelming": [0.0, 0.0, 0.0, 0.0],
    "others hardly finite": [-1e30, -1e30, -1e30, -1e30],
    "one other possible": [-np.inf, -np.inf, -3.0, -np.inf],
}


@pytest.mark.parametrize("case", _MASK_CASES)
@pytest.mark.parametrize("mask_id", [0, 3])
def test_the_mask_token_is_never_proposed(case, mask_id):
    others = _MASK_CASES[case]
    row = np.insert(np.array(others, np.float32), mask_id, 1e4)
    logits = np.tile(row, (64, 2, 1))  # 128 draws
    keys = jax.random.split(jax.random.key(1), 64)
    found = [
        _greedy(logits, mask_id),
        _sample(logits, mask_id, keys, _knobs()),
        _sample(logits, mask_id, keys, _knobs(temperature=0.5)),
        _sample(logits, mask_id, keys, _knobs(top_k=1), filtered=True),
        _sample(logits, mask_id, keys, _knobs(top_p=0.1), filtered=True),
        _sample(logits, mask_id, keys, _knobs(2.0, 2, 0.5), filtered=True),
    ]
    for token, confidence, entropy in found:
        assert (np.asarray(token) != mask_id).all()
        assert (np.asarray(token) >= 0).all() and (np.asarray(token) < 5).all()
        assert np.isfinite(confidence).all() and np.isfinite(entropy).all()
        if case == "one other possible":
            assert np.isfinite(row[np.asarray(token)]).all()


@pytest.mark.parametrize("sampled", [False, True])
def test_the_mask_token_is_not_proposed_even_as_the_only_possible_one(sampled):
    if sampled:
        # Finite, but the temperature makes them -inf.
        lowest = np.finfo(np.float32).min
        logits = np.array([[[0.0, lowest, lowest]]], np.float32)
        keys = jax.random.split(jax.random.key(0), 1)
        found = _sample(logits, 0, keys, _knobs(temperature=0.5))
    else:
        found = _greedy(np.array([[[0.0, -np.inf, -np.inf]]], np.float32), 0)
    assert int(found.token[0, 0]) != 0


# --- top-k and top-p --------------------------------------------------------------------


@_quick
@given(
    arrays(
        np.float32, (4, _VOCAB), elements=st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0])
    ),
    st.integers(0, _VOCAB + 2),
)
def test_top_k_keeps_ties(logits, top_k):
    found = np.asarray(_filter(logits, np.int32(top_k), np.float32(1.0)))
    for row, kept in zip(logits, found, strict=True):
        kth = sorted(row, reverse=True)[top_k - 1 if 0 < top_k <= _VOCAB else _VOCAB - 1]
        np.testing.assert_array_equal(kept, np.where(row >= kth, row, -np.inf))


@_quick
@given(
    st.permutations([-3.0, -1.0, 0.0, 0.5, 1.0, 1.75, -np.inf]),
    st.integers(0, _VOCAB),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]),
)
def test_top_k_then_top_p(logits, top_k, top_p):
    order = sorted(range(_VOCAB), key=lambda i: -logits[i])[: top_k or _VOCAB]
    kept = np.full(_VOCAB, -np.inf)
    kept[order] = np.array(logits)[order]
    probability = _softmax(kept)
    expected, before = np.full(_VOCAB, -np.inf), 0.0
    for i in order:
        assume(before == 0.0 or top_p == 1.0 or abs(before - top_p) > 1e-5)
        if before <= top_p or top_p == 1.0:
            expected[i] = logits[i]
        before += probability[i]
    found = _filter(np.array(logits, np.float32), np.int32(top_k), np.float32(top_p))
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_top_k_comes_before_top_p():
    """After top-k the first three hold 0.94 > 0.82; before it the fourth begins at 0.8."""
    probability = np.array([0.35, 0.25, 0.2, 0.05, 0.05, 0.04, 0.03, 0.03])
    # Tied with the fourth, which top-k would keep; one nudge makes the ranks plain.
    probability[4] = 0.0499
    logits = np.log(probability).astype(np.float32)
    kept = np.isfinite(_filter(logits, np.int32(4), np.float32(0.82)))
    np.testing.assert_array_equal(kept, [True] * 3 + [False] * 5)
    kept = np.isfinite(_filter(logits, np.int32(0), np.float32(0.82)))
    np.testing.assert_array_equal(kept, [True] * 4 + [False] * 4)


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.999])
def test_top_p_always_keeps_the_first(top_p):
    logits = np.array([[0.0, 40.0, 1.0], [-np.inf, -np.inf, -5.0]], np.float32)
    kept = np.isfinite(_filter(logits, np.int32(0), np.float32(top_p)))
    np.testing.assert_array_equal(kept, [[False, True, False], [False, False, True]])


def test_confidence_is_that_of_the_unfiltered_distribution():
    """top_k = 1 proposes the best token, but does not make it certain."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4, _VOCAB)).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), 2)
    found = _sample(logits, 3, keys, _knobs(0.7, top_k=1), filtered=True)
    np.testing.assert_array_equal(found.token, _greedy(logits, 3).token)
    for at in np.ndindex(2, 4):
        probability = _softmax(logits[at] / 0.7)
        np.testing.assert_allclose(
            found.confidence[at], probability[int(found.token[at])], rtol=1e-5
        )
        np.testing.assert_allclose(found.entropy[at], _entropy(probability), rtol=1e-5)


# --- draws ------------------------------------------------------------------------------


def test_a_row_depends_on_its_own_key_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 16, 50)).astype(np.float32)
    keys = jax.random.split(jax.random.key(3), 4)
    whole = np.asarray(_sample(logits, 0, keys, _knobs()).token)
    for row in range(4):
        one = slice(row, row + 1)
        alone = _sample(logits[one], 0, keys[one], _knobs()).token
        np.testing.assert_array_equal(alone[0], whole[row])
    other_keys = jax.random.split(jax.random.key(4), 4).at[1].set(keys[1])
    other_logits = logits[::-1].copy()
    other_logits[1] = logits[1]
    found = np.asarray(_sample(other_logits, 0, other_keys, _knobs()).token)
    np.testing.assert_array_equal(found[1], whole[1])
    # The same logits under another key are another draw, and so is every slot of a row.
    again = np.asarray(_sample(logits, 0, other_keys, _knobs()).token)
    assert all((again[row] != whole[row]).any() for row in (0, 2, 3))
    same_logits = np.tile(logits[:1, :1], (4, 16, 1))
    spread = np.asarray(_sample(same_logits, 0, keys, _knobs()).token)
    assert all(len(np.unique(row)) > 1 for row in spread)
    assert len(np.unique(spread, axis=0)) == 4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (2.0, 0, 1.0), (1.0, 60, 0.9), (1.3, 25, 1.0)],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square over a vocabulary of 100, the mask token's share spread over the rest."""
    vocab_size, mask_id, rows, slots = 100, 17, 8, 2048
    row = np.random.default_rng(5).normal(size=vocab_size).astype(np.float32)
    scaled = row.astype(np.float64) / temperature
    scaled[mask_id] = -np.inf
    order = np.argsort(-scaled)[: top_k or vocab_size]
    kept = np.full(vocab_size, -np.inf)
    kept[order] = scaled[order]
    before = np.cumsum(_softmax(kept)[order]) - _softmax(kept)[order]
    kept[order[before > top_p]] = -np.inf
    expected = _softmax(kept) * rows * slots

    logits = np.tile(row, (rows, slots, 1))
    keys = jax.random.split(jax.random.key(6), rows)
    filtered = top_k > 0 or top_p < 1
    found = _sample(
        logits, mask_id, keys, _knobs(temperature, top_k, top_p), filtered=filtered
    )
    counts = np.bincount(np.asarray(found.token).ravel(), minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    # Bins of few expected draws are pooled: the statistic needs about five in each.
    rare = (expected > 0) & (expected < 8)
    common = expected >= 8
    pooled_expected, pooled_counts = list(expected[common]), list(counts[common])
    if rare.any():
        pooled_expected.append(expected[rare].sum())
        pooled_counts.append(counts[rare].sum())
    statistic = sum(
        (c - e) ** 2 / e
        for c, e in zip(pooled_counts, pooled_expected, strict=True)
        if e > 0
    )
    assert stats.chi2.sf(statistic, len(pooled_counts) - 1) > 1e-3
    probability = _softmax(row / temperature)
    np.testing.assert_allclose(
        np.asarray(found.confidence), probability[np.asarray(found.token)], rtol=1e-4
    )
