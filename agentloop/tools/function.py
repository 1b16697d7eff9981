"""A Python function as a tool: its schema is read from signature and docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentloop.tools.threads import in_thread
from agentloop.tools.types import Tool, ToolError


class FunctionTool:
    """Calls a function with the arguments by name. See `from_function`."""

    def __init__(
        self,
        function: Callable[..., Any],
        schema: Mapping[str, Any],
        *,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """`run(function, **arguments)` returns an awaitable; without it a coroutine function is
        awaited and any other runs in a thread."""
        described = cast("Mapping[str, Any]", schema["function"])
        self.name: str = described["name"]
        self.description: str = described["description"]
        self.parameters: Mapping[str, Any] = described["parameters"]
        self._function = function
        self._signature = inspect.signature(function)
        self._run = run or (_awaited if inspect.iscoroutinefunction(function) else in_thread)

    async def __call__(self, arguments: Mapping[str, Any]) -> object:
        try:
            self._signature.bind(**arguments)
        except TypeError as error:
            wanted = ", ".join(self._signature.parameters)
            raise ToolError(f"{self.name}({wanted}): {error}") from None
        return await self._run(self._function, **arguments)


def from_function(function: Callable[..., Any]) -> Tool:
    """The tool that calls this function, a coroutine function or a blocking one.

    Every argument needs a type and a line in the docstring (Google style, `Args:`). A blocking
    function runs in a thread; one that has not come back in time is left to itself.

    Raises:
        ValueError: no schema can be read from it.
    """
    return FunctionTool(function, function_schema(function))


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function as OpenAI's tools have it.

    Raises:
        ValueError: no schema can be read from it.
    """
    from transformers.utils import chat_template_utils

    try:
        schema: dict[str, Any] = cast("Any", chat_template_utils).get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"{name} cannot be a tool: {error}; it needs types and a docstring with `Args:`"
        ) from error
    described = schema["function"]
    return {
        "type": "function",
        "function": {key: described[key] for key in ("name", "description", "parameters")},
    }


async def _awaited(function: Callable[..., Any], **arguments: Any) -> object:
    return await function(**arguments)
