"""What one process has come to: how often each named point, and whether a signal is due there.

Owns the file that arms a point, and how methods of live objects are watched. Which methods is for
the files of the stores and of their requests.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from dataplane.errors import InternalError

FILE = "switch"
"""In the runtime folder of a plane; it names the point that is armed."""
_MAX_FILE_BYTES = 4096


def read_switch(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return None


def send_itself(signal: int) -> None:
    """Act on a signal that is due."""
    os.kill(os.getpid(), signal)


class Switches:
    """What one process has come to so far."""

    def __init__(self, path: Path, act: Callable[[int], None]) -> None:
        self.hits: Counter[str] = Counter()
        """How often each point was come to."""
        self._path = path
        self.act = act
        self._id = ""
        self._count = 0

    def due(self, point: str) -> int | None:
        """The process has come to this point: the signal that is due now, if one is."""
        self.hits[point] += 1
        wanted = read_switch(self._path)
        if wanted is None or wanted["point"] != point:
            return None
        if wanted["id"] != self._id:
            self._id, self._count = wanted["id"], 0
        self._count += 1
        if self._count != wanted["nth"]:
            return None
        self._path.unlink(missing_ok=True)
        return wanted["signal"]

    def hit(self, point: str) -> None:
        """The process has come to this point."""
        signal = self.due(point)
        if signal is not None:
            self.act(signal)

    def hit_later(self, point: str, is_time: Callable[[], bool] = lambda: True) -> None:
        """The process comes to this point when what was written has left it: a loop sends at the
        end of a turn what is written during it."""
        loop = asyncio.get_running_loop()

        def look(turns: int) -> None:
            if turns or not is_time():
                loop.call_soon(look, max(0, turns - 1))
            else:
                self.hit(point)

        loop.call_soon(look, 2)

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Watch a method: the points that are come to before and after a call of it."""

        def watched(inner: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **named: Any) -> Any:
                if before:
                    self.hit(before)
                result: Any = inner(*args, **named)
                if not after:
                    return result
                if isinstance(result, asyncio.Future):
                    waited: asyncio.Future[Any] = cast("asyncio.Future[Any]", result)
                    waited.add_done_callback(lambda _: self.hit(after))
                    return waited
                self.hit(after)
                return result

            return method

        replace(owner, name, watched)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], object]) -> None:
    """Let a method of one object be another one, made from it."""
    inner = getattr(owner, name, None)
    if not callable(inner):
        raise InternalError(
            f"{type(owner).__name__} has no method {name!r} any more: the switches that watch it "
            "must be put elsewhere"
        )
    setattr(owner, name, make(inner))
