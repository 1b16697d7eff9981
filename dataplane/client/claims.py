"""Verbs of consumers: rows are claimed, and committed or released."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.put import list_of
from dataplane.client.results import Listing, unpack_listing
from dataplane.client.retry import ask_again, ask_once, ask_patiently
from dataplane.client.tags import Where, plain_where
from dataplane.errors import ClaimLost, InvalidRequest, RequestError
from dataplane.telemetry.verbs import spanned
from dataplane.types import Claim, Revision
from dataplane.wire.channel import Answer


@spanned("kv_claim")
def claim_rows(
    core: Core,
    partition_id: str,
    task: str,
    count: int,
    fields: Sequence[str],
    where: Where | None,
    order_by: str | None,
    groups: bool,
    lease_s: float,
    replica: tuple[int, int, int] | None,
    deadline: float,
) -> Verb[Claim]:
    """Rows for this client, as soon as there are enough."""
    granted = yield from claim_listing(
        core, partition_id, task, count, fields, where, order_by, groups, lease_s, replica, deadline
    )
    return granted.claim()


class Granted(NamedTuple):
    """What a claim was answered, with the fields and lengths of each row."""

    number: int
    """The claim's among those of its client: by it, it can be given back as if never answered."""
    task: str
    claim_id: int
    listing: Listing
    deliveries: list[int]
    end: bool

    def claim(self) -> Claim:
        """What `kv_claim` returns of it."""
        return Claim(self.task, self.claim_id, self.listing.to_meta(), self.deliveries, self.end)


def claim_listing(
    core: Core,
    partition_id: str,
    task: str,
    count: int,
    fields: Sequence[str],
    where: Where | None,
    order_by: str | None,
    groups: bool,
    lease_s: float,
    replica: tuple[int, int, int] | None,
    deadline: float,
) -> Verb[Granted]:
    """The same, with more of each row."""
    if isinstance(fields, str):
        raise InvalidRequest(f"fields is a list of field names; give [{fields!r:.80}] for one")
    names = list_of(fields, "fields")
    rank = replica if replica is None else list_of(replica, "replica")
    body = [
        partition_id, task, count, names, plain_where(where), order_by, groups, lease_s, rank,
    ]  # fmt: skip
    number, abandoned = core.claims.begin()
    try:
        # The same number is answered with the same rows, if it was answered.
        answer = yield from ask_patiently(
            core, "claim", [*body, abandoned], lambda: number, _abandon, deadline
        )
        granted = _unpack(core, partition_id, task, number, answer)
    except RequestError:
        core.claims.told(abandoned)
        raise
    except BaseException:
        # What may have been granted reaches nobody; the store may not have heard so yet.
        core.claims.abandon(number)
        raise
    core.claims.told(abandoned)
    return granted


def give_back(core: Core, number: int, deadline: float) -> Verb[None]:
    """Let go of what a claim was granted whose answer reached nobody. Where that cannot be said in
    time, the client's next claim says it."""
    core.claims.abandon(number)
    yield from ask_again(core, *_abandon(number), deadline)


def _abandon(number: int) -> tuple[str, list[Any]]:
    """The request may wait still, before others, and whatever it gets would reach nobody. If this
    is lost, the next claim says so."""
    return "claim_abandon", [[number]]


def _unpack(core: Core, partition_id: str, task: str, number: int, answer: Answer) -> Granted:
    claim_id, deliveries, end, revision, *head = answer.body
    listing = unpack_listing(partition_id, [revision, True, [], *head], answer.payload)
    core.see(revision)
    return Granted(number, task, claim_id, listing, array("i", deliveries).tolist(), end)


@spanned("kv_commit")
def commit_claim(core: Core, claim: Claim, deadline: float) -> Verb[Revision]:
    """Finish a claim; the revision of that moment."""
    return (yield from _end(core, "claim_commit", claim, deadline))


@spanned("kv_release")
def release_claim(core: Core, claim: Claim, deadline: float) -> Verb[Revision]:
    """Give a claim back; the revision of that moment."""
    return (yield from _end(core, "claim_release", claim, deadline))


def _end(core: Core, verb: str, claim: Claim, deadline: float) -> Verb[Revision]:
    if not isinstance(claim, Claim):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise InvalidRequest(f"a claim is what kv_claim returned, not {type(claim).__name__}")
    if not claim.claim_id:
        return core.seen  # the last claim of a partition holds nothing
    body = [claim.partition_id, claim.task, claim.claim_id, claim.keys]
    try:
        answer = yield from ask_once(core, verb, body, deadline)
    except ClaimLost as error:
        # Of a claim that is forgotten the store does not know the keys.
        error.keys = error.keys or list(claim.keys)
        raise
    return core.see(answer.body)
