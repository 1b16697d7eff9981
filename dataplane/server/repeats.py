"""Requests that come again: each numbered request has one effect and one answer.

Owns which request of which client was answered with what; how long that is remembered is for
tags/requests.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataplane.errors import InvalidRequest, OutcomeUnknown
from dataplane.tags.requests import REFUSED, Answered
from dataplane.tags.store import TagStore


class Repeats:
    """The answers given to numbered requests."""

    def __init__(self, store: TagStore, write: Callable[[Any], None]) -> None:
        self._store = store
        self._write = write
        """Journals an answer with which nothing else changed."""

    def answered(self, client_id: str, number: object, settled: object, verb: str) -> Any | None:
        """What this request was answered before, if it was; what is settled is forgotten first.

        OutcomeUnknown if the number was settled already. InvalidRequest if it is no number, or
        one that was used for another verb.
        """
        found = self.find(client_id, number, settled, verb)
        return None if found is None else found.answer

    def find(self, client_id: str, number: object, settled: object, verb: str) -> Answered | None:
        """The same, with all that is kept."""
        if (
            type(number) is not int
            or type(settled) is not int
            or not 0 <= settled < number < 1 << 63
        ):
            raise InvalidRequest(
                f"a {verb}'s request number and settled number are integers, ascending"
            )
        requests = self._store.client(client_id)
        requests.settle(settled)
        found: Answered | None = requests.recall(number, f"{client_id}/{number}")
        if found is not None and found.verb == REFUSED:
            raise InvalidRequest(
                f"request {client_id}/{number} comes after it was said to have had no effect: it "
                "will have none"
            )
        if found is not None and found.verb != verb:
            raise InvalidRequest(f"request number {number} was used for a {found.verb}")
        return found

    def remember(
        self,
        client_id: str,
        number: int,
        verb: str,
        answer: Any,
        block: tuple[str, int] | None = None,
    ) -> None:
        """Keep the answer of a request whose number was new."""
        self._store.client(client_id).remember(number, Answered(verb, answer, block))

    def keep(self, client_id: str, number: int, settled: int, verb: str, answer: Any) -> None:
        """Keep the answer of a request that changed nothing, and of which no journal speaks yet."""
        self._write((client_id, number, settled, verb, answer))
        self.remember(client_id, number, verb, answer)

    def forget(self, client_id: str, number: int) -> None:
        """The request had no effect after all."""
        self._store.client(client_id).answers.pop(number, None)

    def outcome(self, client_id: str, number: int) -> list[Any]:
        """What became of a request: [verb, answer], or [None, None] if it had no effect; then it
        never will have one. OutcomeUnknown if it was settled, or its client is not known."""
        requests = self._store.requests.get(client_id)
        request_id = f"{client_id}/{number}"
        if requests is None or number <= requests.floor:
            raise OutcomeUnknown(
                f"nothing is remembered of request {request_id}: it was settled, or its client "
                "has been gone for too long",
                request_id=request_id,
            )
        # Refused like a request itself where no further answer can be kept.
        found: Answered | None = requests.recall(number, request_id)
        if found is None:
            self.keep(client_id, number, 0, REFUSED, None)
            return [None, None]
        return [None, None] if found.verb == REFUSED else [found.verb, found.answer]
