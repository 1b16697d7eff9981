"""One rank where it runs, in whatever process: made of plain data, asked by the name of a verb."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final, cast

import torch.distributed as partly_typed

import dataplane
from trainer.plan import Topology
from trainer.ranks.body import RankBody
from trainer.ranks.collectives import Peers
from trainer.ranks.outcome import Outcome
from trainer.ranks.stages import Stage
from trainer.ranks.types import RankSettings

distributed = cast("Any", partly_typed)

VERBS: Final = "begin_phase fit publish_weights save load export offload onload close".split()
"""What a body can be asked."""


class Seat:
    """A rank's place, empty until it is opened."""

    def __init__(self) -> None:
        self._body: RankBody | None = None
        self._store: Any = None

    def pid(self) -> int:
        """The process's id."""
        return os.getpid()

    def meet(self, host: str, world_size: int) -> int:
        """Have the ranks meet here: the port, a free one that is taken from now on."""
        self._store = distributed.TCPStore(
            host, 0, world_size, is_master=True, wait_for_workers=False
        )
        return self._store.port

    def open(
        self,
        settings: RankSettings,
        topology: Topology,
        stages: Sequence[Stage],
        rank: int,
        meeting: tuple[str, int] | None,
    ) -> Outcome:
        """Meet the others, join the plane and make the model."""
        return Outcome.of(lambda: self._open(settings, topology, stages, rank, meeting))

    def ask(self, verb: str, *arguments: Any, **named: Any) -> Outcome:
        """What the body does."""
        body = self._body
        if body is None or verb not in VERBS:
            raise ValueError(f"{verb!r} is no verb of a rank, or the rank was not opened")
        return Outcome.of(
            lambda: getattr(body, verb)(*arguments, **named), shares=body.together.shares
        )

    def leave(self) -> None:
        """Close the body, if there is one."""
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _open(
        self,
        settings: RankSettings,
        topology: Topology,
        stages: Sequence[Stage],
        rank: int,
        meeting: tuple[str, int] | None,
    ) -> None:
        if meeting is None:
            peers = Peers.alone(settings.device)
        else:
            host, port = meeting
            store = self._store or distributed.TCPStore(
                host, port, settings.world_size, is_master=False,
                timeout=timedelta(seconds=settings.collective_timeout_s),
            )  # fmt: skip
            peers = Peers.join(
                rank, settings.world_size, store,
                device=settings.device, timeout_s=settings.collective_timeout_s,
            )  # fmt: skip
        plane = settings.plane
        with ExitStack() as stack:
            stack.callback(peers.close)
            named = {"label": f"actor dp{topology.dp_rank(rank)}", **plane.settings}
            client = dataplane.connect(plane.name, address=plane.address, config=named)
            stack.callback(client.close)
            self._body = RankBody(settings, peers, client, topology=topology, stages=stages)
            stack.pop_all()  # the body's from now on
