"""A call under way, and what its span says of it: its attributes, and the groups that it is about.

Owns how the arguments and the result of each verb are read. What is not as a verb takes it is the
verb's to refuse.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from dataplane.logs.escaping import one_line
from dataplane.telemetry.groups import Group, Known, uids_in

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Result = TypeVar("Result")

SAMPLE_KEYS: Final = 3
NAME_CHARS: Final = 128
"""Of a key, a uid or a partition as an attribute."""


class Call:
    """One call of a verb."""

    __slots__ = ("about", "began", "name", "nbytes", "span")

    def __init__(self, name: str, about: Mapping[str, Any]) -> None:
        self.name = name
        self.about = about
        """Its arguments by name."""
        self.began = time.time_ns()
        self.span: Span | None = None
        self.nbytes = 0
        """What its steps have moved."""

    def counted(self, verb: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """The same verb; the bytes that its steps move are counted."""
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                effect = verb.send(value) if error is None else verb.throw(error)
                value = error = None
                # Of requests that carry values, and of copies (`client.effects`); others have
                # neither.
                self.nbytes += getattr(effect, "payload_bytes", 0) + getattr(effect, "nbytes", 0)
                try:
                    value = yield effect
                except GeneratorExit:
                    verb.close()
                    raise
                except BaseException as thrown:
                    error = thrown
        except StopIteration as end:
            return end.value

    def groups(self, result: Any, known: Known) -> tuple[str, list[Group]]:
        """The partition and the groups of it that the call was about. `known` learns from it."""
        about = self.about
        partition_id = str(about.get("partition_id") or "")
        match self.name:
            case "kv_put" | "kv_batch_put":
                keys, tags = _keys_of(about), _tags_of(about)
                return partition_id, known.of_put(
                    partition_id, keys, tags, about.get("attempt"), must_exist=_must_exist(about)
                )
            case "kv_batch_get" | "kv_view":
                return partition_id, known.of_keys(partition_id, _keys_of(about))
            case "kv_claim" if result is not None:
                meta = getattr(result, "meta", result)
                known.learn(partition_id, meta.keys, (tags.get("uid") for tags in meta.tags))
                return partition_id, known.of_keys(partition_id, meta.keys)
            case "kv_commit" | "kv_release":
                meta = about["claim"].meta
                known.learn(meta.partition_id, meta.keys, (tags.get("uid") for tags in meta.tags))
                return meta.partition_id, known.of_keys(meta.partition_id, meta.keys)
            case "kv_clear":
                named = [Group(uid) for uid in uids_in(about.get("where"))]
                return partition_id, named or known.of_keys(partition_id, _keys_of(about))
            case "begin_group":
                if type(result) is int:
                    known.began(result, partition_id, about["uid"])
                return partition_id, [Group(about["uid"])]
            case "end_group":
                found = known.of_attempt(about.get("attempt"))
                return ("", []) if found is None else (found[0], [Group(found[1])])
            case "kv_list" | "kv_wait" if result is not None:
                known.learn_rows(partition_id, result)
            case _:
                pass
        return partition_id, []

    def attributes(
        self, partition_id: str, result: Any, error: BaseException | None
    ) -> dict[str, Any]:
        """What is told of it."""
        about = self.about
        found: dict[str, Any] = {"dataplane.outcome": outcome(error)}
        if partition_id:
            found["dataplane.partition"] = one_line(partition_id, NAME_CHARS)
        keys = getattr(result, "keys", None)
        rows = cast("list[Any]", keys) if isinstance(keys, list) else _keys_of(about)
        count = len(rows) or (result if self.name == "kv_clear" and type(result) is int else 0)
        if count:
            found["dataplane.rows"] = count
        if rows:
            sample = [one_line(str(key), NAME_CHARS) for key in rows[:SAMPLE_KEYS]]
            found["dataplane.key_sample"] = sample
        if self.nbytes:
            found["dataplane.bytes"] = self.nbytes
        for name in ("task", "attempt", "status"):
            value = about.get(name)
            if value is not None:
                found[f"dataplane.{name}"] = one_line(value) if type(value) is str else value
        stage = about.get("stage")
        if stage:
            found["dataplane.stage"] = stage
        return found


def outcome(error: BaseException | None) -> str:
    """How it ended, in a word."""
    return "ok" if error is None else type(error).__name__


def _keys_of(about: Mapping[str, Any]) -> list[str]:
    claim = about.get("claim")
    keys: Any = about.get("keys") if claim is None else claim.keys
    if keys is None:
        key = about.get("key")
        return [key] if type(key) is str else []
    return [key for key in keys if type(key) is str]


def _tags_of(about: Mapping[str, Any]) -> Sequence[Mapping[str, object]]:
    tags: Any = about.get("tags")
    if tags is None:
        return []
    return [tags] if "key" in about else list(tags)


def _must_exist(about: Mapping[str, Any]) -> bool:
    from dataplane.wire.messages import MUST_EXIST

    return bool(about.get("must_exist")) or bool(int(about.get("flags") or 0) & MUST_EXIST)
