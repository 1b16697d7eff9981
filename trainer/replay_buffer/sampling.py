"""One sample on its way: groups that ended are claimed, judged, and cleared, replaced or trained.

Prompts are claimed first: a prompt's row stands for its group, whatever its status, and the plane
hands out the oldest ones, each to one consumer. Only groups that are held are judged, so two
consumers never clear or replace the same one. Of the groups that are trained all other rows are
claimed as well. What is claimed and not trained goes back, also when the sample is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from dataplane import Claim, DataplaneError, DeadlineExceeded, Revision
from dataplane.fields import LOST
from trainer.errors import Starved
from trainer.replay_buffer.holdings import Holdings, release
from trainer.replay_buffer.source import Source, clear_groups
from trainer.select import Decision, Group, ReplayState, decide, sampleable_count
from trainer.select.groups import FAILURE, FINISHED, IN_FLIGHT

_log = logging.getLogger(__name__)

PROMPTS: Final[dict[str, Any]] = {"is_prompt": True}
ENDED: Final[dict[str, Any]] = {**PROMPTS, "status": {"in": [FINISHED, FAILURE]}}
EVEN_LOST: Final[dict[str, Any]] = {"or": [{LOST: {"exists": True}}, {LOST: {"exists": False}}]}
"""Holds for every row, and names the tag of those that are lost: or they would not be offered."""
OF_NO_GROUP: Final[dict[str, Any]] = {"or": [{"is_prompt": True}, {"is_padding": True}]}

AT_ONCE_S: Final = 0.25
"""How long a claim of rows that are listed may take before they are taken to be somebody else's.
Too short a time costs a wait for them, which ends as soon as they can be had."""
EXPLAIN_S: Final = 5.0


class Search:
    """The way to one batch."""

    def __init__(self, source: Source, step: int, batch_size: int) -> None:
        self.decisions: list[Decision] = []
        self._source = source
        self._client = source.client
        self._step = step
        self._batch_size = batch_size
        self._began = time.monotonic()
        self._state = ReplayState()
        self._prompts = Holdings()
        self._rows: list[Claim] = []
        self._foreign: set[str] = set()
        """Prompts that ended, are listed, and could not be claimed: somebody else has them."""
        self._submitted = 0
        self._seen: Revision | None = None
        """Up to where changes are known."""

    async def run(self) -> tuple[tuple[Group, ...], tuple[Claim, ...]]:
        """The groups of the batch, and the claims that hold all of their rows."""
        while True:
            groups = await self._claim_ended(await self._look())
            decision = self._decide(groups)
            await self._clear(decision)
            if decision.selected:
                if await self._claim_rows(decision):
                    return decision.selected, await self._kept(decision.selected)
                continue  # there are more rows than were listed
            if decision.refill:
                await self._refill(decision)
            if decision.poll_again:
                if self._is_late():
                    raise await self._late(decision)
                continue
            if decision.starved and not self._foreign:
                raise Starved(f"{self._what()}: {self._so_far(decision)}; nothing was submitted")
            await self._wait(decision)

    async def let_go(self) -> None:
        """Give back what is claimed. Whatever goes wrong, the leases end with this client."""
        try:
            await release(self._client, [*self._prompts.claims, *self._rows])
        except DataplaneError as error:
            _log.warning("claims of %s were not given back: %s", self._what(), error)

    # -- steps -------------------------------------------------------------------------------

    async def _look(self) -> list[Group]:
        groups = await self._source.groups()
        # Of just these groups: other samples of the buffer may go on with the snapshot.
        self._seen = self._source.snapshot.revision
        return groups

    async def _claim_ended(self, groups: list[Group]) -> list[Group]:
        """Hold groups that ended, oldest first, until a batch could be made of them or there are
        no more; the groups there are."""
        while True:
            ended = {
                group.prompt_key
                for group in groups
                if group.prompt_key is not None and group.status in (FINISHED, FAILURE)
            }
            self._foreign &= ended
            free = {key for key in ended if key not in self._prompts} - self._foreign
            most = len(free)
            if not self._source.sees_all:
                mine = [group for group in groups if group.prompt_key in self._prompts]
                here = sampleable_count(
                    mine, self._source.policy, step=self._step,
                    replaces_lost=self._source.refill is not None,
                )  # fmt: skip
                most = min(most, self._batch_size - self._state.dropped - here)
            if most < 1:
                return groups
            claim = await self._claim_at_once(most)
            if claim is None and most > 1:
                claim = await self._claim_at_once(1)
            if claim is None:
                self._foreign |= free
            else:
                self._prompts.add(claim)
                if not ended.issuperset(claim.keys):  # they ended a moment ago
                    groups = await self._look()

    async def _claim_at_once(self, count: int) -> Claim | None:
        try:
            with self._source.clock.call():
                return await self._claim(count, AT_ONCE_S)
        except DeadlineExceeded:
            return None

    def _decide(self, groups: Sequence[Group]) -> Decision:
        mine = [g for g in groups if g.status in IN_FLIGHT or g.prompt_key in self._prompts]
        decision = decide(
            mine, self._source.policy, step=self._step, batch_size=self._batch_size,
            state=self._state, replaces_lost=self._source.refill is not None,
        )  # fmt: skip
        self.decisions.append(decision)
        self._state = decision.state
        return decision

    async def _clear(self, decision: Decision) -> None:
        """The groups that go, whole and in one clear."""
        gone = [*(eviction.group for eviction in decision.evicted), *decision.surplus]
        if gone:
            keys = decision.clear_keys
            lost = await clear_groups(self._source, gone, self._prompts.part(keys))
            self._prompts.drop(keys)
            if lost is not None:
                _log.info("groups to be evicted were somebody else's by then: %s", lost)

    async def _refill(self, decision: Decision) -> None:
        refill = self._source.refill
        assert refill is not None  # the buffer checked its policy
        scope = asyncio.timeout(self._left_s())
        try:
            async with scope:
                await refill(decision.refill)
        except TimeoutError:
            if not scope.expired():
                raise
            what = f"`refill` of {decision.refill} prompts did not return"
            raise await self._late(decision, what) from None
        self._submitted += decision.refill

    async def _claim_rows(self, decision: Decision) -> bool:
        """Hold the other rows of the batch too; False if they are not those that were listed."""
        keys = {key for group in decision.selected for key in group.keys}
        if not keys:
            return True
        source = self._source
        uids = [group.uid for group in decision.selected]
        where = {"uid": {"in": uids}, "not": OF_NO_GROUP, **EVEN_LOST}
        try:
            with source.clock.call():
                claim = await self._client.kv_claim(
                    source.partition_id, source.task, count=len(keys), where=where,
                    lease_s=source.lease_s, timeout=self._left_s(),
                )  # fmt: skip
        except DeadlineExceeded as error:
            what = f"others of task {source.task!r} hold some of the {len(keys)} rows of the batch"
            raise await self._late(decision, what, error.explanation) from error
        self._rows = [claim]
        if keys == set(claim.keys):
            return True
        await release(self._client, self._rows)
        self._rows = []
        return False

    async def _kept(self, selected: Sequence[Group]) -> tuple[Claim, ...]:
        """The claims of the batch; prompts beyond it go back."""
        chosen = {group.prompt_key for group in selected}
        beyond = {key for claim in self._prompts.claims for key in claim.keys} - chosen
        with self._source.clock.call():
            await release(self._client, self._prompts.part(beyond))
        self._prompts.drop(beyond)
        return (*self._prompts.claims, *self._rows)

    # -- waiting -----------------------------------------------------------------------------

    async def _wait(self, decision: Decision) -> None:
        """Return when a prompt has changed, or what somebody else had could be claimed."""
        waits = [self._change(), self._freed()] if self._foreign else [self._change()]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        try:
            for task in ended:
                task.result()
        except DeadlineExceeded:
            ended = []
        if not ended:
            raise await self._late(decision)

    async def _change(self) -> None:
        source = self._source
        assert self._seen is not None  # of no partition nothing is in flight, so nobody waits
        await anext(
            self._client.kv_watch(
                source.partition_id, since=self._seen, where=PROMPTS, timeout=self._left_s()
            )
        )

    async def _freed(self) -> None:
        # What is added here is given back by `let_go`, whoever is cancelled when.
        self._prompts.add(await self._claim(1, self._left_s()))
        self._foreign.clear()

    async def _claim(self, count: int, timeout_s: float) -> Claim:
        """Hold the oldest groups that ended."""
        source = self._source
        return await self._client.kv_claim(
            source.partition_id, source.task, count=count, where={**ENDED, **EVEN_LOST},
            order_by="global_steps", lease_s=source.lease_s, timeout=timeout_s,
        )  # fmt: skip

    def _left_s(self) -> float:
        """Until the deadline; never nothing, so that what can be had at once still is."""
        return max(self._began + self._source.timeout_s - time.monotonic(), 0.01)

    def _is_late(self) -> bool:
        return time.monotonic() > self._began + self._source.timeout_s

    # -- telling -----------------------------------------------------------------------------

    def _what(self) -> str:
        many = f"{self._batch_size} groups" if self._batch_size > 1 else "1 group"
        return f"no batch of {many} of {self._source.partition_id!r} for step {self._step}"

    def _so_far(self, decision: Decision) -> str:
        parts = [decision.reason]
        if self._foreign:
            parts.append(f"{len(self._foreign)} are held by others of task {self._source.task!r}")
        if decision.state.evicted:
            parts.append(f"{decision.state.evicted} were evicted")
        if self._submitted:
            parts.append(f"{self._submitted} prompts were submitted in their place")
        return ", ".join(parts)

    async def _late(
        self, decision: Decision, what: str | None = None, why: str | None = None
    ) -> DeadlineExceeded:
        source = self._source
        if why is None:
            try:
                told = await self._client.explain(
                    source.partition_id, ENDED, task=source.task, count=self._batch_size,
                    timeout=EXPLAIN_S,
                )  # fmt: skip
                why = told.text
            except DataplaneError as error:
                why = f"the plane did not explain it: {error}"
        return DeadlineExceeded(
            f"{self._what()} within {source.timeout_s:.3g} s: {what or self._so_far(decision)}; "
            f"{why}",
            waited_s=time.monotonic() - self._began,
            explanation=why,
        )
