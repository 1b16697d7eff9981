"""How clients find the controller and ask it, whatever has become of it meanwhile.

It listens at an address that lies in the plane. A controller that Ray starts again listens at
another one, so who finds nobody looks there again, until its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Pause, Verb
from dataplane.client.retry import FIRST_PAUSE_S
from dataplane.client.tags import list_rows
from dataplane.errors import PartitionNotFound, PlaneLost, Unreachable
from dataplane.wire.address import Address
from dataplane.wire.channel import Broken

from ..names import HIDDEN

PREFIX = "tq_"
"""Begins the names of the controller's verbs."""
LAST_PAUSE_S = 0.2


class Controller:
    """The controller as one client reaches it. Usable from any thread."""

    def __init__(self) -> None:
        self._view: StoreView | None = None

    def ask(
        self, core: Core, verb: str, body: list[Any] | Callable[[bool], list[Any]], deadline: float
    ) -> Verb[Any]:
        """The answer to a request, which may be repeated without harm.

        The body may be made anew for each try, told whether one before it may have been answered.
        """
        pause_s = FIRST_PAUSE_S
        again = False
        while True:
            view = self._view
            if view is None:
                view = self._view = yield from self._find(core, deadline)
            if view is not None:
                try:
                    parts = body(again) if callable(body) else body
                    return (yield Ask(view, PREFIX + verb, parts)).body
                except Broken:
                    again = True
                except (PlaneLost, Unreachable):
                    pass  # nobody listens there; whether the plane is lost, it says itself
                self._view = None
            if time.monotonic() + pause_s >= deadline:
                raise Unreachable(
                    f"the TransferQueueController of plane {core.joined.name!r} does not answer "
                    f"{verb}: {'it listened at ' + str(view.address) if view else 'none has come'}"
                    ", and Ray did not start it again in time. Keys can be put and got without it"
                )
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _find(self, core: Core, deadline: float) -> Verb[StoreView | None]:
        try:
            listing = yield from list_rows(
                core, HIDDEN, {"address": {"exists": True}}, None, ["address"], None, deadline
            )
        except PartitionNotFound:
            return None
        for tags in listing.tags:
            view = StoreView("controller", Address.from_wire(tags["address"]))
            view.probed = True  # it has no segments to look for
            return view
        return None
