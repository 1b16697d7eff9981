"""Puts as messages: made once, sent as often as it takes, by this process or a later one.

Owns the arguments of puts and what of them travels. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from dataplane.errors import InvalidRequest, quote
from dataplane.producer.rows import Chunked
from dataplane.producer.trajectory import Trajectory
from dataplane.protocol.cells import cells_of
from dataplane.protocol.values import tags_to
from dataplane.types import Tags
from dataplane.v1 import dataplane_pb2 as pb

Message: TypeAlias = "pb.PutTrajectoriesRequest | pb.PutTagsRequest | pb.PutRowsHeader"


@dataclass(frozen=True, slots=True)
class Put:
    """One put, ready to be sent."""

    message: Message
    cells: Chunked | None = None
    """What follows the header of a put of rows."""

    @property
    def may_wait(self) -> bool:
        """Whether it may be sent hours later: it cannot bring back what was cleared meanwhile."""
        return bool(self.message.attempt) or self.message.mode == pb.PUT_MODE_IF_ABSENT

    @property
    def rpc(self) -> str:
        """The call that it is."""
        if isinstance(self.message, pb.PutRowsHeader):
            return "PutRows"
        return "PutTags" if isinstance(self.message, pb.PutTagsRequest) else "PutTrajectories"


def put_of_trajectories(
    trajectories: Sequence[Trajectory | pb.Trajectory],
    partition_id: str,
    *,
    attempt: int | None,
    if_absent: bool,
    all_or_nothing: bool,
) -> Put:
    """The put of some trajectories. InvalidRequest names what cannot travel."""
    return Put(
        pb.PutTrajectoriesRequest(
            partition_id=_name(partition_id),
            trajectories=[message_of(one) for one in trajectories],
            mode=mode_of(must_exist=False, if_absent=if_absent),
            attempt=attempt_of(attempt),
            all_or_nothing=all_or_nothing,
        )
    )


def message_of(trajectory: Trajectory | pb.Trajectory) -> pb.Trajectory:
    """A trajectory's message, or what is one already."""
    if isinstance(trajectory, pb.Trajectory):
        return trajectory
    if isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        return trajectory.to_message()
    raise InvalidRequest(f"a Trajectory is due, not a {type(trajectory).__name__}")


def put_of_rows(
    keys: Sequence[str],
    partition_id: str,
    fields: object,
    tags: Sequence[Mapping[str, object]] | None,
    *,
    attempt: int | None,
    must_exist: bool,
    if_absent: bool,
    return_tags: bool,
) -> Put:
    """The put of rows with their fields, or of tags alone. InvalidRequest says what is wrong."""
    names = keys_of(keys)
    if len(set(names)) != len(names):
        twice = sorted({key for key in names if names.count(key) > 1})
        raise InvalidRequest(f"a put names each key once; repeated: {quote(twice)}")
    if fields is None and tags is None:
        raise InvalidRequest("a put brings fields, tags or both")
    if tags is not None and (isinstance(tags, Mapping) or len(tags) != len(names)):
        raise InvalidRequest(f"{len(names)} keys: give a list with one mapping of tags for each")
    messages = [
        tags_to(one, f"tags of key {key!r:.200}")
        for key, one in zip(names, tags or (), strict=False)
    ]
    common: dict[str, Any] = {
        "partition_id": _name(partition_id),
        "keys": names,
        "mode": mode_of(must_exist=must_exist, if_absent=if_absent),
        "attempt": attempt_of(attempt),
        "return_tags": return_tags,
    }
    columns = _columns(names, fields)
    if not columns:
        empty = [pb.Tags() for _ in names] if tags is None else messages
        return Put(pb.PutTagsRequest(**common, tags=empty))
    cells = cells_of(names, columns)
    header = pb.PutRowsHeader(
        **common,
        tags=messages,
        columns=cells.shape.to_columns(),
        total_bytes=cells.shape.nbytes,
    )
    return Put(header, cells)


def sent_tags(keys: Sequence[str], tags: Sequence[Mapping[str, object]] | None) -> list[Tags]:
    """The tags of a put as its answer repeats them."""
    if tags is None:
        return [{} for _ in keys]
    return cast("list[Tags]", [dict(one) for one in tags])


def keys_of(keys: object) -> list[str]:
    """The keys of a call as a list. InvalidRequest for a lone string, which is a sequence too."""
    if isinstance(keys, str):
        raise InvalidRequest(f"keys are a list of strings; give [{keys!r:.80}] for one")
    try:
        listed = list(cast("Sequence[Any]", keys))
    except TypeError:
        raise InvalidRequest(f"keys: a list is wanted, not {type(keys).__name__}") from None
    for key in listed:
        if type(key) is not str:
            raise InvalidRequest(f"a key is a string, not {type(key).__name__}: {key!r:.80}")
    return listed


def mode_of(*, must_exist: bool, if_absent: bool) -> pb.PutMode:
    """What a put does where its keys exist, or do not."""
    if must_exist and if_absent:
        raise InvalidRequest("must_exist and if_absent exclude each other")
    if must_exist:
        return pb.PUT_MODE_MUST_EXIST
    return pb.PUT_MODE_IF_ABSENT if if_absent else pb.PUT_MODE_UNSPECIFIED


def attempt_of(attempt: int | None) -> int:
    """An attempt as it travels; 0 for none."""
    if attempt is None:
        return 0
    if type(attempt) is not int or not 0 < attempt < 1 << 63:
        raise InvalidRequest(f"an attempt is what begin_group answered, not {attempt!r:.80}")
    return attempt


def _name(partition_id: object) -> str:
    if type(partition_id) is not str:
        raise InvalidRequest(f"a partition_id is a string, not {type(partition_id).__name__}")
    return partition_id


def _columns(keys: list[str], fields: object) -> Mapping[str, object]:
    """Fields by column: they came so, or row by row."""
    if fields is None:
        return {}
    if isinstance(fields, Mapping):
        return cast("Mapping[str, object]", fields)
    if not isinstance(fields, Sequence) or isinstance(fields, str | bytes):
        raise InvalidRequest("fields are a mapping of columns, or a list with one mapping per key")
    rows = cast("Sequence[Mapping[str, object]]", fields)
    if len(rows) != len(keys):
        raise InvalidRequest(f"{len(keys)} keys and {len(rows)} rows of fields")
    names = list(rows[0]) if rows else []
    for key, row in zip(keys, rows, strict=True):
        odd = set(row) ^ set(names)
        if odd:
            raise InvalidRequest(
                f"the rows of a put have the same fields; key {key!r:.200} and the first differ in "
                f"{quote(sorted(odd))}"
            )
    return {name: [row[name] for row in rows] for name in names}


class Whole:
    """Bytes that are there in one piece."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def chunks(self, size: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Parts of at most `size` from an offset on, each with where it begins."""
        for at in range(offset, len(self._data), size):
            yield at, bytes(self._data[at : at + size])
