"""The TPU compiler accepts the whole decode loop, ahead of time and without a TPU.

Runs in a process of its own: loading libtpu prints to stderr and must not touch the
suite's process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (it exists for linux x86-64 only)",
)

_SCRIPT = Path(__file__).parent / "compile_block_loop.py"


@pytest.fixture(scope="module")
def report():
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "JAX_PLATFORMS": "cpu",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    result = subprocess.run(
        [sys.executable, str(_SCRIPT)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("decoder", ["ar", "block", "s2d2"])
def test_the_loop_compiles_and_keeps_the_cache_in_place(report, decoder):
    """Temporaries stay far below the cache: it is not copied in the loop."""
    numbers = report[decoder]
    assert numbers["alias_bytes"] >= numbers["cache_bytes"]
    assert numbers["temp_bytes"] < 0.1 * numbers["cache_bytes"]
    assert numbers["cache_copies"] == []
