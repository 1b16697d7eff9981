"""Requests that no client of ours sends, from one that knows the secret: each is refused by name,
changes nothing, and harms nobody else.

Every verb of the servers has a row here; a new verb without one fails.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import statistics
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import torch

from dataplane.client.get import resolve
from dataplane.errors import (
    AlreadyWritten,
    DeadlineExceeded,
    InvalidRequest,
    KeyNotFound,
    OutcomeUnknown,
    PermissionDenied,
    QuotaExceeded,
    RequestError,
    SchemaMismatch,
)
from dataplane.tags.keys import MAX_KEYS, MAX_TAG_BYTES
from dataplane.wire.frames import MAGIC, PREFIX
from dataplane.wire.messages import IF_ABSENT, MUST_EXIST, PutMeta
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import MiB, Plane
from tests.faults.raw import Raw, block, meta

pytestmark = pytest.mark.faults

X = torch.arange(1000)


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Generator[Plane]:
    with ExitStack() as stack:
        plane = planes.start(
            stack, "hostile", tcp_host="127.0.0.1", capacity_bytes=64 * MiB, timeout_s=20, **roots
        )
        plane.client.kv_put("A", "p", {"x": X}, {"n": 1})
        yield plane


@pytest.fixture
def raw(plane: Plane) -> Generator[Raw]:
    with Raw.greeted(plane.joined) as raw:
        yield raw


CHANGING = ("worst_slice_ms", "clients", "kept", "uptime_s", "time_s", "totals")
"""What of a status changes though nothing is applied."""


def sizes(plane: Plane) -> dict[str, Any]:
    status = plane.client.status()
    for changing in CHANGING:
        status.pop(changing, None)
    for store in status["values"].values():
        store.pop("bytes_in", None), store.pop("bytes_out", None)
    return status


@pytest.fixture(autouse=True)
def nothing_is_applied(plane: Plane, request: pytest.FixtureRequest) -> Generator[None]:
    """Status is the same before and after each test, and the one good row reads as it was put."""
    before = sizes(plane)
    yield
    applied = {
        name: [key for key in plane.client.kv_list(name).keys if key != "A"]
        for name in plane.client.status()["partitions"]
    }
    for name, keys in applied.items():
        plane.client.kv_clear(keys, name)  # only this test is to fail of it
    assert applied == {"p": []}
    # Blocks of refused puts and pins of clients that left are given back within moments.
    eventually(lambda: sizes(plane) == before, f"the plane is as before: {before}")
    assert plane.reads("A", "p") == X.tolist()
    assert plane.client.kv_list("p").tags == [{"n": 1}]
    with plane.another() as late:
        assert late.kv_list("p").keys == ["A"]


# -- every verb, every part of its body, every wrong type -------------------------------------

HEAD, PAYLOAD = block({"x": torch.tensor([1, 2, 3])})
PACKED = msgpack.packb({"n": 2})
IDS = struct.pack("<q", 1)
PLACEMENT = [10**9, 1, 4096, len(PAYLOAD), *HEAD]


def new_meta(**parts: object) -> bytes:
    """Meta of a put that is refused however right the rest is: its key does not exist."""
    base = PutMeta("p", ["B"], MUST_EXIST, 1, 0, None, None)
    return base._replace(**parts).pack()


BODIES: dict[str, list[Any]] = {
    # Asked of a tag store. What a right body does here is nothing, or a refusal.
    "put_tags": [new_meta(), PACKED],
    "publish": ["raw", new_meta(), PACKED, PLACEMENT, 0],
    "begin": [],
    "begun": [1],
    "forget": [1],
    "live": [],
    "register": [["/nowhere", None], [], []],
    "repack_candidates": [10, None],
    "repack": [1, PLACEMENT, [[0, 0]]],
    "resolve": ["p", ["A"], ["x"], False],
    "list": ["p", {"n": 1}, [1, 0], ["n"], 10],
    "clear": ["p", ["B"], None, False, 1, 0],
    # Two things are wrong with each of these, so that one that is mended leaves the other.
    "begin_group": ["u", "p", 1, 1 << 62, None, 0.0, 1, 1],
    "create_partition": ["p", {"x": ["int8", 1, 0]}, {"rows": 1}, {"versions": 1}, 1, 1],
    "end_group": [10**9, "finished", 1, 0],
    "outcome": ["nobody", 1],
    "partitions": [],
    "seal_partition": ["q", 1, 0],
    "drop_partition": ["q", None, 1, 0],
    "stores": [],
    "fullest": [],
    "status": [],
    "explain": ["p", {"n": 1}, ["x"], "t", False, 1],
    "inspect": ["p", ["A", "nobody"]],
    "tally": ["p", {"n": 1}, [1, 0]],
    "stats": ["p"],
    "claims": ["p"],
    "waiters": [],
    "moment": [1.0],
    "unknown_blocks": ["local", IDS],
    "trace": ["p", "u", None, 0, 10],
    "stage": ["advantage"],
    "note": ["put", 1, "p", ["A"], ["x"], [[b"\0" * 8]], []],
    "samples": [],
    "wait": ["p", {"n": 1}, [], 10, False, 0.0, 1],
    "watch": ["p", {"n": 1}, [1, 0], 0.0, 1],
    "wait_abandon": [1],
    "claim": ["p", "t", 10, [], {"n": 1}, None, False, 1.0, None, [], 0.0, 1],
    "claim_abandon": [[1]],
    "claim_commit": ["p", "t", 10**9, ["B"], 1, 0],
    "claim_release": ["p", "t", 10**9, ["B"], 1, 0],
    # None of these is open, and no plane with partitions takes a load.
    "checkpoint_open": ["c", 0.0],
    "checkpoint_state": ["none", 0, 0],
    "checkpoint_rows": ["none", 0, 0, 0],
    "checkpoint_close": ["none"],
    "restore_begin": ["r", 0.0, 1, 1, None],
    "restore_partition": ["r", "p", {}, False, []],
    "restore_rows": ["r", "p", 0, ["B"], PACKED, IDS, IDS, IDS, ["c"], b"\0" * 4, {}],
    "restore_state": ["r", "p", False, None, None, []],
    "restore_end": ["r"],
    "restore_abort": ["r"],
    "destroy": [7],
    # Asked of a value store.
    "put_block": [new_meta(), PACKED, *HEAD, 1.0, None],
    "reserve": [0, 1.0, None],
    "commit": [10**9, new_meta(), PACKED, *HEAD],
    "abort": [10**9],
    "pin": [b""],
    "unpin": [10**9],
    "read": [IDS, b"\0" * 4, b"\0" * 8, b"\0" * 8, 1.0],
    "value_status": [],
    "holdings": [],
}
MAY_WAIT = {"wait", "watch", "claim"}
"""Of another partition or number of rows they may ask: then nothing comes of it in time."""
STORES_ONLY = {
    "publish", "begun", "forget", "live", "register", "repack_candidates", "repack",
}  # fmt: skip

WRONG: list[Any] = [
    None, True, False, -1, 0, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, float("nan"),
    float("inf"), "", "x", "\0", b"", b"\xff", b"\xff" * 8, b"\x80" * 64, [], [[]], [None], {},
    {"x": 1}, {"n": {"in": 5}}, {1: 2}, [["B"]], ["B", 5], ["B"] * 3, msgpack.Timestamp(1),
    msgpack.ExtType(5, b"x"),
]  # fmt: skip


def wrong_bodies(right: list[Any]) -> Generator[Any]:
    """The body with each part replaced, each left out, one too many, and no list at all."""
    for i, wrong in itertools.product(range(len(right)), WRONG):
        yield [*right[:i], wrong, *right[i + 1 :]]
    for i in range(len(right)):
        yield [*right[:i], *right[i + 1 :]]
    yield [*right, None]
    yield from (wrong for wrong in WRONG if wrong != [] or right)


def test_every_verb_has_a_row_here(roots: dict[str, Path]) -> None:
    with planes.in_thread("verbs", **roots) as served:
        assert served.server is not None
        assert {*served.server.verbs, "put_block"} == set(BODIES)
        assert served.server.tags is not None
        stores_only = {
            name
            for name, verb in served.server.tags.verbs.items()
            if "only_stores" in cast("Any", verb).__code__.co_names
        }
        assert stores_only == STORES_ONLY


@pytest.mark.parametrize("verb", sorted(BODIES))
def test_a_body_of_wrong_types_is_refused_and_changes_nothing(
    plane: Plane, raw: Raw, verb: str
) -> None:
    payload = PAYLOAD if verb == "put_block" else b""
    refused = 0
    for body in wrong_bodies(BODIES[verb]):
        if verb == "destroy" and body == []:
            continue  # it is right
        try:
            if verb == "clear":
                # A number that was answered once would get that answer again.
                with Raw.greeted(plane.joined) as fresh:
                    answer = fresh.ask(verb, body, payload)
            else:
                answer = raw.ask(verb, body, payload)
        except (RequestError, QuotaExceeded, OutcomeUnknown):  # others are the server's fault
            refused += 1
        except DeadlineExceeded:
            assert verb in MAY_WAIT, body
        else:
            # What is not looked at, or is right after all, is answered; nothing is changed by it.
            assert verb not in ("put_tags", "put_block", "commit"), body
            if verb == "clear":
                assert answer[0] == 0, body
    if verb not in (
        "begin", "stores", "fullest", "status", "partitions", "value_status", "waiters", "holdings",
        "samples",
    ):  # fmt: skip
        assert refused > 10
    # The connection is still in step.
    assert raw.ask("list", ["p", None, None, None, None])[0] == list(
        plane.client.kv_list("p").revision
    )


@pytest.mark.parametrize("verb", sorted(BODIES))
def test_a_payload_where_none_is_due_is_refused_and_dropped(raw: Raw, verb: str) -> None:
    body = [None] if verb == "put_block" else BODIES[verb]
    with pytest.raises(InvalidRequest):
        raw.ask(verb, body, b"z" * 100_000)
    assert raw.ask("stores", [])


@pytest.mark.parametrize("verb", ["", "x", "__init__", "hello", "challenge", "free", "\0" * 1000])
def test_what_is_no_verb_is_refused_by_name(raw: Raw, verb: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no verb"):
        raw.ask(verb, [])


@pytest.mark.parametrize("verb", sorted(STORES_ONLY))
def test_a_client_may_not_ask_what_only_value_stores_may(raw: Raw, verb: str) -> None:
    with pytest.raises(PermissionDenied, match="only a value store"):
        raw.ask(verb, BODIES[verb])


def test_an_answer_that_nobody_asked_for_is_ignored(raw: Raw) -> None:
    for kind in (0, 1, 2, -5):
        for body in (None, [], {"type": "InternalError"}, 7):
            raw.request(kind, body)
    assert raw.ask("stores", [])


@pytest.mark.parametrize(
    "part",
    [("attempt", wrong) for wrong in (0, -1, True, 1.5, "1", b"1", [1], 2**63, {})]
    + [("wait_s", wrong) for wrong in (-1, float("nan"), float("inf"), 1e9, "1", None, True, [1])],
    ids=repr,
)
def test_an_attempt_or_a_wait_that_is_none_is_refused(raw: Raw, part: tuple[str, Any]) -> None:
    name, wrong = part
    packed = new_meta(**{name: wrong})
    for verb, body, payload in (
        ("put_tags", [packed, PACKED], b""),
        ("put_block", [packed, PACKED, *HEAD, 1.0, None], PAYLOAD),
    ):
        with pytest.raises(InvalidRequest, match="attempt" if name == "attempt" else "wait"):
            raw.ask(verb, body, payload)


def test_questions_about_requests_that_never_came_do_not_pile_up(plane: Plane, raw: Raw) -> None:
    with plane.another() as victim:
        victim.kv_list("p")
        client_id = victim.client_id
        for number in (1, 2, 3):
            assert raw.ask("outcome", [client_id, 10**9 + number]) == [None, None]
        for number in (0, -1, 2**63, True, "1", None):
            with pytest.raises(InvalidRequest):
                raw.ask("outcome", [client_id, number])
        victim.kv_clear(["B"], "p")  # its own numbers are others


# -- templates and lengths that lie ----------------------------------------------------------


def packed_template(*columns: Any) -> bytes:
    return msgpack.packb([list(column) for column in columns])


GOOD = ("x", "int64", 0, [-1])
LIES: list[tuple[str, dict[int, Any], str]] = [
    ("no msgpack", {0: b"\xc1"}, "not valid msgpack"),
    ("a map", {0: b"\x80"}, "list of at most"),
    ("no column", {0: b"\x90", 2: b""}, "one field at least"),
    ("an open end", {0: b"\x95"}, "not valid msgpack"),
    ("2 MB of it", {0: b"\xc4" * 2_000_000}, "2000000 bytes"),
    ("2,000 columns", {0: packed_template(*[(str(i), *GOOD[1:]) for i in range(2000)])}, "1024"),
    ("a field twice", {0: packed_template(GOOD, GOOD)}, "occurs twice"),
    ("three parts", {0: packed_template(GOOD[:3])}, "name, dtype"),
    ("no name", {0: packed_template(("", *GOOD[1:]))}, "field name"),
    ("a name of bytes", {0: packed_template((b"x", *GOOD[1:]))}, "field name"),
    ("a long name", {0: packed_template(("x" * 300, *GOOD[1:]))}, "field name"),
    ("unknown dtype", {0: packed_template(("x", "int128", 0, [-1]))}, "int128"),
    ("rank 9", {0: packed_template(("x", "int64", 0, [1] * 9))}, "at most 8 dimensions"),
    ("size -2", {0: packed_template(("x", "int64", 0, [-2]))}, "dimension -2"),
    ("size 2^31", {0: packed_template(("x", "int64", 0, [2**31]))}, "dimension"),
    ("sizes of 2^60", {0: packed_template(("x", "int64", 0, [2**30, 2**30]))}, "larger than"),
    ("size of text", {0: packed_template(("x", "int64", 0, ["3"]))}, "dimension '3'"),
    ("ragged 1 of 1", {0: packed_template(("x", "int64", 1, [-1]))}, "ragged_dim 1"),
    ("ragged -1", {0: packed_template(("x", "int64", -1, [-1]))}, "ragged_dim -1"),
    ("no ragged", {0: packed_template(("x", "int64", None, [-1]))}, "ragged_dim"),
    ("object of rank 2", {0: packed_template(("x", "object", 0, [-1, 2]))}, "object column"),
    ("no rows", {1: 0}, "1 to 65536 rows, not 0"),
    ("-1 rows", {1: -1}, "1 to 65536 rows, not -1"),
    ("65,537 rows", {1: 65_537}, "1 to 65536 rows"),
    ("2^62 rows", {1: 2**62}, "1 to 65536 rows"),
    ("rows of text", {1: "1"}, ""),
    ("1.0 rows", {1: 1.0}, "rows"),
    ("True rows", {1: True}, "rows"),
    ("more rows than keys", {1: 2, 2: b"\1\0\0\0\2\0\0\0"}, ""),
    ("no lengths", {2: b""}, "0 bytes of row lengths"),
    ("half a length", {2: b"\3\0"}, "2 bytes of row lengths"),
    ("two lengths", {2: b"\3\0\0\0" * 2}, "8 bytes of row lengths"),
    ("a negative length", {2: b"\xff\xff\xff\xff"}, "negative"),
    ("lengths of text", {2: "\3\0\0\0"}, ""),
    # Less than the next 64 bytes more is the padding of the column, its writer's own.
    ("a length too long", {2: b"\x09\0\0\0"}, "bytes where"),
    ("a length too short", {2: b"\0\0\0\0"}, "bytes where"),
    ("a length of 2^31", {2: b"\xff\xff\xff\x7f"}, "bytes where"),
]


@pytest.mark.parametrize(
    ("changes", "says"), [pytest.param(changes, says, id=name) for name, changes, says in LIES]
)
@pytest.mark.parametrize("way", ["put_block", "commit"])
def test_a_template_that_lies_is_refused_and_its_room_given_back(
    plane: Plane, raw: Raw, way: str, changes: dict[int, Any], says: str
) -> None:
    head = [changes.get(i, part) for i, part in enumerate(HEAD)]
    packed = meta("p", ["B"])
    with pytest.raises(InvalidRequest) as refused:
        if way == "put_block":
            raw.ask("put_block", [packed, None, *head, 1.0, None], PAYLOAD)
        else:
            reserved = raw.ask("reserve", [len(PAYLOAD), 1.0, None])
            raw.ask("commit", [reserved[0], packed, None, *head])
    if says not in ("bytes where", "bytes of row"):
        assert says in str(refused.value)
    assert plane.client.kv_list("p").keys == ["A"]


def test_rows_of_another_dtype_or_rank_are_refused_by_key_and_field(raw: Raw) -> None:
    for fields in ({"x": torch.zeros(3)}, {"x": torch.zeros(3, 2, dtype=torch.int64)}):
        head, payload = block(fields)
        with pytest.raises(SchemaMismatch, match="'x'") as refused:
            raw.ask("put_block", [meta("p", ["B"]), None, *head, 1.0, None], payload)
        assert (refused.value.keys, refused.value.fields) == (["B"], ["x"])


# -- blocks of others ------------------------------------------------------------------------


def test_the_reservation_of_another_client_can_neither_be_committed_nor_aborted(
    plane: Plane, raw: Raw
) -> None:
    with Raw.greeted(plane.joined) as victim:
        number, *_ = victim.ask("reserve", [len(PAYLOAD), 1.0, None])
        for head in (HEAD, [HEAD[0], 1, b"\x09\0\0\0"]):  # right, and of another size
            with pytest.raises(InvalidRequest):
                raw.ask("commit", [number, meta("p", ["B"]), None, *head])
        raw.ask("abort", [number])
        assert plane.counts()["blocks_reserved"] == 1
        # A key that exists already, so that nothing of it stays.
        with pytest.raises(AlreadyWritten):
            victim.ask("commit", [number, meta("p", ["A"], flags=IF_ABSENT), None, *HEAD])


def test_a_block_is_committed_once(raw: Raw) -> None:
    number, *_ = raw.ask("reserve", [len(PAYLOAD), 1.0, None])
    with pytest.raises(KeyNotFound):
        raw.ask("commit", [number, new_meta(), None, *HEAD])
    with pytest.raises(InvalidRequest, match="not reserved"):
        raw.ask("commit", [number, new_meta(number=2), None, *HEAD])


def test_a_published_block_can_neither_be_committed_again_nor_aborted(raw: Raw) -> None:
    with pytest.raises(InvalidRequest):
        raw.ask("commit", [1, new_meta(), None, *HEAD])
    raw.ask("abort", [1])


def test_the_pin_of_another_client_cannot_be_ended(plane: Plane, raw: Raw) -> None:
    with plane.another() as reader, reader.kv_view(["A"], "p") as rows:
        assert plane.counts()["pins"] == 1
        for handle in range(200):
            raw.ask("unpin", [handle])
        assert plane.counts()["pins"] == 1
        assert rows.keys == ["A"]


def test_a_block_that_is_not_published_cannot_be_pinned_or_read(raw: Raw) -> None:
    number, *_ = raw.ask("reserve", [4096, 1.0, None])
    ids = struct.pack("<q", number)
    assert raw.ask("pin", [ids]) == [0, [number]]
    assert raw.ask("read", [ids, b"\0" * 4, b"\0" * 8, struct.pack("<q", 1), 1.0]) == [[number]]


@pytest.mark.parametrize(
    ("which", "start", "size"),
    [
        (0, -1, 1), (0, 0, -1), (0, 0, 2**62), (0, 2**62, 2**62), (0, 2**63 - 1, 1),
        (0, -(2**63), 1), (0, 8064 + 64, 1), (0, 0, 8064 + 65), (0, 1, 8064 + 64), (1, 0, 1),
        (-1, 0, 1), (2**31 - 1, 0, 1),
    ],
)  # fmt: skip
def test_a_read_beyond_its_block_is_refused(
    plane: Plane, which: int, start: int, size: int
) -> None:
    there = plane.client.run(
        lambda core, deadline: resolve(core, ["A"], "p", ["x"], False, deadline)
    )
    for tcp in (False, True):
        with Raw.greeted(plane.joined, tcp=tcp) as raw:
            body = [
                there.block_ids.tobytes(), np.int32(which).tobytes(), np.int64(start).tobytes(),
                np.int64(size).tobytes(), 1.0,
            ]  # fmt: skip
            with pytest.raises(InvalidRequest, match="beyond its blocks"):
                raw.ask("read", body)
            assert raw.ask("stores", [])


def test_a_read_of_arrays_that_do_not_match_is_refused(raw: Raw) -> None:
    for which, starts, bytes_ in [(4, 16, 8), (8, 8, 8), (3, 8, 8), (4, 7, 8)]:
        with pytest.raises(InvalidRequest):
            raw.ask("read", [IDS, b"\0" * which, b"\0" * starts, b"\0" * bytes_, 1.0])


def test_a_reservation_larger_than_the_store_is_refused_and_takes_nothing(raw: Raw) -> None:
    for nbytes in (65 * MiB, 2**40, 2**62, 2**63 - 1):
        with pytest.raises(QuotaExceeded):
            raw.ask("reserve", [nbytes, 1.0, None])
    for nbytes in (0, -1, -(2**62), 1.5, "5", None):
        with pytest.raises(InvalidRequest):
            raw.ask("reserve", [nbytes, 1.0, None])


# -- keys, names, tags -----------------------------------------------------------------------

HOSTILE_NAMES = [
    "", "k" * 10_000, "é" * 600, "a\0b", "a\nb", "a\x1b[31mb", "a\x7fb", "a\x85b", "a\u2028b",
    "..", "../etc/passwd", "a/../b", "a\\..\\b",
]  # fmt: skip
NO_NAMES: list[Any] = [None, 5, 1.5, b"bytes", ["x"], {"x": 1}, True]


def named(error: BaseException, name: object) -> bool:
    """Whether a message says which name it is about, escaped and cut."""
    text = str(error)
    return text.isprintable() and len(text) < 500 and (not name or repr(name)[:20] in text)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: repr(name)[:20])
def test_a_hostile_key_or_partition_is_refused_by_name(plane: Plane, raw: Raw, name: str) -> None:
    client = plane.client
    small, large = {"x": X}, {"x": torch.arange(100_000)}
    calls: list[Callable[[], Any]] = [
        lambda: client.kv_put(name, "p", None, {"n": 1}),
        lambda: client.kv_put(name, "p", small),
        lambda: client.kv_put(name, "p", large),
        lambda: client.kv_batch_put(["B", name], "p", None, [{"n": 1}] * 2),
        lambda: client.kv_batch_put(["B", name], "p", [small, small]),
        lambda: client.kv_batch_get([name], "p"),
        lambda: client.kv_clear([name], "p"),
        lambda: client.kv_put("B", name, small, {"n": 1}),
        lambda: client.kv_put("B", name, large, {"n": 1}),
        lambda: client.kv_list(name),
        lambda: client.kv_batch_get(["A"], name),
        lambda: client.kv_clear(["A"], name),
        lambda: client.kv_clear(None, name, where={}),
        lambda: raw.ask("put_tags", [meta("p", [name]), PACKED]),
        lambda: raw.ask("put_block", [meta("p", [name]), None, *HEAD, 1.0, None], PAYLOAD),
        lambda: raw.ask("put_block", [meta(name, ["B"]), None, *HEAD, 1.0, None], PAYLOAD),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert named(refused.value, name), (number, refused.value)


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_what_is_no_string_is_no_key_and_no_partition(plane: Plane, raw: Raw, name: Any) -> None:
    client = plane.client
    calls: list[Callable[[], Any]] = [
        lambda: client.kv_put(name, "p", None, {"n": 1}),
        lambda: client.kv_batch_put(["B", name], "p", None, [{"n": 1}] * 2),
        lambda: client.kv_batch_get([name], "p"),
        lambda: client.kv_clear([name], "p"),
        lambda: client.kv_put("B", name, {"x": X}),
        lambda: client.kv_list(name),
        lambda: client.kv_batch_get(["A"], name),
        lambda: client.kv_clear(["A"], name),
        lambda: raw.ask("put_tags", [meta("p", [name]), PACKED]),
        lambda: raw.ask("put_tags", [meta(name, ["B"]), PACKED]),
        lambda: raw.ask("put_block", [meta("p", [name]), None, *HEAD, 1.0, None], PAYLOAD),
        lambda: raw.ask("put_block", [meta(name, ["B"]), None, *HEAD, 1.0, None], PAYLOAD),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()


def test_keys_that_occur_twice_are_refused_by_name(plane: Plane, raw: Raw) -> None:
    for call in (
        lambda: plane.client.kv_batch_put(["B", "C", "B"], "p", None, [{"n": 1}] * 3),
        lambda: raw.ask("put_tags", [meta("p", ["B", "C", "B"]), PACKED * 3]),
    ):
        with pytest.raises(InvalidRequest, match=r"repeated: 'B'$"):
            call()


def test_one_key_too_many_is_refused_with_both_numbers(plane: Plane, raw: Raw) -> None:
    keys = [f"k{i}" for i in range(MAX_KEYS + 1)]
    calls: list[Callable[[], Any]] = [
        lambda: plane.client.kv_batch_put(keys, "p", None, [{}] * len(keys)),
        lambda: plane.client.kv_batch_put(keys, "p", {"x": torch.zeros(len(keys), 1).long()}),
        lambda: plane.client.kv_batch_get(keys, "p"),
        lambda: raw.ask("put_tags", [meta("p", keys), b"\x80" * len(keys)]),
        lambda: raw.ask("resolve", ["p", keys, None, True]),
        lambda: raw.ask("clear", ["p", keys, None, False, 1, 0]),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match=r"65536|65,536"):
            call()


def nested(depth: int, of: bytes) -> bytes:
    """Packed {"a": [[[...]]]} or {"a": {"b": {"b": ...}}}, so deep."""
    return b"\x81\xa1a" + of * depth + b"\xc0"


HOSTILE_TAGS: list[tuple[str, bytes]] = [
    ("no map", b"\x90"),
    ("nothing", b""),
    ("an open end", b"\x81\xa1a"),
    ("two maps", b"\x80\x80"),
    ("no msgpack", b"\xc1"),
    ("a name of bytes", b"\x81\xc4\1a\x01"),
    ("a name of a number", b"\x81\x01\x01"),
    ("a name of a list", b"\x81\x90\x01"),
    ("an empty name", msgpack.packb({"": 1})),
    ("a long name", msgpack.packb({"n" * 257: 1})),
    ("a name with NUL", msgpack.packb({"n\0": 1})),
    ("a name with a newline", msgpack.packb({"n\n": 1})),
    ("a name inside that is bytes", b"\x81\xa1a\x81\xc4\1b\x01"),
    ("a name inside that is a number", b"\x81\xa1a\x81\x05\x01"),
    ("bytes", msgpack.packb({"a": b"x"})),
    ("bytes inside", msgpack.packb({"a": [{"b": b"x"}]})),
    ("an extension", msgpack.packb({"a": msgpack.ExtType(5, b"x")})),
    ("an extension inside", msgpack.packb({"a": [msgpack.ExtType(5, b"x")]})),
    ("a time", msgpack.packb({"a": msgpack.Timestamp(1)})),
    ("no utf-8", b"\x81\xa1a\xa1\xff"),
    ("over 64 KiB", msgpack.packb({"a": "x" * (MAX_TAG_BYTES + 1)})),
    ("1,025 tags", msgpack.packb({str(i): 1 for i in range(1025)})),
    ("lists 600 deep", nested(600, b"\x91")),
    ("lists 1,000 deep", nested(1000, b"\x91")),
    ("lists 60,000 deep", nested(60_000, b"\x91")),
    ("maps 600 deep", nested(600, b"\x81\xa1b")),
    ("a list of 2^32", b"\x81\xa1a\xdd\xff\xff\xff\xff"),
    ("a text of 2^32", b"\x81\xa1a\xdb\xff\xff\xff\xff"),
    ("a pickle", b"\x81\xa1a\xc4\x50" + pickle.dumps(os.getcwd).ljust(0x50, b"\0")),
]


@pytest.mark.parametrize("packed", [pytest.param(packed, id=name) for name, packed in HOSTILE_TAGS])
def test_tags_that_are_none_are_refused_by_key(plane: Plane, raw: Raw, packed: bytes) -> None:
    keyed = "'B'" if len(packed) < 5000 else ""
    with pytest.raises(InvalidRequest, match=keyed or None) as refused:
        raw.ask("put_tags", [meta("p", ["B"]), packed])
    assert len(str(refused.value)) < 500
    with pytest.raises(InvalidRequest):
        raw.ask("put_tags", [meta("p", ["A"], 2), packed])  # a merge
    with pytest.raises(InvalidRequest):
        raw.ask("put_tags", [meta("p", ["C", "B"], 3), PACKED + packed])
    with pytest.raises(InvalidRequest):
        raw.ask("put_block", [meta("p", ["B"], 4), packed, *HEAD, 1.0, None], PAYLOAD)
    listing = plane.client.kv_list("p")
    assert listing.tags == [{"n": 1}]


@pytest.mark.parametrize("number", [0, -1, 2**63, 1.0, None, "1"])
def test_a_request_number_that_is_none_is_refused(raw: Raw, number: Any) -> None:
    packed = msgpack.packb(["p", ["B"], 0, number, 0, None, None])
    with pytest.raises(InvalidRequest):
        raw.ask("put_tags", [packed, PACKED])


def test_a_number_that_was_used_for_a_clear_is_refused_for_a_put_and_the_other_way(
    own_plane: Callable[..., Plane],
) -> None:
    other = own_plane()
    other.client.kv_put("A", "p", {"x": X})
    with Raw.greeted(other.joined) as raw:
        assert raw.ask("clear", ["p", ["B"], None, False, 1, 0])[0] == 0
        with pytest.raises(InvalidRequest, match="number 1 was used for a clear"):
            raw.ask("put_tags", [meta("p", ["B"], 1), PACKED])
        with pytest.raises(InvalidRequest, match="number 1 was used for a clear"):
            raw.ask("put_block", [meta("p", ["B"], 1), None, *HEAD, 1.0, None], PAYLOAD)
        raw.ask("put_tags", [meta("p", ["C"], 2), PACKED])
        with pytest.raises(InvalidRequest, match="number 2 was used for a put"):
            raw.ask("clear", ["p", ["C"], None, False, 2, 0])
    assert other.client.kv_list("p").keys == ["A", "C"]


@pytest.mark.parametrize("stamp", [5, [1], [1, 2, 3], [-1, 0], ["1", "0"], [1.0, 0.0], {}])
def test_a_stamp_that_is_no_revision_is_refused(raw: Raw, stamp: Any) -> None:
    for parts in ([None, stamp], [stamp, None]):
        packed = msgpack.packb(["p", ["B"], 0, 1, 0, *parts])
        with pytest.raises(InvalidRequest, match=r"\[epoch, n\]"):
            raw.ask("put_tags", [packed, PACKED])


# -- streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        random.Random(1).randbytes(100_000),
        pickle.dumps(list(range(100))),
        PREFIX.pack(MAGIC, 2**32 - 1, 0),
        PREFIX.pack(MAGIC, 65 << 20, 0),
        PREFIX.pack(MAGIC, 10, 2**63),
        PREFIX.pack(MAGIC, 10, 2**47),
        PREFIX.pack(MAGIC, 3, 0) + b"\xc1\xc1\xc1",
        PREFIX.pack(b"DPF\2", 3, 0) + b"\x93\x01\x02",
    ],
    ids=[
        "random", "pickle", "header of 4 GiB", "header of 65 MiB", "payload of 2^63",
        "payload of 2^47", "no msgpack", "version 2",
    ],
)  # fmt: skip
def test_a_stream_that_is_lost_is_closed_with_all_that_its_client_held(
    plane: Plane, data: bytes
) -> None:
    for tcp in (False, True):
        with Raw.greeted(plane.joined, tcp=tcp) as raw:
            raw.send(data)
            assert isinstance(raw.refusal(), InvalidRequest)
    assert plane.client.status()["clients"] == 1


def test_a_put_whose_payload_never_comes_whole_is_never_listed(plane: Plane) -> None:
    for tcp in (False, True):
        for cut in (0, 1, len(PAYLOAD) - 1):
            with Raw.greeted(plane.joined, tcp=tcp) as raw:
                raw.request("put_block", [meta("p", ["B"]), PACKED, *HEAD, 1.0, None], len(PAYLOAD))
                raw.send(PAYLOAD[:cut])


def test_a_large_payload_that_is_refused_is_answered_and_the_connection_goes_on(
    plane: Plane,
) -> None:
    """Through the socket, as clients of other nodes put: the reason must reach them."""
    with plane.another(same_node_reads=False) as far:
        for nbytes in (1000, MiB, 63 * MiB, 70 * MiB, 200 * MiB):
            row = {"y": torch.zeros(nbytes, dtype=torch.uint8)}
            if nbytes < 63 * MiB:
                with pytest.raises(KeyNotFound):
                    far.kv_put("B", "p", row, must_exist=True)
            else:
                with pytest.raises((QuotaExceeded, KeyNotFound)) as full:
                    far.kv_put("B", "p", row, must_exist=True, timeout=2)
                assert nbytes < 64 * MiB or isinstance(full.value, QuotaExceeded)


# -- others are not slowed down --------------------------------------------------------------


def drip(plane: Plane, ended: threading.Event) -> None:
    """The head of the largest frame there is, piece by piece."""
    with Raw.greeted(plane.joined) as raw:
        raw.send(PREFIX.pack(MAGIC, 64 << 20, 0))
        sent = 0
        while not ended.is_set() and sent < 63 << 20:
            raw.send(b"\0" * 4096)
            sent += 4096


def strangers(plane: Plane, ended: threading.Event) -> None:
    while not ended.is_set():
        with Raw.to(plane.joined) as raw:
            raw.send(random.randbytes(50_000))
            raw.refusal()


def nonsense(plane: Plane, ended: threading.Event) -> None:
    with Raw.greeted(plane.joined) as raw:
        while not ended.is_set():
            for verb in ("put_tags", "resolve", "commit", "read", "list"):
                with pytest.raises(InvalidRequest):
                    raw.ask(verb, [None])


@pytest.mark.parametrize("attack", [drip, strangers, nonsense])
def test_another_clients_puts_stay_quick_under_attack(
    plane: Plane, attack: Callable[[Plane, threading.Event], None]
) -> None:
    def p99() -> float:
        """Of putting what is there already, in seconds."""
        took: list[float] = []
        for _ in range(300):
            began = time.perf_counter()
            with pytest.raises(AlreadyWritten):
                plane.client.kv_put("A", "p", None, {"n": 1}, if_absent=True)
            took.append(time.perf_counter() - began)
        return statistics.quantiles(took, n=100)[98]

    p99()
    ended = threading.Event()
    thread = threading.Thread(target=attack, args=(plane, ended))
    thread.start()
    try:
        attacked = min(p99() for _ in range(3))
    finally:
        ended.set()
        thread.join(30)
    # Most of it is this process's own threads taking turns.
    assert attacked < 0.05
