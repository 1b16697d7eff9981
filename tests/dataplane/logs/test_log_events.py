"""Every error and warning that the source can log is in docs/logs.md, under its level, and no other
is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from tests.repo.tree import ROOT, Module, modules

PAGE: Final = ROOT / "docs" / "logs.md"
LOGGERS: Final = frozenset({"log", "_log", "logger", "_logger", "LOG", "logging"})
LEVEL_OF: Final = {
    "warning": "warning", "warn": "warning", "error": "error", "exception": "error",
    "critical": "error", "fatal": "error",
}  # fmt: skip
QUIET: Final = frozenset({"debug", "info"})
LEVELS: Final = frozenset({*LEVEL_OF, *QUIET, "log"})


def _calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls of a module's loggers, with the method's name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if isinstance(of, ast.Name) and of.id in LOGGERS and node.func.attr in LEVELS:
                yield node.func.attr, node


def _template(call: ast.Call) -> str | None:
    """What is logged, where the source says it as it is."""
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and type(first.value) is str else None


def _logged() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"error": set(), "warning": set()}
    for module in modules().values():
        for method, call in _calls(module):
            level = LEVEL_OF.get(method)
            if level is not None:
                found[level].add((_template(call) or "").replace("`", ""))
    return found


def _documented(level: str) -> list[str]:
    """The events of the page's table of a level."""
    heading = {"error": "## Errors", "warning": "## Warnings"}[level]
    part = PAGE.read_text().split(heading, 1)[1].split("\n## ", 1)[0]
    return [line.split("|")[1].strip().strip("`") for line in re.findall(r"^\| `.*", part, re.M)]


def test_what_is_logged_is_written_as_it_is() -> None:
    """Its facts are arguments: an event can be looked for, and text of others is never a format."""
    wrong = [
        f"{module.where}:{call.lineno}"
        for module in modules().values()
        for method, call in _calls(module)
        if method == "log" or _template(call) is None
    ]
    assert not wrong, "\n".join(wrong)


def test_no_event_is_nothing_but_text_of_others() -> None:
    wrong = [
        f"{module.where}:{call.lineno}: {template}"
        for module in modules().values()
        for method, call in _calls(module)
        if method not in QUIET
        and not re.search(r"[a-z]{2}", re.sub(r"%[-\w.]*", "", template := _template(call) or ""))
    ]
    assert not wrong, "\n".join(wrong)


def test_each_error_and_warning_is_in_the_page_under_its_level() -> None:
    logged = _logged()
    for level in ("error", "warning"):
        rows = _documented(level)
        assert len(rows) == len(set(rows)), level
        assert set(rows) == logged[level], (
            level, "not in the page:", logged[level] - set(rows),
            "not in the source:", set(rows) - logged[level],
        )  # fmt: skip


def test_loggers_are_named_by_their_tree() -> None:
    """`dataplane.…`, so that one setting reaches all; but those of the package that is stood in
    for have its names."""
    wrong: list[str] = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                given = node.args[0] if node.args else None
                if isinstance(given, ast.Constant) and given.value != "math_verify":
                    tree = module.name.split(".")[0]
                    stands_in = module.name.startswith("dataplane.compat.")
                    own = str(given.value).split(".")[0]
                    if own != tree and not (stands_in and own == "transfer_queue"):
                        wrong.append(f"{module.where}:{node.lineno} {given.value}")
    assert not wrong, "\n".join(wrong)
