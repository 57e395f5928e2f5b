"""Read compiled XLA:GPU programs: launches from a thunk sequence, and work on weights from optimized HLO text.

A thunk is one entry of the list that XLA runs: a kernel, a copy, or a container such as a loop. XLA writes the list to
``*.thunk_sequence_after_thunk_passes.txt`` in the folder of ``xla_dump_to``; ``Compiled.as_text()`` is the HLO text.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

THUNK = re.compile(r"( *)\d+: (k\w+)")
LABEL = re.compile(r"( *)(\w+):\s*$")
# These thunks wait or mark an end; the device starts nothing.
WAITS = frozenset({"kAsyncDone", "kCopyDone", "kWaitForStreams", "kHostSendDone", "kHostRecvDone"})
COPIES = frozenset({"kCopy", "kMemset32BitValue", "kMemzero"})


@dataclass
class Launches:
    """Launches in a region of a program: its main sequence, the body of a loop, or a branch.

    Attributes:
        kernels: kernels of the region, library calls included.
        copies: copies and fills of memory that are not kernels.
        command_buffers: number of command buffers (CUDA graphs).
        nodes: kernels and copies in command buffers.
    """

    kernels: int = 0
    copies: int = 0
    command_buffers: int = 0
    nodes: int = 0

    @property
    def outside(self) -> int:
        """Number of launches that are not in a command buffer."""
        return self.kernels + self.copies - self.nodes


@dataclass
class _Thunk:
    kind: str
    children: list["_Thunk"] = field(default_factory=list)


def count_launches(text: str) -> dict[str, Launches]:
    """Count the launches of each region of a thunk sequence.

    Returns:
        launches by region: ``""`` is the main sequence, ``"body"`` of a loop, ``"body/true_branch"`` and so on.
        Regions of several loops of one place are counted together.

    Raises:
        ValueError: the text has no thunk.
    """
    found: dict[str, Launches] = {}
    _count(_parse_thunks(text), "", False, found)
    return found


def _parse_thunks(text: str) -> list[_Thunk]:
    root = _Thunk("")
    stack = [(-1, root)]
    last = 0  # Indentation of the last thunk.
    for line in text.splitlines():
        if match := THUNK.match(line):
            last = indent = len(match[1])
        elif match := LABEL.match(line):
            # XLA prints the first label of a loop without its indentation.
            indent = last + 2 if match[2] == "condition" else len(match[1])
        else:
            continue
        while stack[-1][0] >= indent:
            stack.pop()
        stack[-1][1].children.append(thunk := _Thunk(match[2]))
        stack.append((indent, thunk))
    if not root.children:
        raise ValueError(f"no thunk in a text of {len(text)} characters; wanted lines such as '000: kKernel ...'")
    return root.children


def _count(thunks: Sequence[_Thunk], region: str, is_node: bool, found: dict[str, Launches]) -> None:
    launches = found.setdefault(region, Launches())
    for thunk in thunks:
        if not thunk.kind.startswith("k"):  # The label of a region.
            _count(thunk.children, f"{region}/{thunk.kind}".lstrip("/"), is_node, found)
        elif thunk.children:
            is_buffer = thunk.kind == "kCommandBuffer"
            launches.command_buffers += is_buffer
            _count(thunk.children, region, is_node or is_buffer, found)
        elif thunk.kind not in WAITS:
            launches.copies += thunk.kind in COPIES
            launches.kernels += thunk.kind not in COPIES
            launches.nodes += is_node


@dataclass(frozen=True)
class WeightWork:
    """An operation that reads only weights and constants, so its result could be stored in their place.

    Attributes:
        name: name of the HLO instruction; its operation in JAX is `source`.
        weights: names of the parameters that it depends on.
        written: bytes of the result.
        region: as in `count_launches`.
    """

    name: str
    source: str
    weights: tuple[str, ...]
    written: int
    region: str


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    arguments: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return NAME.findall(self.arguments)

    def get(self, attribute: str) -> str:
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def source(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)")
NAME = re.compile(r"%([\w.\-]+)")
ARRAY = re.compile(r"\b([a-z]+(\d+)\w*|pred)\[([\d,]*)\]")
# These instructions launch nothing.
FREE = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "after-all"})
# Weights that a value depends on; None if it depends on other parameters, too. A tuple has one for each element.
Origin: TypeAlias = frozenset[str] | None
Value: TypeAlias = "Origin | tuple[Origin, ...]"


def find_weight_work(text: str, weights: str = r"^arrays\b") -> list[WeightWork]:
    """Find the operations of a compiled program that depend on weights and on nothing else.

    Args:
        text: HLO text of a compiled program (``Compiled.as_text()``).
        weights: pattern of the parameters that are weights, by their names in JAX.

    Raises:
        ValueError: the text has no entry computation, or no parameter is a weight.
    """
    computations, entry = _parse_hlo(text)
    if entry is None:
        raise ValueError(f"no ENTRY computation in an HLO text of {len(text)} characters")
    parameters = [each for each in computations[entry] if each.opcode == "parameter"]
    origins: dict[str, Value] = {
        each.name: frozenset({each.source}) if re.search(weights, each.source) else None for each in parameters
    }
    if not any(origins.values()):
        names = ", ".join(each.source for each in parameters[:5])
        raise ValueError(f"no parameter matches {weights!r}; the program has {len(parameters)}: {names}")
    found: list[WeightWork] = []
    _walk(computations, entry, origins, "", found)
    return found


def _parse_hlo(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = None, []
    for line in text.splitlines():
        if match := HEADER.match(line):
            current = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif match := INSTRUCTION.match(line):
            shape, call = _split_shape(match[3])
            opcode, _, arguments = call.partition("(")
            end = _find_end(arguments)
            each = _Instruction(match[2], shape, opcode, arguments[:end], arguments[end:], bool(match[1]))
            current.append(each)
    return computations, entry


def _split_shape(text: str) -> tuple[str, str]:
    """Split ``SHAPE opcode(...)``; the shape of a tuple contains spaces."""
    end = 1 + _find_end(text[1:]) if text.startswith("(") else text.index(" ")
    return text[:end], text[end:].lstrip(") ")


def _find_end(text: str) -> int:
    """Return the position of the parenthesis that closes one before `text`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return position
    return len(text)


def _count_bytes(shape: str) -> int:
    """Return the bytes of an HLO shape: all arrays of a tuple together.

    >>> _count_bytes("(bf16[2,3]{1,0}, pred[4]{0}, f32[])")
    20
    """
    sizes = ((int(bits or 8), dims) for _, bits, dims in ARRAY.findall(shape))
    return sum(bits * math.prod(int(size) for size in dims.split(",") if size) // 8 for bits, dims in sizes)


def _join(values: Iterable[Value]) -> Origin:
    joined: frozenset[str] = frozenset()
    for value in values:
        for origin in value if isinstance(value, tuple) else (value,):
            if origin is None:
                return None
            joined |= origin
    return joined


def _walk(
    computations: Mapping[str, Sequence[_Instruction]],
    name: str,
    origins: dict[str, Value],
    region: str,
    found: list[WeightWork],
) -> Value:
    """Follow the weights through a computation whose parameters are in `origins`; return the origin of its result."""
    result: Value = None
    for each in computations[name]:
        if each.name not in origins:
            operands = [origins[operand] for operand in each.operands]
            origins[each.name] = value = _follow(computations, each, operands, region, found)
            if each.opcode not in (*FREE, "while", "conditional", "call") and (source := _join([value])):
                weights, written = tuple(sorted(source)), _count_bytes(each.shape)
                found.append(WeightWork(each.name, each.source, weights, written, region))
        if each.is_root:
            result = origins[each.name]
    return result


def _follow(
    computations: Mapping[str, Sequence[_Instruction]],
    each: _Instruction,
    operands: Sequence[Value],
    region: str,
    found: list[WeightWork],
) -> Value:
    def enter(called: str, values: Sequence[Value], label: str) -> Value:
        parameters = [inner for inner in computations[called] if inner.opcode == "parameter"]
        parameters.sort(key=lambda inner: int(inner.arguments))
        return _walk(computations, called, dict(zip((p.name for p in parameters), values, strict=True)), label, found)

    if each.opcode == "get-tuple-element":
        value = operands[0]
        return value[int(each.get("index"))] if isinstance(value, tuple) else value
    if each.opcode == "tuple":
        return tuple(_join([value]) for value in operands)
    if each.opcode == "while":
        before = operands[0] if isinstance(operands[0], tuple) else (None,)
        kept = set(_list_kept(computations[each.get("body")]))
        value = tuple(origin if index in kept else None for index, origin in enumerate(before))
        enter(each.get("body"), [value], f"{region}/body".lstrip("/"))
        return value
    if each.opcode == "conditional":
        labels = ("true_computation", "false_computation")
        branches = [each.get(label) for label in labels] if each.get(labels[0]) else _list_branches(each.rest)
        for index, branch in enumerate(branches):
            label = ("true_branch", "false_branch")[index] if each.get(labels[0]) else f"branch_{index}"
            enter(branch, operands[index + 1 : index + 2], f"{region}/{label}".lstrip("/"))
        return None
    if each.opcode == "call":
        return enter(each.get("to_apply"), operands, region)
    return _join(operands)


def _list_branches(rest: str) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", rest)
    return NAME.findall(match[1]) if match else []


def _list_kept(body: Sequence[_Instruction]) -> Iterator[int]:
    """Yield the indices of a loop's values that its body returns as it got them."""
    by_name = {each.name: each for each in body}
    root = next(each for each in body if each.is_root)
    for index, name in enumerate(root.operands):
        each = by_name[name]
        if each.opcode == "get-tuple-element" and int(each.get("index")) == index:
            yield from [index] * (by_name[each.operands[0]].opcode == "parameter")
