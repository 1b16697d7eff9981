"""What ranks of `test_two_ranks.py` do, each in a process of its own: three of them, then two.

Every rank leaves `rank-N.json`, what it has seen, in the folder; tensors lie beside it.
"""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tests.trainer.trainees import ADAPTER, PLAIN, TIED, pack, phase, settings, step_of
from trainer.materialize import PackTensors
from trainer.ranks.collectives import Peers
from trainer.ranks.files import write_tensors
from trainer.ranks.trainee import Trainee
from trainer.ranks.types import ModelSettings
from trainer.ranks.weights import full_weights

WAIT_S = 120.0
STEPS = 3
MODES = ("replicated", "fsdp")


def part(seed: int, rank: int, world: int) -> list[PackTensors]:
    """EX-6.13 over ranks: one pack each on three; on two, 7 and 0 tokens, and 3 and 0."""
    seven, three, none = step_of(seed)
    if world == 3:
        return [[seven], [three], [none]][rank]
    return [[seven, none], [three, pack([])]][rank]


Tokens: TypeAlias = Callable[[list[PackTensors]], int]


class Run:
    """The trainees of one rank in one group."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        self.folder = folder
        self.peers = peers
        self.seen: dict[str, Any] = {}

    def trainee(self, mode: str, **change: Any) -> Trainee:
        trainee = Trainee(
            settings(world_size=self.peers.world_size, parallel=mode, **change), self.peers
        )
        trainee.begin_phase(phase())
        return trainee

    def trained(
        self,
        trainee: Trainee,
        *seeds: int,
        tokens: Callable[[list[PackTensors]], int] | None = None,
    ) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        for seed in seeds:
            packs = part(seed, self.peers.rank, self.peers.world_size)
            given = 10 if tokens is None else tokens(packs)
            found.append(trainee.train_step(iter(packs), global_tokens=given))
        return found

    def keep(self, name: str, trainee: Trainee) -> None:
        """All weights as they would be published."""
        weights = full_weights(trainee._model, trainee.settings.model, self.peers)
        if self.peers.rank == 0:
            write_tensors(self.folder / f"{name}.safetensors", weights)

    def raised(self, act: Callable[[], Any]) -> str:
        """What it raises, and as what."""
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


def three(run: Run) -> None:
    """EX-6.13 as it stands."""
    for mode in MODES:
        trainee = run.trainee(mode)
        run.seen[f"three-{mode}"] = run.trained(trainee, *range(STEPS))
        run.keep(f"three-{mode}", trainee)


def two(run: Run) -> None:
    rank = run.peers.rank

    def mean_of_ranks(packs: list[PackTensors]) -> int:
        """Every rank weighs its own tokens equally, and ranks are averaged."""
        return max(sum(one.num_supervised for one in packs), 1) * run.peers.world_size

    for mode in MODES:
        trainee = run.trainee(mode, reference="frozen")
        run.seen[f"two-{mode}"] = run.trained(trainee, *range(STEPS))
        run.keep(f"two-{mode}", trainee)
        trainee.save(run.folder / f"state-{mode}")
        run.seen[f"more-{mode}"] = run.trained(trainee, STEPS, STEPS + 1)
        run.keep(f"more-{mode}", trainee)
        again = run.trainee(mode, seed=77)
        again.load(run.folder / f"state-{mode}")
        run.seen[f"again-{mode}"] = run.trained(again, STEPS, STEPS + 1)
        run.keep(f"again-{mode}", again)
        again.export(run.folder / f"export-{mode}")
        some = pack([(3, 5)])
        for name in ("logprobs", "reference_logprobs"):
            run.seen[f"{name}-{mode}"] = getattr(trainee, name)(some)[0].tolist()

        mutant = run.trainee(mode)
        run.trained(mutant, *range(STEPS), tokens=mean_of_ranks)
        run.keep(f"mutant-{mode}", mutant)

        saving = ModelSettings(config=PLAIN, gradient_checkpointing=True)
        plain = run.trainee(mode, model=saving)
        run.seen[f"plain-{mode}"] = run.trained(plain, 0)
        run.keep(f"plain-{mode}", plain)

        adapted = run.trainee(
            mode, model=ModelSettings(config=TIED, adapter=ADAPTER), reference="adapter_off"
        )
        run.seen[f"adapter-{mode}"] = run.trained(adapted, 0, 1)
        run.seen[f"off-{mode}"] = adapted.reference_logprobs(some)[0].tolist()
        run.keep(f"adapter-{mode}", adapted)

        # -- errors of one rank
        trainee = run.trainee(mode)
        run.seen[f"no client-{mode}"] = run.raised(lambda t=trainee: t.publish_weights(None, 1))
        run.seen[f"no state-{mode}"] = run.raised(lambda t=trainee: t.load(run.folder / "none"))
        run.seen[f"usable-{mode}"] = run.trained(trainee, 0)
    run.seen["starts"] = starts(run)
    errors(run, rank)


def starts(run: Run) -> list[float]:
    """Seeds differ by a mistake: all begin with what rank 0 has."""
    given = settings(world_size=2, seed=run.peers.rank)
    return Trainee(given, run.peers).logprobs(pack([(3, 5)]))[0].tolist()


def errors(run: Run, rank: int) -> None:
    peers = run.peers
    said: dict[str, str] = {}
    said["one"] = run.raised(lambda: peers.agree(KeyError("row 7 wént") if rank else None))
    said["both"] = run.raised(lambda: peers.agree(ValueError(f"mine is {rank}")))
    said["none"] = run.raised(lambda: peers.agree())
    said["sum"] = str(peers.all_reduce_sum(torch.tensor([rank + 1.0])).tolist())
    said["max"] = str(peers.all_reduce_max(torch.tensor([rank])).tolist())
    said["min"] = str(peers.all_reduce_min(torch.tensor([rank])).tolist())
    said["gather"] = str([int(t) for t in peers.gather(torch.tensor([rank * 5]))])
    # One leaves; the other is in a collective, and learns of it long before its timeout.
    began = time.monotonic()
    if rank == 0:
        said["left"] = run.raised(lambda: peers.agree())
    peers.close()
    run.seen["waited"] = time.monotonic() - began
    run.seen["errors"] = said


def work(rank: int, folder: str) -> None:
    """The whole life of a rank."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    root = Path(folder)
    seen: dict[str, Any] = {}
    try:
        for world, act in ((3, three), (2, two)):
            if rank < world:
                meeting = f"file://{root}/meet-{world}"
                peers = Peers.join(rank, world, meeting, timeout_s=WAIT_S)
                run = Run(root, peers)
                try:
                    act(run)
                finally:
                    seen |= run.seen
                    peers.close()
    except BaseException:
        seen["failed"] = traceback.format_exc()
    (root / f"rank-{rank}.json").write_text(json.dumps(seen))
