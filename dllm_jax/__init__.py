"""dllm_jax: diffusion language models on TPU, in pure JAX."""

from dllm_jax.config import ModelConfig
from dllm_jax.generate import Output, Stats, generate, infill, stream
from dllm_jax.likelihood import Likelihood, log_likelihood
from dllm_jax.model import Model, load

__version__ = "0.1.0"
__all__ = (
    "Likelihood",
    "Model",
    "ModelConfig",
    "Output",
    "Stats",
    "generate",
    "infill",
    "load",
    "log_likelihood",
    "stream",
)
