"""The parts that requests share, as the plane's verbs take them: keys, predicates, revisions. Pure.

Owns what is believed of them: sizes before anything is made of them, and that what an empty field
stands for is said in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dataplane.codec.shapes import MAX_ROWS
from dataplane.errors import InvalidRequest, quote
from dataplane.protocol.values import from_value
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.wire.messages import IF_ABSENT, MUST_EXIST, RETRY, RETURN_TAGS

MAX_NAMES = 1024
"""Names of fields or tags in one request."""


def keys_of(keys: Sequence[str], *, unique: bool = True) -> list[str]:
    """The keys of a request, at least one. InvalidRequest if they are too many, or repeated."""
    if not 0 < len(keys) <= MAX_ROWS:
        raise InvalidRequest(f"a request names 1 to {MAX_ROWS} keys, not {len(keys)}")
    listed = list(keys)
    if unique and len(set(listed)) != len(listed):
        seen: set[str] = set()
        twice = sorted({key for key in listed if key in seen or seen.add(key)})
        raise InvalidRequest(f"a request names each key once; repeated: {quote(twice)}")
    return listed


def names_of(names: Sequence[str], what: str) -> list[str]:
    """The names of fields or tags in a request. InvalidRequest if they are too many."""
    if len(names) > MAX_NAMES:
        raise InvalidRequest(f"at most {MAX_NAMES} {what} are named, not {len(names)}")
    return list(names)


def flags_of(mode: int, *, return_tags: bool, request: pb.Request) -> int:
    """The options of a put as they travel inside. InvalidRequest for a mode that is not known."""
    flags = (RETURN_TAGS if return_tags else 0) | (RETRY if request.retry else 0)
    if mode == pb.PUT_MODE_MUST_EXIST:
        return flags | MUST_EXIST
    if mode == pb.PUT_MODE_IF_ABSENT:
        return flags | IF_ABSENT
    if mode != pb.PUT_MODE_UNSPECIFIED:
        raise InvalidRequest(f"mode is {mode}, which is none that is known")
    return flags


def where_of(request: Any) -> Mapping[str, object] | None:
    """The predicate of a request that has a `where`; None if it is not set.

    InvalidRequest if it is no map. What its parts mean is for the plane to say.
    """
    if not request.HasField("where"):
        return None
    where: object = from_value(request.where)
    if not isinstance(where, dict):
        raise InvalidRequest(
            "where is a map of tag names to values, or to maps of operators to values; not a "
            f"{type(where).__name__}"
        )
    return cast("dict[str, object]", where)


def since_of(request: Any) -> Revision | None:
    """The revision of a request that has a `since`; None if it is not set."""
    return _revision_of(request, "since")


def until_of(request: Any) -> Revision | None:
    """The revision of a request that has an `until`; None if it is not set."""
    return _revision_of(request, "until")


def _revision_of(request: Any, name: str) -> Revision | None:
    if not request.HasField(name):
        return None
    message: pb.Revision = getattr(request, name)
    revision = Revision(message.epoch, message.n)
    if min(revision) < 0:
        raise InvalidRequest(f"{name} is the revision of an earlier answer, not {tuple(revision)}")
    return revision


def revision_to(revision: Revision | None) -> pb.Revision | None:
    """The message of a revision."""
    return None if revision is None else pb.Revision(epoch=revision.epoch, n=revision.n)
