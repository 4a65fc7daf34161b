"""Paired layouts against the published masks and against double loops from prose."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import layouts
from kernels_pallas import TokenFields, visible


def _matrix(fields: TokenFields, cached: TokenFields | None = None) -> np.ndarray:
    """Who sees whom in row 0, [cached | row] as keys."""
    query = TokenFields(*(np.asarray(x)[0, :, None] for x in fields))
    seen = visible(query, TokenFields(*(np.asarray(x)[0, None] for x in fields)))
    if cached is None:
        return seen
    keys = TokenFields(*(np.asarray(x)[0, None] for x in cached))
    keys = keys._replace(slot=np.full_like(keys.slot, -1))
    return np.concatenate([visible(query, keys), seen], axis=1)


def _row(*values) -> list[jnp.ndarray]:
    return [jnp.asarray(np.asarray(x, np.int32)[None]) for x in values]


# --- SimSD ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(golden_dir):
    cases = json.loads((golden_dir / "simsd" / "masks.json").read_text())
    with np.load(golden_dir / "simsd" / "masks.npz") as arrays:
        return [
            (case, {k: arrays[f"{case['name']}/{k}"] for k in ("mask", "position_ids")})
            for case in cases
        ]


def test_simsd_masks_of_a_block_over_the_cache(published):
    count = 0
    for case, arrays in published:
        if case["kind"] != "cache_verify":
            continue
        length, context = case["B"], case["ctx_aligned"]
        leftover, drafted = len(case["leftover"]), len(case["draft_ids"])
        role = [layouts.KNOWN] * leftover + [layouts.DATA] * drafted
        role += [layouts.MASK] * drafted
        order = [0] * leftover + case["step_map"] * 2
        position = arrays["position_ids"]
        block = np.full(len(role), context // length)
        fields = layouts.simsd_pairs(*_row(position, role, block, order), steps=length)
        cached = None
        if context:
            cached = layouts.block_causal(*_row(np.arange(context)), length)
        expected = arrays["mask"].astype(bool)
        np.testing.assert_array_equal(_matrix(fields, cached), expected, case["name"])
        count += 1
    assert count == 73


def test_simsd_masks_of_prompt_and_several_blocks(published):
    count = 0
    for case, arrays in published:
        legacy = not case.get("block_causal_prompt", True) or "BUG" in case["name"]
        if case["kind"] != "nocache_verify" or legacy:
            continue
        length, prompt = case["B"], case["prompt_len"]
        role, block, order = [layouts.KNOWN] * prompt, list(np.arange(prompt) // length), []
        order += [0] * prompt
        number = -(-prompt // length)
        for accepted in case["accepted_blocks"]:
            role += [layouts.KNOWN] * len(accepted)
            block += [number] * len(accepted)
            order += [0] * len(accepted)
            number += 1
        for steps in case["step_maps"]:
            role += [layouts.DATA] * len(steps) + [layouts.MASK] * len(steps)
            block += [number] * 2 * len(steps)
            order += list(steps) * 2
            number += 1
        real = len(role)
        position = arrays["position_ids"][:real]
        fields = layouts.simsd_pairs(*_row(position, role, block, order), steps=length)
        expected = arrays["mask"].astype(bool)
        assert not expected[:real, real:].any()
        found = _matrix(fields)
        np.testing.assert_array_equal(found, expected[:real, :real], case["name"])
        count += 1
    assert count >= 15


def test_simsd_prefill_and_extension_are_block_causal(published):
    count = 0
    for case, arrays in published:
        if case["kind"] not in ("cache_prefill", "cache_extend"):
            continue
        length = case["B"]
        fields = layouts.block_causal(*_row(arrays["position_ids"]), length)
        context = case.get("ctx_aligned", 0)
        cached = None
        if context:
            cached = layouts.block_causal(*_row(np.arange(context)), length)
        expected = arrays["mask"].astype(bool)
        np.testing.assert_array_equal(_matrix(fields, cached), expected, case["name"])
        count += 1
    assert count == 6


def test_simsd_padding_is_seen_by_nobody():
    role, order = [0, 1, 1, 2, 2], [0, 1, 0, 1, 0]
    valid = jnp.asarray([[True, True, False, True, False]])
    position = [4, 5, 6, 5, 6]
    row = _row(position, role, np.ones(5), order)
    found = _matrix(layouts.simsd_pairs(*row, steps=4, valid=valid))
    others = found & ~np.eye(5, dtype=bool)
    assert not others[:, [2, 4]].any()


# --- S2D2, exact states, LEAP -----------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 7])
def test_mask_copies_of_a_causal_block(length):
    """S2D2's verification over a cache of whole blocks."""
    context = 3 * 8
    position = np.arange(context, context + length)
    causal = jnp.array([100])
    fields = layouts.join(
        layouts.causal_then_blocks(*_row(position), 8, causal),
        layouts.mask_copies(*_row(position)),
    )
    cached = layouts.causal_then_blocks(*_row(np.arange(context)), 8, jnp.array([0]))
    expected = np.zeros((2 * length, context + 2 * length), bool)
    expected[:, :context] = True
    for i in range(length):
        for j in range(length):
            expected[i, context + j] = j <= i
            expected[length + i, context + j] = j < i
            expected[length + i, context + length + j] = j == i
    np.testing.assert_array_equal(_matrix(fields, cached), expected)


def test_separate_states_see_the_cache_and_themselves():
    rng = np.random.default_rng(0)
    state, position = rng.permutation(np.repeat(np.arange(3), 4)), np.zeros(12, int)
    for one in range(3):
        position[state == one] = 8 + np.arange(4)
    start = jnp.full((1, 1), 2, jnp.int32)
    fields = layouts.separate_states(*_row(position, state), start)
    cached = layouts.block_causal(*_row(np.arange(8)), 4)
    found = _matrix(fields, cached)
    assert found[:, :8].all()
    np.testing.assert_array_equal(found[:, 8:], state[:, None] == state[None])


@pytest.mark.parametrize("setting", ["add", "replace", "future"])
def test_superposition(setting):
    """The table of LEAP 1.2, cell by cell, in its three settings."""
    canvas = 6
    masked = [1, 3, 4]
    items = [("C", 1), ("C", 1), ("C", 4), ("R", 1), ("R", 3), ("R", 4)]
    with_candidate = {slot for kind, slot in items if kind == "C"}
    row = [("O", slot) for slot in range(canvas)] + items
    row = [[kind, slot] for kind, slot in row]  # each an object of its own

    def sees(query, key):
        (query_kind, query_slot), (kind, slot) = query, key
        if query_kind == "O":
            return kind == "O"
        if slot == query_slot:
            return False  # own masked original, rivals, own readout
        if kind == "O":
            return slot not in masked or setting == "add"
        if kind == "C":
            return True
        if setting == "future":
            return slot not in with_candidate
        return setting == "replace"

    expected = [
        [i == j or sees(q, k) for j, k in enumerate(row)] for i, q in enumerate(row)
    ]
    original_shown = [slot not in masked or setting == "add" for slot in range(canvas)]
    appended_shown = [
        kind == "C"
        or setting == "replace"
        or (setting == "future" and slot not in with_candidate)
        for kind, slot in items
    ]
    position, places = _row(np.arange(canvas), [slot for _, slot in items])
    hidden, shown = ~jnp.asarray([original_shown]), jnp.asarray([appended_shown])
    # Alone, and as a block behind cached ones, which all see.
    for start, row in (
        (0, layouts.bidirectional(position)),
        (2, layouts.block_causal(position + 2 * canvas, canvas)),
    ):
        start = jnp.full((1, 1), start, jnp.int32)
        valid = jnp.ones(places.shape, bool)
        places = places + start * canvas
        behind = layouts.appended(places, start, shown, valid)
        found = _matrix(layouts.superposition(row, behind, hidden))
        np.testing.assert_array_equal(found, np.array(expected))
        cached = layouts.block_causal(*_row(np.arange(start[0, 0] * canvas)), canvas)
        found = _matrix(layouts.superposition(row, behind, hidden), cached)
        assert found[:, : start[0, 0] * canvas].all()
        behind = layouts.appended(places, start, shown, valid.at[0, -1].set(False))
        found = _matrix(layouts.superposition(row, behind, hidden))
        assert not found[:-1, -1].any()


def test_superposition_of_shifted_logits():
    """What predicts slot i stands at i - 1 and sees every candidate but those of i."""
    slots = np.arange(5)
    items = [("R", i, i - 1, False) for i in slots[1:]]
    items += [("C", i, i, late) for i in slots[1:] for late in (False, True)]
    slot, place, late = (np.array([item[n] for item in items]) for n in (1, 2, 3))
    is_candidate = np.array([kind == "C" for kind, *_ in items])
    row = layouts.bidirectional(*_row(slots))
    behind = layouts.appended(
        *_row(place),
        jnp.zeros((1, 1), jnp.int32),
        jnp.asarray(is_candidate[None]),
        jnp.ones((1, len(items)), bool),
        moment=jnp.asarray(slot[None]),
        until=jnp.asarray(np.where(is_candidate & ~late, slot, layouts.FOREVER)[None]),
        since=jnp.asarray(np.where(late, slot + 1, 0)[None]),
    )
    found = _matrix(layouts.superposition(row, behind, jnp.zeros((1, 5), bool)))
    assert not found[:5, 5:].any()
    for i in range(len(items)):
        seen = {}
        for j in np.flatnonzero(found[5 + i, 5:]):
            if j != i:
                assert is_candidate[j]
                seen[slot[j]] = seen.get(slot[j], 0) + 1
        others = set(slots[1:]) - {slot[i], place[i]}
        assert seen == dict.fromkeys(others, 1)  # each once, its own and its place's never
        assert set(np.flatnonzero(found[5 + i, :5])) == set(slots) - {place[i]}
