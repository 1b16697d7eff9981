"""An agent loop of worker processes that die in the middle of a put, when a prompt says so."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from agentloop.loops.loop import AgentLoop, Session
from agentloop.trajectory.state import RolloutState
from dataplane import AsyncClient

_dying: dict[str, tuple[Path, int]] = {}
"""By the key of a put: which file says that it was died over, and after how many turns of
the event loop it is."""

_put = AsyncClient.kv_put


async def _kv_put(self: AsyncClient, key: str, *args: Any, **named: Any) -> Any:
    marker, turns = _dying.pop(key, (None, 0))
    if marker is None or marker.exists():
        return await _put(self, key, *args, **named)
    marker.touch()
    putting = asyncio.create_task(_put(self, key, *args, **named))
    for _ in range(turns):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)
    return await putting


AsyncClient.kv_put = _kv_put  # type: ignore[method-assign]


class DyingLoop(AgentLoop):
    """Two turns of a few tokens. `row["die"]` is [session, file, turns of the event loop]."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    async def run(self, state: RolloutState, session: Session) -> RolloutState:
        for turn in range(2):
            await asyncio.sleep(self._pause_s)
            ids = [10 + state.session_id, 20 + turn]
            state.append_generated(ids, [-0.5, -0.5], [0, 0])
            state.num_turns += 1
        state.finish_reason = "stop"
        state.response = "done"
        death = state.row.get("die")
        if death is not None and death[0] == state.session_id:
            _dying[state.key] = Path(death[1]), death[2]
        return state
