"""The control verbs of the blocking client: waits, claims, groups, partitions, checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from dataplane.client.checkpoints import load_checkpoint, save_checkpoint
from dataplane.client.claims import claim_rows, commit_claim, release_claim
from dataplane.client.core import Core
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


class Control(ABC):
    """Verbs that wait, and that are about more than rows. Part of `Client`."""

    _core: Core

    @abstractmethod
    def _drive(self, verb: Generator[Any, Any, Result], deadline: float) -> Result: ...

    @abstractmethod
    def _deadline(self, timeout: float | None) -> float: ...

    @abstractmethod
    def _stay_attached(self) -> None:
        """From now on the client holds something for which it must not seem to be gone."""

    def _wait_deadline(self, timeout: float | None) -> float:
        """The deadline of a call that waits for something to happen."""
        return self._deadline(self._core.config.wait_timeout_s if timeout is None else timeout)

    def begin_group(
        self,
        uid: str,
        partition_id: str,
        *,
        n: int,
        declared_bytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Begin the sessions of one prompt; the attempt, which their puts name.

        Writes the prompt's row (key `uid`): status `running`, n, attempt. An older attempt of the
        same group is closed, and its rows go, at the same revision. `declared_bytes` of extents
        (a put takes whole pages of 4 KiB) are reserved until the group's rows are cleared: its puts
        and write-backs draw on them and never wait. It may use a quarter and 64 KiB more.

        Raises:
            QuotaExceeded: no room came free in time, or it is larger than all there is; nothing
                was reserved.
            InvalidRequest: it declares nothing where a quota in bytes is set, or the partition is
                sealed.
        """
        deadline = self._deadline(timeout)
        return self._drive(
            begin_group(self._core, uid, partition_id, n, declared_bytes, deadline),
            deadline + GRACE_S,
        )

    def end_group(
        self,
        attempt: int,
        status: str,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """End a group with a status, which its prompt's row takes on: `finished` makes it whole.

        From here on puts that name the attempt are StaleWrite, however late they come. So is this
        call when the attempt is not open any more.
        """
        deadline = self._deadline(timeout)
        return self._drive(end_group(self._core, attempt, status, deadline), deadline)

    def kv_wait(
        self,
        partition_id: str,
        where: Where | None = None,
        *,
        count: int = 1,
        group_by: str | None = None,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """All rows that match, as soon as there are `count` of them; oldest revision first.

        With `group_by="uid"` whole groups are counted, and all their rows come: groups that ended
        as `finished` and all of whose trajectories match. Rows that are lost match only a `where`
        that names the tag `dataplane.lost`. Woken by changes, never polling; the partition need not
        exist yet. At the deadline DeadlineExceeded explains what is missing and whom it waits for
        (`.explanation`).
        """
        deadline = self._wait_deadline(timeout)
        return self._drive(
            wait_rows(self._core, partition_id, where, count, group_by, deadline),
            deadline + GRACE_S,
        )

    def kv_watch(
        self,
        partition_id: str,
        *,
        since: Revision | None = None,
        where: Where | None = None,
        timeout: float | None = None,
    ) -> Iterator[Change]:
        """Changes of a partition in order, each as soon as it happens: an iterator without an end.

        `since` is a revision of an earlier answer, to go on from there; None begins now (with an
        AsyncClient when the first change is asked for). Whole revisions are told, each key once;
        what changed again before it was told is told once, at its last change. Where history does
        not reach back to `since` the first Change is `full`.
        DeadlineExceeded when nothing has changed for `timeout` (600 s).
        """
        if since is None:
            since = self._drive(present(self._core, self._deadline(None)), self._deadline(None))
        return self._watch(partition_id, since, where, timeout)

    def _watch(
        self, partition_id: str, since: Revision, where: Where | None, timeout: float | None
    ) -> Iterator[Change]:
        while True:
            deadline = self._wait_deadline(timeout)
            changes = self._drive(
                watch_once(self._core, partition_id, since, where, deadline), deadline + GRACE_S
            )
            for change in changes:
                since = change.revision
                yield change

    def kv_claim(
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
        """Exactly `count` rows that the task has not committed, held for this client until then.

        Rows are offered when all `fields` are produced and `where` holds, oldest revision first, or
        by a tag (`order_by="seq_len"`, `"-seq_len"`). With `groups` whole groups are counted and
        come. Rows that are lost are offered only if `where` names the tag `dataplane.lost`. A
        client that has had no connection for `lease_s` loses its claims, and the rows are offered
        again (`deliveries`). On a sealed partition the last claim may be shorter, and the
        one after it is empty with `end` set.

        `replica=(dp_rank, dp_size, batch_index)` splits a batch of `count` over all ranks with
        near-equal token totals; every member of a rank gets the same rows, and any may commit.

        Raises:
            DeadlineExceeded: not enough came ready; `.explanation` says why. Nothing is held.
        """
        deadline = self._wait_deadline(timeout)
        claim = self._drive(
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

    def kv_commit(
        self,
        claim: Claim,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """Finish a claim: its rows are not offered to the task again. Exactly once, all or nothing.

        Raises:
            ClaimLost: its lease ended, or rows of it (`.keys`) were cleared; nothing was
                committed. `claim.without(error.keys)` commits the rest.
        """
        deadline = self._deadline(timeout)
        return self._drive(commit_claim(self._core, claim, deadline), deadline)

    def kv_release(
        self,
        claim: Claim,
        *,
        timeout: float | None = None,
    ) -> Revision:
        """Give a claim's rows back, to be offered again at once. ClaimLost as for `kv_commit`."""
        deadline = self._deadline(timeout)
        return self._drive(release_claim(self._core, claim, deadline), deadline)

    def kv_create_partition(
        self,
        partition_id: str,
        *,
        schema: Schema = None,
        quota: Quota | Mapping[str, int | None] | None = None,
        retention: Retention | Mapping[str, int] | None = None,
        timeout: float | None = None,
    ) -> Revision:
        """Make a partition, or change the settings of one that exists.

        `schema` declares fields as `{name: (dtype, rank, ragged_dim)}`; `"open"` lets them change.
        `quota` limits bytes and rows, of all and of each producer (see `Quota`). `retention` is for
        a family of versions (`weights` for `weights@17`).

        Raises:
            InvalidRequest: the quota could block for ever, or a field has another schema already.
        """
        deadline = self._deadline(timeout)
        return self._drive(
            create_partition(self._core, partition_id, schema, quota, retention, deadline), deadline
        )

    def kv_list_partitions(
        self,
        *,
        timeout: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Every partition by name: keys, revision, schema, bytes used and held, settings, groups
        that are open, requests that wait for room."""
        deadline = self._deadline(timeout)
        return self._drive(list_partitions(self._core, deadline), deadline)

    def kv_seal_partition(
        self,
        partition_id: str,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """Let no new row into a partition; rows that are there may still be written to.

        Claims of a sealed partition come to an end. Sealing a version (`weights@17`) drops the
        versions that its family's retention does not keep; their names come back.
        """
        deadline = self._deadline(timeout)
        return self._drive(seal_partition(self._core, partition_id, deadline), deadline)

    def kv_drop_partition(
        self,
        partition_id: str,
        *,
        older_than: int | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """Take a partition away with all rows, schema and settings; the names of what was dropped.

        With `older_than`, the versions of this family with a lower number. PartitionNotFound if
        there is none; puts that began before it are StaleWrite.
        """
        deadline = self._deadline(timeout)
        return self._drive(drop_partition(self._core, partition_id, older_than, deadline), deadline)

    def explain(
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
        """Why something waits: what matches, which conditions fail how often, who is stuck.

        And since when, at which producer, alive or dead; and what holds the memory. The same text
        is in every deadline error.
        """
        deadline = self._deadline(timeout)
        return self._drive(
            explain(self._core, partition_id, where, fields, task, group_by, count, deadline),
            deadline,
        )

    def request_outcome(
        self,
        request_id: str,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """What became of a request whose answer was lost: `applied`, and then `verb` and `answer`.

        A request that had no effect will not have one later either. OutcomeUnknown if it is not
        remembered any more.
        """
        deadline = self._deadline(timeout)
        return self._drive(outcome(self._core, request_id, deadline), deadline)

    def trace(
        self,
        partition_id: str | None = None,
        *,
        uid: str | None = None,
        key: str | None = None,
        since: int = 0,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Trace:
        """What happened to a group (`uid`), to one key, or to everything: who wrote, read, claimed
        and cleared what, when, and of what size; and whether that agrees with itself.

        Read from the last requests that the plane remembers (its setting `lineage_bytes`): what has
        fallen out is counted (`.gone`). `since` is the `.next` of an earlier trace, to go on from
        there; `limit` is of rows.

        Raises:
            InvalidRequest: the plane keeps no lineage, or both a uid and a key are given.
        """
        deadline = self._deadline(timeout)
        return self._drive(
            trace(self._core, partition_id, uid, key, since, limit, deadline), deadline
        )

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Requests of this client belong to a stage of training, such as "advantage", for as long
        as the context is open: so they are named by `trace`. It is the client's, whichever threads
        use it. A plane that cannot be told is no reason to stop: what is at fault comes out with
        the next verb."""
        before = self._core.stage
        self._enter(check_stage(name))
        try:
            with span_of(self._core, f"stage {name}"):
                yield
        finally:
            self._enter(before)

    def span(
        self, name: str, partition_id: str, *, uids: Iterable[str]
    ) -> AbstractContextManager[None]:
        """A context that is a span of this name in the traces of these groups: what this process
        does with them, such as "optimizer_step". Nothing where the setting `otel` is off."""
        return span_of(self._core, name, partition_id, uids)

    def _enter(self, stage: str) -> None:
        with suppress(DataplaneError):
            deadline = self._deadline(min(STAGE_S, self._core.config.timeout_s))
            self._drive(enter_stage(self._core, stage, deadline), deadline)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Write the whole plane, as of one revision, into a folder; a summary of it.

        Puts, clears and claims go on meanwhile; frees wait. The folder appears whole or not at all.
        Tags are Parquet, values Arrow IPC; see docs/checkpoints.md.
        """
        deadline = self._wait_deadline(timeout)
        return self._drive(save_checkpoint(self._core, path, overwrite, deadline), deadline)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Restore a checkpoint into this plane, which is empty; a summary of it.

        Rows, settings, open attempts, cursors of tasks and claims come back, in as many value
        stores as this plane has. All is checked first; after an error the plane is empty.
        """
        deadline = self._wait_deadline(timeout)
        return self._drive(load_checkpoint(self._core, path, deadline), deadline)
