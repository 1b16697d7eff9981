"""Verbs that wait at the tag store: for rows that match, and for changes."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.results import Listing, unpack_listing
from dataplane.client.retry import ask_patiently
from dataplane.client.tags import Where, plain_where
from dataplane.errors import InvalidRequest
from dataplane.telemetry.verbs import spanned
from dataplane.types import Change, KVBatchMeta, Revision
from dataplane.wire.channel import Answer
from dataplane.wire.messages import is_revision

_numbers = itertools.count(1)
"""Numbers of requests that wait, so that they can be given up."""

GROUP_BY = "uid"
"""The only tag that rows are grouped by: their group's."""


@spanned("kv_wait")
def wait_rows(
    core: Core,
    partition_id: str,
    where: Where | None,
    count: int,
    group_by: str | None,
    deadline: float,
) -> Verb[KVBatchMeta]:
    """All rows that match, once there are so many of them (or so many whole groups)."""
    listing = yield from wait_listing(core, partition_id, where, count, group_by, deadline)
    return listing.to_meta()


def wait_listing(
    core: Core,
    partition_id: str,
    where: Where | None,
    count: int,
    group_by: str | None,
    deadline: float,
) -> Verb[Listing]:
    """The same with the fields and lengths of each row."""
    _check_partition(partition_id)
    if type(count) is not int or count < 1:
        raise InvalidRequest(f"count is a number of rows or groups, 1 or more, not {count!r:.80}")
    if group_by not in (None, GROUP_BY):
        raise InvalidRequest(f"group_by is None or {GROUP_BY!r}, not {group_by!r:.80}")
    body: list[Any] = [partition_id, plain_where(where), [], count, group_by is not None]
    answer = yield from _ask(core, "wait", body, deadline)
    revision, *head = answer.body
    listing = unpack_listing(partition_id, [revision, True, [], *head], answer.payload)
    core.see(revision)
    return listing


def watch_once(
    core: Core, partition_id: str, since: Revision, where: Where | None, deadline: float
) -> Verb[list[Change]]:
    """The next changes after a revision, in order, as soon as there are any."""
    told, listing = yield from watch_listing(core, partition_id, since, where, deadline)
    keys, tags, fields = listing.keys, listing.tags, listing.fields
    changes: list[Change] = []
    at = 0
    for revision, cleared, count, full in told:
        part = slice(at, at + count)
        at += count
        sets = [set(names) for names in set(fields[part])]
        common = sorted(sets[0].intersection(*sets)) if sets else []
        rows = KVBatchMeta.checked(partition_id, keys[part], tags[part], common, revision)
        changes.append(Change(revision, rows, cleared, full))
    return changes


class Told(NamedTuple):
    """What one answer tells of some revisions; its rows are the next so many of the listing."""

    revision: Revision
    cleared: list[str]
    rows: int
    full: bool


def watch_listing(
    core: Core, partition_id: str, since: Revision, where: Where | None, deadline: float
) -> Verb[tuple[list[Told], Listing]]:
    """The same as what is told and one listing of all rows, with the fields and lengths of each."""
    _check_partition(partition_id)
    if not isinstance(since, tuple) or not is_revision(tuple(since)):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise InvalidRequest(f"since is the revision of an earlier answer, not {since!r:.80}")
    body = [partition_id, plain_where(where), since]
    answer = yield from _ask(core, "watch", body, deadline)
    wire, *head = answer.body
    told = [Told(Revision(*at), cleared, count, full) for at, cleared, count, full in wire]
    last = told[-1].revision
    listing = unpack_listing(partition_id, [last, False, [], *head], answer.payload)
    core.see(last)
    return told, listing


def _check_partition(partition_id: str) -> None:
    if type(partition_id) is not str:
        raise InvalidRequest(f"a partition_id is a string, not {type(partition_id).__name__}")


def _ask(core: Core, verb: str, body: list[Any], deadline: float) -> Verb[Answer]:
    """The answer to a request that has no effect and may wait for long."""
    return ask_patiently(core, verb, body, lambda: next(_numbers), _abandon, deadline)


def _abandon(number: int) -> tuple[str, list[Any]]:
    """Nobody waits for the answer, and it would be sent for nothing. If this is lost, so is the
    connection, and the request ends with it."""
    return "wait_abandon", [number]
