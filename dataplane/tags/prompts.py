"""The rows that groups have for their prompts: what `begin_group` and `end_group` write. Pure."""

from __future__ import annotations

import msgpack

from dataplane.tags.groups import RUNNING, Group
from dataplane.tags.puts import Found, PutRows
from dataplane.tags.store import TagStore
from dataplane.types import Tags


def put_of_begin(partition_id: str, uid: str, n: int, attempt: int, client_id: str) -> PutRows:
    """The put of a prompt's row when its group begins."""
    tags: Tags = {"is_prompt": True, "status": RUNNING, "uid": uid, "n": n, "attempt": attempt}
    return _put(partition_id, uid, tags, client_id)


def begin_group(
    store: TagStore,
    prompt: PutRows,
    found: Found,
    n: int,
    declared_bytes: int,
    *,
    now: float,
    kept_by: str,
) -> Group:
    """Begin a group whose prompt's put was checked; its attempt is the next revision."""
    partition = store.partitions.get(prompt.partition_id)
    if partition is None:
        partition = store.make(prompt.partition_id)
    producer = partition.producer(prompt.client_id)
    (uid,) = prompt.keys
    group = Group(
        uid, prompt.partition_id, store.n + 1, n, declared_bytes, producer, at=now, store=kept_by
    )
    store.apply_begin(prompt, found, group, now)
    return group


def put_of_end(
    store: TagStore, group: Group, status: str, client_id: str
) -> tuple[PutRows, Found] | None:
    """The checked put of a prompt's row when its group ends; None if the row was cleared."""
    if store.partition(group.partition_id).row(group.uid) is None:
        return None
    put = _put(group.partition_id, group.uid, {"status": status}, client_id)
    return put, store.check_put(put)


def _put(partition_id: str, uid: str, tags: Tags, client_id: str) -> PutRows:
    size = len(msgpack.packb(tags))
    return PutRows(partition_id, [uid], [tags], [size], None, client_id=client_id, is_prompt=True)
