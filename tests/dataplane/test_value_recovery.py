"""A value store that comes back: its live blocks are there, bit for bit, and nothing else is."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.codec.encode import encode_batch
from dataplane.errors import InternalError, InvalidRequest, QuotaExceeded
from dataplane.server.value_service import ValueService
from dataplane.values import incarnation, recovery
from dataplane.values.blocks import Extent, State
from dataplane.values.budget import MIN_SEGMENT_BYTES, shared_memory_budget
from dataplane.values.extents import PAGE
from dataplane.values.incarnation import Ids, bytes_left, find_earlier, note
from dataplane.values.segments import Header, segment_path
from dataplane.values.store import Live, ValueStore
from tests.dataplane.stores import PLANE, SEGMENT, WHOLE, Node, live_of, read


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "s0")
    node.folder.mkdir()
    yield node
    node.kill()


@pytest.fixture(scope="module")
def small_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real tmpfs with room for four segments."""
    folder = tmp_path_factory.mktemp("small")
    size = f"size={4 * SEGMENT}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_node(small_mount: Path) -> Iterator[Node]:
    node = Node(small_mount)
    yield node
    node.kill()
    for path in small_mount.iterdir():
        path.unlink()


def segments_of(extents: list[Extent]) -> set[int]:
    return {extent.segment for extent in extents}


# -- what lives is taken over ----------------------------------------------------------------


async def test_every_live_block_is_bit_for_bit_the_same_over_many_kills(node: Node) -> None:
    live: dict[int, Extent] = {}
    for _ in range(5):
        store = await node.start()
        assert await store.reconcile(live_of(live.values())) == []
        assert node.intact(store, live.values())
        assert store.used_bytes == sum(-(-e.nbytes // PAGE) * PAGE for e in live.values())
        for _ in range(30):
            extent = await node.put(store, node.random.randint(1, 5 * PAGE))
            live[extent.block] = extent
        await node.put(store, publish=False)
        await node.reserve(store)
        for block in node.random.sample(sorted(live), 20):
            store.kill([block])
            del live[block]
        assert node.intact(store, live.values())
    store = await node.start()
    assert await store.reconcile(live_of(live.values())) == []
    assert node.intact(store, live.values())
    store.kill(list(live))
    assert store.used_bytes == 0
    assert node.files() == [path.name for path in (s.path for s in store.segments.values())]
    store.close()
    assert not node.folder.exists()


async def test_clients_know_the_store_that_comes_back_and_their_mappings_hold(node: Node) -> None:
    store = await node.start()
    kept, cleared = await node.put(store), await node.put(store)
    nonce, reader = store.nonce, node.reader(store)
    looked_at = reader.readable(cleared.segment)[cleared.offset : cleared.offset + cleared.nbytes]
    store = await node.start()
    assert store.nonce == nonce
    await store.reconcile(live_of([kept]))
    assert read(reader, kept) == node.content[kept.block]
    store.kill([kept.block])
    assert not segment_path(node.folder, kept.segment).exists()
    for _ in range(40):
        await node.put(store)
    # Who mapped the old segment keeps its bytes, and finds the new ones beside them.
    assert looked_at.tobytes() == node.content[cleared.block]
    assert read(reader, kept) == node.content[kept.block]
    new = await node.put(store)
    assert read(reader, new) == node.content[new.block]


async def test_nothing_is_ever_written_into_an_old_segment(node: Node) -> None:
    store = await node.start()
    live = [await node.put(store) for _ in range(3)]
    (old,) = segments_of(live)
    before = segment_path(node.folder, old).read_bytes()
    store = await node.start()
    await store.reconcile(live_of(live))
    assert store.segments[old].view.readonly
    assert store.memory(live[0]).readonly
    with pytest.raises(TypeError, match="read-only"):
        store.memory(live[0])[:1] = b"x"
    assert node.rights(old) == "r--s"
    new = [await node.put(store, nbytes) for nbytes in (1, PAGE, WHOLE) for _ in range(10)]
    assert old not in segments_of(new)
    store.kill([live[0].block])
    new += [await node.put(store) for _ in range(30)]
    assert old not in segments_of(new)
    assert segment_path(node.folder, old).read_bytes() == before


def test_a_write_past_python_kills_the_process_and_changes_nothing(node: Node) -> None:
    """In a child of its own: the page table refuses what a stray pointer would write."""
    script = f"""
import asyncio, ctypes, sys
from pathlib import Path
import numpy as np
from tests.dataplane.stores import Node, live_of

async def main():
    node = Node(Path(sys.argv[1]))
    store = await node.start()
    extent = await node.put(store)
    store = await node.start()
    await store.reconcile(live_of([extent]))
    at = np.frombuffer(store.memory(extent), np.uint8).__array_interface__["data"][0]
    print(ctypes.string_at(at, 1) == node.content[extent.block][:1], flush=True)
    ctypes.memset(at, 0x55, {PAGE})
    print("survived")

asyncio.run(main())
"""
    child = subprocess.run(
        [sys.executable, "-c", script, str(node.folder)], capture_output=True, text=True
    )
    assert (child.returncode, child.stdout) == (-11, "True\n"), child.stderr
    (path,) = (p for p in node.folder.glob("segment-1"))
    assert b"\x55" * 16 not in path.read_bytes()


async def test_old_segments_stay_until_the_tag_store_has_spoken(node: Node) -> None:
    store = await node.start()
    live = [await node.put(store, WHOLE) for _ in range(3)]
    store = await node.start()
    assert store.recovering
    dead = await node.put(store)
    store.kill([dead.block, live[0].block])  # makes the store look for what it can unlink
    assert {f"segment-{n}" for n in segments_of(live)} < set(node.files())
    assert store.blocks.pin([live[1].block], "r").gone == [live[1].block]
    await store.reconcile(live_of(live[1:2]))
    assert not store.recovering
    there = {f"segment-{n}" for n in segments_of(live)} & set(node.files())
    assert there == {f"segment-{live[1].segment}"}
    assert store.blocks.pin([live[1].block], "r").gone == []
    assert len(store.segments) == store.counts()["segments"] == len(node.files())


async def test_a_pinned_block_of_an_old_segment_keeps_it_there(node: Node) -> None:
    store = await node.start()
    extent = await node.put(store)
    store = await node.start()
    await store.reconcile(live_of([extent]))
    pin = store.blocks.pin([extent.block], "reader")
    store.kill([extent.block])
    assert bytes(store.memory(extent)) == node.content[extent.block]
    assert segment_path(node.folder, extent.segment).exists()
    store.unpin(pin.handle, "reader")
    assert not segment_path(node.folder, extent.segment).exists()


async def test_bytes_of_an_old_block_are_repacked_into_a_new_segment(node: Node) -> None:
    store = await node.start()
    block = encode_batch(["a", "b", "c"], {"x": torch.arange(12).reshape(3, 4)})
    old = await node.put(store, block.nbytes)
    block.write_into(store.memory(old))
    store = await node.start()
    await store.reconcile(live_of([old]))

    class Tags:
        """A tag store in which one row of the old block lives."""

        moved: Any = None

        async def repack_candidates(self, limit: int, segment: int | None = None) -> list[Any]:
            return [(old.block, block.template.blob, 3, block.lengths, [1], [0], ["x"])]

        async def repack(self, old_block: int, placement: Any, moves: list[Any]) -> None:
            self.moved = placement

    tags = Tags()
    service = ValueService(store, tags)  # type: ignore[arg-type]
    assert await service.repacking.repack()
    new = Extent(*tags.moved[:4])
    assert new.segment != old.segment
    assert store.blocks.state(new.block) is State.PUBLISHED
    assert np.frombuffer(store.memory(new)[64:96], np.int64).tolist() == [4, 5, 6, 7]
    store.kill([old.block])
    assert not segment_path(node.folder, old.segment).exists()


# -- ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 3600.0, -3600.0], ids=["same", "later", "set back"])
async def test_no_id_comes_twice_even_of_what_nobody_heard_of(node: Node, seconds: float) -> None:
    store = await node.start()
    used = [await node.put(store, WHOLE, publish=False) for _ in range(4)]
    used += [await node.reserve(store) for _ in range(3)]
    segments = segments_of(used)
    for extent in used:
        store.abort(extent.block)
    while len(empty := store.blocks.empty_segments()) > 1:
        store._give_back(max(empty))  # so that no file shows how far it had come
    node.now += seconds - 1.0
    store = await node.start()
    again = [await node.put(store, WHOLE) for _ in range(6)]
    assert min(extent.block for extent in again) > max(extent.block for extent in used)
    assert min(segments_of(again)) > max(segments)
    assert max(extent.block for extent in again) < 1 << 63


async def test_blocks_have_new_ids_where_the_folder_was_lost(node: Node) -> None:
    store = await node.start()
    used = [await node.put(store) for _ in range(5)]
    nonce = store.nonce
    for path in node.folder.iterdir():
        path.unlink()
    node.now -= 100.0  # the clock of the machine that comes back is behind
    store = await node.start()
    assert store.nonce != nonce
    assert not store.recovering
    assert await store.reconcile(live_of(used)) == [extent.block for extent in used]
    assert (await node.put(store)).block > max(extent.block for extent in used)


async def test_a_segment_id_is_noted_before_its_segment_is_made(node: Node) -> None:
    note(node.folder, Ids(40, 7))
    store = await node.start()
    assert list(store.segments) == [40]
    (path,) = node.folder.glob("ids-*")
    assert path.name.startswith("ids-41-")
    note(node.folder, Ids(50, 1 << 62))
    assert [p.name for p in node.folder.glob("ids-*")] == [f"ids-50-{1 << 62}"]
    for spent in (Ids(1 << 32, 1), Ids(1, 1 << 63), Ids(0, 1)):
        with pytest.raises(InternalError, match="no ids are left"):
            note(node.folder, spent)
    with pytest.raises(InternalError, match="nowhere"):
        note(node.folder / "nowhere", Ids(1, 1))


# -- what cannot be taken over ---------------------------------------------------------------


async def test_segments_that_are_not_this_stores_or_damaged_are_lost_by_name(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    store = await node.start()
    live = [await node.put(store, WHOLE) for _ in range(7)]
    good, plane, other, torn, cut, grown, renamed = live
    path_of = {e.block: segment_path(node.folder, e.segment) for e in live}

    node.rewrite_header(plane.segment, plane_id="fedcba9876543210")
    node.rewrite_header(other.segment, store_id="s1")
    node.wipe_header(torn.segment)
    os.truncate(path_of[cut.block], SEGMENT - PAGE)
    os.truncate(path_of[grown.block], SEGMENT + PAGE)
    node.rewrite_header(renamed.segment, segment_id=999)
    link = segment_path(node.folder, 900)
    link.symlink_to(path_of[good.block])
    (node.folder / "segment-007").write_bytes(b"not one of ours")

    store = await node.start()
    lost = await store.reconcile(live_of(live))
    assert sorted(lost) == sorted(e.block for e in live[1:])
    assert node.intact(store, [good])
    for extent in live[1:]:
        assert str(path_of[extent.block]) in caplog.text
        # A file with live blocks is not removed: somebody may want to look at it.
        assert path_of[extent.block].exists()
    assert min(store.segments, key=lambda i: (i == good.segment, i)) > 900
    assert not link.is_symlink()
    assert (node.folder / "segment-007").read_bytes() == b"not one of ours"


async def test_what_a_kill_left_half_made_is_removed_unless_it_is_anothers(node: Node) -> None:
    store = await node.start()
    extent = await node.put(store)
    half = segment_path(node.folder, 50)
    half.write_bytes(bytes(SEGMENT))
    foreign = segment_path(node.folder, 51)
    foreign.write_bytes(Header("f" * 16, "s0", 51, SEGMENT, b"n" * 16).pack().ljust(SEGMENT, b"\0"))
    store = await node.start()
    assert half.exists()
    await store.reconcile(live_of([extent]))
    assert not half.exists()
    assert foreign.exists()
    store.close()
    assert [path.name for path in node.folder.iterdir()] == ["segment-51"]


async def test_segments_of_another_nonce_are_not_taken_over(node: Node) -> None:
    """Clients could not open them: the newest one's nonce is the store's."""
    store = await node.start()
    first = await node.put(store, WHOLE)
    second = await node.put(store, WHOLE)
    nonce = store.nonce
    node.rewrite_header(first.segment, nonce=b"another incarnat")
    earlier = find_earlier(node.folder, plane_id=PLANE, store_id="s0")
    assert (list(earlier.segments), list(earlier.damaged)) == ([second.segment], [first.segment])
    store = await node.start()
    assert store.nonce == nonce
    assert await store.reconcile(live_of([first, second])) == [first.block]
    assert node.intact(store, [second])


async def test_a_segment_that_goes_between_start_and_the_tag_stores_word_is_lost(
    node: Node,
) -> None:
    store = await node.start()
    live = [await node.put(store, WHOLE) for _ in range(2)]
    store = await node.start()
    segment_path(node.folder, live[0].segment).unlink()
    assert await store.reconcile(live_of(live)) == [live[0].block]
    assert node.intact(store, live[1:])


async def test_a_process_without_descriptors_loses_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a segment cannot be opened just now is no evidence that its bytes are gone."""
    store = await node.start()
    live = [await node.put(store, WHOLE) for _ in range(3)]

    def fail(path: Path) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(incarnation, "_open", fail)
        with pytest.raises(InternalError, match="Too many open files"):
            await node.start()
    store = await node.start()
    with monkeypatch.context() as patch:
        patch.setattr(incarnation, "_open", fail)
        with pytest.raises(InternalError, match="Too many open files"):
            await store.reconcile(live_of(live))
    assert store.recovering
    assert await store.reconcile(live_of(live)) == []
    assert node.intact(store, live)


async def test_a_block_that_cannot_be_where_it_is_said_to_be_is_lost(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    store = await node.start()
    good = [await node.put(store) for _ in range(3)]
    at = good[0]
    wrong = [
        Extent(11, at.segment, at.offset, PAGE),  # over a good one
        Extent(12, at.segment, SEGMENT, PAGE),
        Extent(13, at.segment, 0, PAGE),
        Extent(14, at.segment, 14 * PAGE, 3 * PAGE),
        Extent(15, 77, PAGE, PAGE),  # in a segment that never was
    ]
    store = await node.start()
    assert sorted(await store.reconcile(live_of([*good, *wrong]))) == [11, 12, 13, 14, 15]
    assert node.intact(store, good)
    assert f"4 live blocks cannot be where they are said to be in segment {node.folder}" in (
        caplog.text
    )


@pytest.mark.parametrize(
    "live",
    [
        Live(*(np.zeros(n, np.int64) for n in (2, 2, 1, 2))),
        Live(*(np.zeros(2, np.int32) for _ in range(4))),
        Live(*(np.zeros((2, 1), np.int64) for _ in range(4))),
    ],
    ids=["lengths", "dtype", "shape"],
)
async def test_what_is_no_list_of_blocks_changes_nothing(node: Node, live: Live) -> None:
    store = await node.start()
    extent = await node.put(store)
    store = await node.start()
    with pytest.raises(InvalidRequest, match="four arrays"):
        await store.reconcile(live)
    assert store.recovering
    assert await store.reconcile(live_of([extent])) == []


# -- a tag store that was restarted ----------------------------------------------------------


async def test_what_is_not_live_ends_and_what_is_under_way_stays(node: Node) -> None:
    store = await node.start()
    live, unheard, lost = [await node.put(store) for _ in range(3)]
    sealed, told = await node.put(store, publish=False), await node.put(store, publish=False)
    reserved = await node.reserve(store)
    pinned = await node.put(store)
    pin = store.blocks.pin([pinned.block], "r")
    store.kill([lost.block])
    for _ in range(2):  # the second time nothing is left to do
        assert await store.reconcile(live_of([live, told, lost])) == [lost.block]
        states = [
            store.blocks.state(e.block) for e in (live, unheard, sealed, told, reserved, pinned)
        ]
        assert states == [
            State.PUBLISHED, None, State.PUBLISHING, State.PUBLISHING, State.RESERVED, State.DEAD,
        ]  # fmt: skip
    store.unpin(pin.handle, "r")
    assert store.blocks.state(pinned.block) is None


async def test_a_live_block_that_lies_elsewhere_here_is_lost(node: Node) -> None:
    store = await node.start()
    extent = await node.put(store)
    assert await store.reconcile(live_of([extent._replace(offset=2 * PAGE)])) == [extent.block]
    assert await store.reconcile(live_of([extent])) == []


async def test_all_cleared_leaves_no_byte_and_no_file(node: Node) -> None:
    store = await node.start()
    live = [await node.put(store, WHOLE) for _ in range(4)]
    store = await node.start()
    await store.reconcile(live_of(live[:2]))
    await store.reconcile(live_of([]))
    assert (store.used_bytes, len(store.blocks)) == (0, 0)
    assert len(node.files()) == len(store.segments) == 1
    assert segments_of(live).isdisjoint(store.segments)


# -- others go on meanwhile ------------------------------------------------------------------


async def test_others_go_on_while_it_walks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths and publications that are heard meanwhile count, whatever the list says."""
    monkeypatch.setattr(recovery, "STEP_BLOCKS", 1)
    monkeypatch.setattr(recovery, "SLICE_S", -1.0)
    for turns in range(1, 400, 7):
        folder = node.folder / str(turns)
        folder.mkdir()
        one = Node(folder)
        store = await one.start()
        live = [await one.put(store) for _ in range(30)]
        store = await one.start()
        sealed = await one.put(store, publish=False)
        walk = asyncio.ensure_future(store.reconcile(live_of(live)))
        for _ in range(turns):
            await asyncio.sleep(0)
        dead, left = live[::3], [e for i, e in enumerate(live) if i % 3]
        store.kill([e.block for e in dead])
        store.published(sealed.block)
        new = await one.put(store)
        assert await walk == []
        assert [store.blocks.state(e.block) for e in dead] == [None] * len(dead)
        assert one.intact(store, [*left, sealed, new])
        assert all(store.blocks.state(e.block) is State.PUBLISHED for e in (*left, sealed, new))
        store.kill([e.block for e in (*left, sealed, new)])
        assert (store.used_bytes, len(one.files())) == (0, 1)
        one.kill()


async def test_it_may_be_given_up_anywhere_and_begun_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "STEP_BLOCKS", 1)
    monkeypatch.setattr(recovery, "SLICE_S", -1.0)
    for turns in range(1, 400, 7):
        folder = node.folder / str(turns)
        folder.mkdir()
        one = Node(folder)
        store = await one.start()
        live = [await one.put(store, 3 * PAGE) for _ in range(20)]
        store = await one.start()
        walk = asyncio.ensure_future(store.reconcile(live_of(live)))
        for _ in range(turns):
            await asyncio.sleep(0)
        walk.cancel()
        await asyncio.gather(walk, return_exceptions=True)
        left = live[5:]  # some died before the second time
        assert await store.reconcile(live_of(left)) == []
        assert one.intact(store, left)
        assert store.used_bytes == len(left) * 3 * PAGE
        assert len(store.blocks) == len(left)
        store.kill([e.block for e in left])
        assert (store.used_bytes, len(one.files())) == (0, 1)
        one.kill()


async def test_two_walks_come_one_after_the_other(node: Node) -> None:
    store = await node.start()
    live = [await node.put(store) for _ in range(10)]
    store = await node.start()
    walks = [store.reconcile(live_of(live)), store.reconcile(live_of(live[:4]))]
    assert await asyncio.gather(*walks) == [[], []]
    assert len(store.blocks) == 4


# -- no room at the start --------------------------------------------------------------------


async def refused(store: ValueStore, nbytes: int) -> bool:
    """Whether a put that waits for nobody finds no room."""
    place = store.allocate(nbytes, "writer", 0.0)
    try:
        extent = place if isinstance(place, Extent) else await place
    except QuotaExceeded:
        return True
    store.abort(extent.block)
    return False


async def test_a_budget_that_old_segments_fill_lets_the_store_start_and_recover(node: Node) -> None:
    store = await node.start()
    live = [await node.put(store, WHOLE) for _ in range(4)]
    store = await node.start(capacity=2 * SEGMENT)
    assert store.segments == {}
    assert store.counts()["segment_bytes"] == 4 * SEGMENT
    assert await store.reconcile(live_of(live)) == []
    assert node.intact(store, live)
    assert await refused(store, PAGE)
    waiting = store.allocate(PAGE, "writer", 60.0)
    assert isinstance(waiting, asyncio.Future)
    store.kill([e.block for e in live[:2]])
    assert await refused(store, PAGE)
    assert not waiting.done()
    store.kill([live[2].block])
    extent = await waiting
    assert extent.segment not in segments_of(live)
    assert node.intact(store, live[3:])
    assert store.counts()["segment_bytes"] == 2 * SEGMENT


async def test_a_full_mount_lets_the_store_start_and_recover(small_node: Node) -> None:
    node = small_node
    store = await node.start(capacity=4 * SEGMENT)
    live = [await node.put(store, WHOLE) for _ in range(3)]
    filler = node.folder / "filler"
    filler.write_bytes(bytes(SEGMENT))
    store = await node.start(capacity=64 * SEGMENT)
    assert store.segments == {}
    with pytest.raises(QuotaExceeded, match="no new segment could be made"):
        place = store.allocate(PAGE, "writer", 0.0)
        assert isinstance(place, asyncio.Future)
        await place
    assert await store.reconcile(live_of(live)) == []
    assert await refused(store, PAGE)
    store.kill([live[0].block])
    assert not await refused(store, PAGE)
    assert node.intact(store, live[1:])
    store.close()
    assert os.listdir(node.folder) == ["filler"]


async def test_a_store_without_room_or_anything_old_does_not_start(small_node: Node) -> None:
    (small_node.folder / "filler").write_bytes(bytes(4 * SEGMENT - PAGE))
    with pytest.raises(QuotaExceeded, match=str(small_node.folder)):
        await small_node.start()
    assert small_node.files() == []


async def test_what_the_store_has_already_counts_to_what_it_can_have(node: Node) -> None:
    no_cgroup = {"cgroup_root": "/nonexistent", "membership": "/nonexistent"}
    assert bytes_left(node.folder / "nowhere") == bytes_left(node.folder) == 0
    store = await node.start()
    for _ in range(3):
        await node.put(store, WHOLE)
    own = bytes_left(node.folder)
    assert own == 3 * SEGMENT
    free = shared_memory_budget(node.folder, None, **no_cgroup)
    more = shared_memory_budget(node.folder, None, own_bytes=1 << 30, **no_cgroup)
    assert more.capacity_bytes > free.capacity_bytes + (1 << 29)
    least = shared_memory_budget(node.folder, None, 1 << 60, own_bytes=own, **no_cgroup)
    assert least.capacity_bytes == MIN_SEGMENT_BYTES


async def test_closing_gives_back_old_segments_too(node: Node) -> None:
    store = await node.start()
    await node.put(store, WHOLE)
    store = await node.start()
    assert store.recovering
    store.close()
    assert not node.folder.exists()


async def test_the_folder_is_read_and_not_changed_by_looking(node: Node) -> None:
    store = await node.start()
    await node.put(store, WHOLE)
    before = node.bytes_there()
    earlier = find_earlier(node.folder, plane_id=PLANE, store_id="s0")
    assert (earlier.nonce, earlier.segments, earlier.damaged) == (store.nonce, {1: SEGMENT}, {})
    assert earlier.segment_bytes == SEGMENT
    assert earlier.ids.segment == 2
    other = find_earlier(node.folder, plane_id=PLANE, store_id="s1")
    assert (other.nonce, other.segments, other.damaged) == (None, {}, {})
    assert node.bytes_there() == before


# -- what is held for groups -----------------------------------------------------------------


async def test_holds_are_what_the_tag_store_keeps_room_for(node: Node) -> None:
    store = await node.start(capacity=SEGMENT)
    for attempt, pages in ((-3, 1), (5, 4), (6, 2), (7, 2)):
        assert store.hold(attempt, pages * PAGE, 0.0) is None
    assert store.reconcile_holds({5: 3 * PAGE, 6: 9 * PAGE, 8: PAGE, 9: 0}) == [8]
    assert {n: store.holds.of(n) for n in (-3, 5, 6, 7, 8)} == {
        -3: 0, 5: 3 * PAGE, 6: 2 * PAGE, 7: 0, 8: 0,
    }  # fmt: skip
    assert (store.holds.held_bytes, len(store.holds)) == (5 * PAGE, 2)
    assert store.reconcile_holds({5: 3 * PAGE, 6: 9 * PAGE, 8: PAGE}) == [8]
    assert store.hold(8, PAGE, 0.0) is None
    assert store.hold(-3, PAGE, 0.0) is None  # the new tag store counts its tokens anew
    assert store.reconcile_holds({}) == []
    assert (store.holds.held_bytes, store.holds.pooled_bytes) == (0, 0)


async def test_who_waits_for_a_hold_is_told_that_its_asker_is_gone(node: Node) -> None:
    store = await node.start(capacity=SEGMENT)
    extent = await node.put(store, WHOLE)
    waiting = [store.hold(n, PAGE, 60.0) for n in (-1, 5)]
    assert store.reconcile_holds({5: PAGE}) == [5]
    for future in waiting:
        assert future is not None
        with pytest.raises(InvalidRequest, match="was restarted"):
            await future
    again = store.hold(5, PAGE, 60.0)
    assert again is not None
    store.kill([extent.block])
    await again
    assert store.holds.of(5) == PAGE


async def test_a_store_that_comes_back_holds_nothing(node: Node) -> None:
    store = await node.start()
    assert store.hold(5, PAGE, 0.0) is None
    store = await node.start()
    await store.reconcile(live_of([]))
    assert store.reconcile_holds({5: PAGE, 6: PAGE}) == [5, 6]
