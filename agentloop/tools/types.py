"""What a tool is, and how one is called: whatever happens becomes an observation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from agentloop.tools.parse import MalformedCall, ToolCall


class ToolError(Exception):
    """A tool refuses its arguments; the policy is told the message as it stands."""


class Tool(Protocol):
    """Something that the policy may call. Safe for many sessions of one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, an object."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> object:
        """The observation: a text, or what is told as JSON. An exception is told, too."""
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """The tool as a chat template and a server of OpenAI's kind take it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


async def observe(
    call: ToolCall | MalformedCall,
    tools: Mapping[str, Tool],
    *,
    timeout_s: float,
    max_chars: int,
) -> str:
    """What the policy is told of its call. Raises nothing but the cancellation of its caller.

    A call that cannot be read, a tool that is not there, fails, or takes longer than `timeout_s`:
    each is told in a line that begins with `error:`. A longer text is cut to `max_chars`.
    """
    if isinstance(call, MalformedCall):
        return cut(f"error: the call could not be read: {call.reason}", max_chars)
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(sorted(tools)) or "none"
        return cut(f"error: there is no tool {call.name!r}; there are: {known}", max_chars)
    work = asyncio.ensure_future(_told(tool, call))
    try:
        # Not `asyncio.timeout`: that would wait for a tool that does not let itself be cancelled.
        await asyncio.wait({work}, timeout=timeout_s)
    finally:
        if not work.done():
            work.cancel()
    if not work.done():
        return cut(f"error: {call.name} took longer than {timeout_s:g} s", max_chars)
    return cut(
        f"error: {call.name} was cancelled" if work.cancelled() else work.result(), max_chars
    )


async def _told(tool: Tool, call: ToolCall) -> str:
    """The text of what comes of a call, failures too."""
    try:
        return text_of(await tool(call.arguments))
    except ToolError as error:
        return f"error: {_said(error)}"
    except (Exception, SystemExit) as error:
        return f"error: {call.name} failed: {type(error).__name__}: {_said(error)}"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a tool may raise anything
        return "it does not say why"


def text_of(result: object) -> str:
    """A tool's result as the text that the policy reads."""
    if isinstance(result, str):
        return result
    if isinstance(result, Sequence) and not isinstance(result, (bytes, bytearray)):
        parts = cast("Sequence[Any]", result)
        if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "\n".join(
                str(part["text"]) if part["type"] == "text" else f"[{part['type']} left out]"
                for part in parts
            )
    return json.dumps(result, ensure_ascii=False, default=str)


def cut(text: str, max_chars: int) -> str:
    """The text, or its beginning and how much is missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} more characters]"
