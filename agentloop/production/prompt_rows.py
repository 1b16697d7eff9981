"""The rows of prompts, as a manager sees them in the plane: listed, taken back, given an end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from agentloop.groups.outcome import GroupOutcome
from dataplane import AsyncClient, KeyNotFound, Listing, PartitionNotFound, StaleWrite
from dataplane.fields import LOST_ROWS

Tags: TypeAlias = Mapping[str, Any]


class PromptRows:
    """The prompts of one partition."""

    def __init__(self, client: AsyncClient, partition_id: str) -> None:
        self._client = client
        self._partition_id = partition_id

    async def prompts(self, where: Mapping[str, Any]) -> Sequence[Tags]:
        """The tags of the prompts that match."""
        listing = await self.listing(where)
        return [] if listing is None else listing.tags

    async def listing(self, where: Mapping[str, Any]) -> Listing | None:
        """The prompts' rows; None where nothing was ever produced."""
        try:
            return await self._client.kv_list(
                self._partition_id, where={"is_prompt": True, **where}
            )
        except PartitionNotFound:
            return None

    async def reclaim(self, uid: str, tags: Tags) -> bool:
        """Close a prompt's attempt, so that nothing more of its old worker is taken, and mark it as
        pending; False if it has ended meanwhile, or is not there any more."""
        if tags["status"] == "running":
            try:
                await self._client.end_group(cast("int", tags["attempt"]), "pending")
                return True
            except StaleWrite:
                pass  # the worker was quicker: it has ended, or it was begun anew
        now = await self.prompts({"uid": uid})
        return bool(now) and now[0]["status"] in ("pending", "running")

    async def outcome(self, uid: str, task: str) -> GroupOutcome:
        """The outcome of a group that has ended, from its rows."""
        listing = await self._client.kv_list(self._partition_id, where={"uid": uid})
        prompts = [tags for tags in listing.tags if tags.get("is_prompt")]
        members = [tags for tags in listing.tags if not tags.get("is_prompt")]
        if not prompts:
            return GroupOutcome.superseded(uid, task)
        return GroupOutcome.of_tags(uid, task, prompts[0], members)

    async def finished(self) -> list[GroupOutcome]:
        """The outcomes of all groups that are finished and still there, whole: one that lost rows
        is to be replaced, and counts for nothing."""
        prompts = await self.prompts({"status": "finished", LOST_ROWS: {"exists": False}})
        if not prompts:
            return []
        of_uid: dict[Any, list[Tags]] = {prompt["uid"]: [] for prompt in prompts}
        members = await self._client.kv_list(
            self._partition_id,
            where={"uid": {"in": list(of_uid)}, "session_id": {"exists": True}},
        )
        for tags in members.tags:
            of_uid[tags["uid"]].append(tags)
        return [
            GroupOutcome.of_tags(
                str(prompt["uid"]), str(prompt.get("task_name")), prompt, of_uid[prompt["uid"]]
            )
            for prompt in prompts
        ]

    async def give_up(self, uid: str, reason: str, *, keep: bool) -> None:
        """Give a prompt that could not be run its last status, or clear it and its rows."""
        if not keep:
            await self._client.kv_clear(None, self._partition_id, where={"uid": uid}, retire=True)
            return
        prompts = await self.prompts({"uid": uid})
        if not prompts or not await self.reclaim(uid, prompts[0]):
            return  # it has ended, or was cleared: that is an end too
        try:
            tags = {"status": "failure", "error_msg": reason[:1000]}
            await self._client.kv_put(uid, self._partition_id, tags=tags, must_exist=True)
        except KeyNotFound:
            pass  # cleared a moment ago
