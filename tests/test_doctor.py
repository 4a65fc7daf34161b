"""The doctor: what it says of machines and installations that are not as they should be."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_abstract_checkpoints import MODELS as PUBLISHED

from dllm_jax import doctor
from dllm_jax.model_sizes import model_sizes

ROOT = Path(__file__).parent.parent


def problems(report):
    return [f for f in report["findings"] if f["level"] == "problem"]


@pytest.fixture
def machine(tmp_path):
    """The files of a machine with two TPU chips and a Google network card."""
    for name, device in (("a", "0x0063"), ("b", "0x0063"), ("nic", "0x0042")):
        directory = tmp_path / "sys/bus/pci/devices" / name
        directory.mkdir(parents=True)
        (directory / "vendor").write_text("0x1ae0\n")
        (directory / "device").write_text(device + "\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:  64000000 kB\nMemAvailable: 60000000 kB\n"
    )
    return tmp_path


def test_a_healthy_machine(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    for words in (f"jax {jax.__version__}", "x cpu", "RAM", "SDAR-8B", "Nothing is wrong"):
        assert words in out


def test_json_is_the_report(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"][0]["platform"] == "cpu"
    assert report["host"]["ram_bytes"] > report["host"]["ram_free_bytes"] > 0
    assert report["versions"]["jax"] == jax.__version__


def test_a_tpu_that_was_asked_for_is_one_line_and_exit_2(capsys):
    assert doctor.main(["--device", "tpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("doctor: device='tpu' is not there: jax sees cpu")
    assert doctor.main(["--device", "cpu"]) == 0


def test_bad_usage_is_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--device", "npu"])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_tpu_machine_on_which_jax_sees_a_cpu(machine, monkeypatch):
    assert doctor.tpu_chips(machine) == 2
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = problems(doctor.examine(machine))
    assert "2 TPU chips, but jax sees only a CPU" in found[0]["what"]
    assert "unset JAX_PLATFORMS" in found[0]["fix"]
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(
        doctor, "_installed", lambda name: None if name == "libtpu" else "0.10.2"
    )
    fixes = [
        f["fix"] for f in problems(doctor.examine(machine)) if "TPU chips" in f["what"]
    ]
    assert "jax[tpu]" in fixes[0]


def test_a_wrong_libtpu_matters_where_there_is_a_tpu(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_jax_wants", lambda name, extra=None: "==0.0.42.*")
    versions = {**dict.fromkeys(doctor.PACKAGES, "1"), "libtpu": "0.0.21.1"}
    for chips, level in ((2, "problem"), (0, "note")):
        found = doctor._check_devices([], chips, versions, tmp_path)
        assert [f.level for f in found if "libtpu 0.0.21.1" in f.what] == [level]


def test_reported_memory_is_used_and_a_known_kind_else(machine):
    class Device:
        platform, device_kind = "tpu", "TPU v5 lite"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    told = doctor._device(Device({"bytes_limit": 15 * 2**30, "bytes_in_use": 7}))
    assert told["memory_bytes"] == 15 * 2**30 and told["memory_is_reported"]
    guessed = doctor._device(Device(None))
    assert guessed["memory_bytes"] == 16 * 2**30 and not guessed["memory_is_reported"]
    rows = doctor._sizes([guessed] * 4, doctor._host(machine))
    fits = {row["name"]: (row["fits_here"], row["fits_all_devices"]) for row in rows}
    assert fits["SDAR-1.7B"][0] == ["bfloat16", "int8"]
    assert fits["SDAR-8B"] == (["int8"], ["bfloat16", "int8"])
    assert fits["LLaDA2-mini"] == ([], ["bfloat16", "int8"])
    table = "\n".join(doctor._table(rows))
    assert "bf16, divided" in table


def test_a_container_has_less_memory_than_the_machine(machine):
    (machine / "sys/fs/cgroup").mkdir(parents=True)
    (machine / "sys/fs/cgroup/memory.max").write_text("13000000000\n")
    (machine / "sys/fs/cgroup/memory.current").write_text("3000000000\n")
    host = doctor._host(machine)
    assert (host["ram_bytes"], host["ram_free_bytes"]) == (13_000_000_000, 10_000_000_000)


@pytest.mark.parametrize(
    ("version", "requirement", "holds"),
    [
        ("0.10.2", ">=0.10", True),
        ("0.7.2", ">=0.10", False),
        ("0.10.0.dev20260101", ">=0.10", True),
        ("0.10.2", "<=0.10.2,>=0.10.1", True),
        ("0.11.0", "<=0.10.2,>=0.10.1", False),
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.52", "==0.0.42.*", False),
        ("3.9.18", ">=3.11", False),
    ],
)
def test_version_rules(version, requirement, holds):
    assert doctor.satisfies(version, requirement) == holds


def test_floors_are_those_of_the_package():
    text = (ROOT / "setup.cfg").read_text()
    assert f"jax >= {doctor.JAX_FLOOR}\n" in text
    assert f"python_requires = >={doctor.PYTHON_FLOOR}\n" in text


@pytest.mark.parametrize("name", ["__init__", "doctor", "caches"])
def test_an_old_python_can_read_it(name):
    """So that it can say that Python is too old."""
    text = (ROOT / "dllm_jax" / f"{name}.py").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 8))


def test_a_python_that_is_too_old(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.12")
    found = problems(doctor.examine())
    assert found[0]["what"].startswith("Python 3.10.12 is too old: 3.11")


def test_sizes_are_those_of_the_published_models():
    names = {
        "SDAR-8B": "SDAR-8B-Chat",
        "LLaDA-8B": "LLaDA-8B-Instruct",
        "Dream-7B": "Dream-v0-Base-7B",
        "LLaDA2-mini": "LLaDA2.0-mini",
    }
    sizes = {size.name: size for size in model_sizes()}
    for ours, theirs in names.items():
        *_, params, weights = PUBLISHED[theirs]
        assert (sizes[ours].params, sizes[ours].bfloat16) == (params, weights)
        assert 0.5 < sizes[ours].int8 / weights < 0.56
    # By the size of the published files.
    assert sizes["SDAR-4B"].bfloat16 == 8_822_848_512
    assert sizes["SDAR-8B"].cache == 4096 * 144 * 1024


def _doctor(path, *argv):
    """The doctor in a process whose first path is another."""
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", "dllm_jax.doctor", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def _fake(path, name, version, source):
    (path / f"{name}-{version}.dist-info").mkdir()
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (path / f"{name}-{version}.dist-info/METADATA").write_text(meta)
    (path / name).mkdir()
    (path / name / "__init__.py").write_text(source)


def test_a_jax_that_is_too_old_is_diagnosed(tmp_path):
    """As in a fresh Colab runtime: an old jax that imports, but lacks what is used."""
    source = "__version__ = '0.7.2'\ndef devices(): raise RuntimeError('no backend\\nx')\n"
    _fake(tmp_path, "jax", "0.7.2", source)
    result = _doctor(tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "PROBLEM: jax 0.7.2 is too old: 0.10 or newer is needed" in result.stdout
    assert "jax finds no device: no backend." in result.stdout
    assert "restart the session" in result.stdout


def test_a_jax_that_is_broken_is_diagnosed(tmp_path):
    _fake(tmp_path, "jax", "0.10.2", "raise OSError('libfoo.so: cannot open')\n")
    result = _doctor(tmp_path, "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert [f["what"] for f in problems(report)] == [
        "jax cannot be imported: libfoo.so: cannot open"
    ]
    assert report["models"] == []
    assert _doctor(tmp_path, "--device", "tpu").returncode == 2


def test_the_library_says_where_to_look(tmp_path):
    _fake(tmp_path, "jax", "0.7.2", "raise OSError('libfoo.so: cannot open')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    result = subprocess.run(
        [sys.executable, "-c", "import dllm_jax; dllm_jax.load"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: dllm_jax cannot be used here (OSError: libfoo.so")
    assert "python -m dllm_jax.doctor" in last


def test_a_session_that_was_not_restarted(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.7.2")
    found = problems(doctor.examine())
    assert f"jax 0.7.2 loaded, but jax {doctor._installed('jax')} is" in found[0]["what"]
    assert found[0]["fix"] == "restart the session"
