"""Files of prompts: JSON lines in, JSON lines out, in order, and resumable.

A line of the input is a text, a list of ids, or an object with one of them under "prompt"
and perhaps an "id". A line of the output has the input's line number and id, a key of what
was asked, and the output's fields without times, which no two runs share; or "error" for a
line that could not be decoded, which stops nothing.

Finished prompts are written at once, in the order in which they finish; when all are done
the file is put in order. So a run that is killed has lost what it was decoding, no more,
and another one with `resume` goes on from there.

Prompts of one bucket of lengths share a batch; when some of its rows have ended, the next
prompts take their places, in the same compiled programs.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from dllm_jax.generate import check_models, encode_row
from dllm_jax.model import Model
from dllm_jax.prompts import Row, buckets_of
from dllm_jax.request import Plan
from dllm_jax.run import Output, Run
from dllm_jax.sharding import wait_for_all

Finished = Callable[[int, Output | None], None]
"""Called with a line's number and its output; None if it could not be decoded."""

_TIMES = ("compile_seconds", "decode_seconds")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the input file."""

    number: int  # from 1
    id: Any  # the user's, or None
    prompt: Any  # a text or a list of ids, or None if the line is bad
    error: str | None  # what is wrong with the line
    key: str  # of the prompt and all that is asked of it


def read_lines(path: Path, request: Plan, model_name: str) -> list[Line]:
    """The lines of an input file that are not empty; bad ones have an error.

    Raises:
      ValueError: if the file cannot be read or has no line.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"input={str(path)!r}: {error.strerror or error}.") from None
    asked = json.dumps([model_name, request.describe()], default=str).encode()
    asked += repr((request.stop, request.stop_ids, request.chat, request.trace)).encode()
    asked += repr(request.logprobs).encode()
    lines = []
    for number, text in enumerate(raw.split(b"\n"), start=1):
        if not text.strip():
            continue
        key = f"{zlib.crc32(text.strip(), zlib.crc32(asked)):08x}"
        lines.append(Line(number, *_parse(text), key))
    if not lines:
        raise ValueError(f"input={str(path)!r} has no lines.")
    return lines


def _parse(text: bytes) -> tuple[Any, Any, str | None]:
    """The id and the prompt of a line, and what is wrong with it or None."""
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, None, f"not UTF-8 at byte {error.start}"
    except RecursionError:
        return None, None, "not JSON: nested too deeply"
    except ValueError as error:
        return None, None, f"not JSON: {error}"
    name = None
    if isinstance(value, dict):
        name, unknown = value.get("id"), value.keys() - {"prompt", "id"}
        if unknown:
            return name, None, f"unknown field {min(unknown)!r}: prompt and id are known"
        value = value.get("prompt")
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not isinstance(value, str) and not ids:
        return name, None, "the prompt must be a text or a list of token ids"
    return name, value, None


def _record(line: Line, output: Output | None, error: str | None) -> str:
    """A line of the output file."""
    values: dict[str, Any] = {"line": line.number, "id": line.id, "key": line.key}
    if output is None:
        values["error"] = error
    else:
        fields = output.to_dict()
        fields["stats"] = {k: v for k, v in fields["stats"].items() if k not in _TIMES}
        values |= fields
    return json.dumps(values, ensure_ascii=False) + "\n"


def read_finished(path: Path, lines: Sequence[Line]) -> dict[int, str]:
    """What an output file has already: its whole lines by number.

    A line that was cut off by a kill does not count.

    Raises:
      ValueError: if a line answers another question than this run's.
    """
    keys = {line.number: line.key for line in lines}
    found: dict[int, str] = {}
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return found
    except OSError as error:
        raise ValueError(f"output={str(path)!r}: {error.strerror or error}.") from None
    for number, text in enumerate(raw.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(text)
            line, key = record["line"], record["key"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"output={str(path)!r}: line {number} is not of a run of this program."
            ) from None
        if type(line) is not int or keys.get(line) != key:
            raise ValueError(
                f"output={str(path)!r}: line {number} is of another prompt, model or "
                "setting than this run's; resume=True goes on with the same ones."
            )
        found[line] = text.decode("utf-8") + "\n"
    return found


def _decode_group(
    model: Model,
    request: Plan,
    work: Sequence[tuple[Line, Row]],
    batch_size: int,
    drafter: Model | None,
) -> Iterator[tuple[Line, Output]]:
    """Decodes prompts of one pair of buckets, yielding them as they finish."""
    waiting = list(reversed(work))
    first = [waiting.pop() for _ in range(min(batch_size, len(waiting)))]
    buckets = buckets_of([row for _, row in work])
    run = Run(
        model,
        request,
        [row for _, row in first],
        [line.number - 1 for line, _ in first],
        drafter,
        buckets,
    )
    held: dict[int, Line] = {slot: line for slot, (line, _) in enumerate(first)}
    while held:
        # Refilling stores new prompts in a forward of the whole batch: not for every row.
        ends = max(len(held) // 4, 1) if waiting else 0
        run.advance(pause=bool(request.stop), ends=ends)
        if request.stop:
            run.end_rows([slot for slot in held if run.has_stop(slot)])
        done = [slot for slot in held if run.seen.done[slot]]
        for slot, output in zip(done, run.outputs(done), strict=True):
            yield held.pop(slot), output
        new = {slot: waiting.pop() for slot in done[: len(waiting)]}
        if new:
            run.refill({s: (row, line.number - 1) for s, (line, row) in new.items()})
            held |= {slot: line for slot, (line, _) in new.items()}


def decode_lines(
    model: Model,
    request: Plan,
    lines: Sequence[Line],
    batch_size: int = 8,
    draft_model: Model | None = None,
) -> Iterator[tuple[Line, Output | None, str | None]]:
    """Decodes lines, yielding each with its output, or with what is wrong with it.

    A prompt draws from (seed, its line's number), whatever else is in the file's batches.

    Args:
      model: from `load`.
      request: from `plan` or `plan_infill`.
      lines: from `read_lines`.
      batch_size: rows that are decoded at once.
      draft_model: the model that drafts, for decoders that need one.
    """
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"{batch_size=} must be a whole number of at least 1.")
    check_models(model, request, draft_model)
    groups: dict[tuple[int, int], list[tuple[Line, Row]]] = {}
    for line in lines:
        if line.error is not None:
            yield line, None, line.error
            continue
        try:
            row = encode_row(model, request, line.prompt)
        except ValueError as error:
            yield line, None, str(error)
            continue
        groups.setdefault(buckets_of([row]), []).append((line, row))
    for _, work in sorted(groups.items()):
        for line, output in _decode_group(model, request, work, batch_size, draft_model):
            yield line, output, None


def decode_file(
    model: Model,
    request: Plan,
    lines: Sequence[Line],
    destination: Path,
    *,
    batch_size: int = 8,
    resume: bool = False,
    draft_model: Model | None = None,
    finished: Finished = lambda number, output: None,
) -> list[tuple[int, str]]:
    """Decodes the lines of a file into another file.

    In a run of several processes every one calls it with the same arguments, and the first
    writes.

    Args:
      model: from `load`.
      request: from `plan` or `plan_infill`.
      lines: from `read_lines`.
      destination: JSON lines; must not exist unless `resume`.
      batch_size: rows that are decoded at once.
      resume: goes on from what `destination` has.
      draft_model: the model that drafts, for decoders that need one.
      finished: told of every line, those of a run before too.

    Returns:
      The numbers of the lines that could not be decoded, in order, and why.

    Raises:
      ValueError: if the destination cannot be written or is not of such a run.
    """
    records = read_finished(destination, lines) if resume else {}
    wait_for_all("read what is finished")  # before the first process writes more
    left = [line for line in lines if line.number not in records]
    bad = {}
    for number, record in records.items():
        if (error := json.loads(record).get("error")) is not None:
            bad[number] = error
        finished(number, None)
    writes = jax.process_index() == 0
    mode = "a" if resume else "x"
    try:
        # What a kill has cut off goes; a run without a line left is put in order again.
        if writes and records:
            _replace(destination, records.values())
        file = destination.open(mode, encoding="utf-8") if writes else None
        for line, output, error in decode_lines(
            model, request, left, batch_size, draft_model
        ):
            records[line.number] = _record(line, output, error)
            if output is None:
                bad[line.number] = error
            if file is not None:
                file.write(records[line.number])
                file.flush()
            finished(line.number, output)
        if file is not None:
            file.close()
            _replace(destination, (records[line.number] for line in lines))
    except OSError as error:
        raise ValueError(
            f"output={str(destination)!r}: {error.strerror or error}."
        ) from None
    return sorted(bad.items())


def _replace(path: Path, records: Any) -> None:
    """Writes a file anew, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(records)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
