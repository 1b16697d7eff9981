"""Tool calls in what a policy wrote. No I/O; whatever is written, it raises nothing.

Two forms are read: Hermes, `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere in the
text, and OpenAI, where the whole text is JSON: one call, a list of them, or a message with
`tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast

CallForm: TypeAlias = Literal["hermes", "openai", "any"]

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

MAX_CALL_CHARS: Final = 65_536
"""A longer call is malformed, and is not looked into."""

_MAX_DEPTH: Final = 32
"""Of nesting within arguments: what is deeper could not be stored with the conversation."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Something that was meant as a call and cannot be one."""

    reason: str
    name: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn, taken apart."""

    content: str
    """The text outside of calls."""
    calls: tuple[ToolCall | MalformedCall, ...]
    """In the order in which they were written."""


class _Malformed(Exception):
    pass


def parse_calls(text: str, *, form: CallForm = "any", max_calls: int = 16) -> Parsed:
    """The calls in a text; at most `max_calls` of them, and one that says that there were more.

    Example: parse_calls('Sum: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') has
    content "Sum:" and one ToolCall("add", {"a": 1}).
    """
    if form != "openai" and OPEN in text:
        return _hermes(text, max_calls)
    if form != "hermes":
        found = _openai(text, max_calls)
        if found is not None:
            return Parsed("", found)
    return Parsed(text, ())


def from_message(
    tool_calls: object, *, max_calls: int = 16
) -> tuple[ToolCall | MalformedCall, ...]:
    """Calls that a server parsed itself: the `tool_calls` of an OpenAI message."""
    if not isinstance(tool_calls, (list, tuple)):
        return (MalformedCall("tool_calls is not a list"),)
    calls = cast("list[object]", list(cast("Any", tool_calls[: max_calls + 1])))
    return _bounded([_call(entry) for entry in calls[:max_calls]], len(calls) > max_calls)


def _hermes(text: str, max_calls: int) -> Parsed:
    calls: list[ToolCall | MalformedCall] = []
    outside: list[str] = []
    at = 0
    while (begin := text.find(OPEN, at)) >= 0 and len(calls) < max_calls:
        outside.append(text[at:begin])
        call, at = _tagged(text, begin + len(OPEN))
        calls.append(call)
    outside.append(text[at : begin if begin >= 0 else len(text)])
    return Parsed("".join(outside).strip(), _bounded(calls, begin >= 0))


def _tagged(text: str, begin: int) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose JSON begins here, and where the text goes on behind its tag.

    The JSON says where it ends: a closing tag within one of its strings is part of it. The last
    tag may be missing, where a server stopped at it.
    """
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        value, end = _loads(text[begin : begin + MAX_CALL_CHARS])
        rest = text[begin + end :]
        if rest.lstrip().startswith(CLOSE):
            return _call(value), len(text) - len(rest.lstrip()) + len(CLOSE)
        if not rest.strip():
            return _call(value), len(text)
        problem = f"there is more than one JSON object before {CLOSE}"
    except _Malformed as error:
        problem = str(error)
    close = text.find(CLOSE, begin)
    if close < 0:
        return MalformedCall(f"{OPEN} is not closed ({problem})"), len(text)
    return MalformedCall(problem), close + len(CLOSE)


def _openai(text: str, max_calls: int) -> tuple[ToolCall | MalformedCall, ...] | None:
    """Calls, or None if the text is no call: an answer may well be JSON."""
    stripped = text.strip()
    if not stripped or stripped[0] not in "{[" or len(stripped) > MAX_CALL_CHARS:
        return None
    try:
        value, end = _loads(stripped)
    except _Malformed:
        return None
    if end < len(stripped):
        return None
    if isinstance(value, dict):
        message = cast("dict[str, Any]", value)
        if isinstance(message.get("tool_calls"), list):
            value = message["tool_calls"]
    entries = cast("list[object]", value if isinstance(value, list) else [value])
    if not entries or not all(map(_looks_like_a_call, entries)):
        return None
    return _bounded([_call(entry) for entry in entries[:max_calls]], more=len(entries) > max_calls)


def _bounded(
    calls: list[ToolCall | MalformedCall], more: bool
) -> tuple[ToolCall | MalformedCall, ...]:
    if more:
        calls = [*calls, MalformedCall(f"only the first {len(calls)} calls of a turn are made")]
    return tuple(calls)


def _looks_like_a_call(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    call = cast("dict[str, Any]", entry)
    if isinstance(call.get("function"), dict):
        return "name" in call["function"]
    return "name" in call and ("arguments" in call or "parameters" in call)


def _call(entry: object) -> ToolCall | MalformedCall:
    """One call of either form."""
    if not isinstance(entry, Mapping):
        return MalformedCall("a call is a JSON object with name and arguments")
    outer = cast("Mapping[str, Any]", entry)
    inner = cast("object", outer.get("function", outer))
    id = outer.get("id")
    id = id if isinstance(id, str) and _is_unicode(id) else ""
    if not isinstance(inner, Mapping):
        return MalformedCall("its function is not an object", id=id)
    call = cast("Mapping[str, Any]", inner)
    name = call.get("name")
    if not isinstance(name, str) or not name or not _is_unicode(name):
        return MalformedCall("it has no name", id=id)
    arguments: object = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # OpenAI's own way: JSON within JSON
        try:
            arguments = _loads(arguments.strip())[0] if arguments.strip() else {}
        except _Malformed as error:
            return MalformedCall(f"its arguments: {error}", name, id)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall("its arguments are not an object", name, id)
    return ToolCall(name, cast("dict[str, Any]", arguments), id)


def _loads(text: str) -> tuple[object, int]:
    """The JSON value that a text begins with, and where it ends.

    By the book: no NaN, nothing deep, nothing that is no Unicode.

    Raises:
        _Malformed: it is not.
    """
    if len(text) > MAX_CALL_CHARS:
        raise _Malformed(f"longer than {MAX_CALL_CHARS} characters")
    try:
        value, end = cast("tuple[object, int]", _DECODER.raw_decode(text))
    except RecursionError:
        raise _Malformed(f"nested deeper than {_MAX_DEPTH}") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise _Malformed(f"not valid JSON: {error}") from None
    if _depth_exceeds(value, _MAX_DEPTH):
        raise _Malformed(f"nested deeper than {_MAX_DEPTH}")
    if not _is_unicode(json.dumps(value, ensure_ascii=False)):
        raise _Malformed("a character that is no Unicode")
    return value, end


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


def _depth_exceeds(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in cast(
                "list[object]",
                list(cast("dict[str, object]", node).values()) if isinstance(node, dict) else node,
            )
        ]
        if not level:
            return False
    return True


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
