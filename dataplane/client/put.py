"""Puts: three ways to the stores, one effect each, whatever happens on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Done, Open, Run, Tell, Verb
from dataplane.client.retry import FIRST_PAUSE_S, before_next_try, outcome_unknown
from dataplane.client.tracing import note_put, notes_values
from dataplane.codec.tags import as_stored, pack_tags, pack_tags_many
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    PlaneLost,
    QuotaExceeded,
    Unreachable,
    quote,
)
from dataplane.telemetry.verbs import spanned
from dataplane.types import KVBatchMeta, Revision, Tags
from dataplane.wire.channel import Broken, Refused
from dataplane.wire.messages import (
    IF_ABSENT,
    LONGEST_WAIT_S,
    MUST_EXIST,
    RETRY,
    RETURN_TAGS,
    PutAnswer,
    PutMeta,
    WireRevision,
    is_attempt,
    tags_from_wire,
    with_fullest,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    from dataplane.codec.encoded import Encoded
    from dataplane.codec.foreign import Foreign

    Block: TypeAlias = Encoded | Foreign

MAX_TRIED = 8
"""Other stores that are asked for room, where nothing may be held for the put in one of them."""


class ToPut(NamedTuple):
    """What a put brings, checked and encoded."""

    keys: list[str]
    encoded: Encoded | None
    packed: bytes | None
    """The tags, where there are any."""
    tags: Sequence[Mapping[str, object]]
    """As the caller gave them; empty ones where it gave none."""


@spanned("kv_put")
def put_row(
    core: Core,
    key: str,
    partition_id: str,
    fields: Mapping[str, object] | None,
    tags: Mapping[str, object] | None,
    flags: int,
    deadline: float,
    attempt: int | None = None,
) -> Verb[KVBatchMeta]:
    """Put one row."""
    brought = row_to_put(key, fields, tags)
    return (
        yield from put_block(
            core, brought.keys, partition_id, brought.encoded, brought.packed, brought.tags,
            flags, deadline, attempt,
        )
    )  # fmt: skip


def row_to_put(
    key: str, fields: Mapping[str, object] | None, tags: Mapping[str, object] | None
) -> ToPut:
    """One row's fields and tags, encoded."""
    if type(key) is not str:
        raise InvalidRequest(f"a key is a string, not {type(key).__name__}; many are a batch put")
    if fields is None and tags is None:
        raise InvalidRequest("a put brings fields, tags or both")
    encoded = None
    if fields is not None:
        from dataplane.codec.encode import encode_row

        encoded = encode_row(key, fields)
    packed = pack_tags(tags) if tags is not None else None
    return ToPut([key], encoded, packed, [tags or {}])


@spanned("kv_batch_put")
def put_batch(
    core: Core,
    keys: Sequence[str],
    partition_id: str,
    fields: object,
    tags: Sequence[Mapping[str, object]] | None,
    flags: int,
    deadline: float,
    attempt: int | None = None,
) -> Verb[KVBatchMeta]:
    """Put many rows, all or none."""
    brought = batch_to_put(keys, fields, tags)
    return (
        yield from put_block(
            core, brought.keys, partition_id, brought.encoded, brought.packed, brought.tags,
            flags, deadline, attempt,
        )
    )  # fmt: skip


def batch_to_put(
    keys: Sequence[str], fields: object, tags: Sequence[Mapping[str, object]] | None
) -> ToPut:
    """Many rows' fields and tags, encoded."""
    keys = as_keys(keys)
    if fields is None and tags is None:
        raise InvalidRequest("a put brings fields, tags or both")
    if tags is not None:
        if isinstance(tags, Mapping):
            raise InvalidRequest("tags are a list with one mapping per key, not one mapping")
        tags = list_of(tags, "tags")
        if len(tags) != len(keys):
            raise InvalidRequest(
                f"{len(keys)} keys and {len(tags)} tags: give one mapping of tags per key, in order"
            )
    if len(set(keys)) != len(keys):
        seen: set[str] = set()
        twice = sorted({key for key in keys if key in seen or seen.add(key)})
        raise InvalidRequest(f"a put names each key once; repeated: {quote(twice)}")
    encoded = None
    if fields is not None:
        from dataplane.codec.encode import encode_batch

        encoded = encode_batch(keys, fields)
    packed = pack_tags_many(tags) if tags is not None else None
    return ToPut(keys, encoded, packed, tags or [{} for _ in keys])


def as_keys(keys: object) -> list[str]:
    """The keys of a call as a list; InvalidRequest for a lone string, which is a sequence too."""
    if isinstance(keys, str):
        raise InvalidRequest(f"keys are a list of strings; give [{keys!r:.80}] for one")
    listed = list_of(keys, "keys")
    for key in listed:
        if type(key) is not str:
            raise InvalidRequest(f"a key is a string, not {type(key).__name__}: {key!r:.80}")
    return listed


def list_of(items: object, what: str) -> list[Any]:
    """An argument that is to be a list, as one. InvalidRequest if it has no items."""
    try:
        return list(cast("Sequence[Any]", items))
    except TypeError:
        raise InvalidRequest(f"{what}: a list is wanted, not {type(items).__name__}") from None


def flags_of(*, must_exist: bool, if_absent: bool, return_tags: bool) -> int:
    """The options of a put as they travel."""
    if must_exist and if_absent:
        raise InvalidRequest("must_exist and if_absent exclude each other")
    return (
        (MUST_EXIST if must_exist else 0)
        | (IF_ABSENT if if_absent else 0)
        | (RETURN_TAGS if return_tags else 0)
    )


class _Put:
    """One put under way; repeats carry its number and, once it has one, its stamp."""

    __slots__ = ("attempt", "deadline", "encoded", "flags", "keys", "number", "partition_id",
                 "seen", "settled", "stamp", "tags")  # fmt: skip

    def __init__(
        self,
        core: Core,
        keys: list[str],
        partition_id: str,
        encoded: Block | None,
        tags: bytes | None,
        flags: int,
        attempt: int | None,
        deadline: float,
    ) -> None:
        self.attempt = attempt
        self.deadline = deadline
        self.keys = keys
        self.partition_id = partition_id
        self.encoded = encoded
        self.tags = tags
        self.flags = flags
        self.seen = core.asked_at()
        self.stamp: WireRevision | None = None
        self.number, self.settled = core.numbers.begin()

    @property
    def draw(self) -> int | bool | None:
        """What is kept in a value store that the put may use: its group's room, or for a write-back
        to rows that exist any."""
        return True if self.flags & MUST_EXIST else self.attempt

    def meta(self) -> bytes:
        return PutMeta(
            self.partition_id,
            self.keys,
            self.flags,
            self.number,
            self.settled,
            self.seen,
            self.stamp,
            self.attempt,
            _seconds(self.deadline),
        ).pack()


def put_block(
    core: Core,
    keys: list[str],
    partition_id: str,
    encoded: Block | None,
    packed: bytes | None,
    tags: Sequence[Mapping[str, object]],
    flags: int,
    deadline: float,
    attempt: int | None,
) -> Verb[KVBatchMeta]:
    """Rows whose fields and tags are encoded already; `tags` are what is answered as sent."""
    if attempt is not None and not is_attempt(attempt):
        raise InvalidRequest(f"an attempt is what begin_group answered, not {attempt!r:.80}")
    if type(partition_id) is not str:
        raise InvalidRequest(f"a partition_id is a string, not {type(partition_id).__name__}")
    sent: list[Tags] = cast("list[Any]", list(tags))
    if not keys:
        return KVBatchMeta(partition_id, [], [], [], None)
    if encoded is not None and not encoded.template.columns:
        encoded = None
        packed = packed if packed is not None else b"\x80" * len(keys)
    put = _Put(core, keys, partition_id, encoded, packed, flags, attempt, deadline)
    numbers = core.numbers
    pause_s = FIRST_PAUSE_S
    try:
        while True:
            try:
                if encoded is None:
                    answer = (yield Ask(None, "put_tags", (put.meta(), put.tags))).body
                else:
                    store = yield from home_store(core)
                    if encoded.nbytes > core.config.small_put_bytes and (
                        store.mappings is not None or not store.probed
                    ):
                        answer = yield from _put_large(core, put, encoded, store, deadline)
                    else:
                        answer = yield from _put_small(core, put, encoded, store, deadline)
                break
            except Refused as error:
                pause_s = yield from before_next_try(error, pause_s, deadline)
            except Broken as error:
                # It may have happened: the same number makes the repetition harmless.
                put.flags |= RETRY
                pause_s = yield from before_next_try(error, pause_s, deadline)
    except QuotaExceeded as full:
        # More than all of a store would not fit into an empty one: there nobody is in the way.
        if _is_of_store(full) and (encoded is None or encoded.nbytes < full.limit_bytes):
            yield from _say_who_fills(full)
        raise
    except (Unreachable, DeadlineExceeded) as error:
        if not put.flags & RETRY:
            raise
        raise outcome_unknown(core, "put", put.number) from error
    finally:
        numbers.end(put.number)
    revision, merged, fields = PutAnswer(*answer)
    if encoded is not None and notes_values(core):
        yield from note_put(core, partition_id, keys, encoded, Revision(*revision))
    if merged is not None:
        sent = tags_from_wire(merged)
    elif packed is None:
        sent = [{} for _ in keys]
    elif flags & RETURN_TAGS:
        sent = as_stored(tags, packed)  # none of the keys had a row
    if fields is None:
        fields = sorted(encoded.template.names) if encoded is not None else []
    return KVBatchMeta.checked(partition_id, keys, sent, fields, core.see(revision))


def home_store(core: Core) -> Verb[StoreView]:
    """The value store that this client's puts go to. Refused if the plane has none yet."""
    home = core.joined.home
    stores = core.stores
    if not stores or (home is not None and home not in stores):
        yield from refresh_stores(core)
        if not stores:
            raise Refused("the plane has no value store yet")
    if home is not None and home in stores:
        return stores[home]
    return next(iter(stores.values()))


def refresh_stores(core: Core) -> Verb[None]:
    """Ask the tag store which value stores there are."""
    answer = yield Ask(None, "stores", [])
    core.learn_stores(answer.body)


def _has_others(core: Core) -> bool:
    """Whether a put may go elsewhere when its store is full."""
    return core.joined.home is not None or len(core.stores) > 1


def _is_of_store(full: QuotaExceeded) -> bool:
    """Whether a value store is full, and not a partition: a value store knows no keys to name."""
    return full.oldest_keys is None


def _say_who_fills(full: QuotaExceeded) -> Verb[None]:
    """Add to the error of a full value store what the tag store knows of those who fill it."""
    try:
        answer = yield Ask(None, "fullest", [])
    except (DataplaneError, Broken):
        return  # why there is no room matters more than who would know
    with_fullest(full, answer.body)


def _put_small(
    core: Core, put: _Put, encoded: Block, store: StoreView, deadline: float
) -> Verb[list[Any]]:
    """The block travels with the request."""
    if not store.probed:
        lane = yield Open(store)
        yield Done(lane)
    # A payload that waits for room stops everything behind it on its connection. Where room can
    # be waited for without the payload, it is.
    mapped = store.mappings is not None
    alone = not mapped and not _has_others(core)
    wait_s = None if mapped else _seconds(deadline) if alone else 0.0
    try:
        return (yield _sent(put, encoded, store, wait_s)).body
    except QuotaExceeded as full:
        if alone or not _is_of_store(full):
            raise
        if mapped:
            return (yield from _put_large(core, put, encoded, store, deadline))
        elsewhere = yield from _put_elsewhere(core, put, encoded, store, full, deadline)
        if elsewhere is not None:
            return elsewhere
        return (yield _sent(put, encoded, store, _seconds_or(full, deadline))).body


def _sent(put: _Put, encoded: Block, store: StoreView, wait_s: float | None) -> Ask:
    """The request that carries a whole put."""
    body = (
        put.meta(), put.tags, encoded.template.blob, encoded.rows, encoded.lengths, wait_s,
        put.draw,
    )  # fmt: skip
    return Ask(store, "put_block", body, encoded.pieces, encoded.nbytes)


def _put_elsewhere(
    core: Core, put: _Put, encoded: Block, home: StoreView, full: QuotaExceeded, deadline: float
) -> Verb[list[Any] | None]:
    """The answer of the first other store that has room now; None if the put is to wait at home.

    It waits elsewhere where it is larger than all of the home store, and not than the other.
    """
    yield from refresh_stores(core)
    others = [store for store in core.stores.values() if store.store_id != home.store_id]
    random.shuffle(others)  # so that all who find their store full do not meet in the next one
    if put.draw is None:
        del others[MAX_TRIED:]
    larger: StoreView | None = None
    for store in others:
        try:
            if not store.probed:
                lane = yield Open(store)
                yield Done(lane)
            return (yield _sent(put, encoded, store, 0.0)).body
        except QuotaExceeded as error:
            if not _is_of_store(error):
                raise
            if full.limit_bytes <= encoded.nbytes < error.limit_bytes:
                larger = store
        except (Unreachable, PlaneLost, Refused):
            pass
        except Broken:
            put.flags |= RETRY  # it may have happened there
    if larger is None:
        return None
    return (yield _sent(put, encoded, larger, _seconds_or(full, deadline))).body


def _put_large(
    core: Core, put: _Put, encoded: Block, store: StoreView, deadline: float
) -> Verb[list[Any]]:
    """Room is reserved, the block copied there in place, then published."""
    lane = yield Open(store)
    try:
        mappings = store.mappings
        if mappings is None:  # the connection showed that this store is not on this node
            return (yield from _put_small(core, put, encoded, store, deadline))
        alone = not _has_others(core)
        wait_s = _seconds(deadline) if alone else 0.0
        try:
            answer = yield Ask(lane, "reserve", [encoded.nbytes, wait_s, put.draw])
        except QuotaExceeded as full:
            if alone:
                raise
            elsewhere = yield from _put_elsewhere(core, put, encoded, store, full, deadline)
            if elsewhere is not None:
                return elsewhere
            wait_s = _seconds_or(full, deadline)
            answer = yield Ask(lane, "reserve", [encoded.nbytes, wait_s, put.draw])
        block, segment, offset, stamp = answer.body
        # A repetition is judged from when it was first asked for: a try that was cut off before its
        # room was granted, or came through another client of the same name, has told no stamp.
        if put.stamp is None and not put.flags & RETRY:
            put.stamp = stamp
        try:
            memory = mappings.writable(segment)[offset : offset + encoded.nbytes]
            yield Run(partial(encoded.write_into, memory.data), encoded.nbytes)
            del memory
        except Unreachable:
            yield Tell(lane, "abort", [block])
            store.mappings = None
            raise Broken("the store's segments cannot be mapped from here") from None
        except BaseException:
            yield Tell(lane, "abort", [block])
            raise
        answer = yield Ask(
            lane,
            "commit",
            [
                block, put.meta(), put.tags, encoded.template.blob, encoded.rows, encoded.lengths,
            ],
        )  # fmt: skip
        return answer.body
    finally:
        yield Done(lane)


def _seconds(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(
            "the deadline passed before the put was sent",
            waited_s=0.0,
            explanation="the time of the call was over before anything was sent; connecting, or "
            "copying the values, took all of it",
        )
    # The store gives up a little earlier, so that its reason arrives before the deadline.
    return min(left - min(1.0, 0.1 * left), LONGEST_WAIT_S)


def _seconds_or(full: QuotaExceeded, deadline: float) -> float:
    """The time that is left to wait for room; at the deadline, why there is none."""
    if time.monotonic() >= deadline:
        raise full
    return _seconds(deadline)
