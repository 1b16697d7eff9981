"""Answers that were given, so that a repeated request has one effect and one answer. Pure.

A client numbers its requests and tells with each which numbers are settled (answered and seen).
An answer is kept until its number is settled.
"""

from __future__ import annotations

from typing import Any

from dataplane.errors import InvalidRequest, OutcomeUnknown

MAX_OPEN = 65_536
"""Answers kept for one client at most; a client settles its numbers long before."""

PUT, CLEAR = "put", "clear"
BEGIN_GROUP, END_GROUP = "begin_group", "end_group"
CREATE, SEAL, DROP = "create_partition", "seal_partition", "drop_partition"
COMMIT, RELEASE = "claim_commit", "claim_release"
RESTORED = "restored block"
"""Stands for the verb of a put of a load."""
REFUSED = "question about its outcome"
"""Stands for the verb of a number that was asked about before any request with it came."""


class Answered:
    """What is kept of a request for its repetitions."""

    __slots__ = ("answer", "block", "verb")

    def __init__(self, verb: str, answer: Any, block: tuple[str, int] | None = None) -> None:
        self.verb = verb
        self.answer = answer
        """The body that was answered, or a future of it while the request is under way."""
        self.block = block
        """The block that a put brought, by store."""


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
        if up_to == self.floor + 1:
            answers.pop(up_to, None)
            self.floor = up_to
            return
        if up_to - self.floor > len(answers):  # numbers may be far apart
            self.answers = {n: a for n, a in answers.items() if n > up_to}
        else:
            for n in range(self.floor + 1, up_to + 1):
                answers.pop(n, None)
        self.floor = up_to

    def recall(self, number: int, request_id: str) -> Any | None:
        """The answer given to this number before, if it was.

        OutcomeUnknown if the number was settled already: it may have had an effect.
        InvalidRequest if the number is new and no further answer can be kept.
        """
        if number <= self.floor:
            raise OutcomeUnknown(
                f"request {request_id} was settled before; whether this repetition had an "
                "effect is not known any more",
                request_id=request_id,
            )
        answer = self.answers.get(number)
        if answer is None and len(self.answers) >= MAX_OPEN:
            # Said before the request has its effect: afterwards it could not be answered twice.
            raise InvalidRequest(
                f"{MAX_OPEN} later requests of this client were answered while its request "
                f"{self.floor + 1} is not settled: wait until that one ends"
            )
        return answer

    def forget(self) -> None:
        """Let go of the answers of a client that is gone; its numbers so far count as settled."""
        self.floor = max(self.answers, default=self.floor)
        self.answers = {}

    def remember(self, number: int, answer: Any) -> None:
        """Keep the answer of a request whose number was new to `recall`."""
        self.answers[number] = answer
