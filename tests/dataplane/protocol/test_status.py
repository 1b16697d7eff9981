"""Errors cross gRPC with their class and attributes, in trailers that any client can take."""

from __future__ import annotations

import math

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from dataplane import errors
from dataplane.errors import ERRORS, DataplaneError
from dataplane.protocol.status import CODES, DETAILS_KEY, code_of, error_of, trailers_of

SAMPLES = {
    "partition_id": "p",
    "keys": ["a", "b"],
    "fields": ["x"],
    "cleared_at": 3,
    "attempt": 4,
    "task": "t",
    "used_bytes": 1,
    "limit_bytes": 2,
    "oldest_keys": ["a"],
    "lagging_task": "t",
    "retry_after_s": 0.5,
    "limit": "calls",
    "waited_s": 1.5,
    "explanation": "why",
    "request_id": "c/1",
    "stores": ["s"],
    "path": "/x",
    "file": "f",
    "offset": 9,
}


@pytest.mark.parametrize("cls", ERRORS.values(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_code_and_comes_back_whole(cls: type[DataplaneError]) -> None:
    assert cls in CODES
    error = cls("what, which, and what to do", **{n: SAMPLES[n] for n in cls.attributes})
    back = error_of(code_of(error), error.message, trailers_of(error))
    assert type(back) is cls
    assert back.message == error.message
    assert {n: getattr(back, n) for n in cls.attributes} == {n: SAMPLES[n] for n in cls.attributes}


def test_trailers_stay_small_whatever_the_error_holds() -> None:
    keys = [f"key-{i}" * 40 for i in range(5000)]
    error = errors.KeyNotFound("x" * 100_000, keys=keys, partition_id="p" * 5000)
    trailers = trailers_of(error)
    assert sum(len(name) + len(value) for name, value in trailers) < 6000
    back = error_of(code_of(error), "", trailers)
    assert isinstance(back, errors.KeyNotFound)
    assert 0 < len(back.keys) < 5000
    assert back.keys == keys[: len(back.keys)]


def _details(error: DataplaneError) -> tuple[status_pb2.Status, set[str]]:
    status = status_pb2.Status.FromString(dict(trailers_of(error))[DETAILS_KEY])
    return status, {detail.type_url.rpartition(".")[2] for detail in status.details}


def test_standard_details_say_the_same_to_other_clients() -> None:
    status, kinds = _details(errors.InvalidRequest("bad"))
    assert (status.code, kinds) == (3, {"ErrorInfo", "BadRequest"})
    status, kinds = _details(errors.QuotaExceeded("full", used_bytes=1, limit_bytes=2))
    assert (status.code, kinds) == (8, {"ErrorInfo", "QuotaFailure"})
    error = errors.RateLimited("slower", retry_after_s=1.25, limit="calls")
    status, kinds = _details(error)
    assert kinds == {"ErrorInfo", "QuotaFailure", "RetryInfo"}
    retry = error_details_pb2.RetryInfo()
    assert status.details[2].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 1_250_000_000


@pytest.mark.parametrize(
    ("code", "said", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.Unreachable),
        (grpc.StatusCode.CANCELLED, "", errors.Unreachable),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.InvalidRequest),
        (grpc.StatusCode.UNKNOWN, "", errors.InternalError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (5000000 vs. 4194304)",
            errors.InvalidRequest,
        ),
        (None, None, errors.InternalError),
    ],
)
def test_a_status_of_grpc_or_a_proxy_is_an_error_too(
    code: grpc.StatusCode | None, said: str | None, cls: type[DataplaneError]
) -> None:
    assert type(error_of(code, said, None)) is cls
    assert type(error_of(code, said, [("dataplane-error-bin", b"\xff\xff")])) is cls


def test_a_deadline_of_grpc_names_no_time_that_it_does_not_know() -> None:
    error = error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", None)
    assert isinstance(error, errors.DeadlineExceeded)
    assert math.isnan(error.waited_s)
