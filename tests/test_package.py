"""What the repository promises about itself: layers, data, metadata."""

import ast
import configparser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import from those before it, never from those behind it.
LAYERS = (
    "platform",
    "caches",
    "config",
    "quantize",
    "params",
    "model_sizes",
    "partition",
    "layers",
    "grouped",
    "moe",
    "cache",
    "sharding",
    "layouts",
    "attention",
    "transformer",
    "sampling",
    "head",
    "compiler",
    "unmasking",
    "decoding",
    "models",
    "hf",
    "checkpoint",
    "tokenizer",
    "conversation",
    "model",
    "prompts",
    "settings",
    "request",
    "likelihood",
    "run",
    "generate",
    "batch",
    "terminal",
    "trace_page",
    "plots",
    "watch",
    "training",
    "train",
    "flags",
    "decode",
    "chat",
    "doctor",
)


def _imports(path):
    """Modules imported at the top of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def test_kernels_depend_on_jax_alone():
    for path in (ROOT / "kernels_pallas").glob("*.py"):
        for name in _imports(path):
            assert not name.startswith(("dllm_jax", "convert")), path


def test_arrows_go_one_way():
    for path in (ROOT / "dllm_jax").rglob("*.py"):
        own = path.relative_to(ROOT / "dllm_jax").parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        rank = LAYERS.index(own)
        for name in _imports(path):
            parts = name.split(".")
            assert parts[0] != "convert", path
            if parts[0] == "dllm_jax" and len(parts) > 1 and parts[1] in LAYERS:
                assert LAYERS.index(parts[1]) <= rank, f"{path} imports {name}"


def test_the_core_knows_no_family():
    families = [path.stem for path in (ROOT / "dllm_jax" / "models").glob("[a-z]*.py")]
    assert families
    core = ("params", "layers", "moe", "cache", "attention", "transformer", "layouts")
    for module in core:
        tree = ast.parse((ROOT / "dllm_jax" / f"{module}.py").read_text("utf-8"))
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        names |= {
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant)
            and isinstance(n.value, str)
            and " " not in n.value
        }
        assert not names & set(families)


def test_demo_checkpoints_are_small_and_complete():
    data = ROOT / "dllm_jax" / "data"
    assert sorted(p.name for p in data.iterdir()) == ["demo", "demo-draft", "demo-llada"]
    files = [p for p in data.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 10_000_000


def test_every_package_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("dllm_jax", "kernels_pallas", "convert")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == found


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_jax_is_not_pinned(package):
    text = (ROOT / "setup.cfg").read_text()
    assert f"{package}==" not in text.replace(" ", "")
    assert f"{package}<" not in text.replace(" ", "")
