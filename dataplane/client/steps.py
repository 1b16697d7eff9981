"""Steps of verbs that work on files: how long they may take, and what may fail quietly."""

from __future__ import annotations

import time
from typing import Final, TypeVar

from dataplane.client.effects import Verb
from dataplane.errors import DataplaneError, DeadlineExceeded
from dataplane.wire.channel import Broken
from dataplane.wire.messages import LONGEST_WAIT_S

Result = TypeVar("Result")

FILE_WORK: Final = 1 << 30
"""What an event loop is told of work on files, however little it is: a disk may be slow."""


def quietly(verb: Verb[Result]) -> Verb[Result | None]:
    """The result of a last word that may fail; what it is about ends by itself too."""
    try:
        return (yield from verb)
    except (DataplaneError, Broken):
        return None


def time_left(deadline: float, what: str) -> float:
    """Seconds that are left. DeadlineExceeded if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(
            f"there was not enough time to {what}: pass a longer timeout",
            waited_s=-left,
            explanation=f"the time of the call was over before it came to {what}; no server waits",
        )
    return min(left, LONGEST_WAIT_S)
