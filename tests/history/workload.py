"""Random clients on a real plane, taken step by step in an order that a seed decides.

Connections break at any step, and clients die. What comes of it is a history to check.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from dataplane.client.sync import Client
from dataplane.errors import PartitionNotFound
from tests.faults.planes import Plane
from tests.history.calls import EVERYTHING, GROUPS, LARGE_BYTES, Caller, Known, Mix
from tests.history.record import Claim, Clear, Get, History, List, Op, Recorder, Seal
from tests.history.stepper import CALL_S, Fault, Stepper, revision_of

MiB = 1 << 20
SETTINGS: dict[str, Any] = {
    "small_put_bytes": LARGE_BYTES, "spin_s": 0.0,
    "capacity_bytes": 16 * MiB, "segment_bytes": 4 * MiB,
}  # fmt: skip
"""What clients and planes of these tests are started with."""
TASKS = ("t", "u")
FEW = 100
"""A plane that remembers more changes forgets none of one history."""
MOST_CLAIMS = 2 + len(EVERYTHING)
"""By which whoever claims alone has been given all that there is."""


def interleave(
    plane: Plane,
    pool: ThreadPoolExecutor,
    seed: int,
    mix: Mix,
    *,
    clients: int = 3,
    calls: int = 16,
) -> History:
    """The history of so many calls, whose steps the seed puts in order."""
    return _Interleaving(plane, pool, seed, mix, clients).run(calls)


class _Interleaving:
    def __init__(
        self, plane: Plane, pool: ThreadPoolExecutor, seed: int, mix: Mix, clients: int
    ) -> None:
        self._plane = plane
        self._pool = pool
        self._chance = random.Random(seed)
        self._mix = mix
        self._known = Known()
        self._notes = Recorder(time.monotonic)
        self._made = 0
        self._clients = [self._client() for _ in range(clients)]

    def _client(self) -> tuple[Stepper, Caller]:
        self._made += 1
        maps = self._chance.random() >= self._mix.remote
        client = self._plane.another(same_node_reads=maps)
        stepper = Stepper(f"client {self._made}", client, self._plane, self._pool, self._notes)
        caller = Caller(
            stepper.name, core_of(stepper.client), self._chance, self._mix, self._known, self._notes
        )
        return stepper, caller

    def run(self, calls: int) -> History:
        first = revision_of(self._plane)
        while calls or any(stepper.busy for stepper, _ in self._clients):
            number = self._chance.choice(self._ready(idle=calls > 0))
            stepper, caller = self._clients[number]
            if self._dies(caller):
                stepper.die()
                self._clients[number] = self._client()
            elif stepper.busy:
                self._step(stepper)
            elif self._chance.random() < self._mix.leave:
                stepper.leave()
            else:
                calls -= 1
                op = caller.draw()
                stepper.start(op, caller.call(op, deadline_of(op)))
                if stepper.busy:  # else the call was over before it asked anything
                    self._step(stepper)
        for stepper, caller in self._clients:
            if self._mix.outlasts:
                self._settle(stepper, caller)
            stepper.die()
        conclude(self._plane.client, self._known, self._notes, self._mix)
        last = revision_of(self._plane)
        drop(self._plane.client, self._known)
        kept = self._plane.config.history_changes
        return self._notes.history(first, last, kept if kept <= FEW else None)

    def _ready(self, *, idle: bool) -> list[int]:
        """The clients of which one may do a step; those that left come back when all others wait
        in vain."""
        while True:
            ready: list[int] = []
            gone: list[int] = []
            for number, (stepper, _) in enumerate(self._clients):
                if stepper.busy:
                    if stepper.waiting is None or stepper.waiting.done():
                        ready.append(number)
                elif idle:
                    (gone if stepper.left else ready).append(number)
            waiting = [s.waiting for s, _ in self._clients if s.waiting is not None]
            if ready or not waiting:
                return ready or gone
            wait(waiting, return_when=FIRST_COMPLETED)

    def _dies(self, caller: Caller) -> bool:
        may = not (self._mix.outlasts and caller.may_hold)
        return self._chance.random() < self._mix.die and may

    def _step(self, stepper: Stepper) -> None:
        fault = None
        if stepper.asks:
            chance = self._chance.random()
            if chance < self._mix.cut:
                fault = self._chance.choice([Fault.NOT_SENT, Fault.CUT_OFF, Fault.UNHEARD])
            elif chance < self._mix.cut + self._mix.split:
                fault = Fault.SPLIT
        stepper.step(fault)

    def _settle(self, stepper: Stepper, caller: Caller) -> None:
        """Let a client end all its claims."""
        if caller.may_hold:
            self._finish(stepper, caller, caller.recall())
        while caller.held:
            claim, claimed = caller.held[0]
            self._finish(stepper, caller, caller.settle(claim, claimed.keys, commit=False))

    def _finish(self, stepper: Stepper, caller: Caller, op: Op) -> None:
        stepper.start(op, caller.call(op, deadline_of(op)))
        while stepper.busy:
            stepper.step()


def conclude(client: Client, known: Known, notes: Recorder, mix: Mix) -> None:
    """Note what is left when all clients are gone, by calls of one more."""
    caller = Caller("witness", core_of(client), random.Random(0), mix, known, notes)

    def make(op: Op) -> None:
        op.client, op.partition = caller.name, known.partition
        driver: Any = client
        driver._drive(caller.call(op, deadline_of(op)), time.monotonic() + CALL_S)

    make(List(client=""))
    make(Get(client="", keys=EVERYTHING, drop=True))
    make(Clear(client="", keys=list(GROUPS), retire=True))
    seal = Seal(client="")
    make(seal)
    if not mix.claim or not seal.ok:
        return
    for task in TASKS:
        for _ in range(MOST_CLAIMS):
            claim = Claim(client="", task=task, count=len(EVERYTHING), alone=True)
            claim.wait_s = mix.drain_s
            make(claim)
            for held, claimed in list(caller.held):
                make(caller.settle(held, claimed.keys, commit=True))
            if not claim.ok or claim.last:
                break


def drop(client: Client, known: Known) -> None:
    """Take the partition of a history away, with what is left in it."""
    try:
        client.kv_drop_partition(known.partition)
    except PartitionNotFound:
        pass  # nobody put anything


def deadline_of(op: Op) -> float:
    """The deadline of a call that begins now."""
    return time.monotonic() + (op.wait_s if isinstance(op, Claim) else CALL_S)


def core_of(client: Any) -> Any:
    """What a client's verbs are made with."""
    return client._core
