"""dllm_jax: diffusion language models on TPU, in pure JAX."""

from dllm_jax.config import ModelConfig
from dllm_jax.generate import Model, Output, Stats, generate, load, stream

__version__ = "0.1.0"
__all__ = ("Model", "ModelConfig", "Output", "Stats", "generate", "load", "stream")
