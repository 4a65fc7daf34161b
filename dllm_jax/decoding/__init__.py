"""Decoding methods, one file each; importing this package registers them all."""

from dllm_jax.decoding import (
    ar,
    block,
    credit,
    edit,
    fast_dllm,
    fast_dllm_v2,
    klass,
    leap,
    masked,
    s2d2,
    simsd,
    wino,
)
from dllm_jax.decoding.base import DECODERS, Decoder

__all__ = (
    "DECODERS",
    "Decoder",
    "ar",
    "block",
    "credit",
    "edit",
    "fast_dllm",
    "fast_dllm_v2",
    "klass",
    "leap",
    "masked",
    "s2d2",
    "simsd",
    "wino",
)
