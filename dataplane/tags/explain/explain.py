"""Why something waits: how much matches, what fails, who holds it up, what holds the memory. Pure.

Everything goes in small steps, between which the store goes on. Nothing is decided by an
explanation, and it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, NamedTuple

from dataplane.tags.claims.leases import Lease
from dataplane.tags.explain.clients import Clients
from dataplane.tags.explain.foremost import Foremost
from dataplane.tags.explain.headcount import Headcount
from dataplane.tags.explain.holders import Holders
from dataplane.tags.explain.holdups import Holdup, Holdups
from dataplane.tags.explain.question import Allowance, Question
from dataplane.tags.explain.wording import many, quoted
from dataplane.tags.groups import FINISHED
from dataplane.types import Explanation

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition
    from dataplane.tags.store import TagStore

MAX_NAMES = 5
"""Partitions that are named to who asks for one that is not there."""
MAX_HOLDERS = 5
"""Clients that are named of those who hold rows of a task."""
MAX_COMPARED = 10_000
"""Partitions whose names are compared with one that is not there."""
MAX_TEXT = 4000
STEP = 256


class Surroundings(NamedTuple):
    """What else is known to who answers."""

    clients: Clients
    waiting: Callable[[str], int]
    """How many wait for room in a partition."""
    now: float


def explain(
    store: TagStore, question: Question, around: Surroundings, allowance: Allowance
) -> Generator[None, None, Explanation]:
    """The answer to a question, step by step."""
    holders = Holders(around.clients, around.waiting)
    holdups = Holdups(around.clients, store.history, around.now)
    if question.partition_id is None:
        return (yield from _of_plane(store, question, holdups, holders))
    partition = store.partitions.get(question.partition_id)
    if partition is None:
        lines = yield from _absent(store, question.partition_id, question, around)
        return Explanation(_text(lines))
    headcount = Headcount(partition, question, holdups, allowance)
    yield from headcount.take()
    told = yield from holdups.tell()
    lines = [*headcount.lines(), *_held_up(told, holdups.left_out)]
    if question.task is not None:
        lines += yield from _claimed(partition, question.task, around)
    entries, held = yield from holders.of(partition)
    return Explanation(
        _text([*lines, *held]), headcount.matching, headcount.total, headcount.failing(),
        [holdup.entry for holdup in told], entries,
    )  # fmt: skip


def _of_plane(
    store: TagStore, question: Question, holdups: Holdups, holders: Holders
) -> Generator[None, None, Explanation]:
    names = _spoken_of(store, question)
    partitions = [store.partitions[name] for name in names]
    total = groups = 0
    for partition in partitions:
        total += len(partition)
        groups += len(partition.groups)
        for step, group in enumerate(list(partition.groups.values()), 1):
            if group.status != FINISHED:
                holdups.add_group(partition, group)
            if not step % STEP:
                yield
        yield
    told = yield from holdups.tell(by_partition=True)
    entries, held = yield from holders.of_all(partitions)
    first = (
        f"the plane has {many(len(partitions), 'partition')} with {many(total, 'row')} and "
        f"{many(groups, 'group')}"
    )
    lines = [first, *_held_up(told, holdups.left_out), *held]
    return Explanation(_text(lines), 0, total, {}, [holdup.entry for holdup in told], entries)


def _held_up(told: list[Holdup], left_out: int) -> list[str]:
    if not told:
        return []
    lines = ["held up by, oldest first:", *[f"  {holdup.text}" for holdup in told]]
    if left_out:
        lines.append(f"  and {left_out} more")
    return lines


class _Held:
    """What one client holds of a task."""

    def __init__(self, lease: Lease) -> None:
        self.rows = 0
        self.claims = 0
        self.at = lease.at
        self.lease_s = lease.lease_s

    def add(self, lease: Lease) -> None:
        self.rows += len(lease.rows)
        self.claims += 1
        self.at = min(self.at, lease.at)
        self.lease_s = max(self.lease_s, lease.lease_s)


def _claimed(
    partition: Partition, name: str, around: Surroundings
) -> Generator[None, None, list[str]]:
    """What a task has taken, and who has it."""
    task = partition.claims.tasks.get(name)
    if task is None:
        return [f"task {quoted(name)} has claimed nothing yet"]
    held: dict[str, _Held] = {}
    for step, lease in enumerate(list(task.leases.values()), 1):
        for client_id in lease.holders:
            if client_id not in held:
                held[client_id] = _Held(lease)
            held[client_id].add(lease)
        if not step % STEP:
            yield
    waiting = sum(len(queue.asks) for queue in task.queues.values())
    text = (
        f"task {quoted(name)}: {many(len(task.committed), 'row')} committed, "
        f"{len(task.held)} claimed"
    )
    if waiting:
        text += f", {waiting} claim{'s wait' if waiting != 1 else ' waits'} for more"
    most: Foremost[str] = Foremost(MAX_HOLDERS)
    for client_id, has in held.items():
        most.offer((has.rows, -has.at), client_id)
    lines = [text]
    for client_id in most.in_order():
        has = held[client_id]
        state = around.clients.state(client_id)
        if not around.clients.is_alive(client_id):
            state += f"; they are offered again when its lease of {has.lease_s:g} s is over"
        lines.append(
            f"  {many(has.rows, 'row')} in {many(has.claims, 'claim')} since "
            f"{max(0.0, around.now - has.at):.1f} s by {around.clients.called(client_id)}: {state}"
        )
    if most.left_out:
        lines.append(f"  and more by {most.left_out} other clients")
    return lines


def _absent(
    store: TagStore, name: str, question: Question, around: Surroundings
) -> Generator[None, None, list[str]]:
    """What to say of a partition that is not there."""
    text = f"there is no partition {quoted(name)}"
    if name in store.dropped:
        text += f" (it was dropped at revision {store.dropped[name]})"
    if question.wanted is not None:
        text += f"; {many(question.wanted, 'group' if question.grouped else 'row')} wanted"
    others = _spoken_of(store, question)
    names = yield from _similar(name, others)
    more = len(others) - len(names)
    text += (
        f"; there are {', '.join(map(quoted, names))}" if names else "; there is none at all yet"
    )
    if more > 0:
        text += f" and {more} more"
    waiting = around.waiting(name)
    return [text, f"{waiting} wait for room in it"] if waiting else [text]


def _spoken_of(store: TagStore, question: Question) -> list[str]:
    """The names of the partitions that whoever asks may hear of."""
    among = question.among
    return [name for name in store.partitions if among is None or name in among]


def _similar(name: str, names: Iterable[str]) -> Generator[None, None, list[str]]:
    """The names that are most like it, the most alike first."""
    like: Foremost[str] = Foremost(MAX_NAMES)
    matcher = SequenceMatcher(b=name[:64], autojunk=False)
    for number, other in enumerate(sorted(names)):
        if number == MAX_COMPARED:
            break
        matcher.set_seq1(other[:64])
        like.offer(matcher.ratio() if matcher.quick_ratio() > 0.5 else 0.0, other)
        yield
    return like.in_order()


def _text(lines: Iterable[str]) -> str:
    """The lines as one text: ASCII, and no longer than an error should be."""
    kept: list[str] = []
    room = MAX_TEXT
    for line in lines:
        line = line.encode("ascii", "backslashreplace").decode()
        room -= len(line) + 1
        if room < 0:
            kept.append("...")
            break
        kept.append(line)
    return "\n".join(kept)
