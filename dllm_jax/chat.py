"""`python -m dllm_jax.chat`: talk with a model, in a terminal or through a pipe.

Each line is a turn. What is committed of an answer is printed as it comes. Exit codes:
0 the session was ended, 2 for a mistake of the user (one line on stderr), 1 otherwise.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from dllm_jax.conversation import Conversation
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
from dllm_jax.generate import stream_plan
from dllm_jax.model import Model, load_config
from dllm_jax.request import Plan, plan
from dllm_jax.run import Output
from dllm_jax.terminal import uninterrupted

_COMMANDS = {
    "/reset": "forget the conversation (the system prompt stays)",
    "/help": "this list",
    "/quit": "end the session, as Ctrl-D does; Ctrl-C ends the current answer",
}


def make_parser(listed: str | None = ALL) -> argparse.ArgumentParser:
    """The command line; `listed` is the decoder whose settings `--help` lists."""
    parser = Parser(
        prog="python -m dllm_jax.chat",
        description="Talk with a diffusion language model. Each line of stdin is a turn; "
        "/help lists the commands.",
        allow_abbrev=False,
    )
    add_model_flags(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="told before everything else")
    group.add_argument("--quiet", action="store_true", help="only mistakes on stderr")
    add_generation_flags(parser, listed)
    return parser


def _make_plan(args: argparse.Namespace) -> Plan:
    if args.distributed:
        raise ValueError("distributed=True does not apply: one process reads what you say.")
    config = load_config(args.model)
    request = plan(
        config,
        args.decoder,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        steps=args.steps,
        seed=args.seed,
        preset=args.preset,
        **given_settings(args),
    )
    check_draft_flags(args, request, config)
    room = config.max_positions - request.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={request.max_new_tokens} leaves no room for a prompt in the "
            f"model's {config.max_positions} positions."
        )
    return request


def _is_typed() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _lines() -> Iterator[str]:
    """What the user says, line by line: typed behind a prompt, or from a pipe."""
    if not _is_typed():
        for number, raw in enumerate(sys.stdin.buffer, 1):
            try:
                yield raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"stdin is not UTF-8 at byte {error.start} of line {number}."
                ) from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends the session)", file=sys.stderr)
        except UnicodeDecodeError:
            print("that line is not UTF-8", file=sys.stderr)
        except EOFError:
            print()
            return


def _answer(
    model: Model, request: Plan, ids: list[int], drafter: Model | None, console: Console
) -> tuple[str, Output | None]:
    """Prints an answer as it comes; the output is None if Ctrl-C ended it."""
    said, out = [], None
    waiting = console.status("...")
    try:
        with uninterrupted():
            waiting.start()
        for piece, last in stream_plan(model, request, ids, drafter):
            with uninterrupted():
                waiting.stop()
            print(piece, end="", flush=True)
            said.append(piece)
            out = last
    except KeyboardInterrupt:
        out = None
    finally:
        with contextlib.suppress(KeyboardInterrupt), uninterrupted():
            waiting.stop()
    print(flush=True)
    return "".join(said), out


def _summary(out: Output, request: Plan) -> str:
    stats = out.stats
    seconds = max(stats.decode_seconds, 1e-9)
    plural = "" if stats.generated_tokens == 1 else "s"
    text = (
        f"{stats.generated_tokens} token{plural} in {stats.forwards['total']} forwards, "
        f"{stats.generated_tokens / seconds:.0f} tokens/s without compilation"
    )
    if out.finish_reason == "length":
        text += f"; cut at max_new_tokens={request.max_new_tokens}"
    return text


def _run(args: argparse.Namespace) -> None:
    console = Console(stderr=True, quiet=args.quiet, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    request = _make_plan(args)
    set_up_jax(args)
    model, drafter = load_models(args, request, console)
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise ValueError(
            f"model={args.model!r} has no chat template: use python -m dllm_jax.decode."
        )
    room = model.config.max_positions - request.max_new_tokens
    conversation = Conversation(model.tokenizer, room, args.system)
    say("/help lists the commands")
    for text in _lines():
        if not text:
            continue
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
            say("the conversation is forgotten")
            continue
        if text == "/help":
            for name, what in _COMMANDS.items():
                say(f"{name:8}{what}")
            continue
        try:
            if text.startswith("/") and not text.startswith("//"):
                raise ValueError(
                    f"{text.split()[0]} must be one of {', '.join(_COMMANDS)}; // begins a "
                    "text with /."
                )
            ids, dropped = conversation.ask(text.removeprefix("/"))
        except ValueError as error:
            if not _is_typed():  # a script would not see that a turn has no answer
                raise
            print(error, file=sys.stderr)
            continue
        if dropped:
            turns = "turn was" if dropped == 1 else "turns were"
            say(f"{dropped} old {turns} dropped: the conversation no longer fits")
        # Another seed for every turn, the same in every session.
        seed = (args.seed + conversation.asked) % 2**32
        turn = dataclasses.replace(request, seed=seed)
        said, out = _answer(model, turn, ids, drafter, console)
        try:
            if out is not None:
                say(_summary(out, request))
            elif said:
                say("interrupted")
            else:
                say("interrupted: nothing was said, nothing is kept")
        except KeyboardInterrupt:  # it came when the answer had just ended
            print(file=sys.stderr)
        if out is not None or said:
            conversation.answered(said)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser, args = parse(make_parser, argv)
    try:
        _run(args)
    except ValueError as error:
        print(f"chat: {as_typed(str(error), parser)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("chat: interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
