"""The notebooks: as `colab/build.py` writes them, and they run unchanged on a CPU."""

import importlib.util
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import IPython
import nbformat
import pytest
from nbclient import NotebookClient

import dllm_jax
from dllm_jax.decoding import DECODERS
from dllm_jax.model import load_config
from dllm_jax.request import plan
from dllm_jax.settings import setting_fields

ROOT = Path(__file__).parent.parent
COLAB = ROOT / "colab"


def _load_build():
    spec = importlib.util.spec_from_file_location("colab_build", COLAB / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()


@pytest.mark.parametrize("name", build.NOTEBOOKS)
def test_committed_notebooks_are_what_the_script_writes(name):
    committed = (COLAB / f"{name}.ipynb").read_text(encoding="utf-8")
    assert committed == build.build(name), "run python colab/build.py"


def test_there_are_no_others():
    assert {path.stem for path in COLAB.glob("*.ipynb")} == set(build.NOTEBOOKS)


def test_a_form_has_every_setting():
    source = build.form("block", "settings", threshold=0.5)
    fields = setting_fields(DECODERS["block"])
    params = dict(re.findall(r"^(\w+) = (.*)  # @param", source, re.MULTILINE))
    assert params.keys() == fields.keys()
    assert params["threshold"] == "0.5"
    names: dict = {}
    exec(source, names)
    assert names["settings"]["block_length"] is None  # 0 in the form: not given
    given = {name: value for name, value in names["settings"].items() if value is not None}
    assert plan(load_config("demo"), "block", **given).settings.threshold == 0.5
    with pytest.raises(KeyError):
        build.form("block", "settings", ["no_such_setting"])


class Restart(Exception):
    pass


def test_an_old_runtime_is_upgraded_and_restarted(monkeypatch, tmp_path, capsys):
    """The first cell where jax is old: pip, then a restart; and without a source."""

    def restart():
        raise Restart

    source = build.INSTALL.replace("@FLOOR@", "0.10")
    commands: list[list[str]] = []
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.2")
    monkeypatch.setattr(subprocess, "check_call", commands.append)
    monkeypatch.setattr(IPython, "get_ipython", restart)
    with pytest.raises(Restart):
        exec(source.replace("@SOURCE@", str(tmp_path)), {})
    [command] = commands
    assert command[1:6] == ["-m", "pip", "install", "-q", "-U"]
    assert command[6].startswith("jax") and command[-1] == str(tmp_path)
    assert "run this cell once more" in capsys.readouterr().out
    with pytest.raises(ValueError, match="SOURCE='nowhere' must be a directory"):
        exec(source.replace("@SOURCE@", "nowhere"), {})


def _execute(name, directory):
    """A notebook's code cells after a run, and all that it printed."""
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(directory / "ipython"),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is most of the time
    }
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env=environment)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    printed = "".join(out.get("text", "") for out in outputs)
    kinds = [kind for out in outputs for kind in out.get("data", {})]
    return printed, kinds, outputs


@pytest.fixture(scope="module")
def answer():
    return dllm_jax.generate(dllm_jax.load("demo"), build.SAMPLE)[0].text


def test_quickstart(tmp_path, answer):
    printed, kinds, outputs = _execute("quickstart", tmp_path)
    assert "Nothing to install: jax" in printed
    assert "Nothing is wrong." in printed
    assert printed.count(answer) == 1
    assert re.search(r"38 tokens in \d+ forwards", printed)
    assert answer in printed.replace("|", "")
    assert kinds.count("image/png") == 2
    [page] = [
        out["data"]["text/html"] for out in outputs if "text/html" in out.get("data", {})
    ]
    assert "srcdoc=" in page and "forward 1, confidence" in page
    assert "Tick RUN" in printed


def test_speculation(tmp_path):
    printed, kinds, _ = _execute("speculation", tmp_path)
    rows = dict(re.findall(r"^(\w+) +\| (.*)$", printed, re.MULTILINE))
    assert list(rows) == ["ar", "block", "simsd", "s2d2", "leap"]
    speed = {name: float(row.split(" | ")[0]) for name, row in rows.items()}
    assert speed["ar"] < 1 < min(speed[name] for name in ("block", "simsd", "s2d2", "leap"))
    # What is said of s2d2: the tokens of ar.
    assert rows["s2d2"].endswith("| 100.00")
    assert kinds.count("image/png") == 1 + 5


def test_convert(tmp_path, answer):
    printed, _, _ = _execute("convert", tmp_path)
    assert re.search(r"verified; peak RAM", printed)
    assert "every checksum agrees" in printed
    assert printed.rstrip().endswith(answer)
