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


def test_the_kernels_compile_for_every_generation():
    report = json.loads(_run("tests/aot/compile_kernels.py").splitlines()[-1])
    assert sorted(report) == ["v4", "v5e", "v5p", "v6e", "v7x"]
    assert max(max(shares) for shares in report.values()) < 0.1


def _report(tmp_path, *arguments: str) -> list[dict]:
    file = tmp_path / "report.json"
    _run("benchmarks/tpu_aot.py", *arguments, "--json", str(file))
    return json.loads(file.read_text())["rows"]


def _rows(tmp_path, *arguments: str) -> list[dict]:
    """What the benchmark says of SDAR-1.7B's loop with 8 rows of 8192 tokens."""
    case = ("--model", "sdar-1.7b", "--batch", "8", "--context", "8192", *arguments)
    return _report(tmp_path, *case)


def _check(row: dict) -> None:
    """No copy of the cache, no temporaries of its size, few bytes beyond the ideal."""
    assert row["fits"] == "yes"
    assert row["copies"] == 0
    assert row["temp GB"] < 0.1 * row["cache GB"]
    assert row["moved/ideal"] < 1.08


@pytest.mark.parametrize("cache", [(), ("--int8-kv",)], ids=["bfloat16", "int8"])
def test_the_loop_moves_weights_and_cache_once(cache, tmp_path):
    rows = _rows(tmp_path, "--chip", "v5e", "--chip", "v6e", *cache)
    assert [row["chip"] for row in rows] == ["v5e", "v6e"]
    for row in rows:
        _check(row)
        assert row["moved/ideal"] < 1.05
        assert row["est/roof"] < 1.5


def test_the_loop_on_other_generations(tmp_path):
    rows = _rows(tmp_path, "--chip", "v4", "--chip", "v5p")
    assert [row["chip"] for row in rows] == ["v4", "v5p"]
    for row in rows:
        _check(row)


def test_the_loop_of_a_decoder_that_verifies(tmp_path):
    for row in _rows(tmp_path, "--chip", "v5e", "--decoder", "s2d2"):
        _check(row)


def test_a_pair_on_four_chips(tmp_path):
    """SDAR-8B and its drafter divided over v5e:2x2: two sums a layer, no cache copied."""
    case = ("--model", "sdar-8b", "--draft-model", "sdar-1.7b", "--decoder", "simsd")
    case += ("--batch", "1", "--context", "4096", "--chip", "v5e", "--mesh", "tensor=4")
    (row,) = _report(tmp_path, *case)
    _check(row)
    # A sum behind attention and feed-forward of 36 layers, one for the embeddings, and
    # what the proposals exchange.
    assert 73 <= row["collectives"] <= 78


@pytest.mark.parametrize("model", ["sdar-8b", "llada-8b"])
def test_int8_weights_fit_a_small_chip(model, tmp_path):
    """16 GB, context 4096."""
    case = ("--model", model, "--batch", "1", "--context", "4096", "--chip", "v5e")
    (row,) = _report(tmp_path, *case, "--quant", "int8")
    assert row["fits"] == "yes" and row["args GB"] < 10.0
