"""Measure the structure of the source: modules, imports, functions, and the path from a frame to a command.

    python tools/house.py             print the report
    python tools/house.py --no-trace  print the report without the trace

All figures except the trace come from the syntax trees of the packages. The trace runs one session in memory with a
scripted policy. From the delivery of the first frame to the first command, it counts the files and functions of
`service`, the returns to a file that was left before, and the calls back into an object that is already a caller.
Functions that already run on the device thread when the frame arrives count too.
"""

import argparse
import ast
import asyncio
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxmodels", "hooks", "service", "robojax")
MAX_PARAMETERS = 6


def modules(packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Return the file of each module of the packages by dotted name."""
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports_of(files: Mapping[str, Path], *, everywhere: bool = False) -> dict[str, set[str]]:
    """Return the product modules that each module imports at module level, or also in functions (``everywhere``)."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        found: set[str] = set()
        for node in ast.walk(tree) if everywhere else tree.body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {each if each in files else node.module for each in whole}
        graph[name] = {each for each in found if each in files and each != name}
    return graph


def package_of(module: str) -> str:
    """Return the package of a module, such as ``service.control`` for ``service.control.guard``."""
    return ".".join(module.split(".")[:2])


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two or more nodes."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, edges: Mapping[str, set[str]], out: list[str]) -> None:
        stack = [(node, iter(sorted(edges.get(node, ()))))]
        seen.add(node)
        while stack:
            here, rest = stack[-1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(sorted(edges.get(other, ())))))
                    break
            else:
                out.append(here)
                stack.pop()

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    backwards: dict[str, set[str]] = defaultdict(set)
    for node, others in graph.items():
        for other in others:
            backwards[other].add(node)
    seen, groups = set(), []
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            visit(node, backwards, group)
            if len(group) > 1:
                groups.append(sorted(group))
    return groups


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters of a function without `self` and `cls`."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(node.args.vararg) + bool(node.args.kwarg)


def page() -> str:
    """Return the figures of the syntax trees as text."""
    files = modules()
    lines = {name: path.read_text().count("\n") for name, path in files.items()}
    out = ["package                        files   lines  median  longest"]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, path in files.items():
        top = name.split(".")[0]
        groups[top].append(name)
        folder = ".".join(path.relative_to(ROOT).parts[:2]) if len(path.relative_to(ROOT).parts) > 2 else f"{top}."
        groups[f"  {folder}"].append(name)
    for top in PACKAGES:
        for group in sorted((each for each in groups if each.strip().split(".")[0] == top), key=lambda each: each[:1]):
            sizes = {name: lines[name] for name in groups[group] if files[name].name != "__init__.py"} or {"": 0}
            longest = max(sizes, key=lambda name: sizes[name])
            out.append(
                f"{group:30}{len(groups[group]):6}{sum(lines[name] for name in groups[group]):8}"
                f"{median(sizes.values()):8.0f}  {longest.rpartition('.')[2]} {sizes[longest]}"
            )
    out.append(f"{'all':30}{len(files):6}{sum(lines.values()):8}{median(lines.values()):8.0f}")

    graph = imports_of(files)
    packages: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        packages[package_of(name)] |= {package_of(other) for other in others} - {package_of(name)}
    for title, found in (("packages", circles(packages)), ("modules", circles(graph))):
        out.append(f"\ncircles of {title}: {len(found)}")
        out += [f"  {len(group)}: {' '.join(group)}" for group in found]

    importers = Counter(other for others in imports_of(files, everywhere=True).values() for other in others)
    single = [name for name in files if importers[name] == 1 and files[name].name != "__init__.py"]
    out.append(f"\nmodules with one importer: {len(single)}, those under 60 lines: ")
    out[-1] += ", ".join(f"{name} ({lines[name]})" for name in single if lines[name] < 60) or "none"
    wide = [
        (parameters(node), f"{name}.{node.name}")
        for name, path in files.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MAX_PARAMETERS
    ]
    out.append(f"functions with more than {MAX_PARAMETERS} parameters: {len(wide)}; the largest numbers:")
    out += [f"  {count} {name}" for count, name in sorted(wide, reverse=True)[:8]]
    return "\n".join(out)


class Call(NamedTuple):
    """Call of a function of the traced package.

    Attributes:
        file: File of the function.
        function: Qualified name of the function.
        thread: Name of the thread that ran it.
        is_callback: Whether the called object is already a caller further up the stack.
    """

    file: str
    function: str
    thread: str
    is_callback: bool


class Trace:
    """Record of the calls of a package while `is_on`, in all threads that start after its creation."""

    def __init__(self, package: Path):
        self.is_on = False
        self.calls: list[Call] = []
        self._package = f"{package}/"
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def begin(self) -> None:
        """Start to count. Functions that already run in other threads are the first calls."""
        for thread in threading.enumerate():
            frame = sys._current_frames().get(thread.ident or 0)
            while frame is not None and thread is not threading.current_thread():
                self._add(frame, thread.name)
                frame = frame.f_back
        self.is_on = True

    def end(self) -> None:
        """Stop to count calls."""
        self.is_on = False
        threading.setprofile(None)
        sys.setprofile(None)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call":
            self._add(frame, threading.current_thread().name)

    def _add(self, frame: FrameType, thread: str) -> None:
        if self._is_counted(frame):
            file = frame.f_code.co_filename.removeprefix(self._package)
            self.calls.append(Call(file, frame.f_code.co_qualname, thread, self._is_callback(frame)))

    def _is_counted(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._package)

    def _is_callback(self, frame: FrameType) -> bool:
        called, is_left, caller = frame.f_locals.get("self"), False, frame.f_back
        while called is not None and caller is not None:
            if self._is_counted(caller):
                other = caller.f_locals.get("self")
                if other is called and is_left:
                    return True
                is_left |= other is not None and other is not called
            caller = caller.f_back
        return False

    def returns(self) -> int:
        """Return how often a call enters a file that was left before."""
        seen: set[str] = set()
        count, here = 0, ""
        for file, *_ in self.calls:
            if file != here:
                count += file in seen
                seen.add(file)
                here = file
        return count


async def trace_of_a_frame() -> Trace:
    """Trace one session in memory from its first frame to its first command."""
    import numpy as np

    import service
    from service.inference.engine import Engine
    from service.sessions.store import NewSession, Sessions, SessionSettings
    from tests.testing.doubles import MemoryTransport, ScriptedLoader, ScriptedPolicy

    trace = Trace(Path(str(service.__file__)).parent)
    transport, policy = MemoryTransport(), ScriptedPolicy()
    sessions = Sessions(
        transport=transport,
        load=ScriptedLoader(lambda: policy),
        engine=Engine(),
        settings=SessionSettings(),
    )
    new = NewSession("traced", "policy", "memory://", rate=50)
    await sessions.create(replace(new, camera_names=("front",)))
    await sessions.start("traced")
    await asyncio.sleep(0.2)
    link = transport.link
    joints = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
    trace.begin()
    delivered_at = -math.inf
    while not link.sent:
        if time.monotonic() - delivered_at > 0.2:  # Repeat the frame because it expires on a slow machine.
            for camera in link.rooms.cameras:
                link.deliver_frame(camera, np.zeros((48, 64, 3), np.uint8))
            link.deliver_joints(dict.fromkeys(joints, 0.0))
            delivered_at = time.monotonic()
        await asyncio.sleep(0)
    trace.end()
    await sessions.close()
    return trace


def trace_page(trace: Trace) -> str:
    """Return the counts of a trace as text."""
    functions = dict.fromkeys((call.file, call.function) for call in trace.calls)
    on_loop = {(call.file, call.function) for call in trace.calls if call.thread == threading.main_thread().name}
    files = Counter(file for file, _ in functions)
    head = (
        f"\nfrom a frame to its command: {len(files)} files and {len(functions)} functions of service, "
        f"{len(trace.calls)} calls, {trace.returns()} returns to a file that was left; "
        f"on the event loop {len({file for file, _ in on_loop})} files and {len(on_loop)} functions; "
        f"calls back into a caller: {sum(call.is_callback for call in trace.calls)}"
    )
    lines = [
        f"  {count:3} {file}: {', '.join(name for path, name in functions if path == file)}"
        for file, count in files.most_common()
    ]
    return "\n".join([head, *lines])


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-trace", action="store_true", help="read only the source and run no trace")
    arguments = parser.parse_args()
    print(page())
    if not arguments.no_trace:
        sys.path.insert(0, str(ROOT))
        print(trace_page(asyncio.run(trace_of_a_frame())))


if __name__ == "__main__":
    main()
