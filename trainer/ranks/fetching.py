"""Packs of a plan, read from the plane ahead of the one that is trained.

Owns the thread that reads, and the memory that packs lie in: a rank asks for the rows and fields of
its own packs and for nothing else, and never has more packs at once than it was told to.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataplane import Client, Rows
from trainer.materialize import (
    Fetched,
    PackMemory,
    PackSpec,
    PackTensors,
    Read,
    new_buffers,
    pack_plan,
    reads_for,
)
from trainer.plan import RankPlan
from trainer.ranks.copying import CopyLane, Sent
from trainer.ranks.types import RankWork
from trainer.ranks.waiting import PlaneTime


@dataclass(slots=True)
class Buffers:
    """Host memory of one pack."""

    shape: object
    """What packs it is for."""
    fields: dict[str, torch.Tensor]
    """What is read into."""
    memory: PackMemory
    """What is made from it."""
    copied: Any = None
    """Event of the copy to a device that reads it."""


class Shelf:
    """Buffers that are not in use, kept from batch to batch: touching fresh memory costs several
    times the copy into it."""

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._pin = pin_memory
        self._lock = threading.Lock()
        self._free: list[Buffers] = []
        self.made = 0
        """How many there ever were."""

    def take(self, spec: PackSpec) -> Buffers:
        """Buffers for a pack of this spec, which nobody reads any more."""
        shape = _shape_of(spec)
        with self._lock:
            self._free = [one for one in self._free if one.shape == shape]
            found = self._free.pop() if self._free else None
            self.made += found is None
        if found is None:
            fields = new_buffers(spec, pin_memory=self._pin)
            return Buffers(shape, fields, PackMemory(pin_memory=self._pin))
        if found.copied is not None:
            found.copied.synchronize()
            found.copied = None
        return found

    def give_back(self, buffers: Buffers) -> None:
        """They may be overwritten, once a copy that was begun has ended."""
        with self._lock:
            self._free.append(buffers)


def _shape_of(spec: PackSpec) -> object:
    experts = spec.experts if spec.replays_experts else None
    columns = tuple(spec.columns)
    return spec.cap, columns, spec.traits.has_rollout_logprobs, experts, spec.teacher


@dataclass(slots=True)
class PackReader:
    """Reads one pack after the other."""

    client: Client
    work: RankWork
    spec: PackSpec
    time: PlaneTime
    generator: torch.Generator
    """Draws the experts of padding."""
    convert_s: float = 0.0
    """Time in which rows were got."""
    pack_s: float = 0.0
    """Time in which packs were made of them."""

    def read(self, places: Sequence[int], buffers: Buffers) -> PackTensors:
        """The pack of these members, over the buffers."""
        members = [self.work.members[place] for place in places]
        began = time.monotonic()
        answers: list[tuple[Read, Rows]] = []
        for read in reads_for(members, self.spec, into=buffers.fields, one_pack=True):
            with self.time.call():
                rows = self.client.kv_batch_get(read.keys, self.work.partition_id, **read.arguments)
            answers.append((read, rows))
        fetched = Fetched(answers)
        got = time.monotonic()
        everyone = list(range(len(members)))
        ((pack,),) = pack_plan(
            RankPlan(everyone, [[everyone]]), members, fetched, self.spec,
            advantages=[self.work.advantages[place] for place in places],
            generator=self.generator, memory=buffers.memory,
        )  # fmt: skip
        self.convert_s += got - began
        self.pack_s += time.monotonic() - got
        return pack


@dataclass(frozen=True, slots=True)
class Fed:
    """A pack that was read."""

    host: PackTensors
    """In host memory."""
    buffers: Buffers
    sent: Sent | None
    """Where it is trained on a GPU."""


class PackFeed:
    """The packs of a rank in the order of its plan, each once.

    A pack is whole until the next one is asked for, and with `keep` until the feed is closed, for
    those who look at a batch twice. While one is in use the thread is ahead by `ahead` packs at
    most, so that `ahead` + 1 packs have memory at once.
    """

    def __init__(
        self,
        reader: PackReader,
        shelf: Shelf,
        *,
        ahead: int = 1,
        keep: bool = False,
        lane: CopyLane | None = None,
    ) -> None:
        packs = [pack for step in reader.work.part.packs for pack in step]
        self._reader = reader
        self._shelf = shelf
        self._keep = keep
        self._lane = lane
        self._left = len(packs)
        self._held: list[Buffers] = []  # and no pack: on a GPU one of them is freed after its use
        self._ready: queue.SimpleQueue[Fed | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, args=(packs,), name="pack-feed", daemon=True
        )
        self._thread.start()

    def next(self) -> PackTensors:
        """The next pack, on the device that it is trained on. What reading it raised, this does."""
        return self.received(self.next_fed())

    def received(self, fed: Fed) -> PackTensors:
        """The pack on its device."""
        if self._lane is None or fed.sent is None:
            return fed.host
        return self._lane.receive(fed.sent)

    def next_fed(self) -> Fed:
        """The next pack, before it is received."""
        if not self._left:
            raise RuntimeError("all packs of this rank were asked for")
        if not self._keep:
            self._give_back()
        self._room.release()
        with self._reader.time.wait():
            found = self._ready.get()
        if isinstance(found, BaseException):
            self._left = 0
            raise found
        self._left -= 1
        self._held.append(found.buffers)
        return found

    def close(self) -> None:
        """Read no further, and give back the memory of all packs."""
        self._closed = True
        self._left = 0
        self._room.release()
        self._thread.join()
        while not self._ready.empty():
            found = self._ready.get()
            if isinstance(found, Fed):
                self._held.append(found.buffers)
        self._give_back()

    def _give_back(self) -> None:
        for buffers in self._held:
            self._shelf.give_back(buffers)
        self._held.clear()

    def _run(self, packs: Sequence[Sequence[int]]) -> None:
        try:
            for places in packs:
                self._room.acquire()
                if self._closed:
                    return
                buffers = self._shelf.take(self._reader.spec)
                try:
                    fed = self._fed(places, buffers)
                except BaseException:
                    self._shelf.give_back(buffers)
                    raise
                self._ready.put(fed)
        except BaseException as error:
            self._ready.put(error)

    def _fed(self, places: Sequence[int], buffers: Buffers) -> Fed:
        pack = self._reader.read(places, buffers)
        if self._lane is None:
            return Fed(pack, buffers, None)
        sent = self._lane.send(pack)
        buffers.copied = sent.copied
        return Fed(pack, buffers, sent)


class KeptPacks:
    """Packs that were looked at, once more, to be trained."""

    def __init__(
        self, packs: Sequence[PackTensors], *, ahead: int = 1, lane: CopyLane | None = None
    ) -> None:
        self._waiting = deque(packs)
        self._ahead = ahead
        self._lane = lane
        self._sent: deque[Sent] = deque()

    def next(self) -> PackTensors:
        """The next one, on the device that it is trained on."""
        if self._lane is None:
            return self._waiting.popleft()
        while self._waiting and len(self._sent) <= self._ahead:
            self._sent.append(self._lane.send(self._waiting.popleft()))
        return self._lane.receive(self._sent.popleft())
