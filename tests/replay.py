"""Replaying golden cases: a decoder's inputs from plain lists."""

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.decoding.base import DecodeInputs


def decode_inputs(
    prompts: list[list[int]],
    max_new_tokens: int,
    mask_id: int,
    slots: int,
    stop_ids: tuple[int, ...] = (),
    batch: int = 0,
) -> DecodeInputs:
    """The inputs of a batch, one shape for all cases so that few programs are compiled.

    Args:
      prompts: token ids of each row.
      max_new_tokens: of each row.
      mask_id: what stands behind the prompts.
      slots: length of the prompts' array.
      stop_ids: filled up with -1 to at least one.
      batch: rows; what the prompts leave over does nothing.
    """
    spare = max(batch - len(prompts), 0)
    rows = np.full((len(prompts) + spare, slots), mask_id, np.int32)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = prompt
    return DecodeInputs(
        prompt=jnp.asarray(rows),
        prompt_length=jnp.array([*map(len, prompts)] + [0] * spare, jnp.int32),
        max_new_tokens=jnp.array([max_new_tokens] * len(prompts) + [0] * spare, jnp.int32),
        rng_key=jax.random.split(jax.random.key(0), len(rows)),
        stop_ids=jnp.array([*stop_ids, -1], jnp.int32),
    )
