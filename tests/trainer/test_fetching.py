"""Packs that are read ahead: whose rows, how far ahead, in whose memory, and what an error does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import dataplane
from dataplane import Client, KeyNotFound
from tests.deadline import eventually
from tests.trainer.materials import Sample, packed, spec_of
from tests.trainer.reading import NotingClient, put, rows, work_of
from trainer.materialize import PackSpec, PackTensors
from trainer.plan import PlanConfig, Topology, make_plan
from trainer.ranks.copying import CopyLane
from trainer.ranks.fetching import KeptPacks, PackFeed, PackReader, Shelf
from trainer.ranks.types import RankWork
from trainer.ranks.waiting import PlaneTime, overlap
from trainer.trajectory import BatchTraits

CAP = 16


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init({**plane_settings, "host": "embedded"}, name=f"fetching-{os.getpid()}")
    yield client
    client.close(destroy=True)


def feed_of(
    client: Any, work: RankWork, shelf: Shelf | None = None, **options: Any
) -> tuple[PackFeed, PackReader]:
    spec = PackSpec(cap=CAP, traits=work.traits)
    reader = PackReader(client, work, spec, PlaneTime(), torch.Generator())
    return PackFeed(reader, shelf or Shelf(), **options), reader


def one_pack_each(samples: list[Sample]) -> RankWork:
    return work_of(
        samples, [[[i] for i in range(len(samples))]], advantages=[*map(float, range(len(samples)))]
    )


def due(samples: list[Sample], place: int) -> PackTensors:
    return packed([samples[place]], spec_of(samples, CAP), advantages=[float(place)])


def same(one: PackTensors, other: PackTensors) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("input_ids", "labels", "position_ids", "cu_seq_lens")
    ) and all(torch.equal(one[name], other[name]) for name in {*one.columns, *other.columns})


def test_a_worker_reads_the_rows_and_fields_of_its_part_alone_rg_04(plane: Client) -> None:
    samples = rows(8, uid="rg04")
    for one in samples:
        more = {"old_logprobs": one.fields["logprobs"].clone(), "messages": "hello"}
        plane.kv_put(one.row.key, "train", {**one.fields, **more})
    topology = Topology(world_size=8, tensor=2)
    plan = make_plan([CAP] * 8, PlanConfig(cap=CAP), topology.dp_size)
    asked: list[list[str]] = []
    for rank in range(topology.world_size):
        part = plan.for_rank(topology.dp_rank(rank)).in_pack_order()
        mine = part.take(samples)
        work = RankWork(
            partition_id="train", train_step=1, members=[one.row for one in mine], part=part,
            advantages=[1.0] * len(mine), global_tokens=[1],
            traits=BatchTraits.of([one.row for one in samples]),
        )  # fmt: skip
        client = NotingClient(plane)
        feed, _ = feed_of(client, work)
        for _ in range(sum(map(len, part.packs))):
            feed.next()
        feed.close()
        assert client.fields == {"input_ids", "labels", "logprobs"}
        assert len(client.keys) == 2
        asked.append(client.keys)
    assert [asked[2 * dp] for dp in range(4)] == [asked[2 * dp + 1] for dp in range(4)]
    everything = [key for dp in range(4) for key in asked[2 * dp]]
    assert sorted(everything) == sorted(one.row.key for one in samples)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_many_packs_lie_in_few_buffers_and_none_is_overwritten_in_use(
    plane: Client, ahead: int
) -> None:
    samples = rows(24, uid=f"many{ahead}")
    put(plane, samples)
    asked = begun = furthest = 0

    def note(_: list[str]) -> None:
        nonlocal begun, furthest
        begun += 1
        furthest = max(furthest, begun - asked)

    client = NotingClient(plane, note)
    shelf = Shelf()
    feed, reader = feed_of(client, one_pack_each(samples), shelf, ahead=ahead)
    for place in range(len(samples)):
        asked += 1
        pack = feed.next()
        # It reads on while this pack is in use: nobody asks it to.
        to_come = min(len(samples), place + 1 + ahead)
        eventually(lambda to_come=to_come: len(client.keys) >= to_come, "it reads ahead")
        assert same(pack, due(samples, place))
    with pytest.raises(RuntimeError, match="all packs"):
        feed.next()
    feed.close()
    assert furthest <= ahead
    assert shelf.made == ahead + 1
    assert client.keys == [one.row.key for one in samples]
    assert reader.convert_s > 0
    assert reader.pack_s > 0


def test_the_next_pack_is_read_while_one_is_trained(plane: Client) -> None:
    samples = rows(3, uid="overlap")
    put(plane, samples)
    training, read = threading.Event(), threading.Event()

    def before(keys: list[str]) -> None:
        if keys == [samples[1].row.key]:
            # This get happens in the middle of the training of the first pack, or never.
            assert training.wait(30.0)

    client = NotingClient(plane, before)
    feed, reader = feed_of(client, one_pack_each(samples))
    feed.next()
    training.set()
    eventually(lambda: samples[1].row.key in client.keys, "the second pack is there")
    read.set()
    before_s = reader.time.seconds()
    assert same(feed.next(), due(samples, 1))
    assert reader.time.seconds() - before_s < 5.0
    feed.close()


def test_kept_packs_are_all_there_and_the_next_batch_takes_over_their_memory(
    plane: Client,
) -> None:
    samples = rows(6, uid="kept")
    put(plane, samples)
    shelf = Shelf()
    for _ in range(2):
        feed, _ = feed_of(plane, one_pack_each(samples), shelf, ahead=2, keep=True)
        packs = [feed.next() for _ in samples]
        again = KeptPacks(packs, ahead=2)
        for place in range(len(samples)):
            assert same(again.next(), due(samples, place))
        feed.close()
        assert shelf.made == len(samples)


def test_packs_of_another_kind_get_other_memory(plane: Client) -> None:
    samples = rows(2, uid="kinds")
    put(plane, samples)
    shelf = Shelf()
    first, _ = feed_of(plane, one_pack_each(samples), shelf)
    assert same(first.next(), due(samples, 0))
    first.close()
    made = shelf.made
    without = work_of(samples, [[[0], [1]]])
    without = RankWork(
        **{n: getattr(without, n) for n in without.__slots__ if n != "traits"}  # type: ignore[arg-type]
    )
    second, _ = feed_of(plane, without, shelf)
    assert "logprobs" not in second.next().columns
    second.close()
    assert shelf.made > made


def test_an_empty_pack_reads_nothing_and_has_the_columns_of_the_batch_rg_40(
    plane: Client,
) -> None:
    samples = rows(1, uid="empty")
    client = NotingClient(plane)
    feed, _ = feed_of(client, work_of([], [[[], []]], batch=samples, global_tokens=[3]))
    for _ in range(2):
        pack = feed.next()
        assert pack.num_padding == CAP
        assert pack.num_supervised == 0
        assert pack["logprobs"].tolist() == [[0.0] * CAP]
        assert pack["advantages"].tolist() == [[0.0] * CAP]
    feed.close()
    assert client.keys == []


def test_a_cleared_row_is_raised_at_its_pack_and_leaves_no_buffer_behind(plane: Client) -> None:
    samples = rows(4, uid="cleared")
    put(plane, samples)
    plane.kv_clear([samples[2].row.key], "train")
    shelf = Shelf()
    feed, _ = feed_of(plane, one_pack_each(samples), shelf, ahead=3)
    for place in range(2):
        assert same(feed.next(), due(samples, place))
    with pytest.raises(KeyNotFound) as gone:
        feed.next()
    assert gone.value.keys == [samples[2].row.key]
    feed.close()
    made = shelf.made
    spec = spec_of(samples, CAP)
    for _ in range(made):
        shelf.take(spec)
    assert shelf.made == made  # all of them had come back


def test_a_feed_that_is_closed_early_reads_no_further(plane: Client) -> None:
    samples = rows(9, uid="early")
    put(plane, samples)
    client = NotingClient(plane)
    feed, _ = feed_of(client, one_pack_each(samples), ahead=2)
    feed.next()
    feed.close()
    assert len(client.keys) <= 3
    assert [t for t in threading.enumerate() if t.name == "pack-feed"] == []
    with pytest.raises(RuntimeError):
        feed.next()


def test_a_wait_counts_as_far_as_calls_were_under_way() -> None:
    assert overlap([(0, 4), (6, 8)], [(1, 2), (1, 3), (7, 9)]) == 3
    assert overlap([(0, 4)], []) == 0
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([(0, 10)], [(2, 3), (4, 5)]) == 2
    time = PlaneTime()
    with time.wait():
        pass
    assert time.seconds() == 0
    with time.wait(), time.call():
        pass
    assert time.seconds() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_to_a_gpu_overlap_with_what_it_computes(plane: Client) -> None:
    """The next pack is on the GPU before the computation that was begun first has ended."""
    samples = rows(12, uid="gpu")
    put(plane, samples)
    device = torch.device("cuda", 0)
    lane = CopyLane(device)
    shelf = Shelf(pin_memory=True)
    feed, _ = feed_of(plane, one_pack_each(samples), shelf, ahead=2, lane=lane)
    busy = torch.randn(4096, 4096, device=device)
    overlapped = 0
    for place in range(len(samples)):
        fed = feed.next_fed()
        assert fed.host.input_ids.is_pinned()
        assert fed.host["advantages"].is_pinned()
        pack = feed.received(fed)
        assert pack.input_ids.device == device
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        values = pack.input_ids * 2
        ended.record()
        sent = cast("Any", lane.send(fed.host))  # beside it
        sent.copied.synchronize()
        overlapped += not ended.query()
        assert same(sent.pack.to("cpu"), due(samples, place))
        assert torch.equal(values.cpu(), due(samples, place).input_ids * 2)
        assert began.elapsed_time(ended) > 0
    feed.close()
    assert overlapped > len(samples) // 2
    back = lane.to_host(busy[0], _recorded())
    assert torch.equal(back, busy[0].cpu())
    assert shelf.made <= 3


def _recorded() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event
