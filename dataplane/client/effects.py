"""What a verb asks of the world. Verbs are generators that yield these; a driver, blocking or
asyncio, does them and sends back what came of it. So each verb is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from dataplane.client.core import StoreView
from dataplane.wire.frames import Body

Result = TypeVar("Result")


class Open(NamedTuple):
    """A lane to a store (with None the tag store), for several requests that belong together. Comes
    back: the lane."""

    store: StoreView | None


class Done(NamedTuple):
    """The lane is not needed any more."""

    lane: Any


class Ask(NamedTuple):
    """A request on a lane, or to a store, or with None to the tag store. Comes back: an Answer."""

    at: Any
    verb: str
    body: Body
    payload: Sequence[Any] = ()
    payload_bytes: int = 0
    into: Callable[[Body, int], memoryview] | None = None


class Tell(NamedTuple):
    """A request without an answer."""

    lane: Any
    verb: str
    body: Body


class Run(NamedTuple):
    """Work of this process on so many bytes. Comes back: its result."""

    work: Callable[[], Any]
    nbytes: int


class Hold(NamedTuple):
    """A pin that outlives the verb. Comes back: (release, gone); release is None if any is gone."""

    store: StoreView
    blocks: bytes


class Pause(NamedTuple):
    """Time before another try."""

    seconds: float


Effect = Open | Done | Ask | Tell | Run | Hold | Pause
Verb = Generator[Effect, Any, Result]
"""A verb under way, which ends in a Result."""
