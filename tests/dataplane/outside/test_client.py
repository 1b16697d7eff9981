"""A client that reaches its plane through a gateway, beside one that joined it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    PermissionDenied,
    PlaneLost,
    StaleWrite,
    Unauthenticated,
    Unreachable,
)
from dataplane.outside.aio import AsyncOutsideClient
from dataplane.outside.sync import OutsideClient
from dataplane.producer.loop import calling_loop
from tests.dataplane.outside.gateways import Authority, Counting, gateway, token_for
from tests.deadline import eventually


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[tuple[str, dict[str, Any], Client]]:
    """An embedded plane: its name, its settings, a client inside."""
    settings = {"host": "embedded", "capacity_bytes": 64 << 20, "segment_bytes": 4 << 20, **roots}
    name = f"outside-{os.getpid()}"
    with dataplane.init(settings, name=name) as client:
        yield name, settings, client


@pytest.fixture(scope="module")
def served(plane: tuple[str, dict[str, Any], Client], roots: dict[str, Path]) -> Iterator[Counting]:
    """A gateway that anyone of this machine may call, with small pages."""
    name, settings, _ = plane
    listen = (f"unix:{roots['shm_dir']}/gateway.sock",)
    with gateway(name, settings, listen=listen, max_page_size=3, absence_s=0.3) as server:
        yield server


@pytest.fixture
def inside(plane: tuple[str, dict[str, Any], Client]) -> Client:
    return plane[2]


@pytest.fixture
def client(served: Counting) -> Iterator[Client]:
    with dataplane.connect(address=served.addresses[0]) as client:
        yield client


@pytest.fixture
def partition(request: pytest.FixtureRequest, inside: Client) -> Iterator[str]:
    name: str = request.node.originalname
    yield name
    if name in inside.kv_list_partitions():
        inside.kv_drop_partition(name)


# -- faces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outside", "face"), [(OutsideClient, Client), (AsyncOutsideClient, AsyncClient)]
)
def test_it_has_every_verb_with_the_same_arguments(outside: type, face: type) -> None:
    def arguments(cls: type) -> dict[str, Any]:
        return {
            name: [
                (p.name, p.kind, p.default)
                for p in list(inspect.signature(member).parameters.values())[1:]
            ]
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    ours, due = arguments(outside), arguments(face)
    internal = {"close_in_child"}
    assert {name: ours.get(name) for name in due if name not in internal} == {
        name: parameters for name, parameters in due.items() if name not in internal
    }
    assert all(inspect.getdoc(getattr(outside, name)) for name in ours)


async def test_it_passes_for_a_client(client: Client, served: Counting) -> None:
    assert isinstance(client, Client)
    async with await dataplane.async_connect(address=served.addresses[0]) as other:
        assert isinstance(other, AsyncClient)
        assert other.plane_id == client.plane_id
        assert other.client_id != client.client_id


def test_module_level_verbs_use_it_where_it_came_first(
    served: Counting, inside: Client, partition: str
) -> None:
    del inside
    with dataplane.session.default_is(dataplane.connect(address=served.addresses[0])):
        dataplane.kv_put("a", partition, {"x": torch.arange(3)})
        assert dataplane.kv_batch_get(["a"], partition, layout="list")["x"][0].tolist() == [0, 1, 2]
        assert isinstance(dataplane.session.default_client(), OutsideClient)
        dataplane.session.default_client().close()


def test_what_belongs_inside_says_where_to_do_it(client: Client, tmp_path: Path) -> None:
    for call in (
        lambda: client.save_checkpoint(tmp_path / "x"),
        lambda: client.load_checkpoint(tmp_path / "x"),
        lambda: client.close(destroy=True),
        lambda: client.run(lambda core, deadline: iter(())),
    ):
        with pytest.raises(InvalidRequest, match=r"joined it by its name|join the plane by"):
            call()
    assert not client.closed
    assert client.status()["plane_id"] == client.plane_id


def test_it_closes_once_and_says_so_afterwards(served: Counting) -> None:
    client = dataplane.connect(address=served.addresses[0])
    client.close()
    client.close()
    assert client.closed
    with pytest.raises(PlaneLost, match="closed"):
        client.kv_list_partitions()


def waiting(inside: Client) -> int:
    """How many requests wait at the plane for rows or changes."""
    return sum(inside.status()["waiting"].values())


def test_who_waits_while_it_is_closed_is_told(
    served: Counting, inside: Client, partition: str
) -> None:
    client = dataplane.connect(address=served.addresses[0])
    before = waiting(inside)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.kv_wait, partition, {"never": 1})
        eventually(lambda: waiting(inside) > before, "it waits")
        client.close()
        with pytest.raises(PlaneLost, match="closed"):
            call.result(20)


async def test_a_task_that_waits_while_it_is_closed_is_not_cancelled(
    served: Counting, inside: Client, partition: str
) -> None:
    client = await dataplane.async_connect(address=served.addresses[0])
    before = waiting(inside)
    call = asyncio.create_task(client.kv_wait(partition, {"never": 1}))
    await asyncio.to_thread(eventually, lambda: waiting(inside) > before, "it waits")
    await client.close()
    with pytest.raises(PlaneLost, match="closed"):
        await call


def test_a_client_that_nobody_has_any_more_leaves_no_connection(served: Counting) -> None:
    client = dataplane.connect(address=served.addresses[0])
    transport: Any = client.reach._line.transport  # type: ignore[attr-defined]
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    eventually(lambda: transport.channel._closed, "its channel is closed")


def test_nobody_at_the_address_is_unreachable(roots: dict[str, Path]) -> None:
    with pytest.raises(Unreachable, match="no gateway answers"):
        dataplane.connect(
            address=f"grpc+unix://{roots['shm_dir']}/nobody.sock", config={"timeout_s": 0.3}
        )


# -- threads and loops ---------------------------------------------------------------------------


def test_many_threads_use_one_client(client: Client, inside: Client, partition: str) -> None:
    def work(thread: int) -> list[int]:
        for i in range(5):
            client.kv_put(f"{thread}-{i}", partition, {"x": torch.full((i + 1,), thread)})
        keys = [f"{thread}-{i}" for i in range(5)]
        rows = client.kv_batch_get(keys, partition, layout="list")
        return [int(row.sum()) for row in rows["x"]]

    with ThreadPoolExecutor(6) as pool:
        sums = list(pool.map(work, range(6)))
    assert sums == [[thread * (i + 1) for i in range(5)] for thread in range(6)]
    assert len(inside.kv_list(partition)) == 30


def test_one_asyncio_client_serves_several_loops(served: Counting, partition: str) -> None:
    client: Any = asyncio.run(dataplane.async_connect(address=served.addresses[0]))

    async def put(key: str) -> None:
        await asyncio.gather(
            *(client.kv_put(f"{key}{i}", partition, tags={"i": i}) for i in range(4))
        )

    threads = [threading.Thread(target=lambda k=k: asyncio.run(put(k))) for k in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)

    async def left() -> int:
        keys = len(await client.kv_list(partition))
        await client.close()
        return keys

    assert asyncio.run(left()) == 8


def test_a_forked_process_is_told_that_it_cannot(client: Client) -> None:
    assert client.kv_list_partitions() is not None  # it is connected
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that waits for ever is no test's to leave behind
        said = "nothing"
        try:
            client.kv_list_partitions()
        except InvalidRequest as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as told:
        assert b"spawn" in told.read()
    assert client.kv_list_partitions() is not None


def test_a_process_ends_without_a_word_whatever_it_left_open(served: Counting) -> None:
    code = (
        "import dataplane\n"
        f"client = dataplane.connect(address={served.addresses[0]!r})\n"
        "client.kv_put('a', 'left-open', tags={})\n"
        "claim = client.kv_claim('left-open', 't', count=1)\n"
        "watch = client.kv_watch('left-open')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


async def test_a_call_that_is_given_up_ends_at_the_gateway(
    served: Counting, inside: Client, partition: str
) -> None:
    async with await dataplane.async_connect(address=served.addresses[0]) as client:
        before = waiting(inside)
        call = asyncio.create_task(client.kv_wait(partition, {"never": 1}))
        await asyncio.to_thread(eventually, lambda: waiting(inside) > before, "it waits")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(eventually, lambda: waiting(inside) == before, "it waits no more")


# -- verbs ---------------------------------------------------------------------------------------


def test_a_listing_of_many_pages_is_that_of_one_moment(
    client: Client, inside: Client, partition: str
) -> None:
    rows = 11
    tags: list[dict[str, object]] = [
        {"i": i, "half": i / 2, "odd": bool(i % 2), "name": f"n{i}", "list": [i]} | {f"t{i}": None}
        for i in range(rows)
    ]
    keys = [f"k{i}" for i in range(rows)]
    inside.kv_batch_put(keys[:6], partition, {"x": [torch.arange(i) for i in range(6)]}, tags[:6])
    inside.kv_batch_put(keys[6:], partition, None, tags[6:])
    questions: list[Any] = [
        {}, {"where": {"odd": True}}, {"columns": ["i"]}, {"columns": []}, {"limit": 4},
        {"limit": 0},
    ]  # fmt: skip
    for asked in questions:
        ours, due = client.kv_list(partition, **asked), inside.kv_list(partition, **asked)
        assert (ours.keys, ours.tags, ours.revision) == (due.keys, due.tags, due.revision)
        assert (ours.fields, ours.tag_names, ours.full) == (due.fields, due.tag_names, due.full)
        assert ours.lengths("x").tolist() == due.lengths("x").tolist()
        for name in due.tag_names:
            one, other = ours.column(name), due.column(name)
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        assert ours.to_meta() == due.to_meta()
    since = client.kv_list(partition).revision
    inside.kv_clear(keys[:2], partition)
    inside.kv_put("new", partition, tags={"i": -1})
    changes = client.kv_list(partition, since=since)
    assert (changes.keys, sorted(changes.cleared), changes.full) == (["new"], keys[:2], False)


def test_a_change_of_many_answers_is_told_once(
    client: Client, inside: Client, partition: str
) -> None:
    watch = client.kv_watch(partition, timeout=20)
    text = "x" * 60_000
    keys = [f"k{i}" for i in range(40)]
    put = inside.kv_batch_put(keys, partition, None, [{"text": text} for _ in keys])
    change = next(watch)
    assert (change.rows.keys, change.revision) == (keys, put.revision)
    inside.kv_clear(keys[:3], partition)
    assert sorted(next(watch).cleared) == keys[:3]
    watch.close()  # type: ignore[attr-defined]


def test_a_watch_ends_when_nothing_changed_for_so_long(client: Client, partition: str) -> None:
    watch = client.kv_watch(partition, timeout=0.3)
    client.kv_put("a", partition, tags={})
    assert next(watch).rows.keys == ["a"]
    with pytest.raises(DeadlineExceeded, match="nothing that this watch tells of"):
        next(watch)


@pytest.mark.parametrize("waits", ["Wait", "Claim"])
def test_a_wait_in_vain_says_why_though_the_reason_came_too_late(
    client: Client, partition: str, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    transport: Any = client.reach._line.transport  # type: ignore[attr-defined]
    asks = transport.ask

    async def ask(rpc: str, message: Any, timeout: float) -> Any:
        if rpc == waits:
            raise DeadlineExceeded("it did not answer in time", waited_s=math.nan)
        return await asks(rpc, message, timeout)

    monkeypatch.setattr(transport, "ask", ask)
    client.kv_put("a", partition, tags={"v": 1})
    with pytest.raises(DeadlineExceeded) as late:
        if waits == "Wait":
            client.kv_wait(partition, {"v": 2}, timeout=0.4)
        else:
            client.kv_claim(partition, "t", count=1, where={"v": 2}, timeout=0.4)
    assert "0 of 1 rows match" in (late.value.explanation or "")
    assert late.value.explanation in str(late.value)
    assert late.value.waited_s >= 0.4


def test_a_claim_is_kept_while_its_client_is_here(
    client: Client, inside: Client, partition: str, served: Counting
) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    claim = client.kv_claim(partition, "t", count=1, lease_s=0.3)
    # Its gateway forgets who is away for 0.3 s, and the lease has a term of as long.
    eventually(lambda: served.calls["anyone", "Attend"] > 0, "it attends")
    other = inside.kv_claim(partition, "t", count=1)
    with pytest.raises(DeadlineExceeded):
        inside.kv_claim(partition, "t", count=1, timeout=1.5)
    client.kv_commit(claim)
    inside.kv_release(other)
    assert inside.kv_claim(partition, "t", count=1).keys == other.keys


def test_a_claim_of_a_client_that_left_is_offered_again(
    served: Counting, inside: Client, partition: str
) -> None:
    inside.kv_put("a", partition, tags={})
    with dataplane.connect(address=served.addresses[0]) as leaves:
        leaves.kv_claim(partition, "t", count=1, lease_s=0.1)
    again = inside.kv_claim(partition, "t", count=1, timeout=20)
    assert (again.keys, again.deliveries) == (["a"], [2])


def test_a_group_is_ended_by_another_than_began_it(
    client: Client, inside: Client, partition: str
) -> None:
    attempt = inside.begin_group("u", partition, n=1)
    client.end_group(attempt, "finished")
    assert inside.kv_list(partition).tags[0]["status"] == "finished"
    with pytest.raises(StaleWrite, match="in any partition that this client may see"):
        client.end_group(attempt + 1_000_000, "finished")


def test_a_view_is_a_copy_that_may_be_written_to(
    client: Client, inside: Client, partition: str
) -> None:
    inside.kv_put("a", partition, {"x": torch.arange(3)})
    with client.kv_view(["a"], partition, layout="list") as rows:
        rows["x"][0].fill_(7)
    assert rows.fields == {}
    assert inside.kv_batch_get(["a"], partition, layout="list")["x"][0].tolist() == [0, 1, 2]
    with (
        pytest.raises(InvalidRequest, match="padded"),
        client.kv_view(["a"], partition, layout="padded"),
    ):
        pass


def test_weights_are_read_as_they_are_inside(client: Client, inside: Client) -> None:
    weights = {"w": torch.randn(3, 4), "tied": torch.randn(2), "b": torch.ones(2).bfloat16()}
    weights["alias"] = weights["tied"]
    dataplane.publish_weights(inside, weights, 3, prefix="outside-weights")
    assert dataplane.newest_version(client, prefix="outside-weights") == 3
    with dataplane.read_weights(client, prefix="outside-weights") as read:
        assert all(read.tensors[name].equal(tensor) for name, tensor in weights.items())
    inside.kv_drop_partition("outside-weights@3")
    inside.kv_drop_partition("outside-weights")


def test_what_became_of_a_request_is_told(client: Client, partition: str) -> None:
    client.kv_put("a", partition, tags={})
    told = client.request_outcome(f"{client.client_id}/1")
    assert (told["applied"], told["verb"]) == (True, "put")
    with pytest.raises(InvalidRequest, match="client/number"):
        client.request_outcome("nonsense")


# -- credentials ---------------------------------------------------------------------------------


def test_tls_and_a_token_let_in_and_a_token_bounds(
    plane: tuple[str, dict[str, Any], Client], tmp_path: Path
) -> None:
    name, settings, inside = plane
    authority = Authority(tmp_path)
    token = token_for(tmp_path, "loop", {"mine*": ["put", "read", "list"]})
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    wrong = token_for(stranger, "loop", {"*": ["put"]})
    inside.kv_put("a", "theirs", tags={})
    config = {"token_file": tmp_path / "tokens.json", **authority.settings}
    with gateway(name, settings, listen=("127.0.0.1:0",), **config) as server:
        (address,) = server.addresses
        assert address.startswith("grpcs://")
        trusting = {"ca_file": authority.ca_file, "timeout_s": 10.0}
        with dataplane.connect(address=address, config={**trusting, "token_file": token}) as client:
            client.kv_put("a", "mine", {"x": torch.arange(3)})
            assert client.kv_batch_get(["a"], "mine", layout="list")["x"][0].tolist() == [0, 1, 2]
            assert list(client.kv_list_partitions()) == ["mine"]
            with pytest.raises(PermissionDenied) as denied:
                client.kv_list("theirs")
            with pytest.raises(PermissionDenied) as absent:
                client.kv_list("nobodys")
            assert str(denied.value).replace("theirs", "") == (
                str(absent.value).replace("nobodys", "")
            )
            assert client.status()["principal"] == "loop"
        with pytest.raises(Unauthenticated):
            dataplane.connect(address=address, config={**trusting, "token_file": wrong})
        with pytest.raises(Unauthenticated):
            dataplane.connect(address=address, config=trusting)
        with pytest.raises(Unreachable):  # the authority is not known to it
            dataplane.connect(address=address, config={"token_file": token, "timeout_s": 1.0})
    secret = token.read_text().strip()
    assert secret not in repr(client) + repr(client.reach._line.transport)  # type: ignore[attr-defined]
    inside.kv_drop_partition("mine")
    inside.kv_drop_partition("theirs")


def test_settings_of_a_certificate_are_whole_or_none() -> None:
    with pytest.raises(InvalidRequest, match="client_cert_file and client_key_file"):
        dataplane.connect(address="grpcs://localhost:1", config={"client_cert_file": "/x"})


def test_all_clients_of_a_process_share_one_loop() -> None:
    assert calling_loop() is calling_loop()


def test_a_client_may_be_collected_while_another_begins_a_call() -> None:
    """The collector runs where it likes: its finalizer begins a call in the midst of one."""
    loop = calling_loop()

    async def nothing() -> int:
        return 7

    def within() -> int:
        with loop._lock:
            return loop.start(nothing()).result(10.0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(within).result(20.0) == 7
