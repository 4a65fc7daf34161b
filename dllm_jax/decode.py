"""`python -m dllm_jax.decode`: decode prompts from the command line.

Exit codes: 0 done, 2 for a mistake of the user (one line on stderr), 1 otherwise.
"""

import argparse
import dataclasses
import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.table import Table

from dllm_jax.checkpoint import DTYPES
from dllm_jax.decoding import DECODERS
from dllm_jax.generate import (
    MAX_NEW_TOKENS,
    Output,
    Plan,
    check_drafter,
    plan,
    plan_infill,
    run_plan,
    stream_plan,
)
from dllm_jax.model import DEMO_MODELS, KV_DTYPES, Model, load, load_config
from dllm_jax.prompts import MARKER, Prompt
from dllm_jax.settings import presets, setting_fields

_SAMPLE_SEED = 7


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the mistake and exits with 2."""
        self.exit(2, f"{self.prog.split('.')[-1]}: {message} (see --help)\n")


def _shared_settings() -> dict[str, dict[str, dataclasses.Field]]:
    """Every setting of every decoder: its field in each decoder that takes it."""
    shared: dict[str, dict[str, dataclasses.Field]] = {}
    for decoder in DECODERS.values():
        for name, field in setting_fields(decoder).items():
            shared.setdefault(name, {})[decoder.name] = field
    return shared


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _union(fields: Sequence[dataclasses.Field], key: str) -> list[str]:
    return list(dict.fromkeys(value for f in fields for value in f.metadata[key]))


def _add_setting(group: Any, name: str, users: dict[str, dataclasses.Field]) -> None:
    """One flag for a setting that several decoders may take, each in its own way."""
    fields = list(users.values())
    kind = fields[0].metadata["kind"]
    choices = _union(fields, "choices")
    allowed = f"; one of {', '.join(choices)}" if choices else ""
    default = fields[0].default
    same = default is not None and all(field.default == default for field in fields)
    users_text = f"{', '.join(users)}{f', default {default}' if same else ''}"
    text = f"{fields[0].metadata['help']}{allowed} ({users_text})"
    options: dict[str, Any] = {
        "dest": f"setting_{name}",
        "default": None,
        "help": text.replace("%", "%%"),
    }
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif choices:
        options |= {"choices": choices, "metavar": "NAME"}
    else:
        options |= {"type": kind, "metavar": kind.__name__.upper()}
    group.add_argument(_flag(name), *map(_flag, _union(fields, "aliases")), **options)


def make_parser() -> argparse.ArgumentParser:
    """The command line; decoder flags come from the decoders' settings."""
    parser = Parser(
        prog="python -m dllm_jax.decode",
        description="Decode prompts with a diffusion language model.",
        allow_abbrev=False,
    )
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
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu", "tpu"))
    group.add_argument(
        "--compile-cache",
        metavar="DIR",
        help="compiled programs are kept here; `none` turns it off "
        "(default JAX_COMPILATION_CACHE_DIR, else the user's cache directory)",
    )

    group = parser.add_argument_group("prompt (default: stdin, else a sample problem)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    source.add_argument("--prompt-ids", metavar="1,2,3", help="token ids")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--chat",
        dest="chat",
        action="store_true",
        default=None,
        help="put text into the chat template (default if the model has one)",
    )
    how.add_argument("--raw", dest="chat", action="store_false", help="no chat template")
    how.add_argument(
        "--infill",
        action="store_true",
        help="fill the holes of the prompt in place: --marker in a text, the mask id among "
        "ids (bidirectional models: LLaDA, Dream)",
    )
    group.add_argument(
        "--marker",
        metavar="TEXT",
        help=f"with --infill: stands for one missing token (default {MARKER}); "
        f"{MARKER[:-1]}:n{MARKER[-1]} stands for n",
    )

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

    group = parser.add_argument_group("decoder settings (in brackets: who takes it)")
    for name, users in _shared_settings().items():
        _add_setting(group, name, users)

    group = parser.add_argument_group("output")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print committed text as it comes (default on a terminal, one prompt)",
    )
    group.add_argument("--json", action="store_true", help="one JSON object a prompt")
    group.add_argument(
        "--trace",
        action="store_true",
        help="with --json or --output: also when and by which rule each token was unmasked",
    )
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON lines here (a new file)"
    )
    group.add_argument("--quiet", action="store_true", help="nothing on stderr")
    return parser


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompt is not None:
        return list(args.prompt)
    if args.prompt_ids is not None:
        try:
            return [[int(part) for part in args.prompt_ids.split(",") if part.strip()]]
        except ValueError:
            raise ValueError(
                f"prompt_ids={args.prompt_ids!r} must be numbers with commas between them."
            ) from None
    if args.prompt_file is not None:
        return [_read_text(args.prompt_file)]
    if _stdin_has_text():
        text = _decode_utf8(sys.stdin.buffer.read(), "stdin").strip()
        if text:
            return [text]
    if args.model in DEMO_MODELS:
        from dllm_jax.training.problems import generate_problems

        (problem,) = islice(generate_problems("test", _SAMPLE_SEED), 1)
        return [problem.question]
    raise ValueError("no prompt: give --prompt, --prompt-file, --prompt-ids or stdin.")


def _stdin_has_text() -> bool:
    """Whether stdin is a pipe or a file; a terminal or /dev/null is not waited for."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"prompt_file={str(path)!r}: {error.strerror or error}.") from None
    return _decode_utf8(raw, f"prompt_file={str(path)!r}").rstrip("\n")


def _decode_utf8(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}.") from None


def _set_up_jax(args: argparse.Namespace) -> None:
    if args.device != "auto":
        platform = {"gpu": "cuda"}.get(args.device, args.device)
        jax.config.update("jax_platforms", platform)
    try:
        jax.devices()
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"device={args.device!r} is not there: {line}") from None
    if args.compile_cache == "none":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if args.compile_cache is not None or "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(args.compile_cache or Path(home) / "dllm_jax" / "compiled")
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


def _print_stats(console: Console, outputs: Sequence[Output]) -> None:
    table = Table(box=None, pad_edge=False)
    columns = ("#", "prompt", "new", "forwards", "tokens/forward", "ends")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for index, out in enumerate(outputs):
        stats = out.stats
        kinds = ", ".join(
            f"{count} {kind}"
            for kind, count in stats.forwards.items()
            if count and kind != "total"
        )
        table.add_row(
            str(index),
            str(stats.prompt_tokens),
            str(stats.generated_tokens),
            f"{stats.forwards['total']}: {kinds}",
            f"{stats.tokens_per_forward:.2f}",
            out.finish_reason,
        )
    console.print(table)
    first = outputs[0].stats
    tokens = sum(out.stats.generated_tokens for out in outputs)
    seconds = max(first.decode_seconds, 1e-9)
    console.print(
        f"compile {first.compile_seconds:.1f} s, decode {first.decode_seconds:.2f} s, "
        f"{tokens / seconds:.0f} tokens/s without compilation; cache {first.cache}",
        highlight=False,
    )


def _write_lines(path: Path, outputs: Sequence[Output]) -> None:
    """Writes JSON lines to a new file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for out in outputs:
                file.write(json.dumps(out.to_dict(), ensure_ascii=False) + "\n")
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"output={str(path)!r}: {error.strerror or error}.") from None


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.exists():
        raise ValueError(f"output={str(path)!r} exists: choose another file.")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"output={str(path)!r}: the directory cannot be written.")


def _stream(model: Model, request: Plan, prompt: Prompt, drafter: Model | None) -> Output:
    result = None
    for piece, out in stream_plan(model, request, prompt, drafter):
        print(piece, end="", flush=True)
        result = out
    print(flush=True)
    assert result is not None
    return result


def _make_plan(args: argparse.Namespace, settings: dict[str, Any]) -> Plan:
    if args.trace and not (args.json or args.output):
        raise ValueError("trace=True needs --json or --output.")
    shared = {"seed": args.seed, "preset": args.preset, "trace": args.trace, **settings}
    generation = {
        "max_new_tokens": args.max_new_tokens,
        "stop": args.stop,
        "steps": args.steps,
    }
    config = load_config(args.model)
    if args.infill:
        unset = (None, [])
        shared |= {k: value for k, value in generation.items() if value not in unset}
        if args.marker is not None:
            shared["marker"] = args.marker
        if args.draft_model is not None:
            raise ValueError(f"draft_model={args.draft_model!r} does not apply to infill.")
        return plan_infill(config, args.decoder, **shared)
    if args.marker is not None:
        raise ValueError(f"marker={args.marker!r} needs --infill.")
    request = plan(config, args.decoder, **generation, chat=args.chat, **shared)
    drafter = None if args.draft_model is None else load_config(args.draft_model)
    check_drafter(config, request, drafter)
    return request


def _run(args: argparse.Namespace) -> None:
    console = Console(stderr=True, quiet=args.quiet, soft_wrap=True)
    _check_output(args.output)
    prompts = _read_prompts(args)
    if args.stream and (len(prompts) > 1 or args.json or args.infill):
        raise ValueError("stream=True needs one prompt, no --json and no --infill.")
    settings = {
        name: value
        for name in _shared_settings()
        if (value := getattr(args, f"setting_{name}")) is not None
    }
    request = _make_plan(args, settings)
    _set_up_jax(args)
    device = jax.devices()[0]
    shown = " ".join(f"{name}={value}" for name, value in request.describe().items())
    console.print(shown, highlight=False, markup=False)
    started = time.perf_counter()
    model = load(args.model, dtype=args.dtype, kv_dtype=args.kv_dtype)
    drafter = None
    if args.draft_model is not None:
        drafter = load(args.draft_model, dtype=args.dtype, kv_dtype=args.kv_dtype)
    console.print(
        f"{args.model}: {model.dtype} on {len(jax.devices())} x {device.device_kind}, "
        f"loaded in {time.perf_counter() - started:.1f} s",
        highlight=False,
        markup=False,
    )
    streams = args.stream
    if streams is None and not args.infill:
        streams = sys.stdout.isatty() and len(prompts) == 1 and not args.json
    if streams:
        if isinstance(prompts[0], str):
            console.print(prompts[0], style="dim", highlight=False, markup=False)
        outputs = [_stream(model, request, prompts[0], drafter)]
    else:
        if isinstance(prompts[0], str) and args.prompt is None and not args.json:
            console.print(prompts[0], style="dim", highlight=False, markup=False)
        with console.status("compiling and decoding ..."):
            outputs = run_plan(model, request, prompts, draft_model=drafter)
        for out in outputs:
            print(json.dumps(out.to_dict(), ensure_ascii=False) if args.json else out.text)
    if args.output is not None:
        _write_lines(args.output, outputs)
    _print_stats(console, outputs)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # Names that people know from other projects have underscores; both work.
    argv = [
        arg.partition("=")[0].replace("_", "-") + "".join(arg.partition("=")[1:])
        if arg.startswith("--")
        else arg
        for arg in argv
    ]
    args = make_parser().parse_args(argv)
    try:
        _run(args)
    except ValueError as error:
        print(f"decode: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone: nothing more to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("decode: interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
