"""dllm_jax: diffusion language models on TPU, in pure JAX."""

try:
    from dllm_jax.config import ModelConfig
    from dllm_jax.generate import generate, infill, stream
    from dllm_jax.likelihood import Likelihood, log_likelihood, token_log_probs
    from dllm_jax.model import Model, load
    from dllm_jax.run import Output, Stats
except Exception as error:  # a jax that is missing, too old or broken
    # `python -m dllm_jax.doctor` must still start, to say what is wrong.
    _cause = error

    def __getattr__(name: str):
        if name in __all__:
            raise ImportError(
                f"dllm_jax cannot be used here ({type(_cause).__name__}: {_cause}): run "
                "`python -m dllm_jax.doctor`."
            ) from _cause
        raise AttributeError(f"module 'dllm_jax' has no attribute {name!r}.")


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
    "token_log_probs",
)
