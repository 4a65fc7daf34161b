"""Autoregression: block diffusion with blocks of one token.

The same model, one token a forward: the baseline of every table.
"""

from flax import struct

from dllm_jax.config import ModelConfig
from dllm_jax.decoding import block
from dllm_jax.decoding.base import Decoder, SamplingSettings, register, setting


@struct.dataclass
class ARSettings(SamplingSettings):
    """Settings of the `ar` decoder."""

    fold: bool = setting(True, "store a token in the next token's forward (exact)")


def resolve(settings: ARSettings, config: ModelConfig) -> block.BlockSettings:
    """The block settings that make it autoregression; raises ValueError."""
    as_block = block.BlockSettings(
        block_length=1,
        remasking_strategy="sequential",
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        fold=settings.fold,
    )
    return block.resolve(as_block, config)


register(
    Decoder(
        name="ar",
        summary="one token a forward: blocks of length 1",
        settings=ARSettings,
        resolve=resolve,
        init=block.init,
        step=block.step,
    )
)
