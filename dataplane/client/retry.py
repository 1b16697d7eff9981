"""Trying again: what a verb does when its connection breaks before the answer.

Owns how long to wait between tries and when to give up. Never decides whether a repetition is
harmless: that is for who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Pause, Verb
from dataplane.errors import DeadlineExceeded, OutcomeUnknown, Unreachable
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


def ask_once(
    core: Core, verb: str, body: list[Any] | Callable[[], list[Any]], deadline: float
) -> Verb[Answer]:
    """Ask the tag store for an effect that it has once, however often the request travels: the
    request carries a number, and up to which number all requests are settled.

    The body may be made anew for each try. OutcomeUnknown if the connection broke and no try after
    it was answered.
    """
    number, settled = core.numbers.begin()
    pause_s = FIRST_PAUSE_S
    broke = False
    try:
        while True:
            parts = body() if callable(body) else body
            try:
                return (yield Ask(None, verb, [*parts, number, settled]))
            except Broken as error:
                broke = True
                pause_s = yield from before_next_try(error, pause_s, deadline)
    except (Unreachable, DeadlineExceeded) as error:
        if not broke:
            raise
        raise outcome_unknown(core, verb, number) from error
    finally:
        core.numbers.end(number)


def outcome_unknown(core: Core, verb: str, number: int) -> OutcomeUnknown:
    """The error of a request that may have had its effect; what it was can be asked for."""
    core.numbers.keep(number)
    request_id = f"{core.client_id}/{number}"
    return OutcomeUnknown(
        f"the connection broke before the {verb} was answered, and time was up before it could be "
        f"asked again: whether it took effect, request_outcome({request_id!r}) tells",
        request_id=request_id,
    )
