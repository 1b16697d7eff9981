"""Trying again: what a verb does when its connection breaks before the answer.

Owns how long to wait between tries and when to give up. Never decides whether a repetition is
harmless: that is for who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Done, Open, Pause, Tell, Verb
from dataplane.errors import DeadlineExceeded, OutcomeUnknown, RequestError, Unreachable
from dataplane.wire.channel import Answer, Broken, Refused
from dataplane.wire.messages import LONGEST_WAIT_S

FIRST_PAUSE_S: Final = 0.01
LAST_PAUSE_S: Final = 1.0

_TAG_STORE: Final = None
"""Where a lane leads to that is for no value store."""


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


def seconds_left(deadline: float) -> float:
    """What a request may wait at the server. DeadlineExceeded if nothing is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(
            "the deadline passed before the request was sent",
            waited_s=0.0,
            explanation="the time of the call was over before anything was sent; no server waits",
        )
    return min(left, LONGEST_WAIT_S)


def ask_patiently(
    core: Core,
    verb: str,
    body: list[Any],
    name: Callable[[], int],
    abandon: Callable[[int], tuple[str, list[Any]]],
    deadline: float,
) -> Verb[Answer]:
    """Ask the tag store for what may come much later, however often the connection breaks.

    The request carries how long it may wait, and a number, of `name` for each try. Whoever waits
    for it no longer tells the store what `abandon` says of the number.
    """

    def into(_: Any, nbytes: int) -> memoryview:
        return core.recycler.take(nbytes).data

    started = time.monotonic()
    pause_s = FIRST_PAUSE_S
    while True:
        wait_s = seconds_left(deadline)
        number = name()
        lane = yield Open(_TAG_STORE)
        try:
            return (yield Ask(lane, verb, [*body, wait_s, number], into=into))
        except Broken as error:
            broken = error
        except DeadlineExceeded as error:
            # The store waits for a day at most, and knows of the last try only.
            if wait_s == LONGEST_WAIT_S and time.monotonic() < deadline:
                continue
            error.waited_s = time.monotonic() - started
            yield from _tell_quietly(lane, *abandon(number))
            raise
        except RequestError:
            raise
        except BaseException:
            yield from _tell_quietly(lane, *abandon(number))
            raise
        finally:
            yield Done(lane)
        pause_s = yield from before_next_try(broken, pause_s, deadline)


def _tell_quietly(lane: Any, verb: str, body: list[Any]) -> Verb[None]:
    try:
        yield Tell(lane, verb, body)
    except Broken:
        pass


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
                broke = broke or not isinstance(error, Refused)
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
