"""Where compiled programs and downloads are kept; standard library only."""

import os
from pathlib import Path


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def compile_cache() -> Path:
    """The directory of compiled programs, unless a command is told another."""
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(own) if own else _user_cache() / "dllm_jax" / "compiled"


def hub_cache() -> Path:
    """Where `huggingface_hub` keeps what it downloads."""
    home = os.environ.get("HF_HOME") or _user_cache() / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
