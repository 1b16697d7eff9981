"""The control verbs of the asyncio client; arguments, results and errors are as in control.py."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

from dataplane.client.checkpoints import load_checkpoint, save_checkpoint
from dataplane.client.claims import claim_rows, commit_claim, release_claim
from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.groups import GRACE_S, begin_group, end_group, outcome
from dataplane.client.partitions import (
    Schema,
    create_partition,
    drop_partition,
    explain,
    list_partitions,
    seal_partition,
)
from dataplane.client.tags import Where, present
from dataplane.client.tracing import STAGE_S, enter_stage, trace
from dataplane.client.wait import wait_rows, watch_once
from dataplane.errors import DataplaneError
from dataplane.lineage.rows import Trace
from dataplane.tags.lineage.lineage import check_stage
from dataplane.telemetry.verbs import span_of
from dataplane.types import (
    Change,
    Claim,
    Explanation,
    KVBatchMeta,
    Quota,
    Retention,
    Revision,
)

Result = TypeVar("Result")


class AsyncControl(ABC):
    """Verbs that wait, and that are about more than rows. Part of `AsyncClient`."""

    _core: Core

    @abstractmethod
    async def _drive(self, verb: Verb[Result], deadline: float) -> Result: ...

    @abstractmethod
    def _deadline(self, timeout: float | None) -> float: ...

    @abstractmethod
    def _stay_attached(self) -> None:
        """From now on the client holds something for which it must not seem to be gone."""

    def _wait_deadline(self, timeout: float | None) -> float:
        """The deadline of a call that waits for something to happen."""
        return self._deadline(self._core.config.wait_timeout_s if timeout is None else timeout)

    async def begin_group(
        self,
        uid: str,
        partition_id: str,
        *,
        n: int,
        declared_bytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """See `Client.begin_group`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            begin_group(self._core, uid, partition_id, n, declared_bytes, deadline),
            deadline + GRACE_S,
        )

    async def end_group(
        self,
        attempt: int,
        status: str,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """See `Client.end_group`."""
        deadline = self._deadline(timeout)
        return await self._drive(end_group(self._core, attempt, status, deadline), deadline)

    async def kv_wait(
        self,
        partition_id: str,
        where: Where | None = None,
        *,
        count: int = 1,
        group_by: str | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """See `Client.kv_wait`."""
        deadline = self._wait_deadline(timeout)
        return await self._drive(
            wait_rows(self._core, partition_id, where, count, group_by, deadline),
            deadline + GRACE_S,
        )

    async def kv_watch(
        self,
        partition_id: str,
        *,
        since: Revision | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Change]:
        """See `Client.kv_watch`."""
        while True:
            if since is None:
                deadline = self._deadline(None)
                since = await self._drive(present(self._core, deadline), deadline)
            deadline = self._wait_deadline(timeout)
            changes = await self._drive(
                watch_once(self._core, partition_id, since, where, deadline), deadline + GRACE_S
            )
            for change in changes:
                since = change.revision
                yield change

    async def kv_claim(
        self,
        partition_id: str,
        task: str,
        *,
        count: int,
        fields: Sequence[str] = (),
        where: Where | None = None,
        order_by: str | None = None,
        groups: bool = False,
        lease_s: float = 30.0,
        replica: tuple[int, int, int] | None = None,
        timeout: float | None = None,
    ) -> Claim:
        """See `Client.kv_claim`."""
        deadline = self._wait_deadline(timeout)
        claim = await self._drive(
            claim_rows(
                self._core,
                partition_id,
                task,
                count,
                fields,
                where,
                order_by,
                groups,
                lease_s,
                replica,
                deadline,
            ),
            deadline + GRACE_S,
        )
        if claim.keys:
            self._stay_attached()
        return claim

    async def kv_commit(
        self,
        claim: Claim,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """See `Client.kv_commit`."""
        deadline = self._deadline(timeout)
        return await self._drive(commit_claim(self._core, claim, deadline), deadline)

    async def kv_release(
        self,
        claim: Claim,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """See `Client.kv_release`."""
        deadline = self._deadline(timeout)
        return await self._drive(release_claim(self._core, claim, deadline), deadline)

    async def kv_create_partition(
        self,
        partition_id: str,
        *,
        schema: Schema = None,
        quota: Quota | Mapping[str, int | None] | None = None,
        retention: Retention | Mapping[str, int] | None = None,
        timeout: float | None = None,
    ) -> Revision:
        """See `Client.kv_create_partition`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            create_partition(self._core, partition_id, schema, quota, retention, deadline), deadline
        )

    async def kv_list_partitions(
        self,
        *,
        timeout: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """See `Client.kv_list_partitions`."""
        deadline = self._deadline(timeout)
        return await self._drive(list_partitions(self._core, deadline), deadline)

    async def kv_seal_partition(
        self,
        partition_id: str,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """See `Client.kv_seal_partition`."""
        deadline = self._deadline(timeout)
        return await self._drive(seal_partition(self._core, partition_id, deadline), deadline)

    async def kv_drop_partition(
        self,
        partition_id: str,
        *,
        older_than: int | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """See `Client.kv_drop_partition`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            drop_partition(self._core, partition_id, older_than, deadline), deadline
        )

    async def explain(
        self,
        partition_id: str | None = None,
        where: Where | None = None,
        *,
        fields: Sequence[str] = (),
        task: str | None = None,
        group_by: str | None = None,
        count: int | None = None,
        timeout: float | None = None,
    ) -> Explanation:
        """See `Client.explain`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            explain(self._core, partition_id, where, fields, task, group_by, count, deadline),
            deadline,
        )

    async def request_outcome(
        self,
        request_id: str,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """See `Client.request_outcome`."""
        deadline = self._deadline(timeout)
        return await self._drive(outcome(self._core, request_id, deadline), deadline)

    async def trace(
        self,
        partition_id: str | None = None,
        *,
        uid: str | None = None,
        key: str | None = None,
        since: int = 0,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Trace:
        """See `Client.trace`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            trace(self._core, partition_id, uid, key, since, limit, deadline), deadline
        )

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncGenerator[None]:
        """See `Client.stage`; it is the client's, whichever tasks use it."""
        before = self._core.stage
        await self._enter(check_stage(name))
        try:
            with span_of(self._core, f"stage {name}"):
                yield
        finally:
            await self._enter(before)

    def span(
        self, name: str, partition_id: str, *, uids: Iterable[str]
    ) -> AbstractContextManager[None]:
        """See `Client.span`."""
        return span_of(self._core, name, partition_id, uids)

    async def _enter(self, stage: str) -> None:
        with suppress(DataplaneError):
            deadline = self._deadline(min(STAGE_S, self._core.config.timeout_s))
            await self._drive(enter_stage(self._core, stage, deadline), deadline)

    async def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """See `Client.save_checkpoint`."""
        deadline = self._wait_deadline(timeout)
        return await self._drive(save_checkpoint(self._core, path, overwrite, deadline), deadline)

    async def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """See `Client.load_checkpoint`."""
        deadline = self._wait_deadline(timeout)
        return await self._drive(load_checkpoint(self._core, path, deadline), deadline)
