"""The demo models' data, losses and training loop."""

import dataclasses
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import layouts, transformer
from dllm_jax.params import init_params
from dllm_jax.sharding import make_mesh
from dllm_jax.training import batches
from dllm_jax.training.batches import BUCKETS, encode_problem, problem_batches
from dllm_jax.training.demo import RECIPES, Stage
from dllm_jax.training.losses import block_diffusion_loss, mask_blocks
from dllm_jax.training.problems import generate_problems, parse_answer
from dllm_jax.training.trainer import train
from dllm_jax.training.vocabulary import train_tokenizer

TINY = dataclasses.replace(
    RECIPES["demo"],
    num_layers=1,
    embed_dim=32,
    num_heads=2,
    num_kv_heads=1,
    ffw_dim=48,
    head_dim=16,
    batch_size=8,
    stages=(Stage("block", 0.5), Stage("block", 0.5, (2, 4))),
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def test_problems_are_reproducible_and_split():
    train_split = list(islice(generate_problems("train", 1), 2000))
    assert train_split[:50] == list(islice(generate_problems("train", 1), 50))
    test_split = {p.question for p in islice(generate_problems("test", 1), 500)}
    assert not test_split & {p.question for p in train_split}
    with pytest.raises(ValueError, match="split"):
        next(generate_problems("dev", 1))


def test_solutions_are_right():
    """Every equation of a worked solution holds, and the last result is the answer."""
    for problem in islice(generate_problems("train", 3), 2000):
        equations = [w.strip(".") for w in problem.solution.split() if "=" in w]
        assert 1 <= len(equations) <= 4
        for equation in equations:
            left, right = equation.split("=")
            assert eval(left, {}) == int(right)
        assert int(equations[-1].split("=")[1]) == problem.answer
        assert parse_answer(problem.solution) == problem.answer
        assert 0 <= problem.answer <= 99


def test_every_problem_fits_a_bucket(tokenizer):
    for problem in islice(generate_problems("train", 4), 2000):
        ids, start = encode_problem(tokenizer, problem)
        length, window = BUCKETS[-1]
        assert len(ids) <= length
        assert len(ids) - start <= window


@pytest.mark.parametrize("block_length", [1, 3, 8])
def test_masks_by_block(block_length):
    rows, size = 64, 24
    start = jnp.arange(rows, dtype=jnp.int32) % 5
    position = 8 * block_length + jnp.arange(size, dtype=jnp.int32)[None]
    position = jnp.broadcast_to(position, (rows, size))
    eligible = position >= (8 * block_length + start)[:, None]
    lengths = jnp.full((rows,), block_length, jnp.int32)
    masked = np.asarray(mask_blocks(jax.random.key(0), position, lengths, eligible))
    assert not masked[~np.asarray(eligible)].any()
    block = np.asarray(position) // block_length
    for row in range(rows):
        for b in np.unique(block[row]):
            here = (block[row] == b) & np.asarray(eligible[row])
            if here.any():
                assert masked[row, here].any()
    if block_length == 1:
        np.testing.assert_array_equal(masked, np.asarray(eligible))


def test_paired_rows_equal_decoding(tokenizer):
    """The noisy half's logits are those of a denoising step after the clean prefix."""
    config = TINY.config(tokenizer.get_vocab_size())
    params = init_params(config, jax.random.key(1))
    length, block = 16, 4
    tokens = jax.random.randint(jax.random.key(2), (1, length), 5, 200, jnp.int32)
    position = jnp.arange(length, dtype=jnp.int32)[None]
    noisy = jnp.full_like(tokens, config.mask_id)
    fields = layouts.training_pairs(
        position, position, jnp.array([block], jnp.int32), position >= 0, position >= 0
    )
    paired = transformer.forward(
        params, config, jnp.concatenate([tokens, noisy], axis=1), fields
    ).hidden[:, length:]

    @jax.jit
    def denoise(begin):
        row = jnp.where(position < begin, tokens, noisy)
        fields = layouts.block_causal(position, block, position < begin + block)
        return transformer.forward(params, config, row, fields).hidden

    for begin in range(0, length, block):
        here = slice(begin, begin + block)
        np.testing.assert_allclose(paired[:, here], denoise(begin)[:, here], atol=1e-5)


def test_the_loss_of_an_untrained_model_is_that_of_guessing(tokenizer):
    config = TINY.config(tokenizer.get_vocab_size())
    params = init_params(config, jax.random.key(0))
    batch, window = next(problem_batches(tokenizer, 8, (1, 4, 8), seed=1))
    loss = block_diffusion_loss(params, config, batch, jax.random.key(3), window)
    assert float(loss) == pytest.approx(np.log(config.vocab_size), rel=0.05)


@jax.numpy_dtype_promotion("standard")  # optax's Muon mixes dtypes
def test_training_learns_and_resumes_exactly(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "BUCKETS", BUCKETS[-1:])  # one program to compile
    lines: list[str] = []
    steps = 60
    whole = train(TINY, tokenizer, tmp_path / "whole", steps, 20, lines.append)
    mean_loss = float(lines[0].split()[4])
    assert mean_loss < np.log(tokenizer.get_vocab_size())

    class Stop(Exception):
        pass

    def stop_late(line):
        if line.startswith("step 50"):
            raise Stop

    with pytest.raises(Stop):
        train(TINY, tokenizer, tmp_path / "parts", steps, 20, stop_late)
    resumed: list[str] = []
    again = train(TINY, tokenizer, tmp_path / "parts", steps, 20, resumed.append)
    assert resumed[0] == "resumed at step 40"
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@jax.numpy_dtype_promotion("standard")  # optax's Muon mixes dtypes
def test_training_on_a_mesh(tokenizer, tmp_path, monkeypatch):
    """The same rules divide parameters, moments and rows; the losses are one device's."""
    monkeypatch.setattr(batches, "BUCKETS", BUCKETS[-1:])
    losses, params = [], []
    for name in ("", "data=2,tensor=2"):
        lines: list[str] = []
        mesh = make_mesh(name) if name else None
        params.append(
            train(TINY, tokenizer, tmp_path / f"on{name}", 50, 50, lines.append, mesh)
        )
        losses.append(float(lines[0].split()[4]))
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    gate = params[1].layers.gate
    assert gate.addressable_shards[0].data.shape[2] * 2 == gate.shape[2]
