"""`python -m convert SRC DST`: a Hugging Face checkpoint becomes an Orbax one.

Exit codes: 0 done, 2 for a mistake of the user (bad source, bad destination), 1 otherwise.
"""

import argparse
import contextlib
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from dllm_jax.checkpoint import (
    DTYPES,
    SIDECAR,
    export_checkpoint,
    read_sidecar,
    verify_checkpoint,
    write_checkpoint,
)
from dllm_jax.flags import Parser
from dllm_jax.hf import CheckpointError, HFCheckpoint, count_bytes
from dllm_jax.models import FAMILIES
from dllm_jax.params import count_params
from dllm_jax.terminal import shown

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def _fetch(source: str, revision: str | None) -> tuple[Path, str | None]:
    """A local directory for a directory or hub id, and its commit if known."""
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} is for hub ids; {source} is a directory."
            )
        return path, _commit_of(path)
    if path.exists() or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} is neither a directory nor a hub id (org/name).")
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(source, revision=revision, allow_patterns=list(_WANTED))
        )
    except Exception as error:  # network, login and naming errors of many types
        line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(
            f"{source} is no directory, and as a hub id it could not be fetched: {line}"
        ) from None
    return path, _commit_of(path)


def _commit_of(path: Path) -> str | None:
    """The commit in the path of a hub cache, .../snapshots/COMMIT."""
    resolved = path.resolve()
    is_snapshot = resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name)
    return resolved.name if is_snapshot else None


def _dtype_name(source: HFCheckpoint) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    if source.dtype not in names:
        raise CheckpointError(
            f"the weights are {source.dtype}: choose --dtype {', '.join(DTYPES)}."
        )
    return names[source.dtype]


def _convert(args: argparse.Namespace, console: Console) -> None:
    started = time.perf_counter()
    directory, revision = _fetch(args.source, args.revision)
    if (directory / SIDECAR).exists():
        raise CheckpointError(f"{directory} is converted already.")
    name = None if Path(args.source).is_dir() else args.source
    source = HFCheckpoint(directory, args.family, args.mask_id, name)
    dtype = args.dtype or _dtype_name(source)
    size = count_bytes(source.config, DTYPES[dtype], args.quant)
    with _progress(console, "converting", size) as advance:
        write_checkpoint(
            *(source, args.destination, dtype, args.source, revision, advance, args.quant)
        )
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    seconds = time.perf_counter() - started
    print(
        f"{args.destination}: {source.family.name}, {count_params(source.config):,} "
        f"parameters, {size:,} bytes, {source.dtypes} -> {dtype}"
        f"{'' if args.quant == 'none' else ' and ' + args.quant}, verified; "
        f"peak RAM {peak / 1e9:.2f} GB, {seconds:.1f} s ({size / seconds / 1e6:.0f} MB/s)"
    )


@contextlib.contextmanager
def _progress(
    console: Console, title: str, total: int
) -> Iterator[Callable[[str, int], None]]:
    """A bar over bytes on stderr; the context gives the function that advances it."""
    bar = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=total)
    with shown(bar):
        yield lambda leaf, size: bar.update(task, advance=size, description=f"{leaf:20}")


def _verify(args: argparse.Namespace, console: Console) -> None:
    sidecar = verify_checkpoint(args.directory)
    print(
        f"{args.directory}: {sidecar.family}, {count_params(sidecar.config):,} parameters, "
        f"{sidecar.dtype}{'' if sidecar.quant == 'none' else ' and ' + sidecar.quant}, "
        "every checksum agrees"
    )


def _export(args: argparse.Namespace, console: Console) -> None:
    sidecar = read_sidecar(args.directory)
    size = count_bytes(sidecar.config, DTYPES[sidecar.dtype])
    with _progress(console, "exporting", size) as advance:
        export_checkpoint(args.directory, args.destination, advance)
    print(f"{args.destination}: {sidecar.family} in {sidecar.dtype}, {size:,} bytes")


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """The command line of "verify", "export", or of a conversion."""
    parser = Parser(
        prog=f"python -m convert {command}".strip(),
        description=_ABOUT[command],
        allow_abbrev=False,
    )
    if command:
        parser.add_argument("directory", type=Path, help="a converted checkpoint")
    else:
        parser.add_argument("source", help="directory or hub id (org/name)")
    if command != "verify":
        parser.add_argument("destination", type=Path, help="new directory")
    if command:
        return parser
    parser.add_argument(
        "--quant",
        choices=("none", "int8"),
        default="none",
        help="int8: weights in 8 bits, a scale an output channel (approximate)",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="override config.json")
    parser.add_argument("--mask-id", type=int, help="override the mask id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    return parser


_ABOUT = {
    "": "Convert a Hugging Face checkpoint to Orbax, strictly and atomically. "
    "`python -m convert verify DIR` checks a converted one, `python -m convert export DIR "
    "DST` writes it in Hugging Face layout.",
    "verify": "Read a converted checkpoint back and compare every checksum.",
    "export": "Write a converted checkpoint as its family publishes it.",
}
_RUN = {"": _convert, "verify": _verify, "export": _export}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # A directory of that name is a source.
    command = argv[0] if argv and argv[0] in _RUN and not Path(argv[0]).is_dir() else ""
    args = make_parser(command).parse_args(argv[bool(command) :])
    # A job that is told to end cleans up as an interrupted one does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _RUN[command](args, Console(stderr=True))
    except CheckpointError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert: interrupted, nothing was written", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
