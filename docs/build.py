"""Writes the tables of settings and presets into the pages of this folder.

    python docs/build.py            # rewrites the pages
    python docs/build.py --check    # exit code 1 and their names if one is out of date

A table stands between two comments, `<!-- settings: block -->` or `<!-- presets: sdar -->`
and `<!-- end -->`. What is there comes from the code that the command line comes from.
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from dllm_jax.decoding import DECODERS
from dllm_jax.models import FAMILIES
from dllm_jax.settings import setting_fields

PAGES = Path(__file__).parent
_TABLE = re.compile(r"<!-- (settings|presets): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: Any) -> str:
    return f"`{text}`"


def _flags(field: dataclasses.Field) -> str:
    names = [field.name, *field.metadata["aliases"]]
    prefix = "--[no-]" if field.metadata["kind"] is bool else "--"
    return ", ".join(_code(prefix + name.replace("_", "-")) for name in names)


def settings_table(name: str) -> str:
    """The settings of a decoder: name, flag and aliases, default, meaning."""
    rows = []
    for field in setting_fields(DECODERS[name]).values():
        meaning, choices = field.metadata["help"], field.metadata["choices"]
        if choices:
            meaning += f"; one of {', '.join(map(_code, choices))}"
        default = "" if field.default is None else _code(field.default)
        rows.append((_code(field.name), _flags(field), default, meaning))
    return _table(("setting", "flag", "default", "meaning"), rows)


def presets_table(name: str) -> str:
    """The presets of a family: name, decoder, what it sets."""
    rows = []
    for preset, values in FAMILIES[name].presets.items():
        settings = dict(values)
        decoder = settings.pop("decoder")
        given = ", ".join(f"`{key}={value!r}`" for key, value in settings.items())
        rows.append((_code(preset), _code(decoder), given))
    return _table(("preset", "decoder", "sets"), rows)


def build(text: str) -> str:
    """A page with its tables as they should be; raises KeyError for unknown names."""

    def table(found: re.Match) -> str:
        kind, name = found.groups()
        make = settings_table if kind == "settings" else presets_table
        return f"<!-- {kind}: {name} -->\n\n{make(name)}\n\n<!-- end -->"

    return _TABLE.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the tables of the pages.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    old = []
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if text != build(text):
            old.append(path.name)
            if not args.check:
                path.write_text(build(text), encoding="utf-8")
    if old:
        print(f"{'out of date' if args.check else 'written'}: {', '.join(old)}")
    return 1 if old and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
