"""Changes of a bare tag store that take more than one step, as the server makes them."""

from __future__ import annotations

import msgpack

from dataplane.tags.groups import RUNNING, Group
from dataplane.tags.puts import PutRows
from dataplane.tags.store import TagStore
from dataplane.types import Tags


def begin_group(
    store: TagStore,
    partition_id: str,
    uid: str,
    n: int = 1,
    declared_bytes: int = 0,
    client_id: str = "c",
    *,
    now: float = 0.0,
    kept_by: str = "",
) -> Group:
    """A group that has begun."""
    attempt = store.n + 1
    tags: Tags = {"is_prompt": True, "status": RUNNING, "uid": uid, "n": n, "attempt": attempt}
    prompt = prompt_put(partition_id, uid, tags, client_id)
    found = store.check_put(prompt)
    partition = store.partitions.get(partition_id)
    if partition is None:
        partition = store.make(partition_id)
    producer = partition.producer(client_id)
    group = Group(uid, partition_id, attempt, n, declared_bytes, producer, at=now, store=kept_by)
    assert store.apply_begin(prompt, found, group, now) == attempt
    return group


def end_group(
    store: TagStore, attempt: int, status: str, client_id: str = "c", *, now: float = 0.0
) -> int:
    """End a group; the revision."""
    group = store.attempts[attempt]
    prompt = None
    if store.partition(group.partition_id).row(group.uid) is not None:
        written = prompt_put(group.partition_id, group.uid, {"status": status}, client_id)
        prompt = written, store.check_put(written)
    return store.apply_end(group, status, prompt, now, client_id)


def prompt_put(partition_id: str, uid: str, tags: Tags, client_id: str) -> PutRows:
    """The put of a prompt's row."""
    size = len(msgpack.packb(tags))
    return PutRows(partition_id, [uid], [tags], [size], None, client_id=client_id, is_prompt=True)


def drop_partition(store: TagStore, partition_id: str, *, now: float = 0.0) -> int:
    """Drop a partition and let go of all its cells; the revision."""
    partition = store.partition(partition_id)
    pieces = store.apply_drop(partition, now)
    n = store.n
    for piece in pieces:
        store.release_rows(partition, piece)
    return n
