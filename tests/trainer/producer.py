"""A producer for tests of consumers: prompts and groups as agent loops leave them in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataplane import AsyncClient
from tests.trainer.rows import tags


class Producer:
    """Puts the groups of one partition."""

    def __init__(self, client: AsyncClient, partition_id: str) -> None:
        self.client = client
        self.partition_id = partition_id
        self.attempts: dict[str, int] = {}

    async def submit(self, *uids: str, step: int | None = 1, n: int = 2) -> None:
        """Prompts that are pending."""
        its = {"is_prompt": True, "status": "pending", "global_steps": step, "n": n}
        if step is None:
            del its["global_steps"]
        await self.client.kv_batch_put(
            list(uids), self.partition_id, tags=[{**its, "uid": uid} for uid in uids]
        )

    async def begin(self, uid: str, n: int = 2) -> None:
        """The group of a prompt begins: it is running."""
        self.attempts[uid] = await self.client.begin_group(uid, self.partition_id, n=n)

    async def put(self, uid: str, session: int, score: float | None = 1.0, **more: Any) -> str:
        """One trajectory; its key."""
        key = f"{uid}_{session}_0"
        its = tags(uid, session, **{"score": score, **more})
        size = its["seq_len"]
        await self.client.kv_put(
            key, self.partition_id,
            {"input_ids": torch.arange(size), "labels": torch.arange(size)},
            {name: value for name, value in its.items() if value is not None},
            attempt=self.attempts[uid],
        )  # fmt: skip
        return key

    async def fail(self, uid: str, session: int) -> str:
        """What a failed session leaves: tags alone; its key."""
        key = f"{uid}_{session}_0"
        its = {"uid": uid, "session_id": session, "index": 0, "status": "failed"}
        await self.client.kv_put(key, self.partition_id, None, its, attempt=self.attempts[uid])
        return key

    async def end(self, uid: str, status: str = "finished") -> None:
        """The group has ended."""
        await self.client.end_group(self.attempts[uid], status)

    async def group(
        self,
        uid: str,
        scores: Sequence[float | None] = (1.0, 0.0),
        *,
        step: int | None = 1,
        status: str = "finished",
        n: int | None = None,
        **more: Any,
    ) -> list[str]:
        """A whole group, from submission to its end; all of its keys."""
        sessions = n or max(len(scores), 1)
        await self.submit(uid, step=step, n=sessions)
        await self.begin(uid, sessions)
        keys = [await self.put(uid, i, score, **more) for i, score in enumerate(scores)]
        await self.end(uid, status)
        return [uid, *keys]
