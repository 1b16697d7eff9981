"""Answers to `explain`, and the explanation of every deadline that passes at the tag store.

Walks go in slices and only for so long: whoever waited must hear why before it stops listening.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from dataplane.server.connection import Connection, Verb
from dataplane.server.slices import Slices
from dataplane.tags.explain.clients import Clients
from dataplane.tags.explain.explain import Surroundings, explain
from dataplane.tags.explain.question import Allowance, Question
from dataplane.tags.query import Predicate
from dataplane.types import Explanation
from dataplane.wire.frames import Body

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

ASKED_S = 5.0
"""How long rows are looked at for who asks."""
LATE_S = 0.15
"""The same for errors that are due already, all that are due together: clients wait half a second
longer than their deadlines for them. As long again, only the first rows are looked at."""


class Explaining:
    """The verb that tells why something waits."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self.verbs: dict[str, Verb] = {"explain": self._explain}
        self._under_way: dict[object, asyncio.Task[Explanation]] = {}
        """What is being told to whom a deadline has passed, by what they waited for."""
        self._until = 0.0

    async def _explain(self, connection: Connection, number: int, body: Body) -> None:
        question = Question.checked(*body)
        told = await self._tell(question, time.monotonic() + ASKED_S)
        connection.reply(
            number,
            {
                "text": told.text, "matching": told.matching, "total": told.total,
                "failing": told.failing, "stuck": told.stuck, "holders": told.holders,
            },
        )  # fmt: skip

    async def explain_text(
        self,
        partition_id: str,
        predicate: Predicate,
        fields: Collection[str],
        grouped: bool,
        task: str | None,
        count: int | None,
    ) -> str:
        """Why so many rows or groups have not come: for the error of whoever waited for them.

        Those who waited for the same are told the same: a thousand deadlines may pass at once.
        """
        question = Question(partition_id, predicate, frozenset(fields), grouped, task, count)
        key = partition_id, predicate.canonical, question.fields, grouped, task, count
        telling = self._under_way.get(key)
        if telling is None:
            telling = asyncio.get_running_loop().create_task(self._tell(question, self._spell()))
            self._under_way[key] = telling
            telling.add_done_callback(lambda _: self._under_way.pop(key))
        return (await asyncio.shield(telling)).text

    def _spell(self) -> float:
        """Until when rows are looked at for an error that is due now."""
        now = time.monotonic()
        if now > self._until + LATE_S:
            self._until = now + LATE_S
        return self._until

    async def _tell(self, question: Question, until: float) -> Explanation:
        service = self._service
        clients = Clients(service.attached, service.labels)
        around = Surroundings(clients, service.admission.waiting, service.clock())
        allowance = Allowance()
        steps = explain(service.store, question, around, allowance)
        slices = Slices(service.worst)
        while True:
            # Not the loop's own time, which stands still for as long as others take their turns.
            if time.monotonic() > until:
                allowance.hurry()
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            await slices.breathe()
