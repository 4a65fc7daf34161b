"""Reads the text of a program that XLA has optimised for TPU: bytes, times, copies."""

import dataclasses
import math
import re
from collections.abc import Callable

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
_SIZES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_NO_TRAFFIC = (
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast"),
    *("after-all", "partition-id", "copy-done", "slice-done", "async-done"),
    *("all-reduce-done", "all-gather-done"),
)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_STARTS = ("copy-start", "slice-start", "async-start")
_SLICES = ("dynamic-slice", "slice", "gather")


def dimensions(shape: str) -> list[tuple[int, ...]]:
    """The dimensions of an array, or of each array of a tuple."""
    found = (dims for _, dims, _ in _ARRAY.findall(shape))
    return [tuple(int(n) for n in dims.split(",") if n) for dims in found]


def count_bytes(shape: str, anywhere: bool = False) -> int:
    """Bytes of an array or tuple, of what lies in HBM: `S(n)` is memory on the core."""
    return sum(
        _SIZES.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims, layout in _ARRAY.findall(shape)
        if anywhere or "S(" not in layout
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the program."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self, key: str) -> list[str]:
        """Computations named behind `key=`, one or a list."""
        found = re.search(rf"\b{key}=\{{?((?:%[\w.\-]+(?:, )?)+)", self.attributes)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []

    @property
    def cycles(self) -> int:
        """The compiler's estimate, 0 if it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0


Computation = dict[str, Instruction]


def _closing(text: str, start: int) -> int:
    """Index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i + 1
    raise ValueError(f"unbalanced line {text[:80]!r}.")


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations of an optimised program by name, and the name of its entry."""
    program: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            current = program.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
            continue
        found = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
        if not found:
            continue
        start = found.end()
        end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
        opcode = re.match(r"\s*([\w\-]+)", line[end:])
        opening = end + opcode.end()
        closing = _closing(line, opening)
        current[found[2]] = Instruction(
            name=found[2],
            shape=line[start:end],
            opcode=opcode[1],
            arguments=line[opening:closing],
            attributes=line[closing:],
            is_root=bool(found[1]),
        )
    return program, entry


@dataclasses.dataclass
class Cost:
    """What a part of the program moves and takes, as often as it runs."""

    moved: float = 0.0  # bytes between HBM and the core
    seconds: float = 0.0
    copies: int = 0  # big ones
    collectives: int = 0  # exchanges between devices
    network: float = 0.0  # seconds of them

    def add(self, other: "Cost", times: int = 1) -> None:
        """Adds another part that runs `times` times."""
        self.moved += times * other.moved
        self.seconds += times * other.seconds
        self.copies += times * other.copies
        self.collectives += times * other.collectives
        self.network += times * other.network


class Reader:
    """Adds up the costs of a program.

    Args:
      text: the optimised program.
      clock: cycles a second.
      bandwidth: HBM bytes a second, for instructions without an estimate of cycles.
      big_copy: bytes from which a copy or transpose is counted.
      kernel: the cost of a custom call, or None for one that is no kernel.
      exchange: seconds of a collective; it gets the opcode, the bytes of its result, and
        how many devices take part.
    """

    def __init__(
        self,
        text: str,
        clock: float,
        bandwidth: float,
        big_copy: int,
        kernel: Callable[[Instruction], Cost | None],
        exchange: Callable[[str, int, int], float] = lambda opcode, size, devices: 0.0,
    ):
        self.program, self.entry = parse(text)
        self.clock, self.bandwidth, self.big_copy = clock, bandwidth, big_copy
        self.kernel, self.exchange = kernel, exchange

    def loop(self) -> Cost:
        """One round of the entry's only loop."""
        loops = [i for i in self.program[self.entry].values() if i.opcode == "while"]
        (decode,) = loops
        return self.computation(decode.called("body")[0])

    def computation(self, name: str) -> Cost:
        """The sum over a computation's instructions."""
        total = Cost()
        for one in self.program[name].values():
            kernel = self.kernel(one) if one.opcode == "custom-call" else None
            if one.opcode == "while":
                body = self.computation(one.called("body")[0])
                total.add(body, self._trips(one))
            elif one.opcode == "conditional":
                sides = map(self.computation, one.called("branch_computations"))
                total.add(max(sides, key=lambda side: side.moved))
            elif one.opcode == "call":
                total.add(self.computation(one.called("to_apply")[0]))
            elif kernel is not None:
                total.add(kernel)
            elif one.opcode.removesuffix("-start") in _COLLECTIVES:
                total.add(self._collective(one))
            elif one.opcode not in _NO_TRAFFIC and "AllocateBuffer" not in one.attributes:
                total.add(self._plain(one, self.program[name]))
        return total

    def _trips(self, one: Instruction) -> int:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.attributes)
        if known:
            return int(known[1])
        condition = self.program[one.called("condition")[0]].values()
        bounds = [i.arguments for i in condition if i.opcode == "constant"]
        return max((int(n[1:-1]) for n in bounds if n[1:-1].isdigit()), default=1)

    def _collective(self, one: Instruction) -> Cost:
        opcode = one.opcode.removesuffix("-start")
        # {{0,1},{2,3}}, or [groups,devices]<=...
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", one.attributes)
        tiled = re.search(r"replica_groups=\[\d+,(\d+)\]", one.attributes)
        devices = len(listed[1].split(",")) if listed else int(tiled[1]) if tiled else 2
        size = count_bytes(one.shape, anywhere=True)
        if one.opcode.endswith("-start") and one.shape.startswith("("):
            size //= 2  # (operand, result)
        seconds = self.exchange(opcode, size, devices)
        return Cost(seconds=seconds, collectives=1, network=seconds)

    def _plain(self, one: Instruction, siblings: Computation) -> Cost:
        moved = self._written(one, siblings) + self._read(one, siblings)
        asynchronous = one.opcode in _STARTS  # it runs beside others
        seconds = 0.0 if asynchronous else one.cycles / self.clock or moved / self.bandwidth
        copies = one.opcode in ("copy", "copy-start", "transpose")
        copies &= count_bytes(one.shape, anywhere=True) >= self.big_copy
        return Cost(moved, seconds, int(copies))

    def _written(self, one: Instruction, siblings: Computation) -> int:
        if one.opcode in _STARTS:  # (destination, source, context), or source first
            arrays = _ARRAY.finditer(one.shape)
            return min(count_bytes(array[0]) for array in list(arrays)[:2])
        whole = count_bytes(one.shape)
        if one.opcode == "dynamic-update-slice":
            return min(whole, count_bytes(siblings[one.operands[1]].shape, anywhere=True))
        if one.opcode != "fusion" or not whole:
            return whole
        inside = self.program[one.called("calls")[0]]
        root = next(i for i in inside.values() if i.is_root)
        names = root.operands if root.opcode == "tuple" else [root.name]
        parts = [inside[name] for name in names]
        shapes = [array[0] for array in _ARRAY.finditer(one.shape)]
        if len(parts) != len(shapes):
            return whole
        return sum(
            min(count_bytes(shape), self._result(part, inside))
            for part, shape in zip(parts, shapes, strict=True)
        )

    def _result(self, one: Instruction, inside: Computation) -> int:
        """Bytes that a fused instruction changes: of an update in place, the update."""
        if one.opcode == "bitcast":
            return self._result(inside[one.operands[0]], inside)
        if one.opcode == "dynamic-update-slice":
            return count_bytes(inside[one.operands[1]].shape, anywhere=True)
        return count_bytes(one.shape, anywhere=True)

    def _read(self, one: Instruction, siblings: Computation) -> int:
        if one.opcode in _SLICES:
            in_hbm = count_bytes(siblings[one.operands[0]].shape) > 0
            return count_bytes(one.shape, anywhere=True) if in_hbm else 0
        total = 0
        for index, name in enumerate(one.operands):
            whole = count_bytes(siblings[name].shape)
            if one.opcode == "fusion" and whole:
                whole = min(whole, self._used(one.called("calls")[0], index))
            if one.opcode == "dynamic-update-slice" and index == 0:
                whole = 0
            if one.opcode in ("slice-start", "async-start"):
                sizes = [array[0] for array in _ARRAY.finditer(one.shape)]
                whole = min(count_bytes(size, anywhere=True) for size in sizes[:2])
            total += whole
        return total

    def _used(self, computation: str, index: int) -> int:
        """Bytes of a fusion's operand that the fusion reads."""
        inside = self.program[computation]
        (name,) = (
            i.name
            for i in inside.values()
            if i.opcode == "parameter" and i.arguments == f"({index})"
        )
        return self._used_of(inside, name)

    def _used_of(self, inside: Computation, name: str) -> int:
        total, whole = 0, count_bytes(inside[name].shape, anywhere=True)
        if inside[name].is_root:
            return whole
        for user in inside.values():
            for index, operand in enumerate(user.operands):
                if operand != name:
                    continue
                if user.opcode in _SLICES and index == 0:
                    total += count_bytes(user.shape, anywhere=True)
                elif user.opcode == "bitcast":
                    total += self._used_of(inside, user.name)
                elif user.opcode == "fusion":
                    total += self._used(user.called("calls")[0], index)
                elif user.opcode != "dynamic-update-slice" or index != 0:
                    total += whole
        return min(total, whole)
