"""Errors as gRPC statuses, and back: the same classes and attributes on both sides.

Owns the table of codes. A status carries our own `Error` message in its trailers, and google.rpc's
details for clients that know those only; both are cut to what trailers may hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import grpc

from dataplane import errors
from dataplane.errors import ERRORS, DataplaneError, DeadlineExceeded, InternalError, RateLimited
from dataplane.protocol.values import from_value, to_value
from dataplane.v1 import dataplane_pb2 as pb

Code = grpc.StatusCode

ERROR_KEY: Final = "dataplane-error-bin"
DETAILS_KEY: Final = "grpc-status-details-bin"
DOMAIN: Final = "dataplane"

MAX_MESSAGE: Final = 1024
"""Characters of a message that travel."""
MAX_LISTED_BYTES: Final = 1536
"""Bytes of a list of names that travel; gRPC's clients take 8 KiB of trailers altogether."""

CODES: Final[Mapping[type[DataplaneError], grpc.StatusCode]] = {
    errors.InvalidRequest: Code.INVALID_ARGUMENT,
    errors.OutOfRange: Code.OUT_OF_RANGE,
    errors.PartitionNotFound: Code.NOT_FOUND,
    errors.KeyNotFound: Code.NOT_FOUND,
    errors.FieldNotFound: Code.NOT_FOUND,
    errors.WeightsNotFound: Code.NOT_FOUND,
    errors.AlreadyWritten: Code.ALREADY_EXISTS,
    errors.SchemaMismatch: Code.FAILED_PRECONDITION,
    errors.StaleWrite: Code.ABORTED,
    errors.ClaimLost: Code.ABORTED,
    errors.TooOld: Code.ABORTED,
    errors.Unauthenticated: Code.UNAUTHENTICATED,
    errors.PermissionDenied: Code.PERMISSION_DENIED,
    errors.RequestError: Code.INVALID_ARGUMENT,
    errors.QuotaExceeded: Code.RESOURCE_EXHAUSTED,
    errors.RateLimited: Code.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: Code.DEADLINE_EXCEEDED,
    errors.Unreachable: Code.UNAVAILABLE,
    errors.PlaneLost: Code.FAILED_PRECONDITION,
    errors.OutcomeUnknown: Code.UNKNOWN,
    errors.ValueLost: Code.DATA_LOSS,
    errors.CheckpointDamaged: Code.DATA_LOSS,
    errors.JournalDamaged: Code.DATA_LOSS,
    errors.InternalError: Code.INTERNAL,
    errors.DataplaneError: Code.INTERNAL,
}

_BY_CODE: Final[Mapping[grpc.StatusCode, type[DataplaneError]]] = {
    Code.INVALID_ARGUMENT: errors.InvalidRequest,
    Code.OUT_OF_RANGE: errors.InvalidRequest,
    Code.UNIMPLEMENTED: errors.InvalidRequest,
    Code.NOT_FOUND: errors.KeyNotFound,
    Code.ALREADY_EXISTS: errors.AlreadyWritten,
    Code.ABORTED: errors.StaleWrite,
    Code.FAILED_PRECONDITION: errors.PlaneLost,
    Code.UNAUTHENTICATED: errors.Unauthenticated,
    Code.PERMISSION_DENIED: errors.PermissionDenied,
    Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    Code.UNAVAILABLE: errors.Unreachable,
    Code.CANCELLED: errors.Unreachable,
    Code.RESOURCE_EXHAUSTED: errors.QuotaExceeded,
    Code.DATA_LOSS: errors.ValueLost,
}
"""What a status without an `Error` of ours is taken for: it comes from gRPC or a proxy."""


def code_of(error: DataplaneError) -> grpc.StatusCode:
    """The status code of an error."""
    for cls in type(error).__mro__:
        code = CODES.get(cast("type[DataplaneError]", cls))
        if code is not None:
            return code
    return Code.INTERNAL


def trailers_of(error: DataplaneError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata of an error."""
    trailers = [(ERROR_KEY, _message_of(error).SerializeToString())]
    details = _details_of(error)
    if details is not None:
        trailers.append((DETAILS_KEY, details))
    return tuple(trailers)


def error_of(
    code: grpc.StatusCode | None,
    details: str | None,
    trailers: Sequence[tuple[str, str | bytes]] | None,
) -> DataplaneError:
    """The error that a status stands for."""
    for name, value in trailers or ():
        if name == ERROR_KEY and isinstance(value, bytes):
            error = _from_message(value)
            if error is not None:
                return error
    cls = _BY_CODE.get(code, InternalError) if code is not None else InternalError
    said = f"{code.name if code else 'no status'}: {details or 'no reason is given'}"
    if cls is errors.QuotaExceeded and "message" in said and "larger" in said:
        return errors.InvalidRequest(f"{said} (a message is larger than its receiver takes)")
    if cls is DeadlineExceeded:
        return DeadlineExceeded(said, waited_s=math.nan)
    if code is Code.UNIMPLEMENTED:
        return errors.InvalidRequest(
            f"the gateway does not offer this call: it is older than this client ({said})"
        )
    return cls(said)


def _message_of(error: DataplaneError) -> pb.Error:
    message = pb.Error(type=type(error).__name__, message=error.message[:MAX_MESSAGE])
    for name in error.attributes:
        value = getattr(error, name)
        if value is None:
            continue
        if isinstance(value, list):
            value, left_out = _cut(cast("list[Any]", value))
            if left_out:
                message.attributes[f"{name}_left_out"].int_value = left_out
        elif isinstance(value, str):
            value = value[:MAX_MESSAGE]
        message.attributes[name].CopyFrom(to_value(value))
    return message


def _cut(names: list[Any]) -> tuple[list[Any], int]:
    """As many of the names as fit, and how many do not."""
    room = MAX_LISTED_BYTES
    for i, name in enumerate(names):
        room -= len(str(name).encode("utf-8", "replace")) + 4
        if room < 0:
            return names[:i], len(names) - i
    return names, 0


def _from_message(data: bytes) -> DataplaneError | None:
    message = pb.Error()
    try:
        message.ParseFromString(data)
        told = {name: from_value(value) for name, value in message.attributes.items()}
    except Exception:  # it comes from the other side, and the status itself still says something
        return None
    cls = ERRORS.get(message.type)
    if cls is None:
        return InternalError(f"{message.type}: {message.message}")
    return cls(message.message, **{name: told.get(name) for name in cls.attributes})


def _details_of(error: DataplaneError) -> bytes | None:
    """google.rpc.Status with its details, where their package is installed."""
    try:
        from google.protobuf import any_pb2
        from google.rpc import error_details_pb2 as rpc
        from google.rpc import status_pb2
    except ImportError:
        return None
    status: Any = status_pb2.Status(
        code=code_of(error).value[0], message=error.message[:MAX_MESSAGE]
    )

    def add(detail: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)

    details: Any = rpc
    add(details.ErrorInfo(reason=type(error).__name__, domain=DOMAIN))
    if isinstance(error, errors.InvalidRequest):
        violation = details.BadRequest.FieldViolation(description=error.message[:256])
        add(details.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QuotaExceeded | RateLimited):
        subject = getattr(error, "limit", None) or "store"
        violation = details.QuotaFailure.Violation(
            subject=str(subject), description=error.message[:256]
        )
        add(details.QuotaFailure(violations=[violation]))
    if isinstance(error, RateLimited) and error.retry_after_s:
        retry = details.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        add(retry)
    return status.SerializeToString()
