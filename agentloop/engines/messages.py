"""What an engine's process and its owner say to each other. Owns the form of a frame.

A frame is its length and a msgpack list. The owner asks `[number, verb, arguments]`, and the
process answers `[number, outcome, value]`: outcome is `done`, or which error it was. Verbs are
start, generate, abort, cancel, pause, resume, update and ping. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

import msgpack
import numpy as np

from agentloop.engines.types import Completion, EngineError, Request, Sampling, WeightsError

MAX_FRAME_BYTES: Final = 1 << 30
_LENGTH: Final = struct.Struct("<Q")

DONE: Final = "done"
ERRORS: Final[Mapping[str, type[EngineError]]] = {"engine": EngineError, "weights": WeightsError}
FAULT: Final = "fault"
"""Outcome of a request that met a bug; the value names the exception."""


def error_of(outcome: str, value: Any) -> EngineError:
    """The error that an answer stands for."""
    return ERRORS.get(outcome, EngineError)(str(value))


def outcome_of(error: Exception) -> tuple[str, str]:
    """An error as it travels."""
    if isinstance(error, WeightsError):
        return "weights", str(error)
    if isinstance(error, EngineError):
        return "engine", str(error)
    return FAULT, f"{type(error).__name__}: {error}"


async def read_frame(reader: asyncio.StreamReader) -> list[Any]:
    """The next message. EOFError when the other side is gone."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MAX_FRAME_BYTES:
            raise EngineError(f"a message of {size} bytes; at most {MAX_FRAME_BYTES} are taken")
        return msgpack.unpackb(await reader.readexactly(size), use_list=True)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other side is gone") from error


def write_frame(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    """Send a message, in full or not at all."""
    body = msgpack.packb(message)
    writer.write(_LENGTH.pack(len(body)) + body)


def pack_request(request: Request) -> dict[str, Any]:
    """A request as plain data."""
    plain = {part.name: getattr(request, part.name) for part in fields(request)}
    plain["token_ids"] = [int(token) for token in request.token_ids]
    plain["sampling"] = asdict(request.sampling)
    plain["messages"] = [dict(message) for message in request.messages]
    plain["tools"] = [dict(tool) for tool in request.tools]
    return plain


def unpack_request(plain: dict[str, Any]) -> Request:
    sampling: dict[str, Any] = plain["sampling"]
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling[name])
    plain["sampling"] = Sampling(**sampling)
    return Request(**plain)


def pack_completion(completion: Completion) -> dict[str, Any]:
    """A completion as plain data; experts as dtype, shape and bytes."""
    plain = {part.name: getattr(completion, part.name) for part in fields(completion)}
    experts = completion.routed_experts
    if experts is not None:
        plain["routed_experts"] = [
            experts.dtype.str,
            list(experts.shape),
            np.ascontiguousarray(experts).tobytes(),
        ]
    return plain


def unpack_completion(plain: dict[str, Any]) -> Completion:
    experts = plain["routed_experts"]
    if experts is not None:
        dtype, shape, data = experts
        plain["routed_experts"] = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    return Completion(**plain)
