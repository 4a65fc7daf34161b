"""`python -m dllm_jax.doctor`: what this machine has, what is wrong with it, what fits.

Of itself it needs the standard library only: it must speak when jax is broken or too old.

Exit codes: 0 nothing is wrong, 1 something is, 2 for a mistake of the user or a device that
was asked for and is not there (one line).
"""

from __future__ import annotations

import argparse
import glob
import importlib
import json
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PYTHON_FLOOR = "3.11"
JAX_FLOOR = "0.10"
PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "orbax-checkpoint",
    "transformers",
    "numpy",
)
_OPTIONAL = ("libtpu",)
_GIB = 2**30
# Of one device as jax counts them, by device kind; for runtimes that do not report it.
_HBM = {
    "TPU v2": 8 * _GIB,
    "TPU v3": 16 * _GIB,
    "TPU v4": 32 * _GIB,
    "TPU v5 lite": 16 * _GIB,
    "TPU v5e": 16 * _GIB,
    "TPU v5": 95 * _GIB,
    "TPU v5p": 95 * _GIB,
    "TPU v6 lite": 32 * _GIB,
    "TPU v6e": 32 * _GIB,
    "TPU7x": 96 * _GIB,
}
# PCI ids of v3, v4, v5p, v5e, v6e, 7x; Google's network cards have the same vendor.
_TPU_DEVICES = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_CHIPS = {"v5e": 16 * _GIB, "v6e": 32 * _GIB}  # for comparison: those of Colab
_USABLE = 0.9  # of a device's memory: the rest is for programs and their temporaries


class Finding(NamedTuple):
    """Something that is wrong, and what to do."""

    level: str  # "problem" | "note"
    what: str
    fix: str


def examine(root: Path = Path("/")) -> dict[str, Any]:
    """Everything that is printed, JSON-ready; raises nothing.

    Args:
      root: where the machine's files are; another one in tests.
    """
    versions = {name: _installed(name) for name in PACKAGES}
    findings = _check_versions(versions)
    jax, devices = None, []
    try:
        jax = importlib.import_module("jax")
    except Exception as error:  # whatever a broken installation raises
        if versions["jax"]:
            fix = "install it again: pip install -U jax (on a TPU: jax[tpu])"
            findings.append(
                Finding("problem", f"jax cannot be imported: {_line(error)}", fix)
            )
    if jax is not None:
        findings += _check_loaded(jax, versions["jax"])
        try:
            devices = [_device(device) for device in jax.devices()]
        except Exception as error:
            findings.append(
                Finding(
                    "problem",
                    f"jax finds no device: {_line(error)}",
                    "see which process holds the accelerator, and JAX_PLATFORMS "
                    f"(it is {os.environ.get('JAX_PLATFORMS', 'not set')})",
                )
            )
    host = _host(root)
    chips = tpu_chips(root)
    findings += _check_devices(devices, chips, versions, root)
    findings += _check_library(findings)
    sizes = _sizes(devices, host)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "devices": devices,
        "tpu_chips": chips,
        "host": host,
        "environment": {
            name: os.environ[name]
            for name in ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
            if name in os.environ
        },
        "caches": _caches(),
        "models": sizes,
        "findings": [finding._asdict() for finding in findings],
    }


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except Exception:  # not there, or its files are damaged
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version: 0.10.2.dev3 is (0, 10, 2)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def satisfies(version: str, requirement: str) -> bool:
    """Whether a version meets a requirement such as `<=0.10.2,>=0.10.1` or `==0.0.42.*`."""
    have = _numbers(version)
    for sign, wanted in re.findall(r"(<=|>=|==|<|>|!=)\s*([\w.*]+)", requirement):
        bound = _numbers(wanted)
        width = len(bound) if wanted.endswith(".*") else max(len(have), len(bound))
        one, two = (tuple((*n, *[0] * width)[:width]) for n in (have, bound))
        holds = {
            "<=": one <= two,
            ">=": one >= two,
            "==": one == two,
            "!=": one != two,
            "<": one < two,
            ">": one > two,
        }
        if not holds[sign]:
            return False
    return True


def _jax_wants(name: str, extra: str | None = None) -> str | None:
    """What the installed jax requires of a package, as `<=0.10.2,>=0.10.1`."""
    try:
        required = metadata.requires("jax") or []
    except Exception:
        return None
    for text in required:
        requirement, _, marker = text.partition(";")
        found = re.match(rf"{name}\s*\(?([<>=!][^)]*)\)?\s*$", requirement.strip())
        of_extra = re.search(r"extra\s*==\s*[\"']([\w-]+)[\"']", marker)
        if found and (of_extra.group(1) if of_extra else None) == extra:
            return found.group(1)
    return None


def _check_versions(versions: dict[str, str | None]) -> list[Finding]:
    findings = []
    if not satisfies(platform.python_version(), f">={PYTHON_FLOOR}"):
        findings.append(
            Finding(
                "problem",
                f"Python {platform.python_version()} is too old: {PYTHON_FLOOR} or newer "
                "is needed",
                "make an environment with a newer Python",
            )
        )
    for name, version in versions.items():
        if version is None and name not in _OPTIONAL:
            fix = f"pip install {name}"
            findings.append(Finding("problem", f"{name} is not installed", fix))
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    upgrade = (
        "pip install -U jax flax optax orbax-checkpoint (on a TPU: 'jax[tpu]' for jax)"
    )
    if jax and not satisfies(jax, f">={JAX_FLOOR}"):
        findings.append(
            Finding(
                "problem",
                f"jax {jax} is too old: {JAX_FLOOR} or newer is needed",
                f"{upgrade}; in a notebook restart the session then",
            )
        )
    wanted = _jax_wants("jaxlib")
    if jax and jaxlib and wanted and not satisfies(jaxlib, wanted):
        what = f"jaxlib {jaxlib} does not belong to jax {jax}, which wants {wanted}"
        findings.append(Finding("problem", what, upgrade))
    return findings


def _check_loaded(jax: Any, installed: str | None) -> list[Finding]:
    """Whether the jax of this process is the one that is installed."""
    loaded = getattr(jax, "__version__", None)
    if not loaded or not installed or _numbers(loaded) == _numbers(installed):
        return []
    what = f"this process has jax {loaded} loaded, but jax {installed} is installed"
    return [Finding("problem", what, "restart the session")]


def tpu_chips(root: Path = Path("/")) -> int:
    """TPU chips that the machine has, whether jax sees them or not."""
    count = 0
    for vendor in glob.glob(str(root / "sys/bus/pci/devices/*/vendor")):
        try:
            is_google = Path(vendor).read_text(encoding="utf-8").strip() == "0x1ae0"
            device = Path(vendor).with_name("device").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        count += is_google and device in _TPU_DEVICES
    return count or len(glob.glob(str(root / "dev/accel[0-9]*")))


def _device(device: Any) -> dict[str, Any]:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # not every runtime has them
        stats = {}
    kind = str(device.device_kind)
    reported = stats.get("bytes_limit")
    return {
        "platform": device.platform,
        "kind": kind,
        "memory_bytes": reported or _HBM.get(kind),
        "memory_is_reported": reported is not None,
        "in_use_bytes": stats.get("bytes_in_use"),
    }


def _check_devices(
    devices: list[dict[str, Any]],
    chips: int,
    versions: dict[str, str | None],
    root: Path,
) -> list[Finding]:
    findings = []
    platforms = {device["platform"] for device in devices}
    chosen = os.environ.get("JAX_PLATFORMS")
    if chips and devices and platforms == {"cpu"}:
        if chosen and "tpu" not in chosen.split(","):
            fix = f"unset JAX_PLATFORMS (it is {chosen})"
        elif versions["libtpu"] is None:
            fix = "pip install -U 'jax[tpu]', and restart a notebook's session"
        else:
            fix = "see that no other process holds the TPU, and what jax logs at the start"
        what = f"this machine has {chips} TPU chips, but jax sees only a CPU"
        findings.append(Finding("problem", what, fix))
    if devices and platforms == {"cpu"} and not chosen and (root / "dev/nvidia0").exists():
        what = "this machine has an NVIDIA GPU, but jax sees only a CPU"
        findings.append(Finding("note", what, "pip install -U 'jax[cuda13]'"))
    libtpu, wanted = versions["libtpu"], _jax_wants("libtpu", "tpu")
    if libtpu and wanted and not satisfies(libtpu, wanted):
        what = f"libtpu {libtpu} is not the one that jax {versions['jax']} wants: {wanted}"
        # Without a TPU it serves ahead-of-time compilation only.
        level = "problem" if chips or "tpu" in platforms else "note"
        fix = "pip install -U 'jax[tpu]'"
        findings.append(Finding(level, what, fix + ("" if chips else " (where a TPU is)")))
    return findings


def _check_library(findings: list[Finding]) -> list[Finding]:
    """Whether the library itself can be imported, if nothing else explains why not."""
    try:
        importlib.import_module("dllm_jax.decode")
    except Exception as error:
        if not any(finding.level == "problem" for finding in findings):
            what = f"dllm_jax cannot be imported: {_line(error)}"
            fix = "pip install -U jax flax optax orbax-checkpoint transformers"
            return [Finding("problem", what, fix)]
    return []


def _host(root: Path) -> dict[str, Any]:
    memory: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            memory[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    total, free = memory.get("MemTotal"), memory.get("MemAvailable")
    try:  # a container may have less
        limit = int((root / "sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int((root / "sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        if total is not None and limit < total:
            total, free = limit, min(free or limit, limit - used)
    except (OSError, ValueError):
        pass
    return {
        "cores": os.cpu_count(),
        "ram_bytes": total,
        "ram_free_bytes": free,
        "disk_free_bytes": _disk_free("."),
    }


def _disk_free(path: Any) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:  # such as a directory that was deleted under us
        return None


def _caches() -> dict[str, Any]:
    from dllm_jax.caches import compile_cache, hub_cache

    caches = {}
    for name, path in (("compiled programs", compile_cache()), ("downloads", hub_cache())):
        there = next(p for p in (path, *path.resolve().parents) if p.exists())
        caches[name] = {
            "path": str(path),
            "exists": path.exists(),
            "writable": os.access(there, os.W_OK),
            "disk_free_bytes": _disk_free(there),
        }
    return caches


def _sizes(devices: list[dict[str, Any]], host: dict[str, Any]) -> list[dict[str, Any]]:
    """Which published models fit; empty while the library cannot be imported."""
    try:
        from dllm_jax.model_sizes import model_sizes
    except Exception:
        return []
    memory = devices[0]["memory_bytes"] if devices else None
    if devices and devices[0]["platform"] == "cpu":
        memory, devices = host["ram_free_bytes"], devices[:1]
    rows = []
    for size in model_sizes():
        weights = {"bfloat16": size.bfloat16, "int8": size.int8}

        def fit(memory, weights=weights, cache=size.cache):
            return [k for k, n in weights.items() if n + cache <= _USABLE * memory]

        here = fit(memory) if memory else None
        divided = fit(memory * len(devices)) if memory else []
        rows.append(
            {
                "name": size.name,
                "params": size.params,
                "bfloat16_bytes": size.bfloat16,
                "int8_bytes": size.int8,
                "cache_bytes": size.cache,
                "fits_here": here,
                "fits_all_devices": divided if len(devices) > 1 else here,
                **{f"fits_{chip}": fit(size_of) for chip, size_of in _CHIPS.items()},
            }
        )
    return rows


def _gb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"


def _text(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in report["versions"].items())
    host, devices = report["host"], report["devices"]
    lines = [
        f"python    {report['python']} on {report['platform']}",
        f"versions  {versions}",
    ]
    kinds: dict[tuple, int] = {}
    for device in devices:
        source = "" if device["memory_is_reported"] else " (by its kind)"
        memory = device["memory_bytes"]
        shown = f", {_gb(memory)} each{source}" if memory else ""
        key = (device["platform"], device["kind"], shown)
        kinds[key] = kinds.get(key, 0) + 1
    shown = [f"{n} x {kind} ({name}){memory}" for (name, kind, memory), n in kinds.items()]
    lines.append(f"devices   {'; '.join(shown) or 'none'}")
    lines.append(
        f"host      {host['cores']} cores, RAM {_gb(host['ram_bytes'])}, free "
        f"{_gb(host['ram_free_bytes'])}; disk free {_gb(host['disk_free_bytes'])}"
    )
    for name, value in report["environment"].items():
        lines.append(f"set       {name}={value}")
    for name, cache in report["caches"].items():
        state = "" if cache["writable"] else ", cannot be written"
        free = _gb(cache["disk_free_bytes"])
        lines.append(f"cache     {name}: {cache['path']} (free {free}{state})")
    lines += ["", *_table(report["models"]), ""]
    for finding in report["findings"]:
        lines.append(f"{finding['level'].upper()}: {finding['what']}.")
        lines.append(f"    {finding['fix']}.")
    if not any(f["level"] == "problem" for f in report["findings"]):
        lines.append("Nothing is wrong.")
    return "\n".join(lines)


def _table(models: list[dict[str, Any]]) -> list[str]:
    if not models:
        return ["Which models fit is not known while dllm_jax cannot be imported."]
    first = ("model", "params", "bf16", "int8", "fits here", *_CHIPS)
    rows = [first]
    for model in models:

        def fits(name, model=model):
            if model[name] is None:
                return "unknown"
            return {"bfloat16": "bf16", "int8": "int8", None: "no"}[
                next(iter(model[name]), None)
            ]

        here = fits("fits_here")
        if here == "no" and model["fits_all_devices"]:
            here = f"{fits('fits_all_devices')}, divided"
        rows.append(
            (
                model["name"],
                f"{model['params'] / 1e9:.2f}B",
                _gb(model["bfloat16_bytes"]),
                _gb(model["int8_bytes"]),
                here,
                *(fits(f"fits_{chip}") for chip in _CHIPS),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(first))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()  # noqa: B905
        for row in rows
    ]
    return [
        *lines,
        "Estimates: weights and the cache of one prompt of 4096 tokens in 90 % of the",
        "memory of one device (on a CPU: of the free RAM); the widest type that fits.",
        "int8 is approximate: --quant int8.",
    ]


def _missing_device(wanted: str, report: dict[str, Any]) -> str | None:
    """Why a device is not there, in one line, or None if it is."""
    names = {"gpu": ("gpu", "cuda", "rocm")}.get(wanted, (wanted,))
    if any(device["platform"] in names for device in report["devices"]):
        return None
    seen = sorted({device["platform"] for device in report["devices"]})
    why = [
        f"{f['what']}: {f['fix']}" for f in report["findings"] if f["level"] == "problem"
    ]
    if not why and "JAX_PLATFORMS" in report["environment"]:
        why = [f"JAX_PLATFORMS is {report['environment']['JAX_PLATFORMS']}"]
    because = f" ({why[-1]})" if why else ""
    return (
        f"device={wanted!r} is not there: jax sees {' and '.join(seen) or 'none'}{because}"
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"doctor: {' '.join(message.splitlines())} (see --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(
        prog="python -m dllm_jax.doctor",
        description="Say what this machine has, what is wrong with it, which models fit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "gpu", "tpu"),
        help="exit with 2 unless jax sees one of these",
    )
    parser.add_argument("--json", action="store_true", help="the same as a JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = make_parser().parse_args(argv)
    report = examine()
    if args.device != "auto":
        missing = _missing_device(args.device, report)
        if missing:
            print(f"doctor: {missing}", file=sys.stderr)
            return 2
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return int(any(f["level"] == "problem" for f in report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
