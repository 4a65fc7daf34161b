"""The README and docs/: their commands run, their tables are current, their links lead on.

Checkpoints that a page converts or decodes are not downloaded: the golden checkpoint of the
same family, with a tokenizer of numbered words, stands for them.
"""

import dataclasses
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tiny import quick_compilation

from dllm_jax import batch
from dllm_jax.decoding.base import Forwards
from dllm_jax.run import Output, Stats

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

# Commands that are not run here, by how they begin, and why.
NOT_RUN = {
    "python -m venv": "installs the package",
    ".venv/bin/pip install": "installs the tests' packages and runs all of them",
    "gcloud compute": "needs a TPU slice; test_processes runs several processes",
    "python -m dllm_jax.train demo": "trains for many minutes; test_training does less",
}

# Hub ids and directories, and the golden checkpoint (and its mask id) that stands for them.
STANDS_FOR = {
    "JetLM/SDAR-1.7B-Chat": ("sdar", 253),
    "GSAI-ML/LLaDA-8B-Instruct": ("llada", 250),
    "Dream-org/Dream-v0-Instruct-7B": ("dream", 250),
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": ("fast_dllm_v2", 253),
    "inclusionAI/LLaDA2.1-mini": ("llada2", 253),
    "./sdar-8b": ("sdar", 253),
    "./fast-dllm-v2-1.5b": ("fast_dllm_v2", 253),
}

# Files of their own that pages ask their readers for.
QUESTION = "Ana has 12 coins. She finds 7. She loses 4. How many coins does Ana have now?"
FILES = {"p.jsonl": f'"{QUESTION}"\n[1, 2, 3]\n'}

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [body for found, body in _FENCE.findall(text) if found == language]


def commands(page: Path) -> list[str]:
    """The page's shell commands, continued lines joined."""
    text = "".join(fences(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def is_run(command: str) -> bool:
    return not any(command.startswith(beginning) for beginning in NOT_RUN)


def has_blocks(page: Path) -> bool:
    return any(map(is_run, commands(page))) or bool(fences(page, "python"))


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory):
    """Programs are compiled once for all pages; the suite's settings come back."""
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    directory = str(tmp_path_factory.mktemp("programs"))
    with pytest.MonkeyPatch.context() as patch, quick_compilation():
        # The command line leaves a directory alone that the environment names.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", directory)
        jax.config.update(names[0], directory)
        jax.config.update(names[1], 0.0)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def write_stand_in(golden: Path, mask_id: int, directory: Path) -> None:
    """A golden checkpoint with a tokenizer, in Hugging Face layout."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True)
    for name in ("model.safetensors", "generation_config.json"):
        if (golden / name).exists():
            shutil.copy(golden / name, directory / name)
    config = json.loads((golden / "config.json").read_text(encoding="utf-8"))
    config["mask_token_id"] = mask_id
    text = json.dumps(config)
    (directory / "config.json").write_text(text, encoding="utf-8")
    vocabulary = {f"w{i}": i for i in range(config["vocab_size"])}
    vocabulary["<mask>"] = vocabulary.pop(f"w{mask_id}")
    words = Tokenizer(WordLevel(vocabulary, unk_token="w9"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, mask_token="<mask>", unk_token="w9"
    )
    made.save_pretrained(directory)


@pytest.fixture
def workspace(page, tmp_path, monkeypatch) -> Path:
    """A directory to run a page's commands in, with all that the page does not make."""
    import huggingface_hub

    def stand_in(name: str, directory: Path) -> Path:
        family, mask_id = STANDS_FOR[name]
        write_stand_in(ROOT / "tests" / "golden" / family, mask_id, directory)
        return directory

    def download(source: str, **options) -> str:
        return str(stand_in(source, tmp_path / "hub" / source))

    work = tmp_path / "work"
    work.mkdir()
    lines = commands(page)
    for name in STANDS_FOR:
        made = any("-m convert " in line and f" {name}" in line for line in lines)
        if not made and any(f"--model {name} " in line for line in lines):
            stand_in(name, work / name)
    for name, text in FILES.items():
        (work / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(work)
    return work


def run_main(argv: list[str]) -> int:
    """Runs `python ARGV` here; returns its exit code."""
    assert argv[:2] == ["python", "-m"], argv
    name = "convert.__main__" if argv[2] == "convert" else argv[2]
    try:
        return importlib.import_module(name).main(argv[3:])
    except SystemExit as end:
        return end.code or 0


def run_command(command: str, work: Path, monkeypatch) -> int:
    """Runs one line of a page; returns its exit code.

    Our own commands run in this process, what feeds them and whatever else in a shell.
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|>")
    lexer.whitespace_split = True
    tokens = list(lexer)
    stdin = os.devnull
    if "|" in tokens:
        cut = tokens.index("|")
        fed = subprocess.run(tokens[:cut], capture_output=True, check=True).stdout
        stdin, tokens = work / "stdin", tokens[cut + 1 :]
        stdin.write_bytes(fed)
    if tokens[0] != "python":
        return subprocess.run(command, shell=True, cwd=work).returncode
    with open(stdin, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        return run_main(tokens)


@pytest.mark.parametrize(
    "page", list(filter(has_blocks, PAGES)), ids=lambda page: page.name
)
def test_commands(page, workspace, monkeypatch, capsys):
    """Every command of a page, in its order, then its Python as one program."""
    for command in filter(is_run, commands(page)):
        code = run_command(command, workspace, monkeypatch)
        out, err = capsys.readouterr()
        assert code == 0, f"{command}\n{out}\n{err}"
        # A stand-in may well say nothing; the demo models, with some room, do not.
        says = "-m dllm_jax.decode" in command and "--model ./" not in command
        if says and "--output" not in command:
            assert out.strip(), command
    names: dict = {}
    for block in fences(page, "python"):
        exec(compile(block, page.name, "exec"), names)


def test_what_is_not_run_exists():
    for beginning in NOT_RUN:
        lines = [line for page in PAGES for line in commands(page)]
        assert any(line.startswith(beginning) for line in lines), beginning


def test_generated_tables_are_current():
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))["build"]
    for page in PAGES[1:]:
        text = page.read_text(encoding="utf-8")
        assert text == build(text), f"{page.name}: run python docs/build.py"


def test_every_decoder_and_family_has_its_page():
    from dllm_jax.decoding import DECODERS
    from dllm_jax.models import FAMILIES

    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in DECODERS:
        assert f"<!-- settings: {name} -->" in text, name
    for family in FAMILIES.values():
        if family.presets:
            assert f"<!-- presets: {family.name} -->" in text, family.name


@by_page
def test_links(page):
    """Links and named files lead somewhere, and the README names every page."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    folders = "benchmarks|convert|colab|dllm_jax|docs|kernels_pallas|tests"
    for target in re.findall(rf"`(?:python )?((?:{folders})/[\w./-]+)", text):
        assert (ROOT / target).exists(), target
    if page.name == "README.md":
        for other in PAGES[1:]:
            assert f"docs/{other.name}" in text, other.name


def known_flags() -> set[str]:
    from convert.__main__ import make_parser as make_convert_parser
    from dllm_jax.decode import make_parser

    parsers = make_parser(), make_convert_parser()
    flags = {f for p in parsers for a in p._actions for f in a.option_strings}
    paths = list((ROOT / "benchmarks").glob("*.py"))
    paths += [ROOT / "dllm_jax" / f"{name}.py" for name in ("train", "chat", "doctor")]
    for path in [*paths, ROOT / "docs" / "build.py", ROOT / "tests" / "conftest.py"]:
        text = path.read_text(encoding="utf-8")
        flags |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', text))
        for options in re.findall(r"(\w+)=(?:dict\(|\{)", text):
            flags.add("--" + options.replace("_", "-"))
    return flags


# Of other people's programs.
_FOREIGN = {"--zone", "--worker", "--command"}


@by_page
def test_flags_exist(page):
    """No page names a flag that no program has."""
    text = re.sub(r"`--\[no-\]", "`--", page.read_text(encoding="utf-8"))
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", text))
    missing = {flag.replace("_", "-") for flag in found} - known_flags() - _FOREIGN
    assert not missing


def test_every_field_of_an_output_is_explained():
    text = (ROOT / "docs" / "output.md").read_text(encoding="utf-8")
    kinds = (Output, Stats, Forwards)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    lines = [json.loads(batch._record(batch.Line(1, 2, None, "bad", "k"), None, "bad"))]
    names |= {name for line in lines for name in line}
    missing = {name for name in names if f"`{name}`" not in text}
    assert not missing
