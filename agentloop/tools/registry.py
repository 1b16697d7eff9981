"""Tools by name, for configuration files."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentloop.dotted import load
from agentloop.tools.function import from_function
from agentloop.tools.types import Tool


def make_tools(config: Sequence[str | Mapping[str, Any]]) -> list[Tool]:
    """The tools that a configuration names.

    An entry is a dotted name, `package.module:name`, or a map with `tool`, that name, and
    `arguments` for what it names. A class, or anything with arguments, is called; a function is
    made a tool as it is; anything else must be a tool already.

    Example: make_tools(["agentloop.tools.calculator:Calculator"])

    Raises:
        ValueError: a name leads nowhere, or to no tool, or two tools have the same name.
    """
    tools: list[Tool] = []
    for entry in config:
        named: dict[str, Any] = {"tool": entry} if isinstance(entry, str) else dict(entry)
        if "tool" not in named or set(named) - {"tool", "arguments"}:
            raise ValueError(f"a tool is configured by `tool` and `arguments`, not {named!r}")
        found: Any = load(named["tool"])
        if "arguments" in named or inspect.isclass(found):
            found = found(**named.get("arguments", {}))
        if inspect.isroutine(found):
            found = from_function(found)
        if not callable(found) or not isinstance(getattr(found, "name", None), str):
            raise ValueError(f"{named['tool']} is no tool: it has no `name`, or cannot be called")
        tools.append(cast("Tool", found))
    names = [tool.name for tool in tools]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two tools are named {', '.join(sorted(twice))}")
    return tools
