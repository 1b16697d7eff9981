"""Trajectories to the data plane and back: one put per session, under its group's attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agentloop.groups.job import GroupJob
from agentloop.groups.plane_clock import PlaneClock
from agentloop.trajectory.rows import state_of_row, trajectory_fields, trajectory_tags
from agentloop.trajectory.state import RolloutState
from dataplane import AsyncClient, Listing

Row: TypeAlias = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""Its key, its fields and its tags."""


async def publish(
    client: AsyncClient,
    states: Sequence[RolloutState],
    job: GroupJob,
    attempt: int,
    clock: PlaneClock,
) -> None:
    """Put the trajectories of one session: all of them exist, whole, or none.

    A session that failed leaves tags alone. Trajectories of one session that do not have the same
    fields are put one kind after the other: a put has the same fields for all of its rows.

    Raises:
        StaleWrite: the attempt is not open any more; nothing was written.
        DataplaneError: nothing was written of the put that failed.
    """
    rows: list[Row] = []
    for state in states:
        tags = trajectory_tags(state) | {"attempt": attempt, "global_steps": job.global_steps}
        if job.shared:
            tags["shared"] = job.uid
        rows.append((state.key, trajectory_fields(state), tags))
    await put_rows(client, job.partition_id, rows, clock, attempt=attempt)


async def put_rows(
    client: AsyncClient,
    partition_id: str,
    rows: Sequence[Row],
    clock: PlaneClock,
    *,
    attempt: int | None = None,
    if_absent: bool = False,
) -> None:
    """Put rows (key, fields, tags), those with the same fields at once, one kind after the other.

    Raises:
        DataplaneError: nothing was written of the put that failed, and of those after it.
    """
    of_kind: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        of_kind.setdefault(frozenset(row[1]), []).append(row)
    for names, alike in of_kind.items():
        if len(alike) == 1:  # what most sessions have, and the cheapest of all puts
            ((key, fields, tags),) = alike
            with clock.call():
                await client.kv_put(
                    key, partition_id, fields or None, tags, attempt=attempt, if_absent=if_absent
                )
            continue
        columns = {name: [fields[name] for _, fields, _ in alike] for name in names}
        with clock.call():
            await client.kv_batch_put(
                [key for key, _, _ in alike],
                partition_id,
                columns or None,
                [tags for _, _, tags in alike],
                attempt=attempt,
                if_absent=if_absent,
            )


async def submit(
    client: AsyncClient,
    partition_id: str,
    jobs: Sequence[GroupJob],
    *,
    persist: bool,
    shared: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Put the prompts' rows, all at one revision: from here on they are pending.

    With `persist` the dataset's rows are stored too, so that another manager can go on with them.
    `shared` has what all trajectories of a prompt share, by uid: it lies under the prompt's key
    and goes with it.
    """
    shared = shared or {}
    of_kind: dict[bool, list[GroupJob]] = {}
    for job in jobs:
        of_kind.setdefault(job.uid in shared, []).append(job)
    for has_shared, same in of_kind.items():
        fields: dict[str, list[Any]] = {}
        if persist:
            stored = [job.prompt_fields() for job in same]
            fields = {name: [row[name] for row in stored] for name in stored[0]}
        if has_shared:
            fields["multi_modal_inputs"] = [dict(shared[job.uid]) for job in same]
        await client.kv_batch_put(
            [job.uid for job in same],
            partition_id,
            fields or None,
            [job.prompt_tags() for job in same],
        )


async def interrupted_states(client: AsyncClient, job: GroupJob) -> list[list[RolloutState]]:
    """What the sessions of an interrupted group have so far: [session][trajectory].

    A session of which nothing is there begins from its prompt.
    """
    here = await client.kv_list(
        job.partition_id, where={"uid": job.uid, "session_id": {"exists": True}}
    )
    sessions: list[list[RolloutState]] = [[] for _ in range(job.n)]
    fresh = job.states()
    values = await _values(client, here)
    for key, tags in zip(here.keys, here.tags, strict=True):
        session_id = tags["session_id"]
        assert isinstance(session_id, int)
        state = state_of_row(fresh[session_id], tags, values.get(key, {}))
        sessions[session_id].append(state)
    for session_id, states in enumerate(sessions):
        states.sort(key=lambda state: state.index)
        if not states:
            states.append(fresh[session_id])
    return sessions


async def _values(client: AsyncClient, listing: Listing) -> dict[str, dict[str, Any]]:
    """All fields of the rows that have any, by key."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for key, names in zip(listing.keys, listing.fields, strict=True):
        if names:
            alike.setdefault(tuple(names), []).append(key)
    values: dict[str, dict[str, Any]] = {}
    for names, keys in alike.items():
        rows = await client.kv_batch_get(keys, listing.partition_id, names, layout="list")
        for i, key in enumerate(rows.keys):
            values[key] = {name: column[i] for name, column in rows.fields.items()}
    return values
