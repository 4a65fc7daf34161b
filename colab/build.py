"""Writes the notebooks: `python colab/build.py [DIRECTORY]`.

Their forms come from the decoders' settings, so notebooks and library cannot drift apart;
a test compares the committed ones with what this writes.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from dllm_jax.decoding import DECODERS
from dllm_jax.doctor import JAX_FLOOR
from dllm_jax.settings import setting_fields

REPOSITORY = ""  # owner/name on GitHub, for the badges and what is installed

_FORM_TYPES = {float: "number", int: "integer", bool: "boolean", str: "string"}


def form(
    decoder: str, variable: str, names: Sequence[str] = (), **defaults: float | str
) -> str:
    """A cell whose form is a decoder's settings; it makes a dict of them.

    Args:
      decoder: its name.
      variable: the name of the dict.
      names: which settings; all if none are named.
      **defaults: other values than the decoder's own to begin with.
    """
    fields = setting_fields(DECODERS[decoder])
    lines = [f'# @title Settings of `{decoder}` {{ display-mode: "form" }}']
    entries = []
    for name in names or fields:
        meta, value = fields[name].metadata, defaults.get(name, fields[name].default)
        optional = fields[name].default is None
        choices = list(meta["choices"])
        unset = "" if meta["kind"] is str else meta["kind"](0)
        if optional:
            value = defaults.get(name, unset)
            choices = [unset, *choices] if choices else []
        kind = json.dumps(choices) if choices else None
        kind = kind or f'{{type:"{_FORM_TYPES[meta["kind"]]}"}}'
        shown = json.dumps(value) if isinstance(value, str) else repr(value)
        empty = f" ({'empty' if unset == '' else unset}: not given)" if optional else ""
        lines.append(f"# @markdown **{name}**: {meta['help']}{empty}")
        lines.append(f"{name} = {shown}  # @param {kind}")
        entries.append(f'    "{name}": {name}{" or None" if optional else ""},')
    return "\n".join([*lines, "", f"{variable} = {{", *entries, "}", f"print({variable})"])


def _setup() -> list[tuple[str, str]]:
    """The cells that all notebooks begin with."""
    source = f"git+https://github.com/{REPOSITORY}" if REPOSITORY else "/content/dllm_jax"
    install = INSTALL.replace("@SOURCE@", source).replace("@FLOOR@", JAX_FLOOR)
    return [
        ("markdown", "## Install, and look at the machine\n\n" + SETUP_TEXT),
        ("code", install),
        ("code", "from dllm_jax import doctor\n\nproblems = doctor.main([])"),
    ]


SETUP_TEXT = """A Colab runtime brings an older jax than the library needs. The first cell \
upgrades it and restarts the session; then run the cell once more, and go on. The second \
says which devices jax sees and what is wrong, if anything. Everything here also runs on a \
CPU, with the small models that come with the library."""

INSTALL = """# @title Install { display-mode: "form" }
# @markdown A directory with the repository, or `git+https://..`; used if need be.
SOURCE = "@SOURCE@"  # @param {type:"string"}

import re
import subprocess
import sys
from glob import glob
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def release(version):
    return tuple(int(part) for part in re.findall(r"\\d+", version)[:2])


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "0"


if find_spec("dllm_jax") and release(installed("jax")) >= release("@FLOOR@"):
    print(f"Nothing to install: jax {installed('jax')}, Python {sys.version.split()[0]}.")
elif not SOURCE.startswith("git+") and not Path(SOURCE).is_dir():
    raise ValueError(f"{SOURCE=} must be a directory with the repository, or git+https://..")
else:
    has_tpu = glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")
    upgrade = ["jax[tpu]" if has_tpu else "jax", "flax", "optax", "orbax-checkpoint"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "-U", *upgrade, SOURCE]
    subprocess.check_call(pip)
    print("Installed. The session restarts now: run this cell once more, and go on.")
    from IPython import get_ipython

    get_ipython().kernel.do_shutdown(True)"""

SAMPLE = (
    "Mia makes 8 coins a day for 6 days. She had 2 before. She sells 6. "
    "How many coins does Mia have now?"
)


def quickstart() -> list[tuple[str, str]]:
    """A first answer, how it came about, and a real checkpoint."""
    return [
        *_setup(),
        ("markdown", "## A first answer"),
        (
            "code",
            f"""# @title Model and prompt {{ display-mode: "form" }}
# @markdown A model that comes with the library, or a converted directory.
MODEL = "demo"  # @param ["demo", "demo-draft"] {{allow-input: true}}
PROMPT = {json.dumps(SAMPLE)}  # @param {{type:"string"}}
MAX_NEW_TOKENS = 128  # @param {{type:"integer"}}

import dllm_jax

model = dllm_jax.load(MODEL)
print(f"{{MODEL}}: {{model.dtype}}")""",
        ),
        ("code", form("block", "settings")),
        (
            "code",
            """[out] = dllm_jax.generate(
    model, PROMPT, "block", max_new_tokens=MAX_NEW_TOKENS, **settings
)
stats = out.stats
print(out.text)
print(
    f"{stats.generated_tokens} tokens in {stats.forwards['total']} forwards "
    f"({stats.tokens_per_forward:.2f} tokens a forward), cache {stats.cache}; "
    f"compile {stats.compile_seconds:.1f} s, decode {stats.decode_seconds:.2f} s"
)""",
        ),
        ("markdown", "Committed text can be had while it is decoded:"),
        (
            "code",
            """arguments = {"max_new_tokens": MAX_NEW_TOKENS, **settings}
for piece in dllm_jax.stream(model, PROMPT, "block", **arguments):
    print(piece, end="|")""",
        ),
        (
            "markdown",
            "## How it came about\n\nEach cell is a token, its number the forward.",
        ),
        ("code", "from dllm_jax import plots\n\nplots.order_map(out, model.tokenizer);"),
        (
            "code",
            """against = {"block": out}
[against["one by one"]] = dllm_jax.generate(
    model, PROMPT, "ar", max_new_tokens=MAX_NEW_TOKENS
)
plots.confidence_over_forwards(against);""",
        ),
        (
            "code",
            """import html

from IPython.display import HTML

from dllm_jax.trace_page import make_cells, trace_page

page = trace_page([(PROMPT, make_cells(out, model.tokenizer))])
HTML(f'<iframe srcdoc="{html.escape(page)}" width="100%" height="420"></iframe>')""",
        ),
        (
            "markdown",
            "## A real checkpoint\n\nConverts a checkpoint of the hub once (about 4 GB to "
            "download) and decodes with it; the doctor's table above says what fits. "
            "`convert.ipynb` keeps the result on Drive.",
        ),
        (
            "code",
            """RUN = False  # @param {type:"boolean"}
CHECKPOINT = "JetLM/SDAR-1.7B-Chat"  # @param {type:"string"}
QUESTION = "Why is the sky blue?"  # @param {type:"string"}

if RUN:
    from pathlib import Path

    from convert.__main__ import main as convert

    directory = Path(CHECKPOINT.split("/")[-1]).resolve()
    if not directory.exists() and convert([CHECKPOINT, str(directory)]):
        raise RuntimeError("it was not converted: see the line above")
    real = dllm_jax.load(str(directory))
    for piece in dllm_jax.stream(real, QUESTION, max_new_tokens=256):
        print(piece, end="")
else:
    print("Tick RUN to convert and run it.")""",
        ),
    ]


def _speculation_case(
    decoder: str, text: str, names: Sequence[str] = (), pair: str = "", **defaults
) -> list[tuple[str, str]]:
    """The section of a decoder that speculates: its text, its form, its run."""
    run = f'results["{decoder}"] = decode("{decoder}", {decoder}_settings{pair})'
    return [
        ("markdown", f"## {text}"),
        ("code", form(decoder, f"{decoder}_settings", names, **defaults)),
        ("code", f'{run}\nprint(results["{decoder}"][0].text)'),
    ]


def speculation() -> list[tuple[str, str]]:
    """Decoders that speculate, side by side on the demo models."""
    return [
        *_setup(),
        (
            "markdown",
            "## The same problems for all\n\nProblems that the models have never seen. The "
            "baselines are one token a forward (`ar`) and plain block diffusion.",
        ),
        (
            "code",
            """# @title Models and problems { display-mode: "form" }
MODEL = "demo"  # @param {type:"string"}
DRAFT_MODEL = "demo-draft"  # @param {type:"string"}
PROBLEMS = 8  # @param {type:"integer"}
BLOCK_LENGTH = 8  # @param {type:"integer"}

from itertools import islice

import dllm_jax
from dllm_jax.training.problems import generate_problems, parse_answer

model, drafter = dllm_jax.load(MODEL), dllm_jax.load(DRAFT_MODEL)
problems = list(islice(generate_problems("test", 2026), PROBLEMS))


def decode(decoder, settings, **pair):
    questions = [problem.question for problem in problems]
    shared = {"max_new_tokens": 80, **pair}
    return dllm_jax.generate(model, questions, decoder, **shared, **settings)


results = {
    "ar": decode("ar", {}),
    "block": decode("block", {"block_length": BLOCK_LENGTH}),
}
print(results["block"][0].text)""",
        ),
        *_speculation_case(
            "simsd",
            "SimSD: a small model drafts\n\nThe drafter denoises a block, one forward of "
            "the model judges all of it. `exact` gives the very tokens of `block` with the "
            "same settings, `paired` is the published approximation.",
            pair=", draft_model=drafter",
            block_length=8,
        ),
        *_speculation_case(
            "s2d2",
            "S2D2: the model verifies its own drafts\n\nWith `greedy` acceptance and both "
            "causal caches the tokens are those of `ar`.",
            names=(
                "block_length",
                "threshold",
                "acceptance",
                "do_verify_policy",
                "min_ssd_span_length",
                "score_penalty_coef",
                "do_verify_score_threshold",
                "token_acceptance_estimator",
                "cache_ver",
                "draft_ver",
                "reuse_verified",
                "fold_verify",
                "bonus_token",
            ),
            block_length=8,
            acceptance="greedy",
            cache_ver=True,
            draft_ver=True,
            reuse_verified=True,
            fold_verify=True,
        ),
        *_speculation_case(
            "leap",
            "LEAP: early what the likely next tokens would not change\n\nBehind the text "
            "run its likely next tokens and a copy of every mask; a choice that is the "
            "same with and without them may come early.",
            names=("block_length", "threshold", "tau", "eta", "perturbation"),
            block_length=8,
        ),
        (
            "markdown",
            "## Side by side\n\nForwards are those of the large model. Few problems: "
            "the accuracies are rough; `docs/` has measurements on more.",
        ),
        (
            "code",
            """from dllm_jax.decoding import DECODERS


def drafts(name, out):
    return out.stats.forwards["draft"] if DECODERS[name].drafts else 0


def forwards(name, out):
    return out.stats.forwards["total"] - drafts(name, out)


def row(name, outputs):
    tokens = sum(out.stats.generated_tokens for out in outputs)
    right = [
        parse_answer(out.text) == p.answer for out, p in zip(outputs, problems, strict=True)
    ]
    same = [out.tokens == b.tokens for out, b in zip(outputs, results["ar"], strict=True)]
    return {
        "decoder": name,
        "tokens/forward": tokens / sum(forwards(name, out) for out in outputs),
        "drafts/token": sum(drafts(name, out) for out in outputs) / tokens,
        "accuracy %": 100 * sum(right) / len(right),
        "as ar %": 100 * sum(same) / len(same),
    }


rows = [row(name, outputs) for name, outputs in results.items()]
for entry in rows:
    cells = [f"{v:.2f}" if isinstance(v, float) else f"{v:6}" for v in entry.values()]
    print(" | ".join(cells))
print("columns: " + ", ".join(rows[0]))""",
        ),
        (
            "code",
            """from dllm_jax import plots

plots.frontier(rows, series="decoder");""",
        ),
        (
            "code",
            """for name, outputs in results.items():
    title = f"{name}: {forwards(name, outputs[0])} forwards of the large model"
    plots.order_map(outputs[0], model.tokenizer, title=title)""",
        ),
    ]


def convert() -> list[tuple[str, str]]:
    """From the hub to Orbax on Drive."""
    return [
        *_setup(),
        (
            "markdown",
            "## What, and where to\n\nA checkpoint is converted once. On Colab the result "
            "goes to Drive, where later sessions find it; else to a new directory. The "
            "converter holds one tensor at a time: what counts is disk (the download, in "
            "the cache of the hub, and the result) and, to load the model afterwards, the "
            "memory of the device.",
        ),
        (
            "code",
            """# @title What and where to { display-mode: "form" }
# @markdown A hub id such as `JetLM/SDAR-1.7B-Chat`, a directory, or `demo`.
MODEL = "demo"  # @param {type:"string"}
# @markdown Empty: on Drive under `dllm_jax/`, or a new directory where there is no Drive.
DIRECTORY = ""  # @param {type:"string"}
DTYPE = "as stored"  # @param ["as stored", "bfloat16", "float16", "float32"]

import tempfile
from pathlib import Path

from dllm_jax.model import DEMO_MODELS, resolve_model_path

if DIRECTORY:
    destination = Path(DIRECTORY)
else:
    try:
        from google.colab import drive
    except ImportError:
        root = Path(tempfile.mkdtemp())
    else:
        drive.mount("/content/drive")
        root = Path("/content/drive/MyDrive/dllm_jax")
    destination = root / MODEL.rstrip("/").split("/")[-1]
source = str(resolve_model_path(MODEL)) if MODEL in DEMO_MODELS else MODEL
print(f"{source} -> {destination}")""",
        ),
        (
            "code",
            """import shutil

from dllm_jax.caches import hub_cache

destination.parent.mkdir(parents=True, exist_ok=True)
host = doctor.examine()["host"]
print(f"free RAM {host['ram_free_bytes'] / 1e9:.1f} GB")
for what, where in (("download", hub_cache()), ("result", destination.parent)):
    there = next(path for path in (where, *where.parents) if path.exists())
    print(f"free disk for the {what}: {shutil.disk_usage(there).free / 1e9:.1f} GB")""",
        ),
        ("markdown", "## Convert, and check\n\nThe result appears whole or not at all."),
        (
            "code",
            """from convert.__main__ import main as run_converter

options = [] if DTYPE == "as stored" else ["--dtype", DTYPE]
if destination.exists():
    print(f"{destination} is there already.")
elif run_converter([source, str(destination), *options]):
    raise RuntimeError("it was not converted: see the line above")
if run_converter(["verify", str(destination)]):
    raise RuntimeError("the result is damaged: delete it and run this again")""",
        ),
        ("markdown", "## Decode with it"),
        (
            "code",
            f"""PROMPT = {json.dumps(SAMPLE)}  # @param {{type:"string"}}

import dllm_jax

model = dllm_jax.load(str(destination))
[out] = dllm_jax.generate(model, PROMPT)
print(out.text)""",
        ),
    ]


NOTEBOOKS = {
    "quickstart": ("dllm_jax: a first answer", quickstart),
    "speculation": ("Speculative decoding, side by side", speculation),
    "convert": ("Convert a checkpoint", convert),
}


def build(name: str) -> str:
    """The text of a notebook's file."""
    title, make = NOTEBOOKS[name]
    badge = (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"(https://colab.research.google.com/github/{REPOSITORY}/blob/main/colab/"
        f"{name}.ipynb)\n\n"
    )
    head = f"# {title}\n\n{badge if REPOSITORY else ''}Written by `colab/build.py`."
    cells = []
    for number, (kind, source) in enumerate([("markdown", head), *make()]):
        new_cell = new_code_cell if kind == "code" else new_markdown_cell
        cells.append(new_cell(source, id=f"cell-{number}"))
    metadata = {
        "accelerator": "TPU",
        "colab": {"name": f"{name}.ipynb", "provenance": [], "gpuType": "V5E1"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook = new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(notebook)
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes all notebooks."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name in NOTEBOOKS:
        path = directory / f"{name}.ipynb"
        path.write_text(build(name), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
