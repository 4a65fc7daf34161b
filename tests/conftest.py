"""Settings of the whole suite: CPU, strict numerics, and where golden cases lie."""

import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling is most of the suite's time, and what is compiled runs for milliseconds.
_FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # later ones refuse to start with it
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

from pathlib import Path

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption(
        "--golden-dir",
        type=Path,
        default=Path(__file__).parent / "golden",
        help="folder of golden cases, one subfolder a family",
    )


@pytest.fixture(scope="session")
def golden_dir(request) -> Path:
    return request.config.getoption("--golden-dir")
