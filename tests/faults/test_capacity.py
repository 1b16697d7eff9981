"""A store that is full says so, in time and in words; it never dies of it, and never for long.

Small mounts are real ones, so these tests need the right to mount.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import InternalError, InvalidRequest, QuotaExceeded
from dataplane.server.ports import LocalTags
from dataplane.values.budget import mount_of
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import SEGMENT_ROOM, SMALL_STORE, MiB, Plane
from tests.faults.processes import Process, Speaker, state_of

pytestmark = pytest.mark.faults


def row(nbytes: int, value: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((nbytes,), value, dtype=torch.uint8)}


@contextmanager
def _mounted(size: int) -> Generator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dataplane-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        try:
            yield path
        finally:
            subprocess.run(["umount", str(path)], check=True)
    finally:
        shutil.rmtree(path)


@pytest.fixture
def mounted() -> Generator[Callable[[int], Path]]:
    """Makes small shared memories."""
    open_mounts: list[Any] = []

    def make(size: int) -> Path:
        open_mounts.append(_mounted(size))
        return open_mounts[-1].__enter__()

    yield make
    for mount in reversed(open_mounts):
        mount.__exit__(None, None, None)


def allocated(plane: Plane) -> list[tuple[int, int]]:
    """Size and allocated bytes of every segment file."""
    files = [path.stat() for path in plane.folders.segments.glob("*/segment-*")]
    return [(file.st_size, 512 * file.st_blocks) for file in files]


# -- small mounts ----------------------------------------------------------------------------


def test_a_plane_starts_with_what_a_small_mount_has_and_refuses_what_is_beyond(
    request: pytest.FixtureRequest, mounted: Callable[[int], Path]
) -> None:
    shm = mounted(32 * MiB)
    plane: Plane = request.getfixturevalue("own_plane")(shm_dir=shm)
    capacity = plane.counts()["capacity_bytes"]
    assert 24 * MiB < capacity < 32 * MiB
    keys: list[str] = []
    with pytest.raises(QuotaExceeded) as full:
        while True:
            key = f"k{len(keys)}"
            plane.client.kv_put(key, "p", row(MiB, len(keys)), timeout=1.0)
            keys.append(key)
    assert len(keys) >= 20
    assert full.value.limit_bytes == capacity
    assert full.value.used_bytes == plane.counts()["used_bytes"] <= capacity
    assert plane.counts()["segment_bytes"] <= capacity
    with pytest.raises(QuotaExceeded, match=f"the mount at {shm}$"):
        plane.client.kv_put("larger", "p", row(32 * MiB), timeout=1.0)
    # No process died of it, and every row is as it was put.
    assert state_of(plane.pid) in ("R", "S")
    for i, key in enumerate(keys):
        assert plane.content(key, "p") == [i]
    assert plane.client.kv_list("p").keys == keys
    plane.client.kv_clear(None, "p", where={})
    plane.client.kv_put("again", "p", row(MiB))


def test_a_put_larger_than_the_whole_store_is_refused_at_once_and_says_what_to_do(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane(**SMALL_STORE)
    began = time.monotonic()
    with pytest.raises(QuotaExceeded, match="split it, or raise capacity_bytes") as full:
        plane.client.kv_put("A", "p", row(9 * MiB))
    assert time.monotonic() - began < 5
    assert (full.value.used_bytes, full.value.limit_bytes) == (0, 8 * MiB)
    # What could be made larger is the mount, not the plane's folder in it.
    assert str(full.value).endswith(f"the mount at {mount_of(plane.folders.segments)}")
    # Up to the whole store is taken.
    plane.client.kv_put("A", "p", row(8 * MiB - 4096 - 64, 3))
    assert plane.content("A", "p") == [3]


def test_room_that_lies_apart_is_said_to(own_plane: Callable[..., Plane]) -> None:
    plane = own_plane(**SMALL_STORE)
    size = 9 * MiB // 4
    for key in ("A", "B"):
        plane.client.kv_put(key, "p", row(size))
    counts = plane.counts()
    assert counts["capacity_bytes"] - counts["used_bytes"] > size
    with pytest.raises(QuotaExceeded, match=r"the largest free run is of \d+;") as full:
        plane.client.kv_put("C", "p", row(size), timeout=1.0)
    run = int(str(full.value).partition("free run is of ")[2].partition(";")[0])
    assert MiB < run < size
    plane.client.kv_put("C", "p", row(run - 4096), timeout=1.0)
    # What does not come in one piece at any rate is not explained by it.
    with pytest.raises(QuotaExceeded) as full:
        plane.client.kv_put("D", "p", row(4 * MiB - 8192), timeout=1.0)
    assert "free run" not in str(full.value)


def test_a_mount_too_small_for_a_segment_is_refused_by_name_and_left_clean(
    roots: dict[str, Path], mounted: Callable[[int], Path]
) -> None:
    shm = mounted(2 * MiB)
    with pytest.raises(InvalidRequest) as refused, ExitStack() as stack:
        planes.start(stack, "tiny", runtime_dir=roots["runtime_dir"], shm_dir=shm)
    assert str(shm) in str(refused.value)
    assert "mount a larger tmpfs" in str(refused.value)
    assert os.listdir(shm) == []
    assert os.listdir(roots["runtime_dir"]) in ([], ["lock"])


def test_a_mount_that_others_fill_is_an_error_in_words_and_not_a_signal(
    request: pytest.FixtureRequest, mounted: Callable[[int], Path]
) -> None:
    shm = mounted(32 * MiB)
    plane: Plane = request.getfixturevalue("own_plane")(shm_dir=shm, segment_bytes=4 * MiB)
    plane.client.kv_put("A", "p", row(3 * MiB, 7))
    filler = shm / "others"
    with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * MiB)
    with pytest.raises(QuotaExceeded, match=str(shm)) as full:
        plane.client.kv_put("B", "p", row(3 * MiB), timeout=1.0)
    assert full.value.used_bytes < full.value.limit_bytes
    assert state_of(plane.pid) in ("R", "S")
    assert plane.content("A", "p") == [7]
    filler.unlink()
    plane.client.kv_put("B", "p", row(3 * MiB))


def test_segments_are_backed_before_they_are_handed_out(own_plane: Callable[..., Plane]) -> None:
    plane = own_plane(capacity_bytes=32 * MiB, segment_bytes=4 * MiB)
    assert allocated(plane) == [(4 * MiB, 4 * MiB)]
    plane.client.kv_put("A", "p", row(6 * MiB))
    sizes = sorted(allocated(plane))
    assert len(sizes) == 2
    assert all(size == blocks for size, blocks in sizes)


# -- waiting for room ------------------------------------------------------------------------


def put_when_there_is_room(speaker: Speaker, joined: Joined, config: Config, nbytes: int) -> None:
    client = Client(joined, config)
    client.status()
    speaker.say("ready")
    client.kv_put(f"late{nbytes}", "p", row(nbytes, 7))
    speaker.say(client.revision.n)


@pytest.mark.parametrize("settings", [{}, {"same_node_reads": False}], ids=["mapped", "sent"])
@pytest.mark.parametrize("nbytes", [1000, MiB])
def test_a_put_that_waits_for_room_is_served_when_another_client_clears(
    own_plane: Callable[..., Plane], nbytes: int, settings: dict[str, Any]
) -> None:
    plane = own_plane(**SMALL_STORE)
    plane.fill()
    config = plane.config.model_copy(update=settings)
    with Process(put_when_there_is_room, plane.joined, config, nbytes) as writer:
        assert writer.says() == "ready"
        plane.comes_to(waiting=1)
        plane.client.kv_clear(["0"], "full")
        cleared = plane.client.revision.n
        assert writer.says(5) > cleared
    assert plane.content(f"late{nbytes}", "p") == [7]


@pytest.mark.parametrize("settings", [{}, {"same_node_reads": False}], ids=["mapped", "sent"])
async def test_a_put_that_waits_for_room_stops_no_other_call_of_its_client(
    own_plane: Callable[..., Plane], settings: dict[str, Any]
) -> None:
    plane = await asyncio.to_thread(own_plane, **SMALL_STORE)
    await asyncio.to_thread(plane.fill)
    client = AsyncClient(plane.joined, plane.config.model_copy(update=settings))
    puts = [
        asyncio.create_task(client.kv_put(f"A{nbytes}", "p", row(nbytes))) for nbytes in (1000, MiB)
    ]
    # One connection may hold all puts up; they are then not all in the store's queue.
    await asyncio.to_thread(
        eventually, lambda: plane.counts()["waiting"] > 0, "a put waits for room"
    )
    assert (await client.kv_batch_get(["0"], "full")).keys == ["0"]
    assert await client.kv_clear(["0"], "full") == 1
    for put in puts:
        await put
    await client.close()


def test_puts_that_wait_are_served_in_the_order_in_which_they_came(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane(**SMALL_STORE)
    plane.fill()
    with ExitStack() as stack:
        waiting: list[Process] = []
        for nbytes in (SEGMENT_ROOM - 64, 1000):
            process = Process(put_when_there_is_room, plane.joined, plane.config, nbytes)
            waiting.append(stack.enter_context(process))
            assert process.says() == "ready"
            plane.comes_to(waiting=len(waiting))
        for i, process in enumerate(waiting):
            plane.client.kv_clear([str(i)], "full")
            assert process.says() > plane.client.revision.n
            plane.comes_to(waiting=1 - i)


def test_a_put_that_gives_up_waiting_leaves_its_place_to_the_next(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane(**SMALL_STORE)
    plane.fill()
    plane.client.kv_clear(["0"], "full")
    plane.client.kv_put("half", "p", row(2 * MiB))
    found: list[BaseException | None] = []

    def impatient() -> None:
        with pytest.raises(QuotaExceeded) as full:
            plane.client.kv_put("large", "p", row(3 * MiB), timeout=2.0)
        found.append(full.value)

    thread = threading.Thread(target=impatient)
    thread.start()
    plane.comes_to(waiting=1)
    plane.client.kv_put("small", "p", row(MiB), timeout=20)  # would fit, but came later
    thread.join(10)
    assert [type(error) for error in found] == [QuotaExceeded]
    assert sorted(plane.client.kv_list("p").keys) == ["half", "small"]


# -- repacking -------------------------------------------------------------------------------

ROWS = 16


def batch(number: int, nbytes: int = 64 << 10) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Rows that differ in every byte position from those of other batches."""
    made = torch.Generator().manual_seed(number)
    keys = [f"b{number}-{i}" for i in range(ROWS)]
    x = torch.randint(0, 256, (ROWS, nbytes), dtype=torch.uint8, generator=made)
    return keys, {"x": x, "y": torch.arange(ROWS) + 100 * number}


def fill_with_batches(client: Client) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
    """Six blocks of ROWS rows, which leave no room for one more in a SMALL_STORE."""
    batches = [batch(number) for number in range(6)]
    for keys, fields in batches:
        client.kv_batch_put(keys, "p", fields, [{"i": i} for i in range(ROWS)])
    with pytest.raises(QuotaExceeded):
        client.kv_put("large", "q", row(2 * MiB), timeout=1.0)
    return batches


def keep_one_row_of_each(
    client: Client, batches: Sequence[tuple[list[str], dict[str, torch.Tensor]]]
) -> dict[str, tuple[torch.Tensor, int]]:
    """Clear all but one row of each batch; what is left by key."""
    left: dict[str, tuple[torch.Tensor, int]] = {}
    for number, (keys, fields) in enumerate(batches):
        kept = (3 * number) % ROWS
        left[keys[kept]] = fields["x"][kept], int(fields["y"][kept])
        client.kv_clear([key for i, key in enumerate(keys) if i != kept], "p")
    return left


def equals(client: Client, left: dict[str, tuple[torch.Tensor, int]]) -> bool:
    """Whether exactly these rows are there, bit for bit."""
    rows = client.kv_batch_get(list(left), "p", layout="list")
    return sorted(client.kv_list("p").keys) == sorted(left) and all(
        torch.equal(rows.fields["x"][i], x) and int(rows.fields["y"][i]) == y
        for i, (x, y) in enumerate(left.values())
    )


def test_mostly_dead_blocks_are_repacked_when_a_put_would_not_fit_otherwise(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane(**SMALL_STORE)
    client = plane.client
    left = keep_one_row_of_each(client, fill_with_batches(client))
    before = client.kv_list("p")
    held = plane.counts()["used_bytes"]
    payload = plane.payload_bytes("p")
    client.kv_put("large", "q", row(3 * MiB, 7))
    assert held > 6 * MiB
    eventually(lambda: plane.counts()["used_bytes"] < 3 * MiB + MiB, "old blocks are freed")
    assert plane.payload_bytes("p") == payload
    assert equals(client, left)
    # Nobody hears of it.
    after = client.kv_list("p")
    since = client.kv_list("p", since=before.revision)
    assert after.revision == before.revision
    assert (len(since), since.cleared, since.full) == (0, [], False)
    assert dict(zip(after.keys, after.tags, strict=True)) == dict(
        zip(before.keys, before.tags, strict=True)
    )
    assert after.lengths("x").tolist() == before.lengths("x").tolist()
    with plane.another() as late:
        assert equals(late, left)
    client.kv_clear(None, "p", where={})
    client.kv_clear(None, "q", where={})
    plane.comes_to(used_bytes=0, blocks=0)


def test_a_view_keeps_its_bytes_while_its_block_is_repacked(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane(**SMALL_STORE)
    client = plane.client
    left = keep_one_row_of_each(client, fill_with_batches(client))
    key = next(iter(left))
    with client.kv_view([key], "p", ["x"], layout="list") as rows:
        client.kv_put("large", "q", row(2 * MiB, 7))
        for i in range(20):
            client.kv_put(f"more{i}", "q", row(64 << 10, i))
        assert torch.equal(rows.fields["x"][0], left[key][0])
        plane.comes_to(blocks_dead=1)
    plane.comes_to(pins=0, blocks_dead=0)
    assert equals(client, left)


def test_a_repack_that_fails_leaves_the_rows_and_holds_no_room(
    monkeypatch: pytest.MonkeyPatch, roots: dict[str, Path]
) -> None:
    repack = LocalTags.repack
    failed: list[int] = []

    async def fail_once(self: LocalTags, old: int, *arguments: Any) -> None:
        if not failed:
            failed.append(old)
            raise InternalError("made by the test")
        await repack(self, old, *arguments)

    monkeypatch.setattr(LocalTags, "repack", fail_once)
    with planes.in_thread("repack", timeout_s=20, **roots, **SMALL_STORE) as plane:
        left = keep_one_row_of_each(plane.client, fill_with_batches(plane.client))
        plane.client.kv_put("large", "q", row(3 * MiB, 7))
        assert len(failed) == 1
        assert equals(plane.client, left)
        plane.client.kv_clear(None, "p", where={})
        plane.client.kv_clear(None, "q", where={})
        plane.comes_to(used_bytes=0, blocks=0, pins=0)
