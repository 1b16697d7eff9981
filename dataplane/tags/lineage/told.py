"""What is told of an entry: a map of plain values, with those of its rows that are wanted. Pure.

Of a request with many keys only the wanted ones are unpacked.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dataplane.codec.template import Template
from dataplane.tags import records as r
from dataplane.tags.lineage.lineage import GOT, LOADED, NOTED, REFUSED
from dataplane.tags.lineage.packed import Steps, body_of, drops_of, shapes_of, tags_at
from dataplane.tags.lineage.question import Question, Wanted
from dataplane.tags.lineage.ring import Entry
from dataplane.wire.messages import IF_ABSENT, MUST_EXIST, PutMeta


def told_of(entry: Entry, question: Question, wanted: Wanted) -> Steps:
    """An entry as it is answered, with the wanted rows of it; None if it has none."""
    kind, n, at, stage, client_id, carried = entry
    told: dict[str, Any] = {"n": n, "at": at, "stage": stage, "client": client_id}
    if kind == LOADED:
        return told | {"op": "load"}
    if kind == GOT:
        partition_id, keys, fields = carried
        return _named(told | {"op": "get", "fields": fields}, partition_id, keys, question, wanted)
    if kind == REFUSED:
        return _refusal(told, carried, question, wanted)
    if kind == NOTED:
        return _note(told, carried, question, wanted)
    body = body_of(entry)
    if kind == r.PUT:
        return (yield from _put(told, body, question, wanted))
    if kind == r.CLEAR:
        _, partition_id, keys, where, retire, _, _, *until = body
        told |= {"op": "clear", "retire": retire}
        if keys is not None:
            return _named(told, partition_id, keys, question, wanted)
        if not question.speaks_of(partition_id):
            return None
        last = until[0] if until else None
        return told | {"partition": partition_id, "where": where, "until": last, "nbytes": 200}
    if kind == r.BEGIN:
        _, partition_id, uid, sessions, declared, *_ = body
        told |= {"op": "begin", "uid": uid, "sessions": sessions, "declared_bytes": declared}
        if wanted.places is None:
            wanted.attempts[n] = (partition_id, uid)
        return _named(told | {"attempt": n}, partition_id, [uid], question, wanted)
    if kind == r.END:
        _, attempt, status, *_ = body
        if attempt not in wanted.attempts:
            if wanted.places is not None or not question.is_open:
                return None
            return told | {"op": "end", "attempt": attempt, "status": status}
        partition_id, uid = wanted.attempts[attempt]
        told |= {"op": "end", "attempt": attempt, "status": status, "uid": uid}
        return _named(told, partition_id, [uid], question, wanted)
    if kind == r.CLAIM:
        return _claim(told, body, question, wanted)
    if kind in (r.COMMIT, r.RELEASE):
        partition_id, task, claim_id, keys, *rest = body
        told |= {"op": "commit" if kind == r.COMMIT else "release", "task": task, "claim": claim_id}
        if kind == r.RELEASE:
            told["why"] = rest[0]
        return _named(told, partition_id, keys, question, wanted)
    if kind == r.PARTITION:
        names = [name for name in drops_of(body[0], body[1:]) if question.speaks_of(name)]
        return told | {"op": "drop", "partitions": names} if names else None
    if kind == r.LOST:
        if question.among is not None:
            return None  # which stores there are is not told to whoever may not see everything
        store_id, blocks = body
        return told | {"op": "lost", "store": store_id, "blocks": blocks, "nbytes": 1000}
    assert kind == r.START
    return told | {"op": "start", "epoch": body[0]}


def _named(
    told: dict[str, Any],
    partition_id: str,
    keys: Collection[str],
    question: Question,
    wanted: Wanted,
) -> dict[str, Any] | None:
    """The entry with those of its keys that are wanted."""
    if not question.speaks_of(partition_id):
        return None
    listed = list(keys)
    mine = [listed[i] for i in wanted.of(partition_id, listed)]
    if not mine:
        return None
    return told | {
        "partition": partition_id, "keys": mine, "of": len(listed), "nbytes": 60 * len(mine),
    }  # fmt: skip


def _put(told: dict[str, Any], body: Any, question: Question, wanted: Wanted) -> Steps:
    _, packed, tags, store_id, block = body
    meta = PutMeta.unpack(packed)
    partition_id = meta.partition_id
    if not question.speaks_of(partition_id):
        return None
    chosen = wanted.of(partition_id, meta.keys)
    if not chosen:
        return None
    if wanted.places is None:
        chosen = chosen[: question.limit]
    their_tags: dict[int, Any] = {}
    if tags is not None:
        their_tags = yield from tags_at(tags, chosen)
    columns: list[list[Any]] = []
    shapes: dict[int, list[list[int]]] = {}
    if block is not None:
        template = Template.parse(block[4])
        columns = [[c.name, c.dtype, c.ragged_dim, -1 in c.dims] for c in template.columns]
        shapes = dict(zip(chosen, shapes_of(template, block[5], block[6], chosen), strict=True))
    rows: list[list[Any]] = [[meta.keys[i], their_tags.get(i), shapes.get(i, [])] for i in chosen]
    return told | {
        "op": "tag" if block is None else "put",
        "partition": partition_id,
        "of": len(meta.keys),
        "attempt": meta.attempt,
        "must_exist": bool(meta.flags & MUST_EXIST),
        "if_absent": bool(meta.flags & IF_ABSENT),
        "store": store_id,
        "block": None if block is None else block[0],
        "columns": columns,
        "rows": rows,
        "nbytes": len(rows) * (100 + 30 * len(columns) + len(tags or b"") // len(meta.keys)),
    }


def _claim(
    told: dict[str, Any], body: Any, question: Question, wanted: Wanted
) -> dict[str, Any] | None:
    if len(body) != 8:
        return None  # one more client has a rank's share, of rows that are claimed already
    partition_id, task, _, lease_s, _, grants, batch, _ = body
    if not question.speaks_of(partition_id):
        return None
    rows: list[list[Any]] = []
    count = 0
    for claim_id, _, rank, keys in grants:
        count += len(keys)
        rows += [[keys[i], claim_id, rank] for i in wanted.of(partition_id, keys)]
    if not rows:
        return None
    return told | {
        "op": "claim", "partition": partition_id, "task": task, "lease_s": lease_s,
        "batch": batch, "of": count, "rows": rows, "nbytes": 80 * len(rows),
    }  # fmt: skip


def _refusal(
    told: dict[str, Any], carried: Any, question: Question, wanted: Wanted
) -> dict[str, Any] | None:
    verb, partition_id, keys, count, error, message, attempt = carried
    if partition_id and not question.speaks_of(partition_id):
        return None
    told |= {
        "op": "refuse", "verb": verb, "partition": partition_id, "error": error,
        "message": message, "of": count, "attempt": attempt,
    }  # fmt: skip
    if wanted.places is None:
        return told | {"keys": keys} if partition_id or question.is_open else None
    mine = [keys[i] for i in wanted.of(partition_id, keys)]
    if not mine and attempt in wanted.attempts:
        mine = [wanted.attempts[attempt][1]]
    if not mine and wanted.uid is not None and _names_group(keys, wanted.uid):
        mine = keys  # rows of the group that never came to be
    return told | {"keys": mine, "nbytes": 400} if mine else None


def _names_group(keys: Collection[str], uid: str) -> bool:
    """Whether a refused begin was of the uid."""
    return uid in keys


def _note(
    told: dict[str, Any], carried: Any, question: Question, wanted: Wanted
) -> dict[str, Any] | None:
    verb, of_n, partition_id, keys, fields, hashes, previews = carried
    if not question.speaks_of(partition_id):
        return None
    chosen = wanted.of(partition_id, keys)
    if not chosen:
        return None
    rows = [
        [keys[i], [column[i] for column in hashes], [column[i] for column in previews]]
        for i in chosen
    ]
    return told | {
        "op": "note", "verb": verb, "of_n": of_n, "partition": partition_id, "fields": fields,
        "rows": rows, "nbytes": 150 * len(rows),
    }  # fmt: skip
