"""A batch out of the plane, and back into it as if its rollouts had just ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from dataplane import AsyncClient, KeyNotFound
from trainer.debug_rollout.batch import DebugRollout, SavedRow
from trainer.select import Group

GROUP_MARGIN: Final = 16 << 10
"""Bytes that a group declares beside those of its tensors, for each row and object."""


async def capture(
    client: AsyncClient,
    partition_id: str,
    groups: Iterable[Group],
    *,
    step: int,
    raw_rewards: tuple[float, int] = (0.0, 0),
) -> DebugRollout:
    """A batch with all values of its rows, as it lies in the plane.

    Raises:
        KeyNotFound: rows are gone; names all of them.
    """
    batch = list(groups)
    uids = [group.uid for group in batch]
    listing = await client.kv_list(partition_id, where={"uid": {"in": uids}})
    tags = dict(zip(listing.keys, listing.tags, strict=True))
    keys = [key for group in batch for key in group.all_keys]
    gone = [key for key in keys if key not in tags]
    if gone:
        raise KeyNotFound(
            f"{len(gone)} rows of step {step} are gone: {', '.join(gone[:5])}",
            partition_id=partition_id,
            keys=gone,
        )
    fields = dict(zip(listing.keys, listing.fields, strict=True))
    values = await _values(client, partition_id, {key: fields[key] for key in keys})
    saved = {key: SavedRow(key, dict(tags[key]), values.get(key, {})) for key in keys}
    return DebugRollout(
        step,
        tuple(
            (
                group.uid,
                None if group.prompt_key is None else saved[group.prompt_key],
                tuple(saved[key] for key in group.keys),
            )
            for group in batch
        ),
        raw_rewards,
    )


async def replay(client: AsyncClient, partition_id: str, rollout: DebugRollout) -> None:
    """Put a batch back into a partition, as finished groups. The same keys, tags and values are
    there as when it was captured, but for the attempts, which are new ones.

    Raises:
        DataplaneError: a put was refused; what was put before it is there.
    """
    for uid, prompt, rows in rollout.prompts:
        if prompt is None:
            await _put(client, partition_id, rows, attempt=None)
            continue
        tags = {k: v for k, v in prompt.tags.items() if k not in ("status", "attempt")}
        await client.kv_put(
            prompt.key, partition_id, prompt.fields or None, {**tags, "status": "pending"}
        )
        sessions = {str(row.tags.get("session_id")) for row in rows}
        attempt = await client.begin_group(
            uid,
            partition_id,
            n=prompt.tags.get("n") or max(1, len(sessions)),
            declared_bytes=sum(map(_bytes, rows)) + GROUP_MARGIN,
        )
        await _put(client, partition_id, rows, attempt=attempt)
        await client.end_group(attempt, prompt.tags.get("status", "finished"))


def _bytes(row: SavedRow) -> int:
    """What a row takes, generously: the margin of its group covers the rest."""
    return (
        sum(
            value.numel() * value.element_size()
            if isinstance(value, torch.Tensor)
            else GROUP_MARGIN + len(repr(value))
            for value in row.fields.values()
        )
        + GROUP_MARGIN
    )


async def _put(
    client: AsyncClient, partition_id: str, rows: Iterable[SavedRow], *, attempt: int | None
) -> None:
    """Put rows in their order: one call for all neighbours that have the same fields."""
    runs: list[list[SavedRow]] = []
    for row in rows:
        if not runs or runs[-1][0].fields.keys() != row.fields.keys():
            runs.append([])
        runs[-1].append(row)
    for run in runs:
        names = list(run[0].fields)
        tags = [{k: v for k, v in row.tags.items() if k != "attempt"} for row in run]
        if attempt is not None:
            tags = [{**its, "attempt": attempt} for its in tags]
        await client.kv_batch_put(
            [row.key for row in run],
            partition_id,
            {name: [row.fields[name] for row in run] for name in names} or None,
            tags,
            attempt=attempt,
        )


async def _values(
    client: AsyncClient, partition_id: str, wanted: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """All fields of rows by key: one get for all rows that have the same ones."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for key, names in wanted.items():
        alike.setdefault(tuple(names), []).append(key)
    values: dict[str, dict[str, Any]] = {}
    for names, keys in alike.items():
        if names:
            rows = await client.kv_batch_get(keys, partition_id, names, layout="list")
            for i, key in enumerate(rows.keys):
                values[key] = {name: rows.fields[name][i] for name in names}
    return values
