"""The TPU compiler accepts kernels and whole decode loops, ahead of time, without a TPU.

Runs in processes of their own: loading libtpu prints to stderr and must not touch the
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

_ROOT = Path(__file__).parents[2]


def _run(script: str, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    environment.pop("XLA_FLAGS", None)
    result = subprocess.run(
        [sys.executable, str(_ROOT / script), *args],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_kernel_compiles_for_every_generation():
    report = json.loads(_run("tests/aot/compile_kernels.py").splitlines()[-1])
    assert sorted(report) == ["v4", "v5e", "v5p", "v6e", "v7x"]
    assert max(max(shares) for shares in report.values()) < 0.1


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_the_loop_moves_weights_and_cache_once(chip, tmp_path):
    """No copy of the cache, no temporaries of its size, few bytes beyond the ideal."""
    file = tmp_path / "report.json"
    case = ("--model", "sdar-1.7b", "--batch", "8", "--context", "8192", "--chip", chip)
    _run("benchmarks/tpu_aot.py", *case, "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert row["fits"] == "yes"
    assert row["copies"] == 0
    assert row["temp GB"] < 0.1 * row["cache GB"]
    assert row["moved/ideal"] < 1.05
    assert row["est/roof"] < 1.6
