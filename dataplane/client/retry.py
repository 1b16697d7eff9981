"""Trying again: what a verb does when its connection breaks before the answer.

Owns how long to wait between tries and when to give up. Never decides whether a repetition is
harmless: that is for who asks.
"""

from __future__ import annotations

import time
from typing import Any, Final

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Pause, Verb
from dataplane.errors import Unreachable
from dataplane.wire.channel import Answer, Broken

FIRST_PAUSE_S: Final = 0.01
LAST_PAUSE_S: Final = 1.0


def before_next_try(error: Broken, pause_s: float, deadline: float) -> Verb[float]:
    """Wait; how long to wait the next time. Unreachable if that would be past the deadline."""
    if time.monotonic() + pause_s >= deadline:
        raise Unreachable(f"the connection broke and time is up: {error}") from error
    yield Pause(pause_s)
    return min(2 * pause_s, LAST_PAUSE_S)


def ask_again(
    core: Core, verb: str, body: Any, deadline: float, at: StoreView | None = None
) -> Verb[Answer]:
    """Ask the tag store, or a value store, what may be asked again without harm, until it is
    answered."""
    pause_s = FIRST_PAUSE_S

    def into(_: Any, nbytes: int) -> memoryview:
        return core.recycler.take(nbytes).data

    while True:
        try:
            return (yield Ask(at, verb, body, into=into))
        except Broken as error:
            pause_s = yield from before_next_try(error, pause_s, deadline)
