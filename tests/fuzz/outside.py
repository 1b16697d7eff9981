"""What a stranger may send to a gateway: every request, values, columns with their bytes; and what
a gateway may answer; and token files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.gateway.access.roles import VERBS, Grant
from dataplane.gateway.access.token_records import Records
from dataplane.gateway.access.tokens import split_token
from dataplane.gateway.trajectory.ingest import ingest
from dataplane.gateway.trajectory.sequences import IngestRules
from dataplane.protocol.cells import arrays_of, cells_of, shape_from
from dataplane.protocol.reports import (
    claim_to,
    claims_from,
    key_from,
    key_to,
    stats_from,
    stats_to,
    store_to,
    stores_from,
    tally_from,
    tally_to,
    task_from,
    task_to,
    waiter_from,
    waiter_to,
)
from dataplane.protocol.status import ERROR_KEY, error_of, trailers_of
from dataplane.protocol.traces import row_from, row_to, summary_to, trace_from
from dataplane.protocol.values import (
    from_value,
    pack_object,
    tags_from,
    tags_to,
    to_value,
    unpack_object,
)
from dataplane.report.record import PlaneRecord, as_json, from_json
from dataplane.tags.keys import check_keys
from dataplane.tags.query import compile_where
from dataplane.v1 import dataplane_pb2 as pb
from tests.fuzz import messages, trees
from tests.fuzz.checkpoints import _json, _text
from tests.fuzz.target import KiB, MiB, Target

_SERVICE = pb.DESCRIPTOR.services_by_name["DataPlaneService"]
REQUESTS: list[type[Any]] = [getattr(pb, method.input_type.name) for method in _SERVICE.methods]
"""What each call takes, in the order of the contract."""
RULES = IngestRules(vocab_size=1000, max_tokens=4096)

# -- requests ----------------------------------------------------------------------------------


def _parsed(data: bytes) -> Message | None:
    if not data:
        return None
    message: Any = REQUESTS[data[0] % len(REQUESTS)]()
    try:
        message.ParseFromString(data[1:])
    except DecodeError:
        return None  # gRPC answers it: INTERNAL, before any of ours is asked
    return message


def _request(data: bytes) -> None:
    message = _parsed(data)
    if message is not None:
        _look_at(message)


def _look_at(message: Any) -> None:
    """Convert every part of a request as its call does. One refusal does not hide the next."""
    refused: InvalidRequest | None = None
    for part in _parts(message):
        try:
            _convert(part)
        except InvalidRequest as error:
            refused = error
    if refused is not None:
        raise refused


def _parts(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.name == "Value":
            if field.message_type is not None and not field.is_repeated:
                yield value
        elif messages._is_map(field):
            continue
        elif field.is_repeated:
            for inner in value:
                yield from _parts(inner)
        else:
            yield from _parts(value)


def _convert(part: Any) -> None:
    match part:
        case pb.Value():
            value = from_value(part)
            if value is None or type(value) is dict:
                assert compile_where(value).canonical
        case pb.Tags():
            again = tags_from(tags_to(tags_from(part)))
            assert _ordered(again) == _ordered(tags_from(part))
        case pb.PutRowsHeader():
            keys = check_keys(list(part.keys))
            shape = shape_from(part.columns, len(keys))
            assert shape.nbytes >= 0
            assert shape_from(shape.to_columns(), len(keys)).columns == shape.columns
        case pb.PutTagsRequest():
            check_keys(list(part.keys))
        case pb.PutTrajectoriesRequest():
            found = ingest(part.trajectories, RULES, attempt=max(part.attempt, 0))
            assert len(found.keys) + len(found.refused) == len(part.trajectories)
            if found.fields:
                cells_of(found.keys, found.fields)
        case _:
            pass


def _trajectory(index: int = 0, **parts: Any) -> pb.Trajectory:
    made = pb.Trajectory(
        uid="u", index=index, input_ids=[1, 2, 3, 4], labels=[-100, -100, 3, 4], prompt_len=2,
        logprobs=[0, 0, -0.5, -1.0], policy_spans=[pb.PolicySpan(version=3, start=0, end=2)],
        reward=1.0, finish_reason=pb.FINISH_REASON_STOP, num_turns=1, ids_source=1,
        logprob_kind="raw", tags=tags_to({"mine": 1}), messages=to_value([{"role": "user"}]),
        extra=to_value({"group_generate_time_s": 1.5}),
    )  # fmt: skip
    made.MergeFrom(pb.Trajectory(**parts))
    return made


def _headers() -> Iterator[pb.PutRowsRequest]:
    keys = ["a", "b"]
    fields: dict[str, Any] = {
        "x": [np.arange(3), np.arange(2)], "s": np.zeros(2, np.float32), "o": [{"n": 1}, (1, b"t")],
        "m": np.zeros((2, 2, 3), np.int8),
    }  # fmt: skip
    cells = cells_of(keys, fields)
    yield pb.PutRowsRequest(
        header=pb.PutRowsHeader(
            partition_id="p", keys=keys, columns=cells.shape.to_columns(),
            total_bytes=cells.shape.nbytes, tags=[tags_to({"n": 1})] * 2,
            request=pb.Request(client_id="c", number=1),
        )
    )  # fmt: skip
    top = (1 << 31) - 1
    for dims, lengths in (
        ([-1] * 8, [top] * 16), ([top] * 8, []), ([-1], [-1, 5]), ([-1], []), ([-2], [1, 1]),
        ([0] * 9, []), ([1 << 40], []),
    ):  # fmt: skip
        column = pb.Column(name="x", dtype="complex128", dims=dims, ragged_dim=0, lengths=lengths)
        yield pb.PutRowsRequest(header=pb.PutRowsHeader(keys=keys, columns=[column]))
    wide = [pb.Column(name=f"c{i}", dtype="int8", dims=[0], ragged_dim=0) for i in range(50)]
    many = [f"k{i}" for i in range(300)]
    yield pb.PutRowsRequest(header=pb.PutRowsHeader(keys=many, columns=wide))


def _request_seeds() -> Iterator[bytes]:
    for number, cls in enumerate(REQUESTS):
        yield bytes([number]) + cls().SerializeToString()
        yield bytes([number]) + messages.filled(cls(), 3).SerializeToString()
    put = REQUESTS.index(pb.PutRowsRequest)
    for header in _headers():
        yield bytes([put]) + header.SerializeToString()
    of = REQUESTS.index(pb.PutTrajectoriesRequest)
    for trajectories in (
        [_trajectory(), _trajectory(1)], [_trajectory(status=pb.TRAJECTORY_STATUS_FAILED)],
        [_trajectory(input_ids=[-1])], [_trajectory(logprobs=[float("nan")])],
        [_trajectory(policy_spans=[pb.PolicySpan(version=1 << 62, start=2, end=(1 << 31) - 1)])],
        [pb.Trajectory()],
    ):  # fmt: skip
        request = pb.PutTrajectoriesRequest(partition_id="p", trajectories=trajectories)
        yield bytes([of]) + request.SerializeToString()
    listed = REQUESTS.index(pb.ListRequest)
    for where in ({"a": 1}, {"or": [{"a": {"in": [1, "x"]}}, {"not": {"b": {">": 2.5}}}]}):
        yield bytes([listed]) + pb.ListRequest(where=to_value(where)).SerializeToString()


def _request_mutation(data: bytes, chance: random.Random) -> bytes:
    message = _parsed(data)
    if message is None or chance.random() < 0.2:
        return trees.flipped(data, chance)
    for _ in range(chance.choice((1, 1, 2, 4))):
        messages.mutate(message, chance)
    return data[:1] + message.SerializeToString()


def _request_plants(data: bytes, payload: bytes) -> Iterator[bytes]:
    message = _parsed(data)
    if message is not None:
        for _ in messages.planted(message, payload):
            yield data[:1] + message.SerializeToString()


# -- values ------------------------------------------------------------------------------------


def _value(data: bytes) -> None:
    value = unpack_object(data)
    again = unpack_object(pack_object(value))
    assert _ordered(again) == _ordered(value)


def _ordered(value: Any) -> str:
    """What a value says, whatever the order of its maps: those of a message have none."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_ordered(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_ordered, value))})"
    return repr(value)


_VALUES: list[Any] = [
    None, True, -1, (1 << 63) - 1, 0.5, float("nan"), "é", b"bytes", [1, [2]], (1, (2,)),
    {"a": {"b": None}}, np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int8), np.float32(2),
]  # fmt: skip


def _value_seeds() -> Iterator[bytes]:
    for value in _VALUES:
        yield pack_object(value)
    for dtype, shape, content in (
        ("int64", [1 << 40], b""), ("int64", [1 << 40, 0], b""), ("int8", [-1, -1], b"x"),
        ("object", [1], b"x"), ("bfloat16", [2], b"1234"), ("complex32", [1], b"1234"),
        ("float8_e5m2", [1], b"1"), ("int8", [1] * 9, b"x"), ("bool", [1], b"\7"), ("", [], b""),
        ("int8", [(1 << 63) - 1, 1 << 62, 0], b""),
    ):  # fmt: skip
        tensor = pb.TensorValue(dtype=dtype, shape=shape, data=content)
        yield pb.Value(tensor_value=tensor).SerializeToString()
    deep = pb.Value(null_value=True)
    for _ in range(32):
        deep = pb.Value(list_value=pb.ListValue(items=[deep]))
    yield deep.SerializeToString()
    yield b"\x3a\x04\x0a\x02" * 900
    yield b"\x32\xff\xff\xff\xff\x0f"
    # A list of values that say nothing: two bytes each, and much more in memory.
    yield pb.Value(list_value=pb.ListValue(items=[pb.Value()] * 2000)).SerializeToString()


def _value_mutation(data: bytes, chance: random.Random) -> bytes:
    message = pb.Value()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return trees.flipped(data, chance)
    if chance.random() < 0.2:
        return trees.flipped(data, chance)
    messages.mutate(message, chance)
    return message.SerializeToString()


def _value_plants(data: bytes, payload: bytes) -> Iterator[bytes]:
    message = pb.Value()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    for _ in messages.planted(message, payload):
        yield message.SerializeToString()


# -- columns and their bytes -------------------------------------------------------------------


def _cells(data: bytes) -> None:
    """A header, behind its length, and the bytes of its columns, as a reader takes them: those that
    are missing are zeros."""
    if len(data) < 2:
        return
    size = int.from_bytes(data[:2], "little")
    header = pb.GetRowsHeader()
    try:
        header.ParseFromString(data[2 : 2 + size])
    except DecodeError:
        return
    keys = check_keys(list(header.keys))
    shape = shape_from(header.columns, len(keys))
    if shape.nbytes > 64 * KiB:
        return  # more than was sent: the stream ends before it is asked for
    content = data[2 + size :][: shape.nbytes].ljust(shape.nbytes, b"\0")
    fields = arrays_of(shape, content)
    assert fields.keys() == {column.name for column in shape.columns}
    assert all(len(of) == len(keys) for of in fields.values())
    again = cells_of(keys, fields)
    for column, other in zip(shape.columns, again.shape.columns, strict=True):
        assert column.name == other.name


def _cells_seeds() -> Iterator[bytes]:
    for request in _headers():
        put = request.header
        header = pb.GetRowsHeader(keys=put.keys, columns=put.columns)
        packed = header.SerializeToString()
        yield len(packed).to_bytes(2, "little") + packed + bytes(300)
    keys = ["a", "b"]
    cells = cells_of(
        keys, {"o": [{"n": 1, "t": np.arange(2)}, None], "x": [np.ones(1), np.ones(3)]}
    )
    header = pb.GetRowsHeader(keys=keys, columns=cells.shape.to_columns())
    packed = header.SerializeToString()
    content = b"".join(bytes(part) for _, part in cells.chunks(64))
    yield len(packed).to_bytes(2, "little") + packed + content


def _cells_mutation(data: bytes, chance: random.Random) -> bytes:
    size = int.from_bytes(data[:2], "little")
    header = pb.GetRowsHeader()
    try:
        header.ParseFromString(data[2 : 2 + size])
    except DecodeError:
        return trees.flipped(data, chance)
    content = data[2 + size :]
    if chance.random() < 0.3:
        content = trees.flipped(content, chance)
    else:
        messages.mutate(header, chance)
    packed = header.SerializeToString()
    return (len(packed) & 0xFFFF).to_bytes(2, "little") + packed + content


def _cells_plants(data: bytes, payload: bytes) -> Iterator[bytes]:
    size = int.from_bytes(data[:2], "little")
    yield data[: 2 + size] + payload + data[2 + size :]
    yield data[: 2 + size] + pb.Value(bytes_value=payload).SerializeToString()


# -- what a gateway answers --------------------------------------------------------------------

ANSWERS: list[type[Any]] = [
    pb.InspectResponse, pb.TallyResponse, pb.GetStatsResponse, pb.ListClaimsResponse,
    pb.ListWaitersResponse, pb.ListHoldingsResponse, pb.TraceResponse, pb.GetStatusResponse,
    pb.GetRecordResponse,
]  # fmt: skip
"""What an operator is told, in messages that are made into reports."""


def _answered(data: bytes) -> Message | None:
    if not data:
        return None
    message: Any = ANSWERS[data[0] % len(ANSWERS)]()
    try:
        message.ParseFromString(data[1:])
    except DecodeError:
        return None
    return message


def _reports(data: bytes) -> None:
    match _answered(data):
        case pb.InspectResponse() as answer:
            for row in answer.rows:
                key_to(key_from(row))
        case pb.TallyResponse() as answer:
            tally_to(tally_from("p", answer))
        case pb.GetStatsResponse() as answer:
            stats_to(stats_from("p", answer))
        case pb.ListClaimsResponse() as answer:
            for claim in claims_from(answer.claims):
                assert list(claim_to(claim))
            for task in answer.tasks:
                assert task_to(task_from(task)).lag == task.lag
        case pb.ListWaitersResponse() as answer:
            for waiter in answer.waiters:
                assert waiter_to(waiter_from(waiter)).kind == waiter.kind
        case pb.ListHoldingsResponse() as answer:
            for store in stores_from([answer.store]):
                assert list(store_to(store))
        case pb.TraceResponse() as answer:
            summary_to(trace_from(answer.summary, answer.rows, "u", None))
            for row in answer.rows:
                row_to(row_from(row))
        case pb.GetRecordResponse() as answer:
            as_json(from_json(answer.json))
        case pb.GetStatusResponse() as answer:
            from_value(pb.Value(map_value=answer.status))
        case _:
            pass


def _reports_seeds() -> Iterator[bytes]:
    for number, cls in enumerate(ANSWERS):
        yield bytes([number]) + cls().SerializeToString()
        yield bytes([number]) + messages.filled(cls(), 3).SerializeToString()
    document = as_json(PlaneRecord("n", "p", "1", 1.0, 2.0, 3)).encode()
    answer = pb.GetRecordResponse(json=document)
    yield bytes([ANSWERS.index(pb.GetRecordResponse)]) + answer.SerializeToString()


def _reports_mutation(data: bytes, chance: random.Random) -> bytes:
    message = _answered(data)
    if message is None or chance.random() < 0.2:
        return trees.flipped(data, chance)
    messages.mutate(message, chance)
    return data[:1] + message.SerializeToString()


def _reports_plants(data: bytes, payload: bytes) -> Iterator[bytes]:
    message = _answered(data)
    if message is not None:
        for _ in messages.planted(message, payload):
            yield data[:1] + message.SerializeToString()


def _status(data: bytes) -> None:
    codes = list(grpc.StatusCode)
    code = codes[data[0] % len(codes)] if data else None
    error = error_of(code, data[:50].decode("latin-1"), [(ERROR_KEY, data[1:])])
    assert isinstance(error, DataplaneError)
    str(error)
    trailers_of(error)


def _status_seeds() -> Iterator[bytes]:
    from dataplane import errors

    for number, error in enumerate((
        errors.KeyNotFound("no", partition_id="p", keys=["a"] * 3),
        errors.QuotaExceeded("full", used_bytes=1, limit_bytes=2, oldest_keys=["k"]),
        errors.DeadlineExceeded("late", waited_s=1.5), errors.InternalError("bug"),
    )):  # fmt: skip
        for name, value in trailers_of(error):
            if name == ERROR_KEY:
                yield bytes([number]) + value
    yield b"\2" + pb.Error(type="KeyNotFound", attributes={"keys": pb.Value()}).SerializeToString()
    yield b"\3" + pb.Error(type="Other").SerializeToString()


def _status_mutation(data: bytes, chance: random.Random) -> bytes:
    message = pb.Error()
    try:
        message.ParseFromString(data[1:])
    except DecodeError:
        return trees.flipped(data, chance)
    messages.mutate(message, chance)
    return data[:1] + message.SerializeToString()


def _status_plants(data: bytes, payload: bytes) -> Iterator[bytes]:
    message = pb.Error()
    message.ParseFromString(data[1:])
    for _ in messages.planted(message, payload):
        yield data[:1] + message.SerializeToString()


# -- tokens ------------------------------------------------------------------------------------


def _token_file(data: bytes) -> None:
    records = Records.parse(data, "fuzzed")
    again = Records.parse(records.dump(), "fuzzed")
    assert again == records
    for of in (*records.tokens, *records.certificates):
        for verb in VERBS:
            assert of.principal.may(verb, "p@1") in (True, False)
            of.principal.sees("train")


def _token_file_seeds() -> Iterator[bytes]:
    token = {
        "id": "mzxw6ytboi2w", "principal": "r", "sha256": "0" * 64,
        "created": "2026-05-01T12:00:00Z", "expires": "2026-06-01T12:00:00+02:00",
        "grants": [{"partition": "t*n", "roles": ["producer"], "fields": ["x"]}],
        "limits": {"calls_per_s": 200, "open_streams": 3},
    }  # fmt: skip
    bound = {
        "subject": "judge.example.org", "principal": "judge",
        "grants": [{"partition": "*", "verbs": ["read", "list"]}],
    }  # fmt: skip
    yield json.dumps({"version": 1, "tokens": [token], "certificates": [bound]}).encode()
    yield b'{"version": 1}'
    yield b"[" * 4000
    yield b'{"version": 1, "version": 1}'
    yield b'{"tokens": ' + b"9" * 5000 + b"}"


def _token(data: bytes) -> None:
    """A token, a name, and a pattern that it may fit."""
    parts = split_token(data.decode("latin-1"))
    assert parts is None or f"dpt_{parts[0]}_{parts[1]}".encode() == data
    pattern, _, name = data.decode("latin-1").partition("\n")
    if pattern:
        covers = Grant(pattern, VERBS).covers(name)
        assert covers is (_fits(pattern, name))


def _fits(pattern: str, name: str) -> bool:
    """The same by a table, so that no pattern takes long here either."""
    reached = {0}
    for i, sign in enumerate(pattern):
        if sign == "*":
            reached = set(range(min(reached), len(name) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(name) and name[at] == sign}
        if not reached:
            return False
        assert i < len(pattern)
    return len(name) in reached


def _token_seeds() -> Iterator[bytes]:
    yield b"dpt_mzxw6ytboi2w_" + b"A" * 43
    yield b"*a*b*c\nxaybzc"
    yield b"a*a\na"
    yield b"train@*\ntrain@3"
    yield b"*a" * 100 + b"\n" + b"a" * 300


TARGETS = [
    Target(
        "proto-requests", _request, _request_seeds, (InvalidRequest,), mutate=_request_mutation,
        plant=_request_plants, max_len=32 * KiB, limit_bytes=16 * MiB,
    ),
    Target(
        "proto-values", _value, _value_seeds, (InvalidRequest,), mutate=_value_mutation,
        plant=_value_plants,
    ),
    Target(
        "proto-cells", _cells, _cells_seeds, (DataplaneError,), mutate=_cells_mutation,
        plant=_cells_plants, max_len=32 * KiB, limit_bytes=64 * MiB,
    ),
    Target(
        "proto-reports", _reports, _reports_seeds, (InvalidRequest,), mutate=_reports_mutation,
        plant=_reports_plants,
    ),
    Target(
        "proto-status", _status, _status_seeds, (), mutate=_status_mutation, plant=_status_plants,
    ),
    Target(
        "token-file", _token_file, _token_file_seeds, (InvalidRequest,),
        mutate=trees.by_trees(_json, _text), plant=trees.planted(_json, _text),
    ),
    Target("token", _token, _token_seeds, ()),
]  # fmt: skip
