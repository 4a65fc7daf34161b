"""Settings of the whole suite: CPU, strict numerics, and where golden cases lie."""

import gc
import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling is most of the suite's time, and what is compiled runs for milliseconds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0"
    # Later ones refuse to start with it.
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
)

from pathlib import Path

import jax
import pytest

# Meshes of up to eight devices; what has no mesh runs on the first.
jax.config.update("jax_num_cpu_devices", 8)
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


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Frees the programs that a file has compiled.

    Thousands of them in one process end in a crash of the compiler.
    """
    yield
    gc.collect()
    jax.clear_caches()
