"""Every error a caller can see, as one tree, and how an error crosses a wire.

    DataplaneError (RuntimeError)
      RequestError                       the caller can fix it; nothing was changed
        InvalidRequest (ValueError)
          OutOfRange                     .offset; a chunk does not follow what came before
        PartitionNotFound (KeyError)     .partition_id
        KeyNotFound (KeyError)           .partition_id .keys
        FieldNotFound (KeyError)         .partition_id .keys .fields
        WeightsNotFound (KeyError)       .partition_id
        AlreadyWritten                   .partition_id .keys
        SchemaMismatch                   .partition_id .keys .fields
        StaleWrite                       .partition_id .keys .cleared_at .attempt
        ClaimLost                        .partition_id .keys .task
        TooOld
        Unauthenticated
        PermissionDenied
      QuotaExceeded                      .used_bytes .limit_bytes .oldest_keys .lagging_task;
                                         nothing was written
      RateLimited                        .retry_after_s .limit; nothing was changed
      DeadlineExceeded (TimeoutError)    .waited_s .explanation; safe to repeat
      Unreachable (ConnectionError)      not reached yet; safe to repeat
      PlaneLost                          this plane is gone, or is not the one that was joined
      OutcomeUnknown                     .request_id; it may have happened
      ValueLost                          .partition_id .keys .fields .stores; the values are gone
                                         with what held them, the tags are there
      CheckpointDamaged                  .path .file; nothing of it was loaded
      JournalDamaged                     .path .offset; nothing of it is used
      InternalError                      our bug

The same class with the same attributes is raised on both sides of a connection:
`to_wire` and `from_wire` are the only two places that know how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar, cast

Wire = dict[str, Any]
"""An error as msgpack carries it: `type`, `message`, and the attributes of its class."""


class DataplaneError(RuntimeError):
    """Base of everything that this package raises on purpose."""

    attributes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "", **attributes: Any) -> None:
        unknown = set(attributes) - set(self.attributes)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {sorted(unknown)}")
        super().__init__(message)
        self.message = message
        for name in self.attributes:
            setattr(self, name, attributes.get(name))

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; callers want the sentence.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (to_wire(self),)


class RequestError(DataplaneError):
    """The request is wrong and the caller can mend it. Nothing was changed."""


class InvalidRequest(RequestError, ValueError):
    """An argument has the wrong type, shape, size or value."""


class OutOfRange(InvalidRequest):
    """A part of a put in chunks does not follow what was received before."""

    attributes = ("offset",)
    offset: int
    """Where the put goes on; 0 where nothing of it is held."""


class PartitionNotFound(RequestError, KeyError):
    """No put has created this partition yet, or it was dropped."""

    attributes = ("partition_id",)
    partition_id: str


class KeyNotFound(RequestError, KeyError):
    """Some keys do not exist; `keys` names all of them."""

    attributes = ("partition_id", "keys")
    partition_id: str
    keys: list[str]


class FieldNotFound(RequestError, KeyError):
    """Some keys lack some fields; `keys` and `fields` name all of them."""

    attributes = ("partition_id", "keys", "fields")
    partition_id: str
    keys: list[str]
    fields: list[str]


class WeightsNotFound(RequestError, KeyError):
    """There is no such version of the weights, or it is not whole."""

    attributes = ("partition_id",)
    partition_id: str | None
    """None where no version has been published."""


class AlreadyWritten(RequestError):
    """A put with `if_absent=True` met keys that exist."""

    attributes = ("partition_id", "keys")
    partition_id: str
    keys: list[str]


class SchemaMismatch(RequestError):
    """A field came with another dtype or rank than the partition fixed at its first write."""

    attributes = ("partition_id", "keys", "fields")
    partition_id: str | None
    keys: list[str]
    fields: list[str]


class StaleWrite(RequestError):
    """A put that comes too late: one of its keys was cleared after it began, or its attempt closed.

    It must not bring the rows back: drop it, or put again if they are wanted.
    """

    attributes = ("partition_id", "keys", "cleared_at", "attempt")
    partition_id: str
    keys: list[str]
    cleared_at: int | None
    attempt: int | None
    """The attempt that is closed, where that is the reason."""


class ClaimLost(RequestError):
    """A claim does not hold these keys any more: its lease ended, or they were cleared."""

    attributes = ("partition_id", "keys", "task")
    partition_id: str
    keys: list[str]
    task: str


class TooOld(RequestError):
    """What the call goes on from is not kept any more: begin again, as the message says."""


class Unauthenticated(RequestError):
    """The connection did not prove that it knows the plane's secret."""


class PermissionDenied(RequestError):
    """The caller is known but may not do this."""


class QuotaExceeded(DataplaneError):
    """There is no room and none came free before the deadline. Nothing was written."""

    attributes = ("used_bytes", "limit_bytes", "oldest_keys", "lagging_task")
    used_bytes: int
    limit_bytes: int
    oldest_keys: list[str] | None
    """Keys that have been in the store longest and that some task has not committed."""
    lagging_task: str | None
    """The task with the most rows that it has not committed, if any task claims."""


class RateLimited(DataplaneError):
    """The caller asks for more than it may at a time. Nothing was changed; ask again later."""

    attributes = ("retry_after_s", "limit")
    retry_after_s: float
    """When it makes sense to ask again; 0 where that depends on the caller's own calls."""
    limit: str
    """Which of the caller's limits it is."""


class DeadlineExceeded(DataplaneError, TimeoutError):
    """The deadline passed first. Safe to repeat."""

    attributes = ("waited_s", "explanation")
    waited_s: float
    explanation: str | None


class Unreachable(DataplaneError, ConnectionError):
    """A process of the plane could not be reached in time. Safe to repeat."""


class PlaneLost(DataplaneError):
    """This plane is gone, or the process at its address belongs to another plane."""


class OutcomeUnknown(DataplaneError):
    """The request may or may not have taken effect."""

    attributes = ("request_id",)
    request_id: str


class ValueLost(DataplaneError):
    """The tags are there; the values died with the value store that held them.

    The rows say so themselves, in the tag `dataplane.lost`. Clear them, and put them anew if they
    are wanted.
    """

    attributes = ("partition_id", "keys", "fields", "stores")
    partition_id: str
    keys: list[str]
    fields: list[str]
    """All that were asked for and that some of the keys have lost."""
    stores: list[str]
    """The value stores that held them."""


class CheckpointDamaged(DataplaneError):
    """A file of a checkpoint is not what was saved, or was never whole. Nothing of it is used."""

    attributes = ("path", "file")
    path: str
    file: str
    """The name of the file within the checkpoint."""


class JournalDamaged(DataplaneError):
    """A journal is not what was written, and not only at its end. Nothing of it is used."""

    attributes = ("path", "offset")
    path: str
    offset: int
    """Where in the file what is wrong begins."""


class InternalError(DataplaneError):
    """A fault of this package. The server stays up; please report it."""


def _tree(root: type[DataplaneError]) -> Iterable[type[DataplaneError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


ERRORS: Mapping[str, type[DataplaneError]] = {cls.__name__: cls for cls in _tree(DataplaneError)}
"""Every class by the name that travels."""


def to_wire(error: DataplaneError) -> Wire:
    """The error as a mapping that msgpack and JSON can carry."""
    wire: Wire = {"type": type(error).__name__, "message": error.message}
    for name in error.attributes:
        wire[name] = getattr(error, name)
    return wire


def from_wire(said: object) -> DataplaneError:
    """The error that `to_wire` described; an InternalError if its class is not known here, or if it
    is no such description."""
    if type(said) is not dict:
        return InternalError(f"the other side failed and says no more than {said!r:.80}")
    wire = cast("Wire", said)
    cls = ERRORS.get(str(wire.get("type")))
    message = str(wire.get("message", ""))
    if cls is None:
        return InternalError(f"{wire.get('type')}: {message}")
    return cls(message, **{name: wire.get(name) for name in cls.attributes})


_Name = TypeVar("_Name")


def quote(names: Iterable[_Name], limit: int = 5) -> str:
    """The names as a message shows them: escaped, the first few, and how many more.

    Keys come from outside and may hold control characters or be 10 kB long; `repr` and a
    cut keep an error one readable line.
    """
    shown: list[str] = []
    rest = 0
    for name in names:
        if len(shown) < limit:
            text = repr(name)
            shown.append(text if len(text) <= 80 else text[:77] + "...")
        else:
            rest += 1
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
