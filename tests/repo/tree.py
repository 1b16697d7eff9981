"""The repository's own modules and what each imports, read from source without importing any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dataplane", "agentloop", "trainer")


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module."""

    module: str
    """The module that runs: `a.b` for `from a.b import c`, unless `a.b.c` is a module itself."""
    name: str | None
    """The name taken from it, if it is not a module."""
    line: int
    at_import_time: bool
    """Not inside a function."""
    typing_only: bool
    """Under `if TYPE_CHECKING`, so it never runs."""


@dataclass(slots=True)
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[Import] = field(default_factory=list[Import])

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def modules() -> dict[str, Module]:
    """Every module of the three packages, by dotted name."""
    found: dict[str, Module] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    for module in found.values():
        module.imports = list(_imports(module.tree, found))
    return found


def _imports(tree: ast.Module, known: dict[str, Module]) -> Iterator[Import]:
    """Every import statement, one item per module or name."""

    def walk(node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, None, child.lineno, not in_function, typing_only)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    module, name = (whole, None) if whole in known else (base, alias.name)
                    yield Import(module, name, child.lineno, not in_function, typing_only)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), in_function, True)
                for statement in child.orelse:
                    yield from walk(ast.Module([statement], []), in_function, typing_only)
            else:
                yield from walk(child, inside, typing_only)

    yield from walk(tree, False, False)


def under(name: str, prefix: str) -> bool:
    """Whether `name` is that module or lies in that package."""
    return name == prefix or name.startswith(prefix + ".")
