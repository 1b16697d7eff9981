"""Ranks in threads of one process, with a trainee whose numbers a test can foresee."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from dataplane.fields import IGNORED
from trainer.loss import LossConfig
from trainer.materialize import PackTensors
from trainer.plan import Topology
from trainer.ranks.body import RankBody
from trainer.ranks.collectives import Peers
from trainer.ranks.stages import STAGES
from trainer.ranks.trainee import Trainee
from trainer.ranks.types import (
    ModelSettings,
    OptimizerSettings,
    Phase,
    PlaneAddress,
    RankReport,
    RankSettings,
    RankWork,
)

LIMIT_S = 30.0
"""Nobody waits longer for the others: then they have hung."""

BYPASS = LossConfig(clip_low=0.2, clip_high=0.2, old_logprobs="rollout")
RECOMPUTE = LossConfig(clip_low=0.2, clip_high=0.2)


def settings(world_size: int = 1, **more: Any) -> RankSettings:
    """Of ranks that no model is needed for."""
    given: dict[str, Any] = {
        "plane": PlaneAddress(name="none"),
        "model": ModelSettings(config={}),
        "cap": 16,
        "optimizer_steps": 2,
        "world_size": world_size,
        "threads": 1,
    }
    return RankSettings(**{**given, **more})


class Meeting:
    """Where the threads of some ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank brought."""
        self._slots[rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


class ThreadPeers(Peers):
    """Ranks that are threads. They meet in one collective after the other, as processes do, and
    one that enters another kind than the rest is found out."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.size, torch.device("cpu"), joined=False)
        self._meeting = meeting

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        found = self._meeting.exchange(self.rank, (str(op), tensor.shape, tensor.clone()))
        assert len({one[:2] for one in found}) == 1, "ranks are in different collectives"
        values = torch.stack([one[2] for one in found])
        name = str(op).rsplit(".", 1)[-1]
        if name == "SUM":
            return tensor.copy_(values.sum(0))
        return tensor.copy_(values.amax(0) if name == "MAX" else values.amin(0))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        found = self._meeting.exchange(self.rank, ("broadcast", source, tensor.clone()))
        assert len({one[:2] for one in found}) == 1, "ranks are in different collectives"
        return tensor.copy_(found[source][2])


class ScriptedTrainee(Trainee):
    """log p of a token is -1 - token / 100, of the reference half of that; nothing is learnt.

    `seen` holds what it was trained with, of steps that came to their end.
    """

    def __init__(self, settings: RankSettings, peers: Peers) -> None:  # pyright: ignore[reportMissingSuperCall]
        self._peers_of_test = peers
        self._is_sharded = settings.parallel == "fsdp"
        self._phase: Phase | None = None
        self.hook: Callable[[str, PackTensors], None] = lambda _what, _pack: None
        self.seen: list[tuple[list[PackTensors], int]] = []
        self.closed = False

    @property
    def phase(self) -> Phase | None:
        return self._phase

    def begin_phase(self, phase: Phase) -> None:
        self._phase = phase

    def logprobs(self, pack: PackTensors) -> torch.Tensor:
        self._forward("logprobs", pack)
        return scripted(pack)

    def reference_logprobs(self, pack: PackTensors) -> torch.Tensor:
        self._forward("reference", pack)
        return scripted(pack) / 2

    def train_step(self, packs: Iterable[PackTensors], *, global_tokens: int) -> dict[str, float]:
        kept: list[PackTensors] = []
        for pack in packs:
            self._forward("train", pack)
            kept.append(copied(pack))
        # As gradients are: ranks that failed must not leave the others here.
        self._peers_of_test.all_reduce_sum(torch.zeros(3))
        self.seen.append((kept, global_tokens))
        return {"loss": float(len(self.seen))}

    def _forward(self, what: str, pack: PackTensors) -> None:
        self.hook(what, pack)
        if self._is_sharded:
            self._peers_of_test.all_reduce_sum(torch.zeros(2))  # as weights are gathered

    def close(self) -> None:
        self.closed = True


def scripted(pack: PackTensors) -> torch.Tensor:  # [1, L]
    """What the trainee says of a pack."""
    values = -1 - pack.labels.float() / 100
    return values.masked_fill(pack.labels == IGNORED, 0.0)


def copied(pack: PackTensors) -> PackTensors:
    """A pack that stays as it is now."""
    return replace(
        pack,
        input_ids=pack.input_ids.clone(),
        labels=pack.labels.clone(),
        columns={name: column.clone() for name, column in pack.columns.items()},
    )


class Ranks:
    """Bodies of ranks, each in a thread of its own."""

    def __init__(
        self,
        clients: Sequence[Any],
        loss: LossConfig | None = RECOMPUTE,
        *,
        topology: Topology | None = None,
        stages: Any = STAGES,
        **options: Any,
    ) -> None:
        size = len(clients)
        meeting = Meeting(size)
        self._threads = ThreadPoolExecutor(size)
        self.trainees: list[ScriptedTrainee] = []
        self.bodies: list[RankBody] = []
        its = settings(size, **options)
        for rank, client in enumerate(clients):
            peers = ThreadPeers(meeting, rank) if size > 1 else Peers.alone()
            trainee = ScriptedTrainee(its, peers)
            self.trainees.append(trainee)
            self.bodies.append(
                RankBody(its, peers, client, topology=topology, stages=stages, trainee=trainee)
            )
            if loss is not None:
                phase = Phase(name="one", loss=loss, optimizer=OptimizerSettings(lr=1e-3))
                self.bodies[-1].begin_phase(phase)

    def fit(self, *works: RankWork) -> list[RankReport | Exception]:
        """What comes of each rank; never longer than `LIMIT_S`."""
        futures: list[Future[RankReport]] = [
            self._threads.submit(body.fit, work)
            for body, work in zip(self.bodies, works, strict=True)
        ]
        return [_came_of(future) for future in futures]

    def close(self) -> None:
        for body in self.bodies:
            body.close()
        self._threads.shutdown()


def _came_of(future: Future[RankReport]) -> RankReport | Exception:
    error = future.exception(LIMIT_S + 10)
    if error is None:
        return future.result()
    assert isinstance(error, Exception)
    return error
