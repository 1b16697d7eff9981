"""Answers that were given, so that a repeated request has one effect and one answer. Pure.

A client numbers its requests and tells with each which numbers are settled (answered and seen).
An answer is kept until its number is settled.
"""

from __future__ import annotations

from typing import Any

from dataplane.errors import InvalidRequest, OutcomeUnknown

MAX_OPEN = 65_536
"""Answers kept for one client at most; a client settles its numbers long before."""


class ClientRequests:
    """The unsettled answers of one client."""

    __slots__ = ("answers", "floor")

    def __init__(self) -> None:
        self.floor = 0
        """Every number up to this one is settled."""
        self.answers: dict[int, Any] = {}

    def settle(self, up_to: int) -> None:
        """Forget the answers of all numbers up to this one."""
        if up_to <= self.floor:
            return
        answers = self.answers
        if len(answers) > 8 and up_to - self.floor > len(answers):
            self.answers = {n: a for n, a in answers.items() if n > up_to}
        else:
            for n in range(self.floor + 1, up_to + 1):
                answers.pop(n, None)
        self.floor = up_to

    def recall(self, number: int, request_id: str) -> Any | None:
        """The answer given to this number before, if it was.

        OutcomeUnknown if the number was settled already: it may have had an effect.
        """
        if number <= self.floor:
            raise OutcomeUnknown(
                f"request {request_id} was settled before; whether this repetition had an "
                "effect is not known any more",
                request_id=request_id,
            )
        return self.answers.get(number)

    def remember(self, number: int, answer: Any) -> None:
        if len(self.answers) >= MAX_OPEN:
            raise InvalidRequest(f"the client has {MAX_OPEN} requests whose answers it never saw")
        self.answers[number] = answer
