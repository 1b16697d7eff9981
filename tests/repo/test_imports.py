"""Who may import whom. A file that does not exist yet breaks no rule."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.repo.tree import Import, Module, modules, under

PURE = (
    "dataplane.errors",
    "dataplane.fields",
    "dataplane.types",
    "dataplane.checkpoint.heads",
    "dataplane.checkpoint.manifest",
    "dataplane.checkpoint.tables",
    "dataplane.checkpoint.values",
    "dataplane.tags",
    "dataplane.values.holds",
    "dataplane.values.extents",
    "dataplane.values.blocks",
    "dataplane.codec",
    "dataplane.wire.frames",
    "dataplane.protocol.values",
    "dataplane.protocol.cells",
    "dataplane.report.chart",
    "dataplane.report.data",
    "dataplane.report.figures",
    "dataplane.report.lives",
    "dataplane.report.markup",
    "dataplane.report.record",
    "dataplane.report.run_record",
    "dataplane.report.sections",
    "dataplane.report.style",
    "dataplane.report.timeline",
    "dataplane.gateway.access.binding",
    "dataplane.gateway.trajectory.ingest",
    "dataplane.gateway.access.limits",
    "dataplane.gateway.trajectory.quarantine",
    "dataplane.gateway.access.roles",
    "dataplane.gateway.trajectory.sequences",
    "dataplane.gateway.calls.uploads",
    "dataplane.producer.trajectory",
    "agentloop.production.accounting",
    "agentloop.adapters",
    "agentloop.capture.asking",
    "agentloop.capture.answering",
    "agentloop.capture.recording",
    "agentloop.capture.turn",
    "agentloop.capture.tree",
    "agentloop.capture.ending",
    "agentloop.capture.starting",
    "agentloop.capture.steps",
    "agentloop.capture.plain",
    "agentloop.capture.refusals",
    "agentloop.trajectory.canonicalize",
    "agentloop.trajectory.experts",
    "agentloop.groups.job",
    "agentloop.trajectory.meta",
    "agentloop.groups.outcome",
    "agentloop.trajectory.positions",
    "agentloop.trajectory.rows",
    "agentloop.trajectory.staleness",
    "agentloop.trajectory.state",
    "agentloop.production.split",
    "agentloop.engines.retry",
    "agentloop.engines.script",
    "agentloop.engines.shapes",
    "agentloop.tools.parse",
    "agentloop.trajectory.trace",
    "trainer.batch",
    "trainer.errors",
    "trainer.evaluate",
    "trainer.loop.decisions",
    "trainer.report.names",
    "trainer.report.plane_share",
    "trainer.report.throughput",
    "trainer.rollouts",
    "trainer.replay_buffer.snapshot",
    "trainer.trajectory",
    "trainer.select",
    "trainer.advantage",
    "trainer.materialize",
    "trainer.plan",
    "trainer.loss",
)
"""They do no I/O and take time and randomness as arguments, so they are tested bare."""

NOT_PURE = {f"dataplane.tags.{name}" for name in ("journal", "journal_folder", "journal_verify")}
"""Files among those that are there for I/O."""

IO_MODULES = frozenset(
    "_thread asyncio concurrent datetime fcntl grpc http io logging mmap multiprocessing os "
    "pathlib queue random ray requests resource secrets select selectors shutil signal socket "
    "sqlite3 ssl subprocess tempfile threading time urllib uuid uvloop".split()
)

PUBLIC_MODULES = {"fields"}
"""Besides the names of `dataplane` itself: the table of a trajectory's fields and tags."""

SERVER_SIDE = (
    "dataplane.server",
    "dataplane.tags",
    "dataplane.values",
    "dataplane.wire",
    "dataplane.host",
)
"""Values are opaque to them; they must start where torch is not installed."""

RAY_HOST = "dataplane.host.ray"

OUTSIDE = ("dataplane.producer", "dataplane.protocol", "dataplane.v1")
OUTSIDE_NEEDS = {"google", "grpc", "numpy"}
"""Producers outside a cluster install these, and nothing else of others."""

PRODUCER_LOADER = "trainer.run"
"""The one exception: it loads the producer by the dotted name in its config, behind a Protocol."""


def _own(module: Module) -> Iterator[Import]:
    """Imports of this repository's modules."""
    return (i for i in module.imports if i.module in modules())


def _running(module: Module) -> Iterator[Import]:
    """Imports that run, now or when a function is called."""
    return (i for i in module.imports if not i.typing_only)


def _reached(start: Module, *, functions: bool) -> Iterator[tuple[Module, list[str]]]:
    """Every own module that `start` pulls in, itself included, and the way there.

    The `__init__` of a package runs before its modules do, but who imports a module does not
    choose it: only explicit imports count.
    """
    seen = {start.name}
    todo: list[tuple[Module, list[str]]] = [(start, [start.name])]
    while todo:
        module, way = todo.pop()
        yield module, way
        for found in _own(module):
            counts = not found.typing_only and (functions or found.at_import_time)
            if counts and found.module not in seen:
                seen.add(found.module)
                todo.append((modules()[found.module], [*way, found.module]))


def test_pure_files_do_no_io() -> None:
    wrong = [
        f"{' -> '.join(way)} imports {found.module} (line {found.line})"
        for name, start in modules().items()
        if name not in NOT_PURE
        if any(under(name, pure) for pure in PURE) or _says_it_is_pure(start)
        for module, way in _reached(start, functions=True)
        for found in _running(module)
        if found.module.split(".")[0] in IO_MODULES
    ]
    assert not wrong, "\n".join(wrong)


def _says_it_is_pure(module: Module) -> bool:
    """Whether its own first paragraph claims it."""
    said = " ".join((ast.get_docstring(module.tree) or "").split("\n\n")[0].split())
    return said.endswith("Pure.") or ". Pure: " in said or said.startswith("Pure: ")


def test_every_io_module_named_here_exists() -> None:
    installed = IO_MODULES - {"grpc", "ray", "requests", "uvloop"}
    assert installed <= sys.stdlib_module_names


@pytest.mark.parametrize("package", ["dataplane", "agentloop", "trainer"])
def test_packages_keep_their_direction(package: str) -> None:
    allowed = {package} if package == "dataplane" else {package, "dataplane"}
    wrong = [
        f"{module.where}:{found.line} imports {found.module}"
        for module in modules().values()
        if under(module.name, package)
        for found in module.imports
        for other in ("dataplane", "agentloop", "trainer", "tests")
        if under(found.module, other) and other not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_clients_use_only_public_names_of_the_dataplane() -> None:
    public = _public_names()
    wrong: list[str] = []
    for module in modules().values():
        if under(module.name, "dataplane"):
            continue
        for found in module.imports:
            if not under(found.module, "dataplane"):
                continue
            taken = found.module.removeprefix("dataplane").lstrip(".") or found.name
            if taken is not None and taken not in public and taken not in PUBLIC_MODULES:
                wrong.append(f"{module.where}:{found.line} takes {found.module} {found.name or ''}")
    assert not wrong, "\n".join(wrong)


def _public_names() -> set[str]:
    """What `dataplane/__init__.py` shows a type checker; test_exports says it equals `__all__`."""
    face = modules().get("dataplane")
    return {i.name or i.module.removeprefix("dataplane.") for i in face.imports} if face else set()


def test_the_trainer_loads_code_by_name_in_one_place_only() -> None:
    wrong = [
        f"{module.where}:{node.lineno}"
        for module in modules().values()
        if under(module.name, "trainer") and module.name != PRODUCER_LOADER
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
    ]
    assert not wrong, "\n".join(wrong)


def test_servers_need_neither_torch_nor_ray() -> None:
    wrong = [
        f"{' -> '.join(way)} imports {found.module} (line {found.line})"
        for name, start in modules().items()
        if any(under(name, side) for side in SERVER_SIDE) and not under(name, RAY_HOST)
        for module, way in _reached(start, functions=False)
        for found in _running(module)
        if found.module.split(".")[0] in ("torch", "tensordict", "ray")
        # Inside a function it is somebody else's choice to call it, except in these files.
        and (found.at_import_time or module is start)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_server_process_loads_neither_torch_nor_ray() -> None:
    """The same, seen in a real process: third parties may pull things in too."""
    code = "import sys, dataplane.server.process; print({'torch', 'ray'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "set()"


def test_producers_outside_need_grpc_protobuf_and_numpy_only() -> None:
    """Status details of google.rpc are made where their package is, which is at gateways."""
    wrong = [
        f"{' -> '.join(way)} imports {found.module} (line {found.line})"
        for name, start in modules().items()
        if any(under(name, part) for part in OUTSIDE)
        for module, way in _reached(start, functions=True)
        for found in _running(module)
        for top in [found.module.split(".")[0]]
        if top not in sys.stdlib_module_names | OUTSIDE_NEEDS | {"dataplane"}
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions count: they hide a cycle and do not end it."""
    graph = {
        name: {found.module for found in _own(module) if not found.typing_only} - {name}
        for name, module in modules().items()
    }
    cycles = [part for part in _strong_components(graph) if len(part) > 1]
    assert not cycles, "\n".join(" <-> ".join(sorted(part)) for part in cycles)


def _strong_components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm; recursion depth is the number of modules."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for after in graph[node]:
            if after not in order:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], order[after])
        if low[node] == order[node]:
            part: list[str] = []
            while not part or part[-1] != node:
                part.append(stack.pop())
            found.append(part)

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_the_cycle_check_finds_a_cycle() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert sorted(map(sorted, _strong_components(graph))) == [["a", "b", "c"], ["d"]]
