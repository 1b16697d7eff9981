"""What one training rank does, whoever started it: it carries out its part of a batch.

Owns the order of stages within a batch. A batch that is looked at before it is trained (log-probs,
importance correction) is fetched once: its packs stay in host memory until it has been trained, in
buffers that the next batch takes over, so that the plane is read once and rows that are cleared
meanwhile do no harm. A batch that is only trained is never there whole: a few packs at a time.

Errors: what fails on one rank fails on all, and the next batch can come. A batch that is looked at
fails before its first optimizer step or not for want of the plane; of one that is only trained a
row may be gone between two steps. Of an error inside a collective the others learn nothing: whoever
started the ranks ends them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dataplane import Client
from trainer.loss.config import LossConfig
from trainer.materialize import PackSpec, PackTensors
from trainer.plan import Topology, agreed_cap
from trainer.ranks.collectives import Peers
from trainer.ranks.copying import CopyLane
from trainer.ranks.fetching import KeptPacks, PackFeed, PackReader, Shelf
from trainer.ranks.observations import Observations
from trainer.ranks.stages import STAGES, Stage
from trainer.ranks.together import AgreedPacks, Together
from trainer.ranks.trainee import Trainee
from trainer.ranks.types import Phase, RankReport, RankSettings, RankWork
from trainer.ranks.waiting import PlaneTime
from trainer.ranks.write_back import WriteBack

_log = logging.getLogger(__name__)


class RankBody:
    """One rank of a group. All ranks call the same methods in the same order."""

    def __init__(
        self,
        settings: RankSettings,
        peers: Peers,
        client: Client,
        *,
        topology: Topology | None = None,
        stages: Sequence[Stage] = STAGES,
        trainee: Trainee | None = None,
    ) -> None:
        """`topology` says which ranks share a part of a batch; without it each has its own.
        `peers`, `client` and `trainee` are closed with the body."""
        if settings.prefetch < 0:
            raise ValueError(f"prefetch is a number from 0 on, not {settings.prefetch}")
        self._settings = settings
        self._peers = peers
        self._client = client
        self._stages = tuple(stages)
        self.together = Together(peers)
        self._trainee = trainee or Trainee(settings, peers)
        topology = topology or Topology(world_size=peers.world_size)
        self._dp_rank = topology.dp_rank(peers.rank)
        self._replicas = topology.replica_size
        self._writes = settings.write_back and topology.ranks_of(self._dp_rank)[0] == peers.rank
        on_gpu = peers.device.type == "cuda"
        self._lane = CopyLane(peers.device) if on_gpu else None
        self._shelf = Shelf(pin_memory=on_gpu)
        self._writers = ThreadPoolExecutor(1, "write-back")

    def begin_phase(self, phase: Phase) -> None:
        """Train by this loss from now on, with a fresh optimizer and schedule."""
        self._trainee.begin_phase(phase)

    def fit(self, work: RankWork) -> RankReport:
        """Train this rank's part of a batch; returns once all that was written is acknowledged.

        Raises:
            ValueError: the work is for other ranks than these, or rows are not what tags say.
            DataplaneError: of a get or a put, such as KeyNotFound for a row that was cleared.
            PeerFailed: any of that on another rank.
        """
        with self._client.stage("update_actor"):
            return self._fit(work)

    def _fit(self, work: RankWork) -> RankReport:
        time = PlaneTime()
        with self.together.step():
            loss = self._loss()
            spec = self._spec(work)
        stages = [stage for stage in self._stages if stage.due(loss)]
        observed = Observations(loss, work.traits)
        reader = PackReader(self._client, work, spec, time, self._chance(work))
        feed = PackFeed(
            reader, self._shelf,
            ahead=self._settings.prefetch, keep=bool(stages), lane=self._lane,
        )  # fmt: skip
        writes = WriteBack(self._writers, self._client, work.partition_id, time, self._lane)
        steps: list[dict[str, float]] = []
        tokens: Sequence[int] = [count * self._replicas for count in work.global_tokens]
        try:
            if stages:
                packs = self._look(work, feed, stages, loss, observed, writes)
                if loss.importance is not None:
                    tokens = self._count(work, packs)
                kept = KeptPacks(packs, ahead=self._settings.prefetch, lane=self._lane)
                next_pack = kept.next
            else:
                next_pack = _seen(feed, observed)
            for at, step in enumerate(work.part.packs):
                # Before weights have moved for the first time, all that is written is there.
                last = writes.wait if at == 0 else None
                agreed = self._agreed(next_pack, len(step), last)
                uids = (work.members[place].uid for pack in step for place in pack)
                of_step = self._client.span("optimizer_step", work.partition_id, uids=uids)
                with agreed.consumed(), of_step:
                    steps.append(self._trainee.train_step(agreed, global_tokens=tokens[at]))
            metrics = observed.reduced(self._peers)
        finally:
            writes.close()
            feed.close()
        metrics["packing_conversion_time_s"] = reader.convert_s
        metrics["packing_pack_time_s"] = reader.pack_s
        return RankReport(
            rank=self._peers.rank, steps=steps, metrics=metrics, plane_time_s=time.seconds()
        )

    def publish_weights(self, version: int, *, replace: bool = False) -> int:
        """Write the weights to the plane as this version; bytes written."""
        client = self._client if self._peers.rank == 0 else None
        return self._trainee.publish_weights(client, version, replace=replace)

    def save(self, folder: Path | str, *, optimizer: bool = True) -> None:
        """Write what `load` goes on from."""
        self._trainee.save(Path(folder), optimizer=optimizer)

    def load(self, folder: Path | str) -> None:
        """Go on from what was saved, in the phase of the same name, which must have been begun."""
        self._trainee.load(Path(folder))

    def export(self, folder: Path | str) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads."""
        self._trainee.export(Path(folder))

    def offload(self) -> None:
        """Leave the GPU to others; does nothing on a CPU."""
        self._trainee.offload()

    def onload(self) -> None:
        """Come back to the GPU."""
        self._trainee.onload()

    def close(self) -> None:
        """Leave the peers and the plane."""
        self._writers.shutdown()
        self._trainee.close()
        self._peers.close()
        self._client.close()

    # -- before a batch is trained -----------------------------------------------------------

    def _loss(self) -> LossConfig:
        phase = self._trainee.phase
        if phase is None:
            raise ValueError("no phase was begun: begin_phase says what ranks train by")
        return phase.loss

    def _spec(self, work: RankWork) -> PackSpec:
        """What packs of this work are like. ValueError if it is not for this rank."""
        settings = self._settings
        cap = agreed_cap(work.cap, settings.cap)
        steps = work.part.check_steps(settings.optimizer_steps)
        if steps < settings.optimizer_steps:
            _log.info(
                "step %d: %d optimizer steps of %d, as its plan has them",
                work.train_step, steps, settings.optimizer_steps,
            )  # fmt: skip
        sizes = {"members": len(work.members), "advantages": len(work.advantages)}
        due = len(work.part.indices)
        wrong = {name: size for name, size in sizes.items() if size != due}
        if wrong:
            raise ValueError(f"the plan has {due} rows for this rank, and the work {wrong}")
        if len(work.global_tokens) != steps:
            raise ValueError(
                f"global_tokens has {len(work.global_tokens)} entries for {steps} optimizer steps"
            )
        return PackSpec(
            cap=cap, traits=work.traits, teacher=work.teacher, experts=work.experts,
            fresh=work.fresh,
            multi_modal=any(m.has_multi_modal_inputs or m.shared for m in work.members),
        )  # fmt: skip

    def _chance(self, work: RankWork) -> torch.Generator:
        """Draws the experts of padding: others in each batch and part, the same ones in replicas
        and when a batch is trained again."""
        words = (self._settings.seed, work.train_step, self._dp_rank)
        (seed,) = np.random.SeedSequence(words).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(seed) >> 1)  # it takes 63 bits

    def _look(
        self,
        work: RankWork,
        feed: PackFeed,
        stages: Sequence[Stage],
        loss: LossConfig,
        observed: Observations,
        writes: WriteBack,
    ) -> list[PackTensors]:
        """Run the stages over all packs, which are in host memory then. Nothing is trained yet."""
        kept: list[PackTensors] = []
        hosts: list[PackTensors] = []

        def next_pack() -> PackTensors:
            fed = feed.next_fed()
            hosts.append(fed.host)
            return feed.received(fed)

        packs = self._agreed(next_pack, sum(map(len, work.part.packs)))
        with packs.consumed():
            for pack in packs:
                made = {stage.column: stage.compute(pack, self._trainee) for stage in stages}
                if self._writes:
                    writes.put(hosts[-1], made)
                recomputed = made.get("old_logprobs") if loss.needs_forward else None
                done = observed.see(pack.with_columns(**made), recomputed)
                kept.append(_in_host_memory(hosts[-1], pack, done))
        return kept

    def _count(self, work: RankWork, packs: Sequence[PackTensors]) -> list[int]:
        """Supervised tokens over all ranks, now that correction has cleared labels.
        # [optimizer steps]"""
        left = iter(packs)
        mine = [sum(next(left).num_supervised for _ in step) for step in work.part.packs]
        counted = self._peers.all_reduce_sum(torch.tensor(mine, dtype=torch.int64))
        return [int(count) for count in counted]

    def _agreed(
        self,
        next_pack: Callable[[], PackTensors],
        count: int,
        last: Callable[[], None] | None = None,
    ) -> AgreedPacks:
        # Sharded weights are gathered within every forward pass, whole ones never.
        each = self._settings.parallel == "fsdp"
        return AgreedPacks(self.together, next_pack, count, each=each, last=last)


def _seen(feed: PackFeed, observed: Observations) -> Callable[[], PackTensors]:
    """Packs that are looked at as they pass."""
    return lambda: observed.see(feed.next())


def _in_host_memory(host: PackTensors, pack: PackTensors, done: PackTensors) -> PackTensors:
    """A pack as it was read, and beside it what stages made of it on its device: a few numbers a
    token, which stay there."""
    made = {n: column for n, column in done.columns.items() if column is not pack.columns.get(n)}
    labels = host.labels if done.labels is pack.labels else done.labels
    return replace(host, labels=labels, columns={**host.columns, **made})
