"""Calls that random clients make: what is asked for, and how its answer is noted.

Few keys, so that calls meet. Every value is one of its own, so that a read shows whose it is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dataplane.client.claims import claim_rows, commit_claim, release_claim
from dataplane.client.core import Core
from dataplane.client.effects import Ask, Effect, Verb
from dataplane.client.get import GetOptions, get_batch
from dataplane.client.groups import begin_group, end_group
from dataplane.client.partitions import seal_partition
from dataplane.client.put import flags_of, put_batch, put_row
from dataplane.client.tags import clear_rows, list_rows
from dataplane.errors import ClaimLost, DataplaneError
from dataplane.types import Claim as Claimed
from dataplane.wire.channel import Broken
from tests.history.record import (
    Begin,
    Claim,
    Clear,
    End,
    Fields,
    Get,
    List,
    Op,
    Put,
    Recorder,
    Seal,
    Settle,
    Tags,
    Value,
)

KEYS = ("a", "b", "c")
GROUPS = {"g": ("g0", "g1"), "h": ("h0",)}
"""Uids, and the keys of their trajectories."""
EVERYTHING = [*KEYS, *GROUPS, *itertools.chain(*GROUPS.values())]
SMALL, LARGE = 3, 300
"""Entries of a value that goes through the socket, and of one that is copied in place."""
LARGE_BYTES = 1024
"""What `small_put_bytes` has to be for that."""
FIRST_PUT = 0.8
"""How often a call is a put while there is nothing to read yet."""


class NotSent(Broken):
    """The connection broke before anything of the request had left."""


class Mix(NamedTuple):
    """How often which call is made, and what happens to it."""

    put: int = 6
    clear: int = 3
    get: int = 5
    list: int = 1
    begin: int = 2
    end: int = 1
    claim: int = 3
    settle: int = 3
    attempt: float = 0.4
    """Share of puts that are for a group."""
    large: float = 0.3
    """Share of values that are copied in place."""
    exact: float = 0.2
    """Share of puts with must_exist or if_absent."""
    grouped: float = 0.2
    """Share of claims that are about whole groups."""
    several: float = 0.4
    """Share of claims of more than one row."""
    partly: float = 0.3
    """Share of commits and releases that are about some rows of a claim."""
    release: float = 0.4
    """Share of claims that are released."""
    cut: float = 0.06
    """Share of requests under which the connection breaks."""
    split: float = 0.1
    """Share of puts through the socket whose head arrives long before the rest."""
    die: float = 0.01
    """Chance of a client to die, at each step."""
    leave: float = 0.01
    """Chance of a client to close its connections between two calls."""
    remote: float = 0.2
    """Share of clients that map no segment, as those of another node."""
    lease_s: float = 30.0
    wait_s: float = 0.01
    """How long a claim waits."""
    patient: float = 0.25
    """Share of claims that wait five times as long, and outlast a broken connection."""
    drain_s: float = 10.0
    """How long the last claim waits for the leases of clients that died."""

    @property
    def outlasts(self) -> bool:
        """Whether a lease lasts longer than anybody waits for it."""
        return self.lease_s >= self.drain_s


_partitions = itertools.count(1)


@dataclass
class Known:
    """What the clients of one history know of each other."""

    partition: str = field(default_factory=lambda: f"history-{next(_partitions)}")
    """One that no other history uses."""
    attempts: list[int] = field(default_factory=list[int])
    """Of every group that was begun."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    """For values, each of which is put once."""
    fresh: bool = True
    """Whether nobody has put anything yet."""


class Caller:
    """One client's calls, and what it holds."""

    def __init__(
        self, name: str, core: Core, chance: random.Random, mix: Mix, known: Known, notes: Recorder
    ) -> None:
        self.name = name
        self.core = core
        self.partition = known.partition
        self.held: list[tuple[Claim, Claimed]] = []
        """Claims with rows that it has neither committed nor released nor lost."""
        self.claims: list[Claim] = []
        """All that it asked for."""
        self._chance = chance
        self._mix = mix
        self._known = known
        self._notes = notes

    @property
    def may_hold(self) -> bool:
        """Whether it holds rows, or may without knowing it."""
        return bool(self.held) or any(op.end is None for op in self.claims)

    # -- what is asked for -------------------------------------------------------------------

    def draw(self) -> Op:
        """The next call, by chance."""
        mix = self._mix
        weights: dict[Callable[[], Op], int] = {
            self._put: mix.put, self._clear: mix.clear, self._get: mix.get, self._list: mix.list,
            self._begin: mix.begin, self._claim: mix.claim,
        }  # fmt: skip
        if self._known.attempts:
            weights[self._end] = mix.end
        if self.held:
            weights[self._settle] = mix.settle
        (make,) = self._chance.choices(list(weights), list(weights.values()))
        if self._known.fresh and self._chance.random() < FIRST_PUT:
            make = self._put
        self._known.fresh &= make != self._put
        op = make()
        op.client, op.partition = self.name, self.partition
        return op

    def _some(self, most: int) -> list[str]:
        return self._chance.sample(EVERYTHING, self._chance.randint(1, most))

    def _put(self) -> Put:
        chance, mix = self._chance, self._mix
        attempt = None
        keys = self._some(3)
        if self._known.attempts and chance.random() < mix.attempt:
            attempt = chance.choice(self._known.attempts[-3:])
            rows = list(itertools.chain(*GROUPS.values()))
            keys = chance.sample(rows, chance.randint(1, len(rows)))
        names = chance.choice([[], ["x"], ["x"], ["y"], ["x", "y"]])
        tags: list[Tags] | None = None
        if not names or chance.random() < 0.6:
            tags = [{"v": next(self._known.numbers), "c": chance.randrange(3)} for _ in keys]
        size = LARGE if chance.random() < mix.large else SMALL
        fields: list[Fields] = [
            {name: f"{next(self._known.numbers)}*{size}" for name in names} for _ in keys
        ]
        exact = chance.random()
        return Put(
            client="",
            keys=keys,
            fields=fields if names else None,
            tags=tags,
            attempt=attempt,
            must_exist=exact < mix.exact / 2,
            if_absent=mix.exact / 2 <= exact < mix.exact,
        )

    def _clear(self) -> Clear:
        retire = self._chance.random() < 0.3
        if self._chance.random() < 0.2:
            return Clear(client="", where={"c": self._chance.randrange(3)}, retire=retire)
        return Clear(client="", keys=self._some(3), retire=retire)

    def _get(self) -> Get:
        fields = self._chance.choice([None, ["x"], ["x"], ["x", "y"]])
        keys = self._some(4)
        if self._chance.random() < 0.2:
            keys.append(keys[0])
        return Get(client="", keys=keys, fields=fields, drop=self._chance.random() < 0.7)

    def _list(self) -> List:
        where: Tags | None = {"c": 0} if self._chance.random() < 0.3 else None
        return List(client="", where=where)

    def _begin(self) -> Begin:
        uid = self._chance.choice(list(GROUPS))
        return Begin(client="", uid=uid, n=len(GROUPS[uid]))

    def _end(self) -> End:
        status = self._chance.choice(["finished", "failure"])
        return End(client="", attempt=self._chance.choice(self._known.attempts[-3:]), status=status)

    def _claim(self) -> Claim:
        chance = self._chance
        return Claim(
            client="",
            task=chance.choice(["t", "t", "u"]),
            count=chance.choice([2, 3]) if chance.random() < self._mix.several else 1,
            fields=chance.choice([[], ["x"], ["y"]]),
            where={"c": 0} if chance.random() < 0.3 else None,
            grouped=bool(self._known.attempts) and chance.random() < self._mix.grouped,
            lease_s=self._mix.lease_s,
            wait_s=self._mix.wait_s * (5 if chance.random() < self._mix.patient else 1),
        )

    def _settle(self) -> Settle:
        claim, claimed = self._chance.choice(self.held)
        keys = list(claimed.keys)
        # What is left of a group would be none.
        partly = self._mix.partly if len(keys) > 1 and not claim.grouped else 0.0
        if self._chance.random() < partly:
            keys = self._chance.sample(keys, self._chance.randint(1, len(keys) - 1))
        return self.settle(claim, keys, commit=self._chance.random() >= self._mix.release)

    def recall(self) -> Claim:
        """A claim that goes with word of those that were given up."""
        return Claim(client=self.name, partition=self.partition, wait_s=self._mix.wait_s)

    def settle(self, claim: Claim, keys: list[str], *, commit: bool) -> Settle:
        """The end of some rows of a claim."""
        return Settle(
            client=self.name, partition=self.partition, claim=claim, keys=keys, commit=commit
        )

    # -- asking ------------------------------------------------------------------------------

    def call(self, op: Op, deadline: float) -> Verb[None]:
        """A call as a verb under way: made, and noted as it goes."""
        self._notes.begin(op, self.core.seen.n)
        try:
            yield from self._watched(self._verb(op, deadline), op)
        except DataplaneError as error:
            self._notes.end(op, error)
        else:
            self._notes.end(op)

    def _watched(self, verb: Verb[None], op: Op) -> Generator[Effect, Any, None]:
        """Note what an answer says to the client and not to its caller."""
        value: Any = None
        error: BaseException | None = None
        plainly = False
        """Whether a put may have arrived that does not say since when it is under way."""
        while True:
            try:
                effect = verb.send(value) if error is None else verb.throw(error)
            except StopIteration:
                return
            value, error = None, None
            whole = isinstance(effect, Ask) and effect.verb in ("put_tags", "put_block")
            if whole and isinstance(op, Put) and op.broken and not plainly and op.begun is None:
                # Asked again, it is judged from what its client had seen when it began.
                op.begun = op.begin
            try:
                value = yield effect
            except BaseException as raised:
                plainly |= whole and not op.broken and not isinstance(raised, NotSent)
                op.broken += isinstance(raised, Broken)
                error = raised
            else:
                plainly |= whole and not op.broken
                if isinstance(effect, Ask):
                    self._answered(op, effect.verb, value.body)

    def _answered(self, op: Op, verb: str, body: Any) -> None:
        if isinstance(op, Put) and verb == "reserve" and op.begun is None:
            op.begun = self._notes.now()
        elif isinstance(op, Clear | Seal) and verb in ("clear", "seal_partition"):
            told = body[1] if isinstance(op, Clear) else body[0]
            op.revision = told[1]
        elif isinstance(op, Claim) and verb == "claim":
            op.revision = body[3][1]

    def _verb(self, op: Op, deadline: float) -> Verb[None]:
        if isinstance(op, Put):
            yield from self._do_put(op, deadline)
        elif isinstance(op, Clear):
            op.removed = yield from clear_rows(
                self.core, op.keys, op.partition, op.where, op.retire, deadline
            )
        elif isinstance(op, Get):
            yield from self._do_get(op, deadline)
        elif isinstance(op, List):
            listing = yield from list_rows(
                self.core, op.partition, op.where, None, None, None, deadline
            )
            fields = map(frozenset, listing.fields)
            found = zip(listing.keys, listing.tags, fields, strict=True)
            op.rows = {key: (tags, names) for key, tags, names in found}  # pyright: ignore[reportAttributeAccessIssue] (no lists among tags)
            op.revision = listing.revision.n
        elif isinstance(op, Begin):
            attempt = yield from begin_group(self.core, op.uid, op.partition, op.n, None, deadline)
            op.revision = attempt
            self._known.attempts.append(attempt)
        elif isinstance(op, End):
            op.revision = (yield from end_group(self.core, op.attempt, op.status, deadline)).n
        elif isinstance(op, Seal):
            yield from seal_partition(self.core, op.partition, deadline)
        elif isinstance(op, Claim):
            yield from self._do_claim(op, deadline)
        elif isinstance(op, Settle):
            yield from self._do_settle(op, deadline)

    def _do_put(self, op: Put, deadline: float) -> Verb[None]:
        flags = flags_of(must_exist=op.must_exist, if_absent=op.if_absent, return_tags=True)
        fields: list[dict[str, object]] | None = None
        if op.fields is not None:
            fields = [{n: tensor_of(v) for n, v in row.items()} for row in op.fields]
        tags: Any = op.tags
        if len(op.keys) == 1:
            meta = yield from put_row(
                self.core, op.keys[0], op.partition, fields[0] if fields else None,
                tags[0] if tags else None, flags, deadline, op.attempt,
            )  # fmt: skip
        else:
            meta = yield from put_batch(
                self.core, op.keys, op.partition, fields, tags, flags, deadline, op.attempt
            )
        merged: Any = meta.tags
        op.merged = merged
        assert meta.revision is not None
        op.revision = meta.revision.n

    def _do_get(self, op: Get, deadline: float) -> Verb[None]:
        rows = yield from get_batch(
            self.core, op.keys, op.partition, op.fields, GetOptions("list"),
            "drop" if op.drop else "raise", deadline,
        )  # fmt: skip
        op.rows = [
            (key, {name: value_of(column[i]) for name, column in rows.fields.items()})
            for i, key in enumerate(rows.keys)
        ]
        assert rows.revision is not None
        op.revision = rows.revision.n

    def _do_claim(self, op: Claim, deadline: float) -> Verb[None]:
        self.claims.append(op)
        claimed = yield from claim_rows(
            self.core, op.partition, op.task, op.count, op.fields, op.where, None, op.grouped,
            op.lease_s, None, deadline,
        )  # fmt: skip
        tags: Any = claimed.tags
        op.rows = list(zip(claimed.keys, tags, claimed.deliveries, strict=True))
        op.claim_id, op.last = claimed.claim_id, claimed.end
        if op.rows:
            self.held.append((op, claimed))

    def _do_settle(self, op: Settle, deadline: float) -> Verb[None]:
        held = next(
            held for held in self.held if held[0] is op.claim and set(op.keys) <= set(held[1].keys)
        )
        claimed = held[1]
        others = set(claimed.keys).difference(op.keys)
        verb = commit_claim if op.commit else release_claim
        left = claimed.without(op.keys)
        try:
            op.revision = (yield from verb(self.core, claimed.without(others), deadline)).n
        except ClaimLost as error:
            left = claimed.without(error.keys)
            raise
        finally:
            self.held.remove(held)
            if left.keys:
                self.held.append((op.claim, left))


# -- values ----------------------------------------------------------------------------------


def tensor_of(value: Value) -> torch.Tensor:
    """A field's content: `7*3` is three times 7."""
    number, size = map(int, value.split("*"))
    return torch.full((size,), number)


def value_of(tensor: torch.Tensor) -> Value:
    """The value that a field holds, or what is found where it is of none."""
    content: Any = tensor
    numbers: list[int] = content.tolist()
    if len(set(numbers)) == 1:
        return f"{numbers[0]}*{len(numbers)}"
    return f"torn {sorted(set(numbers))[:4]} of {len(numbers)}"
