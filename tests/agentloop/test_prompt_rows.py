"""What a manager counts of the groups that are there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agentloop.production.prompt_rows import PromptRows
from dataplane import AsyncClient
from tests.faults import stores
from tests.faults.stores import Stores

STORE: dict[str, Any] = {"capacity_bytes": 64 << 20, "segment_bytes": 8 << 20}


async def group(plane: Stores, uid: str, home: int) -> None:
    """A group that is finished, with its trajectory in this store."""
    client = AsyncClient(replace(plane.joined, home=f"s{home}"), plane.config)
    await client.attach()
    attempt = await client.begin_group(uid, "train", n=1)
    tags = {"uid": uid, "session_id": 0, "status": "completed"}
    await client.kv_put(f"{uid}_0_0", "train", {"input_ids": [1, 2]}, tags, attempt=attempt)
    await client.kv_put(uid, "train", tags={"task_name": "sums"}, must_exist=True)
    await client.end_group(attempt, "finished")
    await client.close()


async def test_a_finished_group_that_lost_rows_counts_for_nothing(roots: dict[str, Path]) -> None:
    """It is going to be cleared: a round that counted it would be one group short."""
    with stores.running("counted", [STORE, STORE], timeout_s=20, **roots) as plane:
        client = AsyncClient(plane.joined, plane.config)
        await client.attach()
        rows = PromptRows(client, "train")
        for home, uid in enumerate("ab"):
            await group(plane, uid, home)
        assert [outcome.uid for outcome in await rows.finished()] == ["a", "b"]
        service = plane.tags.tags
        assert service is not None
        assert plane.call(lambda: service.losing.lose("s1", None)) == 1
        assert [outcome.uid for outcome in await rows.finished()] == ["a"]
        await client.close()
