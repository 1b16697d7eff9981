"""Verbs that only the tag store hears: listings, clears, status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Ask, Pause, Verb
from dataplane.client.put import FIRST_PAUSE_S, LAST_PAUSE_S, as_keys, list_of
from dataplane.client.results import Listing, unpack_listing
from dataplane.errors import InvalidRequest, Unreachable
from dataplane.tags.query import compile_where
from dataplane.types import Revision
from dataplane.wire.channel import Answer, Broken

Where = Mapping[str, object]


def ask_tags(core: Core, verb: str, body: Any, deadline: float) -> Verb[Answer]:
    """Ask something that may be asked again without harm, until it is answered."""
    pause = FIRST_PAUSE_S

    def into(_: Any, nbytes: int) -> memoryview:
        return core.recycler.take(nbytes).data

    while True:
        try:
            return (yield Ask(None, verb, body, into=into))
        except Broken as error:
            if time.monotonic() + pause >= deadline:
                raise Unreachable(f"the connection broke and time is up: {error}") from error
        yield Pause(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


def list_rows(
    core: Core,
    partition_id: str,
    where: Where | None,
    since: Revision | None,
    columns: Sequence[str] | None,
    limit: int | None,
    deadline: float,
) -> Verb[Listing]:
    """Keys and tags of a partition."""
    if isinstance(columns, str):
        raise InvalidRequest(f"columns is a list of tag names; give [{columns!r:.80}] for one")
    if since is not None and not (
        isinstance(since, tuple) and len(since) == 2  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
    ):
        raise InvalidRequest(f"since is the revision of an earlier answer, not {since!r:.80}")
    names = None if columns is None else list_of(columns, "columns")
    body = [partition_id, _plain(where), since, names, limit]
    answer = yield from ask_tags(core, "list", body, deadline)
    listing = unpack_listing(partition_id, answer.body, answer.payload)
    core.see(listing.revision)
    return listing


def clear_rows(
    core: Core,
    keys: Sequence[str] | None,
    partition_id: str,
    where: Where | None,
    deadline: float,
) -> Verb[int]:
    """Remove rows; how many there were."""
    if (keys is None) == (where is None):
        raise InvalidRequest("clear names keys, or where= for all rows that match; not both")
    names = None if keys is None else list(dict.fromkeys(as_keys(keys)))
    if names is not None and not names:
        return 0
    answer = yield from ask_tags(core, "clear", [partition_id, names, _plain(where)], deadline)
    removed, revision = answer.body
    core.see(revision)
    return removed


def plane_status(core: Core, deadline: float) -> Verb[dict[str, Any]]:
    """What the tag store and every value store say of themselves."""
    answer = yield from ask_tags(core, "status", [], deadline)
    status: dict[str, Any] = answer.body
    core.learn_stores(status["stores"])
    values: dict[str, Any] = {}
    for store_id in status["stores"]:
        values[store_id] = (yield Ask(core.stores[store_id], "value_status", [])).body
    status["values"] = values
    status["bytes_in_use"] = sum(p["payload_bytes"] for p in status["partitions"].values())
    return status


def _plain(where: Where | None) -> Any:
    """The predicate as msgpack carries it; what is wrong with it is said here already."""
    if where is None:
        return None
    compile_where(where)
    return where
