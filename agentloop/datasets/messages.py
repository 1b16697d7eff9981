"""Chat messages as rows of files have them, in the one form that loops and templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentloop.datasets.plain import plain
from agentloop.trajectory.state import Message


def messages_of(value: object, system_prompt: str | None = None) -> list[Message]:
    """A conversation from a list of messages or from a plain text of the user.

    Entries that are None are left out, at every depth: a parquet file gives each message all names
    that any message has, and chat templates ask whether a name is there. `system_prompt` goes
    first where the conversation has no system message.

    Example: messages_of("2+2?") == [{"role": "user", "content": "2+2?"}]

    Raises:
        ValueError: it is no conversation; the message says why.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    listed = _list(value)
    if not listed:
        raise ValueError(f"a prompt is text or a list of messages; got {_shown(value)}")
    messages = [_message(one, position) for position, one in enumerate(listed)]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def tools_of(value: object) -> list[dict[str, Any]]:
    """Schemas of tools from a list, or from its JSON text; [] where there is none.

    Raises:
        ValueError: it is no list of maps.
    """
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = json.loads(value)
    listed = _list(value)
    if listed is None:
        raise ValueError(f"tools are a list of schemas; got {_shown(value)}")
    schemas = [_without_none(plain(schema)) for schema in listed]
    if not all(isinstance(schema, dict) for schema in schemas):
        raise ValueError(f"the schema of a tool is a map; got {_shown(value)}")
    return schemas


def _message(value: Any, position: int) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"message {position} is a {type(value).__name__}, not a map")
    message = _without_none(plain(value))
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"message {position} has no role; it has {', '.join(message) or 'nothing'}"
        )
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"message {position} ({role}) has no content")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"the content of message {position} is a {type(content).__name__}")
    return message


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value).items()
        return {name: _without_none(entry) for name, entry in entries if entry is not None}
    if isinstance(value, list):
        return [_without_none(entry) for entry in cast(list[Any], value)]
    return value


def _list(value: Any) -> list[Any] | None:
    return list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:120]
