"""Verbs that only the tag store hears: listings, clears, status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.put import as_keys, list_of
from dataplane.client.results import Listing, unpack_listing
from dataplane.client.retry import ask_again, ask_once
from dataplane.errors import DeadlineExceeded, InvalidRequest, Unreachable
from dataplane.tags.query import compile_where
from dataplane.telemetry.verbs import spanned
from dataplane.types import Revision

Where = Mapping[str, object]

PATIENCE_S = 2.0
"""How long a status tries to reach a value store that is away."""


@spanned("kv_list")
def list_rows(
    core: Core,
    partition_id: str,
    where: Where | None,
    since: Revision | None,
    columns: Sequence[str] | None,
    limit: int | None,
    deadline: float,
    order_by: str | None = None,
) -> Verb[Listing]:
    """Keys and tags of a partition."""
    if isinstance(columns, str):
        raise InvalidRequest(f"columns is a list of tag names; give [{columns!r:.80}] for one")
    if since is not None and not (
        isinstance(since, tuple) and len(since) == 2  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
    ):
        raise InvalidRequest(f"since is the revision of an earlier answer, not {since!r:.80}")
    names = None if columns is None else list_of(columns, "columns")
    body = [partition_id, plain_where(where), since, names, limit]
    if order_by is not None:
        body.append(order_by)
    answer = yield from ask_again(core, "list", body, deadline)
    listing = unpack_listing(partition_id, answer.body, answer.payload)
    core.see(listing.revision)
    return listing


@spanned("kv_clear")
def clear_rows(
    core: Core,
    keys: Sequence[str] | None,
    partition_id: str,
    where: Where | None,
    retire: bool,
    deadline: float,
    until: Revision | None = None,
) -> Verb[int]:
    """Remove rows; how many there were."""
    if (keys is None) == (where is None):
        raise InvalidRequest("clear names keys, or where= for all rows that match; not both")
    names = None if keys is None else list(dict.fromkeys(as_keys(keys)))
    if names is not None and not names:
        return 0
    # Numbered like a put: a repetition must not remove what was put since.
    body: list[Any] = [partition_id, names, plain_where(where), bool(retire)]
    if until is not None:
        body.append(until)
    answer = yield from ask_once(core, "clear", body, deadline)
    removed, revision = answer.body
    core.see(revision)
    return removed


def present(core: Core, deadline: float) -> Verb[Revision]:
    """The revision of now."""
    return core.see((yield from ask_again(core, "begin", [], deadline)).body)


def plane_status(core: Core, deadline: float) -> Verb[dict[str, Any]]:
    """What the tag store and every value store say of themselves."""
    answer = yield from ask_again(core, "status", [], deadline)
    status: dict[str, Any] = answer.body
    core.learn_stores(status["stores"])
    values: dict[str, Any] = {}
    for store_id in status["stores"]:
        store = core.stores[store_id]
        soon = min(deadline, time.monotonic() + PATIENCE_S)
        try:
            answer = yield from ask_again(core, "value_status", [], soon, store)
        except (Unreachable, DeadlineExceeded) as error:
            values[store_id] = {"unreachable": str(error)}
        else:
            values[store_id] = answer.body
    status["values"] = values
    status["name"], status["plane_id"] = core.joined.name, core.joined.plane_id
    status["bytes_in_use"] = sum(p["payload_bytes"] for p in status["partitions"].values())
    return status


def plain_where(where: Where | None) -> Any:
    """The predicate as msgpack carries it; what is wrong with it is said here already."""
    if where is None:
        return None
    compile_where(where)
    return where
