"""Tiny models that the tests decode with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.cache import init_cache
from dllm_jax.config import ModelConfig
from dllm_jax.decoding.base import ModelFns
from dllm_jax.generate import Model
from dllm_jax.params import init_params
from dllm_jax.transformer import ForwardOutput
from kernels_pallas import unpack_key_fields, visible

MASK, EOS, EOT, PAD, BOS, VOCAB = 63, 62, 61, 60, 59, 64

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
    """A model that keeps the last state of its loop, to look at the whole canvas."""

    state: Any = None

    def run_program(self, key, build, args):
        self.state = super().run_program(key, build, args)
        return self.state


def tiny_model(seed: int = 0, scale: float = 20.0, config=CONFIG) -> TinyModel:
    """A random transformer whose confidences spread over (0, 1)."""
    params = init_params(config, jax.random.key(seed))
    return TinyModel(
        params.replace(embed=params.embed * 50.0, head=params.head * scale), config
    )


# --- a scripted model: exact arithmetic, every visible token matters ------------------

ROWS = 128  # rows of a scripted model's table


def token_code(token, position):
    """What a token at a position adds to those that see it; ints, array or not."""
    return (token + 1) * (31 * position + 7) % 8191


def table_row(total, position):
    """Which row of logits a slot gets that sees codes of this total."""
    return (total + 17 * position) % ROWS


class ScriptedModel(TinyModel):
    """Logits looked up in a table by a hash of all tokens that a slot sees.

    Integer arithmetic: the same bits in any batch and with or without a cache, while one
    token seen or missed too many gives another row of the table. The table is an input
    of the compiled programs, so another table compiles nothing. Its keys are the tokens
    themselves, so that a test can see what was stored.
    """

    def __init__(self, table, config: ModelConfig = CONFIG):
        super().__init__(jnp.asarray(table, jnp.float32), config, name="scripted")

    def fns(self, params) -> ModelFns:
        return scripted_fns(params, self.config)

    def with_table(self, table) -> "ScriptedModel":
        """This model with other logits; the compiled programs are kept."""
        self.params = jnp.asarray(table, jnp.float32)
        return self


def scripted_fns(table: jax.Array, config: ModelConfig = CONFIG) -> ModelFns:
    """The functions of a scripted model."""
    config = config.replace if False else config

    def new_cache(batch, slots):
        import dataclasses

        small = dataclasses.replace(config, num_layers=1, num_kv_heads=1, head_dim=1)
        return init_cache(small, batch, slots, jnp.float32)

    def forward(tokens, fields, cache):
        def seen(keys, codes, exists=True):
            query = type(fields)(*(x[:, :, None] for x in fields))
            key = type(fields)(*(x[:, None, :] for x in keys))
            return jnp.sum(jnp.where(visible(query, key) & exists, codes[:, None], 0), -1)

        total = seen(fields, token_code(tokens, fields.position))
        if cache is not None:
            keys = unpack_key_fields(cache.fields)
            stored = cache.k[0, :, 0, :, 0].astype(jnp.int32)
            slot = jnp.arange(stored.shape[1], dtype=jnp.int32)
            exists = (slot < cache.length[:, None])[:, None]
            total += seen(keys, token_code(stored, keys.position), exists)
        hidden = table_row(total, fields.position)[..., None]
        k = tokens[None, :, None, :, None].astype(jnp.float32)
        return ForwardOutput(hidden, k, k)

    return ModelFns(config, forward, lambda hidden: table[hidden[..., 0]], new_cache)


def random_table(seed: int, scale: float = 3.0) -> np.ndarray:
    """Logits of a scripted model with confidences all over (0, 1)."""
    rng = np.random.default_rng(seed)
    sharpness = rng.uniform(0.3, 1.0, (ROWS, 1)) * scale
    return (rng.normal(size=(ROWS, VOCAB)) * sharpness).astype(np.float32)
