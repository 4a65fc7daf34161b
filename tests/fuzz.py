"""Bad input of every kind, made of bytes: mistakes must be told in a line, exit code 2.

Each target turns bytes into an input (a checkpoint with something spoilt, a file of
prompts, token ids, a command line) and fails unless the program either takes it or names
what is wrong: no traceback, nothing half-written. Where the bytes come from is left open:
`test_fuzz.py` draws them by hypothesis, and this file's own command line by atheris, which
looks for bytes that reach new code (`pip install atheris`, Python 3.11 to 3.13):

    python tests/fuzz.py prompts -atheris_runs=10000
"""

import contextlib
import functools
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    import atheris

    with atheris.instrument_imports(include=["dllm_jax", "convert"]):
        import convert.__main__
        import dllm_jax.chat
        import dllm_jax.decode
        import dllm_jax.doctor

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

import convert.__main__
import dllm_jax.chat
import dllm_jax.decode
import dllm_jax.doctor
from dllm_jax import batch, checkpoint, model, prompts, request
from dllm_jax.generate import encode_row
from dllm_jax.hf import CheckpointError, HFCheckpoint
from dllm_jax.params import leaf_paths
from dllm_jax.tokenizer import Tokenizer

_GOLDEN = Path(__file__).parent / "golden"
_ODD_NUMBERS = (0, 1, -1, 2, 7, 8, 63, 64, 2**31, 2**63, 2**64, 10**30, -(2**31))
_ODD_NUMBERS += (10**309, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"))
_ODD_TEXTS = ("", " ", "\0", "\n", "\ud800", "\U0001f600", "ﾉ", "²", "auto", "none", "..")
_ODD_TEXTS += ("/", "a" * 300, "%s{0}", "[MASK]", "<|endoftext|>", "1e9", "nan", "-inf")


class Choices:
    """Reads bytes as choices; behind their end all are the first."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """A whole number in [0, below); below at most 2**16."""
        part = self._data[self._at : self._at + (1 if below <= 256 else 2)]
        self._at += len(part)
        return int.from_bytes(part, "little") % below

    def pick(self, options: Sequence[Any]) -> Any:
        """One of several; raises LookupError if there is none."""
        if not options:
            raise LookupError
        return options[self.number(len(options))]

    def raw(self, most: int = 64) -> bytes:
        """Bytes as they are."""
        size = self.number(most + 1)
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        return part

    def text(self) -> str:
        """An odd text, or one of the bytes."""
        if self.number(2):
            return self.pick(_ODD_TEXTS)
        return self.raw().decode("utf-8", self.pick(("replace", "surrogateescape")))

    def value(self, depth: int = 2) -> Any:
        """A JSON value."""
        kind = self.number(8 if depth else 6)
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.number(4))]
        if kind == 7:
            return {self.text(): self.value(depth - 1) for _ in range(self.number(4))}
        odd = (None, True, False, self.pick(_ODD_NUMBERS), self.number(2**16), self.text())
        return odd[kind]


class Fault(AssertionError):
    """The program did not take an input as it should."""


class _Enough(Exception):
    """The input was taken: what follows needs weights."""


class Told(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


def _run(main: Callable[[list[str]], int], argv: list[str]) -> Told | None:
    """Runs a command in this process; None if it got as far as loading a model."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    except _Enough:
        return None
    except SystemExit as end:
        code = end.code or 0
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return Told(code, *texts)


def _check_told(told: Told | None, argv: list[str]) -> None:
    """Fails unless a mistake was told in one line and with exit code 2."""
    if told is None or told.code == 0:
        return
    lines = told.err.strip().splitlines()
    if told.code != 2 or not lines or "Traceback" in told.err or told.out.strip():
        raise Fault(f"{argv!r}: {told}")
    if len(lines) > 1:
        raise Fault(f"{argv!r} says more than a line: {told.err}")


def _tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def _instead(*replaced: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


# --- checkpoints ----------------------------------------------------------------------

_FAMILIES = ("sdar", "llada", "dream", "llada2", "sdar_moe", "fast_dllm_v2")
_INDEX = "model.safetensors.index.json"


@functools.cache
def published(family: str) -> dict[str, bytes]:
    """The files of a tiny checkpoint in two shards, with a tokenizer."""
    tensors = load_file(_GOLDEN / family / "model.safetensors")
    names = sorted(tensors)
    files, weight_map = {}, {}
    with _scratch() as directory:
        for number in (1, 2):
            file = f"model-{number:05}-of-00002.safetensors"
            own = {name: tensors[name] for name in names[number - 1 :: 2]}
            save_file(own, directory / file)
            files[file] = (directory / file).read_bytes()
            weight_map |= dict.fromkeys(own, file)
    files[_INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files["config.json"] = (_GOLDEN / family / "config.json").read_bytes()
    files["generation_config.json"] = b'{"eos_token_id": [249, 250], "pad_token_id": 251}'
    special = {"eos_token": "<eos>", "pad_token": {"content": "<pad>"}}
    files["tokenizer_config.json"] = json.dumps(special).encode()
    vocabulary = {f"w{i}": i for i in range(249)} | {"<eos>": 249, "<pad>": 251}
    added = [{"id": 249, "content": "<eos>", "special": True, "single_word": False}]
    added[0] |= {"lstrip": False, "rstrip": False, "normalized": False}
    whole = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    files["tokenizer.json"] = json.dumps(whole).encode()
    return files


def _spoil_json(choices: Choices, raw: bytes) -> bytes:
    """Another value, or none, somewhere in a JSON text; or something new in it."""
    value = json.loads(raw)
    place = value
    for _ in range(choices.number(3)):
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        inner = [k for k in keys if isinstance(place[k], dict | list) and place[k]]
        if not inner:
            break
        place = place[choices.pick(inner)]
    keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
    how = choices.number(8)
    if how == 0 and isinstance(place, dict):
        place[choices.text()] = choices.value()
    elif how == 1:
        del place[choices.pick(keys)]
    elif how == 2:
        value = choices.value()
    else:
        key = choices.pick(keys)
        number = type(place[key]) in (int, float) and how < 6
        place[key] = choices.pick(_ODD_NUMBERS) if number else choices.value()
    return json.dumps(value).encode("utf-8", "replace")


def _spoil_bytes(choices: Choices, raw: bytes) -> bytes:
    """Cut off, overwritten, lengthened, or something else altogether."""
    how, near = choices.number(6), choices.number(2)
    at = choices.number(min(len(raw), 256 if near else 2**16) + 1)
    if how == 0:
        return raw[:at]
    if how == 1:
        return choices.raw()
    if how == 2:
        return raw + (choices.raw() or b"\0")
    part = choices.raw(16) or bytes([raw[at % len(raw)] ^ 0x41]) if raw else b"?"
    return raw[:at] + part + raw[at + (len(part) if how < 5 else 0) :]


def _spoil(choices: Choices, files: dict[str, bytes]) -> dict[str, bytes]:
    """One to three of the files spoilt, or gone."""
    files = dict(files)
    for _ in range(1 + choices.number(3)):
        name = choices.pick(sorted(files))
        if choices.number(16) == 15:
            del files[name]
            continue
        is_json = name.endswith(".json") and choices.number(4)
        try:
            files[name] = (_spoil_json if is_json else _spoil_bytes)(choices, files[name])
        except (ValueError, LookupError, TypeError):  # spoilt before
            files[name] = _spoil_bytes(choices, files[name])
    return files


def _write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, raw in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return directory


def open_checkpoint(data: bytes) -> None:
    """Published checkpoints: opened and read leaf by leaf, or refused."""
    choices = Choices(data)
    files = _spoil(choices, published(choices.pick(_FAMILIES)))
    with _scratch() as directory:
        _write(directory, files)
        try:
            source = HFCheckpoint(directory)
            for leaf in leaf_paths(source.config):
                source.read_leaf(leaf, np.dtype(np.float32))
        except CheckpointError as error:
            _one_line(error)


def convert_checkpoint(data: bytes) -> None:
    """The converter's command: a whole checkpoint, or one line and nothing written."""
    choices = Choices(data)
    files = _spoil(choices, published(choices.pick(_FAMILIES)))
    with _scratch() as directory:
        _write(directory / "source", files)
        before = _tree(directory)
        argv = [str(directory / "source"), str(directory / "out")]
        if choices.number(4) == 3:
            argv += ["--quant", "int8"]
        told = _run(convert.__main__.main, argv)
        _check_told(told, argv)
        if told.code == 0:
            checkpoint.verify_checkpoint(directory / "out")
        elif _tree(directory) != before:
            raise Fault(f"left behind: {_tree(directory) - before}")


@functools.cache
def _converted() -> dict[str, bytes]:
    with _scratch() as directory:
        _write(directory / "source", published("sdar"))
        out = directory / "out"
        assert _run(convert.__main__.main, [str(directory / "source"), str(out)]).code == 0
        return {
            str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }


def load_checkpoint(data: bytes) -> None:
    """Converted checkpoints: loaded and verified, or refused."""
    choices = Choices(data)
    files = _converted()
    names = [n for n in files if not n.startswith("params")] + [choices.pick(sorted(files))]
    spoilt = {name: files[name] for name in names}
    files = {n: raw for n, raw in files.items() if n not in spoilt} | _spoil(
        choices, spoilt
    )
    with _scratch() as directory:
        _write(directory, files)
        try:
            model.load(str(directory))
        except ValueError as error:
            _one_line(error)
        try:
            checkpoint.verify_checkpoint(directory)
        except CheckpointError as error:
            _one_line(error)


def _one_line(error: Exception) -> None:
    text = str(error).strip()
    if not text or len(text.splitlines()) > 1:
        raise Fault(f"not one line: {text!r}") from error


# --- prompts and ids ------------------------------------------------------------------


class _Named(NamedTuple):
    """A model without weights."""

    config: Any
    tokenizer: Tokenizer | None


@functools.cache
def _named(name: str, tokenizer: bool) -> _Named:
    config = model.load_config(name)
    path = model.resolve_model_path(name)
    return _Named(config, Tokenizer(path, config.mask_id) if tokenizer else None)


def _plan_of(choices: Choices) -> tuple[_Named, request.Plan]:
    if choices.number(3) == 2:
        one = _named("demo-llada", bool(choices.number(4)))
        return one, request.plan_infill(one.config)
    one = _named("demo", bool(choices.number(4)))
    chat = choices.pick((None, True, False))
    return one, request.plan(one.config, chat=chat, stop=choices.pick(((), "x")))


def read_prompts(data: bytes) -> None:
    """Files of prompts: every line gives a row, or says what is wrong with it."""
    choices = Choices(data)
    one, plan = _plan_of(choices)
    lines = []
    for _ in range(1 + choices.number(4)):
        how = choices.number(4)
        if how == 0:
            lines.append(choices.raw())
        else:
            value = choices.value(3)
            if how == 1:
                value = {"prompt": value, "id": choices.value()}
            elif how == 2:
                count = choices.number(300)
                value = [choices.pick((choices.value(0), 5)) for _ in range(count)]
            lines.append(json.dumps(value).encode())
    with _scratch() as directory:
        path = directory / "in.jsonl"
        path.write_bytes(b"\n".join(lines))
        try:
            found = batch.read_lines(path, plan, "demo")
        except ValueError as error:
            _one_line(error)
            return
        for line in found:
            if line.error is None:
                _encode(one, plan, line.prompt)
            else:
                _one_line(ValueError(line.error))


def _encode(one: _Named, plan: request.Plan, prompt: Any) -> None:
    config = one.config
    try:
        row = encode_row(one, plan, prompt)
    except ValueError as error:
        _one_line(error)
        return
    right = 0 <= row.shown <= row.start < row.end <= config.max_positions
    if not right or not all(0 <= i < config.vocab_size for i in row.ids):
        raise Fault(f"{prompt!r} gives {row}")
    if plan.marker is None and config.mask_id in row.ids:
        raise Fault(f"{prompt!r} has a mask: {row.ids}")


def encode_ids(data: bytes) -> None:
    """Prompts of the library: texts, and whatever else stands for a list of ids."""
    choices = Choices(data)
    one, plan = _plan_of(choices)
    kind = choices.number(6)
    prompt: Any = [choices.value(1) for _ in range(choices.number(6))]
    if kind == 0:
        prompt = choices.text()
    elif kind == 1:
        prompt = np.frombuffer(choices.raw(), np.uint8).astype(choices.pick(_TYPES))
    elif kind == 2:
        prompt = choices.value()
    elif kind == 3:
        prompt = tuple(choices.number(70) for _ in range(choices.number(300)))
    elif kind == 4:
        prompt = np.frombuffer(choices.raw(), np.uint8).reshape(1, -1)
    if isinstance(prompt, str) or hasattr(prompt, "__len__"):
        _encode(one, plan, prompt)
        return
    try:
        prompts.token_ids(one.config, prompt)
    except ValueError as error:
        _one_line(error)


_TYPES = ("int32", "int64", "uint8", "bool", "float32", "float16", "object")


def resume_output(data: bytes) -> None:
    """What an output file has already: its lines, or why it cannot be gone on with."""
    choices = Choices(data)
    one = _named("demo", True)
    plan = request.plan(one.config)
    with _scratch() as directory:
        source, out = directory / "in.jsonl", directory / "out.jsonl"
        source.write_text('"a"\n"b"\n[1, 2]\n')
        found = batch.read_lines(source, plan, "demo")
        good = [{"line": line.number, "key": line.key, "tokens": [1]} for line in found]
        rows = []
        for _ in range(choices.number(5)):
            row = json.dumps(choices.pick([*good, good[0]])).encode()
            spoilers = (lambda c, r: r, _spoil_json, _spoil_bytes)
            rows.append(choices.pick(spoilers)(choices, row))
        out.write_bytes(b"\n".join(rows) + choices.pick((b"\n", b"")))
        try:
            finished = batch.read_finished(out, found)
        except ValueError as error:
            _one_line(error)
            return
        if not finished.keys() <= {1, 2, 3} or any(
            r[-1:] != "\n" for r in finished.values()
        ):
            raise Fault(f"{rows} gives {finished}")


# --- command lines --------------------------------------------------------------------

_COMMANDS = {
    "decode": (dllm_jax.decode.main, dllm_jax.decode.make_parser),
    "chat": (dllm_jax.chat.main, dllm_jax.chat.make_parser),
    "doctor": (dllm_jax.doctor.main, dllm_jax.doctor.make_parser),
    "convert": (convert.__main__.main, convert.__main__.make_parser),
}
_WORDS = ("demo", "demo-llada", "demo-draft", "in.jsonl", "text.txt", "latin.txt", "here")
_WORDS += ("missing", "out.jsonl", "8", "0.5", "1,2,3", "1,,2", "data=2", "tensor=3,data=1")
_NO_VALUE = ("help", "distributed")  # ends at once; waits for other processes


def _argument(choices: Choices, options: Sequence[Any] | None) -> str:
    how = choices.number(8)
    if options and how < 4:
        return str(choices.pick(sorted(map(str, options))))
    if how < 6:
        return choices.pick(_WORDS)
    if how == 6:
        return str(choices.pick(_ODD_NUMBERS))
    return choices.text().replace("\0", "")  # no argument can have one


def _command_line(choices: Choices, parser: Any) -> list[str]:
    flags = [a for a in parser._actions if a.option_strings and a.dest not in _NO_VALUE]
    argv = [_argument(choices, None) for a in parser._actions if not a.option_strings]
    argv = argv[: choices.number(4)] if argv else argv
    for _ in range(choices.number(6)):
        action = choices.pick(flags)
        name = choices.pick(action.option_strings)
        if action.nargs == 0:
            argv.append(name)
            continue
        value = _argument(choices, action.choices)
        argv += choices.pick(([name, value], [f"{name}={value}"]))
    if choices.number(8) == 7:
        argv.append(choices.text().replace("\0", ""))
    return argv


def command_line(data: bytes) -> None:
    """Flags of all commands: taken up to where weights are loaded, or refused in a line."""
    choices = Choices(data)
    main, make_parser = _COMMANDS[choices.pick(sorted(_COMMANDS))]
    argv = _command_line(choices, make_parser())

    def enough(*args, **kwargs):
        raise _Enough

    before, cache = Path.cwd(), jax.config.jax_compilation_cache_dir
    with _scratch() as directory:
        (directory / "in.jsonl").write_text('"a"\n[1]\n')
        (directory / "text.txt").write_text("Ana has 3 pens.\n")
        (directory / "latin.txt").write_bytes("Añá".encode("latin-1"))
        (directory / "here").mkdir()
        tree = _tree(directory)
        os.chdir(directory)
        try:
            with _instead(
                (dllm_jax.decode, "load_models", enough),
                (dllm_jax.chat, "load_models", enough),
                (dllm_jax.decode, "set_up_jax", lambda args: None),
                (dllm_jax.chat, "set_up_jax", lambda args: None),
                (dllm_jax.doctor, "examine", enough),
                (convert.__main__, "_fetch", enough),
                (sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), "utf-8")),
            ):
                told = _run(main, argv)
        finally:
            os.chdir(before)
            jax.config.update("jax_compilation_cache_dir", cache)
        left = _tree(directory) - tree
    _check_told(told, argv)
    if left:
        raise Fault(f"{argv!r} left behind {left}")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "open": open_checkpoint,
    "convert": convert_checkpoint,
    "load": load_checkpoint,
    "prompts": read_prompts,
    "ids": encode_ids,
    "resume": resume_output,
    "flags": command_line,
}


def _fuzz(argv: list[str]) -> None:
    """Runs a target on what atheris thinks of, from long inputs on."""
    if len(argv) < 2 or argv[1] not in TARGETS:
        sys.exit(f"usage: python tests/fuzz.py {'|'.join(TARGETS)} [flags of atheris]")
    target, rng = TARGETS[argv.pop(1)], np.random.default_rng(0)
    with _scratch() as seeds:
        for number in range(64):
            (seeds / str(number)).write_bytes(rng.bytes(int(rng.integers(16, 200))))
        atheris.Setup([*argv, "-max_len=256", "-len_control=0", str(seeds)], target)
        atheris.Fuzz()


if __name__ == "__main__":
    _fuzz(sys.argv)
