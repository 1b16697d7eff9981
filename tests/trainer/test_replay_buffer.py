"""Samples of a real plane: waited for, claimed, filtered and replaced, finished or given back."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import (
    AsyncClient,
    ClaimLost,
    Client,
    DeadlineExceeded,
    KeyNotFound,
    StaleWrite,
    async_connect,
)
from tests.deadline import eventually_async
from tests.faults import stores
from tests.faults.stores import Stores
from tests.trainer.producer import Producer
from trainer.errors import PlanError, Starved
from trainer.replay_buffer import ReplayBuffer, Sample
from trainer.select import ReplayPolicy, select_valid

_numbers = itertools.count(1)

LATE_S = 0.4
"""The deadline of samples that are in vain."""


@pytest.fixture(scope="module")
def settings(plane_settings: dict[str, Any]) -> dict[str, Any]:
    return {**plane_settings, "host": "embedded"}


@pytest.fixture(scope="module")
def plane(settings: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init(settings, name=f"replay-{os.getpid()}")
    yield client
    client.close(destroy=True)


Connect = Callable[[], Any]


@pytest.fixture
async def connect(plane: Client, settings: dict[str, Any]) -> AsyncIterator[Connect]:
    """More clients of the plane, closed at the end."""
    opened: list[AsyncClient] = []

    async def connected() -> AsyncClient:
        opened.append(await async_connect(f"replay-{os.getpid()}", config=settings))
        return opened[-1]

    yield connected
    for client in opened:
        await client.close()


@pytest.fixture
async def client(connect: Connect) -> AsyncClient:
    return await connect()


@pytest.fixture
def partition(plane: Client) -> Iterator[str]:
    name = f"train-{next(_numbers)}"
    yield name
    if name in plane.kv_list_partitions():
        plane.kv_drop_partition(name)


@pytest.fixture
def make(client: AsyncClient, partition: str) -> Producer:
    return Producer(client, partition)


class Counted:
    """A client of which every call is counted, and told to `before` when it begins."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.calls: list[str] = []
        self.before: Callable[[int], None] = lambda _: None

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.client, name)

        def counted(*args: Any, **named: Any) -> Any:
            self.calls.append(name)
            self.before(len(self.calls))
            return verb(*args, **named)

        return counted


def buffer(client: Any, partition: str, policy: ReplayPolicy | None = None, **more: Any) -> Any:
    more.setdefault("timeout_s", 30.0)
    return ReplayBuffer(client, policy or ReplayPolicy(), partition_id=partition, **more)


def uids(sample: Sample) -> list[str]:
    return [group.uid for group in sample.groups]


def keys(plane: Client, partition: str) -> list[str]:
    return sorted(plane.kv_list(partition).keys)


async def free(client: AsyncClient, partition: str, count: int, task: str = "train") -> list[str]:
    """Claims so many rows, which must be free at once, and gives them back."""
    claim = await client.kv_claim(partition, task, count=count, timeout=10)
    await client.kv_release(claim)
    return sorted(claim.keys)


async def none_free(client: AsyncClient, partition: str, task: str = "train") -> bool:
    with pytest.raises(DeadlineExceeded):
        await client.kv_claim(partition, task, count=1, timeout=0.05)
    return True


# -- waiting -----------------------------------------------------------------------------------


async def test_a_sample_is_woken_when_the_last_group_ends_and_takes_the_oldest_first(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    await make.group("new", step=7)
    await make.submit("old", "mid", step=None)
    for uid, step in (("old", 3), ("mid", 5)):
        await client.kv_put(uid, partition, tags={"global_steps": step}, must_exist=True)
        await make.begin(uid)
    counted = Counted(await connect())
    sampling = asyncio.create_task(buffer(counted, partition).sample(7, 3))
    await eventually_async(lambda: _has(counted, "kv_watch"), "it waits")
    before = len(counted.calls)
    for uid in ("old", "mid"):
        await make.put(uid, 0)
        assert not sampling.done()
        await make.put(uid, 1, 0.0)
        await make.end(uid)
    sample = await sampling
    assert uids(sample) == ["old", "mid", "new"]
    assert sample.keys == [key for u in uids(sample) for key in (u, f"{u}_0_0", f"{u}_1_0")]
    held = sorted(key for claim in sample.claims for key in claim.keys)
    assert held == sorted(sample.keys)
    # A change of a prompt wakes it, nothing else does: there were two that matter.
    assert len(counted.calls) - before <= 16
    assert not set(counted.calls) & {"kv_batch_get", "kv_view", "kv_put"}
    assert sample.metrics["training/rollout_failure/evicted_samples"] == 0


async def _has(counted: Counted, name: str) -> bool:
    return name in counted.calls


async def test_the_deadline_says_what_is_missing_and_on_whom_it_waits(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    await make.group("a")
    await make.submit("b")
    await make.begin("b")
    with pytest.raises(DeadlineExceeded) as late:
        await buffer(client, partition, timeout_s=LATE_S).sample(4, 2)
    assert "no batch of 2 groups" in str(late.value)
    assert "1 of 2 groups are there, 1 in flight" in str(late.value)
    assert late.value.waited_s >= LATE_S
    assert "'b': running for" in (late.value.explanation or "")
    assert await free(client, partition, 4)


async def test_torchforge_557_a_batch_that_nothing_can_fill_is_starved_at_once(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    with pytest.raises(Starved, match="0 of 2 groups are there, 0 in flight"):
        await buffer(client, partition).sample(1, 2)
    await make.group("a")
    with pytest.raises(Starved, match="1 of 2 groups are there, 0 in flight; nothing was submit"):
        await buffer(client, partition).sample(1, 2)
    assert await free(client, partition, 3) == ["a", "a_0_0", "a_1_0"]


async def test_torchforge_557_age_0_ends_where_producers_cannot_deliver_what_is_fresh(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    """The trainer is at 13, its producers stay at 12: every group is too old when it comes."""
    policy = ReplayPolicy(mode="async", max_span=1, max_refill_rounds=3)
    asked: list[int] = []

    async def refill(prompts: int) -> None:
        asked.append(prompts)
        for i in range(prompts):
            await make.group(f"again-{len(asked)}-{i}", step=12)

    for uid in "ab":
        await make.group(uid, step=12)
    with pytest.raises(PlanError, match=r"replaced 3 times and 0 of 2 .* 8 groups were evicted"):
        await buffer(client, partition, policy, refill=refill).sample(13, 2)
    assert asked == [2, 2, 2]

    async def nothing(prompts: int) -> None:
        asked.append(prompts)

    with pytest.raises(Starved, match="2 were evicted"):
        await buffer(client, partition, policy, refill=nothing).sample(13, 2)
    assert keys(plane, partition) == []


async def test_a_refill_that_never_returns_ends_at_the_deadline(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    async def refill(_: int) -> None:
        await asyncio.Event().wait()

    await make.group("a", [], status="failure", n=2)
    sampling = buffer(
        client, partition, ReplayPolicy(failed="refill"), refill=refill, timeout_s=LATE_S
    )
    with pytest.raises(DeadlineExceeded, match="`refill` of 1 prompts did not return"):
        await sampling.sample(1, 1)


async def test_an_error_of_the_refill_is_what_the_sample_ends_with(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    async def refill(_: int) -> None:
        raise TimeoutError("its own")

    await make.group("a", [], status="failure", n=2)
    sampling = buffer(client, partition, ReplayPolicy(failed="refill"), refill=refill)
    with pytest.raises(TimeoutError, match="its own"):
        await sampling.sample(1, 1)


# -- filters and replacements --------------------------------------------------------------------


async def test_omni_358_a_leftover_is_dropped_and_exactly_one_prompt_asked_for(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    whole = await make.group("a")
    leftover = await make.group("b", [1.0], status="failure", n=2)
    asked: list[int] = []

    async def refill(prompts: int) -> None:
        asked.append(prompts)
        assert not set(leftover) & set(keys(plane, partition))
        await make.group("c", step=2)

    policy = ReplayPolicy(failed="refill", max_refill_rounds=1)
    sample = await buffer(client, partition, policy, refill=refill).sample(2, 2)
    assert asked == [1]
    assert uids(sample) == ["a", "c"]
    assert keys(plane, partition) == sorted([*whole, "c", "c_0_0", "c_1_0"])
    assert sample.metrics["training/rollout_failure/evicted_samples"] == 1


async def test_areal_450_replacing_is_bounded_and_says_how_often_it_was_done(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    async def refill(prompts: int) -> None:
        for _ in range(prompts):
            await make.group(f"flat-{next(_numbers)}", [1.0, 1.0])

    policy = ReplayPolicy(drop_identical=True, train_batch_size=4, max_refill_rounds=3)
    await refill(4)
    with pytest.raises(PlanError) as error:
        await buffer(client, partition, policy, refill=refill).sample(1, 4)
    assert "replaced 3 times and 0 of 4 groups" in str(error.value)
    assert "16 groups were evicted" in str(error.value)
    assert len(await free(client, partition, 4 * 3)) == 12  # the last ones are nobody's


async def test_the_surplus_of_a_filtered_batch_is_cleared_whole(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    asked: list[int] = []

    async def refill(prompts: int) -> None:
        asked.append(prompts)
        for i in range(prompts):
            await make.group(f"more-{i}", step=2)

    policy = ReplayPolicy(drop_identical=True, train_batch_size=4)
    await make.group("good")
    await make.group("flat", [0.0, 0.0])
    sample = await buffer(client, partition, policy, refill=refill).sample(2, 2)
    assert asked == [2]
    assert uids(sample) == ["good", "more-0"]
    assert keys(plane, partition) == sorted(sample.keys)
    assert sample.filtered == {0.0: 1}
    assert sample.metrics["training/filter_groups/evicted_samples"] == 1
    assert sample.metrics["training/filter_groups/discarded_surplus_samples"] == 1


async def test_all_that_is_older_is_judged_in_one_round(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    """More groups go than a batch has, and that is one replacement."""
    asked: list[int] = []

    async def refill(prompts: int) -> None:
        asked.append(prompts)
        for i in range(prompts):
            await make.group(f"more-{i}", step=2)

    for i in range(5):
        await make.group(f"bad-{i}", [], status="failure", n=2)
    policy = ReplayPolicy(failed="refill", max_refill_rounds=1)
    sample = await buffer(client, partition, policy, refill=refill).sample(2, 2)
    assert asked == [5]
    assert uids(sample) == ["more-0", "more-1"]
    # The others are a backlog, free for the next sample.
    assert len(await free(client, partition, 3 * 3)) == 9


async def test_in_deterministic_mode_uids_decide_and_not_who_ended_first(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    for uid in ("d", "b", "c", "a"):
        await make.group(uid)
    first = await buffer(client, partition).sample(1, 2)
    assert uids(first) == ["d", "b"]
    await buffer(client, partition).give_back(first)
    stable = buffer(client, partition, deterministic=True)
    sample = await stable.sample(1, 2)
    assert uids(sample) == ["a", "b"]
    other = await buffer(await connect(), partition).sample(1, 2)
    assert sorted(uids(other)) == ["c", "d"]


async def test_a_validation_batch_takes_groups_that_came_to_nothing(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    await make.group("a", [], status="failure", n=2)
    await make.group("b", [1.0, 1.0])
    validation = buffer(client, partition, ReplayPolicy(mode="val"))
    sample = await validation.sample(3, 2)
    assert sorted(uids(sample)) == ["a", "b"]
    assert "validation/off_policy/evicted_samples" in sample.metrics
    await validation.finish(sample)
    assert keys(plane, partition) == []


@pytest.mark.parametrize(
    "policy",
    [
        ReplayPolicy(drop_identical=True),
        ReplayPolicy(mode="async"),
        ReplayPolicy(failed="refill_empty"),
        ReplayPolicy(incomplete="refill"),
    ],
)
def test_a_policy_that_replaces_needs_somebody_who_submits(policy: ReplayPolicy) -> None:
    with pytest.raises(ValueError, match="needs `refill`"):
        ReplayBuffer(object(), policy, partition_id="train")  # type: ignore[arg-type]


# -- claims --------------------------------------------------------------------------------------


async def test_what_is_sampled_is_nobody_elses_until_it_is_given_back(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    mine = await make.group("a")
    mine.append(await _late_failure(make))
    other = await connect()
    first = buffer(client, partition)
    sample = await first.sample(1, 2)
    assert await none_free(other, partition)
    assert await free(other, partition, 6, task="another") == sorted(sample.keys)
    await first.give_back(sample)
    await first.give_back(sample)
    assert await free(other, partition, 6) == sorted(sample.keys)
    again = await buffer(other, partition).sample(1, 2)
    assert again.keys == sample.keys


async def _late_failure(make: Producer) -> str:
    """A group whose second session failed."""
    await make.submit("b")
    await make.begin("b")
    await make.put("b", 0)
    key = await make.fail("b", 1)
    await make.end("b", "failure")
    return key


async def test_two_consumers_that_sample_at_once_get_disjoint_groups(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    for i in reversed(range(12)):
        await make.group(f"g{i:02}", step=i)
    buffers = [buffer(await connect(), partition) for _ in range(3)]
    samples = await asyncio.gather(*(each.sample(12, 4) for each in buffers))
    got = [uid for sample in samples for uid in uids(sample)]
    assert sorted(got) == [f"g{i:02}" for i in range(12)]
    # All are somebody's, and may come back: that is to be waited for, and no starving.
    waiting = asyncio.create_task(buffer(client, partition).sample(12, 4))
    await buffers[1].finish(samples[1])
    assert not waiting.done()
    await buffers[2].give_back(samples[2])
    assert uids(await waiting) == uids(samples[2])


async def test_samples_of_one_buffer_that_wait_at_once_miss_no_group(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    counts = (1, 2, 1, 2)
    groups = [f"g{i}" for i in range(sum(counts))]
    await make.submit(*groups)
    mine = buffer(client, partition)
    sampling = [asyncio.create_task(mine.sample(1, count)) for count in counts]
    for uid in groups:
        await make.begin(uid)
        await make.put(uid, 0)
        await make.end(uid)
    got = [uid for sample in await asyncio.gather(*sampling) for uid in uids(sample)]
    assert sorted(got) == groups


async def test_of_a_backlog_the_oldest_version_goes_first_and_the_rest_stays_free(
    client: AsyncClient, partition: str, make: Producer
) -> None:
    for step in (4, 2, 3, 1):
        await make.group(f"s{step}", step=step)
    assert uids(await buffer(client, partition).sample(4, 2)) == ["s1", "s2"]
    assert len(await free(client, partition, 6)) == 6


async def test_what_others_hold_is_told_when_the_deadline_passes(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    await make.group("a")
    await buffer(await connect(), partition).sample(1, 1)
    with pytest.raises(DeadlineExceeded, match="1 are held by others of task 'train'"):
        await buffer(client, partition, timeout_s=LATE_S).sample(1, 1)


async def test_a_group_of_which_others_hold_a_row_is_not_taken(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    await make.group("a")
    other = await connect()
    where = {"session_id": 1}
    claim = await other.kv_claim(partition, "train", count=1, where=where, timeout=10)
    with pytest.raises(DeadlineExceeded, match="others of task 'train' hold some of the 2 rows"):
        await buffer(client, partition, timeout_s=LATE_S).sample(1, 1)
    await other.kv_release(claim)
    assert len(await free(client, partition, 3)) == 3


async def test_a_sample_outlives_its_term_as_long_as_its_client_is_there(
    client: AsyncClient, connect: Connect, plane: Client, partition: str, make: Producer
) -> None:
    await make.group("a")
    mine = buffer(client, partition, lease_s=0.1)
    sample = await mine.sample(1, 1)
    with pytest.raises(DeadlineExceeded):  # several terms long
        await (await connect()).kv_claim(partition, "train", count=1, timeout=0.5)
    await mine.finish(sample)
    assert keys(plane, partition) == []


async def test_what_was_sampled_and_not_finished_is_back_after_a_restart(
    client: AsyncClient, connect: Connect, plane: Client, partition: str, make: Producer
) -> None:
    for uid in ("a", "b"):
        await make.group(uid)
    lost = await connect()
    old = await buffer(lost, partition, lease_s=0.2).sample(1, 2)
    await lost.close()
    new = buffer(client, partition)
    sample = await new.sample(1, 2)
    assert sorted(sample.keys) == sorted(old.keys)
    assert {n for claim in sample.claims for n in claim.deliveries} == {2}
    # Whoever comes back too late is told so, and clears nothing of what is another's by now.
    with pytest.raises(ClaimLost):
        await buffer(await connect(), partition).finish(old)
    assert keys(plane, partition) == sorted(sample.keys)
    await new.finish(sample)
    assert keys(plane, partition) == []


async def test_a_sample_that_is_cancelled_anywhere_leaves_nothing_claimed(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    for i in range(3):
        await make.group(f"g{i}")
    await make.submit("running")
    cancelled_in: list[str] = []
    for number in itertools.count(1):
        counted = Counted(await connect())
        sampling = asyncio.create_task(buffer(counted, partition, deterministic=True).sample(1, 2))

        def cancel(call: int, due: int = number, task: Any = sampling) -> None:
            if call == due:
                task.cancel()

        counted.before = cancel
        try:
            sample = await sampling
        except asyncio.CancelledError:
            cancelled_in.append(counted.calls[number - 1])
            # It is another client that finds all of them free, while this one is still there.
            assert len(await free(client, partition, 10)) == 10
            continue
        assert uids(sample) == ["g0", "g1"]
        break
    assert cancelled_in == ["kv_list", "kv_claim", "kv_claim", "kv_release"]


async def test_a_sample_that_is_cancelled_while_it_waits_leaves_nothing_claimed(
    client: AsyncClient, connect: Connect, partition: str, make: Producer
) -> None:
    for uid in ("a", "b"):
        await make.group(uid)
    holder = await buffer(await connect(), partition).sample(1, 1)
    await make.submit("running")
    counted = Counted(await connect())
    sampling = asyncio.create_task(buffer(counted, partition).sample(1, 3))
    await eventually_async(lambda: _has(counted, "kv_watch"), "it waits")
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert len(await free(client, partition, 7 - len(holder.keys))) == 4


# -- the end -------------------------------------------------------------------------------------


async def test_after_a_step_no_key_is_left_and_nothing_revives_one(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    """Invariant 10 of the specification of verl's trainer: cleared whole, and for good."""
    await make.group("a")
    await make.group("b")
    counted = Counted(client)
    mine = buffer(counted, partition)
    sample = await mine.sample(1, 2)
    del counted.calls[:]
    await mine.finish(sample)
    assert counted.calls.count("kv_clear") == 1
    assert keys(plane, partition) == []
    status = plane.status()
    assert status["partitions"][partition]["payload_bytes"] == 0
    with pytest.raises(StaleWrite):
        await make.put("a", 2)
    for key in ("a_0_0", "b"):
        with pytest.raises(KeyNotFound):
            await client.kv_put(key, partition, {"old_logprobs": torch.zeros(6)}, must_exist=True)
    assert keys(plane, partition) == []
    await mine.finish(sample)
    assert mine.plane_time_s > 0


async def test_a_group_that_is_begun_anew_while_it_is_trained_is_closed_by_the_clear(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    await make.group("a")
    mine = buffer(client, partition)
    sample = await mine.sample(1, 1)
    await make.begin("a")  # by a producer that is wrong
    await mine.finish(sample)
    with pytest.raises(StaleWrite):
        await make.put("a", 0)
    assert keys(plane, partition) == []


async def test_samples_follow_each_other_and_see_only_what_is_new(
    client: AsyncClient, plane: Client, partition: str, make: Producer
) -> None:
    mine = buffer(client, partition)
    for step in range(1, 4):
        for i in range(2):
            await make.group(f"s{step}-{i}", step=step)
        sample = await mine.sample(step, 2)
        assert uids(sample) == [f"s{step}-0", f"s{step}-1"]
        await mine.finish(sample)
    assert keys(plane, partition) == []


# -- rows that are lost --------------------------------------------------------------------------


@pytest.fixture
def torn(roots: dict[str, Path]) -> Iterator[tuple[Stores, Client]]:
    """A plane of two value stores, of which the second will be lost."""
    values = {"capacity_bytes": 64 << 20, "segment_bytes": 8 << 20}
    with (
        stores.running("torn", [values, values], timeout_s=20, **roots) as plane,
        plane.client(0) as client,
    ):
        yield plane, client


async def halves(plane: Stores, uid: str, *, step: int = 1) -> AsyncClient:
    """A group of which the first session lies in the first store, the second in the second; the
    client that made it."""
    near = await joined(plane, 0)
    far = await joined(plane, 1)
    make = Producer(near, "train")
    await make.submit(uid, step=step)
    await make.begin(uid)
    await make.put(uid, 0)
    elsewhere = Producer(far, "train")
    elsewhere.attempts = make.attempts
    await elsewhere.put(uid, 1, 0.0)
    await make.end(uid)
    await far.close()
    return near


async def joined(plane: Stores, home: int) -> AsyncClient:
    client = AsyncClient(replace(plane.joined, home=f"s{home}"), plane.config)
    await client.attach()
    return client


def lose(plane: Stores) -> int:
    service = plane.tags.tags
    assert service is not None
    return plane.call(lambda: service.losing.lose("s1", None))


@pytest.mark.parametrize(
    "policy",
    [ReplayPolicy(), ReplayPolicy(failed="refill"), ReplayPolicy(mode="async")],
    ids=["sync", "refill", "async"],
)
async def test_a_group_that_lost_rows_is_cleared_and_replaced(
    torn: tuple[Stores, Client], policy: ReplayPolicy
) -> None:
    plane, witness = torn
    client = await halves(plane, "a")
    asked: list[int] = []

    async def refill(prompts: int) -> None:
        asked.append(prompts)
        assert keys(witness, "train") == []
        await Producer(client, "train").group("again")

    assert lose(plane) == 1
    sample = await buffer(client, "train", policy, refill=refill).sample(1, 1)
    assert (uids(sample), asked) == (["again"], [1])
    assert sample.metrics["training/rollout_lost/evicted_samples"] == 1
    assert sample.metrics["training/rollout_failure/evicted_samples"] == 1
    await client.close()


async def test_a_sample_that_waits_is_woken_when_a_group_is_lost(
    torn: tuple[Stores, Client],
) -> None:
    plane, witness = torn
    client = await halves(plane, "a")
    await Producer(client, "train").submit("b")
    asked: list[int] = []

    async def refill(prompts: int) -> None:
        asked.append(prompts)

    counted = Counted(client)
    sampling = asyncio.create_task(buffer(counted, "train", refill=refill).sample(1, 2))
    await eventually_async(lambda: _has(counted, "kv_watch"), "it waits")
    assert lose(plane) == 1
    await eventually_async(lambda: _is_asked(asked), "a prompt is asked for")
    assert keys(witness, "train") == ["b"]
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    await client.close()


async def _is_asked(asked: list[int]) -> bool:
    return asked == [1]


async def test_where_nothing_can_be_submitted_a_lost_group_is_taken_and_cleared_with_the_others(
    torn: tuple[Stores, Client],
) -> None:
    plane, witness = torn
    client = await halves(plane, "a")
    await Producer(client, "train").group("b")
    assert lose(plane) == 1
    sample = await buffer(client, "train").sample(1, 2)
    assert sorted(uids(sample)) == ["a", "b"]
    selection = select_valid(sample.groups)
    assert [skip.uid for skip in selection.skipped] == ["a"]
    assert selection.keys == ["b_0_0", "b_1_0"]
    replay = buffer(client, "train")
    await replay.finish(sample)
    assert keys(witness, "train") == []
    await client.close()


async def test_a_prompt_whose_own_fields_are_lost_stands_for_its_group_still(
    torn: tuple[Stores, Client],
) -> None:
    plane, _ = torn
    far = await joined(plane, 1)
    await far.kv_put("a", "train", {"messages": torch.arange(2)}, {"uid": "a"})
    client = await joined(plane, 0)
    await Producer(client, "train").group("a")
    assert lose(plane) == 1
    sample = await buffer(client, "train").sample(1, 1)
    assert sorted(sample.keys) == ["a", "a_0_0", "a_1_0"]
    await far.close()
    await client.close()
