"""Several processes, one run: the tokens of one process, and what a lost one leaves."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

_ROOT = Path(__file__).parents[1]


def start(arguments, processes: int = 0, process_id: int = 0, port: int = 0):
    """A run of the command line with one CPU device, or one of several such processes."""
    if processes:
        arguments = [*arguments, "--distributed", "--coordinator", f"127.0.0.1:{port}"]
        arguments += ["--num-processes", str(processes), "--process-id", str(process_id)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
    environment["JAX_NUM_CPU_DEVICES"] = "1"
    environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    return subprocess.Popen(
        [sys.executable, "-m", "dllm_jax.decode", "--compile-cache", "none", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_all(arguments, processes: int) -> list[tuple[int, str, str]]:
    port = free_port()
    started = [start(arguments, processes, i, port) for i in range(processes)]
    ended = [process.communicate(timeout=300) for process in started]
    return [(p.returncode, *texts) for p, texts in zip(started, ended, strict=True)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 70, 500)
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    lines = (json.dumps(rng.integers(0, 200, n).tolist()) + "\n" for n in lengths)
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def arguments(golden_dir, prompts):
    chosen = ["--model", str(golden_dir / "sdar"), "--dtype", "float32"]
    chosen += ["--max-new-tokens", "8", "--block-length", "4", "--batch-size", "64"]
    return [*chosen, "--temperature", "0.5", "--threshold", "0.4", "--input", str(prompts)]


@pytest.fixture(scope="module")
def single(arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("single") / "out.jsonl"
    process = start([*arguments, "--output", str(out)])
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def check_same(path, other):
    lines = [file.read_text().splitlines() for file in (path, other)]
    assert len(lines[0]) == 500
    for one, two in zip(*map(lambda x: map(json.loads, x), lines), strict=True):
        confidence = one.pop("confidence"), two.pop("confidence")
        np.testing.assert_allclose(*confidence, atol=1e-5)
        assert one == two


def test_rows_over_two_processes(arguments, single, tmp_path):
    """500 prompts of mixed length, line by line those of one process; one speaks."""
    out = tmp_path / "out.jsonl"
    first, second = run_all([*arguments, "--output", str(out)], 2)
    assert first[0] == second[0] == 0, (first, second)
    check_same(out, single)
    assert "500 prompts" in first[2]
    assert "prompts" not in second[2]


def test_heads_and_rows_over_four_processes(golden_dir, tmp_path):
    """Each reads its own part of the weights; the text comes once."""
    chosen = ["--model", str(golden_dir / "sdar"), "--dtype", "float32"]
    chosen += ["--max-new-tokens", "12", "--block-length", "4", "--prompt-ids", "5,6,7,8"]
    alone = start([*chosen, "--json"])
    want = json.loads(alone.communicate(timeout=300)[0])
    ended = run_all([*chosen, "--json", "--mesh", "data=2,tensor=2"], 4)
    assert [code for code, _, _ in ended] == [0] * 4, ended
    # The CPU's collectives announce themselves on stdout.
    spoken = [
        [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        for _, out, _ in ended
    ]
    (line,) = spoken[0]
    assert json.loads(line)["tokens"] == want["tokens"]
    assert spoken[1:] == [[], [], []]


def test_a_lost_process_ends_the_run_and_resume_goes_on(arguments, single, tmp_path):
    out, port = tmp_path / "out.jsonl", free_port()
    more = [*arguments, "--output", str(out)]
    first, second = (start(more, 2, i, port) for i in range(2))
    deadline = time.monotonic() + 240
    while not (out.exists() and out.stat().st_size > 0):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    second.send_signal(signal.SIGKILL)
    _, error = first.communicate(timeout=240)
    second.communicate(timeout=60)
    kept = out.read_text().count("\n")
    assert first.returncode != 0 and 0 < kept < 500
    assert "lost each other" in error and "--resume" in error, error[-2000:]
    resumed = start([*more, "--resume"])
    _, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    check_same(out, single)


def test_a_mesh_that_leaves_devices_out(golden_dir):
    chosen = ["--model", str(golden_dir / "sdar"), "--prompt-ids", "5", "--quiet"]
    for code, _, error in run_all([*chosen, "--mesh", "tensor=1"], 2):
        assert code == 2 and "it must use all of them" in error
