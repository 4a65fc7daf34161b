"""Tiny models for tests: a random transformer, and a scripted model in exact integers."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.cache import init_cache
from dllm_jax.config import ModelConfig
from dllm_jax.decoding.base import ModelFns
from dllm_jax.model import Model
from dllm_jax.params import leaf_paths, params_from_leaves
from dllm_jax.transformer import ForwardOutput
from kernels_pallas import TokenFields, unpack_key_fields, visible

VOCAB, MASK, EOS, EOT, PAD, BOS = 64, 63, 62, 61, 60, 59

CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffw_dim=64,
    rope_theta=10000.0,
    norm_eps=1e-6,
    max_positions=256,
    qk_norm=True,
    block_length=4,
    mask_id=MASK,
    eos_ids=(EOS, EOT),
    pad_id=PAD,
    bos_id=BOS,
)


class TinyModel(Model):
    """A model that remembers its last run, so that tests can look into it."""

    state: Any = None  # the last state
    last_call: Any = None  # (key, arguments) of the loop's program, the first the state

    def run_program(self, key, build, args):
        if key[1] == "go_on":  # which takes the state's buffers
            self.last_call = key, (jax.tree.map(jnp.copy, args[0]), *args[1:])
        self.state = super().run_program(key, build, args)
        return self.state


def tiny_model(seed: int = 0, config: ModelConfig = CONFIG) -> TinyModel:
    """A random transformer, sharpened: confidences spread over (0, 1)."""
    rng = np.random.default_rng(seed)
    gain = {"embed": 20.0, "head": 25.0, "layers.o": 3.0, "layers.down": 3.0}
    leaves = {}
    for path, info in leaf_paths(config).items():
        scale = gain.get(path, 1.0) * (info.init_scale or 0.0)
        leaf = rng.normal(size=info.shape) * scale if scale else np.ones(info.shape)
        leaves[path] = jnp.asarray(leaf, jnp.float32)
    leaves["layers.q_norm"] *= 3.0
    return TinyModel(params_from_leaves(config, leaves), config)


ROWS = 128
"""Rows of a scripted model's table."""


def token_code(token, position):
    """What a token at a position adds to the sums of all that see it."""
    return (token + 1) * (31 * position + 7) % 8191


def table_row(total, position):
    """The row of logits of a slot that sees tokens of this sum."""
    return (total + 17 * position) % ROWS


class ScriptedModel(TinyModel):
    """Logits out of a table, by a hash of every token that a slot sees.

    All integers: the same bits in any batch, with or without a cache, while one token too
    many or too few gives another row. The table is an input of the compiled programs, so
    `table` may be exchanged without a recompile. Its keys and values are the tokens.
    """

    def __init__(self, table: np.ndarray, config: ModelConfig = CONFIG):
        super().__init__(jnp.asarray(table, jnp.float32), config)

    @property
    def dtype(self) -> np.dtype:
        return self.params.dtype

    def fns(self, params) -> ModelFns:
        return scripted_fns(params, self.config)


@contextlib.contextmanager
def quick_compilation():
    """Compiles with few optimisations, for programs whose floats do not matter."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def scripted_fns(table: jax.Array, config: ModelConfig = CONFIG) -> ModelFns:
    """A scripted model as a decoder sees it; `table` is `[ROWS, vocabulary]`."""
    small = dataclasses.replace(
        config, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1
    )

    def sum_of_seen(fields, keys, tokens, exists):
        query = TokenFields(*(x[:, :, None] for x in fields))
        key = TokenFields(*(x[:, None, :] for x in keys))
        seen = visible(query, key) & exists[:, None]
        code = token_code(tokens, keys.position)[:, None]
        return jnp.sum(jnp.where(seen, code, 0), axis=-1)

    def forward(tokens, fields, cache):
        total = sum_of_seen(fields, fields, tokens, jnp.ones(tokens.shape, bool))
        if cache is not None:
            stored = cache.k[0, :, 0, :, 0].astype(jnp.int32)
            exists = jnp.arange(stored.shape[1]) < cache.length[:, None]
            total += sum_of_seen(fields, unpack_key_fields(cache.fields), stored, exists)
        k = tokens[None, :, None, :, None].astype(jnp.float32)
        return ForwardOutput(table_row(total, fields.position)[..., None], k, k)

    return ModelFns(
        config,
        forward,
        logits=lambda hidden: table[hidden[..., 0]],
        init_cache=lambda batch, slots: init_cache(small, batch, slots, jnp.float32),
    )


def random_table(seed: int, bias: dict[int, float] | None = None) -> np.ndarray:
    """Logits whose confidences spread over (0, 1), no two of them closer than 1e-6.

    Args:
      seed: of the noise.
      bias: what to add to the logits of some tokens.
    """
    rng = np.random.default_rng(seed)
    while True:
        sharpness = rng.uniform(0.5, 3.5, (ROWS, 1))
        table = (rng.normal(size=(ROWS, VOCAB)) * sharpness).astype(np.float32)
        for token, extra in (bias or {}).items():
            table[:, token] += extra
        p = np.exp(table.astype(np.float64))
        p /= p.sum(axis=-1, keepdims=True)
        entropy = -np.sum(p * np.log(p), axis=-1)
        gaps = [np.diff(np.sort(x)).min() for x in (p[:, :MASK].max(axis=-1), entropy)]
        if min(gaps) > 1e-6:
            return table
