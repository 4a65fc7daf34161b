"""Flags that the command lines share: the model and where it runs, decoders, settings."""

import argparse
import dataclasses
import difflib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

from dllm_jax.caches import compile_cache
from dllm_jax.checkpoint import DTYPES
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import DECODERS
from dllm_jax.model import DEMO_MODELS, KV_DTYPES, Model, load, load_config
from dllm_jax.quantize import QUANTS
from dllm_jax.request import MAX_NEW_TOKENS, Plan, check_drafter
from dllm_jax.settings import presets, setting_fields
from dllm_jax.sharding import make_mesh


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the mistake and exits with 2."""
        name = self.prog.split(".")[-1].split()[-1]
        hint = self._meant(message.partition("unrecognized arguments: ")[2])
        self.exit(2, f"{name}: {' '.join(message.splitlines())}{hint} (see --help)\n")

    def _meant(self, unknown: str) -> str:
        """What an argument that is not known may have been meant to be."""
        flags = [name for action in self._actions for name in action.option_strings]
        first = unknown.partition("=")[0].partition(" ")[0]
        if unknown and not first.startswith("-") and "--prompt" in flags:
            return "; a prompt goes behind --prompt"
        close = difflib.get_close_matches(first, flags, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def parse(
    make_parser: Callable[[str | None], argparse.ArgumentParser], argv: Sequence[str] | None
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, whose `--help` is that of the decoder on the command line, and flags."""
    argv = _usual_names(argv)
    parser = make_parser(_helped_decoder(argv))
    return parser, parser.parse_args(argv)


def _usual_names(argv: Sequence[str] | None) -> list[str]:
    """The arguments, with `-` for `_` in flags: other projects' names have underscores."""
    return [
        arg.partition("=")[0].replace("_", "-") + "".join(arg.partition("=")[1:])
        if arg.startswith("--")
        else arg
        for arg in (sys.argv[1:] if argv is None else argv)
    ]


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and where it runs."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="demo",
        help=f"converted or Hugging Face directory, or {', '.join(DEMO_MODELS)} "
        "(default demo)",
    )
    group.add_argument(
        "--draft-model",
        metavar="NAME",
        help="the model that drafts, for decoders that need one (simsd): as --model",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="of weights and cache; auto is bfloat16 on TPU and GPU, float32 on CPU",
    )
    group.add_argument(
        "--kv-dtype",
        default="auto",
        choices=KV_DTYPES,
        help="of cached keys and values; int8 is approximate (default: as the weights)",
    )
    group.add_argument(
        "--quant",
        default="auto",
        choices=("auto", *QUANTS),
        help="of the weights; int8 is approximate (default: as converted)",
    )
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,..",
        help="divide over several devices: data (rows of a batch), tensor (heads, "
        "feed-forward, vocabulary), expert; such as data=2,tensor=4 (default: one device)",
    )
    group.add_argument(
        "--draft-whole",
        action="store_true",
        help="with --mesh: every device has the whole drafter",
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="this is one of several processes that run the same command, one a host; on "
        "Cloud TPU they find each other (default mesh: data over all devices)",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="with --distributed elsewhere: of the first process",
    )
    group.add_argument("--num-processes", type=int, metavar="INT", help="as --coordinator")
    group.add_argument("--process-id", type=int, metavar="INT", help="as --coordinator")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu", "tpu"))
    group.add_argument(
        "--compile-cache",
        metavar="DIR",
        help="compiled programs are kept here; `none` turns it off "
        "(default JAX_COMPILATION_CACHE_DIR, else the user's cache directory)",
    )


def as_typed(message: str, parser: argparse.ArgumentParser) -> str:
    """A message of the library with switches as they are typed: --fold for fold=True."""
    known = {name for action in parser._actions for name in action.option_strings}

    def typed(found: re.Match) -> str:
        name = _flag(("no_" if found[2] == "False" else "") + found[1])
        return name if name in known else found[0]

    return re.sub(r"\b(\w+)=(True|False)\b", typed, message)


def _helped_decoder(argv: Sequence[str]) -> str | None:
    """The decoder on a command line, by which `--help` chooses what it lists."""
    values = [
        after if arg == "--decoder" else arg.removeprefix("--decoder=")
        for arg, after in itertools.pairwise([*argv, ""])
        if arg.partition("=")[0] == "--decoder"
    ]
    return values[-1] if values else None


ALL = "all"
"""Stands for every decoder where the settings of one may be listed."""


def add_generation_flags(parser: argparse.ArgumentParser, listed: str | None) -> None:
    """How it decodes: the decoder, and every decoder's settings.

    Args:
      parser: to add them to.
      listed: the decoder whose settings `--help` lists; `ALL`, or None for none.
    """
    group = parser.add_argument_group("generation")
    summaries = "; ".join(f"{d.name}: {d.summary}" for d in DECODERS.values())
    group.add_argument(
        "--decoder",
        choices=tuple(DECODERS),
        metavar="NAME",
        help=f"{summaries} (default: what the model is made for)".replace("%", "%%"),
    )
    group.add_argument("--preset", help=f"one of {', '.join(presets())}")
    group.add_argument(
        "--max-new-tokens",
        "--gen-length",
        type=int,
        metavar="INT",
        help=f"most tokens to generate (default {MAX_NEW_TOKENS}, or the preset's)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="INT", help="default 0")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the text before this string; repeatable",
    )
    group.add_argument(
        "--steps",
        type=int,
        metavar="INT",
        help="denoising steps in all, spread evenly over the blocks",
    )

    group = parser.add_argument_group(
        "decoder settings",
        "--decoder NAME --help lists those of a decoder" if listed is None else None,
    )
    for name, users in _shared_settings().items():
        _add_setting(group, name, users, listed)


def _shared_settings() -> dict[str, dict[str, dataclasses.Field]]:
    """Every setting of every decoder: its field in each decoder that takes it."""
    shared: dict[str, dict[str, dataclasses.Field]] = {}
    for decoder in DECODERS.values():
        for name, field in setting_fields(decoder).items():
            shared.setdefault(name, {})[decoder.name] = field
    return shared


def _add_setting(
    group: Any, name: str, users: dict[str, dataclasses.Field], listed: str | None
) -> None:
    """One flag for a setting that several decoders may take, each in its own way."""
    fields = list(users.values())
    kind = fields[0].metadata["kind"]
    choices = _union(fields, "choices")
    options: dict[str, Any] = {
        "dest": f"setting_{name}",
        "default": None,
        "help": argparse.SUPPRESS,
    }
    if listed == ALL or listed in users:
        own = users if listed == ALL else {listed: users[listed]}
        options["help"] = _describe(own).replace("%", "%%")
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif choices:
        options |= {"choices": choices, "metavar": "NAME"}
    else:
        options |= {"type": kind, "metavar": kind.__name__.upper()}
    group.add_argument(_flag(name), *map(_flag, _union(fields, "aliases")), **options)


def _describe(users: dict[str, dataclasses.Field]) -> str:
    """The help of a setting, with what decoders that are listed have in common."""
    fields = list(users.values())
    choices, default = _union(fields, "choices"), fields[0].default
    about = ", ".join(users) if len(users) > 1 else ""
    if default is not None and all(field.default == default for field in fields):
        about += f"{', ' * bool(about)}default {default}"
    allowed = f"; one of {', '.join(choices)}" if choices else ""
    return f"{fields[0].metadata['help']}{allowed}{f' ({about})' if about else ''}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _union(fields: Sequence[dataclasses.Field], key: str) -> list[str]:
    return list(dict.fromkeys(value for f in fields for value in f.metadata[key]))


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The decoder settings that were given, by name."""
    return {
        name: value
        for name in _shared_settings()
        if (value := getattr(args, f"setting_{name}")) is not None
    }


def check_draft_flags(args: argparse.Namespace, request: Plan, config: ModelConfig) -> None:
    """Raises ValueError unless the flags give the drafter that the decoder needs."""
    if args.draft_whole and (args.mesh is None or args.draft_model is None):
        raise ValueError("draft_whole=True needs --mesh and --draft-model.")
    drafter = None if args.draft_model is None else load_config(args.draft_model)
    check_drafter(config, request, drafter)


def set_up_jax(args: argparse.Namespace) -> None:
    """Applies `--device` and `--compile-cache`; raises ValueError."""
    if args.device != "auto":
        platform = {"gpu": "cuda"}.get(args.device, args.device)
        jax.config.update("jax_platforms", platform)
    _join(args)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter without a CUDA plugin
        line = next(iter(str(error).splitlines()), "jax has no such devices")
        line = line.removesuffix(".")
        raise ValueError(f"device={args.device!r} is not there: {line}.") from None
    if args.compile_cache == "none":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if args.compile_cache is not None or "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        directory = Path(args.compile_cache or compile_cache())
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if args.compile_cache is None:
                return  # the default place cannot be written: do without
            raise ValueError(
                f"compile_cache={args.compile_cache!r}: {error.strerror}."
            ) from None
        jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _join(args: argparse.Namespace) -> None:
    """Finds the other processes of the run, before any device is looked at."""
    where = {
        "coordinator_address": args.coordinator,
        "num_processes": args.num_processes,
        "process_id": args.process_id,
    }
    given = {name: value for name, value in where.items() if value is not None}
    if not args.distributed:
        if given:
            raise ValueError(f"{min(given)}={given[min(given)]!r} needs --distributed.")
        return
    if given and len(given) < len(where):
        missing = min(where.keys() - given.keys())
        raise ValueError(
            f"{missing} is missing: --coordinator, --num-processes and --process-id go "
            "together, and none of them is needed on Cloud TPU."
        )
    # Between CPU devices of several processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**given)
    except (RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise ValueError(f"distributed=True: the processes do not meet: {line}") from None


def load_models(
    args: argparse.Namespace, request: Plan, console: Console
) -> tuple[Model, Model | None]:
    """The model and its drafter; says how it will decode, and on what."""
    device = jax.devices()[0]
    if jax.process_index():  # one of several processes: the first one speaks
        console.quiet = True
    if args.distributed and args.mesh is None:
        args.mesh = f"data={jax.device_count()}"
    shown = " ".join(f"{name}={value}" for name, value in request.describe().items())
    console.print(shown, highlight=False, markup=False)
    started = time.perf_counter()
    given = {"dtype": args.dtype, "kv_dtype": args.kv_dtype, "quant": args.quant}
    given["mesh"] = make_mesh(args.mesh)
    model, drafter = load(args.model, **given), None
    if args.draft_model is not None:
        drafter = load(args.draft_model, **given, divided=not args.draft_whole)
    weights = model.dtype if model.quant == "none" else f"{model.quant}, {model.dtype}"
    count = 1 if model.mesh is None else model.mesh.size
    console.print(
        f"{args.model}: {weights} on {count} x {device.device_kind}, "
        f"loaded in {time.perf_counter() - started:.1f} s",
        highlight=False,
        markup=False,
    )
    return model, drafter
