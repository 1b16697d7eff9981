"""Worker processes that are killed: every prompt still ends, once, with the last attempt's rows."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from agentloop.groups.invariants import wrong_rows
from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.production.manager import ManagedTask, RolloutManager
from agentloop.production.seats import Seats
from agentloop.workers.process import ProcessWorker
from dataplane import async_connect
from tests.contract.planes import Plane, embedded_sync

pytestmark = pytest.mark.faults

SESSIONS = 3
MOMENTS = 20
"""Half of them in the middle of a put."""


class Killed:
    """Starts worker processes, and kills one when it is told to."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.alive: list[ProcessWorker] = []
        self.started = 0

    async def start(self) -> ProcessWorker:
        worker = await ProcessWorker.start(self._config)
        self.alive.append(worker)
        self.started += 1
        return worker

    def kill(self, which: int) -> bool:
        """SIGKILL one of those that live; whether there was one."""
        pids = [worker.pid for worker in self.alive if worker.is_alive]
        if pids:
            os.kill(pids[which % len(pids)], signal.SIGKILL)
        return bool(pids)


def config_of(plane: Plane) -> dict[str, Any]:
    """What a worker of this plane has to know."""
    folders = {name: str(plane.settings[name]) for name in ("runtime_dir",)}
    loop = {"path": "tests.faults.dying:DyingLoop", "options": {"pause_s": 0.05}}
    return {
        "plane": {"name": plane.name, "settings": folders},
        "engine": {"kind": "scripted"},
        "tasks": [{"name": "dying", "n": SESSIONS, "dataset": {}, "loop": loop}],
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_worker_killed_at_twenty_moments_loses_and_doubles_nothing(
    tmp_path: Path, plane_settings: dict[str, Any]
) -> None:
    chance = random.Random(7)
    prompts = 60
    dying = set(chance.sample(range(prompts), MOMENTS // 2))
    kills = sorted(chance.sample(range(5, prompts - 5), MOMENTS // 2))
    drawn = 0

    def draw(global_steps: int) -> tuple[GroupJob, Mapping[str, Any] | None]:
        nonlocal drawn
        row: dict[str, Any] = {}
        if drawn in dying:
            turns = chance.randrange(12)
            row["die"] = [chance.randrange(SESSIONS), str(tmp_path / f"died-{drawn}"), turns]
        drawn += 1
        job = GroupJob(
            uid=f"q{drawn}", partition_id="train", task="dying", n=SESSIONS,
            global_steps=global_steps, messages=[{"role": "user", "content": "go"}], row=row,
            prompt_ids=[1, 2, 3],
        )  # fmt: skip
        return job, None

    with embedded_sync("dying", plane_settings) as plane:
        killed = Killed(config_of(plane))
        client = await async_connect(plane.name, config=plane.settings)
        seats = Seats([killed.start, killed.start], 4)
        ended = 0

        def on_outcome(outcome: GroupOutcome) -> None:
            nonlocal ended
            ended += 1
            while kills and ended >= kills[0] and killed.kill(chance.randrange(2)):
                kills.pop(0)

        manager = RolloutManager(
            client, seats, [ManagedTask("dying", draw)], reissues=1000, on_outcome=on_outcome
        )
        await seats.open()
        try:
            result = await manager.produce(prompts, 1)
            assert manager.pending == 0
        finally:
            await manager.close()
        assert kills == []
        assert len(os.listdir(tmp_path)) == MOMENTS // 2
        assert killed.started > MOMENTS // 2  # several groups may have been under way in one
        print(f"workers started {killed.started}, restarts {seats.restarts}")

        listing = await client.kv_list("train")
        assert await wrong_rows(client, listing) == []  # so each row is of its group's attempt
        tags = cast("list[dict[str, Any]]", listing.tags)
        asked = {row["uid"] for row in tags if row.get("is_prompt")}
        assert asked == {f"q{i}" for i in range(1, prompts + 1)}
        assert {row["status"] for row in tags if row.get("is_prompt")} == {"finished"}
        rows = Counter(
            (row["uid"], row["session_id"], row["index"])
            for row in tags
            if not row.get("is_prompt")
        )
        assert rows == Counter((uid, i, 0) for uid in asked for i in range(SESSIONS))
        assert result.produced_samples == prompts * SESSIONS
        await client.kv_clear(None, "train", where={}, retire=True)
        plane.settle()
        assert plane.used_bytes() == 0
        await client.close()
