"""The child process of a ProcessWorker: `python -m agentloop.workers.child FD`."""

from __future__ import annotations

import os
import socket
import sys

import uvloop

from agentloop.processes.calls import Calls
from agentloop.workers.body import Body

VERBS = ("start", "run", "pause", "resume", "update_weights", "plane_time_s", "close")


async def _serve(fd: int) -> None:
    body = Body()
    verbs = {verb: getattr(body, verb) for verb in VERBS}
    calls = await Calls.over(socket.socket(fileno=fd), verbs)
    await calls.gone()
    # The owner closed it, or died. Nothing here is worth keeping, and engines may not answer.
    os._exit(0)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
