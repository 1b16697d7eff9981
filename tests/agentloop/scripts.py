"""An agent loop whose sessions do what the prompt's row says, for tests of what runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agentloop.groups.job import GroupJob
from agentloop.loops.loop import AgentLoop, Session
from agentloop.trajectory.state import RolloutState


class ScriptedLoop(AgentLoop):
    """Generates tokens by itself, one turn after the other, as `row["sessions"]` says.

    A session's script is a list of acts: ["say", [ids]], ["tool", [ids]], ["wait", name] (until
    the test opens that gate, or an abort is requested), ["ignore", name] (until the gate is open,
    whatever is requested), ["stops", k] (the first k runs are aborted), ["fail", text],
    ["split", k] (k trajectories in the end).
    """

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.runs: list[int] = []
        """Session ids, in the order in which they were run."""

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def at(self, name: str) -> asyncio.Event:
        """Set when a session has come to this gate."""
        return self.reached.setdefault(name, asyncio.Event())

    async def run(
        self, state: RolloutState, session: Session
    ) -> RolloutState | Sequence[RolloutState]:
        self.runs.append(state.session_id)
        said = sum(state.generated or [True] * len(state.response_ids or ()))
        count = 1
        for act, what in state.row["sessions"][state.session_id]:
            if act == "say":
                if said >= len(what):
                    said -= len(what)  # said before an interruption
                    continue
                state.append_generated(what, [-0.5] * len(what), [3] * len(what))
                state.num_turns += 1
            elif act == "tool":
                state.append_inserted(what, 3)
            elif act == "wait":
                if await self._aborted(session, what):
                    state.finish_reason = "abort"
                    return state
            elif act == "ignore":
                await self._stubborn(what)
            elif act == "stops":  # the engine is stopped by somebody else, so many times
                if self.runs.count(state.session_id) <= what:
                    state.finish_reason = "abort"
                    return state
            elif act == "fail":
                raise RuntimeError(what)
            elif act == "split":
                count = what
        state.finish_reason = "stop"
        state.response = "done"
        return state if count == 1 else _split(state, count)

    async def _aborted(self, session: Session, name: str) -> bool:
        self.at(name).set()
        gate = asyncio.create_task(self.gate(name).wait())
        abort = asyncio.create_task(session.abort_requested.wait())
        await asyncio.wait({gate, abort}, return_when=asyncio.FIRST_COMPLETED)
        aborted = not gate.done()
        gate.cancel()
        abort.cancel()
        return aborted

    async def _stubborn(self, name: str) -> None:
        self.at(name).set()
        while not self.gate(name).is_set():
            try:
                await self.gate(name).wait()
            except asyncio.CancelledError:
                continue


def _split(state: RolloutState, count: int) -> list[RolloutState]:
    from copy import deepcopy

    states = [deepcopy(state) for _ in range(count)]
    for index, each in enumerate(states):
        each.index = index
    return states


def job(uid: str, partition_id: str, *sessions: Any, **more: Any) -> GroupJob:
    """A group whose sessions have these scripts."""
    return GroupJob(
        uid=uid,
        partition_id=partition_id,
        task="scripted",
        n=len(sessions),
        global_steps=5,
        messages=[{"role": "user", "content": "go"}],
        row={"sessions": [list(map(list, script)) for script in sessions]},
        prompt_ids=[1, 2, 3],
        **more,
    )
