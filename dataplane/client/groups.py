"""Verbs about groups: begun with room for all of them, ended with a status."""

from __future__ import annotations

from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.retry import ask_again, ask_once, seconds_left
from dataplane.errors import InvalidRequest
from dataplane.tags.groups import check_begin
from dataplane.telemetry.verbs import spanned
from dataplane.types import Revision
from dataplane.wire.messages import is_attempt

GRACE_S = 0.5
"""How much longer a client waits than the server, whose error says why."""


@spanned("begin_group")
def begin_group(
    core: Core,
    uid: str,
    partition_id: str,
    n: int,
    declared_bytes: int | None,
    deadline: float,
) -> Verb[int]:
    """Begin a group; its attempt."""
    if type(uid) is not str:
        raise InvalidRequest(f"a uid is a string, not {type(uid).__name__}")
    if type(partition_id) is not str:
        raise InvalidRequest(f"a partition_id is a string, not {type(partition_id).__name__}")
    check_begin(n, declared_bytes)
    home = core.joined.home

    def body() -> list[Any]:
        return [uid, partition_id, n, declared_bytes, home, seconds_left(deadline)]

    answer = yield from ask_once(core, "begin_group", body, deadline + GRACE_S)
    attempt: int = answer.body
    core.see((core.seen.epoch, attempt))
    return attempt


@spanned("end_group")
def end_group(
    core: Core, attempt: int, status: str, deadline: float, partition_id: str | None = None
) -> Verb[Revision]:
    """End a group; the revision at which it ended. With a partition, only a group that is there:
    for another one it is as if the attempt were not open."""
    if not is_attempt(attempt):
        raise InvalidRequest(f"an attempt is what begin_group answered, not {attempt!r:.80}")
    body: list[Any] = [attempt, status] if partition_id is None else [attempt, status, partition_id]
    answer = yield from ask_once(core, "end_group", body, deadline)
    return core.see(answer.body)


def outcome(core: Core, request_id: str, deadline: float) -> Verb[dict[str, Any]]:
    """What became of a request."""
    client_id, _, number = request_id.rpartition("/") if type(request_id) is str else ("", "", "")
    if not client_id or not number.isdecimal() or len(number) > 19:
        raise InvalidRequest(
            f"a request id is what OutcomeUnknown names, client/number, not {request_id!r:.80}"
        )
    answer = yield from ask_again(core, "outcome", [client_id, int(number)], deadline)
    if client_id == core.client_id:
        core.numbers.told(int(number))
    verb, result = answer.body
    return {"applied": verb is not None, "verb": verb, "answer": result}
