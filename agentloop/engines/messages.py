"""What an engine's process and its owner say to each other, as plain data. See `processes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

import numpy as np

from agentloop.engines.types import Completion, EngineError, Request, Sampling, WeightsError

ERRORS: Final[Mapping[str, type[EngineError]]] = {
    "": EngineError, "engine": EngineError, "weights": WeightsError
}  # fmt: skip
"""Errors that cross as what they are; a bug of the engine is an EngineError that names it."""


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
