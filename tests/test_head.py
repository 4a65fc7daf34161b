"""The unmasking head in chunks gives what whole logits give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax
from dllm_jax import head, sampling, transformer
from dllm_jax.params import Params

_VOCAB, _DIM = 300, 16


def _params(table: np.ndarray, tied: bool) -> Params:
    """As much of a model as a head needs, from its `[V, D]` rows."""
    table = jnp.asarray(table, jnp.float32)
    other = None if tied else table.T
    embed = table if tied else jnp.zeros((_VOCAB, _DIM))
    return Params(embed, dense_layers=None, layers=None, final_norm=None, head=other)


@functools.partial(jax.jit, static_argnames=("mask_id", "chunk"))
def _in_chunks(params, hidden, mask_id, chunk):
    return head.propose_greedily(params, hidden, mask_id, chunk, most_logits=0)


@functools.partial(jax.jit, static_argnames="mask_id")
def _whole(params, hidden, mask_id):
    return sampling.propose(transformer.logits(params, hidden), mask_id)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [128, 150, 299])
@pytest.mark.parametrize("mask_id", [0, 200, 299])
def test_chunks_equal_whole_logits(tied, chunk, mask_id):
    rng = np.random.default_rng(chunk)
    table = rng.normal(size=(_VOCAB, _DIM))
    hidden = rng.normal(size=(3, 7, _DIM)).astype(np.float32)
    # Ties in one chunk, across chunks, with the mask token, and in the repeated part.
    hidden[0, :5] = 3 * table[[5, 299, 200, 170, 0]]
    table[[7, 140]], table[298] = table[5], table[299]
    table[201], table[171], table[1] = table[200], table[170], table[0]
    found = _in_chunks(_params(table, tied), hidden, mask_id, chunk)
    expected = _whole(_params(table, tied), hidden, mask_id)
    np.testing.assert_array_equal(found.token, expected.token)
    assert not np.any(np.asarray(found.token) == mask_id)
    np.testing.assert_allclose(found.confidence, expected.confidence, rtol=1e-5)
    np.testing.assert_allclose(found.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
    assert found.token.dtype == jnp.int32


def test_the_mask_token_is_not_proposed_however_likely_it_is():
    table = np.zeros((_VOCAB, _DIM))
    table[130, 0], table[131:, 0] = 100.0, -100.0
    hidden = np.zeros((1, 1, _DIM), np.float32)
    hidden[..., 0] = 1.0
    found = _in_chunks(_params(table, False), hidden, mask_id=130, chunk=128)
    assert found.token[0, 0] == 0
    assert found.confidence[0, 0] < 1e-30 and abs(found.entropy[0, 0]) < 1e-6


def test_decoders_use_it(monkeypatch):
    """A generation in chunks has the tokens of one with whole logits."""
    prompt, used = [5, 6, 7, 8], []

    def in_chunks(params, hidden, mask_id, **divided):
        used.append(hidden.shape)
        return head_before(params, hidden, mask_id, chunk=100, most_logits=0, **divided)

    head_before = head.propose_greedily
    outputs = []
    for patch in (False, True):
        if patch:
            monkeypatch.setattr(head, "propose_greedily", in_chunks)
        model = dllm_jax.load("demo")
        outputs += dllm_jax.generate(model, [prompt], "block", max_new_tokens=12)
    assert used
    assert outputs[0].tokens == outputs[1].tokens
    np.testing.assert_allclose(outputs[0].confidence, outputs[1].confidence, rtol=1e-5)
