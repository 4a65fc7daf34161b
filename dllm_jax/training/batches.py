"""Batches of tokenised word problems, bucketed by length."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

from dllm_jax.training.problems import Problem, generate_problems
from dllm_jax.training.vocabulary import ASSISTANT, EOS, PAD, USER

BUCKETS = ((72, 48), (104, 64))
"""(row length, noised window): most problems fit the first, all fit the second."""

_FILL_WEIGHT = 0.05  # of the padding behind the end token, which must be learnt too


def encode_problem(tokenizer: Tokenizer, problem: Problem) -> tuple[list[int], int]:
    """Token ids of a problem with its solution and end token, and the prompt's length."""
    prompt = tokenizer.encode(f"{USER}{problem.question}{ASSISTANT}").ids
    answer = tokenizer.encode(f"{problem.solution}{EOS}").ids
    return prompt + answer, len(prompt)


def problem_batches(
    tokenizer: Tokenizer,
    batch_size: int,
    block_lengths: Sequence[int],
    seed: int,
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """An endless stream of `(batch, window)` as the losses take them.

    Args:
      tokenizer: the demo models' tokenizer.
      batch_size: rows of a batch.
      block_lengths: one is drawn for each row; repeat a length to draw it more often.
      seed: equal seeds give equal streams.
    """
    pad = tokenizer.token_to_id(PAD)
    rng = np.random.default_rng(zlib.crc32(f"batches-{seed}".encode()))
    waiting: list[list[tuple[list[int], int]]] = [[] for _ in BUCKETS]
    for problem in generate_problems("train", seed):
        ids, start = encode_problem(tokenizer, problem)
        fits = (
            index
            for index, (length, window) in enumerate(BUCKETS)
            if len(ids) <= length and len(ids) - start <= window
        )
        bucket = next(fits)
        waiting[bucket].append((ids, start))
        if len(waiting[bucket]) < batch_size:
            continue
        length, window = BUCKETS[bucket]
        rows, waiting[bucket] = waiting[bucket], []
        tokens = np.full((batch_size, length), pad, np.int32)
        weight = np.zeros((batch_size, length), np.float32)
        for row, (ids, start) in enumerate(rows):
            tokens[row, : len(ids)] = ids
            weight[row, start : len(ids)] = 1.0
            weight[row, len(ids) :] = _FILL_WEIGHT
        batch = {
            "tokens": tokens,
            "start": np.array([start for _, start in rows], np.int32),
            "weight": weight,
            "block_length": rng.choice(block_lengths, batch_size).astype(np.int32),
        }
        yield batch, window
