"""`python -m tests.bench.sessions`: how many sessions of an agent loop one process carries.

A thousand sessions run at once against a scripted engine that answers each turn after 20 to 200 ms:
three turns that call a tool, and an answer. Each publishes its trajectory to a plane in a child
process; a consumer waits for finished groups and clears them. Printed: trajectories per second, how
late the event loop runs, and what share of the process's CPU time the plane's client takes, by
running the same sessions without a plane.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import uvloop

import dataplane
from agentloop.assembly import load_tokenizer, settle_memory
from agentloop.engines.scripted import ScriptedEngine
from agentloop.engines.types import Sampling
from agentloop.groups.job import GroupJob
from agentloop.groups.producer import Producer
from agentloop.groups.task import Task
from agentloop.loops.loop import AgentLoop
from agentloop.loops.tool_agent import ToolAgentLoop
from agentloop.production.manager import ManagedTask, RolloutManager
from agentloop.production.seats import Seats
from agentloop.tiny import make_tiny_model
from agentloop.tools.function import from_function
from agentloop.workers.local import LocalWorker
from dataplane import DeadlineExceeded, PartitionNotFound, async_connect

SESSIONS = 4
LATENCY_S = (0.020, 0.200)
ENOUGH = 1 << 30
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 4}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one
        b: the other
    """
    return a + b


class Judge:
    """Scores by the length of the answer."""

    async def score(self, states: Any) -> list[dict[str, Any]]:
        return [{"score": float(len(state.response or "") % 2)} for state in states]


class NoPlane:
    """What the sessions meet instead of a plane, to know what they take by themselves."""

    def __init__(self) -> None:
        self._attempts = 0

    async def begin_group(self, *args: Any, **named: Any) -> int:
        self._attempts += 1
        return self._attempts

    async def _nothing(self, *args: Any, **named: Any) -> None:
        return None

    async def kv_list(self, partition_id: str, **named: Any) -> Any:
        raise PartitionNotFound("there is no plane")

    end_group = kv_put = kv_batch_put = kv_clear = _nothing


async def _lag(late_s: list[float]) -> None:
    """How late the loop is for what should run every 5 ms."""
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        late_s.append(time.perf_counter() - due)


async def consume(plane: str) -> None:
    """Clear groups that are finished, as a trainer in a process of its own does."""
    client = await async_connect(plane)
    while True:
        try:
            done = await client.kv_wait(
                "train", {"is_prompt": True, "status": "finished"}, count=16, timeout=5
            )
        except (DeadlineExceeded, PartitionNotFound):
            continue
        await client.kv_clear(None, "train", where={"uid": {"in": done.keys}}, retire=True)


async def measure(
    client: Any, loop: AgentLoop, tokenizer: Any, sessions: int, seconds: float
) -> dict[str, float]:
    """Trajectories per second and the loop's lag while so many sessions run."""
    prompt_ids = tokenizer.prompt([{"role": "user", "content": "What is 3 + 4, four times?"}])
    script = [{"text": CALL % turn} for turn in range(3)] + [{"text": "The answer is 7."}]
    task = Task(
        "tools", loop, ScriptedEngine(script, tokenizer=tokenizer, latency_s=LATENCY_S),
        tokenizer, Sampling(max_tokens=2048), reward=Judge(),
    )  # fmt: skip
    drawn = trajectories = 0

    def draw(global_steps: int) -> tuple[GroupJob, Mapping[str, Any] | None]:
        nonlocal drawn
        drawn += 1
        job = GroupJob(
            uid=f"q{drawn}", partition_id="train", task="tools", n=SESSIONS,
            global_steps=global_steps, prompt_ids=prompt_ids,
            messages=[{"role": "user", "content": "What is 3 + 4, four times?"}],
        )  # fmt: skip
        return job, None

    def count(outcome: Any) -> None:
        nonlocal trajectories
        assert outcome.status in ("completed", "aborted"), outcome
        if outcome.status == "completed":
            trajectories += len(outcome.members)

    async def start() -> LocalWorker:
        return LocalWorker(Producer(client, {"tools": task}))

    seats = Seats([start], sessions // SESSIONS)
    manager = RolloutManager(
        client, seats, [ManagedTask("tools", draw)], persist_prompts=False, on_outcome=count
    )
    await seats.open()
    producing = asyncio.create_task(manager.produce(ENOUGH, 1))
    await asyncio.sleep(1.0)  # the first answers come
    late_s: list[float] = []
    lag = asyncio.create_task(_lag(late_s))
    before, trajectories, began = time.process_time(), 0, time.perf_counter()
    await asyncio.sleep(seconds)
    took, count_then = time.perf_counter() - began, trajectories
    cpu_s = time.process_time() - before
    lag.cancel()
    await manager.pause(10)
    await producing
    await manager.close()
    late_s.sort()
    return {
        "trajectories_per_s": count_then / took,
        "lag_p50_ms": 1e3 * late_s[len(late_s) // 2],
        "lag_p99_ms": 1e3 * late_s[int(0.99 * len(late_s))],
        "lag_max_ms": 1e3 * late_s[-1],
        "cpu_ms_per_trajectory": 1e3 * cpu_s / count_then,
        "cpu_share_of_a_core": cpu_s / took,
    }


async def run(sessions: int, seconds: float) -> dict[str, float]:
    """The figures with a plane, and the plane's share."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tiny_model(Path(folder) / "model"))
    loop = ToolAgentLoop([from_function(add)], max_turns=4)
    settle_memory()  # as worker processes do
    alone = await measure(NoPlane(), loop, tokenizer, sessions, min(seconds, 10.0))
    plane = await asyncio.to_thread(
        dataplane.init, {"host": "embedded", "capacity_bytes": 1 << 30}, name="sessions"
    )
    client = await async_connect("sessions")
    consumer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.sessions", "--consume", "sessions"
    )
    try:
        found = await measure(client, loop, tokenizer, sessions, seconds)
    finally:
        consumer.kill()
        await consumer.wait()
        await client.close()
        await asyncio.to_thread(plane.close, True)
    alone_ms, with_ms = alone["cpu_ms_per_trajectory"], found["cpu_ms_per_trajectory"]
    found["plane_share_of_cpu"] = max(0.0, (with_ms - alone_ms) / with_ms)
    found["without_a_plane_per_s"] = alone["trajectories_per_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sessions", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few sessions for a second")
    parser.add_argument("--sessions", type=int, default=1000, help="how many run at once")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--consume", metavar="PLANE", help="be the consumer of a plane")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    asked = parser.parse_args()
    if asked.consume is not None:
        uvloop.run(consume(asked.consume))
        return
    sessions, seconds = (40, 1.0) if asked.smoke else (asked.sessions, asked.seconds)
    found = cast("dict[str, float]", uvloop.run(run(sessions, seconds)))
    print(f"{sessions} sessions at once for {seconds:g} s, 4 turns of 20 to 200 ms each:")
    for name, value in found.items():
        print(f"  {name:24} {value:10.3f}")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  {'peak_memory_mib':24} {peak_mib:10.1f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
