"""Lineage at the tag store: what was read and refused is noted, and `trace` answered from it.

trace  [partition_id | nil, uid | nil, key | nil, since, limit, (names of the partitions that
       whoever asks is to hear of)]                 -> map, see tags/lineage/search.py
stage  [name]   the client is at that stage from now on; an empty name: at none  -> nil
note   [verb, n, partition_id, keys, fields, hashes, previews]  of values put or got  -> nil
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.server.connection import Connection, Verb
from dataplane.server.slices import Slices
from dataplane.tags.keys import check_keys
from dataplane.tags.lineage.lineage import Lineage, check_stage
from dataplane.tags.lineage.question import Question
from dataplane.tags.lineage.search import search
from dataplane.wire.frames import Body
from dataplane.wire.messages import PutMeta

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

MAX_PREVIEW = 400
"""Letters of one value's preview."""
HASH_BYTES = 8
MAX_FIELD = 256


class Tracing:
    """The verbs about lineage, and what other services note in it. Without one nothing is noted."""

    def __init__(self, service: TagService, lineage: Lineage | None) -> None:
        self._service = service
        self._store = service.store
        self.lineage = lineage
        self.verbs: dict[str, Verb] = {
            "trace": self._trace,
            "stage": self._stage,
            "note": self._note,
        }

    # -- noting ------------------------------------------------------------------------------

    def got(self, client_id: str, partition_id: str, keys: list[str], answer: list[Any]) -> None:
        """Somebody was told where rows lie."""
        if self.lineage is not None:
            kept, fields = answer[0], answer[1]
            self.lineage.got(
                self._store.n, self._service.clock(), client_id, partition_id,
                keys if kept is None else kept, fields,
            )  # fmt: skip

    def refused(
        self,
        client_id: str,
        verb: str,
        partition_id: object,
        keys: Sequence[str],
        error: Exception,
        attempt: int | None = None,
    ) -> None:
        """A request was refused, and changed nothing."""
        if self.lineage is not None and isinstance(partition_id, str):
            self.lineage.refused(
                self._store.n, self._service.clock(), client_id, verb, partition_id, keys, error,
                attempt,
            )  # fmt: skip

    def refused_put(self, client_id: str, packed: object, error: BaseException) -> None:
        """A put was refused."""
        if self.lineage is None or not isinstance(error, DataplaneError):
            return
        try:
            meta = PutMeta.unpack(packed)
            keys = check_keys(meta.keys, unique=False)
        except InvalidRequest:
            return  # there is nothing in it to speak of
        self.refused(client_id, "put", meta.partition_id, keys, error, meta.attempt)

    # -- clients -----------------------------------------------------------------------------

    def greet(self, connection: Connection, greeting: dict[str, Any]) -> None:
        """A client comes, at some stage, and is told how much to say of values."""
        if self.lineage is None:
            return
        greeting["lineage"] = self.lineage.detail
        if connection.stage:
            self.lineage.enter(connection.client_id, connection.stage)

    def forget(self, client_id: str) -> None:
        """A client is long gone."""
        if self.lineage is not None:
            self.lineage.forget(client_id)

    # -- verbs -------------------------------------------------------------------------------

    def _stage(self, connection: Connection, number: int, body: Body) -> None:
        (name,) = body
        stage = check_stage(name)
        if self.lineage is not None:
            self.lineage.enter(connection.client_id, stage)
        connection.reply(number, None)

    def _note(self, connection: Connection, number: int, body: Body) -> None:
        note, nbytes = _checked_note(body)
        if self.lineage is not None:
            now = self._service.clock()
            self.lineage.noted(self._store.n, now, connection.client_id, note, nbytes)
        connection.reply(number, None)

    async def _trace(self, connection: Connection, number: int, body: Body) -> None:
        question = Question.checked(*body)
        if self.lineage is None:
            raise InvalidRequest(
                "this plane keeps no lineage (its setting lineage is 'off'): start it with "
                "lineage='on' to trace what happens from then on"
            )
        steps = search(self.lineage, self._store, question)
        slices = Slices(self._service.worst)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                answer: dict[str, Any] = end.value
                break
            await slices.breathe()
        service = self._service
        clients = {entry["client"] for entry in answer["entries"]} - {""}
        answer["clients"] = {
            client_id: [service.labels.get(client_id, ""), client_id in service.attached]
            for client_id in sorted(clients)
        }
        connection.reply(number, answer)


def _checked_note(body: Body) -> tuple[tuple[Any, ...], int]:
    """What a client says of values, and its size. InvalidRequest if it is nothing of the kind."""
    verb, n, partition_id, keys, fields, hashes, previews = body
    keys = check_keys(keys, unique=False)
    good = (
        verb in ("put", "get")
        and type(n) is int
        and type(partition_id) is str
        and _is_column(fields, str, MAX_FIELD)
        and _is_table(hashes, len(fields), len(keys), bytes, HASH_BYTES)
        and (previews == [] or _is_table(previews, len(fields), len(keys), str, MAX_PREVIEW))
    )
    if not good:
        raise InvalidRequest("a note has a hash, and maybe a preview, of each field of each key")
    nbytes = len(keys) * (110 + len(fields) * 45)
    nbytes += 2 * sum(len(cell) for column in previews for cell in column)
    return (verb, n, partition_id, keys, fields, hashes, previews), nbytes


def _is_column(cells: Any, kind: type, most: int, rows: int | None = None) -> bool:
    """Whether it is a list of short cells of one type."""
    return (
        type(cells) is list
        and rows in (None, len(cast("list[Any]", cells)))
        and all(type(cell) is kind and len(cell) <= most for cell in cast("list[Any]", cells))
    )


def _is_table(columns: Any, count: int, rows: int, kind: type, most: int) -> bool:
    """Whether it is so many such lists of so many cells each."""
    listed = cast("list[Any]", columns) if type(columns) is list else None
    return (
        listed is not None
        and len(listed) == count
        and all(_is_column(column, kind, most, rows) for column in listed)
    )
