"""What every benchmark prints and writes the same way."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax


def parse_args(description: str, **extra: dict[str, Any]) -> argparse.Namespace:
    """`--json FILE` and `--quick`, and what a benchmark adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--quick", action="store_true", help="a small run, for checking")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """On what the numbers were measured."""
    return {
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table."""
    keys = list(rows[0])
    lines = [" | ".join(keys), " | ".join("---" for _ in keys)]
    lines += [" | ".join(_cell(row[key]) for key in keys) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def finish(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints the table and where it was measured; writes the JSON file if asked."""
    where = machine()
    print(markdown_table(rows))
    print("\nmeasured on " + ", ".join(f"{k} {v}" for k, v in where.items()))
    if args.json is not None:
        text = json.dumps({"machine": where, "rows": rows}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {args.json}", file=sys.stderr)
