"""`python -m dllm_jax.decode`: decode prompts from the command line.

Exit codes: 0 done, 2 for a mistake of the user (one line on stderr), 1 otherwise.
"""

import argparse
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dllm_jax import plots, watch
from dllm_jax.batch import Line, decode_file, read_lines
from dllm_jax.flags import (
    ALL,
    Parser,
    add_generation_flags,
    add_model_flags,
    as_typed,
    check_draft_flags,
    given_settings,
    load_models,
    parse,
    set_up_jax,
)
from dllm_jax.generate import run_plan, stream_plan, watch_plan
from dllm_jax.model import DEMO_MODELS, Model, load_config
from dllm_jax.prompts import MARKER, Prompt
from dllm_jax.request import LOGPROBS, Plan, plan, plan_infill
from dllm_jax.run import Output
from dllm_jax.terminal import shown
from dllm_jax.trace_page import make_cells, trace_page

_SAMPLE_SEED = 7


def make_parser(listed: str | None = ALL) -> argparse.ArgumentParser:
    """The command line; decoder flags come from the decoders' settings.

    Args:
      listed: the decoder whose settings `--help` lists; `ALL`, or None for none.
    """
    parser = Parser(
        prog="python -m dllm_jax.decode",
        description="Decode prompts with a diffusion language model.",
        allow_abbrev=False,
    )
    add_model_flags(parser)
    _add_prompt_flags(parser)
    _add_output_flags(parser)
    add_generation_flags(parser, listed)
    return parser


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt (default: stdin, else a sample problem)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    source.add_argument("--prompt-ids", metavar="1,2,3", help="token ids")
    source.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help='JSON lines, each a text, ids, or {"prompt": .., "id": ..}; needs --output',
    )
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


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
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
        "--logprobs",
        choices=LOGPROBS,
        help="with --json or --output: also the log-probability of each token, when it was "
        "unmasked or re-scored in the finished text",
    )
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON lines here (a new file)"
    )
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="INT",
        help="with --input: rows decoded at once (default 8)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="with --input: go on from what the output file has",
    )
    group.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=0.2,
        metavar="SECONDS",
        help="see the canvas fill, step by step, each shown so long at least (default "
        "0.2); slow, the same text",
    )
    group.add_argument(
        "--trace-out",
        type=Path,
        metavar="FILE",
        help="write a web page that plays the denoising (a new file); with --trace it "
        "shows which rule unmasked each token",
    )
    group.add_argument(
        "--trace-png",
        type=Path,
        metavar="FILE",
        help="draw which forward unmasked each token (a new file; needs matplotlib)",
    )
    group.add_argument("--quiet", action="store_true", help="only mistakes on stderr")


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


def _write_new(path: Path, name: str, write: Callable[[Path], None]) -> None:
    """Writes a new file, whole or not at all; `name` is the setting that asked for it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        partial.rename(path)
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r}: {error.strerror or error}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _write_outputs(
    args: argparse.Namespace,
    model: Model,
    request: Plan,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
) -> None:
    """The files that were asked for."""

    def lines(path):
        text = [json.dumps(out.to_dict(), ensure_ascii=False) + "\n" for out in outputs]
        path.write_text("".join(text), encoding="utf-8")

    def page(path):
        shown = ["" if request.marker else _prompt_text(model, p) for p in prompts]
        cells = [make_cells(out, model.tokenizer) for out in outputs]
        traces = list(zip(shown, cells, strict=True))
        settings = [f"{name}={value}" for name, value in request.describe().items()]
        path.write_text(trace_page(traces, settings), encoding="utf-8")

    def picture(path):
        figure = plots.order_maps(outputs, model.tokenizer)
        figure.savefig(path, format="png", dpi=110)

    for name, write in (("output", lines), ("trace_out", page), ("trace_png", picture)):
        if getattr(args, name) is not None:
            _write_new(getattr(args, name), name, write)


def _prompt_text(model: Model, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return (
        " ".join(map(str, prompt))
        if model.tokenizer is None
        else (model.tokenizer.decode(list(prompt)))
    )


def _check_files(args: argparse.Namespace) -> None:
    """Raises ValueError unless every file that is to be written can be."""
    names: dict[Path, str] = {}
    for name in ("output", "trace_out", "trace_png"):
        path = getattr(args, name)
        if path is None:
            continue
        try:
            exists = path.exists()
        except OSError as error:  # a name that is too long
            raise ValueError(f"{name}={str(path)!r}: {error.strerror}.") from None
        if exists and not (name == "output" and args.resume):
            other = "choose another file"
            if args.input is not None:
                other += ", or --resume to go on with what it has"
            raise ValueError(f"{name}={str(path)!r} exists: {other}.")
        if not path.resolve().parent.is_dir():
            raise ValueError(f"{name}={str(path)!r}: there is no such directory.")
        if not os.access(path.resolve().parent, os.W_OK):
            raise ValueError(f"{name}={str(path)!r}: the directory cannot be written.")
        if path.resolve() in names:
            other = names[path.resolve()]
            raise ValueError(f"{name}={str(path)!r} is the file of {other} too.")
        names[path.resolve()] = name
    if args.trace_png is not None:
        try:
            plots.check_matplotlib()
        except ValueError as error:
            raise ValueError(f"trace_png={str(args.trace_png)!r}: {error}") from None


def _check_watch(args: argparse.Namespace, num_prompts: int, console: Console) -> None:
    if args.watch is None:
        return
    if not 0.0 <= args.watch < float("inf"):
        raise ValueError(f"watch={args.watch} must be seconds, at least 0.")
    if num_prompts > 1 or args.stream or args.quiet:
        raise ValueError(
            f"watch={args.watch} needs one prompt, and neither --stream nor --quiet."
        )
    if not console.is_terminal or console.is_dumb_terminal:
        raise ValueError(f"watch={args.watch} needs a terminal: stderr is none.")


def _clock(console: Console) -> Progress:
    """Shows on a terminal how long it takes: the first run of a length compiles."""
    columns = SpinnerColumn(), "compiling and decoding ...", TimeElapsedColumn()
    off = console.quiet or not console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=off)
    bar.add_task("")
    return bar


def _stream(model: Model, request: Plan, prompt: Prompt, drafter: Model | None) -> Output:
    result = None
    try:
        for piece, out in stream_plan(model, request, prompt, drafter):
            print(piece, end="", flush=True)
            result = out
    finally:
        print(flush=True)  # also behind what an interruption leaves
    assert result is not None
    return result


def _watch(
    model: Model,
    request: Plan,
    prompt: Prompt,
    drafter: Model | None,
    console: Console,
    seconds: float,
) -> Output:
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text to watch.")
    frames = watch_plan(model, request, prompt, drafter)
    return watch.show(frames, model.tokenizer, model.config.mask_id, console, seconds)


def _make_plan(args: argparse.Namespace, settings: dict[str, Any]) -> Plan:
    if args.trace and not (args.json or args.output or args.trace_out):
        raise ValueError("trace=True needs --json or --output, or --trace-out.")
    if args.logprobs is not None and not (args.json or args.output):
        raise ValueError(f"logprobs={args.logprobs!r} needs --json or --output.")
    shared = {"seed": args.seed, "preset": args.preset, **settings}
    shared |= {"trace": args.trace, "logprobs": args.logprobs}
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
    check_draft_flags(args, request, config)
    return request


def _check_batch(args: argparse.Namespace) -> None:
    """Raises ValueError for options that need each other."""
    if args.input is None:
        for name in ("batch_size", "resume"):
            if getattr(args, name):
                raise ValueError(f"{name}={getattr(args, name)} needs --input.")
        return
    if args.output is None:
        raise ValueError(f"input={str(args.input)!r} needs --output.")
    if args.stream or args.json:
        raise ValueError("--input writes to --output: it takes no --stream and no --json.")
    for name in ("watch", "trace_out", "trace_png"):
        if (value := getattr(args, name)) is not None:
            shown = repr(value if name == "watch" else str(value))
            raise ValueError(f"{name}={shown} needs prompts, not --input.")
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"batch_size={args.batch_size} must be at least 1.")


def _decode_file(
    args: argparse.Namespace,
    console: Console,
    request: Plan,
    lines: Sequence[Line],
    model: Model,
    drafter: Model | None,
) -> int:
    """Decodes the lines of --input into --output; returns the exit code."""
    columns = (BarColumn(), MofNCompleteColumn(), "{task.fields[speed]}")
    columns += (TimeElapsedColumn(), TimeRemainingColumn())
    shows = console.is_terminal and not args.quiet and jax.process_index() == 0
    started, tokens, forwards = time.perf_counter(), 0, 0
    bar = Progress(*columns, console=console, disable=not shows)
    with shown(bar):
        task = bar.add_task("decoding", total=len(lines), speed="")

        def finished(number: int, output: Output | None) -> None:
            nonlocal tokens, forwards
            if output is not None:
                tokens += output.stats.generated_tokens
                forwards += output.stats.forwards["total"]
            speed = tokens / (time.perf_counter() - started)
            bar.update(task, advance=1, speed=f"{speed:.0f} tokens/s")

        bad = decode_file(
            model,
            request,
            lines,
            args.output,
            batch_size=args.batch_size or 8,
            resume=args.resume,
            draft_model=drafter,
            finished=finished,
        )
    seconds = time.perf_counter() - started
    if jax.process_index() == 0:
        for number, error in bad:
            print(f"decode: {args.input}, line {number}: {error}", file=sys.stderr)
        console.print(
            f"{args.output}: {len(lines) - len(bad)} prompts, {tokens} new tokens, "
            f"{tokens / max(forwards, 1):.2f} tokens/forward, {seconds:.1f} s with "
            "compilation",
            highlight=False,
        )
    return 1 if bad else 0


def _run(args: argparse.Namespace) -> int:
    console = Console(stderr=True, quiet=args.quiet, soft_wrap=True)
    _check_batch(args)
    _check_files(args)
    prompts = [] if args.input is not None else _read_prompts(args)
    _check_watch(args, len(prompts), console)
    if args.stream and (len(prompts) > 1 or args.json or args.infill):
        raise ValueError("stream=True needs one prompt, no --json and no --infill.")
    request = _make_plan(args, given_settings(args))
    lines = []
    if args.input is not None:  # before weights are loaded
        lines = read_lines(args.input, request, args.model)
    set_up_jax(args)
    model, drafter = load_models(args, request, console)
    if args.input is not None:
        return _decode_file(args, console, request, lines, model, drafter)
    streams = args.stream
    if streams is None and not args.infill:
        streams = sys.stdout.isatty() and len(prompts) == 1 and not args.json
    if args.watch is not None:
        streams = False
    if streams:
        if isinstance(prompts[0], str):
            console.print(prompts[0], style="dim", highlight=False, markup=False)
        outputs = [_stream(model, request, prompts[0], drafter)]
    else:
        if isinstance(prompts[0], str) and args.prompt is None and not args.json:
            console.print(prompts[0], style="dim", highlight=False, markup=False)
        if args.watch is not None:
            outputs = [_watch(model, request, prompts[0], drafter, console, args.watch)]
        else:
            with shown(_clock(console)):
                outputs = run_plan(model, request, prompts, draft_model=drafter)
        for out in outputs if jax.process_index() == 0 else []:
            text = out.text
            if args.json:
                text = json.dumps(out.to_dict(), ensure_ascii=False)
            elif model.tokenizer is None:
                text = ",".join(map(str, out.tokens))  # as --prompt-ids takes them
            print(text)
    if jax.process_index() == 0:
        _write_outputs(args, model, request, prompts, outputs)
    _print_stats(console, outputs)
    return 0


def _leave(args: argparse.Namespace, error: Exception) -> None:
    """Ends a run that has lost a process; the others can no longer be waited for."""
    line = str(error).strip().splitlines()[0][:200]
    kept = "" if args.input is None else f"; {args.output} has what was finished, "
    kept += "--resume goes on" * bool(kept)
    print(f"decode: the processes have lost each other ({line}){kept}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser, args = parse(make_parser, argv)
    try:
        return _run(args)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        # What a runtime reports begins with a status, and may be of either type.
        of_runtime = re.match(r"[A-Z]+(_[A-Z]+)*: ", str(error))
        if args.distributed and of_runtime:
            _leave(args, error)
        if not isinstance(error, ValueError):
            raise
        print(f"decode: {as_typed(str(error), parser)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone: nothing more to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        kept = ""
        if args.input is not None and args.output is not None and args.output.exists():
            kept = f"; {args.output} has what was finished, --resume goes on"
        print(f"decode: interrupted{kept}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
