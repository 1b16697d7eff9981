"""Errors on both sides of the wire, broken connections, and clients that were closed."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from dataplane import errors
from dataplane.errors import DataplaneError, InvalidRequest, PlaneLost
from dataplane.session import settings_of
from dataplane.wire.channel import Channel
from tests.contract.planes import Plane, ThreadPlane, embedded_sync, thread_plane

ATTRIBUTES: dict[str, Any] = {
    "partition_id": "train",
    "keys": ["a", "\N{SNOWMAN}", "k" * 300],
    "fields": ["x", "y"],
    "stores": ["s1"],
    "cleared_at": 17,
    "attempt": 16,
    "task": "train",
    "used_bytes": 1 << 40,
    "limit_bytes": (1 << 40) + 1,
    "oldest_keys": ["o1", "o2"],
    "lagging_task": "reference",
    "retry_after_s": 2.5,
    "limit": "clients",
    "waited_s": 1.5,
    "explanation": "on whom it waits",
    "request_id": "0123456789abcdef/7",
    "path": "saved/step-7",
    "file": "manifest.json",
    "offset": 4711,
}


def every_error() -> list[DataplaneError]:
    """One of each class, all of its attributes set."""
    return [
        cls(f"what, which, and what to do ({name})", **{a: ATTRIBUTES[a] for a in cls.attributes})
        for name, cls in sorted(errors.ERRORS.items())
    ]


def same(one: BaseException, other: BaseException) -> bool:
    """Whether they are the same error to whoever catches it."""
    assert isinstance(one, DataplaneError)
    assert isinstance(other, DataplaneError)
    return (
        type(one) is type(other)
        and str(one) == str(other)
        and all(getattr(one, name) == getattr(other, name) for name in one.attributes)
    )


@pytest.fixture(scope="module")
def raising(plane_settings: dict[str, Any]) -> Iterator[ThreadPlane]:
    """A plane with two verbs more, which raise the error of the number they are given."""
    with thread_plane(plane_settings) as plane:
        kinds = every_error()

        def now(connection: Any, number: int, body: Any) -> None:
            raise kinds[body]

        async def later(connection: Any, number: int, body: Any) -> None:
            await asyncio.sleep(0)
            raise kinds[body]

        plane.server.verbs.update({"raise now": now, "raise later": later})
        yield plane


@pytest.mark.parametrize("verb", ["raise now", "raise later"])
@pytest.mark.parametrize("index", range(len(errors.ERRORS)), ids=sorted(errors.ERRORS))
def test_every_class_crosses_the_wire_with_its_attributes(
    raising: ThreadPlane, verb: str, index: int
) -> None:
    error = every_error()[index]
    with raising.connect() as client:
        connection = client._take(None, client._deadline(None))
        with pytest.raises(DataplaneError) as blocking:
            connection.call(verb, index, client._deadline(None))
        assert same(blocking.value, error)
        assert connection.usable
        client._give_back(connection)

        async def ask() -> None:
            joined = client._core.joined
            channel = await Channel.connect(joined.tags, joined.secret, client_id="c")
            try:
                await channel.call(verb, index)
            finally:
                channel.close()

        with pytest.raises(DataplaneError) as awaited:
            asyncio.run(ask())
        assert same(awaited.value, error)


def test_errors_are_also_the_builtin_ones_that_callers_expect() -> None:
    for name, builtin in {
        "InvalidRequest": ValueError, "KeyNotFound": KeyError, "FieldNotFound": KeyError,
        "PartitionNotFound": KeyError, "DeadlineExceeded": TimeoutError,
        "Unreachable": ConnectionError,
    }.items():  # fmt: skip
        assert issubclass(errors.ERRORS[name], builtin)


@pytest.mark.parametrize("error", every_error(), ids=lambda e: type(e).__name__)
def test_errors_are_copied_and_sent_to_other_processes_whole(error: DataplaneError) -> None:
    assert same(copy.copy(error), error)
    rebuild, parts = error.__reduce__()
    assert same(rebuild(*parts), error)


# -- connections that break ------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut(plane_settings: dict[str, Any]) -> Iterator[ThreadPlane]:
    """A plane whose connections a test closes."""
    with thread_plane(plane_settings) as plane:
        yield plane


def calls(client: Any) -> dict[str, Any]:
    """One call of every verb, each of which works as often as one likes."""

    def view() -> list[list[int]]:
        with client.kv_view(["k"], "p", ["x"], layout="list") as rows:
            return [row.tolist() for row in rows["x"]]

    return {
        "kv_put": lambda: client.kv_put("k", "p", {"x": torch.arange(3)}).keys,
        "kv_put large": lambda: client.kv_put("l", "p", {"x": torch.arange(99_999)}).keys,
        "kv_put tags": lambda: client.kv_put("k", "p", tags={"n": 1}).tags,
        "kv_batch_put": lambda: client.kv_batch_put(["k"], "p", {"x": [torch.arange(2)]}).keys,
        "kv_batch_get": lambda: client.kv_batch_get(["k"], "p", layout="list")["x"][0].tolist(),
        "kv_view": view,
        "kv_list": lambda: sorted(client.kv_list("p").keys),
        "kv_clear": lambda: client.kv_clear(["no"], "p"),
        "status": lambda: client.status()["partitions"]["p"]["keys"],
    }


VERBS = sorted(calls(None))


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_survives_the_end_of_all_its_connections(cut: ThreadPlane, verb: str) -> None:
    with cut.connect() as client:
        for name in sorted(VERBS, key=lambda name: "put" not in name):
            calls(client)[name]()  # every kind of connection is open
        want = calls(client)[verb]()
        for connection in [client._take(None, client._deadline(None)) for _ in range(8)]:
            client._give_back(connection)  # and more of them than a verb tries
        cut.cut_connections()
        assert calls(client)[verb]() == want


@pytest.mark.parametrize("verb", VERBS)
async def test_a_coroutine_survives_the_end_of_its_connection(cut: ThreadPlane, verb: str) -> None:
    async with await dataplane.async_connect(cut.name, config=cut.settings) as client:

        async def view() -> list[list[int]]:
            async with client.kv_view(["k"], "p", ["x"], layout="list") as rows:
                return [row.tolist() for row in rows["x"]]

        async def get() -> list[int]:
            return (await client.kv_batch_get(["k"], "p", layout="list"))["x"][0].tolist()

        verbs: dict[str, Any] = {
            "kv_put": lambda: client.kv_put("k", "p", {"x": torch.arange(3)}),
            "kv_put large": lambda: client.kv_put("l", "p", {"x": torch.arange(99_999)}),
            "kv_put tags": lambda: client.kv_put("k", "p", tags={"n": 1}),
            "kv_batch_put": lambda: client.kv_batch_put(["k"], "p", {"x": [torch.arange(2)]}),
            "kv_batch_get": get,
            "kv_view": view,
            "kv_list": lambda: client.kv_list("p"),
            "kv_clear": lambda: client.kv_clear(["no"], "p"),
            "status": client.status,
        }
        await verbs["kv_put"]()
        for work in verbs.values():
            await work()
        for _ in range(3):
            await asyncio.to_thread(cut.cut_connections)
            await verbs[verb]()


# -- closed clients --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_client_says_so(plane: Plane, partition: str, verb: str) -> None:
    client = plane.connect()
    client.kv_put("k", partition, {"x": torch.arange(2)})
    client.close()
    client.close()
    assert client.closed
    with pytest.raises(PlaneLost, match="closed"):
        calls(client)[verb]()
    assert plane.client.kv_list(partition).keys == ["k"], "the plane and its rows stay"


def test_rows_outlive_their_client(plane: Plane, partition: str) -> None:
    client = plane.connect()
    client.kv_put("k", partition, {"x": torch.arange(100_000)})
    got = client.kv_batch_get(["k"], partition, layout="list")["x"][0]
    client.close()
    assert torch.equal(got, torch.arange(100_000))


def test_the_modules_verbs_use_the_processs_own_client(
    plane_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataplane import session

    monkeypatch.setattr(session, "_default", None)
    with pytest.raises(PlaneLost, match="init"):
        dataplane.kv_list("p")
    with embedded_sync("default-client", plane_settings) as plane:
        dataplane.kv_put("a", "p", {"x": torch.arange(2)}, {"n": 1})
        dataplane.kv_batch_put(["b", "c"], "p", {"x": torch.arange(4).view(2, 2)}, [{}, {}])
        rows = dataplane.kv_batch_get(["c", "a"], "p", layout="packed")
        assert rows["x"].tolist() == [2, 3, 0, 1]
        with dataplane.kv_view(["b"], "p", layout="list") as view:
            assert view["x"][0].tolist() == [0, 1]
            del view
        assert dataplane.kv_list("p", where={"n": 1}).keys == ["a"]
        assert dataplane.kv_clear(["a"], "p") == 1
        with dataplane.connect(plane.name, config=plane.settings) as second:
            assert second is not plane.client
        assert dataplane.kv_list("p").keys == ["b", "c"], "the first client stays the default"
        dataplane.close()
        assert plane.client.closed
        with pytest.raises(PlaneLost):
            dataplane.kv_list("p")


def test_a_client_does_not_travel(plane: Plane) -> None:
    for client in (plane.witness, plane.another()):
        with pytest.raises(TypeError, match="connect"):
            pickle.dumps(client.client if hasattr(client, "_loop") else client)


def test_settings_are_checked() -> None:
    for wrong in ({"timeout_s": 0}, {"linger_s": -1}, {"segment_bytes": 5}, {"host": "moon"},
                  {"tls_cert": "x"}, {"unknown": 1}):  # fmt: skip
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            settings_of(wrong)
