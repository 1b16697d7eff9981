"""A training rank that is killed in the middle of a batch: the driver hears which, and nobody
stays behind in a collective."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from dataplane import Client, FieldNotFound
from tests.contract.planes import ray_hosted
from tests.deadline import until
from tests.faults.stalling import stall
from tests.trainer.ranks import settings
from tests.trainer.reading import put, rows, work_of
from trainer.loss import LossConfig
from trainer.ranks.group import RankGroup
from trainer.ranks.outcome import RankLost
from trainer.ranks.ray import RayRank
from trainer.ranks.stages import STAGES, Stage
from trainer.ranks.types import ModelSettings, OptimizerSettings, Phase, PlaneAddress

pytestmark = [pytest.mark.faults, pytest.mark.ray]

MODEL = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
PHASE = Phase(
    name="one",
    loss=LossConfig(clip_low=0.2, clip_high=0.2),
    optimizer=OptimizerSettings(lr=1e-3),
)


@pytest.mark.timeout(200)
async def test_a_rank_killed_in_the_middle_of_a_batch_is_named_and_the_others_end(
    ray_cluster: list[str], plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    """On a plane that Ray hosts. Rank 0 is killed, which holds the store where ranks met."""
    with ray_hosted(f"ranks-{os.getpid()}", plane_settings) as plane:
        client = plane.client
        samples = rows(4, uid="fine")
        stalled = rows(1, uid="stall")
        put(client, [*samples, *stalled])
        its = settings(
            2,
            plane=PlaneAddress(name=plane.name),
            model=ModelSettings(config=MODEL, dtype="float32"),
            collective_timeout_s=150.0,
        )
        stages = (*STAGES, Stage("values", partial(stall, str(tmp_path))))
        group = await RankGroup.start(its, kind="ray", num_cpus=0.5, stages=stages)
        try:
            pids = [await cast("RayRank", rank).pid() for rank in group.ranks]
            await group.begin_phase(PHASE)
            works = [work_of(samples[i : i + 2], [[[0], [1]]], batch=samples) for i in (0, 2)]
            assert [len(report.steps) for report in await group.fit(works)] == [1, 1]

            fresh = rows(2, uid="fresh", seed=1)
            put(client, fresh)
            works = [
                work_of(stalled, [[[0], []]], batch=samples),
                work_of(fresh, [[[0], [1]]], batch=samples),
            ]
            killed_at = 0.0

            async def kill() -> None:
                nonlocal killed_at
                await until((tmp_path / "0").exists, "rank 0 is in its stage")
                # Rank 1 is through with its own, and waits for rank 0 from here on.
                await until(lambda: _written(client, fresh[1].row.key), "rank 1 is through")
                os.kill(pids[0], signal.SIGKILL)
                killed_at = time.monotonic()

            fitted, _ = await _both(group.fit(works), kill())
            heard_s = time.monotonic() - killed_at
            assert isinstance(fitted, RankLost)
            assert fitted.rank == 0
            assert heard_s < 30.0
            print(f"told {heard_s:.2f} s after the kill")
            await until(lambda: not Path(f"/proc/{pids[1]}").exists(), "rank 1 is ended too")
            with pytest.raises(RuntimeError, match="ranks were ended: rank 0 is gone"):
                await group.fit(works)
        finally:
            await group.close()


async def _both(*work: Any) -> list[Any]:
    found = await asyncio.gather(*work, return_exceptions=True)
    assert found[1] is None, found[1]
    return found


def _written(client: Client, key: str) -> bool:
    try:
        client.kv_batch_get([key], "train", ["old_logprobs"])
    except FieldNotFound:
        return False
    return True
